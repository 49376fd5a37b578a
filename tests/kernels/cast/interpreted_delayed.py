"""The state of delayed scaling in Triton's interpreter, to the bit; run by test_triton_cast.py."""

from __future__ import annotations

import itertools

import torch
from bits import same
from interpreting import interpret
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import triton_cast
from fxquant.kernels.cast.producers import PRODUCERS
from fxquant.kernels.state import reference as delayed
from fxquant.kernels.state import triton as triton_delayed

interpret(triton_delayed, triton_cast)
AMAXES = torch.tensor([0.0, 3.0, torch.nan, torch.inf, 1e-40, 448.0, 7.5, 0.0])


def apart(values: Tensor) -> Tensor:
    """The same values, 16 bytes apart in memory."""
    spaced = torch.zeros(len(values), 16 // values.dtype.itemsize, dtype=values.dtype)
    spaced[:, 0] = values
    return spaced[:, 0]


def updates() -> None:
    generator = torch.Generator().manual_seed(0)
    slots = len(AMAXES)
    for length, margin, algorithm in itertools.product((1, 2, 5, 16), (0.0, 1.0), ("max", "most_recent")):
        history = torch.rand(length, slots, generator=generator) * 9
        history[-1, 0] = torch.nan
        scale = torch.rand(slots, generator=generator)
        backward = AMAXES.roll(3).view(torch.int32) + (torch.arange(slots) % 3 << 32)
        step = torch.ones(slots, dtype=torch.int64)
        state = scale, history, apart(AMAXES), apart(backward), apart(step)
        fp8_max = torch.where(torch.arange(slots) % 2 == 0, 448.0, 57344.0)
        last = delayed.counted(delayed.recorded(*state[2:]))
        expected = delayed.update(scale, history, last, fp8_max, margin=margin, algorithm=algorithm)
        got = triton_delayed.update(*(x.clone() for x in state[:2]), *state[2:], fp8_max, margin, algorithm)
        case = (length, margin, algorithm)
        assert all(map(same, got, expected)), (case, got, expected)
        assert same(state[2], AMAXES) and same(state[4], step), case
        scales = triton_delayed.advance(*state, fp8_max, margin, algorithm)
        advanced = (torch.cat(scales), *state)
        after = (expected[0], *expected, torch.zeros(slots), backward, step + 1)
        assert all(map(same, advanced, after)), (case, advanced, after)


def records() -> None:
    """Amaxes that a cast takes into the state itself are those that it gives, as the operators take them in."""
    spec, known = QuantSpec.parse("per_tensor_e5m2(slot=0)"), torch.tensor([9.0, 0.5, 1e-3, 9.0, 0.5, 9.0])
    # 1 is an earlier step, and 3 one that has begun since
    written = known.view(torch.int32) + (torch.tensor([1, 1, 2, 2, 2, 3]) << 32)
    for name, slots in (
        ("identity", slice(1, 2)),
        ("silu_mul_grad", slice(0, 4, 3)),
        ("silu_mul_grad", slice(2, 6, 3)),
    ):
        producer = PRODUCERS[name]
        inputs = [torch.randn(48, 64).bfloat16() for _ in producer.inputs]
        given = (name, inputs, spec, None, [torch.ones(1)] * producer.results, [None] * producer.results)
        new = triton_cast.produce(*given, True)[2::3]
        for since, from_last in itertools.product((False, True), (False, True)):
            state, step = apart(written if since else known), apart(torch.full((6,), 2)) if since else None
            before, ordered, numbers = state.clone(), new[::-1] if from_last else new, range(6)[slots]
            if step is None:
                expected = delayed.record(before, ordered, numbers)
            else:
                expected = delayed.record_since(before, step, ordered, numbers)
            record = triton_cast.Record(state[slots], None if step is None else step[slots], from_last)
            assert len(triton_cast.produce(*given, record)) == 2 * producer.results
            assert same(state, expected), (name, slots, since, from_last, state, expected)


if __name__ == "__main__":
    updates()
    records()
