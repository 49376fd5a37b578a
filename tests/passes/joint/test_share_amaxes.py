"""Amaxes over several ranks are taken and reduced once for a tensor, whatever shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from helpers import listing
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.compat.private import largest_over_ranks
from fxquant.passes.joint.share_amaxes import drop_unused, share_amaxes
from fxquant.passes.settings import Settings

_ops = torch.ops.fxquant


@pytest.fixture
def group(tmp_path: Path) -> Iterator[str]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_before_and_after(group: str) -> None:
    def run(x: Tensor) -> list[Tensor]:
        parts = []
        for view in (x, x.view(8, 8), x.t()):
            scale = _ops.scale_from_amax(largest_over_ranks(_ops.amax(view), group), "per_tensor_e4m3")
            parts.append(_ops.quantize(view, "per_tensor_e4m3", "rowwise", scale)[0])
        return [*parts, _ops.amax(x)]

    gm = make_fx(run, tracing_mode="fake")(torch.randn(4, 16))
    assert share_amaxes(gm.graph, Settings()) == 4
    text = listing(gm.graph).replace(f", {group})", ", all)")
    assert_expected_inline(
        "\n".join(line for line in text.split("\n") if "getitem" not in line),
        """\
%0 = input [4, 16]
%1 = view(%0, [8, 8])
%2 = t(%0)
%3 = amax(%0)
%4 = _c10d_functional::all_reduce(%3, max, all)
%5 = _c10d_functional::wait_tensor(%4)
%6 = scale_from_amax(%5, per_tensor_e4m3)
%7 = quantize(%0, per_tensor_e4m3, rowwise, %6)
%10 = quantize(%1, per_tensor_e4m3, rowwise, %6)
%13 = quantize(%2, per_tensor_e4m3, rowwise, %6)
%16 = amax(%0)
return [%8, %11, %14, %16]""",
    )
    assert share_amaxes(gm.graph, Settings()) == 0


def test_what_nothing_reads_goes_away(group: str) -> None:
    def run(x: Tensor) -> Tensor:
        largest_over_ranks(_ops.amax(x), group)
        return x + 1

    gm = make_fx(run, tracing_mode="fake")(torch.randn(4, 16))
    assert drop_unused(gm.graph) == 2
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_function", "output"]
