"""Amaxes that casts and attentions take into the state themselves, behind an operator that has advanced it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.compat.private import tree_map_only, triton_kernel_wrapper_functional
from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.lower.lower import lower
from fxquant.passes.lower.state.advance import advance_state
from fxquant.passes.lower.state.record_in_kernel import record_in_kernel
from fxquant.passes.settings import Settings
from fxquant.state import DelayedState

SPEC = "per_tensor_e4m3"
N = 5
fxquant_ops = torch.ops.fxquant


def state_of(device: str = "cpu") -> list[Tensor]:
    state = DelayedState([*map(str, range(N))], 4, torch.device(device))
    for entry, values in (
        (state.scale, torch.rand(N)),
        (state.history, torch.rand(4, N)),
        (state.forward_amax, torch.rand(N)),
    ):
        entry.copy_(values)
    state.step.fill_(3)
    state.backward_amax.copy_(torch.rand(N).view(torch.int32) + torch.tensor([2, 3, 3, 2, 3]) * 2**32)
    return [*state.tensors().values()][:5]


def forward(
    scale: Tensor, history: Tensor, amaxes: Tensor, since: Tensor, step: Tensor, fp8_max: Tensor, x: Tensor, w: Tensor
) -> list[Tensor]:
    scales, following = fxquant_ops.delayed_update(scale, history, amaxes, since, step, fp8_max, 0.0, "max")
    first, second = scales.narrow(0, 1, 1), scales.narrow(0, 3, 1)
    x_parts = fxquant_ops.produce_quantize([x], f"identity rowwise={SPEC} columnwise={SPEC}", [first], [first], True)
    w_parts = fxquant_ops.produce_quantize([w], f"identity rowwise={SPEC}", [second], [None], True)
    new = [x_parts[4], w_parts[2], fp8_max.narrow(0, 0, 1)]
    recorded = fxquant_ops.record(torch.zeros_like(amaxes), new, [1, 3, 0])
    counted = step + 1
    scale.copy_(scales)
    history.copy_(following)
    amaxes.copy_(recorded)
    step.copy_(counted)
    return [*x_parts[:4], *w_parts[:2], scales.narrow(0, 4, 1)]


def backward(since: Tensor, step: Tensor, scale: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    parts = fxquant_ops.produce_quantize([g], f"identity rowwise={SPEC}", [scale], [None], True)
    both = fxquant_ops.produce_quantize([gate, up, g], f"silu_mul_grad rowwise={SPEC}", [scale] * 2, [None] * 2, True)
    since.copy_(fxquant_ops.record_since(since, step, [parts[2], both[2], both[5]], [0, 4, 2]))
    return [*parts[:2], *both[:2], *both[3:5]]


def traced(run: Callable[..., list[Tensor]], inputs: list[Tensor]) -> fx.GraphModule:
    """A graph with zeros as Inductor has them."""
    gm = make_fx(run)(*inputs)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.zeros_like.default):
        node.target, node.args, node.kwargs = torch.ops.aten.full.default, ([N], 0), {"device": inputs[0].device}
    return gm


def named(gm: fx.GraphModule) -> Counter[str]:
    return Counter(node.target._opname for node in gm.graph.nodes if is_fxquant(node))


def rewritten(
    run: Callable[..., list[Tensor]], inputs: list[Tensor], *, advances: int = 0, records: int = 2
) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph after both passes, which gives and writes what it did before; and what it writes into, afterwards."""
    gm = traced(run, [x.clone() for x in inputs])
    expected, got = [x.clone() for x in inputs], [x.clone() for x in inputs]
    made = run(*expected)
    assert advance_state(gm.graph, Settings(device="cpu")) == advances
    assert record_in_kernel(gm.graph, Settings(device="cpu")) == records
    gm.graph.lint()
    gm.recompile()
    for a, b in zip([*gm(*got), *got], [*made, *expected], strict=True):
        assert torch.equal(a, b)
    return gm, expected


def test_a_forward_advances_its_state_and_records_in_it() -> None:
    inputs = [*state_of(), torch.full((N,), 448.0), torch.randn(32, 16), torch.randn(16, 16)]
    gm, _ = rewritten(forward, inputs, advances=1)
    assert named(gm) == {"delayed_advance": 1, "produce_quantize_into": 2, "record": 1}
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)) == 1, "of what is left"


def test_a_backward_records_in_its_state() -> None:
    _, _, _, since, step = state_of()
    gm, written = rewritten(backward, [since, step, torch.ones(1), *(torch.randn(32, 16) for _ in range(3))])
    assert named(gm) == {"produce_quantize_into": 2}
    assert not torch.equal(written[0], since)


def attend(amaxes: Tensor, scale: Tensor, q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> list[Tensor]:
    spec = str(AttentionSpec(qkv=QuantSpec(format=SPEC), s=QuantSpec(format=SPEC)))
    *parts, amax = fxquant_ops.quantize_qkv(q, k, v, SPEC, scale, True)
    o, lse, s_amax = fxquant_ops.attention_forward(
        parts[:2], parts[2:4], parts[4:], [], None, scale, spec, 16, torch.float32
    )
    amaxes.copy_(fxquant_ops.record(amaxes, [s_amax, other, amax], [3, 0, 1]))
    return [o, lse, *parts]


def test_attention_records_in_its_state() -> None:
    inputs = [state_of()[2], torch.full((1,), 9.0), *(torch.randn(1, 2, 16, 16) for _ in range(3)), torch.rand(1)]
    gm, _ = rewritten(attend, inputs)
    assert named(gm) == {"quantize_qkv_into": 1, "attention_forward_into": 1, "record": 1}


def test_an_amax_that_is_recorded_twice_stays() -> None:
    def run(*inputs: Tensor) -> list[Tensor]:
        amaxes, x = inputs[2], inputs[6]
        parts = fxquant_ops.produce_quantize([x], f"identity rowwise={SPEC}", [inputs[0][:1]], [None], True)
        amaxes.copy_(fxquant_ops.record(amaxes, [parts[2], parts[2]], [1, 3]))
        return list(parts[:2])

    gm = traced(run, [*state_of(), torch.full((N,), 448.0), torch.randn(32, 16), torch.randn(16, 16)])
    assert record_in_kernel(gm.graph, Settings(device="cpu")) == 0


def test_a_step_has_a_launch_for_the_state_and_one_for_each_cast() -> None:
    inputs = [*state_of(), torch.full((N,), 448.0), torch.randn(32, 16).bfloat16(), torch.randn(16, 16).bfloat16()]
    gm = traced(forward, inputs)
    with FakeTensorMode():  # as if it had been captured on CUDA
        for node in gm.graph.nodes:
            node.meta["val"] = tree_map_only(
                Tensor,
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda"),
                node.meta.get("val"),
            )
    assert advance_state(gm.graph, Settings()) == 1
    assert record_in_kernel(gm.graph, Settings()) == 2
    lower(gm.graph, Settings())
    launches = gm.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    assert len(launches) == 3
    state = set(gm.graph.find_nodes(op="placeholder")[:5])
    for launch in launches:  # the state is not cloned
        assert not state & {launch.kwargs["kwargs"][name] for name in launch.kwargs["tensors_to_clone"]}
        assert all(user.target is operator.getitem for user in launch.users)
