"""Every operator is one object: its schema, its effect on fake tensors and its kernels agree with its meaning."""

from __future__ import annotations

import ast
import re
from enum import Enum
from pathlib import Path

import pytest
import torch

import fxquant
import fxquant.kernels
import fxquant.passes.pipeline
from fxquant.kernels.operator import OPERATORS, Facts, operator_of

SCHEMAS = {
    "quantize": "(Tensor x, str spec, str direction, Tensor? state=None) -> Tensor[]",
    "hybrid_quantize": (
        "(Tensor x, str rowwise_spec, str columnwise_spec, Tensor? rowwise_state=None, "
        "Tensor? columnwise_state=None) -> Tensor[]"
    ),
    "produce_quantize": (
        "(Tensor[] inputs, str spec, Tensor?[] rowwise_states, Tensor?[] columnwise_states, bool record) -> Tensor[]"
    ),
    "produce_quantize_into": (
        "(Tensor[] inputs, str spec, Tensor?[] rowwise_states, Tensor?[] columnwise_states, Tensor(a!) amaxes, "
        "Tensor? step, bool from_last) -> Tensor[]"
    ),
    "amax": "(Tensor x) -> Tensor",
    "scale_from_amax": "(Tensor amax, str spec) -> Tensor",
    "delayed_update": (
        "(Tensor scale, Tensor history, Tensor forward_amax, Tensor backward_amax, Tensor step, Tensor fp8_max, "
        "float margin, str algorithm) -> Tensor[]"
    ),
    "delayed_advance": (
        "(Tensor(a!) scale, Tensor(b!) history, Tensor(c!) forward_amax, Tensor backward_amax, Tensor(d!) step, "
        "Tensor fp8_max, float margin, str algorithm) -> Tensor[]"
    ),
    "record": "(Tensor amaxes, Tensor[] new, int[] slots) -> Tensor",
    "record_since": "(Tensor amaxes, Tensor step, Tensor[] new, int[] slots) -> Tensor",
    "dequantize": "(Tensor[] parts, str spec, str direction, SymInt[] size, ScalarType dtype) -> Tensor",
    "scaled_mm": (
        "(Tensor[] a, Tensor[] b, str a_spec, str b_spec, Tensor? bias, ScalarType out_dtype, "
        "bool fast_accum) -> Tensor"
    ),
    "fused_scaled_mm": (
        "(Tensor[] a, Tensor[] b, str a_spec, str b_spec, Tensor? bias, ScalarType out_dtype, bool fast_accum, "
        "str activation, Tensor? residual, bool record) -> Tensor[]"
    ),
    "split_quantize": "(Tensor x, Tensor? offs, str spec, str direction, Tensor? state=None) -> Tensor[]",
    "hybrid_split_quantize": (
        "(Tensor x, Tensor? offs, str rowwise_spec, str columnwise_spec, Tensor? rowwise_state=None, "
        "Tensor? columnwise_state=None) -> Tensor[]"
    ),
    "split_quantize_and_amax": "(Tensor x, str spec) -> Tensor[]",
    "split_amax": "(Tensor x, Tensor? offs) -> Tensor",
    "split_dequantize": "(Tensor[] parts, Tensor? offs, str spec, SymInt length, ScalarType dtype) -> Tensor",
    "grouped_scaled_mm": (
        "(Tensor[] a, Tensor[] b, Tensor? offs, str a_spec, str b_spec, ScalarType out_dtype, "
        "bool fast_accum) -> Tensor"
    ),
    "quantize_heads": "(Tensor x, str spec, SymInt groups, bool transposed, Tensor? scale=None) -> Tensor[]",
    "quantize_qkv": "(Tensor q, Tensor k, Tensor v, str spec, Tensor? scale=None, bool record=False) -> Tensor[]",
    "quantize_qkv_into": "(Tensor q, Tensor k, Tensor v, str spec, Tensor scale, Tensor(a!) amaxes) -> Tensor[]",
    "dequantize_heads": (
        "(Tensor[] parts, str spec, SymInt groups, bool transposed, SymInt[] size, ScalarType dtype) -> Tensor"
    ),
    "transpose_codes": "(Tensor codes, SymInt alignment) -> Tensor",
    "attention_forward": (
        "(Tensor[] q, Tensor[] k, Tensor[] v, Tensor[] extras, Tensor? seed, Tensor? s_scale, str spec, "
        "SymInt width, ScalarType dtype) -> Tensor[]"
    ),
    "attention_forward_into": (
        "(Tensor[] q, Tensor[] k, Tensor[] v, Tensor[] extras, Tensor? seed, Tensor? s_scale, str spec, "
        "SymInt width, ScalarType dtype, Tensor(a!) amaxes) -> Tensor[]"
    ),
    "attention_backward": (
        "(Tensor do, Tensor[] q, Tensor[] k, Tensor[] v, Tensor o, Tensor lse, Tensor[] extras, Tensor? seed, "
        "Tensor? s_scale, Tensor? do_scale, Tensor? dp_scale, int[] wanted, str spec, SymInt width) -> Tensor[]"
    ),
    "linear": "(Tensor input, Tensor weight, Tensor? bias, str spec) -> Tensor",
    "linear_stateful": (
        "(Tensor input, Tensor weight, Tensor? bias, Tensor? scale, Tensor(a!)? forward_amax, "
        "Tensor(b!)? backward_amax, Tensor? step, Tensor? random, str spec, Tensor[]? weight_rowwise=None, "
        "Tensor[]? weight_columnwise=None) -> Tensor"
    ),
    "grouped_linear": "(Tensor input, Tensor weight, Tensor? offs, str spec) -> Tensor",
    "grouped_linear_stateful": (
        "(Tensor input, Tensor weight, Tensor? offs, Tensor? scale, Tensor(a!)? forward_amax, "
        "Tensor(b!)? backward_amax, Tensor? step, Tensor? random, str spec, Tensor[]? weight_rowwise=None, "
        "Tensor[]? weight_columnwise=None) -> Tensor"
    ),
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor[] extras, str spec) -> Tensor",
    "attention_stateful": (
        "(Tensor q, Tensor k, Tensor v, Tensor[] extras, Tensor? scale, Tensor(a!)? forward_amax, "
        "Tensor(b!)? backward_amax, Tensor? step, Tensor? random, str spec) -> Tensor"
    ),
}
"""The schemas that saved programs were made with."""
FOLDERS = [Path(module.__file__).parent for module in (fxquant, fxquant.kernels, fxquant.passes)]
NAMED = re.compile(r"torch\.ops\.fxquant\.(\w+)|fxquant::(\w+)")


