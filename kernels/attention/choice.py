"""The kernels of a quantized attention on CUDA, chosen by its spec, sizes and device alone.

A graph and a report both know these facts, so that the report says what runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fxquant.compat.device import converts_to_fp8, knows_gluon
from fxquant.compat.values import statically_known_true
from fxquant.formats import ELEMENTS, AttentionSpec, QuantSpec

HEAD_DIMS = (64, 128, 256)
"""The head sizes that Triton kernels take."""
Scaling = Literal["tensor", "head", "block"]
"""The elements that share a scale: a tensor, heads, or 128 positions of them."""
SCALINGS: dict[str, Scaling] = {"per_tensor_e4m3": "tensor", "per_head_e4m3": "head", "per_head_128_e4m3": "block"}
"""The formats that kernels multiply, and cast."""
LEAST_WORK_OF_GLUON = 1 << 36
"""FLOPs, about a tenth of a millisecond: a launch of Gluon from Python takes longer than Inductor's of Triton."""


class AttentionKernel(str, Enum):
    """The kernels of a forward or backward of quantized attention."""

    TRITON = "Triton, FP8"
    GLUON = "Triton's Gluon, FP8"
    WIDE = "Triton on dequantized q, k and v"
    CUDNN = "cuDNN on dequantized q, k and v"
    REFERENCE = "the reference, float32 scores in memory"

    def __str__(self) -> str:
        return self.value


class Chosen(NamedTuple):
    """A kernel, and the reason for the reference."""

    kernel: AttentionKernel
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})" if self.reason else str(self.kernel)


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """The facts that choose the kernels of an attention: its spec, sizes and device.

    `axes` is how many q, k and v have, `width` and `features` are D and Dv, `keys` how many there are, `flops` those of
    a forward. `learned` says that the backward gives the gradient of a mask, a bias or a scale of the scores.
    """

    spec: AttentionSpec
    axes: int
    width: int
    features: int
    dtype: torch.dtype
    capability: tuple[int, int]
    keys: int | torch.SymInt
    flops: int = 0
    learned: bool = False


def forward(facts: AttentionFacts) -> Chosen:
    """The kernel of a forward."""
    spec = facts.spec
    kernel = AttentionKernel.TRITON if _multiplied(spec.qkv) else _dequantized(spec)
    unmasked = not (_masked(spec) or spec.dropout)
    if kernel is AttentionKernel.TRITON and unmasked and _by_gluon(facts.flops):
        kernel = AttentionKernel.GLUON
    return _chosen(_problem(facts), kernel)


def backward(facts: AttentionFacts) -> Chosen:
    """The kernel of a backward."""
    spec = facts.spec
    reason = _problem(facts) or ("its mask, bias or scale is learned" if facts.learned else "")
    if not spec.has_fp8_backward:
        return _chosen(reason, _dequantized(spec))
    for slot in ("do", "dp"):
        gradient = getattr(spec, slot)
        beside_mxfp8 = _is_mxfp8(gradient) or (slot == "dp" and gradient.is_identity)
        if not (_is_gradient(gradient) if _multiplied(spec.qkv) else beside_mxfp8):
            reason = reason or f"{gradient} in {slot}"
    return _chosen(reason, AttentionKernel.TRITON if _multiplied(spec.qkv) else AttentionKernel.WIDE)


def _chosen(reason: str, kernel: AttentionKernel) -> Chosen:
    return Chosen(AttentionKernel.REFERENCE, reason) if reason else Chosen(kernel)


def _dequantized(spec: AttentionSpec) -> AttentionKernel:
    """The kernel of dequantized operands: cuDNN has neither masks nor the reference's dropout."""
    return AttentionKernel.WIDE if _masked(spec) or spec.dropout else AttentionKernel.CUDNN


def _multiplied(spec: QuantSpec) -> bool:
    """Returns True if kernels multiply a format as it is: e4m3 with a scale for the tensor, heads or 128 positions."""
    return _plain(spec) in SCALINGS


