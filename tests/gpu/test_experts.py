"""Grouped linears on CUDA: the bytes of the CPU reference, its GEMMs to rounding, and no wait for the offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.recipes import RECIPES, resolved
from gpu.test_bytes import DEVICE, DIRECTIONS, SPECS, compiled, differences, noise, specials
from torch import Tensor, nn

from fxquant import Backend, CustomRecipe, HybridQuantizer, IdentityQuantizer, MXFP8Quantizer, Quantizer, QuantizerRole
from fxquant.kernels.grouped.high_precision import multiply_groups
from fxquant.recipes import Recipe

pytestmark = pytest.mark.gpu

ops = torch.ops.fxquant
GROUPED = [spec for spec in SPECS if not any(word in spec for word in ("stochastic", "row_scaled", "four_over_six"))]
SPLITS = {
    "empty and one row": [0, 0, 37, 38, 70],
    "no multiple of a block": [5, 37, 165, 200],
    "nothing, then everything": [0, 128, 128, 128],
    "nothing at all": [0, 0, 0],
    "many": list(range(3, 3 * 129, 3)),
}
TAIL = 7


def ends(offs: list[int], device: str) -> Tensor:
    return torch.tensor(offs, dtype=torch.int32, device=device)


def ragged(offs: list[int], columns: int, dtype: torch.dtype) -> Tensor:
    x = noise(dtype, offs[-1] + TAIL, columns)
    x[: offs[0]] *= 100
    x[offs[-1] :] = float("nan")
    return x


def used(parts: list[Tensor], offs: list[int], direction: str) -> list[Tensor]:
    """Payload and scales without the rows of no group, whose bytes mean nothing; scales lie as a GEMM reads them."""
    parts = [part.contiguous() for part in parts]
    if direction == "columnwise":
        return parts
    rows = offs[-1] + TAIL
    return [part[: offs[-1]] if part.shape[0] == rows else part for part in parts]


@pytest.mark.parametrize("spec", GROUPED)
def test_eager_bytes(spec: str) -> None:
    wrong = []
    for name, offs in SPLITS.items():
        for dtype in (torch.bfloat16, torch.float32):
            x = ragged(offs, 50, dtype)
            for direction in DIRECTIONS:
                expected = ops.split_quantize(x, ends(offs, "cpu"), spec, direction)
                got = ops.split_quantize(x.to(DEVICE), ends(offs, DEVICE), spec, direction)
                got, expected = used(got, offs, direction), used(expected, offs, direction)
                wrong += differences(got, expected, f"{name} {dtype} {direction}")
    batch = torch.stack([noise(torch.bfloat16, 37, 50, scale=s) for s in (1e-3, 1.0, 1e3)])
    for direction in DIRECTIONS:
        expected = ops.split_quantize(batch, None, spec, direction)
        wrong += differences(ops.split_quantize(batch.to(DEVICE), None, spec, direction), expected, direction)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("columns", [256, 50])
@pytest.mark.parametrize("spec", GROUPED)
def test_compiled_bytes(spec: str, columns: int) -> None:
    """Both directions in one graph, lowered for Inductor; one compilation for every split."""

    def both(x: Tensor, offs: Tensor, spec: str) -> list[list[Tensor]]:
        return [ops.split_quantize(x, offs, spec, direction) for direction in DIRECTIONS]

    run, wrong = compiled(both), []
    special = specials(torch.bfloat16, 207, columns)
    for offs in ([5, 37, 165, 200], [0, 0, 1, 200], [200, 200, 200, 200]):
        for name, x in (("normal", ragged([200], columns, torch.bfloat16)), ("special", special)):
            got, expected = run(x.to(DEVICE), ends(offs, DEVICE), spec), both(x, ends(offs, "cpu"), spec)
            for g, e, direction in zip(got, expected, DIRECTIONS, strict=True):
                wrong += differences(used(g, [200], direction), used(e, [200], direction), f"{name} {offs} {direction}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(48, 80), (41, 50), (256, 128)], ids=str)
def test_high_precision(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Sizes that are no multiple of 16 bytes, empty groups, and rows of no group, whatever the memory held."""
    k, n = sizes
    for offs in SPLITS.values():
        x, w = ragged(offs, k, dtype).nan_to_num(), noise(dtype, len(offs), n, k)
        dy = ragged(offs, n, dtype).nan_to_num()
        for a, b in ((x, w), (dy.mT, x.mT)):
            expected = multiply_groups(a.double(), b.double(), ends(offs, "cpu"))
            got = multiply_groups(a.to(DEVICE), b.to(DEVICE), ends(offs, DEVICE)).cpu().double()
            assert not got[expected == 0].any()
            assert (got - expected).norm() <= 2.0**-7 * expected.norm()


