"""The kernels of a quantized attention on CUDA, and their conditions: its spec, sizes and device alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fxquant.compat.device import capability, knows_gluon
from fxquant.compat.values import size_hint, statically_known_true
from fxquant.formats import ELEMENTS, AttentionSpec, QuantSpec
from fxquant.kernels.attention.reference import features_of
from fxquant.kernels.operator import Dim, Facts, Kernel, Parts

HEAD_DIMS = (64, 128, 256)
"""The head sizes that Triton kernels take."""
Scaling = Literal["tensor", "head", "block"]
"""The elements that share a scale: a tensor, heads, or 128 positions of them."""
SCALINGS: dict[str, Scaling] = {"per_tensor_e4m3": "tensor", "per_head_e4m3": "head", "per_head_128_e4m3": "block"}
"""The formats that kernels multiply, and cast."""
_GLUON_BACKWARD = 128
"""The head size that the backward in Gluon takes."""
_HALVES = (torch.bfloat16, torch.float16)
LEAST_WORK_OF_GLUON = 1 << 36
"""FLOPs, about a tenth of a millisecond: a launch of Gluon from Python takes longer than Inductor's of Triton."""


@dataclass(frozen=True, kw_only=True)
class AttentionFacts(Facts):
    """An attention: its spec and sizes.

    `axes` is how many q, k and v have, `width` and `features` are D and Dv, `keys` how many there are, `flops` those of
    a forward. `learned` says that the backward gives the gradient of a mask, a bias or a scale of the scores; `repeats`
    that it has to repeat to the bit, as `torch.use_deterministic_algorithms` asks, which dq of cuDNN's does not, nor
    that of the kernel in Gluon.
    """

    spec: AttentionSpec
    axes: int
    width: Dim
    features: Dim
    dtype: torch.dtype
    keys: int | torch.SymInt
    flops: int = 0
    learned: bool = False
    repeats: bool = False

    @classmethod
    def of(
        cls, q: Parts, k: Parts, v: Parts, spec: str, width: Dim, dtype: torch.dtype, learned: bool = False
    ) -> AttentionFacts:
        """The facts of an attention of these operands; a CUDA device that is not there is a Hopper GPU."""
        keys, device, parsed = k[0].shape[-2], k[0].device, AttentionSpec.parse(spec)
        missing = device.type == "cuda" and not torch.cuda.is_available()
        return cls(
            spec=parsed, axes=k[0].ndim, width=width, features=features_of(v, parsed), dtype=dtype, keys=keys,
            capability=(9, 0) if missing else capability(device), learned=learned,
            repeats=torch.are_deterministic_algorithms_enabled(),
            flops=4 * math.prod(map(size_hint, (*q[0].shape, keys))),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadFacts(Facts):
    """A cast of tensors of heads to a format; `widths` are their sizes behind the last axis."""

    spec: str
    axes: int
    widths: tuple[Dim, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: str, *tensors: Tensor) -> HeadFacts:
        x = tensors[0]
        widths = tuple(x.shape[-1] for x in tensors)
        return cls(spec=spec, axes=x.ndim, widths=widths, dtype=x.dtype, capability=capability(x.device))


class AttentionKernel(Kernel):
    """The kernels of a forward or backward of quantized attention."""

    TRITON = "Triton, FP8"
    GLUON = "Triton's Gluon, FP8"
    WIDE = "Triton on dequantized q, k and v"
    CUDNN = "cuDNN on dequantized q, k and v"
    REFERENCE = "the reference, float32 scores in memory"


def casts(facts: HeadFacts) -> str:
    """Returns why no kernel quantizes q, k and v [B, H, S, D] together."""
    if not (facts.launches and facts.makes_fp8):
        return "no Triton casts"
    if facts.spec not in SCALINGS:
        return f"no Triton cast of heads to {facts.spec}"
    fits = facts.axes == 4 and facts.dtype in _HALVES and facts.widths[0] == facts.widths[-1]
    return "" if fits and facts.widths[0] in HEAD_DIMS else "no heads of a size that kernels take"


def casts_alone(facts: HeadFacts) -> str:
    """Returns why no kernel quantizes one tensor of heads."""
    return "a scale for the tensor" if SCALINGS.get(facts.spec) == "tensor" else casts(facts)


def forward(kernel: AttentionKernel, facts: AttentionFacts) -> str:
    """Returns why a kernel is not the one of a forward."""
    return _problem(facts) or _unless(kernel, _forward_kernel(facts))


def _forward_kernel(facts: AttentionFacts) -> AttentionKernel:
    spec = facts.spec
    if not _multiplied(spec.qkv):
        return _dequantized(spec)
    return AttentionKernel.GLUON if _unmasked(spec) and _by_gluon(facts.flops) else AttentionKernel.TRITON


def backward(kernel: AttentionKernel, facts: AttentionFacts) -> str:
    """Returns why a kernel is not the one of a backward."""
    spec = facts.spec
    reason = _problem(facts) or ("its mask, bias or scale is learned" if facts.learned else "")
    if reason or not spec.has_fp8_backward:
        return reason or _unless(kernel, AttentionKernel.WIDE if facts.repeats else _dequantized(spec))
    for slot in ("do", "dp"):
        gradient = getattr(spec, slot)
        beside_mxfp8 = _is_mxfp8(gradient) or (slot == "dp" and gradient.is_identity)
        if not (_is_gradient(gradient) if _multiplied(spec.qkv) else beside_mxfp8):
            return f"{gradient} in {slot}"
    if not _multiplied(spec.qkv):
        return _unless(kernel, AttentionKernel.WIDE)
    takes = _unmasked(spec) and facts.width == _GLUON_BACKWARD and not facts.repeats
    takes = takes and not spec.dp.is_delayed  # whose amax it does not take
    return _unless(kernel, AttentionKernel.GLUON if takes and _by_gluon(facts.flops) else AttentionKernel.TRITON)


def _unless(kernel: AttentionKernel, faster: AttentionKernel) -> str:
    return "" if kernel is faster else f"{faster} is for it"


def _dequantized(spec: AttentionSpec) -> AttentionKernel:
    """The kernel of dequantized operands: cuDNN has neither masks nor the reference's dropout."""
    return AttentionKernel.CUDNN if _unmasked(spec) else AttentionKernel.WIDE


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
    if not facts.on_hopper:
        return "not on Hopper"
    if not facts.launches:
        return "not beside fxquant"
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
    if facts.dtype not in _HALVES:
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


def _unmasked(spec: AttentionSpec) -> bool:
    """Returns True if there is neither a mask, but for causality, nor dropout."""
    return not spec.dropout and not any(step.kind in _MASKS for step in spec.steps)


def _softmax(spec: AttentionSpec) -> str:
    """Returns why the format of the softmax has no kernel beside that of the operands."""
    row = spec.s.row
    if _is_mxfp8(spec.qkv):
        takes = row.family in ("identity", "mxfp8")
    else:  # whose scale is a constant
        takes = row.family in ("per_tensor", "per_head") and row.element == ELEMENTS["e4m3"]
    return "" if takes else f"{spec.s} in s"


def _by_gluon(flops: int) -> bool:
    """Returns True if Triton has the kernel in Gluon, and it is the faster one for so much work."""
    return flops >= LEAST_WORK_OF_GLUON and knows_gluon()
