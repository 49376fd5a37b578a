"""The invariants of TransformerEngine's own tests (te-semantics, section 2), through the compiled path."""

from __future__ import annotations

import copy
import itertools

import golden
import pytest
import torch
from helpers import NAMES, assert_same_bits, compiled, hybrid, linear_step, per_role, problem, train_step
from torch import Tensor, nn

from fxquant import (
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
    recipes,
)
from fxquant.formats import ELEMENTS

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

    def steps(compile) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        torch.compiler.reset()
        model = Mlp(bias).bfloat16()
        run, optimizer, taken = compile(model), torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(3):
            x = torch.randn(4, 8, 48).bfloat16()
            output = run(x)
            output.square().sum().backward()
            taken.append({"output": output.detach()} | {k: p.grad.clone() for k, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        return taken

    plain = steps(lambda model: torch.compile(model, backend="aot_eager"))
    for a, b in zip(steps(lambda model: compiled(model, recipe)), plain, strict=True):
        assert_same_bits(a, b)


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