def plain(schema: str) -> str:
    """A schema without the letters of aliases, and with one way to say integer."""
    return re.sub(r"\(\w+!\)", "(!)", schema).replace("SymInt", "int")


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_those_of_saved_programs(name: str) -> None:
    schema = getattr(torch.ops.fxquant, name).default._schema
    assert plain(str(schema).removeprefix(f"fxquant::{name}")) == plain(SCHEMAS[name])


@pytest.mark.parametrize("name", OPERATORS)
def test_meanings_have_the_schemas(name: str) -> None:
    """Also of an operator with a schema of its own, but for what torch cannot infer."""
    found = OPERATORS[name]
    assert operator_of(found.target) is operator_of(found.target.overloadpacket) is found
    parameters = [argument.name for argument in found.target._schema.arguments]
    assert parameters == list(found.meaning.__code__.co_varnames[: found.meaning.__code__.co_argcount])


def test_operators_that_are_named_are_registered() -> None:
    for path in (path for folder in FOLDERS for path in folder.rglob("*.py")):
        text = path.read_text()
        for match in NAMED.finditer(text):
            assert hasattr(torch.ops.fxquant, match[1] or match[2]), (path.name, match[0])
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "is_fxquant":
                for name in node.args[1:]:
                    assert not isinstance(name, ast.Constant) or hasattr(torch.ops.fxquant, name.value), name.value


def test_a_fallback_says_why_nothing_better_was_chosen() -> None:
    class Kernel(Enum):
        BEST, OTHER = range(2)

    @fxquant.kernels.operator.operator(namespace="fxquant_kernels")
    def chosen_in_tests(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @chosen_in_tests.implementation(Kernel.BEST, when=lambda facts: "" if facts.on_hopper else "not on Hopper")
    def best(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    chosen_in_tests.implementation(Kernel.OTHER, when=lambda facts: "no CUDA" * (not facts.on_cuda), fallback=True)(
        best
    )
    chosen = [str(chosen_in_tests.choose(Facts(capability=(major, 0)))) for major in (9, 8, 0)]
    assert chosen == ["Kernel.BEST", "Kernel.OTHER (not on Hopper)", "Reference.REFERENCE (not on Hopper)"]
    assert chosen_in_tests.best(torch.zeros(1)).item() == 0 and chosen_in_tests.run(Kernel.BEST) is best
