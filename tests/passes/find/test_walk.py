"""Every form a matmul takes: found with its sizes, and rewritten to the same function with the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import eager_backend
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fxquant.compat.values import size_hint
from fxquant.decisions import SkipReason
from fxquant.passes.find.facts import Match, Product
from fxquant.passes.find.forms import apply_match
from fxquant.passes.find.mha import open_modules
from fxquant.passes.find.walk import find_matmuls
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.meta import PROJECTION
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


def _addmm_(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x = x * 2
    view = x[:]
    x.addmm_(y, w, beta=0.5, alpha=3)
    return x + view


def _conv(x: Tensor, w: Tensor, b: Tensor | None = None, **options: Any) -> Tensor:
    return (F.conv1d, F.conv2d, F.conv3d)[w.ndim - 3](x, w, b, **options)


SMALL, UNSUPPORTED = SkipReason.TOO_SMALL, SkipReason.UNSUPPORTED_FORM
CONVOLUTION = SkipReason.CONVOLUTION

FORMS = {
    # F.linear
    "linear 1d": Form(F.linear, [(24,)], [(40, 24)], "linear", [(1, 24, 40)]),
    "linear 2d bias": Form(F.linear, [(5, 24)], [(40, 24), (40,)], "linear", [(5, 24, 40)]),
    "linear 4d": Form(F.linear, [(2, 3, 5, 24)], [(40, 24), (40,)], "linear", [(30, 24, 40)]),
    "linear transposed": Form(lambda x, w: F.linear(x, w.t()), [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]),
    "linear computed": Form(lambda x, v: F.linear(x, v.tanh()), [(5, 24), (40, 24)], [], "linear", [(5, 24, 40)]),
    "linear slice": Form(lambda x, w: F.linear(x, w[8:]), [(5, 24)], [(40, 24)], "linear", [(5, 24, 32)]),
    "linear chunk": Form(lambda x, w: F.linear(x, w.chunk(2)[1]), [(5, 24)], [(40, 24)], "linear", [(5, 24, 20)]),
    "linear 1d weight": Form(F.linear, [(5, 24)], [(24,)], "linear", [(5, 24, 1)], SMALL),
    # products with a matrix
    "mm": Form(torch.mm, [(5, 24)], [(24, 40)], "linear", [(5, 24, 40)]),
    "method mm": Form(lambda x, w: x.mm(w.t()), [(5, 24)], [(40, 24)], "linear", [(5, 24, 40)]),
    "matmul": Form(torch.matmul, [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]),
    "matmul mT": Form(lambda x, w: x.matmul(w.mT), [(3, 5, 24)], [(40, 24)], "linear", [(15, 24, 40)]),
    "at": Form(lambda x, w: x @ w.T, [(2, 3, 5, 24)], [(40, 24)], "linear", [(30, 24, 40)]),
    "at transposed input": Form(lambda x, w: x.mT @ w, [(3, 24, 5)], [(24, 40)], "linear", [(15, 24, 40)]),
    "at vector": Form(lambda x, w: x @ w, [(24,)], [(24, 40)], "linear", [(1, 24, 40)]),
    "linalg": Form(torch.linalg.matmul, [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]),
    "weight left": Form(lambda x, w: w @ x, [(24, 5)], [(40, 24)], "linear", [(5, 24, 40)]),
    "weight left 3d": Form(lambda x, w: w @ x, [(3, 24, 5)], [(40, 24)], "linear", [(15, 24, 40)]),
    "weight left vector": Form(lambda x, w: w @ x, [(24,)], [(40, 24)], "linear", [(1, 24, 40)]),
    "weight left mv": Form(lambda x, w: torch.mv(w, x), [(24,)], [(40, 24)], "linear", [(1, 24, 40)]),
    "two weights": Form(lambda x, v, w: x + v @ w, [(5, 40)], [(5, 24), (24, 40)], "linear", [(5, 24, 40)]),
    "inner": Form(torch.inner, [(3, 5, 24)], [(40, 24)], "linear", [(15, 24, 40)]),
    "one of a stack": Form(lambda x, w: x @ w[1], [(5, 24)], [(3, 24, 40)], "grouped_linear", [(5, 24, 40)]),
    "cast weight": Form(
        lambda x, w: x.to(torch.bfloat16) @ w.to(torch.bfloat16), [(5, 24)], [(24, 40)], "linear", [(5, 24, 40)]
    ),
    # batches that share one matrix
    "bmm expand": Form(
        lambda x, w: torch.bmm(x, w.expand(3, -1, -1)), [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]
    ),
    "bmm unsqueeze expand": Form(
        lambda x, w: x.bmm(w.t().unsqueeze(0).expand(3, 24, 40)), [(3, 5, 24)], [(40, 24)], "linear", [(15, 24, 40)]
    ),
    "bmm of one": Form(torch.bmm, [(1, 5, 24)], [(1, 24, 40)], "linear", [(5, 24, 40)]),
    "matmul of one": Form(torch.matmul, [(3, 5, 24)], [(1, 24, 40)], "linear", [(15, 24, 40)]),
    "matmul one to many": Form(torch.matmul, [(1, 5, 24)], [(3, 24, 40)], "linear", [(5, 24, 120)]),
    # products with an addend
    "addmm": Form(lambda x, b, w: torch.addmm(b, x, w), [(5, 24)], [(40,), (24, 40)], "linear", [(5, 24, 40)]),
    "addmm factors": Form(
        lambda x, b, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0), [(5, 24)], [(40,), (24, 40)], "linear", [(5, 24, 40)]
    ),
    "addmm matrix": Form(
        lambda x, b, w: b.addmm(x, w), [(5, 24)], [(5, 40), (24, 40)], "linear", [(5, 24, 40)]
    ),
    "addmm broadcast": Form(
        lambda x, b, w: torch.addmm(b, x, w, beta=2), [(5, 24)], [(5, 1), (24, 40)], "linear", [(5, 24, 40)]
    ),
    "addmm without": Form(
        lambda x, w: torch.addmm(w.new_full((40,), torch.nan), x, w, beta=0), [(5, 24)], [(24, 40)], "linear",
        [(5, 24, 40)],
    ),
    "addmm weight left": Form(
        lambda x, b, w: torch.addmm(b, w, x), [(24, 5)], [(5,), (40, 24)], "linear", [(5, 24, 40)]
    ),
    "addmm_": Form(_addmm_, [(5, 40), (5, 24)], [(24, 40)], "linear", [(5, 24, 40)]),
    "addbmm": Form(torch.addbmm, [(5, 40), (3, 5, 24)], [(3, 24, 40)], "linear", [(5, 72, 40)]),
    # einsum
    "einsum": Form(
        lambda x, w: torch.einsum("bsi,io->bso", x, w), [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]
    ),
    "einsum implicit": Form(
        lambda x, w: torch.einsum("...i,oi", x, w), [(2, 3, 5, 24)], [(40, 24)], "linear", [(30, 24, 40)]
    ),
    "einsum weight first": Form(
        lambda x, w: torch.einsum("oi, bsi -> osb", w, x), [(3, 5, 24)], [(40, 24)], "linear", [(15, 24, 40)]
    ),
    "einsum heads out": Form(
        lambda x, w: torch.einsum("bsi,hid->bhsd", x, w), [(3, 5, 24)], [(4, 24, 16)], "linear", [(15, 24, 64)]
    ),
    "einsum heads in": Form(
        lambda x, w: torch.einsum("bshd,dho->bso", x, w), [(3, 5, 4, 16)], [(16, 4, 40)], "linear", [(15, 64, 40)]
    ),
    "einsum lists": Form(
        lambda x, w: torch.einsum(x, [0, 1], w, [2, 1], [2, 0]), [(5, 24)], [(40, 24)], "linear", [(5, 24, 40)]
    ),
    "einsum upper case": Form(
        lambda x, w: torch.einsum("aB,BC", x, w), [(5, 24)], [(24, 40)], "linear", [(5, 24, 40)]
    ),
    "einsum chain": Form(
        lambda x, v, w: torch.einsum("bsi,ij,jo->bso", x, v, w), [(3, 5, 24)], [(24, 16), (16, 40)], "linear",
        [(15, 24, 16), (15, 16, 40)],
    ),
    "einsum chain weights first": Form(
        lambda x, v, w: torch.einsum("ij,jo,bsi->bos", v, w, x), [(3, 5, 24)], [(24, 16), (16, 40)], "linear",
        [(15, 24, 16), (15, 16, 40)],
    ),
    "chain_matmul": Form(
        torch.chain_matmul, [(5, 24)], [(24, 16), (16, 40), (40, 32)], "linear",
        [(5, 24, 16), (5, 16, 40), (5, 40, 32)],
    ),
    "multi_dot": Form(
        lambda x, v, w: torch.linalg.multi_dot([v, x, w]), [(24, 5)], [(16, 24), (5, 40)], "linear",
        [(5, 24, 16), (16, 5, 40)],
    ),
    "multi_dot vector": Form(
        lambda x, v, w: torch.linalg.multi_dot((x, v, w)), [(24,)], [(24, 16), (16, 40)], "linear",
        [(1, 24, 16), (1, 16, 40)],
    ),
    # tensordot
    "tensordot count": Form(
        lambda x, w: torch.tensordot(x, w, dims=1), [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]
    ),
    "tensordot default": Form(
        lambda x, w: torch.tensordot(x, w), [(3, 4, 24)], [(4, 24, 40)], "linear", [(3, 96, 40)]
    ),
    "tensordot lists": Form(
        lambda x, w: torch.tensordot(x, w, dims=([-1, 1], [2, 1])), [(3, 4, 24)], [(40, 4, 24)], "linear", [(3, 96, 40)]
    ),
    "tensordot many out": Form(
        lambda x, w: torch.tensordot(x, w, dims=([2], [1])), [(3, 5, 24)], [(4, 24, 8)], "linear", [(15, 24, 32)]
    ),
    # convolutions
    "conv1d 1x1": Form(_conv, [(3, 24, 7)], [(40, 24, 1), (40,)], "linear", [(21, 24, 40)]),
    "conv2d 1x1": Form(_conv, [(3, 24, 7, 5)], [(40, 24, 1, 1), (40,)], "linear", [(105, 24, 40)]),
    "conv2d unbatched": Form(_conv, [(24, 7, 5)], [(40, 24, 1, 1)], "linear", [(35, 24, 40)]),
    "conv2d same": Form(
        lambda x, w: _conv(x, w, padding="same"), [(3, 24, 7, 5)], [(40, 24, 1, 1)], "linear", [(105, 24, 40)]
    ),
    "conv1d patches": Form(lambda x, w: _conv(x, w, stride=4), [(3, 6, 20)], [(40, 6, 4)], "linear", [(15, 24, 40)]),
    "conv2d patches": Form(
        lambda x, w, b: _conv(x, w, b, stride=(4, 2)), [(3, 6, 20, 6)], [(40, 6, 4, 2), (40,)], "linear", [(45, 48, 40)]
    ),
    "conv3d patches": Form(
        lambda x, w: _conv(x, w, stride=2), [(3, 6, 4, 6, 2)], [(40, 6, 2, 2, 2)], "linear", [(18, 48, 40)]
    ),
    "conv 3 taps": Form(_conv, [(3, 6, 20)], [(40, 6, 3)], "linear", [(54, 18, 40)], CONVOLUTION),
    "conv rest": Form(
        lambda x, w: _conv(x, w, stride=4), [(3, 6, 22)], [(40, 6, 4)], "linear", [(15, 24, 40)], CONVOLUTION
    ),
    "conv groups": Form(
        lambda x, w: _conv(x, w, groups=2), [(3, 12, 7)], [(40, 6, 1)], "linear", [(21, 6, 40)], CONVOLUTION
    ),
    "conv padded": Form(
        lambda x, w: _conv(x, w, padding=1), [(3, 6, 5, 5)], [(40, 6, 1, 1)], "linear", [(147, 6, 40)], CONVOLUTION
    ),
    "conv transposed": Form(
        F.conv_transpose1d, [(3, 6, 5)], [(6, 40, 4)], "linear", [(15, 6, 160)], CONVOLUTION
    ),
    # products of two activations
    "activations mm": Form(torch.mm, [(5, 24), (24, 40)], [], "matmul", [(5, 24, 40)]),
    "activations bmm": Form(torch.bmm, [(3, 5, 24), (3, 24, 40)], [], "matmul", [((3,), 5, 24, 40)]),
    "activations matmul": Form(
        torch.matmul, [(2, 3, 5, 24), (2, 3, 24, 40)], [], "matmul", [((2, 3), 5, 24, 40)]
    ),
    "activations mT": Form(lambda x, y: x @ y.mT, [(2, 3, 5, 24), (2, 3, 7, 24)], [], "matmul", [((2, 3), 5, 24, 7)]),
    "activations missing axis": Form(torch.matmul, [(2, 3, 5, 24), (3, 24, 40)], [], "matmul", [((3,), 10, 24, 40)]),
    "activations broadcast": Form(
        torch.matmul, [(2, 1, 5, 24), (1, 3, 24, 40)], [], "matmul", [(10, 24, 120)]
    ),
    "activations right one": Form(
        torch.matmul, [(2, 3, 5, 24), (2, 1, 24, 40)], [], "matmul", [((2,), 15, 24, 40)]
    ),
    "activations baddbmm": Form(
        lambda b, x, y: torch.baddbmm(b, x, y, beta=2, alpha=0.5), [(5, 1), (3, 5, 24), (3, 24, 40)], [], "matmul",
        [((3,), 5, 24, 40)],
    ),
    "activations addbmm": Form(torch.addbmm, [(5, 40), (3, 5, 24), (3, 24, 40)], [], "matmul", [(5, 72, 40)]),
    "activations einsum": Form(
        lambda x, y: torch.einsum("bqhd,bkhd->bhqk", x, y), [(2, 5, 4, 24), (2, 7, 4, 24)], [], "matmul",
        [((2, 4), 5, 24, 7)],
    ),
    "activations einsum mixed": Form(
        lambda x, y: torch.einsum("bqhd,bkgd->qkbhg", x, y), [(2, 5, 4, 24), (2, 7, 3, 24)], [], "matmul",
        [((2,), 20, 24, 21)],
    ),
    # a weight for each entry of the batch
    "experts bmm": Form(torch.bmm, [(3, 5, 24)], [(3, 24, 40)], "grouped_linear", [((3,), 5, 24, 40)]),
    "experts einsum": Form(
        lambda x, w: torch.einsum("eti,eoi->teo", x, w), [(3, 5, 24)], [(3, 40, 24)], "grouped_linear",
        [((3,), 5, 24, 40)],
    ),
    "experts baddbmm": Form(
        torch.baddbmm, [(3, 5, 40), (3, 5, 24)], [(3, 24, 40)], "grouped_linear", [((3,), 5, 24, 40)]
    ),
    "gathered by row": Form(
        lambda x, w: torch.bmm(w[torch.tensor([2, 0])], x), [(2, 24, 3)], [(3, 40, 24)], "grouped_linear", [(6, 24, 40)]
    ),
    # found, with a reason
    "gathered": Form(
        lambda x, w: torch.einsum("bk,bcnk->bcn", x, w[torch.tensor([[2, 0], [1, 2]])].narrow(1, 0, 2)),
        [(2, 24)], [(3, 40, 24)], "grouped_linear", [((2,), 1, 24, 80)], SkipReason.GATHERED_WEIGHT,
    ),
    "bilinear": Form(F.bilinear, [(5, 24), (5, 16)], [(40, 24, 16)], "linear", [(5, 384, 40)], SkipReason.BILINEAR),
    "mv": Form(torch.mv, [(5, 24)], [(24,)], "linear", [(5, 24, 1)], SMALL),
    "at weight vector": Form(lambda x, w: x @ w, [(3, 5, 24)], [(24,)], "linear", [(15, 24, 1)], SMALL),
    "addmv": Form(torch.addmv, [(5,), (5, 24), (24,)], [], "matmul", [(5, 24, 1)], SMALL),
    "dot": Form(torch.dot, [(24,), (24,)], [], "matmul", [(1, 24, 1)], SMALL),
    "row dots": Form(lambda x, y: torch.einsum("bd,bd->b", x, y), [(5, 24), (5, 24)], [], "matmul",
                     [((5,), 1, 24, 1)], SMALL),
    "summed axis": Form(
        lambda x, w: torch.einsum("bsi,io->bo", x, w), [(3, 5, 24)], [(24, 40)], "linear", [None], UNSUPPORTED
    ),
    "three activations": Form(
        lambda x, y, z: torch.einsum("ab,bc,cd->ad", x, y, z), [(5, 24), (24, 16), (16, 40)], [], "matmul", [None],
        SkipReason.MULTI_PRODUCT,
    ),
}  # fmt: skip


def sizes(product: Product) -> tuple[Any, ...]:
    plain = (size_hint(product.m), size_hint(product.k), size_hint(product.n))
    return (tuple(map(size_hint, product.batch)), *plain) if product.batch else plain


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, dynamic: bool) -> None:
    form = FORMS[name]
    torch.manual_seed(0)
    model, inputs = Calls(form.function, *form.weights), [randn(*shape) for shape in form.inputs]
    backend = check(model, inputs, Rewrite(), dynamic=dynamic)
    (match,) = backend.found
    reason = match.skip[0] if match.skip else None
    if dynamic and match.skip and "patches" in name:
        return  # an unknown size need not be a multiple of the patch
    assert (match.module_type, reason) == (form.kind, form.skip)
    assert (match.emit is None) == (form.skip is not None)
    if form.sizes != [None]:
        assert [sizes(product) for product in match.products] == form.sizes
    weights = "linear" in form.kind
    assert all(product.rhs_is_weight == weights for product in match.products)
    assert all(grads == (True, True) for grads in match.needs_grad) or not form.weights or "two weights" in name
    if len(form.sizes) == 1 and form.sizes != [None]:  # torch may multiply a chain in another order
        assert sum(map(flops, match.products)) == (counted(model, inputs) or flops(match.products[0]))


def flops(product: Product) -> int:
    return 2 * math.prod(size_hint(size) for size in (*product.batch, product.m, product.k, product.n))


def counted(model: nn.Module, inputs: Sequence[Any]) -> int:
    """FLOPs by torch's own counter, which knows nothing of products by vectors, nor of bilinear and in-place ones."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (2, 0, 24), (2, 1, 24)])