def _is_gradient(spec: QuantSpec) -> bool:
    """Returns True if kernels take do or dp in a format."""
    return _multiplied(spec) or _plain(spec) in ("per_tensor_e5m2", "per_head_e5m2")


def _plain(spec: QuantSpec) -> str:
    return spec.format if spec.is_delayed else str(spec)


def _is_mxfp8(spec: QuantSpec) -> bool:
    return spec.row.family == "mxfp8"


def _problem(facts: AttentionFacts) -> str:
    """Returns why neither direction has a kernel."""
    spec, width = facts.spec, facts.width
    if facts.capability[0] != 9:
        return "not on Hopper"
    if spec.dropout >= 1:
        return "everything is dropped"
    reason = _more_than_scale_and_mask(spec)
    if reason:
        return reason
    if facts.axes != 4:
        return f"{facts.axes} axes instead of [B, H, S, D]"
    if facts.features != width:
        return "values of another head dimension"
    if width not in HEAD_DIMS:
        return f"head dimension {width}"
    if statically_known_true(facts.keys == 0):
        return "no keys"
    if facts.dtype not in (torch.bfloat16, torch.float16):
        return str(facts.dtype).removeprefix("torch.")
    return _softmax(spec) if _multiplied(spec.qkv) or _is_mxfp8(spec.qkv) else f"{spec.qkv} in qkv"


_OTHERS = {"tanh": "a soft cap", "sink": "sinks", "fill": "masked scores that are finite"}


def _more_than_scale_and_mask(spec: AttentionSpec) -> str:
    """Returns which step is none of a scale, then at most one mask or bias, and causality."""
    masked = False
    for step in spec.steps:
        if step.kind == "mul":
            if masked or step.extra >= 0:
                return "a scale behind a mask" if masked else "a scale that is a tensor"
        elif step.kind in _MASKS:
            if step.extra < 0 or (step.kind == "fill" and step.value != -math.inf):
                return _OTHERS.get(step.kind, "a number added to the scores")
            if masked:
                return "more than one mask or bias"
            masked = True
        elif step.kind != "causal":
            return _OTHERS[step.kind]
    return "" if math.prod(step.value for step in spec.steps if step.kind == "mul") > 0 else "a scale below zero"


_MASKS = ("add", "keep", "fill")


def _masked(spec: AttentionSpec) -> bool:
    return any(step.kind in _MASKS for step in spec.steps)


def _softmax(spec: AttentionSpec) -> str:
    """Returns why the format of the softmax has no kernel beside that of the operands."""
    row = spec.s.row
    if _is_mxfp8(spec.qkv):
        known = row.family in ("identity", "mxfp8")
    else:  # whose scale is a constant
        known = row.family in ("per_tensor", "per_head") and row.element == ELEMENTS["e4m3"]
    return "" if known else f"{spec.s} in s"


def _by_gluon(flops: int) -> bool:
    """Returns True if Triton has the kernel in Gluon, and it is the faster one for so much work."""
    return flops >= LEAST_WORK_OF_GLUON and knows_gluon()


def casts(x: Tensor, spec: str) -> bool:
    """Returns True if a kernel quantizes x [B, H, S, D]."""
    known = SCALINGS.get(spec) in ("head", "block") and x.ndim == 4 and x.dtype in (torch.bfloat16, torch.float16)
    return known and x.shape[-1] in HEAD_DIMS and converts_to_fp8(x.device)


def casts_qkv(q: Tensor, k: Tensor, v: Tensor, spec: str) -> bool:
    """Returns True if kernels quantize q [B, H, Sq, D], k and v [B, Hkv, Sk, D] together."""
    known = spec in SCALINGS and q.ndim == 4 and q.dtype in (torch.bfloat16, torch.float16)
    known = known and q.shape[-1] == v.shape[-1] and q.shape[-1] in HEAD_DIMS
    return known and converts_to_fp8(q.device)
