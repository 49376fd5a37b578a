"""Equal products of a step run once, and are reported once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from corpus import flops
from helpers import eager_backend
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from truth import Counted, Layered, differences, reported

from fxquant import Report
from fxquant.compat import torch_version
from fxquant.roles import Gemm


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, w: F.linear(x, w) + F.linear(x, w),
    "other gradients": lambda x, w: F.linear(x, w) * F.linear(x, w).relu(),
    "several spellings": lambda x, w: F.linear(x, w) + x @ w.mT,
    "two layers": lambda x, w: F.linear(F.linear(x, w).relu(), w) + F.linear(F.linear(x, w).relu(), w),
    "activations": lambda x, w: F.linear((x @ x.mT) @ x + (x @ x.mT) @ x, w),
    "attentions": lambda x, w: F.linear(attend(x) + attend(x), w),
}
"""Functions of x [32, 64] and a weight [64, 64]."""


def sums(report: Report) -> Counter[str]:
    """The FLOPs of what is left in high precision."""
    said = Counter[str]()
    for (_, gemm), (left, right) in report.gemms().items():
        if left.quantizer is None and right.quantizer is None:
            said["forward" if gemm is Gemm.FPROP else "backward"] += left.flops
    return said


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", ["mxfp8", "delayed_scaling"])
def test_equal_products_are_reported_as_often_as_they_run(form: str, recipe: str) -> None:
    weight, x = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(32, 64, requires_grad=True)
    backend = Layered(recipe)
    with Counted(flops._counter().flop_registry) as counted:  # of each torch, attention on a CPU too
        torch.compile(FORMS[form], backend=backend)(x, weight).square().sum().backward()
    report = backend.report()
    assert not differences(counted.quantized, reported(report))
    ran = {phase: sum(flops.values()) for phase, flops in counted.plain.items()}
    phases = ["forward"] if form == "attentions" else [*ran]  # whose backward multiplies once more
    assert all(ran[phase] == sums(report)[phase] for phase in phases)
    merged = [d for d in report.decisions if d.merged]
    apart = [("several spellings", "delayed_scaling")]  # scales of their own
    apart += [("attentions", recipe)] if torch_version() >= (2, 14) else []  # which torch computes twice since then
    assert bool(merged) == ((form, recipe) not in apart)
    assert all(not d.flops and "computed once, with an equal product" in d.detail for d in merged)
    assert sum(d.merged for d in Report.from_json(report.to_json()).decisions) == len(merged)


def test_a_second_graph_has_its_own_places() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        torch._dynamo.graph_break()
        return F.linear(y, w) + F.linear(y, w)

    weight = torch.nn.Parameter(torch.randn(64, 64))
    backend = eager_backend("mxfp8")
    torch.compile(run, backend=backend)(torch.randn(32, 64), weight).sum().backward()
    assert {d.site for d in backend.report().decisions if d.merged} <= {1, 2}
    assert sum(d.merged for d in backend.report().decisions) == 6


def test_what_a_checkpoint_computes_again_is_not_merged() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x: attend(F.linear(x, w)).square() @ w + F.linear(x, w), x, use_reentrant=False)

    weight, x = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(32, 64, requires_grad=True)
    backend = Layered("mxfp8")
    with Counted(flops._counter().flop_registry) as counted:
        torch.compile(run, backend=backend)(x, weight).sum().backward()
    report = backend.report()
    assert sum(counted.plain["forward"].values()) == sums(report)["forward"] > 0, "the attention"
    assert not differences(counted.quantized, reported(report), repeated=True)
    merged = {(4, Gemm.FPROP)} if torch_version() < (2, 14) else set()
    assert {(d.site, d.gemm) for d in report.decisions if d.merged} == merged
