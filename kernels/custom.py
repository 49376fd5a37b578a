"""Users' own quantizers inside a graph: their torch code is traced in place, with no operator of ours around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fxquant.errors import RecipeError
from fxquant.formats import QuantSpec, check_state
from fxquant.kernels.cast import philox, reference
from fxquant.kernels.operator import Parts, operator


class CustomQuantizer(Protocol):
    """A user's quantizer, with all that a graph needs of it."""

    def quantize_side(
        self, x: Tensor, direction: str, draw: Callable[[torch.Size], Tensor] | None = None
    ) -> list[Tensor]:
        """One direction of x [*, M, K], with the contracted axis last; `draw` gives random bytes of a size."""

    def dequantize_side(self, parts: Sequence[Tensor], length: int | None = None) -> Tensor:
        """The values of what `quantize_side` gave, in the same orientation; without padding of a known length."""

    def multiply(
        self, a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor | None:
        """a [*, M, K] x b [*, N, K]^T + bias, where the quantizer has a GEMM of its own."""


_registered: dict[str, CustomQuantizer] = {}


@operator(namespace="fxquant_kernels")
def watched_gemm(out: Tensor, bias: Tensor | None, left: Parts, right: Parts) -> Tensor:
    """The result of a GEMM and its bias beside what it multiplied: each operand before and after its quantization.

    Only graphs that are measured have it.
    """
    return out.clone()


@watched_gemm.fake
def _watched_gemm_fake(out: Tensor, bias: Tensor | None, left: Parts, right: Parts) -> Tensor:
    return out.new_empty(out.shape)


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


_watched: ContextVar[list[tuple[Sequence[Tensor], Tensor]] | None] = ContextVar("watched", default=None)


@contextmanager
def watched() -> Iterator[None]:
    """Puts `watched_gemm` behind every GEMM of an operand of a user's quantizer that is traced inside."""
    token = _watched.set([])
    try:
        yield
    finally:
        _watched.reset(token)


def quantize(x: Tensor, spec: QuantSpec, direction: str, state: Tensor | None = None) -> list[Tensor]:
    """One direction of x [*, M, K] by the quantizer of a spec; `state` is that of `fxquant::quantize`."""
    check_state(state, spec)
    if spec.stochastic and state is not None:
        draw = partial(philox.random_bytes, state=state.to(x.device), stream=spec.stream % 2)
        parts = get(spec).quantize_side(x, direction, draw)
    else:
        parts = get(spec).quantize_side(x, direction)
    all_parts = _recorded.get()
    if all_parts is not None:
        all_parts.append(parts)
    sources = _watched.get()
    if sources is not None:
        sources.append((parts, x.mT if direction == "columnwise" else x))
    return parts


def gemm(
    a: Sequence[Tensor], a_spec: QuantSpec, b: Sequence[Tensor], b_spec: QuantSpec, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """a x b^T + bias where at least one operand is custom.

    Two operands of one class are multiplied by its `qgemm` if it has one; all others are dequantized to float32.
    """
    out = _product(a, a_spec, b, b_spec, bias, out_dtype)
    sources = _watched.get()
    if sources is None:
        return out
    operands = []
    for parts, spec in ((a, a_spec), (b, b_spec)):
        seen = _values(parts, spec)
        source = next((x for quantized, x in sources if quantized is parts), seen)
        operands.append([source, seen.narrow(-1, 0, source.shape[-1])])
    return watched_gemm(out, bias, *operands)


def _product(
    a: Sequence[Tensor], a_spec: QuantSpec, b: Sequence[Tensor], b_spec: QuantSpec, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
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