class Experts(nn.Module):
    def __init__(self, experts: int, k: int, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(dtype, experts, n, k, scale=0.1))

    def forward(self, x: Tensor, offs: Tensor | None) -> Tensor:
        if offs is None:
            return torch.bmm(x, self.weight.mT)
        return torch._grouped_mm(x, self.weight.mT, offs=offs)


def high_precision_backward(role: QuantizerRole) -> Quantizer:
    if role.tensor_type == "grad_output":
        return IdentityQuantizer()
    return HybridQuantizer(MXFP8Quantizer(), IdentityQuantizer())


def recipe_of(name: str) -> Recipe:
    if name == "hybrid":  # the one of the other tests is for dense layers only
        dense = resolved(name)
        return CustomRecipe(qfactory=lambda role: dense.quantizer(QuantizerRole("linear", role.tensor_type, role.name)))
    return CustomRecipe(qfactory=high_precision_backward) if name == "mxfp8 forward" else resolved(name)


def step(
    recipe: str, inner: str, device: str, sizes: tuple[int, int], dtype: torch.dtype, offs: list[int] | None
) -> dict[str, Tensor]:
    k, n = sizes
    if offs is None:
        x, dy, experts = noise(dtype, 3, 37, k), noise(dtype, 3, 37, n), 3
    else:
        x, dy, experts = ragged(offs, k, dtype), ragged(offs, n, dtype), len(offs)
    model, x, dy = Experts(experts, k, n, dtype).to(device), x.to(device).requires_grad_(), dy.to(device)
    run = torch.compile(model, backend=Backend(recipe_of(recipe), inner=inner), fullgraph=True, dynamic=False)
    y = run(x, None if offs is None else ends(offs, device))
    y.backward(dy)
    assert x.grad is not None and model.weight.grad is not None
    result = {"output": y.detach(), "input": x.grad, "weight": model.weight.grad}
    return {name: value.cpu().double() for name, value in result.items()}


@pytest.mark.parametrize("split", ["empty and one row", "no multiple of a block", "nothing at all", "batch"])
@pytest.mark.parametrize("sizes", [(48, 80), (256, 128)], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8 forward"])
def test_forward_and_backward(recipe: str, sizes: tuple[int, int], split: str) -> None:
    """The operands are the same bytes; the device's grouped GEMMs round to bfloat16 once or, with scales, twice."""
    offs = SPLITS.get(split)
    expected = step(recipe, "aot_eager", "cpu", sizes, torch.bfloat16, offs)
    got = step(recipe, "inductor", DEVICE, sizes, torch.bfloat16, offs)
    errors = {name: ((got[name] - e).norm() / e.norm().clamp(min=1e-30)).item() for name, e in expected.items()}
    print(recipe, sizes, split, {name: f"{error:.1e}" for name, error in errors.items()})
    assert all(error < 2.0**-7 for error in errors.values()), errors
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_near_bfloat16(recipe: str) -> None:
    """Against torch's own grouped GEMM, 4096 rows of 16 experts of which two get none."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.rand(16, generator=generator)
    sizes[3] = sizes[15] = 0
    offs = (sizes.cumsum(0) / sizes.sum() * 4096).round().int().to(DEVICE)
    x, dy = noise(torch.bfloat16, 4096, 512).to(DEVICE), noise(torch.bfloat16, 4096, 384).to(DEVICE)
    model = Experts(16, 512, 384, torch.bfloat16).to(DEVICE)
    results = []
    for run in (model, torch.compile(model, backend=Backend(recipe_of(recipe)), fullgraph=True)):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf, offs)
        y.backward(dy)
        assert leaf.grad is not None and model.weight.grad is not None
        results.append([y.detach(), leaf.grad, model.weight.grad])
    floor = 0.98 if recipe in ("nvfp4", "hybrid") else 0.997
    for plain, quantized in zip(*results, strict=True):
        assert torch.cosine_similarity(plain.flatten().double(), quantized.flatten().double(), dim=0) > floor
    assert not results[1][2][3].any() and not results[1][2][15].any(), "no rows, no gradient"


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_waits_for_the_offsets(recipe: str) -> None:
    """Neither forward nor backward synchronises, and one compilation serves every split."""
    compilations = 0

    class Counting(Backend):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal compilations
            compilations += 1
            return super().__call__(*args, **kwargs)

    model = Experts(4, 128, 256, torch.bfloat16).to(DEVICE)
    run = torch.compile(model, backend=Counting(recipe_of(recipe)), fullgraph=True)
    x = noise(torch.bfloat16, 512, 128).to(DEVICE).requires_grad_()
    splits = [ends(offs, DEVICE) for offs in ([100, 200, 300, 512], [0, 0, 17, 512], [512] * 4)]
    dy = noise(torch.bfloat16, 512, 256).to(DEVICE)
    run(x, splits[0]).backward(dy)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for offs in splits:
            run(x, offs).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert compilations == 1
