"""Grouped linears (experts): each group of rows as a linear layer of its own, bit for bit, whatever the split."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from bits import same
from expecttest import assert_expected_inline
from helpers import (
    NAMES,
    Asked,
    OneGroupedWeight,
    Recorder,
    assert_same_bits,
    compiled,
    eager_backend,
    hybrid,
    per_role,
    recorded_story,
    stacked,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fxquant
import fxquant.kernels.grouped.autograd
import fxquant.kernels.linear.autograd
from fxquant import (
    CustomRecipe,
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    QuantizerRole,
    Recipe,
    RecipeError,
    Rule,
    Rules,
    SkipReason,
    recipes,
)
from fxquant.formats import FORMATS, QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.grouped import choice, high_precision
from fxquant.kernels.grouped import fp8 as grouped_gemm
from fxquant.kernels.grouped import reference as grouped_reference
from fxquant.kernels.grouped.high_precision import aten_grouped_mm, grouped_mm, portable_grouped_mm
from fxquant.kernels.grouped.ops import grouped_scaled_mm
from fxquant.kernels.grouped.places import padded_ends
from fxquant.kernels.linear import choice as linear_choice
from fxquant.passes.lower.lower import lower
from fxquant.passes.settings import Settings
from fxquant.quantizers import QuantizedOperand

ops = torch.ops.fxquant
Tensors = dict[str, Tensor]

SPECS = [name for name in FORMATS if name != "identity"]
SPECS += ["nvfp4(rht)", "per_row_e4m3(pow2,torchao)", "per_tensor_e4m3(pow2)", "mxfp8_e4m3(mode=even)"]
OPTIONS = ["nvfp4(row_scaled)", "nvfp4(four_over_six=mae,e4m3_max=256)", "nvfp4_2d(four_over_six=mse)"]
SIDES = [(s, d) for s in (*SPECS, *OPTIONS) for d in ("rowwise", "columnwise") if (s, d) != ("nvfp4(rht)", "rowwise")]
SPLITS = {
    "empty and one row": [0, 0, 37, 38, 70],
    "no multiple of a block": [5, 37, 165, 200],
    "nothing, then everything": [0, 128, 128, 128],
    "nothing at all": [0, 0, 0],
}
TAIL = 7
"""Rows behind the last group in these tests."""


def ends(*offs: int) -> Tensor:
    return torch.tensor(offs, dtype=torch.int32)


def rows_in(offs: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise([0, *offs])]


def garbage(x: Tensor, last: int) -> Tensor:
    """x with values in the rows of no group that must reach nothing."""
    x = x.clone()
    x[last:] = float("nan")
    x[last + 1 :: 2] = float("inf")
    return x


def check_split(x: Tensor, offs: list[int], text: str, direction: str) -> None:
    """The parts of every group are those of `reference.quantize` of its rows."""
    spec = QuantSpec.parse(text)
    row = spec.row
    got = ops.split_quantize(x, ends(*offs), text, direction)
    values = grouped_reference.dequantize(got, ends(*offs), spec, direction)
    start = tiles = 0
    for group, rows in enumerate(rows_in(offs)):
        own = x[rows] if direction == "rowwise" else x[rows].mT
        data, scale, *amax = reference.quantize(own, spec)
        count = rows.stop - rows.start
        if direction == "rowwise":
            block = row.block[0] if row.family == "block" else 1
            here, there = slice(rows.start, rows.stop), (rows if block == 1 else slice(tiles, tiles + len(scale)))
            tiles += len(scale)
            assert same(got[0][here], data)
            assert same(values[here], reference.dequantize([data, scale, *amax], spec))
            scales = got[1][group : group + 1] if row.family == "per_tensor" else got[1][there]
        else:
            padded = -(-count // row.alignment) * row.alignment
            here = slice(start, start + padded)
            packed = slice(start // row.element.packed, (start + padded) // row.element.packed)
            start += padded
            assert same(got[0][:, packed], data)
            assert same(values[:, here], reference.dequantize([data, scale, *amax], spec))
            if row.family == "per_tensor":
                scales = got[1][group : group + 1]
            elif row.family == "per_row":
                scales, scale = got[1][group], scale.squeeze(-1)
            else:
                block = slice(here.start // row.block[1], here.stop // row.block[1])
                scales = got[1][:, block]
        assert same(scales, scale)
        if amax and not spec.row_scaled:
            assert same(got[2][group : group + 1], amax[0])
        elif amax:
            assert same(*((got[2][here], amax[0]) if direction == "rowwise" else (got[2][group], amax[0].squeeze(-1))))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("spec", "direction"), SIDES)
def test_each_group_is_quantized_as_a_tensor_of_its_own(spec: str, direction: str, split: str) -> None:
    """Invariants 42 and 56; rows behind the last group are not read."""
    offs = SPLITS[split]
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(offs[-1] + TAIL, 50).to(dtype)
        x[: offs[0]] *= 100
        check_split(garbage(x, offs[-1]), offs, spec, direction)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=9), tail=st.integers(0, 40), columns=st.integers(1, 40),
    side=st.sampled_from(SIDES), scale=st.sampled_from([1.0, 1e8, 1e-8]),
)  # fmt: skip
@example(sizes=[0, 128], tail=0, columns=32, side=("mxfp8_e4m3", "columnwise"), scale=1.0)
@example(sizes=[1], tail=0, columns=1, side=("block_128x128_e4m3", "rowwise"), scale=1.0)
def test_any_split(sizes: list[int], tail: int, columns: int, side: tuple[str, str], scale: float) -> None:
    offs = list(itertools.accumulate(sizes))
    x = torch.randn(offs[-1] + tail, columns, generator=torch.Generator().manual_seed(sum(sizes))) * scale
    check_split(garbage(x, offs[-1]).bfloat16(), offs, *side)


@pytest.mark.parametrize(("text", "direction"), SIDES)
def test_a_batch_is_one_group_after_another(text: str, direction: str) -> None:
    x = torch.randn(3, 37, 50) * torch.tensor([1e-3, 1, 1e3]).view(3, 1, 1)
    got, spec = ops.split_quantize(x, None, text, direction), QuantSpec.parse(text)
    for group, own in enumerate(x):
        for mine, part in zip(got, reference.quantize(own if direction == "rowwise" else own.mT, spec), strict=True):
            assert same(mine[group].reshape(part.shape), part)


@pytest.mark.parametrize(("text", "direction"), SIDES)
def test_fake_and_real_operands_agree(text: str, direction: str) -> None:
    for x, offs in ((torch.randn(70, 50), ends(3, 3, 40, 60)), (torch.randn(4, 37, 50), None)):
        real = ops.split_quantize(x, offs, text, direction)
        with FakeTensorMode() as mode:
            fake = ops.split_quantize(
                mode.from_tensor(x), None if offs is None else mode.from_tensor(offs), text, direction
            )
        described = [[(t.shape, t.dtype, t.stride()) for t in parts] for parts in (real, fake)]
        assert described[0] == described[1]


@pytest.mark.parametrize("text", [spec for spec in SPECS if "rht" not in spec])
def test_dequantized_groups_come_back_in_place(text: str) -> None:
    for x, offs in ((garbage(torch.randn(70, 50), 60), ends(3, 3, 40, 60)), (torch.randn(4, 37, 50), None)):
        back = ops.split_dequantize(
            ops.split_quantize(x, offs, text, "rowwise"), offs, text, x.shape[-1], torch.float32
        )
        assert back.shape == x.shape and back.is_contiguous()
        inside, outside = (x[:60], back[:60]) if offs is not None else (x, back)
        assert (outside - inside).norm() / inside.norm() < (0.15 if "nvfp4" in text else 0.08)


def spec_of(recipe: Recipe | str) -> str:
    recipe = recipes.resolve(recipe)
    roles = {t: QuantizerRole("grouped_linear", t, "") for t in ("input", "weight", "grad_output")}
    return " ".join(f"{t}={recipe.quantizer(role).operand_spec()}" for t, role in roles.items()) + " name="


MX, NV, NV2D, ID = MXFP8Quantizer(), NVFP4Quantizer(), NVFP4Quantizer(with_2d_quantization=True), IdentityQuantizer()
RHT = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
ROWS = NVFP4Quantizer(row_scaled_nvfp4=True)
DEQUANTIZED = "rowwise_dequantized"
RECIPES: dict[str, Recipe] = {name: recipes.get(name) for name in ("high_precision", *NAMES)}
RECIPES |= {
    "2d input": recipes.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "f32 block scales": recipes.Float8BlockScaling(use_f32_scales=True),
    "2d gradient": recipes.Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1),
    "mxfp8 2d weight": recipes.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    "nvfp4 rht": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4 row-scaled forward, mxfp8 backward": per_role(
        input=hybrid(NVFP4Quantizer(row_scaled_nvfp4=True), MX), weight=hybrid(NV2D, MX), grad_output=MX
    ),
    "nvfp4 row-scaled": per_role(input=ROWS, weight=ROWS, grad_output=ROWS),
    "nvfp4 4over6": recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all"),
    "nvfp4 2d everywhere": per_role(input=NV2D, weight=NV2D, grad_output=NV2D),
    "mxfp8 forward, nvfp4 backward": per_role(input=hybrid(MX, NV), weight=hybrid(MX, NV, DEQUANTIZED), grad_output=NV),
    "dequantized columns": per_role(
        input=hybrid(NV, MX, DEQUANTIZED), weight=hybrid(NV, MX, DEQUANTIZED), grad_output=hybrid(MX, copy.copy(MX))
    ),
    "rht from dequantized": per_role(
        input=hybrid(MX, RHT, DEQUANTIZED), weight=hybrid(MX, NV, DEQUANTIZED), grad_output=RHT
    ),
    "high precision backward": recipes.MXFP8BlockScaling(backward_override="high_precision"),
    "dequantized backward": recipes.Float8CurrentScaling(backward_override="dequantized"),
    "high precision forward": per_role(input=hybrid(ID, MX), weight=hybrid(ID, MX), grad_output=MX),
    "cast only": per_role(
        input=IdentityQuantizer(torch.bfloat16), weight=IdentityQuantizer(torch.bfloat16), grad_output=ID
    ),
}


def step(run: Callable[..., Tensor], *leaves: Tensor, dy: Tensor) -> Tensors:
    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
    y = run(*leaves)
    y.backward(dy)
    return {"y": y.detach(), "dx": leaves[0].grad, "dw": leaves[1].grad}


def by_group(spec: str, x: Tensor, w: Tensor, dy: Tensor, offs: list[int]) -> Tensors:
    """The truth: `fxquant::linear` on the rows of each group, zeros elsewhere."""
    total = {"y": torch.zeros_like(dy), "dx": torch.zeros_like(x), "dw": torch.zeros_like(w)}
    for group, rows in enumerate(rows_in(offs)):
        one = step(lambda a, b: ops.linear(a, b, None, spec), x[rows], w[group], dy=dy[rows])
        total["y"][rows], total["dx"][rows], total["dw"][group] = one["y"], one["dx"], one["dw"]
    return total


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", RECIPES)
def test_three_gemms_are_those_of_each_group(name: str, split: str) -> None:
    offs, spec = SPLITS[split], spec_of(RECIPES[name])
    for dtype, k, n in ((torch.bfloat16, 48, 80), (torch.float32, 50, 41), (torch.float32, 64, 64)):
        x, dy = torch.randn(offs[-1] + TAIL, k).to(dtype), torch.randn(offs[-1] + TAIL, n).to(dtype)
        w = torch.randn(len(offs), n, k).to(dtype)
        x, dy = garbage(x, offs[-1]), garbage(dy, offs[-1])
        got = step(lambda a, b: ops.grouped_linear(a, b, ends(*offs), spec), x, w, dy=dy)
        want = by_group(spec, x, w, dy, offs)
        if split == "empty and one row" and name in ("high_precision", "high precision forward"):
            torch.testing.assert_close(got, want)  # torch's BLAS may sum one row in another order than several
        else:
            assert_same_bits(got, want)


@pytest.mark.parametrize("name", RECIPES)
def test_batches_are_groups_of_one_size(name: str) -> None:
    spec = spec_of(RECIPES[name])
    x, w, dy = torch.randn(2, 3, 37, 48), torch.randn(2, 3, 40, 48), torch.randn(2, 3, 37, 40)
    got = step(lambda a, b: ops.grouped_linear(a, b, None, spec), x, w, dy=dy)
    flat = {"x": x.flatten(0, 2), "w": w.flatten(0, 1), "dy": dy.flatten(0, 2)}
    truth = by_group(spec, flat["x"], flat["w"], flat["dy"], [37 * (i + 1) for i in range(6)])
    for key, value in truth.items():
        torch.testing.assert_close(got[key], value.reshape(got[key].shape), rtol=1e-5, atol=1e-5)


def test_gradients_of_the_high_precision_gemm() -> None:
    """The GEMM that every recipe's reference stands on is torch's own."""
    x, w, offs = torch.randn(48, 32).bfloat16(), torch.randn(3, 64, 32).bfloat16(), ends(16, 16, 48)
    assert torch.equal(grouped_mm(x, w, offs), torch._grouped_mm(x, w.mT, offs=offs))
    dy = torch.randn(48, 64).bfloat16()
    assert torch.equal(grouped_mm(dy.mT, x.mT, offs), torch._grouped_mm(dy.mT, x, offs=offs))


class Experts(nn.Module):
    """Two grouped products; `spell` is how they are written."""

    def __init__(self, spell: str = "grouped_mm", experts: int = 4, k: int = 48, n: int = 64) -> None:
        super().__init__()
        self.spell = spell
        generator = torch.Generator().manual_seed(0)
        shapes = ((experts, k, n), (experts, k, n))  # the second is stored transposed
        self.up, self.down = (nn.Parameter(torch.randn(s, generator=generator).bfloat16() * 0.1) for s in shapes)

    def forward(self, x: Tensor, offs: Tensor | None = None) -> Tensor:
        multiply = SPELLINGS[self.spell]
        return multiply(F.relu(multiply(x, self.up, offs)), self.down.transpose(-2, -1), offs)


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "grouped_mm": lambda x, w, offs: F.grouped_mm(x, w, offs=offs),
    "_grouped_mm": lambda x, w, offs: torch._grouped_mm(x, w, offs),
    "columns": lambda x, w, offs: torch._grouped_mm(w.transpose(1, 2), x.t(), offs=offs).t(),
    "bmm": lambda x, w, offs: torch.bmm(x, w),
    "matmul": lambda x, w, offs: x @ w,
    "baddbmm": lambda x, w, offs: torch.baddbmm(x.new_zeros(len(w), 1, 1), x, w),
    "einsum": lambda x, w, offs: torch.einsum("eti,eio->eto", x, w),
    "token first": lambda x, w, offs: torch.einsum("tei,eio->teo", x.transpose(0, 1), w).transpose(0, 1),
    "weight first": lambda x, w, offs: torch.bmm(w.transpose(1, 2), x.transpose(1, 2)).transpose(1, 2),
    "grouped_mm of batches": lambda x, w, offs: torch._grouped_mm(x, w),
}
RAGGED = ("grouped_mm", "_grouped_mm", "columns")
OFFS = [3, 3, 40, 60]


def expert_inputs(spell: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    if spell in RAGGED:
        x = torch.randn(64, 48, generator=generator).bfloat16()  # `_grouped_mm` wants aligned columns
        return x.requires_grad_(), ends(*OFFS[:-1], 64)
    return (torch.randn(4, 33, 48, generator=generator).bfloat16().requires_grad_(),)


def expert_step(run: Callable[..., Tensor], model: Experts, inputs: tuple[Tensor, ...]) -> Tensors:
    x, *rest = inputs
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = run(x, *rest)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return {"y": y.detach(), "dx": x.grad, "up": model.up.grad, "down": model.down.grad}


@pytest.mark.parametrize("spell", SPELLINGS)
def test_every_spelling_is_found_and_quantized(spell: str) -> None:
    """All have the result of the operator itself, whose truth is above; the roles say grouped_linear."""
    model, inputs, backend = Experts(spell), expert_inputs(spell), eager_backend("mxfp8")
    got = expert_step(torch.compile(model, backend=backend, fullgraph=True), model, inputs)
    spec = spec_of("mxfp8")
    offs = inputs[1] if spell in RAGGED else None

    def plain(x: Tensor, *_: Any) -> Tensor:
        h = F.relu(ops.grouped_linear(x, model.up.mT, offs, spec))
        return ops.grouped_linear(h, model.down, offs, spec)

    assert_same_bits(got, expert_step(plain, model, inputs))
    report = backend.report()
    assert report.coverage == 1 and len(report.decisions) == 12
    assert {d.role.module_type for d in report.decisions} == {"grouped_linear"}
    assert {d.role.tensor_type for d in report.decisions} == {"input", "weight", "grad_output"}
    rows = 64 if spell in RAGGED else 4 * 33
    assert report.flops == {"total": 6 * 2 * rows * 48 * 64, "quantized": 6 * 2 * rows * 48 * 64}


def test_story_of_a_grouped_linear() -> None:
    """As for one linear: the input in both directions at once, the weight's other direction in the backward."""

    def run(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, w, offs=offs)

    x, w = (torch.randn(*size, requires_grad=True) for size in ((1024, 64), (4, 64, 96)))
    assert_expected_inline(
        recorded_story(run, "mxfp8", x.bfloat16(), nn.Parameter(w.bfloat16()), ends(0, 500, 600, 1024)),
        """\
forward:
  #0 = hybrid_split_quantize([1024, 64], [4], mxfp8_e4m3, mxfp8_e4m3)
  #1 = split_quantize([4, 96, 64], None, mxfp8_e4m3, rowwise)
  grouped_scaled_mm(#0, #1, [4], mxfp8_e4m3, mxfp8_e4m3, bfloat16, True) -> [1024, 96]
  saves #0.column
backward:
  #0 = hybrid_split_quantize([1024, 96], [4], mxfp8_e4m3, mxfp8_e4m3)
  #1 = split_quantize([4, 96, 64], None, mxfp8_e4m3, columnwise)
  grouped_scaled_mm(#0, #1, [4], mxfp8_e4m3, mxfp8_e4m3, bfloat16, False) -> [1024, 64]
  grouped_scaled_mm(#0.column, [64, 1120], [4], mxfp8_e4m3, mxfp8_e4m3, bfloat16, False) -> [4, 96, 64]""",
    )


