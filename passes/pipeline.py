"""The passes, in the order they run. Analysis writes facts, rewriting reads them.

On the captured graph, before autograd: `Rewriter`. On the joint graph: `Partition`. On the forward and the backward
graph, after partitioning: `LOWER`.
On exported programs, by `fxquant.program`: describe, `Rewriter`, open_calls, fold, calibrate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

import fxquant
from fxquant.compat.patches import QuantizedGraphPass
from fxquant.compat.private import CustomGraphPass, get_hash_for_files, tag_activation_checkpoint
from fxquant.decisions import Decision
from fxquant.kernels.linear import timing as gemm_timing
from fxquant.passes.find.facts import Match, decisions_of, quantized
from fxquant.passes.find.mha import open_modules
from fxquant.passes.find.walk import find_matmuls
from fxquant.passes.graph.log import run_pass
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.insert.bind_state import bind_state, stateful_graphs
from fxquant.passes.insert.cache_weights import cache_weights
from fxquant.passes.insert.linear import insert
from fxquant.passes.joint.partition import SAVE, Partition
from fxquant.passes.joint.reuse import share_quantized
from fxquant.passes.lower.amax_before_views import measure_unviewed
from fxquant.passes.lower.directions import merge
from fxquant.passes.lower.epilogues import fuse_epilogues
from fxquant.passes.lower.lower import lower
from fxquant.passes.lower.materialize import write_once
from fxquant.passes.lower.producers import fuse_producers
from fxquant.passes.lower.state.advance import advance_state
from fxquant.passes.lower.state.batch_amaxes import gather_records
from fxquant.passes.lower.state.record_in_kernel import record_in_place
from fxquant.passes.lower.state.split_scales import part_scales
from fxquant.passes.plan.attention import SLOTS
from fxquant.passes.plan.layers import name_layers
from fxquant.passes.plan.resolve import resolve
from fxquant.passes.plan.reuse import predict_reuse
from fxquant.passes.plan.weigh import weigh
from fxquant.quantizers import IdentityQuantizer
from fxquant.recipes import Recipe
from fxquant.roles import QuantizerRole
from fxquant.state import Slots

LOWER: tuple[tuple[str, Callable[[fx.Graph], int]], ...] = (
    ("gather_records", gather_records),
    ("advance_state", advance_state),
    ("part_scales", part_scales),
    ("share_quantized", share_quantized),
    ("merge", merge),
    ("fuse_producers", fuse_producers),
    ("fuse_epilogues", fuse_epilogues),
    ("measure_unviewed", measure_unviewed),
    ("record_in_place", record_in_place),
    ("lower", lower),
    ("write_once", write_once),
)
"""Passes over ATen graphs, in order."""


class Rewriter:
    """Finds, names layers, opens modules, resolves, weighs, inserts, predicts reuse: over a graph and its bodies.

    With `stored_weights` quantized weights are kept, and not cast in each call.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        allow_float64: bool = False,
        names: Mapping[str, str] | None = None,
        stored_weights: bool = False,
    ) -> None:
        self.recipe = recipe
        self.allow_float64 = allow_float64
        self.names = names or {}
        self.stored_weights = stored_weights

    def __call__(
        self, gm: fx.GraphModule, *, autocast: Mapping[str, torch.dtype] | None, first_site: int = 0
    ) -> tuple[list[Decision], list[QuantizerRole], Slots]:
        """Rewrites `gm` in place; returns every decision, every role, and the slots of its state.

        `autocast` has the dtypes of regions entered around the graph, by device type.
        """
        matches = name_layers(find_matmuls(gm, autocast=autocast), self.names)
        if self.quantizes_inside(matches) and open_modules(matches):
            matches = name_layers(find_matmuls(gm, autocast=autocast), self.names)
        reached, slots = stateful_graphs(gm), Slots()
        matches = [replace(match, takes_state=match.node.graph in reached) for match in matches]
        matches, roles = resolve(
            matches, self.recipe, slots, allow_float64=self.allow_float64, first_site=first_site,
            stored_weights=self.stored_weights,
        )  # fmt: skip
        if self.recipe.only_profitable:
            matches = weigh(matches)
            if not any(quantized(match) for match in matches):
                slots = Slots()
        insert(matches)
        graphs = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
        for module in graphs:
            module.recompile()
        return predict_reuse(graphs, decisions_of(matches)), roles, slots

    def quantizes_inside(self, matches: Sequence[Match]) -> bool:
        """Whether the recipe would quantize a linear, or the attention, inside a node that can be opened."""
        closed = [match.name for match in matches if match.can_open]
        roles = [
            QuantizerRole("linear", kind, f"{name}.{part}".strip("."))
            for name in closed
            for part in ("in_proj", "out_proj")
            for kind in ("input", "weight", "grad_output")
        ]
        roles += [QuantizerRole("dpa", slot, name) for name in closed for slot in SLOTS]
        return any(self.recipe.quantizer(role) != IdentityQuantizer() for role in roles)


class Lowering(QuantizedGraphPass):
    """`LOWER` as one Inductor pass, and behind it the pass that the user had in the same place.

    `gemm`, one of `choice.GEMM`, says how it is decided between cuBLAS and Triton.
    """

    def __init__(self, fingerprint: str, after: Any = None, *, portable: bool = False, gemm: str = "auto") -> None:
        self.fingerprint = fingerprint
        self.portable = portable
        self.gemm = gemm
        self.after: Sequence[Any] = [] if after is None else after if isinstance(after, (list, tuple)) else [after]

    def __call__(self, graph: fx.Graph) -> None:
        for name, run in LOWER:
            if self.portable and run in (advance_state, fuse_producers, fuse_epilogues, record_in_place):
                continue  # they serve training, or need fxquant at run time
            if self.portable and run is lower:
                run = functools.partial(lower, portable=True, kernels=True)
            elif run is fuse_epilogues:
                run = functools.partial(fuse_epilogues, gemm=self.gemm)
            run_pass(name, run, graph)
        for other in self.after:
            other(graph)

    def uuid(self) -> Any:
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.after]
        if None in others:
            return None
        known = gemm_timing.all_remembered() if self.gemm in ("auto", "autotune") else ""
        return get_hash_for_files(_sources(), repr((self.fingerprint, self.portable, self.gemm, known, others)))

    @staticmethod
    def merge(graph: fx.Graph) -> None:
        """The part of lowering that keeps the meaning visible."""
        run_pass("share_quantized", share_quantized, graph)
        run_pass("merge", merge, graph)


def quantizes(gm: fx.GraphModule, *, recomputed: bool = False) -> bool:
    """Whether a rewritten graph has a quantized matmul; with `recomputed`, one inside an activation checkpoint."""
    if not recomputed and any(is_fxquant(node) for node in gm.graph.nodes):
        return True
    for node in gm.graph.nodes:
        for attribute in (n for n in node.all_input_nodes if n.op == "get_attr"):
            body = getattr(gm, str(attribute.target), None)
            again = recomputed and node.target is not tag_activation_checkpoint
            if isinstance(body, fx.GraphModule) and quantizes(body, recomputed=again):
                return True
    return False


def _sources() -> tuple[str, ...]:
    """The files that decide what a lowered graph does."""
    folders = (Path(__file__).parent, Path(fxquant.kernels.__file__).parent, Path(fxquant.__file__).parent)
    return tuple(sorted(str(path) for folder in folders for path in folder.rglob("*.py")))


__all__ = ["LOWER", "SAVE", "Lowering", "Partition", "Rewriter", "bind_state", "cache_weights", "quantizes"]
