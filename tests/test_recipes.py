from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import NAMES, Asked

import fxquant
from fxquant import (
    CustomRecipe,
    Float8BlockQuantizer,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Format,
    IdentityQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    QParams,
    RecipeError,
    Rule,
    Rules,
    recipes,
)
from fxquant.formats import gemm_mismatch
from fxquant.roles import GEMM_OPERANDS

E5M2 = torch.float8_e5m2


def role(tensor_type: str = "input", name: str = "layers.0.fc", module_type: str = "linear") -> fxquant.QuantizerRole:
    return fxquant.QuantizerRole(module_type, tensor_type, name)


@pytest.mark.parametrize(
    ("name", "input", "weight", "grad_output"),
    [
        ("high_precision", *[IdentityQuantizer()] * 3),
        ("current_scaling", *[Float8CurrentScalingQuantizer()] * 2, Float8CurrentScalingQuantizer(E5M2)),
        ("rowwise", *[fxquant.Float8RowwiseQuantizer()] * 3),
        (
            "float8_blockwise",
            Float8BlockQuantizer(block_scaling_dim=1),
            Float8BlockQuantizer(block_scaling_dim=2),
            Float8BlockQuantizer(block_scaling_dim=1),
        ),
        ("mxfp8", *[MXFP8Quantizer()] * 3),
        (
            "nvfp4",
            NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
            NVFP4Quantizer(with_2d_quantization=True),
            NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True),
        ),
    ],
)
def test_named_recipes_give_these_quantizers(name: str, input, weight, grad_output) -> None:
    recipe = recipes.get(name)
    assert [recipe.quantizer(role(t)) for t in ("input", "weight", "grad_output")] == [input, weight, grad_output]
    assert recipe.quantizer(role(module_type="matmul")).is_identity
    assert recipe.quantizer(role("qkv", module_type="dpa")).is_identity


@pytest.mark.parametrize("name", ["high_precision", *NAMES])
def test_named_recipes_multiply_in_every_gemm(name: str) -> None:
    recipe = recipes.get(name)
    for (a, a_side), (b, b_side) in GEMM_OPERANDS.values():
        assert gemm_mismatch(recipe.quantizer(role(a)).spec(a_side), recipe.quantizer(role(b)).spec(b_side)) is None


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_equal_recipes_have_equal_fingerprints(name: str) -> None:
    recipe = recipes.get(name)
    assert type(recipe)() == recipe
    assert type(recipe)().fingerprint() == recipe.fingerprint()
    assert hash(type(recipe)()) == hash(recipe)


def test_different_recipes_have_different_fingerprints() -> None:
    made = [
        *recipes.RECIPES.values(),
        Float8CurrentScaling(use_power_2_scales=True),
        Float8CurrentScaling(fp8_format=Format.E4M3),
        MXFP8BlockScaling(enable_2d_quantization=True),
        MXFP8BlockScaling(fp8_format=Format.HYBRID),
        NVFP4BlockScaling(disable_rht=True),
        NVFP4BlockScaling(disable_stochastic_rounding=True),
        Float8BlockScaling(use_f32_scales=True),
        CustomRecipe(qfactory=lambda role: MXFP8Quantizer()),
        CustomRecipe(qfactory=functools.partial(max, key=1)),
        CustomRecipe(qfactory=Rules([Rule(MXFP8Quantizer())])),
    ]
    assert len({recipe.fingerprint() for recipe in made}) == len(made)
    assert not any(" at 0x" in recipe.fingerprint() for recipe in made), "an address differs between processes"


def test_options_reach_their_quantizers() -> None:
    assert Float8CurrentScaling(use_power_2_scales=True).quantizer(role()).force_pow_2_scales
    e4m3 = Float8CurrentScaling(fp8_format=Format.E4M3)
    assert e4m3.quantizer(role("grad_output")) == Float8CurrentScalingQuantizer()
    assert MXFP8BlockScaling(fp8_format=Format.HYBRID).quantizer(role("grad_output")) == MXFP8Quantizer(E5M2)
    assert not Float8BlockScaling(use_f32_scales=True).quantizer(role()).force_pow_2_scales
    plain = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert [plain.quantizer(role(t)) for t in ("input", "weight", "grad_output")] == [NVFP4Quantizer()] * 3
    assert not NVFP4BlockScaling(disable_stochastic_rounding=True).quantizer(role("grad_output")).stochastic_rounding
    assert not NVFP4BlockScaling(disable_rht=True).quantizer(role("grad_output")).with_rht