def test_the_amaxes_of_a_weights_columns_are_taken_with_those_of_its_rows() -> None:
    """And saved, a number for each column of a group, so that the backward reads the weight once."""

    def run(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, w.mT, offs=offs)

    x, w = torch.randn(1024, 64).bfloat16().requires_grad_(), nn.Parameter(torch.randn(4, 96, 64).bfloat16())
    story = recorded_story(run, "rowwise", x, w, ends(0, 500, 600, 1024))
    assert_expected_inline(
        story.replace("per_row_e4m3(pow2,torchao)", "e4m3"),
        """\
forward:
  #0 = hybrid_split_quantize([1024, 64], [4], e4m3, e4m3)
  #1 = split_quantize_and_amax([4, 96, 64], e4m3)
  grouped_scaled_mm(#0, #1, [4], e4m3, e4m3, bfloat16, True) -> [1024, 96]
  saves #1.amax, #0.column
backward:
  #0 = hybrid_split_quantize([1024, 96], [4], e4m3, e4m3)
  #1 = split_quantize([4, 96, 64], None, e4m3, columnwise, [4, 64])
  grouped_scaled_mm(#0, #1, [4], e4m3, e4m3, bfloat16, True) -> [1024, 64]
  grouped_scaled_mm(#0.column, [64, 1072], [4], e4m3, e4m3, bfloat16, True) -> [4, 96, 64]""",
    )


