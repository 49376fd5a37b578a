# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The update of delayed scaling, `fxquant.kernels.state.reference.update`, as one launch of a program for each slot.

`advance` has the state itself go on to the next step as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from fxquant.compat.patches import writes

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


_APART = 4
"""The scales of `advance` lie 16 bytes apart."""


@writes("history", "new_scale", scale="ADVANCE", forward_amax="ADVANCE", step="ADVANCE")
@triton.jit
def delayed_update_kernel(
    scale, history, forward_amax, backward_amax, step, fp8_max, new_scale, n, forward_step, backward_step, step_step,
    LENGTH: tl.constexpr, FACTOR: tl.constexpr, MOST_RECENT: tl.constexpr, BLOCK: tl.constexpr,
    ADVANCE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Rolls a column of the history [LENGTH, n] in place, and writes the scale of its slot.

    With ADVANCE the state itself goes on to the next step: its scale, no amax yet, the number of the step. All of a
    column is read before any of it is written.
    """
    slot = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    place = history + row * n + slot
    older = tl.load(place + n, mask=row < LENGTH - 1, other=0.0)
    tl.debug_barrier()
    now = tl.load(step + slot * step_step)
    written = tl.load(backward_amax + slot * backward_step)
    from_forward = tl.load(forward_amax + slot * forward_step)
    from_backward = (written & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    from_backward = tl.where((written >> 32) >= now, from_backward, 0.0)
    last = tl.where((from_forward > from_backward) | (from_backward != from_backward), from_forward, from_backward)
    last = tl.where(last < float("inf"), last, 0.0)
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
    following = tl.where((amax > 0) & (amax < float("inf")), quotient, kept)
    tl.store(new_scale + slot * APART, following)
    if ADVANCE:
        tl.store(scale + slot, following)
        tl.store(forward_amax + slot * forward_step, 0.0)
        tl.store(step + slot * step_step, now + 1)


def update(*state: Any) -> list[Tensor]:
    """`fxquant::delayed_update` of its arguments: the scales [n] and the history [N, n], which is written in place."""
    scale, history, *_ = state
    new_scale = torch.empty_like(scale)
    _launch(state, new_scale, advance=False)
    return [new_scale, history]


def advance(*state: Any) -> list[Tensor]:
    """`fxquant::delayed_advance` of its arguments: the scales, n tensors [1], in one launch."""
    scale = state[0]
    new_scale = torch.empty(_APART * scale.shape[0], dtype=scale.dtype, device=scale.device)
    _launch(state, new_scale, advance=True)
    return [new_scale.narrow(0, _APART * slot, 1) for slot in range(scale.shape[0])]


def _launch(state: Sequence[Any], new_scale: Tensor, *, advance: bool) -> None:
    scale, history, forward_amax, backward_amax, step, fp8_max, margin, algorithm = state
    length, slots = history.shape
    wrap_triton(delayed_update_kernel)[(slots,)](
        scale, history, forward_amax, backward_amax, step, fp8_max, new_scale, slots, forward_amax.stride(0),
        backward_amax.stride(0), step.stride(0), length, 2.0**-margin, algorithm == "most_recent",
        triton.next_power_of_2(length), advance, _APART if advance else 1, num_warps=4,
    )  # fmt: skip