@pytest.mark.parametrize("scope", ["none", "weights", "activations", "all"])
def test_4over6_is_for_the_operands_named_and_never_for_gradients(scope: str) -> None:
    """Invariant 14."""
    plain = functools.partial(NVFP4BlockScaling, disable_rht=True, disable_stochastic_rounding=True)
    for recipe in (plain(nvfp4_4over6=scope), plain(nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256=scope)):
        made = {t: recipe.quantizer(role(t)) for t in ("input", "weight", "grad_output")}
        assert made["grad_output"] == NVFP4Quantizer()
        assert made["weight"].with_2d_quantization
        for operand, own in (("input", "activations"), ("weight", "weights")):
            assert made[operand].nvfp4_use_4over6 == (recipe.nvfp4_4over6 in (own, "all"))
            largest = made[operand].nvfp4_e4m3_max
            assert (largest == 256) == (made[operand].nvfp4_use_4over6 and scope in (own, "all"))
    assert plain(nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE").quantizer(role()).nvfp4_4over6_err_mode == "MSE"


def test_row_amaxes_are_for_activations() -> None:
    recipe = NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True)
    assert recipe.quantizer(role()) == NVFP4Quantizer(row_scaled_nvfp4=True)
    assert recipe.quantizer(role("weight")) == NVFP4Quantizer(with_2d_quantization=True)
    assert recipe.quantizer(role("grad_output")) == NVFP4Quantizer(stochastic_rounding=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nvfp4_4over6": "all"}, "needs disable_rht=True and disable_stochastic_rounding=True"),
        ({"nvfp4_4over6": "weights", "disable_rht": True}, "needs disable_stochastic_rounding=True"),
        (
            {"nvfp4_4over6": "gradients"},
            "nvfp4_4over6 must be 'none', 'weights', 'activations' or 'all'",
        ),
        ({"nvfp4_4over6_e4m3_use_256": True}, "nvfp4_4over6_e4m3_use_256 must be 'none', .* not True"),
        ({"nvfp4_4over6_err_mode": "L2"}, "must be 'MAE' or 'MSE'"),
        ({"row_scaled_activation": True}, "needs disable_rht=True"),
    ],
)
def test_nvfp4_settings_that_exclude_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        NVFP4BlockScaling(**settings)


def test_mxfp8_tiles_are_for_weights_of_linears_only() -> None:
    """Invariant 13."""
    recipe = MXFP8BlockScaling(enable_2d_quantization=True)
    assert recipe.quantizer(role("weight")).with_2d_quantization
    assert recipe.quantizer(role("weight", module_type="grouped_linear")).with_2d_quantization
    assert not recipe.quantizer(role("input")).with_2d_quantization


@pytest.mark.parametrize("recipe", [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling])
def test_pure_e5m2_is_refused(recipe) -> None:
    with pytest.raises(RecipeError, match="does not support pure E5M2"):
        recipe(fp8_format=Format.E5M2)


def test_tile_by_tile_block_gemms_are_refused() -> None:
    with pytest.raises(RecipeError, match="2D by 2D"):
        Float8BlockScaling(x_block_scaling_dim=2)
    with pytest.raises(RecipeError, match="must be 1 or 2"):
        Float8BlockScaling(w_block_scaling_dim=3)


def test_unknown_recipe_lists_the_known_and_guesses() -> None:
    with pytest.raises(RecipeError, match=r"unknown recipe 'mxpf8'; did you mean 'mxfp8'\?.*current_scaling"):
        recipes.get("mxpf8")
    with pytest.raises(RecipeError, match="pass CustomRecipe"):
        recipes.resolve(lambda role: MXFP8Quantizer())
    with pytest.raises(RecipeError, match="not an int"):
        recipes.resolve(3)
    with pytest.raises(RecipeError, match="unknown recipe"):
        Rules(default="mxpf8")
    assert recipes.resolve(recipes.get("mxfp8")) is recipes.resolve("mxfp8")


