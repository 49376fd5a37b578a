"""Groups of MXFP8 and NVFP4 on tensor cores: where each group's scales lie, and what the GEMM that reads them gives."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same
from interpreting import run_interpreted
from tensor_cores import accepted, grouped_product, scaled_grouped_mm, tensor_core_mm
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxquant.compat import torch_version
from fxquant.compat.private import make_fx
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.choice import CastKernel
from fxquant.kernels.cast.swizzle import swizzle
from fxquant.kernels.grouped import choice, ops, tensor_cores
from fxquant.kernels.grouped.choice import GroupedGemmFacts
from fxquant.kernels.grouped.ops import grouped_scaled_mm
from fxquant.kernels.grouped.places import padded_ends
from fxquant.kernels.grouped.swizzle import plain, swizzle_columns, swizzle_rows
from fxquant.kernels.linear import choice as linear_choice
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.passes.joint.swizzle_scales import swizzle_scales
from fxquant.passes.lower.lower import lower
from fxquant.passes.settings import Settings

SPEC = "mxfp8_e4m3"
ENDS = ([3, 3, 140, 200], [0, 0, 0, 0], [0, 128, 256, 257])


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "capability", lambda device: (10, 0))


def grouped_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, out_dtype: Any) -> Tensor:
    """torch's grouped GEMM as tensor cores read operands: each group's scales begin where the last one's end."""
    return grouped_product(a, b, a_scale, b_scale, offs).to(out_dtype)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("n", [64, 41])
