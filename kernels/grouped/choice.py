"""The conditions of the kernels that a GEMM in groups can be, the fastest that was measured first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxquant.compat.device import capability, knows_gluon
from fxquant.compat.values import size_hint, statically_known_true
from fxquant.formats import QuantSpec, is_mixed
from fxquant.kernels.linear.choice import LEAST_WORK_BY_WARPS, MIXED, exact_in_bfloat16
from fxquant.kernels.operator import Dim, Facts, Parts


@dataclass(frozen=True, kw_only=True)
class GroupedGemmFacts(Facts):
    """A GEMM of groups of rows, or of a batch of matrices, whose result has `dtype`.

    `features` are the columns of the result, `flops` those of all groups, `wgrad` says that it is the gradient of a
    weight, and `fast_accum` that sums may be kept in tensor cores throughout.
    """

    a: QuantSpec
    b: QuantSpec
    dtype: torch.dtype
    batch: bool = False
    wgrad: bool = False
    fast_accum: bool = False
    features: Dim = None
    flops: int = 0

    @classmethod
    def of(
        cls, a: Parts, b: Parts, offs: Tensor | None, a_spec: str, b_spec: str, dtype: torch.dtype, fast_accum: bool
    ) -> GroupedGemmFacts:
        """The facts of the arguments of `fxquant::grouped_scaled_mm`."""
        return cls(
            a=QuantSpec.parse(a_spec), b=QuantSpec.parse(b_spec), dtype=dtype, batch=offs is None,
            wgrad=b[0].ndim == 2, fast_accum=fast_accum, capability=capability(a[0].device),
            features=b[0].shape[-2],
            flops=0 if offs is None else 2 * math.prod(map(size_hint, (*a[0].shape, b[0].shape[-2]))),
        )  # fmt: skip

    @property
    def long_scales(self) -> bool:
        """True if a scale is of a whole row or group."""
        return self.a.row.family in ("per_tensor", "per_row")


def portable(facts: GroupedGemmFacts) -> str:
    """Returns why a GEMM need not be one that every device has."""
    return "runs beside fxquant" if facts.launches else ""


def mxfp8(facts: GroupedGemmFacts) -> str:
    """Returns why tensor cores do not multiply groups of MXFP8 with its scales: torch has e4m3 on 10.0 alone."""
    if reason := _no_tensor_core_scales(facts, "mxfp8"):
        return reason
    return "" if all(_is_e4m3(spec) for spec in (facts.a, facts.b)) else "not e4m3 by e4m3"


def nvfp4(facts: GroupedGemmFacts) -> str:
    """Returns why tensor cores do not multiply groups of NVFP4 with its scales: torch has it on 10.0 alone."""
    if reason := _no_tensor_core_scales(facts, "nvfp4"):
        return reason
    return "a global amax for each row" if facts.a.row_scaled or facts.b.row_scaled else ""


def reads_tiles(a: QuantSpec, b: QuantSpec, card: tuple[int, int]) -> bool:
    """Returns True if tensor cores of a card multiply groups of rows with the scales of their blocks, in tiles."""
    facts = GroupedGemmFacts(a=a, b=b, dtype=torch.bfloat16, capability=card)
    return not (mxfp8(facts) and nvfp4(facts))


def _no_tensor_core_scales(facts: GroupedGemmFacts, family: str) -> str:
    if reason := _no_kernel(facts):
        return reason
    if facts.a.row.family != family:
        return f"no scales of {family}"
    return "" if facts.multiplies_groups_of_blocks else f"no grouped FP8 GEMM for {family} scales"


def torchs(facts: GroupedGemmFacts) -> str:
    """Returns why `_scaled_grouped_mm` does not multiply: it takes e4m3, and on Hopper gives bfloat16."""
    return _torchs(facts) or ("" if fast(facts) else "Triton is faster")


def fast(facts: GroupedGemmFacts) -> str:
    """Returns why Triton is no faster than `_scaled_grouped_mm`."""
    return _torchs(facts) or ("" if facts.on_hopper and facts.fast_accum and not facts.wgrad else "no faster")


def _torchs(facts: GroupedGemmFacts) -> str:
    if reason := _no_kernel(facts):
        return reason
    if not (facts.long_scales and all(_is_e4m3(spec) for spec in (facts.a, facts.b))):
        return "not e4m3 with long scales"
    if facts.capability[0] not in (9, 10):
        return "no grouped FP8 GEMM on this device"
    return "" if facts.dtype == torch.bfloat16 or not facts.on_hopper else "no bfloat16"


def rows(facts: GroupedGemmFacts) -> str:
    """Returns why Triton does not multiply operands with long scales."""
    if reason := _no_kernel(facts):
        return reason
    if not facts.long_scales:
        return f"no grouped FP8 GEMM for {facts.a.row.family} scales"
    return "" if facts.on_hopper else _torchs(facts) or "torch has it"


def blocks_by_warps(facts: GroupedGemmFacts) -> str:
    """Returns why the kernel in Gluon does not multiply operands with scales of blocks."""
    if reason := blocks(facts):
        return reason
    if not (facts.triton and facts.launches and knows_gluon()):
        return "not beside fxquant and the Triton with the kernel's Gluon"
    if not all(_is_e4m3(spec) for spec in (facts.a, facts.b)):
        return "not e4m3 by e4m3"
    if facts.b.row.block[0] != (1 if facts.wgrad else 128):
        return "weights that are not scaled in tiles"
    if facts.features is None or not statically_known_true(facts.features % 16 == 0):
        return "columns that are no multiple of 16"
    return "" if facts.flops >= LEAST_WORK_BY_WARPS else "Triton's own kernel is launched faster"


def blocks(facts: GroupedGemmFacts) -> str:
    """Returns why Triton does not multiply operands with scales of blocks."""
    if (reason := _no_kernel(facts)) or facts.long_scales:
        return reason or rows(facts) or "scales of rows"
    if facts.a.row.family in ("mxfp8", "nvfp4"):
        return (mxfp8 if facts.a.row.family == "mxfp8" else nvfp4)(facts) or "multiplied by tensor cores"
    one_by_128 = facts.a.row.block == (1, 128) and (not facts.wgrad or facts.b.row.block[0] == 1)
    fits = facts.a.row.family == "block" and one_by_128 and facts.on_hopper
    return "" if fits else f"no grouped FP8 GEMM for {facts.a.row.family} scales"


def emulated(facts: GroupedGemmFacts) -> str:
    """Returns why operands are not dequantized to bfloat16: the products of a batch are exact, others are torch's."""
    mixed = is_mixed(facts.a, facts.b)
    exact = not facts.batch or mixed or facts.long_scales or all(map(exact_in_bfloat16, (facts.a, facts.b)))
    return "" if facts.on_cuda and exact else "values that bfloat16 rounds"


def _no_kernel(facts: GroupedGemmFacts) -> str:
    if is_mixed(facts.a, facts.b):
        return MIXED
    if not facts.on_cuda:
        return "the reference"
    if facts.batch:
        return "a batch of weights" if facts.long_scales else "a batch of matrices"
    return ""


def _is_e4m3(spec: QuantSpec) -> bool:
    return spec.row.element is not None and spec.row.element.name == "e4m3"