@pytest.mark.parametrize("text", ["per_row_e4m3", "per_row_e5m2(pow2,torchao)"])
def test_columns_of_a_batch_by_amaxes_that_are_known(text: str) -> None:
    x = torch.randn(3, 37, 50).bfloat16()
    *row, amax = ops.split_quantize_and_amax(x, text)
    for direction, got in (("rowwise", row), ("columnwise", ops.split_quantize(x, None, text, "columnwise", amax))):
        assert all(same(*pair) for pair in zip(got, ops.split_quantize(x, None, text, direction), strict=True))
    with FakeTensorMode() as mode:
        fake = ops.split_quantize_and_amax(mode.from_tensor(x), text)
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in (*row, amax)]


def test_experts_and_dense_layers_can_differ_and_the_router_is_linear() -> None:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(48, 16).bfloat16(), Experts()

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return self.experts(x, offs) * self.router(x).softmax(-1).amax(-1, keepdim=True)

    recipe = CustomRecipe(Rules([Rule(MX, module_type="grouped_linear"), Rule(ID, name="router")], default="rowwise"))
    report = fxquant.explain(Moe(), recipe, *expert_inputs("grouped_mm"))
    quantized = {(d.layer, d.role.module_type, d.quantizer) for d in report.decisions}
    assert quantized == {("experts", "grouped_linear", MX), ("router", "linear", None)}
    assert not report.unused