@pytest.mark.parametrize(("format", "kinds"), [(SPEC, False), (SPEC, True), ("nvfp4", True), ("nvfp4", False)])
def test_documented_gemm_gives_what_the_emulated_path_gives(
    format: str, kinds: bool, ends: list[int], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of fprop, dgrad and wgrad have ragged rows and columns, are empty, or leave rows behind the last.

    Scales lie in either order, or those of the left operand in the one and those of the right in the other.
    """
    monkeypatch.setattr(tensor_cores, "torch_scaled_grouped_mm", grouped_mm)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(tensor_cores, "knows_grouped_kinds", lambda: kinds)
    offs = torch.tensor(ends, dtype=torch.int32)
    shapes = ((ends[-1] + 5, 50), (len(ends), n, 50), (ends[-1] + 5, n))
    # elements of which MXFP8 has all, whose sums are exact in any order
    x, w, dy = (torch.randint(-8, 9, s).float() if format == SPEC else torch.randn(s) for s in shapes)
    native = GemmKernel.GROUPED_MXFP8 if format == SPEC else GemmKernel.GROUPED_NVFP4
    for left, right in (
        ((x, offs, "rowwise"), (w, None, "rowwise")),
        ((dy, offs, "rowwise"), (w, None, "columnwise")),
        ((dy, offs, "columnwise"), (x, offs, "columnwise")),
    ):
        results = []
        for texts in (
            (format, format),
            (f"{format}(swizzled)", f"{format}(swizzled)"),
            (f"{format}(swizzled)", format),
        ):
            a, b = (ops.split_quantize(t, o, text, way) for (t, o, way), text in zip((left, right), texts, strict=True))
            facts = GroupedGemmFacts.of(a, b, offs, *texts, torch.bfloat16, False)
            assert grouped_scaled_mm.choose(facts).kernel is native
            results.append(ops.grouped_scaled_mm(a, b, offs, *texts, torch.bfloat16, False))
            got = grouped_scaled_mm.best(a, b, offs, *texts, torch.bfloat16, False)
            assert got.shape == results[0].shape and same(results[-1], results[0]), texts
            if format == SPEC:
                assert same(got, results[0]), texts
            torch.testing.assert_close(got.float(), results[0].float(), rtol=2**-7, atol=1e-3)


def test_scales_of_groups_are_tiles_of_their_own() -> None:
    scale = torch.randint(1, 255, (200, 5), dtype=torch.uint8)
    rows = swizzle_rows(scale, torch.tensor([3, 3, 140], dtype=torch.int32))
    assert rows.shape == (512, 8)
    assert same(rows[:128], swizzle(scale[:3])) and same(rows[128:384], swizzle(scale[3:140])) and not rows[384:].any()
    columns = swizzle_columns(scale.mT.contiguous()[:, :150], torch.tensor([3, 3, 9, 150]))
    expected = [swizzle(scale.mT[:, start:end].contiguous()).flatten() for start, end in ((0, 3), (3, 9), (9, 150))]
    flat = columns.flatten()
    assert same(flat[: sum(map(len, expected))], torch.cat(expected))


@pytest.mark.parametrize("format", [SPEC, "nvfp4", "nvfp4(row_scaled)"])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize(("ends", "more"), [*((ends, 5) for ends in ENDS), ([0, 0], 0)], ids=str)
def test_the_order_of_tensor_cores_only_moves(format: str, direction: str, ends: list[int], more: int) -> None:
    """And the operator's fake sizes are those of its results."""
    x, offs, spec = torch.randn(ends[-1] + more, 50), torch.tensor(ends, dtype=torch.int32), QuantSpec.parse(format)
    text = str(replace(spec, swizzled=True))
    parts, tiles = (ops.split_quantize(x, offs, t, direction) for t in (format, text))
    back = plain(tiles, offs, spec, direction)
    last, packed, block = int(padded_ends(offs, spec.row.alignment)[-1]), spec.row.packed, spec.row.block[1]
    for i, (a, b) in enumerate(zip(back, parts, strict=True)):
        if i < 2 and direction == "rowwise":
            a, b = a[: ends[-1]], b[: ends[-1]]
        elif i < 2:
            a, b = (t[:, : last // (block if i else packed)].contiguous() for t in (a, b))
        assert same(a, b), i
    with FakeTensorMode() as mode:
        fakes = ops.split_quantize(mode.from_tensor(x), mode.from_tensor(offs), text, direction)
    assert [(f.shape, f.dtype) for f in fakes] == [(t.shape, t.dtype) for t in tiles]


@pytest.mark.parametrize("format", [SPEC, "nvfp4"])
def test_what_torch_is_given(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts write scales in tiles, and torch's meta function takes the call of each GEMM for a CUDA device."""
    x, w, dy = torch.randn(200, 96), torch.randn(4, 41, 96), torch.randn(200, 41)

    def run(x: Tensor, w: Tensor, dy: Tensor, offs: Tensor) -> list[Tensor]:
        def product(left: list[Tensor], right: list[Tensor]) -> Tensor:
            return torch.ops.fxquant.grouped_scaled_mm(left, right, offs, format, format, torch.bfloat16, False)  # type: ignore[no-any-return]

        split = torch.ops.fxquant.split_quantize
        weight = [split(w, None, format, direction) for direction in ("rowwise", "columnwise")]
        rows = [split(t, offs, format, "rowwise") for t in (x, dy)]
        columns = [split(t, offs, format, "columnwise") for t in (dy, x)]
        return [product(rows[0], weight[0]), product(rows[1], weight[1]), product(*columns)]

    gm = make_fx(run, tracing_mode="fake")(x, w, dy, torch.tensor([3, 3, 140, 200], dtype=torch.int32))
    assert swizzle_scales(gm.graph, Settings()) == 6
    lower(gm.graph, Settings(kernels=False))
    calls = [node for node in gm.graph.nodes if "scaled_grouped_mm" in str(node.target)]
    assert [accepted(node) for node in calls] == [(200, 48), (200, 96), (4, 41, 96)]
    payload, scale = QuantSpec(format=format).row.element, QuantSpec(format=format).row.scale_dtype
    assert payload is not None
    for node in calls:
        dtypes = [n.meta["val"].dtype for n in node.all_input_nodes]
        assert dtypes.count(scale) == dtypes.count(payload.dtype) == 2


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
    nvfp4, by_row = QuantSpec(format="nvfp4"), QuantSpec(format="nvfp4", row_scaled=True)
    assert says(nvfp4, nvfp4, (10, 0)) == "scaled_grouped_mm, NVFP4"
    assert says(by_row, nvfp4, (10, 0)) == f"{emulated} (a global amax for each row)"
    assert says(nvfp4, nvfp4, (12, 0)) == f"{emulated} (no grouped FP8 GEMM for nvfp4 scales)"
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
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(tensor_cores, "knows_grouped_kinds", lambda: True)
    triton = CastKernel.TRITON
    monkeypatch.setattr(ops.hybrid_split_quantize, "run", lambda kernel: {triton: ops.hybrid_split_quantize}[kernel])
    script["SIZES"][:] = [(5, 64, 41)]
    if torch_version() < (2, 13):  # its _scaled_mm of a CPU has one scale for a tensor
        script["LONG"].remove(("per_row_e4m3", "per_row_e4m3"))
    script["gemms"]()
    script["bytes_of_groups"]()
    script["groups"]()
    assert not script["FAILED"]


def test_casts_of_groups_write_scales_for_tensor_cores() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_groups.py"))
