"""Matmuls in regions, bodies and transforms, and whole models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rewriting import Calls, Rewrite, check, randn
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fxquant.decisions import SkipReason
from fxquant.passes.find.walk import find_matmuls

UNSUPPORTED = SkipReason.UNSUPPORTED_FORM


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


def test_derivatives_that_torch_func_takes_are_said_not_to_count() -> None:
    def taken(x: Tensor, w: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda x: (x @ w).sin().sum())(x)
        return torch.vmap(lambda row: w @ row)(gradient) + x @ w

    backend = check(Calls(taken, (24, 24)), [randn(5, 24)], Rewrite())
    inside = "inside a torch.func transform"
    assert [match.skip and match.skip[1] for match in backend.found] == [
        f"{inside}, whose own derivatives are not counted", inside, None,
    ]  # fmt: skip


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