@pytest.mark.parametrize("name", NAMES)
def test_a_factory_that_repeats_a_recipe_gives_its_bits(name: str) -> None:
    """Invariant 3, with gradients scaled by 1e8 and 1e-8 as well; and each group of them is its own linear."""
    recipe, offs = RECIPES[name], [5, 37, 37, 100]
    custom = CustomRecipe(qfactory=lambda role: copy.copy(recipe.quantizer(role)))
    x, w, dy = torch.randn(100, 48).bfloat16(), torch.randn(4, 80, 48).bfloat16(), torch.randn(100, 80).bfloat16()

    def multiply(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, w.mT, offs=offs)

    calls = [compiled(multiply, each) for each in (recipe, custom)]
    for scale in (1.0, 1e8, 1e-8):
        results = [
            step(lambda a, b, call=call: call(a, b, ends(*offs)), x, nn.Parameter(w), dy=dy * scale) for call in calls
        ]
        assert_same_bits(*results)
        assert_same_bits(results[0], by_group(spec_of(recipe), x, w, dy * scale, offs))


def test_one_question_for_all_experts_and_a_mismatch_before_any_gemm() -> None:
    """Invariants 6 and 41: experts cannot disagree, since the recipe is asked once for all of them."""
    asked = Asked(recipes.get("mxfp8"))
    fxquant.explain(Experts(), CustomRecipe(asked), *expert_inputs("grouped_mm"))
    kinds = [role.tensor_type for role in asked.roles]
    assert {role.module_type for role in asked.roles} == {"grouped_linear"}
    assert set(kinds) == {"input", "weight", "grad_output"}
    tiles, lines = Float8BlockQuantizer(), Float8BlockQuantizer(block_scaling_dim=1)
    wrong = per_role(input=lines, weight=hybrid(lines, tiles), grad_output=hybrid(tiles, lines))
    named = r"dgrad cannot multiply grad_output\.rowwise Float8BlockQuantizer\(\) by weight"
    with pytest.raises(RecipeError, match=named):
        fxquant.compile(Experts(), wrong, options={"inner": "aot_eager"})(*expert_inputs("grouped_mm"))


def test_all_identity_gives_torchs_own_bits() -> None:
    """Invariant 49 for experts."""
    model, inputs = Experts(), expert_inputs("grouped_mm")
    plain = expert_step(torch.compile(model, backend="aot_eager", fullgraph=True), model, inputs)
    for recipe in (recipes.get("high_precision"), per_role(input=ID, weight=hybrid(ID, copy.copy(ID)), grad_output=ID)):
        torch.compiler.reset()
        assert_same_bits(expert_step(compiled(model, recipe), model, inputs), plain)


def test_nvfp4_of_groups_is_the_gemm_of_dequantized_groups() -> None:
    """Invariant 61, the part about groups."""
    offs = [5, 37, 37, 100]
    x, w = torch.randn(100, 48), torch.randn(4, 80, 48)
    a, b = ops.split_quantize(x, ends(*offs), "nvfp4", "rowwise"), ops.split_quantize(w, None, "nvfp4", "rowwise")
    got = ops.grouped_scaled_mm(a, b, ends(*offs), "nvfp4", "nvfp4", torch.float32, False)
    spec = QuantSpec.parse("nvfp4")
    for group, rows in enumerate(rows_in(offs)):
        left, right = (reference.dequantize(reference.quantize(t, spec), spec) for t in (x[rows], w[group]))
        assert torch.equal(got[rows], left @ right.mT)


