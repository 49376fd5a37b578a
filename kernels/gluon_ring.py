# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rings of buffers in shared memory, for kernels in Gluon whose warps have different work."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The place after a place in a ring of buffers, and the parity of its barriers."""
    stage += 1
    return gl.where(stage == STAGES, 0, stage), gl.where(stage == STAGES, phase ^ 1, phase)
