"""Attentions that are found in a model and written as one operator that quantizes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rewriting import Rewrite, randn
from torch import Tensor, fx

from fxquant.formats import AttentionSpec
from fxquant.passes.find.facts import Match
from fxquant.passes.find.mha import open_modules
from fxquant.passes.find.walk import find_matmuls
from fxquant.passes.graph.builder import Builder


@dataclass
class Attends(Rewrite):
    """Writes every attention as one operator that quantizes nothing."""

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        matches = find_matmuls(gm)
        if self.open_attention and open_modules(matches):
            matches = find_matmuls(gm)
        self.found += matches
        for match in {m.attention.node: m for m in matches if m.attention is not None}.values():
            write(match)
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(gm)
        return gm.forward

    def steps(self) -> str:
        (attention,) = {m.attention.node: m.attention for m in self.found if m.attention is not None}.values()
        return " ".join(f"{s.kind}{'' if s.extra < 0 else s.extra}" for s in attention.steps)


def write(match: Match) -> None:
    builder, attention = Builder(match.node), match.attention
    assert attention is not None
    spec = AttentionSpec(steps=attention.steps, dropout=attention.dropout)
    result = attention.emit(
        builder,
        lambda q, k, v, extras: builder.call(torch.ops.fxquant.attention.default, q, k, v, list(extras), str(spec)),
    )
    match.node.replace_all_uses_with(result)
    match.node.graph.erase_node(match.node)
    for node in reversed(list(result.graph.nodes)):
        if node in attention.inside:
            result.graph.erase_node(node)


def made(shapes: Sequence[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    return [shape if isinstance(shape, Tensor) else randn(*shape) for shape in shapes]