@pytest.mark.parametrize("name", ["rowwise", "mxfp8", "nvfp4", "current_scaling", "float8_blockwise"])
def test_one_compilation_for_every_split(name: str) -> None:
    """Offsets are values on the device; only a new number of rows can compile again, and once."""
    count = 0

    class Counting(fxquant.Backend):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return super().__call__(*args, **kwargs)

    model = Experts()
    run = torch.compile(model, backend=Counting(RECIPES[name], inner="aot_eager"), fullgraph=True)
    spec = spec_of(RECIPES[name])
    for rows, offs in ((64, [3, 3, 40, 64]), (64, [0, 0, 0, 64]), (96, [96, 96, 96, 96]), (80, [1, 2, 3, 4])):
        x = torch.randn(rows, 48).bfloat16()
        got = expert_step(run, model, (x, ends(*offs)))

        def plain(x: Tensor, offs: Tensor) -> Tensor:
            h = F.relu(ops.grouped_linear(x, model.up.mT, offs, spec))
            return ops.grouped_linear(h, model.down, offs, spec)

        assert_same_bits(got, expert_step(plain, model, (x, ends(*offs))))
    assert count == 2


def test_frozen_experts_and_inference_quantize_no_more_than_they_need() -> None:
    model, (x, offs) = Experts(), expert_inputs("grouped_mm")
    for p in model.parameters():
        p.requires_grad_(False)
    story = recorded_story(model, "mxfp8", x, offs)
    assert story.count("grouped_scaled_mm") == 4 and story.count("columnwise") == 2, "the weights', for dgrad"
    torch.compiler.reset()
    backend = Recorder("mxfp8")
    with torch.no_grad():
        torch.compile(model, backend=backend)(x, offs)
    story = "\n".join(backend.story().splitlines())
    assert "columnwise" not in story and "hybrid" not in story and story.count("grouped_scaled_mm") == 2


