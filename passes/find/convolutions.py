"""Convolutions that are products: of channels where the kernel is 1x1, of patches where its stride is its size.

What remains of an image behind its last whole patch is cut off, as the convolution does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxquant.compat.values import depends_on_data, statically_known_true
from fxquant.decisions import SkipReason
from fxquant.passes.find.contraction import contract
from fxquant.passes.find.facts import Finish, Label, Match, Operand, Product, axes, product_of
from fxquant.passes.find.layout import is_one
from fxquant.passes.find.site import Arguments, Site
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import Dim, value_of

aten = torch.ops.aten


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
            sizes = {"kernel": kernel, "stride": self.stride, "padding": self.padding}
            texts = (f"{name} {'x'.join(map(str, _per_axis(x, len(kernel))))}" for name, x in sizes.items())
            detail = f"{', '.join(texts)}, groups {self.groups}"
            if any(map(depends_on_data, space)):
                detail += "; its size depends on data"
            return self.site.match("linear", product, skip=(SkipReason.CONVOLUTION, detail))
        left, right = self.operands(kernel, space)
        out = (*_BATCH[: len(batch)], "out", *axes("space", len(kernel)))
        return contract(self.site, left, right, out, rhs_is_weight=True, bias=self.bias)

    def is_product(self, kernel: Sequence[Dim], space: Sequence[Dim]) -> bool:
        """Returns True if every input is read once, by one place of the kernel."""
        count = len(kernel)
        stride, padding, dilation = (_per_axis(value, count) for value in (self.stride, self.padding, self.dilation))
        pointwise = all(map(is_one, kernel))
        unpadded = padding in (("valid",) * count, (0,) * count) or (pointwise and padding == ("same",) * count)
        patches = all(step == size and isinstance(size, int) for step, size in zip(stride, kernel, strict=True))
        undilated = pointwise or dilation == (1,) * count
        # how many patches there are has to be known in front of the data
        counted = all(map(_divides, space, kernel)) or not any(map(depends_on_data, space))
        return patches and counted and unpadded and undilated and self.groups == 1

    def operands(self, kernel: Sequence[Any], space: Sequence[Dim]) -> tuple[Operand, Operand]:
        """Labels the axes of the input and the weight; patches become axes of the input."""
        shape, count = value_of(self.input).shape, len(kernel)
        batch, places, taps = _BATCH[: len(shape) - count - 1], axes("space", count), axes("tap", count)
        if all(map(is_one, kernel)):
            left = Operand.of(self.input, (*batch, "in", *places))
            return left, Operand.of(self.weight, ("out", "in", *(None for _ in kernel)))
        labels = tuple(label for pair in zip(places, taps, strict=True) for label in pair)
        parts = tuple(part for size, step in zip(space, kernel, strict=True) for part in (size // step, step))
        left = Operand.of(self.input, (*batch, "in", *labels))
        cut = not all(map(_divides, space, kernel))
        left = replace(left, sizes=(*shape[:-count], *parts), view=_patches(len(shape) - count, tuple(kernel), cut=cut))
        return left, Operand.of(self.weight, ("out", "in", *taps))


_CONVOLUTION = "input weight bias stride padding dilation transposed output_padding groups".split()


def convolution(site: Site, *args: Any, **kwargs: Any) -> Match:
    """Reads `convolution`, the operator behind all of them."""
    named = dict(zip(_CONVOLUTION, args, strict=False)) | kwargs
    transposed, _ = named.pop("transposed"), named.pop("output_padding")
    return conv_transpose(site, named["input"], named["weight"]) if transposed else Conv(site, **named).match()


def conv_transpose(site: Site, input: fx.Node, weight: fx.Node, *_: Any, **__: Any) -> Match:
    """Describes `conv_transpose1d`, 2d and 3d, which stay as they are. The weight is [in, out / groups, *kernel]."""
    out_channels, in_channels, *kernel = value_of(weight).shape
    batch, space = _shape(input, weight)
    columns = in_channels * product_of(kernel)
    product = Product(m=product_of((*batch, *space)), k=out_channels, n=columns, lhs=input, rhs=weight)
    return site.match("linear", product, skip=(SkipReason.CONVOLUTION, "a transposed convolution"))


_BATCH: tuple[Label, ...] = ("batch",)


def _shape(input: fx.Node, weight: fx.Node) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Returns the batch, if there is one, and the places of an input [*batch, channels, *places]."""
    shape, count = value_of(input).shape, value_of(weight).ndim - 2
    return tuple(shape[: len(shape) - count - 1]), tuple(shape[-count:])


def _per_axis(value: Any, count: int) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * count if len(values) == 1 else values


def _divides(size: Dim, step: Any) -> bool:
    """Returns True if an axis is known to be whole patches."""
    return statically_known_true(size % step == 0)


def _patches(first: int, kernel: tuple[int, ...], *, cut: bool) -> Finish:
    """Splits every axis from `first` on into positions and taps; with `cut` it drops the rest, which no tap reads."""

    def view(builder: Builder, node: fx.Node) -> fx.Node:
        places: list[int | fx.Node] = [-1] * len(kernel)
        if cut:
            places = [builder.call(operator.floordiv, builder.size(node, first + i), k) for i, k in enumerate(kernel)]
            for axis, (count, step) in enumerate(zip(places, kernel, strict=True), first):
                node = builder.call(aten.slice.Tensor, node, axis, 0, builder.call(operator.mul, count, step))
            # a view of what was cut asks whether there was a rest, and its graph would be for images of that kind
            node = builder.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        for axis in reversed(range(len(kernel))):
            node = builder.call(torch.unflatten, node, first + axis, (places[axis], kernel[axis]))
        return node

    return view
