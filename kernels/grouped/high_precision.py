"""One GEMM a group in the dtype of its operands: `torch._grouped_mm` on CUDA, the same meaning elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.compat.private import torch_grouped_mm
from fxquant.compat.values import statically_known_true
from fxquant.kernels.operator import operator

_ALIGNMENT = 16
"""Bytes that the addresses of groups and the strides of operands are multiples of in `torch._grouped_mm`."""


def multiply_groups(a: Tensor, b: Tensor, offs: Tensor | None, alignment: int = 1) -> Tensor:
    """a x b^T for every group, the contracted axis of each last.

    a [M, K] x b [G, N, K] with the ends of the groups of rows in `offs` gives [M, N], zero in rows of no group;
    a [N, M] x b [K, M] with the ends of the groups of columns gives [G, N, K], and every group of columns starts at a
    multiple of `alignment`; without `offs` a [G, M, K] x b [G, N, K] gives [G, M, N].
    """
    if offs is None:
        return torch.matmul(a, b.mT)
    return grouped_mm(a, b, offs, alignment)


@operator(namespace="fxquant_kernels")
def grouped_mm(a: Tensor, b: Tensor, offs: Tensor, alignment: int = 1) -> Tensor:
    """`multiply_groups` on the CPU, where reading the offsets waits for nothing; sizes need no alignment."""
    ragged_rows = b.ndim == 3
    shape = (a.shape[0], b.shape[1]) if ragged_rows else (offs.shape[0], a.shape[0], b.shape[0])
    out = a.new_zeros(shape)
    start = 0
    for group, end in enumerate(offs.tolist()):
        if ragged_rows:
            out[start:end] = a[start:end] @ b[group].mT
        else:
            out[group] = a[:, start:end] @ b[:, start:end].mT
        start = end
    return out


@grouped_mm.fake
def _grouped_mm_fake(a: Tensor, b: Tensor, offs: Tensor, alignment: int = 1) -> Tensor:
    if b.ndim == 3:
        return a.new_empty(a.shape[0], b.shape[1])
    return a.new_empty(offs.shape[0], a.shape[0], b.shape[0])


@grouped_mm.on("CUDA")
def aten_grouped_mm(a: Tensor, b: Tensor, offs: Tensor, alignment: int = 1) -> Tensor:
    """The operator in ATen operators, for any device.

    On CUDA it never waits for the offsets in bfloat16; of other dtypes torch reads them on the host.
    """
    out = unmasked_grouped_mm(a, b, offs, alignment)
    if b.ndim == 2:
        sizes = offs - torch.nn.functional.pad(offs[:-1], (1, 0))
        return torch.where((sizes > 0).reshape(-1, 1, 1), out, 0)
    inside = torch.arange(a.shape[0], dtype=offs.dtype, device=offs.device) < offs[-1]
    return torch.where(inside.unsqueeze(1), out, 0)


def unmasked_grouped_mm(a: Tensor, b: Tensor, offs: Tensor, alignment: int = 1) -> Tensor:
    """The operator without its zeros: rows of no group and results of empty groups are as the memory was.

    The device wants the memory of every group to start at a multiple of 16 bytes, and stops at any other address.
    Rows do, when their length is padded. Groups of columns do where they are aligned; otherwise the operands are laid
    out so that the columns are rows.
    """
    offs, multiple = offs.to(torch.int32), _ALIGNMENT // b.itemsize
    if b.ndim == 3 or alignment % multiple == 0:
        left, right = _aligned(a), _rows_aligned(_aligned(b), multiple).mT
    else:
        left, right = _aligned(a.mT).mT, _aligned(b.mT)
    out = torch_grouped_mm(left, right, offs=offs)
    if b.ndim == 2 and not statically_known_true(out.shape[1] == a.shape[0]):
        out = out[:, : a.shape[0]]
    return out if statically_known_true(out.shape[-1] == b.shape[-2]) else out[..., : b.shape[-2]]


def portable_grouped_mm(a: Tensor, b: Tensor, offs: Tensor, alignment: int = 1) -> Tensor:
    """The operator in ATen operators that can be traced, for any device.

    torch has a grouped GEMM in bfloat16 alone: in other dtypes each group multiplies all rows and keeps its own.
    """
    if a.dtype == b.dtype == torch.bfloat16:
        return aten_grouped_mm(a, b, offs, alignment)
    ragged, groups = a.shape[0 if b.ndim == 3 else 1], offs.shape[0]
    place = torch.arange(ragged, dtype=offs.dtype, device=offs.device)
    ends = [offs[group] for group in range(groups)]
    inside = [(place < end) & (place >= start) for start, end in zip([place.new_zeros(()), *ends], ends, strict=False)]
    if b.ndim == 3:
        out = a.new_zeros(ragged, b.shape[1])
        for group, rows in enumerate(inside):
            out = torch.where(rows.unsqueeze(1), a @ b[group].mT, out)
        return out
    return torch.stack([torch.where(columns, a, 0) @ torch.where(columns, b, 0).mT for columns in inside])


def _aligned(x: Tensor) -> Tensor:
    """Zeros behind the last axis, so that its rows start at aligned addresses."""
    spare = -x.shape[-1] % (_ALIGNMENT // x.itemsize)
    return torch.nn.functional.pad(x, (0, spare)) if spare else x.contiguous()


def _rows_aligned(x: Tensor, multiple: int) -> Tensor:
    """Rows of zeros behind the last, so that rows of the result start at aligned addresses."""
    spare = -x.shape[-2] % multiple
    return torch.nn.functional.pad(x, (0, 0, 0, spare)) if spare else x