def test_none_from_a_factory_names_the_role() -> None:
    """Invariant 11."""
    with pytest.raises(RecipeError, match=r"returned None for role layers.0.fc \(linear, input\): return an Identity"):
        CustomRecipe(qfactory=lambda role: None).quantizer(role())
    with pytest.raises(RecipeError, match="returned a str"):
        CustomRecipe(qfactory=lambda role: "mxfp8").quantizer(role())
    with pytest.raises(RecipeError, match=r"failed for role layers.0.fc \(linear, input\): AttributeError .*'tensor'"):
        CustomRecipe(qfactory=lambda role: role.tensor).quantizer(role())
    with pytest.raises(RecipeError, match="rule 0 is a MXFP8Quantizer, not a Rule"):
        Rules([MXFP8Quantizer()])
    with pytest.raises(RecipeError, match="qfactory must be a function of a QuantizerRole"):
        CustomRecipe(qfactory="mxfp8")
    with pytest.raises(TypeError):
        CustomRecipe()


def test_the_kind_of_a_recipe_can_be_asked_as_in_transformer_engine() -> None:
    kinds = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "custom")
    groups = ("float8_per_tensor_scaling", "block_scaling", "fp8")
    custom = CustomRecipe(qfactory=fxquant.HighPrecision().quantizer)
    asked = {
        name: [kind for kind in (*kinds, *groups) if getattr(recipe, kind)()]
        for name, recipe in {**recipes.RECIPES, "custom": custom}.items()
    }
    assert asked == {
        "high_precision": [],
        "current_scaling": ["float8_current_scaling", "float8_per_tensor_scaling", "fp8"],
        "rowwise": ["fp8"],
        "float8_blockwise": ["float8_block_scaling", "block_scaling", "fp8"],
        "mxfp8": ["mxfp8", "block_scaling", "fp8"],
        "nvfp4": ["nvfp4", "block_scaling"],
        "weight_only_fp8": [],
        "weight_only_nvfp4": [],
        "delayed_scaling": ["delayed", "float8_per_tensor_scaling", "fp8"],
        "custom": ["custom"],
    }
    assert MXFP8BlockScaling.mxfp8() and not MXFP8BlockScaling.nvfp4(), "a class can be asked as well"


def mxfp8_factory(role: fxquant.QuantizerRole, dtype: torch.dtype = torch.float8_e4m3fn) -> MXFP8Quantizer:
    return MXFP8Quantizer(dtype)


def largest(history: torch.Tensor) -> torch.Tensor:
    return history.amax(0)


VALUES = {
    **recipes.RECIPES,
    "hybrid elements": MXFP8BlockScaling(fp8_format=Format.HYBRID, backward_override="dequantized"),
    "delayed with a function": fxquant.DelayedScaling(amax_compute_algo=largest, margin=2),
    "factory": CustomRecipe(qfactory=mxfp8_factory),
    "partial": CustomRecipe(qfactory=functools.partial(mxfp8_factory, dtype=E5M2)),
    "rules": CustomRecipe(qfactory=Rules([Rule(MXFP8Quantizer(), name="a|b"), Rule(mxfp8_factory)], "nvfp4")),
    "request": CustomRecipe(qfactory=Rules(default=fxquant.DelayedScalingRequest(amax_compute_algo=largest))),
    "settings": CustomRecipe(mxfp8_factory, fp8_dpa=True, backward_override="high_precision"),
}


