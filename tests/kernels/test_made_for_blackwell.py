"""Every Triton kernel compiles for sm_100a: nothing is spilled, no local memory, and what it shares fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_for import Compiler
from torch import Tensor

import fxquant.kernels
from fxquant.formats import QuantSpec
from fxquant.kernels.attention import triton_backward, triton_dequantize, triton_forward
from fxquant.kernels.attention import triton_cast as head_cast
from fxquant.kernels.attention.scores import Scores
from fxquant.kernels.cast import amax, reference, triton_cast, triton_nvfp4, triton_producers, triton_values
from fxquant.kernels.cast.producers import PRODUCERS
from fxquant.kernels.grouped import reference as grouped_reference
from fxquant.kernels.grouped import triton_cast as grouped_cast
from fxquant.kernels.grouped import triton_gemm as grouped_gemm
from fxquant.kernels.grouped import triton_nvfp4 as grouped_nvfp4
from fxquant.kernels.linear import triton_few_rows, triton_gemm, triton_weight_only
from fxquant.kernels.state import triton as delayed

MODULES = (
    amax, delayed, grouped_cast, grouped_gemm, grouped_nvfp4, head_cast, triton_backward, triton_cast,
    triton_dequantize, triton_few_rows, triton_forward, triton_gemm, triton_nvfp4, triton_producers, triton_values,
    triton_weight_only,
)  # fmt: skip
MOST_SHARED = 232_448
E4M3 = torch.float8_e4m3fn


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def cast(row: str | None, column: str | None, *shape: int) -> None:
    sides = [QuantSpec.parse(text) if text else None for text in (row, column)]
    in_four_bits = any(spec is not None and spec.row.family == "nvfp4" for spec in sides)
    states = [torch.zeros(3, dtype=torch.int64) if spec is not None and spec.stochastic else None for spec in sides]
    x = matrix(*(shape or (4096, 2048)))
    (triton_nvfp4 if in_four_bits else triton_cast).quantize(x, *sides, *states)


def produced(text: str) -> None:
    spec = QuantSpec.parse(text)
    for name, producer in PRODUCERS.items():
        inputs = example_inputs(name)
        scale = [None] * producer.results
        triton_cast.produce(name, inputs, spec, spec, scale, scale, True)


def example_inputs(name: str) -> list[Tensor]:
    read = PRODUCERS[name].read(torch.bfloat16)
    kinds = {
        "matrix": lambda: matrix(4096, 2048, dtype=read), "heads": lambda: matrix(2, 16, 2048, 128),
        "row": lambda: matrix(4096, 1, dtype=torch.float32), "column": lambda: matrix(2048, dtype=read),
    }  # fmt: skip
    return [kinds[kind]() for kind in PRODUCERS[name].inputs]


def gemm(a: str, b: str) -> None:
    specs = QuantSpec.parse(a), QuantSpec.parse(b)
    parts = [reference.quantize(matrix(rows, 256), spec) for rows, spec in zip((256, 512), specs, strict=True)]
    for fast, activation in ((True, "gelu"), (False, "")):
        triton_gemm.scaled_mm(
            parts[0], specs[0], parts[1], specs[1], None, torch.bfloat16, fast, activation=activation,
            residual=matrix(256, 512), record=True,
        )  # fmt: skip


def few_rows() -> None:
    spec = QuantSpec.parse("per_row_e4m3")
    weight = reference.quantize(matrix(4096, 4096), spec)
    for rows in (1, 16, 64):
        x = matrix(rows, 4096)
        triton_few_rows.scaled_mm(reference.quantize(x, spec), spec, weight, spec, None, torch.bfloat16)
        triton_few_rows.scaled_mm([x], spec, weight, spec, None, torch.bfloat16)
        triton_few_rows.quantize(x, spec)


def weight_only() -> None:
    for text in ("per_row_e4m3(torchao)", "nvfp4"):
        spec = QuantSpec.parse(text)
        weight = reference.quantize(matrix(4096, 4096), spec)
        for rows in (1, 16):
            triton_weight_only.scaled_mm(matrix(rows, 4096), weight, spec, None, torch.bfloat16)


def groups(text: str) -> None:
    spec, offs = QuantSpec.parse(text), torch.tensor([512, 1024], dtype=torch.int32)
    x, w = matrix(1024, 512), matrix(2, 512, 512)
    grouped_cast.quantize(x, offs, spec if spec.row.family != "mxfp8" else None, spec)
    grouped_cast.quantize(w, None, spec, spec)
    grouped_cast.group_amax(x, offs)
    grouped_cast.clear(matrix(1024, 512), offs)
    if spec.row.family == "mxfp8":
        return
    block = spec.row.block[1] and 1
    rows = [grouped_reference.quantize(t, o, spec, "rowwise") for t, o in ((x, offs), (w, None))]
    a, b = ([p[0], p[1] if block else torch.ones(p[0].shape[:-1])] for p in rows)
    grouped_gemm.grouped_rows([a[0], a[1] if block else a[1].unsqueeze(1)], b, offs, block, torch.bfloat16, True)
    data, scale = grouped_reference.quantize(x, offs, spec, "columnwise")
    scale = scale if block else torch.ones(2, data.shape[0])
    grouped_gemm.grouped_columns([data, scale], [data, scale], offs, block, torch.bfloat16, False)


def swizzled_groups(row: str | None, column: str | None, *shape: int) -> None:
    """Casts of ragged groups, in one direction or both, and of a batch of weights."""
    sides = [QuantSpec.parse(text) if text else None for text in (row, column)]
    states = [torch.zeros(3, dtype=torch.int64) if spec is not None and spec.stochastic else None for spec in sides]
    in_four_bits = any(spec is not None and spec.row.family == "nvfp4" for spec in sides)
    cast, (rows, length) = grouped_nvfp4 if in_four_bits else grouped_cast, shape or (1024, 512)
    cast.quantize(matrix(rows, length), torch.tensor([rows // 2, rows], dtype=torch.int32), *sides, *states)
    cast.quantize(matrix(2, length, length), None, *sides, *states)


def attention(scaling: Any) -> None:
    q, k = matrix(1, 4, 512, 128), matrix(1, 2, 512, 128)
    parts = head_cast.quantize_qkv(q, k, k, scaling)
    operands = [parts[i : i + 2] for i in (0, 2, 4)]
    head_cast.quantize_heads(q, 2, True, scaling)
    triton_dequantize.dequantize_qkv(*operands, scaling, torch.bfloat16)
    for causal in (False, True):
        scores = Scores(scale=0.1, causal=causal)
        o, lse = triton_forward.forward(operands, scores, torch.bfloat16, scaling=scaling)
        triton_backward.backward(q, operands, o, lse, scores, scaling)


CASES: dict[str, Callable[[], object]] = {
    "mxfp8": lambda: cast("mxfp8_e4m3(swizzled)", "mxfp8_e4m3(swizzled)"),
    "nvfp4": lambda: cast("nvfp4(stochastic,swizzled)", "nvfp4(rht,stochastic,swizzled)"),
    "groups of mxfp8": lambda: swizzled_groups("mxfp8_e4m3(swizzled)", "mxfp8_e4m3(swizzled)"),
    "groups of nvfp4": lambda: swizzled_groups("nvfp4(stochastic,swizzled)", "nvfp4(rht,stochastic,swizzled)"),
}
MORE: dict[str, Callable[[], object]] = {
    "mxfp8, ragged": lambda: cast("mxfp8_e5m2(swizzled)", "mxfp8_2d_e4m3(swizzled)", 129, 48),
    "nvfp4, ragged": lambda: cast("nvfp4_2d(swizzled)", "nvfp4_2d(swizzled)", 129, 48),
    "nvfp4, plain": lambda: cast("nvfp4(swizzled)", "nvfp4"),
    **{f"cast {text}": lambda text=text: cast(text, text) for text in (  # type: ignore[misc]
        "per_tensor_e4m3", "per_row_e4m3(pow2,torchao)", "block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)",
        "mxfp8_e4m3", "mxfp8_2d_e5m2")},
    "produced": lambda: produced("mxfp8_e4m3(swizzled)"),
    "amax": lambda: amax.tensor_amax(matrix(4096, 2048)),
    "scale": lambda: amax.tensor_scale(matrix(4096, 2048), QuantSpec.parse("per_tensor_e5m2(nonfinite)")),
    "state": lambda: delayed.advance(
        torch.ones(4), torch.zeros(16, 4), torch.zeros(4), torch.zeros(4, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64), torch.ones(4), 0.0, "max"),
    "gemm per tensor": lambda: gemm("per_tensor_e4m3", "per_tensor_e4m3"),
    "gemm per row": lambda: gemm("per_row_e5m2", "per_row_e4m3"),
    "few rows": few_rows,
    "weight only": weight_only,
    "groups per row": lambda: groups("per_row_e4m3"),
    "groups of blocks": lambda: groups("block_1x128_e4m3"),
    "groups of plain mxfp8": lambda: groups("mxfp8_e4m3"),
    "groups of mxfp8, ragged": lambda: swizzled_groups("mxfp8_e4m3(swizzled)", "mxfp8_e5m2(swizzled)", 129, 50),
    "groups of mxfp8, rows": lambda: swizzled_groups("mxfp8_e4m3(swizzled)", None),
    "batch of 2-d mxfp8": lambda: grouped_cast.quantize(
        matrix(2, 512, 384), None, *[QuantSpec.parse("mxfp8_2d_e4m3(swizzled)")] * 2),
    "groups of nvfp4, ragged": lambda: swizzled_groups(
        "nvfp4(stochastic,swizzled)", "nvfp4(rht,stochastic,swizzled)", 129, 50),
    "groups of nvfp4, plain": lambda: swizzled_groups("nvfp4", "nvfp4(rht)"),
    "groups of nvfp4, columns": lambda: swizzled_groups(None, "nvfp4(swizzled)"),
    "batch of 2-d nvfp4": lambda: grouped_nvfp4.quantize(
        matrix(2, 512, 384), None, *[QuantSpec.parse("nvfp4_2d(swizzled)")] * 2),
    "attention by head": lambda: attention("head"),
    "attention by block": lambda: attention("block"),
}  # fmt: skip


def check(name: str, launch: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(100)
    for module in MODULES:
        monkeypatch.setattr(module, "wrap_triton", compiler)
    monkeypatch.setattr(triton_gemm, "_programs", lambda device: 148)
    launch()
    assert compiler.launches, name
    for made in compiler.launches:
        assert made.spilled == made.stack == 0, made
        assert made.shared <= MOST_SHARED and ".local" not in made.ptx, made.name


@pytest.mark.parametrize("name", CASES)
def test_casts_that_write_scales_for_tensor_cores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, CASES[name], monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MORE)
def test_all_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, MORE[name], monkeypatch)


def test_no_kernel_is_left_out() -> None:
    """Those in Gluon use instructions that Hopper alone has, and are chosen there alone."""
    folder = Path(fxquant.kernels.__file__).parent
    launching = {path for path in folder.rglob("*.py") if "wrap_triton(" in path.read_text()}
    assert launching == {Path(module.__file__) for module in MODULES if module.__file__}
