# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The update of delayed scaling as one launch: what `fxquant.kernels.delayed.update` says, a program for each slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat import declare_written

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def delayed_update_kernel(
    scale, history, forward_amax, backward_amax, step, fp8_max, new_scale, n, LENGTH: tl.constexpr,
    FACTOR: tl.constexpr, MOST_RECENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rolls a column of the history [LENGTH, n] in place, and writes the scale of its slot.

    All of a column is read before any of it is written.
    """
    slot = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    place = history + row * n + slot
    older = tl.load(place + n, mask=row < LENGTH - 1, other=0.0)
    tl.debug_barrier()
    is_new = tl.load(backward_amax + n + slot) >= tl.load(step)
    from_forward = tl.load(forward_amax + slot)
    from_backward = tl.where(is_new, tl.load(backward_amax + slot), 0.0).to(tl.float32)
    last = tl.where((from_forward > from_backward) | (from_backward != from_backward), from_forward, from_backward)
    window = tl.where(row == LENGTH - 1, last, older)
    tl.store(place, tl.where(row == 0, 0.0, window), mask=row < tl.where(last != 0, LENGTH, 1))
    if MOST_RECENT:
        amax = last
    else:
        amax = tl.max(tl.where(window == window, window, 0.0), axis=0)
    amax = tl.where(last != 0, amax, 0.0)
    largest = tl.load(fp8_max + slot) * FACTOR
    quotient = tl.minimum(tl.div_rn(largest, amax), _LARGEST)
    kept = tl.load(scale + slot)
    tl.store(new_scale + slot, tl.where((amax > 0) & (amax < float("inf")), quotient, kept))


def update(
    scale: Tensor, history: Tensor, forward_amax: Tensor, backward_amax: Tensor, step: Tensor, fp8_max: Tensor,
    margin: float, algorithm: str,
) -> list[Tensor]:  # fmt: skip
    """`fxquant::delayed_update`: the scales [n] and the history [N, n], which is written in place."""
    length, slots = history.shape
    new_scale = torch.empty_like(scale)
    wrap_triton(delayed_update_kernel)[(slots,)](
        scale, history, forward_amax, backward_amax, step, fp8_max, new_scale, slots, length, 2.0**-margin,
        algorithm == "most_recent", triton.next_power_of_2(length), num_warps=4,
    )  # fmt: skip
    return [new_scale, history]


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch writes."""
    return ["history", "new_scale"]


declare_written(delayed_update_kernel, written)
