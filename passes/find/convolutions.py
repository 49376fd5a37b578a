"""Convolutions that are products: of channels where the kernel is 1x1, of patches where its stride is its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import statically_known_true
from fxquant.decisions import SkipReason
from fxquant.passes.find.contraction import contract
from fxquant.passes.find.facts import Finish, Label, Match, Operand, Product, axes, product_of
from fxquant.passes.find.site import Arguments, Site
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import Dim, value_of


@dataclass(frozen=True)
class Conv(Arguments):
    """`conv1d`, `conv2d`, `conv3d`. A 1x1 kernel is a linear over channels, one as large as its stride over patches."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def match(self) -> Match:
        out_channels, in_channels, *kernel = value_of(self.weight).shape
        batch, space = _shape(self.input, self.weight)
        if not self.is_product(kernel, space):
            rows = product_of((*batch, *value_of(self.site.node).shape[-len(kernel) :]))
            features = in_channels * product_of(kernel)
            product = Product(m=rows, k=features, n=out_channels, lhs=self.input, rhs=self.weight)
            stride, padding = (_text(_per_axis(value, len(kernel))) for value in (self.stride, self.padding))
            detail = f"kernel {_text(kernel)}, stride {stride}, padding {padding}, groups {self.groups}"
            return self.site.match("linear", product, skip=(SkipReason.CONVOLUTION, detail))
        left, right = self.operands(kernel, space)
        out = (*_BATCH[: len(batch)], "out", *axes("space", len(kernel)))
        return contract(self.site, left, right, out, rhs_is_weight=True, bias=self.bias)

    def is_product(self, kernel: Sequence[Dim], space: Sequence[Dim]) -> bool:
        """Returns True if every input is read once, by one place of the kernel."""
        count = len(kernel)
        stride, padding, dilation = (_per_axis(value, count) for value in (self.stride, self.padding, self.dilation))
        pointwise = _is_pointwise(kernel)
        unpadded = padding in (("valid",) * count, (0,) * count) or (pointwise and padding == ("same",) * count)
        patches = all(step == size and isinstance(size, int) for step, size in zip(stride, kernel, strict=True))
        divides = all(statically_known_true(size % step == 0) for size, step in zip(space, stride, strict=True))
        undilated = pointwise or dilation == (1,) * count
        return patches and divides and unpadded and undilated and self.groups == 1

    def operands(self, kernel: Sequence[Any], space: Sequence[Dim]) -> tuple[Operand, Operand]:
        """The input and the weight with labelled axes; patches are axes of the input."""
        shape, count = value_of(self.input).shape, len(kernel)
        batch, places, taps = _BATCH[: len(shape) - count - 1], axes("space", count), axes("tap", count)
        if _is_pointwise(kernel):
            left = Operand.of(self.input, (*batch, "in", *places))
            return left, Operand.of(self.weight, ("out", "in", *(None for _ in kernel)))
        labels = tuple(label for pair in zip(places, taps, strict=True) for label in pair)
        parts = tuple(part for size, step in zip(space, kernel, strict=True) for part in (size // step, step))
        left = Operand(
            node=self.input,
            labels=(*batch, "in", *labels),
            sizes=(*shape[:-count], *parts),
            view=_patches(len(shape) - count, tuple(kernel)),
        )
        return left, Operand.of(self.weight, ("out", "in", *taps))


@dataclass(frozen=True)
class Convolution(Arguments):
    """`convolution`, the operator behind all of them."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    transposed: bool = False
    output_padding: Any = 0
    groups: int = 1

    def match(self) -> Match:
        if self.transposed:
            return conv_transpose(self.site, self.input, self.weight)
        return Conv(
            self.site, self.input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        ).match()


def conv_transpose(site: Site, input: fx.Node, weight: fx.Node, *_: Any, **__: Any) -> Match:
    """`conv_transpose1d`, 2d and 3d: found, never rewritten. The weight is [in, out / groups, *kernel]."""
    out_channels, in_channels, *kernel = value_of(weight).shape
    batch, space = _shape(input, weight)
    columns = in_channels * product_of(kernel)
    product = Product(m=product_of((*batch, *space)), k=out_channels, n=columns, lhs=input, rhs=weight)
    return site.match("linear", product, skip=(SkipReason.CONVOLUTION, "a transposed convolution"))


_BATCH: tuple[Label, ...] = ("batch",)


def _shape(input: fx.Node, weight: fx.Node) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """The batch, if there is one, and the places of an input [*batch, channels, *places]."""
    shape, count = value_of(input).shape, value_of(weight).ndim - 2
    return tuple(shape[: len(shape) - count - 1]), tuple(shape[-count:])


def _is_pointwise(kernel: Sequence[Dim]) -> bool:
    return all(isinstance(size, int) and size == 1 for size in kernel)


def _per_axis(value: Any, count: int) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * count if len(values) == 1 else values


def _text(values: Sequence[Any]) -> str:
    return "x".join(map(str, values))


def _patches(first: int, kernel: tuple[int, ...]) -> Finish:
    """Splits every axis from `first` on into positions and taps."""

    def view(builder: Builder, node: fx.Node) -> fx.Node:
        for axis in reversed(range(len(kernel))):
            node = builder.call(torch.unflatten, node, first + axis, (-1, kernel[axis]))
        return node

    return view


__all__ = ["Conv", "Convolution", "conv_transpose"]
