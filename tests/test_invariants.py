"""The invariants of TransformerEngine's own tests (te-semantics, section 2), through the compiled path."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import math
from typing import Any

import golden
import pytest
import torch
from helpers import (
    NAMES,
    Asked,
    Recorder,
    Tensors,
    assert_same_bits,
    compiled,
    eager_backend,
    hybrid,
    linear_step,
    per_role,
    problem,
    stacked,
    train_step,
    unstacked,
)
from torch import Tensor, nn

import fxquant
from fxquant import (
    Backend,
    CustomRecipe,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowwiseQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
    Recipe,
    factories,
    recipes,
)
from fxquant.formats import ELEMENTS
from fxquant.kernels.state import reference as delayed_reference
from fxquant.quantizers import Float8Quantizer

E5M2 = torch.float8_e5m2
OPERANDS = ("input", "weight", "grad_output")
SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(OPERANDS, n)]
SHAPES = {"rectangular": (64, 96, 160), "square": (64, 64, 64), "ragged": (33, 50, 41)}


@pytest.mark.parametrize("name", NAMES)
def test_a_factory_that_repeats_a_recipe_gives_its_bits(name: str) -> None:
    """Invariant 1."""
    x, w, dy = problem()
    bias = torch.randn(160, dtype=x.dtype)
    recipe = recipes.get(name)
    custom = CustomRecipe(qfactory=lambda role: copy.copy(recipe.quantizer(role)))
    assert_same_bits(linear_step(custom, x, w, dy, bias), linear_step(recipe, x, w, dy, bias))


@pytest.mark.parametrize("name", NAMES)
def test_same_format_hybrid_gives_the_bits_of_the_plain_recipe(name: str) -> None:
    """Invariant 24, on each subset of the operands; weight not square and square."""
    recipe = recipes.get(name)
    for shape in ("rectangular", "square"):
        x, w, dy = problem(*SHAPES[shape])
        plain = linear_step(recipe, x, w, dy)
        for subset in SUBSETS if shape == "rectangular" else SUBSETS[-1:]:

            def factory(role: QuantizerRole, subset: tuple[str, ...] = subset) -> Quantizer:
                one = recipe.quantizer(role)
                return hybrid(one, copy.copy(one)) if role.tensor_type in subset else one

            assert_same_bits(linear_step(CustomRecipe(qfactory=factory), x, w, dy), plain)


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 96, bias=bias)
        self.down = nn.Linear(96, 48, bias=bias)
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) * self.scale


IDENTITIES = {
    "high_precision": recipes.get("high_precision"),
    "identity": CustomRecipe(qfactory=lambda role: IdentityQuantizer()),
    "hybrid": CustomRecipe(qfactory=lambda role: hybrid(IdentityQuantizer(), IdentityQuantizer())),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("recipe", IDENTITIES.values(), ids=IDENTITIES)
def test_high_precision_gives_the_bits_of_the_compilation_without_fxquant(recipe: Recipe, bias: bool) -> None:
    """Invariants 2 and 49, over several steps of training."""
    for a, b in zip(three_steps(bias, eager_backend(recipe)), three_plain_steps(bias), strict=True):
        assert_same_bits(a, b)


def three_steps(bias: bool, backend: Any) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Mlp(bias).bfloat16()
    run, optimizer = torch.compile(model, backend=backend, fullgraph=True), torch.optim.SGD(model.parameters(), 0.1)
    taken = []
    for _ in range(3):
        x = torch.randn(4, 8, 48).bfloat16()
        output = run(x)
        output.square().sum().backward()
        taken.append({"output": output.detach()} | {k: p.grad.clone() for k, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return taken


@functools.cache
def three_plain_steps(bias: bool) -> list[dict[str, Tensor]]:
    return three_steps(bias, "aot_eager")


GOLDEN = golden.load("gemm")
MX, NV, NV2D, ID = MXFP8Quantizer(), NVFP4Quantizer(), NVFP4Quantizer(with_2d_quantization=True), IdentityQuantizer()
BLOCK, TILE = Float8BlockQuantizer(block_scaling_dim=1), Float8BlockQuantizer()
ROWS, TENSOR_POW2 = Float8RowwiseQuantizer(), Float8CurrentScalingQuantizer(force_pow_2_scales=True)
TENSOR, TENSOR_E5M2 = Float8CurrentScalingQuantizer(), Float8CurrentScalingQuantizer(E5M2)
RHT = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
ROW_SCALED = NVFP4Quantizer(row_scaled_nvfp4=True)
DEQUANTIZED = "rowwise_dequantized"
PLAIN_NVFP4 = recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)

ROUTES: dict[str, Recipe] = {
    "identity": recipes.get("high_precision"),
    "current_e4m3": recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3),
    "current_hybrid": recipes.get("current_scaling"),
    "current_hybrid_pow2": recipes.Float8CurrentScaling(use_power_2_scales=True),
    "rows_ao_pow2": recipes.get("rowwise"),
    "block_pow2": recipes.get("float8_blockwise"),
    "block_f32": recipes.Float8BlockScaling(use_f32_scales=True),
    "mxfp8_e4m3": recipes.get("mxfp8"),
    "mxfp8_hybrid": recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID),
    "mxfp8_w2d": recipes.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4_1d": recipes.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "nvfp4_w2d": PLAIN_NVFP4,
    "nvfp4_w2d_rht": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4_row_scaled": per_role(input=ROW_SCALED, weight=NV, grad_output=NV),
    "nvfp4_row_scaled_fwd_mxfp8_bwd_deq": per_role(
        input=hybrid(ROW_SCALED, MX, DEQUANTIZED), weight=hybrid(NV, MX, DEQUANTIZED), grad_output=MX
    ),
    "nvfp4_row_scaled_fwd_identity_bwd_deq": recipes.NVFP4BlockScaling(
        disable_rht=True,
        disable_stochastic_rounding=True,
        disable_2d_quantization=True,
        row_scaled_activation=True,
        backward_override="dequantized",
    ),
    "rows_ao_gw_hp": per_role(input=hybrid(ROWS, ID), weight=hybrid(ROWS, TENSOR_POW2), grad_output=hybrid(ROWS, ID)),
    "mxfp8_fwd_nvfp4_bwd_original": per_role(input=hybrid(MX, NV), weight=hybrid(MX, NV), grad_output=NV),
    "mxfp8_fwd_nvfp4_bwd_wdeq": per_role(input=hybrid(MX, NV), weight=hybrid(MX, NV, DEQUANTIZED), grad_output=NV),
    "mxfp8_fwd_nvfp4_bwd_xwdeq": per_role(
        input=hybrid(MX, NV, DEQUANTIZED), weight=hybrid(MX, NV, DEQUANTIZED), grad_output=NV
    ),
    "mxfp8_fwd_nvfp4_bwd_wdeq_rht": per_role(
        input=hybrid(MX, RHT), weight=hybrid(MX, NV, DEQUANTIZED), grad_output=RHT
    ),
    "nvfp4_fwd_mxfp8_bwd_original": per_role(input=hybrid(NV, MX), weight=hybrid(NV, MX), grad_output=MX),
    "nvfp4_fwd_mxfp8_bwd_deq": per_role(
        input=hybrid(NV, MX, DEQUANTIZED), weight=hybrid(NV, MX, DEQUANTIZED), grad_output=MX
    ),
    "nvfp4_1d_weight_deq": per_role(input=NV, weight=hybrid(NV, NVFP4Quantizer(), DEQUANTIZED), grad_output=NV),
    "identity_fwd_mxfp8_bwd": per_role(input=hybrid(ID, MX), weight=hybrid(ID, MX), grad_output=MX),
    "mxfp8_fwd_identity_bwd_deq": per_role(
        input=hybrid(MX, ID, DEQUANTIZED), weight=hybrid(MX, ID, DEQUANTIZED), grad_output=ID
    ),
    "mxfp8_fwd_identity_bwd_original": per_role(input=hybrid(MX, ID), weight=hybrid(MX, ID), grad_output=ID),
    "current_fwd_identity_bwd_deq": per_role(
        input=hybrid(TENSOR, ID, DEQUANTIZED), weight=hybrid(TENSOR, ID, DEQUANTIZED), grad_output=ID
    ),
    "route_current_mxfp8_nvfp4": per_role(
        input=hybrid(TENSOR, NV), weight=hybrid(TENSOR, MX), grad_output=hybrid(MX, NV)
    ),
    "route_nvfp4_current_mxfp8": per_role(
        input=hybrid(NV, MX), weight=hybrid(NV, TENSOR), grad_output=hybrid(TENSOR_E5M2, MX)
    ),
    "route_mxfp8_block_nvfp4": per_role(input=hybrid(MX, NV), weight=hybrid(MX, TILE), grad_output=hybrid(BLOCK, NV)),
    "route_block_nvfp4_current": per_role(
        input=hybrid(BLOCK, TENSOR), weight=hybrid(TILE, NV), grad_output=hybrid(NV, TENSOR_E5M2)
    ),
}
CASES = [key.split("/") for key in golden.keys("gemm", "y", reads=("dx", "dw"), only=ROUTES)]


@pytest.mark.parametrize(("problem_name", "route"), CASES, ids=lambda value: str(value))
def test_each_gemm_equals_the_golden_of_its_own_formats(problem_name: str, route: str) -> None:
    """Invariants 25, 33 and 50: fprop, dgrad and wgrad, with up to three formats in one layer.

    The golden products are summed in float64. Float32 sums are within (contraction length) * 2^-23 * sum|a*b| of
    them; a result in bfloat16 is one rounding away from there.
    """
    x, w, dy = (GOLDEN[f"{problem_name}/{key}"] for key in ("x", "w", "dy"))
    got = linear_step(ROUTES[route], x, w, dy)
    magnitude = {
        "y": x.float().abs() @ w.float().abs().mT,
        "dx": dy.float().abs() @ w.float().abs(),
        "dw": dy.float().abs().mT @ x.float().abs(),
    }
    length = {"y": x.shape[1], "dx": w.shape[0], "dw": x.shape[0]}
    for key, total in magnitude.items():
        exact = GOLDEN[f"{problem_name}/{route}/{key}"]
        rounding = 2.0**-8 * exact.abs() if x.dtype == torch.bfloat16 else 0
        bound = 2 * length[key] * 2.0**-23 * total + rounding
        worst = ((got[key].float() - exact).abs() / bound).max()
        assert worst <= 1, f"{key}: {worst:.1f} times the bound"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_three_format_routing_takes_each_gemm_from_its_own_recipe(shape: tuple[int, int, int]) -> None:
    """Invariant 25: fprop is the plain recipe A's, dgrad B's, wgrad C's, and the bias gradient the plain sum."""
    x, w, dy = problem(*shape)
    bias = torch.randn(shape[2], dtype=x.dtype)
    a, b, c = per_role(input=MX, weight=MX, grad_output=MX), recipes.get("current_scaling"), PLAIN_NVFP4
    tensor = {op: b.quantizer(QuantizerRole("linear", op)) for op in OPERANDS}
    routed = per_role(
        input=hybrid(MX, NV), weight=hybrid(MX, tensor["weight"]), grad_output=hybrid(tensor["grad_output"], NV)
    )
    got = linear_step(routed, x, w, dy, bias)
    plain = [linear_step(recipe, x, w, dy, bias) for recipe in (a, b, c)]
    expected = {"y": plain[0]["y"], "dx": plain[1]["dx"], "dw": plain[2]["dw"], "db": dy.sum(0)}
    assert_same_bits(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_high_precision_backward_leaves_the_gradients_of_the_original_tensors(name: str) -> None:
    """Invariant 50: backward_override="high_precision"."""
    x, w, dy = problem()
    recipe = recipes.get(name)

    def factory(role: QuantizerRole) -> Quantizer:
        return ID if role.tensor_type == "grad_output" else hybrid(recipe.quantizer(role), ID)

    plain, high = linear_step(recipe, x, w, dy), linear_step(None, x, w, dy)
    assert_same_bits(
        linear_step(CustomRecipe(qfactory=factory), x, w, dy), {"y": plain["y"], "dx": high["dx"], "dw": high["dw"]}
    )


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_backward_multiplies_the_dequantized_row_halves(name: str) -> None:
    """Invariants 27, 33 and 50: backward_override="dequantized"."""
    x, w, dy = problem()
    recipe = recipes.get(name)

    def factory(role: QuantizerRole) -> Quantizer:
        row = recipe.quantizer(role)
        return ID if role.tensor_type == "grad_output" else hybrid(row, ID, DEQUANTIZED)

    def seen(operand: str, tensor: Tensor) -> Tensor:
        return recipe.quantizer(QuantizerRole("linear", operand)).quantize(tensor).dequantize().to(tensor.dtype)

    plain = linear_step(recipe, x, w, dy)
    high = linear_step(None, seen("input", x), seen("weight", w), dy)
    assert_same_bits(
        linear_step(CustomRecipe(qfactory=factory), x, w, dy), {"y": plain["y"], "dx": high["dx"], "dw": high["dw"]}
    )


def test_identity_casts_its_gemm_when_asked() -> None:
    """Invariant 51."""
    x, w, dy = problem(dtype=torch.float32)
    cast = per_role(**dict.fromkeys(OPERANDS, IdentityQuantizer(dtype=torch.bfloat16)))
    low = linear_step(None, x.bfloat16(), w.bfloat16(), dy.bfloat16())
    assert_same_bits(linear_step(cast, x, w, dy), {key: value.float() for key, value in low.items()})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_errors_are_those_of_the_format_and_bias_is_exact(name: str, shape: tuple[int, int, int]) -> None:
    """No GEMM is transposed, scaled twice or padded into its result: each is as near as its elements allow."""
    x, w, dy = problem(*shape, dtype=torch.float32)
    bias = torch.randn(shape[2]) * 100
    got, high = linear_step(name, x, w, dy, bias), linear_step(None, x, w, dy, bias)
    element = {"nvfp4": "e2m1", "current_scaling": "e5m2"}.get(name, "e4m3")
    bound = 2.0 ** -(ELEMENTS[element].mantissa_bits + 1)
    for key in ("dx", "dw"):
        assert (got[key] - high[key]).norm() / high[key].norm() < bound, key
    product = high["y"] - bias
    assert (got["y"] - high["y"]).norm() / product.norm() < bound
    assert torch.equal(got["db"], high["db"])


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_activations_have_the_bits_of_the_forward(name: str) -> None:
    """Invariant 45: gradients with checkpointing equal those without."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, use: bool) -> None:
            super().__init__()
            self.blocks, self.use = nn.ModuleList(Mlp() for _ in range(2)), use

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.use else block(x)
            return x

    steps = []
    for use in (True, False):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = Checkpointed(use)
        steps.append(train_step(model, compiled(model, name), torch.randn(8, 16, 48)))
    assert_same_bits(*steps)


@pytest.mark.parametrize("name", NAMES)
def test_reentrant_checkpoints_have_the_bits_of_the_forward(name: str) -> None:
    """Invariant 45: they break the graph, and their body is compiled by itself."""
    from torch.utils.checkpoint import checkpoint

    steps = []
    for use in (True, False):
        torch.manual_seed(0)
        torch.compiler.reset()
        model, backend = Mlp().bfloat16(), eager_backend(name)
        body = torch.compile(model, backend=backend)
        x = torch.randn(32, 48).bfloat16().requires_grad_()
        run = (lambda x, body=body: checkpoint(body, x, use_reentrant=True)) if use else body
        steps.append({**train_step(model, run, x), "dx": x.grad})
        assert backend.report().coverage == 1
    assert_same_bits(*steps)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_scaled_by_powers_of_two_scale_with_them(name: str) -> None:
    """Invariant 3's scaling: current scales follow the gradient over many orders of magnitude."""
    x, w, dy = problem(dtype=torch.float32)
    one = linear_step(name, x, w, dy)
    for power in (-27, 27):
        factor = 2.0**power
        scaled = linear_step(name, x, w, dy * factor)
        # dividing by an amax is not exact, so per-tensor scales that are no powers of two may round elsewhere
        exact = name not in ("current_scaling", "nvfp4")
        for key in ("dx", "dw"):
            difference = (scaled[key] / factor - one[key]).norm() / one[key].norm()
            assert difference == 0 if exact else difference < 1e-3, (key, power, difference)


class Experts(nn.Module):
    """A linear, and a product with a weight for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.experts = nn.Linear(48, 48), nn.Parameter(torch.randn(3, 48, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.fc(x).expand(3, -1, -1), self.experts)


def test_a_factory_is_asked_once_for_each_operand_and_never_for_results() -> None:
    """Invariant 4: input, weight and grad_output; nobody asks about the output or grad_input."""
    asked = Asked(recipes.get("mxfp8"))
    layer = nn.Sequential(nn.Linear(64, 32, bias=True))
    run = compiled(layer, CustomRecipe(qfactory=asked))
    x = torch.randn(16, 64, requires_grad=True)
    run(x).sum().backward()
    run(x).sum().backward()
    assert asked.roles == [QuantizerRole("linear", operand, "0") for operand in OPERANDS]
    without = Asked(recipes.get("mxfp8"))
    with torch.no_grad():
        compiled(nn.Sequential(nn.Linear(64, 32)), CustomRecipe(qfactory=without))(x)
    # without gradients too: random streams are numbered as in training
    assert [role.tensor_type for role in without.roles] == ["input", "weight", "grad_output"]


def test_names_and_kinds_of_layers_reach_the_roles() -> None:
    """Invariant 6."""
    report = fxquant.explain(Experts(), "mxfp8", torch.randn(1, 8, 48))
    seen = {(d.role.name, d.role.module_type) for d in report.decisions}
    assert seen == {("fc", "linear"), ("", "grouped_linear")}


def delayed(**settings: object) -> Recipe:
    return recipes.DelayedScaling(amax_history_len=4, **settings)


def test_each_operand_has_a_slot_of_its_own() -> None:
    """Invariants 5 and 15: a request becomes a quantizer that reads and records at its own place."""
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)).requires_grad_()
    with torch.no_grad():
        model[0].weight.mul_(4)
    backend, x = eager_backend(delayed()), 16 * torch.randn(8, 32)
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    y.backward(torch.full_like(y, 0.5))
    quantizers = {(d.role.name, d.role.tensor_type): d.quantizer for d in backend.report().decisions}
    slots = {key: q.slot for key, q in quantizers.items()}
    assert sorted(slots.values()) == list(range(6)), "no two share one"
    assert all(isinstance(q, Float8Quantizer) for q in quantizers.values())
    amaxes = stacked(backend.state_dict())["amax_history"][0]
    assert amaxes[slots["0", "input"]] == x.abs().max()
    assert amaxes[slots["1", "grad_output"]] == 0.5
    for name in ("0", "1"):
        assert amaxes[slots[name, "weight"]] == model[int(name)].weight.abs().max()


def test_a_slot_is_quantized_by_its_scale() -> None:
    """Invariant 15: the scale is read before the step, the amax is written by it."""
    x, w, dy = problem(dtype=torch.float32)
    scales = {"input": 3.0, "weight": 50.0, "grad_output": 7.0}
    layer = nn.Linear(*w.shape[::-1], bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
    backend = eager_backend(delayed())
    backend.load_state_dict(unstacked(scales, scale=torch.tensor([*scales.values()]), amax_history=torch.zeros(4, 3)))
    x = x.requires_grad_()
    y = torch.compile(layer, backend=backend)(x)
    y.backward(dy)

    def seen(tensor: Tensor, operand: str) -> Tensor:
        dtype, scale = (E5M2 if operand == "grad_output" else torch.float8_e4m3fn), scales[operand]
        largest = torch.finfo(dtype).max
        return (tensor.detach() * scale).clamp(-largest, largest).to(dtype).float() / scale

    rows = {"input": seen(x, "input"), "weight": seen(w, "weight"), "grad_output": seen(dy, "grad_output")}
    torch.testing.assert_close(y, rows["input"] @ rows["weight"].mT, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad, rows["grad_output"] @ rows["weight"], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(layer.weight.grad, rows["grad_output"].mT @ rows["input"], rtol=1e-5, atol=1e-4)


OTHERS = {
    "built-in": delayed(margin=1, amax_compute_algo="most_recent"),
    "custom": CustomRecipe(qfactory=lambda role: delayed(margin=1).request()),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_the_tensors_of_the_state_outlive_a_recompilation_and_a_change_of_recipe(other: Recipe) -> None:
    """Invariant 10: equal roles keep scales and histories, as the same tensors."""
    run = fxquant.compile(nn.Linear(32, 32), delayed(), options={"inner": "aot_eager"}, dynamic=False)

    def tensors() -> dict[str, Tensor]:
        (states,) = run.set_recipe.__self__.states.by_module.values()
        (state,) = states._states.values()
        return state.tensors()

    run(torch.randn(8, 32)).sum().backward()
    scale = stacked(run.quantization_state_dict())["scale"]
    first = tensors()
    run(torch.randn(24, 32)).sum().backward()
    second = tensors()
    assert all(second[name] is tensor for name, tensor in first.items())
    assert not torch.equal(stacked(run.quantization_state_dict())["scale"], scale)
    run.set_recipe(other)
    run(torch.randn(8, 32)).sum().backward()
    third = tensors()
    assert all(third[name] is tensor for name, tensor in first.items())


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("length", [1, 31, 1024])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scales_follow_the_formula(algorithm: str, length: int, margin: int) -> None:
    """Invariants 19 and 20: for 60 steps with amaxes of 0, inf, nan and of all magnitudes."""
    generator = torch.Generator().manual_seed(length + margin)
    amaxes = torch.exp2(40 * torch.randn(60, generator=generator))
    amaxes[torch.randperm(60, generator=generator)[:12]] = torch.tensor([0.0, torch.inf, torch.nan, 1e-44] * 3)
    scale, history = torch.ones(1), torch.zeros(length, 1)
    window, expected = [0.0] * (length - 1), torch.ones(1)
    for last in amaxes:
        scale, history = delayed_reference.update(
            scale, history, last.reshape(1), torch.tensor([448.0]), margin=margin, algorithm=algorithm
        )
        if last != 0:  # a step without amaxes is not rolled in
            seen = [a for a in [*window, last.item()] if not math.isnan(a)]
            amax = torch.tensor([max(seen, default=0.0)]) if algorithm == "max" else last.reshape(1)
            if amax.isfinite() and amax > 0:
                expected = (torch.tensor([448.0 * 2.0**-margin]) / amax).clamp(max=torch.finfo(torch.float32).max)
            window = [*window, last.item()][1:] if length > 1 else []
        assert torch.equal(scale, expected), last
        assert torch.equal(history[1:, 0].nan_to_num(-1), torch.tensor(window).nan_to_num(-1)), last


HYBRIDS = {
    "mxfp8 then nvfp4": per_role(input=hybrid(MX, NV), weight=hybrid(MX, NV, DEQUANTIZED), grad_output=NV),
    "dequantized": per_role(input=hybrid(MX, ID, DEQUANTIZED), weight=hybrid(MX, ID, DEQUANTIZED), grad_output=ID),
    "current then blocks": per_role(
        input=hybrid(TENSOR, BLOCK, DEQUANTIZED), weight=hybrid(TENSOR, TILE, DEQUANTIZED), grad_output=BLOCK
    ),
}
hybrids = pytest.mark.parametrize("recipe", HYBRIDS.values(), ids=HYBRIDS)


@hybrids
def test_an_updated_weight_is_quantized_anew_in_both_directions(recipe: Recipe) -> None:
    """Invariant 29: the columnwise half comes from the rowwise half of the new weight."""
    x, w, dy = problem()
    layer = nn.Linear(*w.shape[::-1], bias=False, dtype=w.dtype)
    run, x = compiled(layer, recipe), x.requires_grad_()
    run(x).backward(dy)
    x.grad = layer.weight.grad = None
    with torch.no_grad():
        layer.weight.copy_(w)
    y = run(x)
    y.backward(dy)
    got = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}
    assert_same_bits(got, linear_step(recipe, x, w, dy))


@hybrids
def test_keeping_or_recomputing_the_input_of_a_hybrid_gives_the_same_bits(recipe: Recipe) -> None:
    """Invariants 30 and 45: what is saved for the backward, a quantized half or the input itself, is no question of
    numbers. Recomputed, its rowwise half is quantized twice."""
    from torch.utils.checkpoint import checkpoint

    steps, counts = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        model, recorder = Mlp().bfloat16(), Recorder(recipe)

        def forward(x: Tensor, model: nn.Module = model, recompute: bool = recompute) -> Tensor:
            return checkpoint(model, x, use_reentrant=False) if recompute else model(x)

        run = torch.compile(forward, backend=recorder, fullgraph=True)
        x = torch.randn(32, 48).bfloat16().requires_grad_()
        steps.append({**train_step(model, run, x), "dx": x.grad})
        counts.append(sum("quantize" in str(n.target) for gm in recorder.graphs for n in gm.graph.nodes))
    assert_same_bits(*steps)
    assert counts[1] > counts[0]


@pytest.mark.parametrize("recipe", [*NAMES, *HYBRIDS.values()], ids=[*NAMES, *HYBRIDS])
def test_what_is_saved_for_the_backward_survives_a_round_trip(recipe: Recipe | str) -> None:
    """Invariants 36 and 46: saved tensors are plain ones, so hooks may write them away and read them back."""
    saved: list[int] = []

    def pack(tensor: Tensor) -> bytes:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        saved.append(buffer.tell())
        return buffer.getvalue()

    def unpack(content: bytes) -> Tensor:
        return torch.load(io.BytesIO(content), weights_only=True)

    steps = []
    for hooks in (contextlib.nullcontext(), torch.autograd.graph.saved_tensors_hooks(pack, unpack)):
        torch.manual_seed(0)
        torch.compiler.reset()
        model, x = Mlp().bfloat16(), torch.randn(32, 48).bfloat16()
        run = compiled(model, recipe)
        run(x)
        with hooks:
            steps.append(train_step(model, run, x))
    assert_same_bits(*steps)
    assert saved, "something was saved"


@pytest.mark.parametrize("recipe", [*NAMES, HYBRIDS["mxfp8 then nvfp4"]], ids=[*NAMES, "hybrid"])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(recipe: Recipe | str) -> None:
    """Invariants 44 and 66: everything is in plain tensors, which torch.load reads with weights_only=True."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Backend]:
        torch.manual_seed(0)
        torch.compiler.reset()
        model = Mlp().bfloat16()
        return model, torch.optim.AdamW(model.parameters(), 0.01), eager_backend(recipe)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, backend: Backend, batches: Tensor) -> list[Tensors]:
        run, taken = torch.compile(model, backend=backend, fullgraph=True), []
        for x in batches:
            taken.append(train_step(model, run, x))
            for name, grad in taken[-1].items():
                if name != "output":
                    model.get_parameter(name).grad = grad
            optimizer.step()
            optimizer.zero_grad()
        return taken

    batches = torch.randn(4, 32, 48).bfloat16()
    whole = steps(*build(), batches)
    stopped = build()
    steps(*stopped, batches[:2])
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in stopped], buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert_same_bits(saved[0], stopped[0].state_dict())
    resumed = build()
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    for a, b in zip(steps(*resumed, batches[2:]), whole[2:], strict=True):
        assert_same_bits(a, b)