@pytest.mark.parametrize("recipe", VALUES.values(), ids=VALUES)
def test_recipes_are_values(recipe: fxquant.Recipe) -> None:
    for same in (copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert type(same) is type(recipe) and same == recipe and hash(same) == hash(recipe)
        assert same.fingerprint() == recipe.fingerprint() and repr(same) == repr(recipe) and str(same) == str(recipe)
    assert " at 0x" not in repr(recipe), "an address differs between processes"
    assert repr(MXFP8BlockScaling(enable_2d_quantization=True)) == "MXFP8BlockScaling(enable_2d_quantization=True)"
    assert [other for other in VALUES.values() if other == recipe] == [recipe]


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    code = f"import {__name__} as t\nfor recipe in t.VALUES.values(): print(recipe.fingerprint())"
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.splitlines() == [recipe.fingerprint() for recipe in VALUES.values()]


def test_partials_are_compared_by_value() -> None:
    def recipe(**settings: torch.dtype) -> CustomRecipe:
        return CustomRecipe(qfactory=functools.partial(mxfp8_factory, **settings))

    assert recipe(dtype=E5M2) == recipe(dtype=E5M2) and hash(recipe(dtype=E5M2)) == hash(recipe(dtype=E5M2))
    assert recipe(dtype=E5M2) != recipe() != CustomRecipe(qfactory=mxfp8_factory)
    by_identity = CustomRecipe(qfactory=functools.partial(mxfp8_factory, dtype=[E5M2]))
    assert {by_identity: 1}[copy.copy(by_identity)] == 1, "arguments that cannot be hashed do no harm"


def test_what_cannot_be_pickled_says_so() -> None:
    local = CustomRecipe(qfactory=lambda role: MXFP8Quantizer())
    assert copy.deepcopy(local) == local, "copying needs no import"
    for recipe in (
        local,
        CustomRecipe(qfactory=Rules(default=lambda role: MXFP8Quantizer())),
        fxquant.DelayedScaling(amax_compute_algo=lambda history: history[0]),
    ):
        with pytest.raises(RecipeError, match=r"lambda.* cannot be pickled: .*top level of a module"):
            pickle.dumps(recipe)


@pytest.mark.parametrize(
    "name", ["current_scaling", "delayed_scaling", "rowwise", "float8_blockwise", "mxfp8", "nvfp4"]
)
def test_named_recipes_quantize_attention_when_asked(name: str) -> None:
    kind, role = type(recipes.get(name)), fxquant.QuantizerRole("dpa", "qkv", "attn")
    assert kind(fp8_dpa=False, fp8_mha=False) == recipes.get(name)
    assert recipes.get(name).quantizer(role) == IdentityQuantizer()
    with pytest.raises(RecipeError, match="fp8_mha=True is not supported"):
        kind(fp8_mha=True)
    if name in ("float8_blockwise", "nvfp4"):
        with pytest.raises(RecipeError, match="keeps attention in high precision: its format is not for attention"):
            kind(fp8_dpa=True)
        return
    recipe = kind(fp8_dpa=True)
    assert recipe != recipes.get(name) and "fp8_dpa=True" in recipe.fingerprint()
    assert recipe.quantizer(role) != IdentityQuantizer()
    assert recipe.quantizer(fxquant.QuantizerRole("matmul", "input")) == IdentityQuantizer()


def test_keywords_without_a_meaning_here_are_refused() -> None:
    assert MXFP8BlockScaling(margin=0) == MXFP8BlockScaling()
    with pytest.raises(RecipeError, match="no margin"):
        MXFP8BlockScaling(margin=1)
    with pytest.raises(RecipeError, match="no backward_override='dequantized'"):
        fxquant.DelayedScaling(backward_override="dequantized")
    with pytest.raises(RecipeError, match="fp8_mha=True is not supported"):
        CustomRecipe(qfactory=mxfp8_factory, fp8_mha=True)
    with pytest.raises(RecipeError, match="CustomRecipe: backward_override must be None, 'high_precision'"):
        CustomRecipe(qfactory=mxfp8_factory, backward_override="bf16")


def test_each_kind_of_operand_may_have_its_own_scales() -> None:
    eps = QParams(power_2_scale=True, amax_epsilon=1e-6)
    current = Float8CurrentScaling(fp8_quant_bwd_grad=eps, fp8_quant_fwd_inp=QParams(amax_epsilon=0.5))
    assert current.quantizer(role()) == Float8CurrentScalingQuantizer(amax_epsilon=0.5)
    assert current.quantizer(role("weight")) == Float8CurrentScalingQuantizer()
    grad = Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True, amax_epsilon=1e-6)
    assert current.quantizer(role("grad_output")) == grad
    block = Float8BlockScaling(fp8_quant_fwd_weight=QParams(amax_epsilon=1e-3))
    assert block.quantizer(role("weight")) == Float8BlockQuantizer(amax_epsilon=1e-3, force_pow_2_scales=False)
    assert block.quantizer(role()) == Float8BlockScaling().quantizer(role())
    assert current != Float8CurrentScaling() and current.fingerprint() != Float8CurrentScaling().fingerprint()
    for keyword in ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"):
        with pytest.raises(RecipeError, match=r"fp8_quant_fwd_inp=.* asks for what only FP4 has"):
            Float8CurrentScaling(fp8_quant_fwd_inp=QParams(**{keyword: True}))


