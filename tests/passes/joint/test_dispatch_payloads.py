"""Rows that are exchanged as payloads have the bytes of those that are quantized where they arrive; or a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.passes.graph.considered import SentQuantized, considered
from fxquant.passes.joint.dispatch_payloads import dispatch_payloads
from fxquant.passes.settings import Settings

_ops = torch.ops.fxquant
ROWS, WIDTH = 64, 96
MXFP8, ROW, BLOCK, NVFP4 = "mxfp8_e4m3", "per_row_e4m3", "block_1x128_e4m3", "nvfp4(row_scaled)"


def _put(x: Tensor, places: Tensor) -> Tensor:
    return x.new_zeros(ROWS + 2, WIDTH).index_put((places,), x)


def _behind(x: Tensor, places: Tensor) -> Tensor:
    first, second = x.split([24, ROWS - 24])
    return torch.cat((second, x.new_ones(3, WIDTH), first))


MOVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda x, places: x,
    "by number": lambda x, places: x[places, :],
    "selected": lambda x, places: x.index_select(0, places)[:40],
    "a row of zeros": lambda x, places: torch.cat((x, x.new_zeros(1, WIDTH)))[places + 1],
    "padded": lambda x, places: F.pad(x, (0, 0, 0, 5))[places + 2],
    "put": _put,
    "in two parts": _behind,
    "by rank": lambda x, places: x.view(2, 4, -1, WIDTH).permute(1, 0, 2, 3).reshape(-1, WIDTH),
    "cast": lambda x, places: x.bfloat16()[places],
    "columns": lambda x, places: x.view(-1, WIDTH // 2, 2).transpose(1, 2).reshape(-1, WIDTH),
}


def exchange_of(move: str, specs: list[str], columns: str, dtype: torch.dtype, on: bool) -> Any:
    """How many exchanges are of payloads, whether all bytes are the same, the dtypes that travel, and what is told."""

    def run(x: Tensor, places: Tensor) -> list[Tensor]:
        rows = MOVES[move](all_to_all_single(x, counts, counts, dist.group.WORLD), places)
        ends = torch.tensor([7, 7, 39], dtype=torch.int32)
        parts = [part for spec in specs for part in _ops.split_quantize(rows, ends, spec, "rowwise")]
        if columns == "sum":
            return [*parts, rows.sum(0)]
        if columns == "dequantized":
            row = _ops.split_quantize(rows, ends, specs[0], "rowwise")
            rows = _ops.split_dequantize(row, ends, specs[0], WIDTH, rows.dtype)
        return [*parts, *_ops.split_quantize(rows, ends, MXFP8, "columnwise")] if columns else parts

    counts = [40, 24] if dist.get_rank() == 0 else [24, 40]
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
    places = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    gm = make_fx(run, tracing_mode="fake")(x, places)
    before = gm(x, places)
    count = dispatch_payloads(gm.graph, Settings(quantized_dispatch=on))
    told = considered(gm.graph)
    again = dispatch_payloads(gm.graph, Settings(quantized_dispatch=on))
    gm.recompile()
    same = [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, gm(x, places), strict=True)]
    target = torch.ops._c10d_functional.all_to_all_single.default
    sent = [str(node.meta["val"].dtype) for node in gm.graph.find_nodes(op="call_function", target=target)]
    reasons = [None if isinstance(outcome, SentQuantized) else outcome.reason for outcome in told]
    return count, again, all(same), sent, reasons


@pytest.mark.parametrize("spec", [MXFP8, ROW, BLOCK, NVFP4])
def test_formats_of_rows(spec: str, ranks: Ranks) -> None:
    for count, again, same, sent, reasons in ranks.run(exchange_of, "by number", [spec], "", torch.bfloat16, True):
        assert (count, again, same, reasons) == (1, 0, True, [None])
        assert len(sent) == (3 if spec == NVFP4 else 2) and "torch.bfloat16" not in sent


@pytest.mark.parametrize("move", [name for name in MOVES if name != "columns"])
def test_rows_that_are_moved(move: str, ranks: Ranks) -> None:
    for result in ranks.run(exchange_of, move, [MXFP8, MXFP8], "dequantized", torch.float32, True):
        assert result == (1, 0, True, ["torch.uint8"] * 2, [None])


REASONS: dict[str, tuple[str, list[str], str]] = {
    "sum reads what is exchanged besides": ("none", [MXFP8], "sum"),
    "view reads what is exchanged besides": ("columns", [MXFP8], ""),
    f"products take it in 2 formats: {MXFP8}, {ROW}": ("none", [MXFP8, ROW], ""),
    "no product takes it quantized by rows": ("none", [], "original"),
    "nvfp4 has a scale for several rows, which come from all ranks": ("none", ["nvfp4"], ""),
    "block_128x128_e4m3 has a scale for several rows, which come from all ranks": ("none", ["block_128x128_e4m3"], ""),
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_not(reason: str, ranks: Ranks) -> None:
    move, specs, columns = REASONS[reason]
    for result in ranks.run(exchange_of, move, specs, columns, torch.bfloat16, True):
        assert result == (0, 0, True, ["torch.bfloat16"], [reason])


def test_nothing_is_considered_unless_asked_for(ranks: Ranks) -> None:
    for result in ranks.run(exchange_of, "none", ["nvfp4"], "", torch.bfloat16, False):
        assert result == (0, 0, True, ["torch.bfloat16"], [])


def linear() -> bool:
    """One expert of a rank is a layer of its own."""

    def run(x: Tensor, source: str) -> list[Tensor]:
        rows = all_to_all_single(x, [32, 32], [32, 32], dist.group.WORLD)
        row = _ops.quantize(rows, ROW, "rowwise")
        if source == "rows":
            rows = _ops.dequantize(row, ROW, "rowwise", [ROWS, WIDTH], rows.dtype)
        return [*row, *_ops.quantize(rows, ROW, "columnwise")]

    x = torch.randn(ROWS, WIDTH)
    gm = make_fx(lambda x: run(x, "tensor"), tracing_mode="fake")(x)
    assert dispatch_payloads(gm.graph, Settings(quantized_dispatch=True)) == 1
    gm.recompile()
    return all(torch.equal(a.float(), b.float()) for a, b in zip(run(x, "rows"), gm(x), strict=True))


def test_columns_of_a_linear_are_quantized_from_what_arrives(ranks: Ranks) -> None:
    assert ranks.run(linear) == [True, True]
