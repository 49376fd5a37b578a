"""The gradients that a matmul has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rewriting import Calls, Rewrite, check
from torch import Tensor


def test_needs_grad_follows_each_operand() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            gate = F.linear(x, w)
        return F.linear(F.linear(x, w), v) * gate.sum()

    model = Calls(function, (24, 24), (40, 24))
    model.weights[1].requires_grad_(False)
    backend = check(model, [torch.randn(5, 24)], Rewrite())
    assert [match.needs_grad for match in backend.found] == [((False, False),), ((False, True),), ((True, False),)]
