"""The values of a tensor as they are in memory, for operators whose result depends on their last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxquant.kernels.cast import reference

if TYPE_CHECKING:
    from fxquant.kernels.operator import Operator


def of_rounded(called: Operator[..., Any], *args: Any) -> Any:
    """The meaning of an operator for what the tensors that it reads hold in memory."""
    count = called.traits.reads_values
    return called.meaning(*map(rounded, args[:count]), *args[count:])


def rounded(x: Tensor) -> Tensor:
    """The tensor, as it is in memory.

    A kernel that Inductor fuses with the producer of a 16-bit tensor keeps it in float32, unrounded, and the scale
    would be another one than for the tensor that everything else sees. So the value is rounded again, by arithmetic
    that changes nothing in a rounded one; a cast to and fro would be dropped.
    """
    if x.dtype == torch.float16:
        return _round_to_float16(x.float()).half()
    if x.dtype != torch.bfloat16:
        return x
    if x.device.type == "cuda":  # the conversion to a 16-bit integer is not dropped, and costs a fraction
        return (x.view(torch.int16).to(torch.int32) << 16).view(torch.float32).bfloat16()
    return reference.round_to_bfloat16(x.float()).bfloat16()


def _round_to_float16(y: Tensor) -> Tensor:
    bits = y.view(torch.int32)
    normal = ((bits + 0xFFF + (bits >> 13 & 1)) & -0x2000).view(torch.float32)
    subnormal = torch.round(y * 2.0**24) * 2.0**-24
    values = torch.where(y.abs() < torch.finfo(torch.float16).tiny, subnormal, normal)
    values = torch.where(values.abs() > torch.finfo(torch.float16).max, y * torch.inf, values)
    return torch.where(y == y, values, y)
