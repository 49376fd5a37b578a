"""The update of delayed scaling in Triton's interpreter, to the bit; run by test_triton_cast.py."""

from __future__ import annotations

import itertools

import torch

from fxquant.kernels import delayed, triton_delayed

triton_delayed.wrap_triton = lambda kernel: kernel
AMAXES = torch.tensor([0.0, 3.0, torch.nan, torch.inf, 1e-40, 448.0, 7.5, 0.0])


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    slots = len(AMAXES)
    for length, margin, algorithm in itertools.product((1, 2, 5, 16), (0.0, 1.0), ("max", "most_recent")):
        history = torch.rand(length, slots, generator=generator) * 9
        history[-1, 0] = torch.nan
        scale = torch.rand(slots, generator=generator)
        backward = torch.stack((AMAXES.roll(3), torch.arange(slots) % 3)).double()
        state = scale, history, AMAXES, backward, torch.ones(1, dtype=torch.float64)
        fp8_max = torch.where(torch.arange(slots) % 2 == 0, 448.0, 57344.0)
        last = delayed.recorded(*state[2:])
        expected = delayed.update(scale, history, last, fp8_max, margin=margin, algorithm=algorithm)
        got = triton_delayed.update(*(x.clone() for x in state), fp8_max, margin, algorithm)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32)), (length, margin, algorithm, a, b)


if __name__ == "__main__":
    main()
