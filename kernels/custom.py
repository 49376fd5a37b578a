"""Users' own quantizers inside a graph: their torch code is traced in place, with no operator of ours around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from fxquant.errors import RecipeError
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference


class CustomQuantizer(Protocol):
    """A user's quantizer, with all that a graph needs of it."""

    def quantize_side(self, x: Tensor, direction: str) -> list[Tensor]:
        """One direction of x [*, M, K], with the contracted axis last."""

    def dequantize_side(self, parts: Sequence[Tensor]) -> Tensor:
        """The values of what `quantize_side` gave, in the same orientation."""

    def multiply(
        self, a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor | None:
        """a [*, M, K] x b [*, N, K]^T + bias, where the quantizer has a GEMM of its own."""


_registered: dict[str, CustomQuantizer] = {}


def register(key: str, quantizer: CustomQuantizer) -> None:
    """Makes a quantizer known under the key that its specs carry. Equal keys must mean equal quantizers."""
    _registered.setdefault(key, quantizer)


def get(spec: QuantSpec) -> CustomQuantizer:
    """The quantizer of a spec. Raises RecipeError when this process never made it."""
    if spec.key not in _registered:
        raise RecipeError(f"the custom quantizer {spec.key!r} is not known in this process: construct it first")
    return _registered[spec.key]


_recorded: ContextVar[list[list[Tensor]] | None] = ContextVar("recorded", default=None)


@contextmanager
def recorded() -> Iterator[list[list[Tensor]]]:
    """Collects the parts of everything that is quantized inside."""
    all_parts: list[list[Tensor]] = []
    token = _recorded.set(all_parts)
    try:
        yield all_parts
    finally:
        _recorded.reset(token)


def quantize(x: Tensor, spec: QuantSpec, direction: str) -> list[Tensor]:
    """One direction of x [*, M, K] by the quantizer of a spec."""
    parts = get(spec).quantize_side(x, direction)
    all_parts = _recorded.get()
    if all_parts is not None:
        all_parts.append(parts)
    return parts


def gemm(
    a: Sequence[Tensor], a_spec: QuantSpec, b: Sequence[Tensor], b_spec: QuantSpec, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """a x b^T + bias where at least one operand is custom.

    Two operands of one class are multiplied by its `qgemm` if it has one; all others are dequantized to float32.
    """
    if a_spec.key and b_spec.key and type(get(a_spec)) is type(get(b_spec)):
        product = get(a_spec).multiply(a, b, bias, out_dtype)
        if product is not None:
            return product
    left, right = (_values(parts, spec) for parts, spec in ((a, a_spec), (b, b_spec)))
    length = min(left.shape[-1], right.shape[-1])
    out = left[..., :length] @ right[..., :length].mT
    return (out if bias is None else out + bias.float()).to(out_dtype)


def _values(parts: Sequence[Tensor], spec: QuantSpec) -> Tensor:
    if spec.key:
        return get(spec).dequantize_side(parts).float()
    return parts[0].float() if spec.is_identity else reference.dequantize(parts, spec)
