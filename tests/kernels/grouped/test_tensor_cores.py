"""Groups of MXFP8 on tensor cores: where each group's scales lie, and what the GEMM that reads them there gives."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same
from tensor_cores import accepted, documented, tensor_core_mm
from torch import Tensor

from fxquant.compat.private import make_fx
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.swizzle import swizzle
from fxquant.kernels.grouped import choice, ops, tensor_cores
from fxquant.kernels.grouped.choice import GroupedGemmFacts
from fxquant.kernels.grouped.ops import grouped_scaled_mm
from fxquant.kernels.linear import choice as linear_choice
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.passes.lower.lower import lower
from fxquant.passes.settings import Settings

SPEC = "mxfp8_e4m3"
ENDS = ([3, 3, 140, 200], [0, 0, 0, 0], [0, 128, 256, 257])


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "capability", lambda device: (10, 0))


def up(size: int, to: int) -> int:
    return -(-size // to) * to


def grouped_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, out_dtype: Any) -> Tensor:
    """torch's grouped GEMM as tensor cores read operands: each group's scales begin where the last one's end."""
    ends = [0, *offs.tolist()]
    assert a_scale.ndim == 2 and a_scale.is_contiguous() and b_scale.is_contiguous() and b.stride(-2) == 1
    assert a.shape[-1] % 16 == b.shape[-2] % 16 == b.shape[-1] % 16 == 0 and a.is_contiguous()
    groups, at, b_at = itertools.pairwise(ends), 0, 0
    if b.ndim == 3:
        out = torch.full((a.shape[0], b.shape[2]), torch.nan)
        width = up(a.shape[1] // 32, 4)
        assert b_scale.shape == (b.shape[0], up(b.shape[2], 128) * width)
        for group, (start, end) in enumerate(groups):
            size = up(end - start, 128) * width
            values = documented(a[start:end], a_scale.flatten()[at : at + size], 32) if end > start else a[:0].float()
            at += size
            out[start:end] = values @ documented(b[group].t(), b_scale[group], 32).t()
        return out.to(out_dtype)
    out = torch.full((len(offs), a.shape[0], b.shape[1]), torch.nan)
    for group, (start, end) in enumerate(groups):
        width = up((end - start) // 32, 4)
        sizes = up(a.shape[0], 128) * width, up(b.shape[1], 128) * width
        if end > start:
            left = documented(a[:, start:end], a_scale.flatten()[at : at + sizes[0]], 32)
            right = documented(b.t()[:, start:end], b_scale.flatten()[b_at : b_at + sizes[1]], 32)
            out[group] = left @ right.t()
        at, b_at = at + sizes[0], b_at + sizes[1]
    return out.to(out_dtype)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("n", [64, 41])
def test_documented_gemm_gives_what_the_emulated_path_gives(
    ends: list[int], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fprop, dgrad and wgrad: ragged rows and columns, empty groups, rows behind the last one."""
    monkeypatch.setattr(tensor_cores, "torch_scaled_grouped_mm", grouped_mm)
    monkeypatch.setattr(tensor_cores, "knows_grouped_kinds", lambda: False)
    offs = torch.tensor(ends, dtype=torch.int32)
    x, w, dy = torch.randn(ends[-1] + 5, 50), torch.randn(len(ends), n, 50), torch.randn(ends[-1] + 5, n)

    def quantized(t: Tensor, o: Tensor | None, direction: str) -> list[Tensor]:
        return ops.split_quantize(t, o, SPEC, direction)

    for a, b in (
        (quantized(x, offs, "rowwise"), quantized(w, None, "rowwise")),
        (quantized(dy, offs, "rowwise"), quantized(w, None, "columnwise")),
        (quantized(dy, offs, "columnwise"), quantized(x, offs, "columnwise")),
    ):
        facts = GroupedGemmFacts.of(a, b, offs, SPEC, SPEC, torch.bfloat16, False)
        assert grouped_scaled_mm.choose(facts).kernel is GemmKernel.GROUPED_MXFP8
        expected = ops.grouped_scaled_mm(a, b, offs, SPEC, SPEC, torch.bfloat16, False)
        got = grouped_scaled_mm.best(a, b, offs, SPEC, SPEC, torch.bfloat16, False)
        assert got.shape == expected.shape
        torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-3)


def test_scales_of_groups_are_tiles_of_their_own() -> None:
    scale = torch.randint(1, 255, (200, 5), dtype=torch.uint8)
    rows = tensor_cores.swizzle_rows(scale, torch.tensor([3, 3, 140], dtype=torch.int32))
    assert rows.shape == (512, 8)
    assert same(rows[:128], swizzle(scale[:3])) and same(rows[128:384], swizzle(scale[3:140])) and not rows[384:].any()
    columns = tensor_cores.swizzle_columns(scale.mT.contiguous()[:, :150], torch.tensor([3, 3, 9, 150]))
    expected = [swizzle(scale.mT[:, start:end].contiguous()).flatten() for start, end in ((0, 3), (3, 9), (9, 150))]
    flat = columns.flatten()
    assert same(flat[: sum(map(len, expected))], torch.cat(expected))


def test_what_torch_is_given() -> None:
    """Its meta function takes the call of each of the three GEMMs for a CUDA device."""
    x, w, dy = torch.randn(200, 96), torch.randn(4, 41, 96), torch.randn(200, 41)

    def run(x: Tensor, w: Tensor, dy: Tensor, offs: Tensor) -> list[Tensor]:
        def product(left: list[Tensor], right: list[Tensor]) -> Tensor:
            return torch.ops.fxquant.grouped_scaled_mm(left, right, offs, SPEC, SPEC, torch.bfloat16, False)  # type: ignore[no-any-return]

        split = torch.ops.fxquant.split_quantize
        weight = [split(w, None, SPEC, direction) for direction in ("rowwise", "columnwise")]
        rows = [split(t, offs, SPEC, "rowwise") for t in (x, dy)]
        columns = [split(t, offs, SPEC, "columnwise") for t in (dy, x)]
        return [product(rows[0], weight[0]), product(rows[1], weight[1]), product(*columns)]

    gm = make_fx(run, tracing_mode="fake")(x, w, dy, torch.tensor([3, 3, 140, 200], dtype=torch.int32))
    lower(gm.graph, Settings(kernels=False))
    calls = [node for node in gm.graph.nodes if "scaled_grouped_mm" in str(node.target)]
    assert [accepted(node) for node in calls] == [(200, 48), (200, 96), (4, 41, 96)]
    for node in calls:
        dtypes = [n.meta["val"].dtype for n in node.all_input_nodes]
        assert dtypes.count(torch.float8_e8m0fnu) == dtypes.count(torch.float8_e4m3fn) == 2


def test_cards() -> None:
    mx, e5m2 = QuantSpec(format=SPEC), QuantSpec(format="mxfp8_e5m2")

    def says(a: QuantSpec, b: QuantSpec, capability: tuple[int, int], **facts: Any) -> str:
        return str(
            grouped_scaled_mm.choose(GroupedGemmFacts(a=a, b=b, dtype=torch.bfloat16, capability=capability, **facts))
        )

    emulated = "bf16 GEMM of dequantized operands"
    assert says(mx, mx, (10, 0)) == says(mx, mx, (10, 3)) == "scaled_grouped_mm, MXFP8"
    assert says(mx, mx, (12, 0)) == f"{emulated} (no grouped FP8 GEMM for mxfp8 scales)"
    assert says(e5m2, mx, (10, 0)) == f"{emulated} (not e4m3 by e4m3)"
    assert says(mx, mx, (10, 0), batch=True) == f"{emulated} (a batch of matrices)"
    rows = QuantSpec(format="per_row_e4m3")
    assert says(rows, rows, (10, 0)) == "_scaled_grouped_mm"
    assert says(rows, rows, (8, 9)) == says(rows, rows, (12, 0)) == f"{emulated} (no grouped FP8 GEMM on this device)"


def test_the_script_for_a_card_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GEMMs, with what it was not run on yet in the place of a card."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "gpu" / "blackwell.py"))
    monkeypatch.setattr(Tensor, "cuda", lambda x: x)
    monkeypatch.setattr(linear_choice, "capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", tensor_core_mm)
    monkeypatch.setattr(tensor_cores, "torch_scaled_grouped_mm", grouped_mm)
    monkeypatch.setattr(tensor_cores, "knows_grouped_kinds", lambda: False)
    script["SIZES"][:] = [(5, 64, 41)]
    script["gemms"]()
    script["groups"]()
    assert not script["FAILED"]
