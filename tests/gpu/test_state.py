"""The state of delayed scaling, advanced and recorded in place: values and state are those of the operators."""

from __future__ import annotations

import pytest
import torch
from helpers import GatedBlock
from torch import Tensor
from torch._inductor import config

from fxquant import Backend

pytestmark = pytest.mark.gpu


def trained() -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of a few steps, two of whose forwards come before their backwards, and every state."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = GatedBlock(256).bfloat16().cuda()
    inputs = [torch.randn(4, 128, 256, device="cuda").bfloat16() * 2.0**i for i in range(5)]
    backend = Backend("delayed_scaling")
    run = torch.compile(model, backend=backend, dynamic=False)
    values: list[Tensor] = []
    states: list[Tensor] = []
    for group in (inputs[:1], inputs[1:2], inputs[2:4], inputs[4:]):
        outputs = [run(x) for x in group]
        for y in reversed(outputs):
            y.backward(torch.ones_like(y) / len(states or [1]))
        values += [y.detach() for y in outputs]
        states += [state.clone() for state in backend.state_dict().values()]
        with torch.no_grad():  # reads the state, and leaves it as it is
            values.append(run(inputs[0]))
    return [*values, *(p.grad for p in model.parameters() if p.grad is not None)], states


def test_values_and_state_are_those_of_the_operators() -> None:
    with config.patch(force_disable_caches=True):
        values, states = trained()
        with config.patch(disabled_passes="advance_state, record_in_kernel"):
            expected_values, expected_states = trained()
    layers, operands, groups = 3, 3, 4
    assert len(states) == len(expected_states) == 2 * layers * operands * groups
    for got, expected in zip([*values, *states], [*expected_values, *expected_states], strict=True):
        assert torch.equal(got, expected)