def test_empty_and_single_rows(shape: Shape) -> None:
    model = Calls(lambda x, w, v: F.linear(x, w) @ v + torch.einsum("...i,oi->...o", x, w) @ v, (40, 24), (40, 16))
    assert check(model, [randn(*shape)], Rewrite()).reasons() == [None] * 4


def test_dynamic_sizes_stay_dynamic() -> None:
    def function(x: Tensor, y: Tensor, v: Tensor, w: Tensor, kernel: Tensor) -> Tensor:
        x = torch.einsum("bsi,hid->bhsd", x, w) @ torch.einsum("bsi,hid->bhds", y, w)
        x = F.conv2d(x, kernel) @ torch.matmul(y, v)[:, None]
        return torch.baddbmm(x[:, 0], x[:, 1], x[:, 2].mT @ x[:, 3], beta=0.5)

    model = Calls(function, (24, 40), (4, 24, 16), (4, 4, 1, 1))
    inputs = [(randn(b, rows, 24), randn(b, others, 24)) for b, rows, others in ((3, 5, 7), (2, 9, 4), (5, 6, 6))]
    graphs = 0

    def count(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return gm.forward

    def run(backend: Callable[..., Any]) -> list[Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        return [compiled(x, y) for x, y in inputs]

    backend = Rewrite()
    for expected, actual in zip(run(count), run(backend), strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * scale)
    assert len(backend.graphs) == graphs


def test_strided_inputs_and_results() -> None:
    model = Calls(lambda x, w, v: (x.transpose(1, 2) @ w).transpose(0, 1) @ v, (24, 40), (40, 16))
    check(model, [randn(3, 24, 5)], Rewrite())
    channels_last = torch.randn(3, 24, 7, 5).to(memory_format=torch.channels_last).requires_grad_()
    check(Calls(lambda x, w, b: F.conv2d(x, w, b), (40, 24, 1, 1), (40,)), [channels_last], Rewrite())
    check(Calls(lambda x, w: (w @ x).view(-1), (40, 24)), [randn(24, 5)], Rewrite())


def test_tied_weight_is_used_as_it_is() -> None:
    model = Calls(lambda x, w: F.linear(x, w) @ w + x.mm(w.t()).mm(w), (40, 24))
    backend = check(model, [randn(5, 24)], Rewrite())
    nodes = backend.graphs[0].graph.nodes
    (weight,) = (node for node in nodes if isinstance(node.meta.get("example_value"), nn.Parameter))
    direct = [n for n in nodes if n.target is F.linear and n.args[1] is weight]
    assert len(direct) == 2  # and two products that want it transposed


def test_needs_grad_follows_each_operand() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            gate = F.linear(x, w)
        return F.linear(F.linear(x, w), v) * gate.sum()

    model = Calls(function, (24, 24), (40, 24))
    model.weights[1].requires_grad_(False)
    backend = check(model, [torch.randn(5, 24)], Rewrite())
    assert [match.needs_grad for match in backend.found] == [((False, False),), ((False, True),), ((True, False),)]


def test_needs_grad_of_a_chain() -> None:
    model = Calls(lambda x, v, w: torch.chain_matmul(x, v, w), (24, 16), (16, 40))
    model.weights[1].requires_grad_(False)
    (match,) = check(model, [torch.randn(5, 24)], Rewrite()).found
    assert match.needs_grad == ((False, True), (True, False))


def test_autocast_regions() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = F.linear(x, w)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            second = F.linear(x, w) + torch.addmm(x[0], x, w, beta=2)
            with torch.autocast("cpu", enabled=False):
                third = F.linear(x, w)
            with torch.autocast("cuda", torch.float16):
                fourth = x @ w
            fifth = checkpoint(F.linear, x, w, use_reentrant=False)
        return first, second, third, fourth, fifth, F.linear(x, w)

    backend = check(Calls(function, (24, 24)), [randn(5, 24)], Rewrite(autocast={"cpu": torch.float16}), tolerance=2e-2)
    half, brain = torch.float16, torch.bfloat16
    assert [match.autocast for match in backend.found] == [half, brain, brain, None, brain, brain, half]


class Layers(nn.Module):
    """Matmuls in the bodies of higher-order ops, and around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)
        self.gate = nn.Parameter(torch.randn(24, 24))

    def block(self, x: Tensor, view: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) + x @ view

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, x, self.gate.t(), use_reentrant=False)
        x = torch.cond(x.sum() > 0, lambda y: self.down(self.up(y)), lambda y: y @ self.gate, (x,))
        return x @ self.gate


def test_bodies_of_higher_order_ops() -> None:
    backend = check(Layers(), [torch.randn(5, 24)], Rewrite())
    assert [match.module_type for match in backend.found] == ["linear"] * 7
    assert all(match.emit is not None for match in backend.found)
    assert len({match.node.graph for match in backend.found}) == 4


def test_a_body_called_twice_is_found_once() -> None:
    body = torch.compiler.nested_compile_region(lambda x, w: (x @ w).relu())
    backend = Rewrite()
    torch._dynamo.reset()
    model = Calls(lambda x, w: body(body(x, w), w), (24, 24))
    torch.compile(model, backend=backend, fullgraph=True)(randn(5, 24))
    assert [(m.module_type, m.emit is not None) for m in backend.found] == [("linear", True)]


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


def test_custom_autograd_function() -> None:
    backend = check(Calls(lambda x, w: _Square.apply(x, w), (24, 40)), [randn(5, 24)], Rewrite())
    assert backend.reasons() == [None, UNSUPPORTED, UNSUPPORTED]


def test_functorch_transforms_are_left_alone() -> None:
    model = Calls(lambda x, w: torch.vmap(lambda row: w @ row)(x) + x @ w.t(), (24, 24))
    assert check(model, [randn(5, 24)], Rewrite()).reasons() == [UNSUPPORTED, None]


def test_other_layouts_and_dtypes_are_described() -> None:
    backend = check(Calls(lambda x, y: x @ y), [torch.ones(5, 24).long(), torch.ones(24, 40).long()], Rewrite())
    assert [match.emit is not None for match in backend.found] == [True]
    sparse = torch.randn(24, 24).relu().to_sparse_csr()
    backend = Rewrite()
    torch._dynamo.reset()
    try:
        torch.compile(lambda x, y: x @ y, backend=backend)(sparse, torch.randn(24, 40))
    except Exception:  # not every torch can trace a sparse input
        return
    assert all(match.skip and match.skip[0] is SkipReason.LAYOUT for match in backend.found)


@torch.library.custom_op("fxquant_tests::my_matmul", mutates_args=())
def my_matmul(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@my_matmul.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def test_unknown_matmuls_are_opaque() -> None:
    model = Calls(lambda x, w: my_matmul(x.cos(), torch.linalg.matrix_power(w, 2)), (24, 24))
    backend = Rewrite()
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(5, 24))
    assert backend.reasons() == [SkipReason.OPAQUE, SkipReason.OPAQUE]
    assert flops(backend.products[0]) == 2 * 24**3
    assert [product.rhs_is_weight for product in backend.products] == [True, False]


def test_fused_kernels_of_torch_are_opaque_whatever_their_results() -> None:
    """An encoder layer and an LSTM of inference, which no counter knows, and products of whole numbers and of FP8."""
    layer, lstm = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), nn.LSTM(32, 16)
    whole = torch.ones(32, 64, dtype=torch.int8)
    fp8 = torch.ones(64, 32).to(torch.float8_e4m3fn).t()  # column by column

    def run(x: Tensor) -> tuple[Tensor, ...]:
        one = torch.ones(())
        y = torch._int_mm(x[0].to(torch.int8), whole)
        z = torch._scaled_mm(x[0].to(torch.float8_e4m3fn), fp8, one, one, out_dtype=torch.bfloat16)
        return layer(x), lstm(x)[0], y, z

    backend = eager_backend("mxfp8")
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        torch.compile(run, backend=backend)(torch.randn(2, 32, 32))
    found = {d.form: d for d in backend.report().decisions}
    assert [d.skip_reason for d in found.values()] == [SkipReason.OPAQUE] * 4
    known = {form: d.flops for form, d in found.items()}
    encoder = "_transformer_encoder_layer_fwd"
    assert known == {encoder: 0, "lstm": 2 * 64 * 64 * 48, "_int_mm": known["_int_mm"], "_scaled_mm": 2 * 32 * 32 * 64}
    assert "set_fastpath_enabled(False)" in found[encoder].detail
    assert backend.report().coverage == 0


def test_unknown_arguments_are_a_reason() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x, w, out=torch.empty(5, 40))

    backend = Rewrite()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Calls(function, (24, 40)), backend=backend)(torch.randn(5, 24))
    assert backend.reasons() == [UNSUPPORTED]


def test_what_is_not_attention() -> None:
    def function(x: Tensor, y: Tensor, router: Tensor, w: Tensor) -> Tensor:
        routed = F.linear(x, router).softmax(-1).topk(2).values
        mixed = (x @ y).tanh() @ y.t()  # no softmax
        looked_up = (x @ y).softmax(-1) @ w  # a weight
        return routed.sum() + mixed.sum() + looked_up.sum()

    backend = check(Calls(function, (32, 24), (40, 16)), [randn(5, 24), randn(24, 40)], Rewrite())
    assert [match.module_type for match in backend.found] == ["linear", "matmul", "matmul", "matmul", "linear"]


def _options() -> dict[str, tuple[nn.MultiheadAttention, list[Any], dict[str, Any]]]:
    x, wide = randn(7, 3, 32), randn(9, 3, 48)
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[1, 4:] = True
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    return {
        "self": (nn.MultiheadAttention(32, 4), [x, x, x], {}),
        "no weights": (nn.MultiheadAttention(32, 4), [x, x, x], {"need_weights": False, "attn_mask": causal}),
        "padding": (nn.MultiheadAttention(32, 4, bias=False), [x, x, x], {"key_padding_mask": mask}),
        "heads": (nn.MultiheadAttention(32, 4), [x, x, x], {"average_attn_weights": False}),
        "causal": (
            nn.MultiheadAttention(32, 4), [x, x, x], {"is_causal": True, "attn_mask": causal, "need_weights": False}
        ),
        "cross": (nn.MultiheadAttention(32, 4), [x, randn(9, 3, 32), randn(9, 3, 32)], {}),
        "widths": (
            nn.MultiheadAttention(32, 4, kdim=48, vdim=48, add_bias_kv=True, add_zero_attn=True), [x, wide, wide], {}
        ),
        "unbatched": (nn.MultiheadAttention(32, 4), [randn(7, 32)] * 3, {}),
        "dropout": (nn.MultiheadAttention(32, 4, dropout=0.5), [x, x, x], {"need_weights": False}),
        "dropout weights": (nn.MultiheadAttention(32, 4, dropout=0.5), [x, x, x], {}),
    }  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", _options())
def test_multi_head_attention_is_opened(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    attention, inputs, options = _options()[name]

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, *x: Tensor) -> Any:
            return self.attention(*x, **options)

    closed = check(Attends(), inputs, Rewrite(), dynamic=dynamic)
    assert closed.reasons() == [SkipReason.OPAQUE]
    opened = check(Attends(), inputs, Rewrite(open_attention=True), dynamic=dynamic)
    parts = {match.node.meta.get(PROJECTION) for match in opened.found} - {None}
    assert parts == ({"q_proj", "k_proj", "v_proj", "out_proj"} if name == "widths" else {"in_proj", "out_proj"})
    assert set(opened.reasons()) == {None}
    assert {match.module_type for match in opened.found} >= {"linear"}
    assert sum(map(flops, opened.products)) == sum(map(flops, closed.products)) or name == "widths"


def test_multi_head_attention_opened_stays_dynamic() -> None:
    attention = nn.MultiheadAttention(32, 4)
    backend = Rewrite(open_attention=True)
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=True)
    for length, batch in ((7, 3), (5, 2), (6, 6)):
        x = randn(length, batch, 32)
        torch.testing.assert_close(compiled(x, x, x), attention(x, x, x))
    assert len(backend.graphs) == 1


def test_multi_head_attention_opened_under_autocast() -> None:
    attention = nn.MultiheadAttention(32, 4)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.first = attention, nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.first(x)
                return checkpoint(lambda y: self.attention(y, y, y, need_weights=False)[0], x, use_reentrant=False)

    backend = check(Attends(), [randn(7, 3, 32)], Rewrite(open_attention=True))
    assert [match.autocast for match in backend.found] == [torch.bfloat16] * 4
    assert all(value_of(p.lhs).dtype == torch.bfloat16 for p in backend.products[1:])


class Mixture(nn.Module):
    """Many spellings in one model, each result feeding the next."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.shared, self.bilinear = nn.Linear(width, width), nn.Bilinear(width, width, width)
        self.pointwise = nn.Conv1d(width, width, 1)
        self.w = nn.ParameterList(nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(6))
        self.experts = nn.Parameter(torch.randn(heads, width, width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(width))

    def attend(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        out = ((q * 0.3) @ q.mT).softmax(-1) @ q + F.scaled_dot_product_attention(q, q, q)
        return x + out.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        w, flat = self.w, x.flatten(0, 1)
        flat = torch.mm(flat, w[0]) + torch.addmm(self.bias, flat, w[1], beta=0.5, alpha=2.0)
        flat = flat.clone().addmm_(flat.sigmoid(), w[2])
        flat = torch.chain_matmul(flat, w[3], w[4]) + torch.inner(flat, w[5])
        x = F.layer_norm(flat.view_as(x) * (x @ self.bias)[..., None].tanh(), x.shape[-1:])
        x = self.shared(self.shared(x)).relu() + torch.tensordot(x, w[0], dims=1)
        x = x + torch.einsum("bsi,ij,jo->bso", x, w[1], w[2]) + self.pointwise(x.mT).mT
        x = x + self.bilinear(x.mean(1), x.amax(1)).tanh()[:, None]
        groups = F.layer_norm(x, x.shape[-1:]).flatten(0, 1).unflatten(0, (self.heads, -1))
        x = x + (torch.bmm(groups, self.experts) + groups.baddbmm(groups, self.experts.mT)).flatten(0, 1).view_as(x)
        return checkpoint(self.attend, F.layer_norm(x, x.shape[-1:]), use_reentrant=False)


def test_mixture_of_forms() -> None:
    backend = check(Mixture(), [randn(3, 5, 24)], Rewrite())
    reasons = backend.reasons()
    assert reasons.count(None) == 15
    assert sorted(str(reason) for reason in reasons if reason) == ["BILINEAR", "TOO_SMALL"]
    assert [match.module_type for match in backend.found].count("dpa") == 3


def test_finding_changes_nothing() -> None:
    graphs: list[tuple[str, str, list[str]]] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before = gm.print_readable(print_output=False)
        rng = torch.get_rng_state()
        names = [[m.node.name for m in find_matmuls(gm)] for _ in range(2)]
        assert torch.equal(rng, torch.get_rng_state())
        assert names[0] == names[1]
        graphs.append((before, gm.print_readable(print_output=False), names[0]))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Mixture(), backend=backend)(randn(3, 5, 24))
    assert graphs
    assert all(before == after for before, after, _ in graphs)
