"""Matmuls that are found in a model and rewritten, to the same function with the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fxquant.compat.values import size_hint
from fxquant.decisions import SkipReason
from fxquant.passes.find.facts import Match, Product
from fxquant.passes.find.forms import apply_match
from fxquant.passes.find.mha import open_modules
from fxquant.passes.find.walk import find_matmuls
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.values import value_of

Shape = tuple[int, ...]


class Calls(nn.Module):
    """A function of inputs and parameters as a module."""

    def __init__(self, function: Callable[..., Any], *shapes: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs, *(self.weights[i] for i in range(len(self.weights))))


def gemm(
    builder: Builder, index: int, lhs: fx.Node, rhs: fx.Node, bias: fx.Node | None = None, offs: fx.Node | None = None
) -> fx.Node:
    """The plain product, after a check that both operands are in GEMM layout."""
    left, right = value_of(lhs), value_of(rhs)
    if offs is not None:
        assert (left.ndim, right.ndim) == (2, 3)
        if left.dtype == torch.bfloat16:
            return builder.call(torch._grouped_mm, lhs, builder.call(torch.transpose, rhs, -2, -1), offs)
        place = builder.call(torch.cumsum, builder.call(torch.ones_like, builder.call(torch.select, lhs, 1, 0)), 0)
        group = builder.call(torch.searchsorted, builder.call(torch.ops.aten.to.dtype, offs, left.dtype), place)
        return builder.call(torch.einsum, "mk,mnk->mn", lhs, builder.call(torch.index_select, rhs, 0, group))
    assert left.ndim >= 2
    assert bias is None or value_of(bias).ndim == 1
    if right.ndim == 2:
        return builder.call(F.linear, lhs, rhs, bias)
    assert left.ndim == right.ndim
    assert left.shape[:-2] == right.shape[:-2]
    return builder.call(torch.matmul, lhs, builder.call(torch.transpose, rhs, -2, -1))


@dataclass
class Rewrite:
    """A Dynamo backend that rewrites whatever can be rewritten, and remembers what it found."""

    open_attention: bool = False
    autocast: Mapping[str, torch.dtype] | None = None
    found: list[Match] = field(default_factory=list)
    graphs: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        matches = find_matmuls(gm, autocast=self.autocast)
        if self.open_attention and open_modules(matches):
            matches = find_matmuls(gm, autocast=self.autocast)
        self.found += matches
        for match in matches:
            if match.emit is not None:
                apply_match(match, gemm)
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                module.graph.lint()
                module.recompile()
        self.graphs.append(gm)
        return gm.forward

    @property
    def products(self) -> list[Product]:
        return [product for match in self.found for product in match.products]

    def reasons(self) -> list[SkipReason | None]:
        return [match.skip[0] if match.skip else None for match in self.found]


def results(model: Callable[..., Any], parameters: Sequence[Tensor], inputs: Sequence[Any]) -> list[Tensor]:
    """Outputs and all gradients, from clones of the inputs."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(0)
    out = model(*leaves)
    outputs = [each for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, Tensor)]
    loss = sum((o.double() * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() for o in outputs)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    grads = [each.grad for each in (*leaves, *parameters) if isinstance(each, Tensor) and each.grad is not None]
    return [*outputs, *grads]


def check(
    model: nn.Module, inputs: Sequence[Any], backend: Rewrite, *, tolerance: float = 1e-5, **options: Any
) -> Rewrite:
    """Rewritten equals eager: values to rounding, dtypes, shapes and strides exactly."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, **options)
    for expected, actual in zip(
        results(model, list(model.parameters()), inputs),
        results(compiled, list(model.parameters()), inputs),
        strict=True,
    ):
        assert actual.dtype == expected.dtype
        assert actual.stride() == expected.stride() or not expected.is_contiguous()
        near = tolerance if expected.dtype == torch.float32 else 2e-2
        scale = expected.float().abs().max().item() if expected.numel() else 1.0
        torch.testing.assert_close(actual, expected, rtol=near, atol=near * max(scale, 1.0))
    return backend


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


@dataclass
class Form:
    """One spelling: inputs and parameters by shape, and what is to be found."""

    function: Callable[..., Any]
    inputs: list[Shape]
    weights: list[Shape]
    kind: str
    sizes: list[tuple[Any, ...]]
    """For each product (m, k, n) or (batch, m, k, n)."""
    skip: SkipReason | None = None


def check_form(name: str, form: Form, dynamic: bool) -> None:
    """One match of the sizes, rewritten to the same function, whose FLOPs are those that torch counts."""
    torch.manual_seed(0)
    model, inputs = Calls(form.function, *form.weights), [randn(*shape) for shape in form.inputs]
    backend = check(model, inputs, Rewrite(), dynamic=dynamic)
    (match,) = backend.found
    reason = match.skip[0] if match.skip else None
    assert (match.module_type, reason) == (form.kind, form.skip)
    assert (match.emit is None) == (form.skip is not None)
    if form.sizes != [None]:
        assert [sizes(product) for product in match.products] == form.sizes
    weights = "linear" in form.kind
    assert all(product.rhs_is_weight == weights for product in match.products)
    assert all(grads == (True, True) for grads in match.needs_grad) or not form.weights or "two weights" in name
    if len(form.sizes) == 1 and form.sizes != [None]:  # torch may multiply a chain in another order
        assert sum(map(flops, match.products)) == (counted(model, inputs) or flops(match.products[0]))


def sizes(product: Product) -> tuple[Any, ...]:
    plain = (size_hint(product.m), size_hint(product.k), size_hint(product.n))
    return (tuple(map(size_hint, product.batch)), *plain) if product.batch else plain


def flops(product: Product) -> int:
    if product.counted is not None:
        return product.counted
    return 2 * math.prod(size_hint(size) for size in (*product.batch, product.m, product.k, product.n))


def counted(model: nn.Module, inputs: Sequence[Any]) -> int:
    """FLOPs by torch's own counter, which knows nothing of products by vectors, nor of bilinear and in-place ones."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    return int(counter.get_total_flops())
