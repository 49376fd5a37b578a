"""One quantized tensor for an attention and the linears beside it: which, its bits, what is saved, what is reported."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Recorder, eager_backend, train_step
from saved import saved_tensors
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant import (
    Backend,
    CustomRecipe,
    Direction,
    Float8CurrentScalingQuantizer,
    Float8HeadQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    QuantizerRole,
)
from fxquant.compat.private import inductor_config
from fxquant.passes.joint.reuse import reuse_attention_payload
from fxquant.passes.settings import Settings

E4, E5 = (Float8CurrentScalingQuantizer(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
HEAD, HIGH = Float8HeadQuantizer(), IdentityQuantizer()
_ops = torch.ops.fxquant


def recipe(output: Any = E4, gradient: Any = E5, input: Any = E4, grad_output: Any = E5) -> CustomRecipe:
    """FP8 for linears, for the forward of attention, and for the results of attention."""

    def qfactory(role: QuantizerRole) -> Any:
        if role.module_type == "dpa":
            return HEAD if role.tensor_type in ("qkv", "s") else HIGH
        hints = {"dpa_output": output, "dpa_grad_input": gradient}
        slots = {"input": input, "weight": E4, "grad_output": grad_output}
        return hints.get(role.name.rpartition(".")[2]) or slots[role.tensor_type]

    return CustomRecipe(qfactory=qfactory)


class SelfAttention(nn.Module):
    """`between` is what happens to queries and keys, `after` to the output."""

    def __init__(
        self, between: Callable[[Tensor], Tensor] = lambda x: x, after: Callable[[Tensor], Tensor] = lambda x: x,
        kv_heads: int = 4, fused: bool = False, chain: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.between, self.after, self.kv_heads, self.fused, self.chain = between, after, kv_heads, fused, chain
        self.sizes = [64, 16 * kv_heads, 16 * kv_heads]
        self.qkv = nn.ModuleList([nn.Linear(64, n) for n in ([sum(self.sizes)] if fused else self.sizes)])
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv[0](x).split(self.sizes, -1) if self.fused else [layer(x) for layer in self.qkv]
        q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in made)
        q, k = self.between(q), self.between(k)
        if self.chain:
            y = (q @ k.mT / 4).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != 4)
        return self.out(self.after(y.transpose(1, 2).flatten(2)))


def step(model: nn.Module, backend: Backend, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    model = model.to(dtype)
    x = torch.randn(2, 24, 64, dtype=dtype, requires_grad=True)
    run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    return train_step(model, run, x) | {"x": x.grad}


BOTH = {"out.input": 2, "qkv.0.grad_output": 2, "qkv.1.grad_output": 2, "qkv.2.grad_output": 2}
OUTPUT, GRADIENTS = {"out.input": 2}, {name: 2 for name in BOTH if name != "out.input"}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = {
    "plain": ({}, {}, BOTH),
    "chain": ({"chain": True}, {}, BOTH),
    "grouped": ({"kv_heads": 2}, {}, BOTH),
    "positions added to queries and keys": (
        {"between": lambda x: torch.cat((x[..., 8:], x[..., :8].sin()), -1)}, {},
        {"out.input": 2, "qkv.2.grad_output": 2},
    ),
    "one linear for all": ({"fused": True}, {}, OUTPUT),
    "output gated": ({"after": lambda y: y * 2}, {}, GRADIENTS),
    "output cut": ({"after": lambda y: F.pad(y[..., :32], (0, 32))}, {}, GRADIENTS),
    "results in high precision": ({}, {"output": HIGH, "gradient": HIGH}, {}),
    "other formats": ({}, {"output": E5, "gradient": E4}, {}),
    "other scales": ({}, {"output": Float8CurrentScalingQuantizer(force_pow_2_scales=True)}, GRADIENTS),
    "one direction": (
        {}, {"input": HybridQuantizer(E4, E5), "grad_output": HybridQuantizer(E5, E4), "gradient": HIGH},
        {"out.input": 1},
    ),
}  # fmt: skip


LONG = ("grouped", "output cut", "other formats", "results in high precision")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep if name in LONG else ()) for name in MODELS]
)
def test_what_is_shared_is_what_is_reported(name: str, caplog: pytest.LogCaptureFixture) -> None:
    settings, answers, expected = MODELS[name]
    with caplog.at_level("DEBUG", logger="fxquant"):
        backend = Recorder(recipe(**answers))
        step(SelfAttention(**settings), backend)
    counts = [int(text) for text in re.findall(r"reuse_attention_payload: (\d+) nodes", caplog.text)]
    shared: dict[str, int] = {}
    for d in backend.report().decisions:
        if d.shared:
            key = f"{d.layer}.{d.role.tensor_type}"
            shared[key] = shared.get(key, 0) + 1
            assert d.detail.startswith("as attention <model> quantized its")
            assert d.detail.endswith("transposed") == (d.direction is Direction.COLUMNWISE)
    assert shared == expected
    assert sum(counts) == sum(expected.values())
    work = [(layer, each.what) for layer, _, each in backend.report().work()]
    for key, times in expected.items():
        layer, _, operand = key.rpartition(".")
        assert work.count((layer, f"move {operand}")) == times
        assert ((layer, f"cast {operand}") in work) == (times == 1)


def test_gradients_are_those_of_the_unshared_graph() -> None:
    """But for the scale of a second quantization: 2^-8 in bfloat16, an ulp or two in float32."""
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7)):
        one = step(SelfAttention(), eager_backend(recipe()), dtype)
        with inductor_config.patch(disabled_passes="reuse_attention_payload"):
            other = step(SelfAttention(), eager_backend(recipe()), dtype)
        for key, got in one.items():
            assert (got - other[key]).norm() <= bound * other[key].norm(), (key, dtype)


SHAPES = ((2, 4, 32, 16), (1, 3, 21, 16), (2, 2, 24, 24), (3, 16, 8, 5))
"""[B, H, S, D]: whole, rows and heads that are padded, and fewer features than a head is padded to."""


@pytest.mark.parametrize("spec", ["per_tensor_e4m3", "per_tensor_e5m2", "per_tensor_e4m3(pow2)"])
def test_payloads_are_those_of_a_second_quantization(spec: str) -> None:
    def quantized_twice(x: Tensor) -> list[Tensor]:
        size = x.shape[-2:]
        o = _ops.dequantize_heads(_ops.quantize_heads(x, spec, 1, False), spec, 1, False, size, x.dtype)
        rows = o.transpose(1, 2).flatten(2).flatten(0, 1)
        return [*_ops.quantize(rows, spec, "rowwise"), *_ops.quantize(rows, spec, "columnwise")]

    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3
            x = (x * torch.logspace(-3, 1, shape[-1])).to(dtype)
            gm = make_fx(quantized_twice, tracing_mode="fake")(x)
            twice, changed = gm(x), reuse_attention_payload(gm.graph, Settings())
            gm.recompile()
            once = gm(x)
            assert changed == 2 and "dequantize" not in gm.code
            for row in (0, 2):
                data, scale, other, other_scale = once[row], once[row + 1], twice[row], twice[row + 1]
                assert data.shape == other.shape and data.is_contiguous() and data.dtype == other.dtype
                if "pow2" not in spec:
                    assert torch.equal(data.view(torch.uint8), other.view(torch.uint8)), (shape, dtype)
                    assert (scale / other_scale - 1).abs() <= (2**-8 if dtype != torch.float32 else 1e-6)
                else:
                    assert torch.equal(data.float() * scale, other.float() * other_scale), "a factor of two apart"


def test_padded_rows_of_features_are_quantized_again() -> None:
    """40 features are padded to 48 in a linear, and not in an attention."""

    def run(x: Tensor) -> list[Tensor]:
        o = _ops.dequantize_heads(_ops.quantize_heads(x, "per_tensor_e4m3", 1, False), "per_tensor_e4m3", 1, False,
                                  x.shape[-2:], x.dtype)  # fmt: skip
        return _ops.quantize(o.transpose(1, 2).flatten(2).flatten(0, 1), "per_tensor_e4m3", "rowwise")  # type: ignore[no-any-return]

    assert reuse_attention_payload(make_fx(run, tracing_mode="fake")(torch.randn(2, 5, 16, 8)).graph, Settings()) == 0


def test_inference_shares_too() -> None:
    model, x = SelfAttention().bfloat16().requires_grad_(False), torch.randn(2, 24, 64, dtype=torch.bfloat16)
    recorder = Recorder(recipe())
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=recorder, fullgraph=True)(x)
    (graph,) = recorder.graphs
    assert len(graph.graph.find_nodes(op="call_function", target=_ops.quantize.default)) == 5, "the input, and weights"
    assert "dequantize_heads" not in graph.code


def test_q_k_v_and_o_take_half_the_memory_until_the_backward() -> None:
    """Whatever the precision of the backward; and the linear behind them keeps nothing of its own."""

    def make() -> tuple[nn.Module, Tensor]:
        return SelfAttention(chain=False).bfloat16(), torch.randn(4, 4096, 64, dtype=torch.bfloat16)

    elements = 4 * 4096 * 64
    lse, x = elements // 4, 2 * elements
    plain = saved_tensors(make, "high_precision").total
    assert plain == 4 * 2 * elements + lse + x, "q, k, v and o"
    for backward in (HIGH, HEAD):
        for output, kept in ((HIGH, 3), (E4, 4)):
            answers = {"qkv": HEAD, "s": HEAD, "do": backward, "dp": backward, "dpa_output": output}
            found = saved_tensors(make, CustomRecipe(qfactory=functools.partial(answer, answers))).total
            assert 0 <= found - (plain - kept * elements) < 512, "scales"
    for output, kept in ((HIGH, 3 + 2 + 1), (E4, 4)):
        found = saved_tensors(make, recipe(output=output)).total
        assert 0 <= found - (kept * elements + lse + x // 2) < 512, "o in bfloat16 and for the linear, or once for both"


def answer(answers: dict[str, Any], role: QuantizerRole) -> Any:
    return answers.get(role.tensor_type or role.name, HIGH)
