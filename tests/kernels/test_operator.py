"""Every operator is one object: its schema, its effect on fake tensors and its kernels agree with its meaning."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxquant
import fxquant.kernels
import fxquant.passes.pipeline
from fxquant.compat.private import tree_map_only
from fxquant.compat.values import FakeTensorMode
from fxquant.formats import FORMATS, AttentionSpec, QuantSpec, Step
from fxquant.kernels.attention import ops as attention
from fxquant.kernels.cast import ops as cast
from fxquant.kernels.cast.producers import CastSpec
from fxquant.kernels.grouped import ops as grouped
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.linear.ops import fused_scaled_mm, scaled_mm
from fxquant.kernels.operator import OPERATORS, TRACED, Facts, Kernel, operator_of
from fxquant.kernels.probe import ops as probes
from fxquant.kernels.probe.reference import COLUMNS
from fxquant.kernels.state import ops as state_ops

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
    "quantize_kept": "(Tensor x) -> Tensor[]",
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
        "Tensor[]? weight_columnwise=None, Tensor(c!)? probe_forward=None, Tensor(d!)? probe_backward=None, "
        'str probe="") -> Tensor'
    ),
    "grouped_linear": "(Tensor input, Tensor weight, Tensor? offs, str spec) -> Tensor",
    "grouped_linear_stateful": (
        "(Tensor input, Tensor weight, Tensor? offs, Tensor? scale, Tensor(a!)? forward_amax, "
        "Tensor(b!)? backward_amax, Tensor? step, Tensor? random, str spec, Tensor[]? weight_rowwise=None, "
        "Tensor[]? weight_columnwise=None, Tensor(c!)? probe_forward=None, Tensor(d!)? probe_backward=None, "
        'str probe="") -> Tensor'
    ),
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor[] extras, str spec) -> Tensor",
    "attention_stateful": (
        "(Tensor q, Tensor k, Tensor v, Tensor[] extras, Tensor? scale, Tensor(a!)? forward_amax, "
        "Tensor(b!)? backward_amax, Tensor? step, Tensor? random, str spec, Tensor(c!)? probe_forward=None, "
        'Tensor(d!)? probe_backward=None, str probe="") -> Tensor'
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


HEADS = [name for name, row in FORMATS.items() if row.family in ("per_head", "mxfp8") and "2d" not in name]
MATRICES = [name for name, row in FORMATS.items() if row.element is not None and row.family not in ("per_head",)]
BIAS, OFFS = torch.randn(48), torch.tensor([3, 3, 40, 60], dtype=torch.int32)


def calls(name: str) -> list[tuple[Any, ...]]:
    """Arguments of an operator of casts, GEMMs and groups, in a format."""
    x, w, batch = torch.randn(70, 50).bfloat16(), torch.randn(48, 50).bfloat16(), torch.randn(4, 48, 50)
    a, b = cast.quantize(x, name, "rowwise"), cast.quantize(w, name, "rowwise")
    stacked = grouped.split_quantize(batch, None, name, "rowwise")
    rows, columns = (grouped.split_quantize(x, OFFS, name, way) for way in ("rowwise", "columnwise"))
    both = str(CastSpec("silu_mul", QuantSpec(format=name), QuantSpec(format=name)))
    return [
        (cast.quantize, x, name, "rowwise"), (cast.quantize, x, name, "columnwise"),
        (cast.hybrid_quantize, x, name, name), (cast.produce_quantize, [x, x], both, [None], [None], True),
        (cast.produce_quantize_into, [x, x], both, [None], [None], torch.zeros(1), None, False),
        (cast.scale_from_amax, torch.ones(1), name), (cast.tensor_scale, x, name), (cast.amaxes_of, x, name, "rowwise"),
        (cast.dequantize, a, name, "rowwise", [70, 50], torch.float32), (cast.amax, x),
        (cast.quantize_kept, x),
        (scaled_mm, a, b, name, name, BIAS, torch.bfloat16, False),
        (fused_scaled_mm, a, b, name, name, None, torch.bfloat16, False, "gelu", torch.ones(70, 48).bfloat16(), True),
        (grouped.split_quantize, x, OFFS, name, "rowwise"), (grouped.split_quantize, x, OFFS, name, "columnwise"),
        (grouped.split_quantize, batch, None, name, "columnwise"), (grouped.split_amax, x, OFFS),
        (grouped.hybrid_split_quantize, x, OFFS, name, name), (grouped.split_quantize_and_amax, batch, name),
        (grouped.split_dequantize, rows, OFFS, name, 50, torch.float32),
        (grouped.grouped_scaled_mm, rows, stacked, OFFS, name, name, torch.float32, False),
        (grouped.grouped_scaled_mm, columns, columns, OFFS, name, name, torch.float32, False),
    ]  # fmt: skip


def calls_of_heads(name: str) -> list[tuple[Any, ...]]:
    """Arguments of an operator of attention, in a format."""
    q, k = torch.randn(2, 4, 20, 40), torch.randn(2, 2, 30, 40)
    parts = attention.quantize_qkv(q, k, k, name)
    pairs, mask = (parts[:2], parts[2:4], parts[4:]), torch.randn(20, 30)
    high, spec = QuantSpec(format="identity"), QuantSpec(format=name)
    steps = (Step("mul", 0.1), Step("add", extra=0))
    text = str(AttentionSpec(qkv=spec, s=high, do=high, dp=high, steps=steps))
    o, lse, _ = attention.attention_forward(*pairs, [mask], None, None, text, 40, torch.float32)
    more = ([mask], None, None)
    return [
        (attention.quantize_heads, q, name, 2, False), (attention.quantize_heads, k, name, 1, True),
        (attention.quantize_qkv, q, k, k, name, None, True),
        (attention.dequantize_heads, pairs[0], name, 2, False, [20, 40], torch.bfloat16),
        (attention.transpose_codes, parts[0], 16), (attention.transpose_codes, q, 10),
        (attention.attention_forward, *pairs, *more, text, 40, torch.bfloat16),
        (attention.attention_backward, q, *pairs, o, lse, *more, None, None, [0], text, 40),
    ]  # fmt: skip


def stateful_calls() -> list[tuple[Any, ...]]:
    """Arguments of the operators that write a state."""
    n, (q, k) = torch.ones(3), (torch.randn(2, 4, 20, 40), torch.randn(2, 2, 30, 40))
    tensor = QuantSpec(format="per_tensor_e4m3")
    parts = attention.quantize_qkv(q, k, k, str(tensor))
    text = str(AttentionSpec(qkv=tensor, s=tensor, steps=(Step("mul", 0.1),)))
    steps = torch.ones(3, dtype=torch.int64)
    state = (n, torch.ones(4, 3), n.clone(), steps, torch.ones(1, dtype=torch.int64), n, 0.0, "max")
    return [
        (attention.quantize_qkv_into, q, k, k, str(tensor), torch.ones(1), torch.zeros(1)),
        (attention.attention_forward_into, parts[:2], parts[2:4], parts[4:], [], None, torch.ones(1), text, 40,
         torch.bfloat16, torch.zeros(1)),
        (state_ops.record, n, [torch.ones(1)], [1]), (state_ops.record_since, steps, state[4], [torch.ones(1)], [1]),
        (state_ops.delayed_update, *state), (state_ops.delayed_advance, *state),
    ]  # fmt: skip


def calls_of_probes(name: str) -> list[tuple[Any, ...]]:
    """Arguments of the operators that measure operands, in a format."""
    a, b, batch = torch.randn(32, 64), torch.randn(16, 64), torch.randn(2, 32, 64)
    parts, others = cast.quantize(a, name, "rowwise"), cast.quantize(b, name, "rowwise")
    grouped_parts = grouped.split_quantize(batch, None, name, "rowwise")
    vector = torch.zeros(len(COLUMNS), dtype=torch.float64)
    heads, text = torch.randn(4, 32, 64), str(AttentionSpec(qkv=QuantSpec.parse(name), s=QuantSpec.parse(name)))
    head_parts = attention.quantize_heads(heads, name, 2, False)
    return [
        (probes.probe_operand, a, parts, name, "values+codes"),
        (probes.probe_turned, a, vector, parts, name),
        (probes.probe_rows, a.mT), (probes.probe_product, a, b, parts, others, name, name, "fprop"),
        (probes.probe_loss, torch.randn(32, 16), a, b, parts, name, "input"),
        (probes.probe_groups, batch, None, grouped_parts, name, "rowwise", "values"),
        (probes.probe_heads, heads, head_parts, name, 2, False, "values"),
        (probes.probe_softmax, head_parts, head_parts, [], None, text, 64, "", "values"),
        (probes.probe_merge, vector, [vector[0]] * len(vector)),
    ]  # fmt: skip


CALLS = {
    f"{name} {i} {call[0].name}": call
    for make, names in (
        (calls, MATRICES),
        (calls_of_heads, HEADS),
        (calls_of_probes, ["mxfp8_e4m3"]),
        (lambda _: stateful_calls(), ["state"]),
    )
    for name in names
    for i, call in enumerate(make(name))
}


@pytest.mark.parametrize("call", CALLS)
def test_fake_tensors_are_as_the_meaning_makes_them(call: str) -> None:
    called, *args = CALLS[call]
    real = called.meaning(*tree_map_only(Tensor, torch.clone, args))
    with FakeTensorMode() as mode:
        fake = called.target(*tree_map_only(Tensor, mode.from_tensor, args))
    results = [[made] if isinstance(made, Tensor) else made for made in (real, fake)]
    described = [[(t.shape, t.dtype, t.stride()) for t in tensors] for tensors in results]
    assert described[0] == described[1]


def test_every_operator_was_called() -> None:
    """But for those that tracing goes through, which have no fake of their own."""
    called = {call[0].name for call in CALLS.values()}
    assert called == {name for name, found in OPERATORS.items() if found.key != TRACED}


@pytest.mark.parametrize("call", [call for call in CALLS if " probe_" not in call])  # which run beside every graph
def test_conditions_say_why_nothing_but_the_meaning_runs_on_a_cpu(call: str) -> None:
    called, *args = CALLS[call]
    facts = called.facts_of(*args)
    assert called.choose(facts).kernel is called.reference
    for implementation in called.implementations:
        reason = implementation.when(facts)
        assert isinstance(reason, str) and reason and reason[-1] != ".", implementation.kernel


EXACT = [name for name, row in FORMATS.items() if row.family == "mxfp8"]


@pytest.mark.parametrize("name", EXACT)
def test_emulated_products_are_those_of_the_meaning(name: str) -> None:
    """Elements with scales that are powers of two are exact in bfloat16."""
    x, w = torch.randn(70, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    a, b = cast.quantize(x, name, "rowwise"), cast.quantize(w, name, "rowwise")
    args = (a, b, name, name, None, torch.bfloat16, False)
    torch.testing.assert_close(scaled_mm.run(GemmKernel.EMULATED)(*args), scaled_mm.meaning(*args))
    rows = grouped.split_quantize(x, OFFS, name, "rowwise")
    stacked = grouped.split_quantize(w.reshape(4, 12, 64), None, name, "rowwise")
    grouped_args = (rows, stacked, OFFS, name, name, torch.bfloat16, False)
    for kernel in (GemmKernel.GROUPED_PORTABLE, GemmKernel.EMULATED):
        got = grouped.grouped_scaled_mm.run(kernel)(*grouped_args)
        torch.testing.assert_close(got, grouped.grouped_scaled_mm.meaning(*grouped_args))


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
    class Names(Kernel):
        BEST, OTHER = "the best", "another"

    @fxquant.kernels.operator.operator(namespace="fxquant_kernels")
    def chosen_in_tests(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def best(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    registered = chosen_in_tests.implementation
    registered(Names.OTHER, when=lambda facts: "no CUDA" * (not facts.on_cuda), fallback=True)(torch.neg)
    registered(Names.BEST, when=lambda facts: "" if facts.on_hopper else "not on Hopper")(best)
    chosen = [str(chosen_in_tests.choose(Facts(capability=(major, 0)))) for major in (9, 8, 0)]
    assert chosen == ["the best", "another (not on Hopper)", "the reference (not on Hopper)"]
    assert chosen_in_tests.best(torch.zeros(1)).item() == 0 and chosen_in_tests.run(Names.BEST) is best
