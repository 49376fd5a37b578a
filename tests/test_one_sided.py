"""Pairs that no GEMM takes as they are: one operand in high precision, or formats of two kinds. All are emulated."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch
from helpers import compiled, eager_backend, hybrid, linear_step, per_role
from torch import Tensor, nn

import fxquant
from fxquant import (
    CustomRecipe,
    DelayedScaling,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
    recipes,
)
from fxquant.decisions import SkipReason
from fxquant.formats import FORMATS, IDENTITY, QuantSpec, is_mixed
from fxquant.kernels.cast import reference
from fxquant.kernels.linear.choice import GemmFacts, GemmKernel
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.report.html import section

ID = IdentityQuantizer()
QUANTIZERS: dict[str, Quantizer] = {
    "per_tensor": fxquant.Float8CurrentScalingQuantizer(),
    "per_row": fxquant.Float8RowwiseQuantizer(),
    "block": fxquant.Float8BlockQuantizer(block_scaling_dim=1),
    "mxfp8": MXFP8Quantizer(),
    "nvfp4": NVFP4Quantizer(),
    "nvfp4_rht": NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
}
OPERANDS = ("input", "weight", "grad_output")
M, K, N = 40, 72, 56
"""Sizes that no block divides, and different ones."""


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in ((M, K), (N, K), (M, N), (N,)))


def values(quantizer: Quantizer, x: Tensor, direction: str) -> Tensor:
    """What one direction of an operand stands for; a transform that one operand alone has is undone."""
    q = quantizer.quantize(x)
    seen = q.dequantize(direction)
    spec = quantizer.operand_spec().columnwise
    if direction == "rowwise" or not spec.rht:
        return seen
    parts, _ = q._parts["columnwise"]
    return reference.plain_basis(reference.dequantize(parts, spec), spec)[:, : x.shape[0]].mT


def expected(quantizers: Mapping[str, Quantizer]) -> dict[str, Tensor]:
    x, w, dy, bias = tensors()
    by_operand = dict(zip(OPERANDS, (x, w, dy), strict=True))
    row, column = (
        {name: values(quantizers[name], tensor, direction) for name, tensor in by_operand.items()}
        for direction in ("rowwise", "columnwise")
    )
    return {
        "y": row["input"] @ row["weight"].mT + bias,
        "dx": row["grad_output"] @ column["weight"],
        "dw": column["grad_output"].mT @ column["input"],
        "db": dy.sum(0),
    }


def check(quantizers: Mapping[str, Quantizer]) -> None:
    x, w, dy, bias = tensors()
    got = linear_step(per_role(**quantizers), x, w, dy, bias)
    for name, wanted in expected(quantizers).items():
        message = f"{name} is off by {(got[name] - wanted).abs().max()}"
        torch.testing.assert_close(got[name], wanted, rtol=1e-5, atol=1e-4, msg=message)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_any_operand_is_quantized_alone_in_all_three_gemms(name: str, operand: str) -> None:
    check({**dict.fromkeys(OPERANDS, ID), operand: QUANTIZERS[name]})


@pytest.mark.parametrize(
    ("left", "right"), [("mxfp8", "nvfp4"), ("per_tensor", "mxfp8"), ("block", "nvfp4_rht"), ("nvfp4", "per_row")]
)
def test_formats_of_two_kinds_are_dequantized(left: str, right: str) -> None:
    check({"input": QUANTIZERS[left], "weight": QUANTIZERS[right], "grad_output": QUANTIZERS[left]})


def test_the_transform_is_undone_by_its_transpose() -> None:
    spec = QuantSpec(format="nvfp4", rht=True)
    x = torch.randn(5, 48)
    torch.testing.assert_close(reference.plain_basis(reference.hadamard(x), spec), x, rtol=2**-7, atol=2**-7)
    assert not is_mixed(spec, spec) and is_mixed(spec, IDENTITY) and not is_mixed(IDENTITY, IDENTITY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    x, w, dy, _ = tensors(dtype)
    got = linear_step(per_role(input=ID, weight=QUANTIZERS["mxfp8"], grad_output=ID), x, w, dy)
    seen = QUANTIZERS["mxfp8"].quantize(w).dequantize()
    assert got["y"].dtype == dtype
    torch.testing.assert_close(got["y"].float(), x.float() @ seen.mT, rtol=2**-7, atol=2**-6)


def test_delayed_scales_beside_high_precision() -> None:
    def inputs_alone(role: QuantizerRole) -> object:
        return DelayedScaling().quantizer(role) if role.tensor_type == "input" else ID

    layer, x = nn.Linear(K, N), tensors()[0].requires_grad_()
    run = compiled(layer, CustomRecipe(qfactory=inputs_alone))
    for _ in range(2):
        y = run(x)
        y.sum().backward()
    error = (y - layer(x)).norm() / layer(x).norm()
    assert 0 < error < 0.1


def test_the_report_says_that_a_pair_is_emulated() -> None:
    layer, (x, *_) = nn.Linear(K, N), tensors()
    report = fxquant.explain(layer, per_role(input=ID, weight=QUANTIZERS["nvfp4"], grad_output=ID), x)
    left, right = (d for d in report.decisions if d.gemm == "fprop")
    assert left.quantizer is None and left.skip_reason is SkipReason.HIGH_PRECISION
    assert right.quantizer == QUANTIZERS["nvfp4"] and "emulated" in right.detail
    assert report.coverage == 0 and report.one_sided == 0.5
    assert "0.0% of matmul FLOPs with both operands quantized, 50.0% with one" in str(report)
    (fprop, *_) = (work for _, _, work in report.work() if work.what == "fprop")
    assert "emulated" in fprop.kernel
    mixed = fxquant.explain(layer, per_role(input=MXFP8Quantizer(), weight=ID, grad_output=MXFP8Quantizer()), x)
    assert mixed.one_sided == 0.5 and mixed.coverage == 0.5


@pytest.mark.parametrize(
    ("recipe", "text"),
    [("weight_only_fp8", "weights 59.4 KiB unquantized, 30.7 KiB quantized"),
     ("weight_only_nvfp4", "weights 59.4 KiB unquantized, 16.7 KiB quantized")],
)  # fmt: skip
def test_the_report_of_weights_alone_says_what_became_of_them(recipe: str, text: str) -> None:
    """Coverage keeps its meaning; bytes are those that a program stores, of a weight in two layers and graphs once."""
    model = nn.Sequential(nn.Linear(80, 160), nn.Linear(160, 80), nn.Linear(80, 160), nn.Linear(160, 30)).bfloat16()
    model[2].weight = model[0].weight
    x = torch.randn(5, 80).bfloat16()
    report = fxquant.explain(model.requires_grad_(False), recipe, x)
    assert report.coverage == 0 and report.one_sided == report.explained == 1
    assert "0.0% of matmul FLOPs with both operands quantized, 100.0% with one; " + text in str(report)
    summary = json.loads(report.to_json())["summary"]
    assert summary["weights"] == report.weights and summary["one_sided"] == 1 and text.split()[1] in section(report)
    assert report.weights["unquantized"] == 2 * (2 * 80 * 160 + 160 * 30)
    program = fxquant.quantize_program(torch.export.export(model, (x,)), recipe)
    stored = sum(t.nbytes for key, t in {**program.state_dict, **program.constants}.items() if "weight" in key)
    assert report.weights["quantized"] == stored
    run = compiled(model, recipe)
    for rows in (5, 6):
        run(x[:1].expand(rows, -1))
    assert fxquant.report(run).weights == report.weights
    both = fxquant.explain(model, "mxfp8", x)
    assert both.one_sided == 0 and "weights" not in str(both) and both.coverage == 1


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "identity"])
@pytest.mark.parametrize("size", [(40, 72), (256, 384), (1, 8), (0, 16), (3, 0)])
def test_bytes_of_a_format_are_those_of_its_parts(name: str, size: tuple[int, int]) -> None:
    for spec in (QuantSpec(format=name), *([QuantSpec(format=name, row_scaled=True)] if name == "nvfp4" else [])):
        parts = reference.quantize(torch.randn(size), spec)
        assert spec.stored_bytes(*size) == sum(part.nbytes for part in parts)


def test_no_native_kernel_takes_a_mixed_pair() -> None:
    sizes = {"m": 256, "n": 128, "k": 128, "most_rows": 256, "capability": (9, 0)}
    for dtype, kernel in ((torch.bfloat16, GemmKernel.ONE_SIDED), (torch.float32, GemmKernel.REFERENCE)):
        for spec in (q.operand_spec().rowwise for q in QUANTIZERS.values()):
            for a, b in ((spec, IDENTITY), (IDENTITY, spec)):
                chosen = scaled_mm.choose(GemmFacts(a=a, b=b, high_precision=dtype, **sizes))
                assert chosen.kernel is kernel and "emulated" in chosen.reason
    facts = GemmFacts(a=QuantSpec(format="per_tensor_e4m3"), b=QuantSpec(format="mxfp8_e4m3"), **sizes)
    assert scaled_mm.choose(facts).kernel is GemmKernel.REFERENCE


def test_dynamic_sizes_stay_dynamic() -> None:
    layer = nn.Linear(K, N)
    quantizers = {"input": QUANTIZERS["mxfp8"], "weight": ID, "grad_output": QUANTIZERS["nvfp4"]}
    run = compiled(layer, per_role(**quantizers), dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (33, 48, 70):
            x = torch.randn(rows, K, requires_grad=True)
            run(x).sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize(("name", "share"), [("weight_only_fp8", 0.52), ("weight_only_nvfp4", 0.29)])
def test_weight_only_programs_store_half_or_a_quarter(name: str, share: float) -> None:
    model = nn.Sequential(nn.Linear(256, 192), nn.GELU(), nn.Linear(192, 80)).to(torch.bfloat16).eval()
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    program = fxquant.quantize_program(torch.export.export(model, (x,)), name)
    names = [key for key in program.state_dict if key.endswith("weight")]
    assert not names, names
    stored = sum(t.nbytes for key, t in {**program.state_dict, **program.constants}.items() if "weight" in key)
    assert stored <= share * sum(p.nbytes for p in model.parameters() if p.ndim == 2)
    quantizer = recipes.get(name).quantizer(QuantizerRole("linear", "weight")).rowwise_quantizer
    plain = nn.Sequential(nn.Linear(256, 192), nn.GELU(), nn.Linear(192, 80)).eval()
    with torch.no_grad():
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            own.copy_(quantizer.quantize(other).dequantize() if own.ndim == 2 else other)
    torch.testing.assert_close(program.module()(x).float(), plain(x.float()), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("name", ["weight_only_fp8", "weight_only_nvfp4"])
def test_weight_only_trains_what_is_not_quantized_by_the_weight_of_the_forward(name: str) -> None:
    x, w, dy, bias = tensors()
    got = linear_step(name, x, w, dy, bias)
    seen = recipes.get(name).quantizer(QuantizerRole("linear", "weight")).rowwise_quantizer.quantize(w).dequantize()
    for key, wanted in {"y": x @ seen.mT + bias, "dx": dy @ seen, "dw": dy.mT @ x}.items():
        torch.testing.assert_close(got[key], wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["weight_only_fp8", "weight_only_nvfp4"])
def test_weights_alone_are_cached_until_they_change(name: str) -> None:
    """In inference and in training, whose backward dequantizes what its forward has read."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)), torch.randn(5, K)
    backend = eager_backend(name, cache_weights=True)
    run, plain = torch.compile(model, backend=backend), compiled(model, name)
    for change in (1.0, 1.5):
        with torch.no_grad():
            model[0].weight.mul_(change)
            assert torch.equal(run(x), plain(x))
            assert torch.equal(run(x), plain(x))
    results = []
    for call in (run, plain):
        model.zero_grad()
        call(x).sum().backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))
    assert backend.weights is not None and len(backend.weights._entries) == 2
    assert all(set(entry.parts) == {"rowwise"} for entry in backend.weights._entries.values())
    backward = backend.report().graphs["backward"]
    assert "dequantize" in backward and "fxquant.quantize" not in backward


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, K, N, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=offs)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", ["per_tensor", "per_row", "block", "mxfp8", "nvfp4_rht"])
def test_experts(name: str, operand: str) -> None:
    """Groups of any size, also where their columns lie padded in one operand and dense in the other."""
    quantizers = {**dict.fromkeys(OPERANDS, ID), operand: QUANTIZERS[name]}
    generator = torch.Generator().manual_seed(2)
    offs = torch.tensor([13, 13, 40], dtype=torch.int32)
    x = torch.randn(M, K, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(M, N, generator=generator).bfloat16()
    model = Experts().bfloat16()
    y = compiled(model, per_role(**quantizers))(x, offs)
    y.backward(dy)
    begin = 0
    for group, end in enumerate(offs.tolist()):
        rows, weight = slice(begin, end), model.weight[group].detach().mT
        begin = end
        if rows.start == rows.stop:
            assert not model.weight.grad[group].any()
            continue
        of = dict(zip(OPERANDS, (x.detach()[rows], weight, dy[rows]), strict=True))
        row, column = (
            {k: values(quantizers[k], v, side).float() for k, v in of.items()} for side in ("rowwise", "columnwise")
        )
        pairs = [
            (y[rows], row["input"] @ row["weight"].mT),
            (x.grad[rows], row["grad_output"] @ column["weight"]),
            (model.weight.grad[group].mT, column["grad_output"].mT @ column["input"]),
        ]
        for got, wanted in pairs:
            torch.testing.assert_close(got.float(), wanted, rtol=2**-6, atol=0.15)


def test_identity_pairs_stay_torchs_own() -> None:
    recipe = per_role(input=hybrid(MXFP8Quantizer(), IdentityQuantizer()), weight=MXFP8Quantizer(), grad_output=ID)
    x, w, dy, _ = tensors()
    got = linear_step(recipe, x, w, dy)
    torch.testing.assert_close(got["dw"], dy.mT @ x, rtol=0, atol=0)
