"""Settings are checked where they are given, and the error says what to write."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
import torch

import fxquant
from fxquant import (
    Backend,
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    QParams,
    RecipeError,
    Rule,
    Rules,
    recipes,
)
from fxquant.checks import AtLeast, OneOf, article, checked, did_you_mean
from fxquant.errors import ArgumentError, OptionError, SettingError
from fxquant.spellings import FOREIGN


class Colour(Enum):
    RED = 1
    BLUE = 2


@checked(takes={"paint": "write colour="})
@dataclass(frozen=True)
class Settings:
    count: Annotated[int, AtLeast(1)] = 1
    share: float = 0.5
    name: str = "a"
    on: bool = False
    colour: Colour = Colour.RED
    mode: Literal["floor", "ceil", 3] = "floor"
    dtype: Annotated[torch.dtype, OneOf(torch.int8, torch.uint8)] = torch.int8
    any_dtype: torch.dtype | None = None
    function: Callable[[int], int] | None = None
    other: Any = None
    tensor: torch.Tensor | None = None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count must be an int of at least 1, not 0"),
        ({"count": 1.0}, "count must be an int of at least 1, not 1.0"),
        ({"count": True}, "count must be an int of at least 1, not True"),
        ({"share": "1"}, "share must be a number, not '1'"),
        ({"share": float("nan")}, "share must be a number, not nan"),
        ({"share": float("inf")}, "share must be a number, not inf"),
        ({"name": None}, "name must be a str, not None"),
        ({"on": 1}, "on must be True or False, not 1"),
        ({"colour": "blue"}, "colour must be Colour.RED or Colour.BLUE, not 'blue'; did you mean Colour.BLUE?"),
        ({"colour": Colour}, "not the class Colour"),
        ({"mode": "Ceil"}, "mode must be 'floor', 'ceil' or 3, not 'Ceil'; did you mean 'ceil'?"),
        ({"mode": 3.0}, "not 3.0; did you mean 3?"),
        ({"dtype": "uint8"}, "must be torch.int8 or torch.uint8, not 'uint8'; did you mean torch.uint8?"),
        ({"any_dtype": "int8"}, "any_dtype must be None or a torch.dtype, not 'int8'"),
        ({"function": 3}, "function must be None or a function, not 3"),
        ({"function": [3]}, "not a list"),
        ({"colours": 3}, "got an unexpected keyword 'colours'; did you mean colour=? Known keywords: count, share"),
        ({"paint": 3}, "got an unexpected keyword 'paint': write colour=."),
    ],
)
def test_a_wrong_value_or_keyword_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as error:
        Settings(**settings)
    said = str(error.value)
    assert message in said and said.startswith("Settings") and "\n" not in said
    assert isinstance(error.value, TypeError) and isinstance(error.value, RecipeError)


def test_what_fits_and_what_is_left_to_the_class_is_taken() -> None:
    made = Settings(2, 1, other=[1], tensor="not checked", function=len, mode=3, any_dtype=torch.int8)
    assert made.count == 2 and made.function is len and made == copy.copy(made) == pickle.loads(pickle.dumps(made))
    assert list(inspect.signature(Settings).parameters)[:2] == ["count", "share"]


@checked(ArgumentError, called="the function", takes={"first": "a letter, such as 'a'"})
def function(first: str, *, second: bool = False) -> str:
    return first * (1 + second)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "the function needs first: a letter, such as 'a'"),
        ((1,), {}, "the function: first must be a letter, such as 'a', not 1"),
        (("a", True), {}, "the function takes 1 argument by position, not 2; by keyword it takes second="),
        (("a",), {"first": "b"}, "the function got first twice"),
        (("a",), {"secnd": True}, "did you mean second=?"),
    ],
)
def test_functions_are_checked_alike(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    assert function("a", second=True) == "aa"
    with pytest.raises(OptionError) as error:
        function(*args, **kwargs)
    assert message in str(error.value)


def test_hints_look_past_case_and_know_other_names() -> None:
    assert did_you_mean("MXFP8", ["mxfp8", "nvfp4"]) == "; did you mean 'mxfp8'?"
    assert did_you_mean("e4m3", [torch.float8_e4m3fn, torch.float8_e5m2]) == "; did you mean torch.float8_e4m3fn?"
    assert did_you_mean("tensorwise", ["rows"], {"tensorwise": "one"}) == "; did you mean 'one'?"
    assert did_you_mean("zzz", ["rows"]) == did_you_mean("", ["rows"]) == ""
    assert [article(name) for name in ("int", "list")] == ["an int", "a list"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedScaling(margin="a"), "DelayedScaling: margin must be a number, not 'a'"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len must be an int of at least 1, not 0"),
        (lambda: DelayedScaling(amax_compute_algo="mean"), "must be 'max', 'most_recent' or a function, not 'mean'"),
        (lambda: DelayedScaling(interval=1), "'interval': scales are updated in every step"),
        (lambda: DelayedScalingRequest(reduce_amax="no"), "reduce_amax must be True or False"),
        (lambda: Float8CurrentScaling(fp8_format="E4M3"), "did you mean Format.E4M3?"),
        (lambda: Float8CurrentScaling(fp8_format=Format), "not the class Format"),
        (lambda: Float8CurrentScaling(fp8_quant_fwd_inp={}), "fp8_quant_fwd_inp must be None or a QParams, not a dict"),
        (lambda: QParams(amax_epsilon=-1), "amax_epsilon must be a number of at least 0, not -1"),
        (lambda: Float8BlockScaling(w_block_scaling_dim="2"), "w_block_scaling_dim must be 1 or 2, not '2'"),
        (lambda: MXFP8BlockScaling(block=16), "its blocks have 32 elements, which no setting changes"),
        (lambda: NVFP4BlockScaling(disable_rht="yes"), "disable_rht must be True or False, not 'yes'"),
        (lambda: MXFP8Quantizer(fp8_dtype="e4m3"), "did you mean torch.float8_e4m3fn?"),
        (lambda: IdentityQuantizer(dtype="bf16"), "dtype must be None or a torch.dtype, not 'bf16'"),
        (lambda: HybridQuantizer(MXFP8Quantizer()), "HybridQuantizer needs columnwise_quantizer: a Quantizer"),
        (
            lambda: HybridQuantizer(None, None),
            "rowwise_quantizer must be a Quantizer, not NoneType: IdentityQuantizer()",
        ),
        (lambda: CustomRecipe(), "CustomRecipe needs qfactory: a function of a QuantizerRole"),
        (lambda: CustomRecipe(qfactory=MXFP8Quantizer()), "not MXFP8Quantizer() itself: Rules([Rule("),
        (lambda: CustomRecipe(qfactory=MXFP8Quantizer), "MXFP8Quantizer itself: Rules([Rule("),
        (lambda: Rules(Rule(MXFP8Quantizer())), "rules must be a list: write Rules([...]), not a Rule"),
        (lambda: Rule(MXFP8Quantizer(), layer="head"), "'layer': write name=, a regular expression"),
        (lambda: Rule(), "Rule needs quantizer: a quantizer, a recipe or a factory"),
        (lambda: Rule("mxfp8", name=3), "name must be None or a str, not 3"),
        (lambda: recipes.get(3), "name must be the name of a recipe, such as 'mxfp8', not 3"),
        (lambda: recipes.get("MXFP8"), "did you mean 'mxfp8'? Known recipes: "),
        (lambda: recipes.get("Float8CurrentScaling"), "did you mean 'current_scaling'?"),
        (lambda: recipes.get("tensorwise"), "did you mean 'current_scaling'?"),
        (lambda: MXFP8Quantizer().quantize([1, 2]), "a quantizer takes a tensor, not a list"),
        (lambda: MXFP8Quantizer().quantize(torch.ones(2, 32), rowwise=False, columnwise=False), "no direction"),
        (lambda: MXFP8Quantizer().quantize(torch.ones(2, 32)).dequantize("row"), "did you mean 'rowwise'?"),
    ],
)
def test_recipes_and_quantizers_refuse_at_once(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"module_type": "Linear"},
            "no role has module_type='Linear' of a rule; did you mean 'linear'? Known: ",
        ),
        (
            {"module_type": "conv"},
            "no role has module_type='conv' of a rule. Known: linear, grouped_linear, ",
        ),
        ({"tensor_type": "weights"}, "no role has tensor_type='weights' of a rule; did you mean 'weight'?"),
        (
            {"module_type": "dpa", "tensor_type": "weight"},
            "no role with module_type='dpa' has tensor_type='weight' of a rule. Known: qkv, s, do, dp",
        ),
    ],
)
def test_a_rule_that_no_role_can_match_is_refused(keys: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        Rule(MXFP8Quantizer(), **keys)
    assert str(error.value).startswith(message)
    for fits in ({"module_type": ".*linear"}, {"tensor_type": "input|weight"}, {"module_type": "", "tensor_type": ""}):
        assert Rule(MXFP8Quantizer(), **fits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iner": "aot_eager"}, "unexpected keyword 'iner'; did you mean inner=? Known keywords: recipe, inner"),
        ({"inner": "AOT_eager"}, "inner must be 'inductor' or 'aot_eager', not 'AOT_eager'; did you mean 'aot_eager'?"),
        ({"save": "all"}, "save must be 'quantized', 'less', 'least' or 'fp8', not 'all'"),
        ({"gemm": 3}, "gemm must be 'auto', 'cublas', 'triton' or 'autotune', not 3"),
        ({"allow_float64": 1}, "allow_float64 must be True or False, not 1"),
    ],
)
def test_options_are_checked_by_the_same_rules(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        Backend("mxfp8", **options)
    assert message in str(error.value)
    with pytest.raises(OptionError):
        fxquant.compile(torch.nn.Linear(4, 4), "mxfp8", options=options)


LINEAR, X = torch.nn.Linear(64, 64), torch.ones(2, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fxquant.compile(LINEAR), 'needs recipe: a name, such as fxquant.compile(model, "mxfp8")'),
        (lambda: fxquant.compile(), "fxquant.compile needs model: a module or a function"),
        (lambda: fxquant.compile(LINEAR, "mxfp8", inner="aot_eager"), "write options={'inner': ...}"),
        (lambda: fxquant.compile(LINEAR, "mxfp8", dynmic=True), "'dynmic'; did you mean 'dynamic'?"),
        (lambda: fxquant.compile(LINEAR, "mxfp8", {"inner": "aot_eager"}), "by keyword it takes options="),
        (lambda: fxquant.compile(torch.nn.Linear, "mxfp8"), "not the class Linear: make an object of it"),
        (lambda: fxquant.compile(program(), "mxfp8"), "fxquant.quantize_program is for programs"),
        (lambda: fxquant.explain(None, "mxfp8", X), "a module or a function is explained, not a NoneType"),
        (lambda: fxquant.measure(program(), "mxfp8", X), "fxquant.quantize_program is for programs"),
        (lambda: fxquant.measure(LINEAR, "mxfp8", X.to("meta")), "tensors on the meta device do not have"),
        (lambda: fxquant.autocast("mxfp8"), "takes 0 arguments by position, not 1; by keyword it takes recipe="),
        (lambda: fxquant.autocast(fp8_recipe="mxfp8"), "'fp8_recipe': write recipe=."),
        (lambda: fxquant.autocast(enabled="no"), "enabled must be True or False, not 'no'"),
        (lambda: fxquant.Report(recipe="a").to_html(None), "a path is expected, not a NoneType"),
        (lambda: fxquant.Report(recipe="a").table("("), "layer='(' is not a regular expression"),
        (lambda: fxquant.Report(recipe="a").table(3), "layer must be a str, not 3"),
    ],
)
def test_every_door_refuses_in_a_sentence_of_ours(call: Callable[[], object], message: str) -> None:
    with pytest.raises(fxquant.FxQuantError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


def program() -> torch.export.ExportedProgram:
    return torch.export.export(LINEAR, (X,))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("fp8_autocast", "write fxquant.autocast(recipe=...)"),
        ("convert_to_float8_training", "write fxquant.compile(model, recipe)"),
        ("LayerNormLinear", "write the modules of torch.nn, and fxquant.compile"),
        ("quantise_program", "did you mean fxquant.quantize_program?"),
        ("Autocast", "did you mean fxquant.autocast?"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(name: str, instead: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(fxquant, name)
    assert f"module 'fxquant' has no attribute {name!r}" in str(error.value) and instead in str(error.value)
    assert not set(FOREIGN) & set(fxquant.__all__)
