"""Products that nothing reads, and those without a gradient: what is reported is what runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from truth import Counted, Layered, differences, reported

FORWARD, BOTH = {"forward": 1, "backward": 0}, {"forward": 1, "backward": 2}

RUNS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, int]]] = {
    "nothing reads it": (lambda x, y: x, {"forward": 0, "backward": 0}),
    "only its size is read": (lambda x, y: x.view(y.shape), {"forward": 0, "backward": 0}),
    "a chain that ends": (lambda x, y: [x, y.relu().softmax(-1)][0], {"forward": 0, "backward": 0}),
    "detached": (lambda x, y: x + y.detach(), FORWARD),
    "compared": (lambda x, y: x * (y > 0), FORWARD),
    "an index": (lambda x, y: x * y.argmax(-1, keepdim=True), FORWARD),
    "whole numbers": (lambda x, y: x + y.to(torch.int32), FORWARD),
    "rounded": (lambda x, y: x + y.round(), BOTH),
    "read": (lambda x, y: x + y, BOTH),
    "added in place": (lambda x, y: [z := x.clone(), z.add_(y)][0], BOTH),
    "written into a slice": (lambda x, y: [z := x.clone(), z[:16].copy_(y[:16])][0], BOTH),
    "assigned": (lambda x, y: written(x.clone(), y), BOTH),
    "in place of an operator": (lambda x, y: added(x.clone(), y), BOTH),
    "activated in place": (lambda x, y: [y, torch.relu_(y)][0], BOTH),
}


def written(x: Tensor, y: Tensor) -> Tensor:
    x[:16] = y[:16]
    return x


def added(x: Tensor, y: Tensor) -> Tensor:
    z = x
    z += y
    return x


class Model(nn.Module):
    def __init__(self, finish: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.finish = nn.Linear(64, 64), nn.Linear(64, 64), finish

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.first(x), self.second(x))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_what_is_reported_runs(name: str, training: bool) -> None:
    finish, runs = RUNS[name]
    model = Model(finish)
    backend = Layered("mxfp8", model=model)
    run = torch.compile(model, backend=backend, fullgraph=True)
    with Counted() as counted, torch.set_grad_enabled(training):
        y = run(torch.randn(32, 64, requires_grad=True))
        if training:
            y.sum().backward()
    said = reported(backend.report())
    assert not differences(counted.quantized, said)
    second = {phase: sum(n for gemm, n in gemms.items() if gemm.layer == "second") for phase, gemms in said.items()}
    assert second == (runs if training else {**runs, "backward": 0})


def test_a_dynamic_size_is_known_without_the_product() -> None:
    model = Model(RUNS["only its size is read"][0])
    backend = Layered("mxfp8", model=model)
    torch.compile(model, backend=backend, fullgraph=True, dynamic=True)(torch.randn(32, 64))
    assert {decision.layer for decision in backend.report().decisions} == {"first"}