def test_autocast_changes_batched_products_and_leaves_grouped_mm() -> None:
    x, w = torch.randn(4, 33, 48), nn.Parameter(torch.randn(4, 48, 64))
    flat, offs = torch.randn(64, 48), ends(*OFFS)

    def run(x: Tensor, flat: Tensor, w: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bmm(x, w), torch._grouped_mm(flat.bfloat16(), w.bfloat16(), offs=offs)

    with torch.autocast("cpu", torch.bfloat16):
        batch, ragged = compiled(run, "rowwise")(x, flat, w, offs)
    assert batch.dtype == ragged.dtype == torch.bfloat16
    spec = spec_of("rowwise")
    assert torch.equal(batch, ops.grouped_linear(x.bfloat16(), w.bfloat16().mT, None, spec))
    assert torch.equal(ragged, ops.grouped_linear(flat.bfloat16(), w.bfloat16().mT, offs, spec))
    torch.compiler.reset()
    with torch.autocast("cpu", torch.float16):
        _, ragged = compiled(run, "rowwise")(x, flat, w, offs)
    assert ragged.dtype == torch.bfloat16, "no autocast rule knows grouped_mm"


@pytest.mark.parametrize("name", ["mxfp8", "delayed_scaling"])
def test_recomputed_experts_have_the_same_bits(name: str) -> None:
    """Invariant 45 for experts; in delayed scaling the state reaches the checkpoint's body."""
    model, inputs = Experts(), expert_inputs("grouped_mm")

    def recomputed(x: Tensor, offs: Tensor) -> Tensor:
        return checkpoint(model, x, offs, use_reentrant=False)

    steps = []
    for run in (model, recomputed):
        torch.compiler.reset()
        call = compiled(run, name)
        steps.append([expert_step(call, model, inputs) for _ in range(3)])
    for plain, again in zip(*steps, strict=True):
        assert_same_bits(again, plain)


class Halves(Quantizer):
    """Halves the mantissa, one matrix at a time."""

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        assert x.ndim == 2
        one = QuantizedOperand(x.to(torch.float16))
        return QuantizedTensor(one if rowwise else None, QuantizedOperand(one.data.mT) if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        return operand.data.float()


def test_a_quantizer_of_ones_own_is_refused_with_a_reason() -> None:
    model, inputs = Experts(), expert_inputs("grouped_mm")
    recipe = per_role(input=Halves(), weight=Halves(), grad_output=Halves())
    report = fxquant.explain(model, recipe, *inputs)
    assert {d.skip_reason for d in report.decisions} == {SkipReason.GROUPED}
    assert "Halves, a quantizer of your own for input, takes one matrix at a time" in str(report)
    plain = expert_step(torch.compile(model, backend="aot_eager"), model, inputs)
    torch.compiler.reset()
    assert_same_bits(expert_step(compiled(model, recipe), model, inputs), plain)


def test_what_is_grouped_but_no_linear_layer_is_reported() -> None:
    def run(x: Tensor, y: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x.t(), y, offs=offs)

    x, y = torch.randn(64, 32).bfloat16(), torch.randn(64, 48).bfloat16()
    report = fxquant.explain(run, "mxfp8", x, y, ends(16, 64))
    assert {d.skip_reason for d in report.decisions} == {SkipReason.GROUPED}
    assert "the contracted axis is in groups" in str(report) and report.flops["total"] == 2 * 64 * 32 * 48


def test_delayed_scaling_has_a_scale_and_an_amax_for_each_group() -> None:
    """Step by step what one linear for each group would do, with the same amaxes (margin 0, most recent)."""
    request = DelayedScalingRequest(amax_history_len=2, amax_compute_algo="most_recent")
    recipe = CustomRecipe(qfactory=lambda role: request)

    model, backend = OneGroupedWeight(3, 48, 64, dtype=torch.bfloat16), eager_backend(recipe)
    run = torch.compile(model, backend=backend, fullgraph=True)
    parts = [nn.Linear(48, 64, bias=False).bfloat16() for _ in range(3)]
    for part, w in zip(parts, model.weight, strict=True):
        part.weight.data.copy_(w.detach().mT)
    singles = [eager_backend(recipe) for _ in range(3)]
    compiled_parts = [torch.compile(p, backend=b, dynamic=False) for p, b in zip(parts, singles, strict=True)]
    for index in range(4):
        x = (torch.randn(64, 48) * 10.0**index).bfloat16().requires_grad_()
        dy, offs = torch.randn(64, 64).bfloat16() * 0.1**index, [[3, 3, 60], [20, 40, 64]][index % 2]
        y = run(x, ends(*offs))
        y.backward(dy)
        for group, rows in enumerate(rows_in(offs)):
            own = x.detach()[rows].requires_grad_()
            got = compiled_parts[group](own)
            got.backward(dy[rows])
            assert torch.equal(got, y[rows]) and torch.equal(own.grad, x.grad[rows])
            assert torch.equal(parts[group].weight.grad, model.weight.grad[group].mT)
            parts[group].weight.grad = None
        model.zero_grad()
    scales = stacked(backend.state_dict())["scale"]
    assert scales.shape == (9,), "input, weight and grad_output for each of three groups"
    alone = torch.stack([stacked(b.state_dict())["scale"] for b in singles])  # [group, operand]
    assert torch.equal(scales, alone.mT.flatten())


class Loop(nn.Module):
    """Two experts in a loop, each on the rows that were routed to it."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(48, 2)
        self.up, self.down = nn.Parameter(torch.randn(2, 64, 48) * 0.1), nn.Parameter(torch.randn(2, 48, 64) * 0.1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 64), nn.SiLU(), nn.Linear(64, 48)) for _ in range(2 * (not stacked))
        )

    def expert(self, index: int, x: Tensor) -> Tensor:
        if self.experts:
            return self.experts[index](x)
        return F.linear(F.silu(F.linear(x, self.up[index])), self.down[index])

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for index in range(2):
            token, place = torch.where(chosen == index)
            out = out.index_add(0, token, self.expert(index, x[token]) * weight[token, place, None])
        return out


class HuggingFaceLoop(Loop):
    """The loop over those experts that were hit, by a tensor as their index."""

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, 2).permute(2, 1, 0)
        for (index,) in (mask.sum((-1, -2)) > 0).nonzero():
            place, token = torch.where(mask[index])
            out.index_add_(0, token, self.expert(index, x[token]) * weight[token, place, None])
        return out


LOOPS = {"stacked": (Loop, True), "modules": (Loop, False), "hugging face": (HuggingFaceLoop, True)}


@pytest.mark.parametrize("capture", [False, True], ids=["breaks", "captured"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_experts_breaks_no_more_than_without_fxquant(name: str, capture: bool) -> None:
    kind, stacked = LOOPS[name]
    model, x = kind(stacked), torch.randn(30, 48)
    graphs = {"plain": 0, "quantized": 0}

    class Counting(fxquant.Backend):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            graphs["quantized"] += 1
            return super().__call__(*args, **kwargs)

    def plain(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs["plain"] += 1
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=capture):
        torch.compile(model, backend=plain)(x).square().sum().backward()
        torch.compiler.reset()
        backend = Counting("mxfp8", inner="aot_eager", model=model)
        out = torch.compile(model, backend=backend)(x)
        out.square().sum().backward()
    assert graphs["plain"] == graphs["quantized"]
    expected = model(x)
    assert (out - expected).norm() / expected.norm() < 0.1
    assert all(p.grad is not None for p in (model.gate.weight, *(model.experts or model).parameters()))
    if capture and name != "hugging face":
        roles = {d.role.module_type for d in backend.report().decisions if d.quantizer}
        assert roles == {"grouped_linear" if stacked else "linear"}
        names = {d.layer for d in backend.report().decisions if re.fullmatch(r"(.*\.)?experts\.\d+\..*", d.layer)}
        assert len(names) == (0 if stacked else 4), "a recipe knows experts that are modules by their names"


def test_rows_whose_number_is_only_known_on_the_device() -> None:
    def run(x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
        token, place = torch.where(chosen < 3)
        rows = x[token]
        counts = torch.bincount(chosen[token, place], minlength=3)
        return torch._grouped_mm(rows, w, offs=counts.cumsum(0).to(torch.int32)).float()

    x, w = torch.randn(40, 48).bfloat16().requires_grad_(), nn.Parameter(torch.randn(3, 48, 64).bfloat16())
    chosen = torch.randint(0, 5, (40, 1)).sort(0).values
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for name in NAMES:
            torch.compiler.reset()
            out = compiled(run, name)(x, w, chosen)
            out.sum().backward()
            assert (out - run(x, w, chosen)).norm() / out.norm() < 0.2 and w.grad is not None


@pytest.mark.parametrize("spec", SPECS)
def test_lowered_groups_have_the_same_bytes_and_no_semantic_operator(spec: str) -> None:
    def run(x: Tensor, w: Tensor, offs: Tensor) -> list[Tensor]:
        both = ops.hybrid_split_quantize(x, offs, spec.replace("(rht)", ""), spec)
        weights = ops.split_quantize(w, None, spec, "columnwise")
        return [*both, *weights, ops.split_amax(x, offs), ops.split_amax(w, None)]

    inputs = torch.randn(70, 50).bfloat16(), torch.randn(4, 50, 40), ends(3, 3, 40, 60)
    gm = make_fx(run, tracing_mode="fake")(*inputs)
    assert lower(gm.graph, Settings()) == 4
    gm.recompile()
    assert not [n for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "fxquant"]
    assert all(same(a, b) for a, b in zip(gm(*inputs), run(*inputs), strict=True))


LOWERED = [s for s in SPECS if "e5m2" not in s and s != "block_128x128_e4m3" and "rht" not in s]
SYMBOLIC = ("per_tensor_e4m3", "mxfp8_e4m3", "nvfp4")
"""With sizes of which nothing is known lowering takes long: the others are for `make sweep`."""


@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        *((spec, "fake") for spec in LOWERED),
        *(pytest.param(s, "symbolic", marks=[] if s in SYMBOLIC else pytest.mark.sweep) for s in LOWERED),
    ],
)
def test_lowered_gemms_have_the_same_bits(spec: str, mode: str) -> None:
    def run(x: Tensor, w: Tensor, dy: Tensor, offs: Tensor) -> list[Tensor]:
        row, column = (ops.split_quantize(x, offs, spec, d) for d in ("rowwise", "columnwise"))
        weight, grad = ops.split_quantize(w, None, spec, "rowwise"), ops.split_quantize(dy, offs, spec, "columnwise")
        back = ops.split_dequantize(row, offs, spec, 50, torch.float32)[:40]
        gemms = [
            ops.grouped_scaled_mm(*pair, offs, spec, spec, torch.bfloat16, False)
            for pair in ((row, weight), (grad, column))
        ]
        return [*gemms, back]

    inputs = torch.randn(50, 50), torch.randn(3, 40, 50), torch.randn(50, 40), ends(3, 3, 40)
    expected = run(*inputs)
    gm = make_fx(run, tracing_mode=mode)(*inputs)
    with enable_python_dispatcher():  # as in Inductor
        lower(gm.graph, Settings())
    gm.recompile()
    assert all(same(a, b) for a, b in zip(gm(*inputs), expected, strict=True))


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """What `torch._scaled_grouped_mm` computes on CUDA, after the checks of its meta kernel."""
    meta = [t.to("meta") for t in (a, b, scale_a, scale_b, offs)]
    shape = torch.ops.aten._scaled_grouped_mm(*meta, out_dtype=out_dtype, use_fast_accum=use_fast_accum).shape
    out = torch.full(shape, float("nan"), dtype=torch.float32)
    for group, rows in enumerate(rows_in(offs.tolist())):
        if b.ndim == 3:
            out[rows] = (a[rows].float() * scale_a[rows, None]) @ (b[group].float() * scale_b[group])
        elif rows.start < rows.stop:
            assert (rows.stop - rows.start) % 16 == 0, "the device wants aligned groups"
            left, right = a[:, rows].float(), b[rows].float()
            out[group] = (left * scale_a.view(len(offs), -1)[group, :, None]) @ (
                right * scale_b.view(len(offs), -1)[group]
            )
    return out.to(out_dtype)


@pytest.mark.parametrize("n", [64, 41], ids=["aligned", "ragged"])
@pytest.mark.parametrize("name", [*NAMES, "f32 block scales", "e4m3 per tensor", "nvfp4 row-scaled", "nvfp4 4over6"])
def test_gemms_as_cuda_calls_them(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts and scales that the device's GEMMs get, with their meaning in the place of them."""
    monkeypatch.setattr(grouped_gemm, "torch_scaled_grouped_mm", scaled_grouped_mm)
    reads_blocks = name in ("mxfp8", "nvfp4", "nvfp4 4over6")  # see tests/kernels/grouped/test_tensor_cores.py
    for conditions in (choice, linear_choice):
        monkeypatch.setattr(conditions, "capability", lambda device: (8, 9) if reads_blocks else (10, 0))
    tensor = Float8CurrentScalingQuantizer()
    recipe = RECIPES.get(name) or per_role(input=tensor, weight=tensor, grad_output=tensor)
    roles = {t: QuantizerRole("grouped_linear", t, "") for t in ("input", "weight", "grad_output")}
    spec = {t: str(recipe.quantizer(role).operand_spec()) for t, role in roles.items()}
    x, w, dy, offs = torch.randn(70, 50), torch.randn(4, n, 50), torch.randn(70, n), ends(3, 3, 40, 60)
    batch = torch.randn(4, 37, 50)

    def quantized(t: Tensor, o: Tensor | None, kind: str, direction: str) -> tuple[list[Tensor], str]:
        return ops.split_quantize(t, o, spec[kind], direction), spec[kind]

    for (a, a_spec), (b, b_spec), o in (
        (quantized(x, offs, "input", "rowwise"), quantized(w, None, "weight", "rowwise"), offs),
        (quantized(dy, offs, "grad_output", "rowwise"), quantized(w, None, "weight", "columnwise"), offs),
        (quantized(dy, offs, "grad_output", "columnwise"), quantized(x, offs, "input", "columnwise"), offs),
    ):
        expected = ops.grouped_scaled_mm(a, b, o, a_spec, b_spec, torch.float32, False)
        got = grouped_scaled_mm.best(a, b, o, a_spec, b_spec, torch.bfloat16, False)
        assert got.dtype == torch.bfloat16 and got.shape == expected.shape
        assert (got.float() - expected).norm() / expected.norm() < 2.0**-7
        assert torch.equal(got[60:], torch.zeros_like(got[60:])) if o is not None and got.ndim == 2 else True
    monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    (a, a_spec), (b, b_spec) = quantized(batch, None, "input", "rowwise"), quantized(w, None, "weight", "rowwise")
    expected = ops.grouped_scaled_mm(a, b, None, a_spec, b_spec, torch.float32, False)
    got = grouped_scaled_mm.best(a, b, None, a_spec, b_spec, torch.float32, False)
    assert (got - expected).norm() / expected.norm() < 2.0**-7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rowwise", pytest.param("mxfp8", marks=pytest.mark.sweep)])
def test_inductor_gives_the_bits_of_the_operators(name: str) -> None:
    def multiply(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(F.relu(x), w.mT, offs=offs)

    x, w, dy = torch.randn(100, 48).bfloat16(), torch.randn(4, 80, 48).bfloat16(), torch.randn(100, 80).bfloat16()
    results = []
    for backend in (eager_backend(name), fxquant.Backend(name)):
        torch.compiler.reset()
        run = functools.partial(torch.compile(multiply, backend=backend, fullgraph=True), offs=ends(5, 37, 37, 100))
        results.append(step(run, x, w, dy=dy))
    assert_same_bits(*results)


def test_gradients_of_experts_are_rounded_stochastically() -> None:
    """Each step differently, and again as it was from a restored state."""
    model, (x, offs) = Experts(), expert_inputs("grouped_mm")
    backend = fxquant.Backend("nvfp4", inner="aot_eager")
    run = torch.compile(model, backend=backend)
    first = expert_step(run, model, (x, offs))
    state = {key: value.clone() for key, value in backend.state_dict().items()}
    second, other = (expert_step(run, model, (x, offs)) for _ in range(2))
    assert torch.equal(first["y"], second["y"]), "the forward rounds to nearest"
    names = [name for name in first if name != "y"]
    assert all(not torch.equal(second[name], other[name]) for name in names)
    backend.load_state_dict(state)
    assert_same_bits(expert_step(run, model, (x, offs)), second)


GATHERED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, w, chosen: torch.einsum("ti,taoi->tao", x, w[chosen]),
    "matmul": lambda x, w, chosen: (w[chosen] @ x[:, None, :, None]).squeeze(-1),
    "bmm": lambda x, w, chosen: torch.bmm(
        x.repeat_interleave(2, 0).unsqueeze(1), w.index_select(0, chosen.flatten() % len(w)).mT
    ).view(*chosen.shape, -1),
    "view": lambda x, w, chosen: torch.bmm(
        w[chosen].float().view(-1, *w.shape[1:]), x.repeat_interleave(2, 0).unsqueeze(2)
    ).view(*chosen.shape, -1),
}


class Gathered(nn.Module):
    """Two experts for each row, whose weights are gathered."""

    def __init__(self, spell: str) -> None:
        super().__init__()
        self.spell = spell
        self.weight = nn.Parameter(torch.randn(5, 96, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return GATHERED[self.spell](x, self.weight, chosen)


@pytest.mark.parametrize("spell", GATHERED)
def test_gathered_weights_are_groups_of_the_rows_that_chose_them(spell: str) -> None:
    """One payload an expert, however many rows have it; an expert that none has; an index from behind."""
    model, x = Gathered(spell), torch.randn(9, 64)
    chosen = torch.tensor([[0, 2], [4, 2], [2, 0], [-1, 0], [0, 4], [2, 4], [0, 2], [4, 0], [2, 0]])
    spec = spec_of("mxfp8")

    def grouped(x: Tensor, w: Tensor) -> Tensor:
        expert = chosen.remainder(5).flatten()
        order = expert.argsort(stable=True)
        offs = torch.bincount(expert, minlength=5).cumsum(0).to(torch.int32)
        y = ops.grouped_linear(x.repeat_interleave(2, 0)[order], w, offs, spec)
        return y[order.argsort()].view(9, 2, 96)

    dy = torch.randn(9, 2, 96)
    got = step(lambda x, w: torch.func.functional_call(model, {"weight": w}, (x, chosen)), x, model.weight, dy=dy)
    want = step(grouped, x, model.weight, dy=dy)
    run = compiled(model, "mxfp8")
    leaf = x.clone().requires_grad_()
    y = run(leaf, chosen)
    y.backward(dy)
    assert_same_bits({"y": y.detach(), "dw": model.weight.grad}, {key: want[key] for key in ("y", "dw")})
    torch.testing.assert_close(leaf.grad, want["dx"])  # summed in another order
    assert (got["y"] - y).norm() < 0.1 * y.norm()
    report = fxquant.explain(model, "mxfp8", x, chosen)
    assert report.coverage == 1 and {d.role.module_type for d in report.decisions} == {"grouped_linear"}
    assert report.flops["total"] == 2 * 2 * 18 * 64 * 96
    shapes: Any = ({0: torch.export.Dim.AUTO},) * 2
    program = fxquant.quantize_program(torch.export.export(model, (x, chosen), dynamic_shapes=shapes), "mxfp8")
    assert set(program.state_dict) == {"weight_data", "weight_scale"}, "one payload an expert"
    assert torch.equal(program.module()(x[:7], chosen[:7]), run(x[:7], chosen[:7]))


FORWARD_ONLY = CustomRecipe(qfactory=fxquant.factories.high_precision_fwd_mxfp8_bwd)
PROGRAM_RECIPES = {**RECIPES, "forward in high precision": FORWARD_ONLY}


class OneProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Experts().up

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs)


@pytest.mark.parametrize("name", sorted(set(PROGRAM_RECIPES) - {"delayed_scaling"}))
def test_a_lowered_program_has_none_of_our_operators(name: str) -> None:
    """Its result is rounded to bfloat16 and scaled then, as by torch's grouped GEMM."""
    x, offs = expert_inputs("grouped_mm")
    quantized = fxquant.quantize_program(torch.export.export(OneProduct(), (x, offs)), PROGRAM_RECIPES[name])
    lowered = fxquant.lower_program(quantized)
    assert not [str(n.target) for n in lowered.graph.nodes if "fxquant" in str(n.target)]
    want = quantized.module()(x, offs).float()
    assert (lowered.module()(x, offs) - want).norm() < 2**-7 * want.norm()


@pytest.mark.parametrize("sizes", [(48, 80), (41, 50)], ids=str)
def test_torchs_grouped_mm_gets_groups_at_addresses_that_it_takes(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA stops at a group or a row that does not start at a multiple of 16 bytes."""
    multiply = torch._grouped_mm

    def checked(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        for operand, contracted in ((a, -1), (b, -2)):
            assert sorted(stride % 8 for stride in operand.stride())[-1] == 1 in operand.stride()[-2:]
            if b.ndim == 2 and operand.stride(contracted) == 1:
                assert not any(end % 8 for end in offs[:-1].tolist())
        return multiply(a, b, offs=offs)

    monkeypatch.setattr(high_precision, "torch_grouped_mm", checked)
    k, n = sizes
    for offs in SPLITS.values():
        x, w = torch.randn(offs[-1] + TAIL, k).bfloat16(), torch.randn(len(offs), n, k).bfloat16()
        dy = torch.randn(offs[-1] + TAIL, n).bfloat16()
        for a, b in ((x, w), (dy.mT, x.mT), (dy.mT.contiguous(), x.mT.contiguous())):
            torch.testing.assert_close(aten_grouped_mm(a, b, ends(*offs)), grouped_mm(a, b, ends(*offs)))
        aligned = padded_ends(ends(*offs), 16)
        a, b = torch.zeros(n, 272).bfloat16(), torch.zeros(k, 272).bfloat16()
        a[:, : aligned[-1]], b[:, : aligned[-1]] = torch.randn(2, 1, 1)
        torch.testing.assert_close(aten_grouped_mm(a, b, aligned, 16), grouped_mm(a, b, aligned))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_portable_grouped_mm_is_the_operator(dtype: torch.dtype) -> None:
    offs = torch.tensor([5, 5, 20, 37], dtype=torch.int32)
    a, b = torch.randn(40, 33).to(dtype), torch.randn(4, 19, 33).to(dtype)
    a[37:] = float("nan")  # of no group
    torch.testing.assert_close(portable_grouped_mm(a, b, offs), grouped_mm(a, b, offs))
    a, b = torch.randn(19, 40).to(dtype), torch.randn(33, 40).to(dtype)
    a[:, 37:] = b[:, 37:] = 0
    torch.testing.assert_close(portable_grouped_mm(a, b, offs), grouped_mm(a, b, offs))