def test_the_state_of_delayed_scaling_is_read_without_pickles() -> None:
    """Invariants 44 and 66."""
    backend = eager_backend(delayed())
    torch.compile(nn.Linear(32, 32), backend=backend)(torch.randn(8, 32)).sum().backward()
    buffer = io.BytesIO()
    torch.save(backend.state_dict(), buffer)
    buffer.seek(0)
    assert_same_bits(torch.load(buffer, weights_only=True), backend.state_dict())
    assert eager_backend("mxfp8").state_dict() == {}, "other recipes have none"


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("recipe", ["mxfp8", CustomRecipe(qfactory=factories.current_scaling, fp8_dpa=False)], ids=str)
def test_attention_stays_as_it_was_and_is_reported(recipe: Recipe | str) -> None:
    """Invariant 65: attention that is not asked for."""
    q, k, v = torch.randn(3, 2, 4, 16, 32)
    backend = eager_backend(recipe)
    got = torch.compile(Attention(), backend=backend, fullgraph=True)(q, k, v)
    torch.compiler.reset()
    assert torch.equal(got, torch.compile(Attention(), backend="aot_eager")(q, k, v))
    assert {d.skip_reason for d in backend.report().decisions} == {fxquant.SkipReason.HIGH_PRECISION}


LAYERS = {
    "linear": lambda: nn.Linear(48, 32),
    "norm and linear": lambda: nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 32, bias=False)),
    "attention": lambda: nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True),
    "experts": Experts,
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("recipe", IDENTITIES.values(), ids=IDENTITIES)
def test_high_precision_gives_the_bits_of_every_kind_of_layer(recipe: Recipe, layer: str) -> None:
    """Invariants 2 and 49."""
    assert_same_bits(step_of_layer(layer, eager_backend(recipe)), plain_step_of_layer(layer))


def step_of_layer(layer: str, backend: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = LAYERS[layer]()
    x = torch.randn(1, 8, 48, requires_grad=True)
    return {**train_step(model, torch.compile(model, backend=backend), x), "dx": x.grad}


@functools.cache
def plain_step_of_layer(layer: str) -> dict[str, Tensor]:
    return step_of_layer(layer, "aot_eager")


@pytest.mark.parametrize("power", [-8, 8])
def test_a_factory_of_current_scaling_follows_gradients_of_any_size(power: int) -> None:
    """Invariant 3, for linears: gradients times 1e8 and 1e-8 give the bits of the recipe."""
    x, w, dy = problem(dtype=torch.float32)
    custom = CustomRecipe(qfactory=factories.current_scaling)
    scaled = dy * 10.0**power
    assert_same_bits(linear_step(custom, x, w, scaled), linear_step("current_scaling", x, w, scaled))
