"""Tensor cores that read the scales of blocks, as NVIDIA documents them, where there is no such card."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxquant.compat.private import ScalingType, SwizzleType, tree_map_only

SCALED_MM = torch.ops.aten._scaled_mm_v2.default
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""OCP MX v1.0, section 5.3.3."""


def documented(payload: Tensor, scale: Tensor, block: int) -> Tensor:
    """The values [R, C] of elements with one scale for each `block`, read at their addresses one by one.

    The scale of row r and block c stands at byte 512 t + 16 (r % 32) + 4 (r // 32 % 4) + c % 4, where t is the number
    of its tile of 128 x 4 scales. (cuBLAS documentation, "1D block scaling factors layout".)
    """
    rows, width = payload.shape
    if payload.dtype == torch.float4_e2m1fn_x2:
        codes = payload.view(torch.uint8)
        width = 2 * width
        nibbles = torch.stack((codes & 15, codes >> 4), -1).reshape(rows, width).long()
        elements = torch.tensor([*E2M1, *(-value for value in E2M1)])[nibbles]
    else:
        elements = payload.float()
    r, c = torch.arange(rows)[:, None], torch.arange(-(-width // block))[None, :]
    tile = r // 128 * -(-(width // block) // 4) + c // 4
    flat = scale.flatten()
    assert flat.numel() == -(-rows // 128) * 128 * -(-(width // block) // 4) * 4
    taken = flat.view(torch.uint8)[512 * tile + 16 * (r % 32) + 4 * (r // 32 % 4) + c % 4]
    values = 2.0 ** (taken.double() - 127) if scale.dtype == torch.float8_e8m0fnu else taken.view(scale.dtype).double()
    return (elements.double() * values.repeat_interleave(block, 1)[:, :width]).float()


def tensor_core_mm(
    a: Tensor, b: Tensor, scale_a: Sequence[Tensor], kinds_a: Sequence[Any], scale_b: Sequence[Tensor],
    kinds_b: Sequence[Any], swizzle_a: Sequence[Any], swizzle_b: Sequence[Any], bias: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.scaled_mm` of operands as hardware reads them."""
    block = {ScalingType.BlockWise1x32: 32, ScalingType.BlockWise1x16: 16}[kinds_a[0]]
    assert kinds_a == kinds_b and len(swizzle_a) == len(swizzle_b) == len(scale_a) == len(kinds_a)
    assert swizzle_a[0] == swizzle_b[0] == SwizzleType.SWIZZLE_32_4_4
    assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0 and b.stride(0) == 1, "what cuBLAS wants"
    out = documented(a, scale_a[0], block) @ documented(b.t(), scale_b[0], block).t()
    for factor in scale_a[1:]:
        assert kinds_a[1] == ScalingType.TensorWise
        out = out * (factor * scale_b[1])
    return (out if bias is None else out + bias.float()).to(dtype)


def grouped_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor) -> Tensor:
    """The float32 product of groups; of four bits two elements are in a byte."""
    packed = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    block = 32 // packed
    ends = [0, *offs.tolist()]
    assert a_scale.ndim == 2 and a_scale.is_contiguous() and b_scale.is_contiguous() and b.stride(-2) == 1
    assert a.shape[-1] % 16 == b.shape[-2] % 16 == b.shape[-1] % 16 == 0 and a.is_contiguous()
    groups, at, b_at = itertools.pairwise(ends), 0, 0
    if b.ndim == 3:
        out = torch.full((a.shape[0], b.shape[2]), torch.nan)
        width = _up(a.shape[1] * packed // block, 4)
        assert b_scale.shape == (b.shape[0], _up(b.shape[2], 128) * width)
        for group, (start, end) in enumerate(groups):
            size = _up(end - start, 128) * width
            if end > start:
                rows = documented(a[start:end], a_scale.flatten()[at : at + size], block)
                out[start:end] = rows @ documented(b[group].t(), b_scale[group], block).t()
            at += size
        return out
    out = torch.full((len(offs), a.shape[0], b.shape[1]), torch.nan)
    for group, (start, end) in enumerate(groups):
        assert start % 32 == 0
        width = _up((end - start) // block, 4)
        sizes = _up(a.shape[0], 128) * width, _up(b.shape[1], 128) * width
        first, last = start // packed, end // packed
        if end > start:
            rows = documented(a[:, first:last], a_scale.flatten()[at : at + sizes[0]], block)
            out[group] = rows @ documented(b.t()[:, first:last], b_scale.flatten()[b_at : b_at + sizes[1]], block).t()
        at, b_at = at + sizes[0], b_at + sizes[1]
    return out


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def scaled_grouped_mm(
    a: Tensor, b: Tensor, a_scale: Any, a_kinds: Any, b_scale: Any, b_kinds: Any, a_order: Any, b_order: Any, *,
    offs: Tensor, output_dtype: Any,
) -> Tensor:  # fmt: skip
    """The same as `torch.nn.functional.scaled_grouped_mm`, with a factor of each group behind it."""
    assert len(a_scale) == len(a_kinds) == len(a_order) == len(b_scale) and a_kinds == b_kinds and a_order == b_order
    out = grouped_product(a, b, a_scale[0], b_scale[0], offs)
    return scaled_by_group(out, a_scale, b_scale, b, offs).to(output_dtype)


def scaled_by_group(out: Tensor, a_scale: Any, b_scale: Any, b: Tensor, offs: Tensor) -> Tensor:
    """The product with the factor of each group, where there are some."""
    if len(a_scale) > 1:
        assert a_scale[1].shape == b_scale[1].shape == offs.shape
        factor = a_scale[1] * b_scale[1]
        starts = [0, *offs.tolist()]
        for group, (start, end) in enumerate(itertools.pairwise(starts)):
            part = out[start:end] if b.ndim == 3 else out[group]
            part *= factor[group]
    return out


def described(node: fx.Node) -> str:
    """A call with the dtype, sizes and strides of its tensors."""

    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        if not isinstance(value, fx.Node):
            return str(value).removeprefix("torch.")
        t = value.meta["val"]
        return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{list(t.stride())}"

    return " ".join(map(text, node.args))


class OnTensorCores(fx.Interpreter):
    """Runs a lowered graph on the CPU, its GEMMs with block scales, of groups too, as tensor cores do.

    Torch's meta function has to take each of them for a CUDA device, and gives the result the same sizes.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not SCALED_MM and "scaled_grouped_mm" not in str(target):
            return super().call_function(target, args, kwargs)
        with FakeTensorMode():
            fake = target(*tree_map_only(Tensor, _on_a_card, args), **tree_map_only(Tensor, _on_a_card, kwargs))
        if target is not SCALED_MM:
            return self._of_groups(str(target), args, kwargs).reshape(fake.shape)
        a, b, a_scale, a_kind, a_swizzle, b_scale, b_kind, b_swizzle, bias, dtype = args
        kinds = [[*map(ScalingType, kind)] for kind in (a_kind, b_kind)]
        swizzles = [[*map(SwizzleType, swizzle)] for swizzle in (a_swizzle, b_swizzle)]
        out = tensor_core_mm(a, b, a_scale, kinds[0], b_scale, kinds[1], *swizzles, bias, dtype)
        assert (out.shape, out.dtype, out.stride()) == (fake.shape, fake.dtype, fake.stride())
        return out

    def _of_groups(self, target: str, args: Any, kwargs: Any) -> Tensor:
        if "fxquant" in target:
            a, b, a_scales, b_scales, offs = args
        elif "_v2" in target:
            a, b, a_scales, _, _, b_scales, _, _, offs, *_ = args
        else:
            a, b, a_scale, b_scale = args[:4]
            a_scales, b_scales, offs = [a_scale], [b_scale], kwargs["offs"] if "offs" in kwargs else args[4]
        out = grouped_product(a, b, a_scales[0], b_scales[0], offs)
        return scaled_by_group(out, a_scales, b_scales, b, offs).bfloat16()


def accepted(node: fx.Node) -> tuple[int, ...]:
    """The sizes that torch gives the result of a call for a CUDA device, whose operands it has checked."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with FakeTensorMode():
        out = node.target(*tree_map_only(Tensor, _on_a_card, args), **tree_map_only(Tensor, _on_a_card, kwargs))  # type: ignore[operator]
    return tuple(out.shape)


def _on_a_card(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
