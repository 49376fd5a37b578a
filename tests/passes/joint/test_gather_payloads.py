"""Payloads that are gathered have the bytes of what is quantized after a gather; else there is a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import gathered
from ranks import Ranks
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.passes.graph.considered import not_fused
from fxquant.passes.joint.gather_payloads import gather_payloads
from fxquant.passes.settings import Settings

_ops = torch.ops.fxquant
MXFP8, TENSOR, BLOCK = "mxfp8_e4m3", "per_tensor_e4m3", "block_1x128_e4m3"


def gather_of(shape: list[int], axis: int, sides: list[tuple[str, str]], dtype: torch.dtype) -> Any:
    """How many gathers are of payloads, whether all bytes are the same, what is gathered, and the reasons."""

    def run(x: Tensor) -> list[Tensor]:
        whole = all_gather_tensor(x, axis, dist.group.WORLD)
        rows = whole.reshape(-1, shape[-1])
        parts = [part for spec, direction in sides for part in _ops.quantize(rows, spec, direction)]
        return [*parts, rows.sum([0]), _ops.amax(rows)]

    x = torch.randint(-9, 9, shape).to(dtype) * (1 + dist.get_rank())
    gm = make_fx(run, tracing_mode="fake")(x)
    before = gm(x)
    count = gather_payloads(gm.graph, Settings())
    reasons = [found.reason for found in not_fused(gm.graph)]
    gm.recompile()
    same = all(torch.equal(a.float(), b.float()) and a.shape == b.shape for a, b in zip(before, gm(x), strict=True))
    return count, same, len(gathered(gm.graph)), reasons


BOTH = ["rowwise", "columnwise"]
GATHERS: dict[str, tuple[list[int], int, list[tuple[str, str]], int]] = {
    "rows": ([64, 96], 0, [(MXFP8, "rowwise")], 2),
    "a text of each batch": ([3, 64, 96], 1, [(MXFP8, d) for d in BOTH], 4),
    "a batch": ([2, 32, 96], 0, [(MXFP8, d) for d in BOTH], 4),
    "a ragged width": ([3, 64, 40], 1, [(MXFP8, d) for d in BOTH], 4),
    "one scale": ([3, 16, 96], 1, [(TENSOR, d) for d in BOTH], 1),
    "one scale, columns": ([3, 16, 40], 1, [(TENSOR, "columnwise")], 1),
    "rows of scales": ([3, 5, 96], 1, [("per_row_e4m3(torchao)", "rowwise")], 2),
    "blocks": ([2, 128, 96], 1, [(BLOCK, d) for d in BOTH], 4),
    "tiles": ([2, 128, 96], 1, [("block_128x128_e4m3", d) for d in BOTH], 4),
    "nvfp4": ([3, 32, 96], 1, [("nvfp4", "rowwise"), ("nvfp4(rht)", "columnwise")], 4),
    "columns of scales": ([2, 32, 96], 1, [("per_row_e4m3", d) for d in BOTH], 3),
    "nvfp4 by columns": ([3, 32, 96], 1, [("nvfp4(row_scaled)", "columnwise")], 2),
    "nvfp4 by rows": ([3, 32, 96], 1, [("nvfp4(row_scaled)", "rowwise")], 3),
}


@pytest.mark.parametrize("name", GATHERS)
def test_payloads_have_the_same_bytes(name: str, ranks: Ranks) -> None:
    shape, axis, sides, expected = GATHERS[name]
    for count, same, sent, reasons in ranks.run(gather_of, shape, axis, sides, torch.float32):
        assert (count, sent, reasons) == (1, expected, [])
        assert same


REASONS: dict[str, tuple[list[int], list[tuple[str, str]]]] = {
    "columnwise blocks of 32 rows cross the borders of parts of 16": ([4, 16, 96], [(MXFP8, d) for d in BOTH]),
    "both directions take 16.5 bits an element, the tensor 16": ([2, 32, 96], [(MXFP8, d) for d in BOTH]),
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_not(reason: str, ranks: Ranks) -> None:
    shape, sides = REASONS[reason]
    for count, _, sent, reasons in ranks.run(gather_of, shape, 1, sides, torch.bfloat16):
        assert (count, sent, reasons) == (0, 1, [reason])