@pytest.mark.parametrize("alignment", [0, -16])
def test_alignment_must_be_positive_and_asks_nobody(alignment: int) -> None:
    """Invariant 12."""
    with pytest.raises(RecipeError, match=f"quantization_alignment must be an int of at least 1, not {alignment}"):
        CustomRecipe(qfactory=mxfp8_factory, quantization_alignment=alignment)
    asked = Asked(fxquant.HighPrecision())
    assert CustomRecipe(qfactory=asked).quantization_alignment == 128
    assert CustomRecipe(qfactory=asked, quantization_alignment=32).quantization_alignment == 32
    assert asked.roles == []


def test_backward_override_of_a_custom_recipe_is_on_top_of_its_factory() -> None:
    """Invariants 32 and 50: no quantizer stands in its way but a delayed one."""
    hybrid = fxquant.HybridQuantizer(NVFP4Quantizer(), MXFP8Quantizer(), columnwise_source="rowwise_dequantized")
    recipe = CustomRecipe(qfactory=Rules(default=hybrid), backward_override="high_precision")
    assert recipe.quantizer(role()) == fxquant.HybridQuantizer(NVFP4Quantizer(), IdentityQuantizer(), "original")
    assert recipe.quantizer(role("grad_output")) == IdentityQuantizer()
    delayed = CustomRecipe(qfactory=Rules(default=fxquant.DelayedScalingRequest()), backward_override="high_precision")
    with pytest.raises(RecipeError, match=r"does not go with delayed scaling \(role layers.0.fc \(linear, input\)\)"):
        delayed.quantizer(role())


def test_first_matching_rule_answers() -> None:
    rules = Rules(
        [
            Rule(IdentityQuantizer(), name=r"lm_head|.*\.router"),
            Rule(NVFP4Quantizer(), tensor_type="weight"),
            Rule(MXFP8Quantizer(E5M2), module_type="linear", tensor_type="grad_output", name=r"layers\.0\..*"),
        ],
        default="mxfp8",
    )
    assert rules(role("weight", "layers.1.router")).is_identity
    assert rules(role("weight", "layers.1.fc")) == NVFP4Quantizer()
    assert rules(role("grad_output")) == MXFP8Quantizer(E5M2)
    assert rules(role("grad_output", "layers.1.fc")) == MXFP8Quantizer()
    assert rules(role("weight", "my.lm_head")) == NVFP4Quantizer(), "a pattern matches the whole name"


def test_rules_that_match_nothing_are_named() -> None:
    recipe = CustomRecipe(qfactory=Rules([Rule(MXFP8Quantizer(), name="lyers.*"), Rule(MXFP8Quantizer())]))
    assert recipe.unused([role()]) == ["rule 0: name='lyers.*'"]
    assert recipes.get("mxfp8").unused([role()]) == []


def test_the_public_names_exist() -> None:
    assert all(getattr(fxquant, name) is not None for name in fxquant.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fxquant.nonsense
    assert fxquant.HybridQuantizer.columnwise_source == "original"


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize(
    "kind", ["Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"]
)
def test_backward_override_quantizes_the_forward_alone(kind: str, override: str) -> None:
    """Invariants 33 and 50: the hybrids that TransformerEngine's zoo spells out."""
    recipe = getattr(fxquant, kind)(backward_override=override)
    roles = {t: fxquant.QuantizerRole("linear", t, "fc") for t in ("input", "weight", "grad_output")}
    assert recipe.quantizer(roles["grad_output"]) == fxquant.IdentityQuantizer()
    source = "original" if override == "high_precision" else "rowwise_dequantized"
    for operand in ("input", "weight"):
        plain = getattr(fxquant, kind)().quantizer(roles[operand])
        assert recipe.quantizer(roles[operand]) == fxquant.HybridQuantizer(plain, fxquant.IdentityQuantizer(), source)
    with pytest.raises(RecipeError, match="backward_override"):
        getattr(fxquant, kind)(backward_override="bf16")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (recipes.MXFP8BlockScaling, "pass an instance, MXFP8BlockScaling()"),
        (MXFP8Quantizer(), "a quantizer is not a recipe"),
        (lambda role: MXFP8Quantizer(), "a factory is not a recipe"),
        (8, "not an int"),
    ],
)
def test_what_is_no_recipe_is_refused_with_what_to_pass(given: object, said: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipes.resolve(given)  # type: ignore[arg-type]
    assert said in str(error.value)
