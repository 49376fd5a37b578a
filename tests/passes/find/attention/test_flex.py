"""Flex attention: its functions are read as steps on the scores, or a reason is given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attending import Attends, made
from rewriting import Rewrite, randn
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fxquant.compat.private import flex_attention_op
from fxquant.decisions import SkipReason

SLOPES, DOCUMENTS = torch.tensor([0.5, 0.25, 0.125, 0.0]), torch.arange(128).expand(2, -1) // 40

BLOCKS = {
    "causal": create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu"),
    "window": create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 9), None, None, 128, 128, device="cpu"),
    "documents": create_block_mask(
        lambda b, h, i, j: (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (i >= j) & (j != 3), 2, None, 128, 128, device="cpu"
    ),
}

FLEX: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "mul"),
    "causal": ({"block_mask": BLOCKS["causal"], "scale": 0.3}, "mul causal"),
    "window": ({"block_mask": BLOCKS["window"]}, "mul keep0 causal"),
    "documents": ({"block_mask": BLOCKS["documents"]}, "mul keep0"),
    "causal scores": ({"score_mod": lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf)}, "mul causal"),
    "cap": ({"score_mod": lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0)}, "mul mul tanh mul"),
    "alibi": ({"score_mod": lambda s, b, h, i, j: s + SLOPES[h] * (j - i), "block_mask": BLOCKS["causal"]},
              "mul add0 causal"),
    "cap, bias of places": (
        {"score_mod": lambda s, b, h, i, j: -(torch.tanh(s * 0.1).float() * 10 - (i - j).abs() * 0.1) + 1},
        "mul mul tanh mul add0 mul add",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name: str) -> None:
    """Against torch's own, which runs on a CPU without gradients and without graphs."""
    settings, steps = FLEX[name]
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in made([(2, 4, 128, 16), (2, 2, 128, 16), (2, 2, 128, 16)]))
    backend = Attends()
    found = torch.compile(flex_attention, backend=backend, fullgraph=True)(q, k, v, enable_gqa=True, **settings)
    assert backend.steps() == steps
    assert not any(node.target is flex_attention_op for node in backend.graphs[0].graph.nodes)
    torch.testing.assert_close(found, flex_attention(q, k, v, enable_gqa=True, **settings), rtol=1e-4, atol=1e-4)


def test_flex_attention_with_a_learned_bias_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # no backward on a CPU
    torch._dynamo.reset()
    q, slopes = randn(2, 4, 128, 16), SLOPES.clone().requires_grad_()

    def by_hand(q: Tensor, slopes: Tensor) -> Tensor:
        places = torch.arange(128)
        scores = q @ q.mT / 4 + slopes[:, None, None] * (places - places[:, None])
        return scores.softmax(-1) @ q

    def flexible(q: Tensor, slopes: Tensor) -> Tensor:
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i))

    backend = Attends()
    torch.compile(flexible, backend=backend, fullgraph=True)(q, slopes).square().sum().backward()
    found = [q.grad.clone(), slopes.grad.clone()]
    q.grad = slopes.grad = None
    by_hand(q, slopes).square().sum().backward()
    assert all(match.attention.learned for match in backend.found)
    torch.testing.assert_close(found, [q.grad, slopes.grad], rtol=1e-3, atol=1e-3)


FLEX_REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "log-sum-exp": ({"return_lse": True}, "more than its output is read"),
    "score squared": ({"score_mod": lambda s, b, h, i, j: s * s}, "has mul of two scores"),
    "score exp": ({"score_mod": lambda s, b, h, i, j: s.exp()}, "has exp"),
    "replaced": ({"score_mod": lambda s, b, h, i, j: i - j + 0.0}, "its scores are replaced"),
    "not elementwise": ({"score_mod": lambda s, b, h, i, j: s + SLOPES.sum() * i}, "sum in one of its functions"),
    "finite fill": ({"score_mod": lambda s, b, h, i, j: torch.where(i >= j, s, -1e9)}, "has where"),
}


@pytest.mark.parametrize("name", FLEX_REASONS)
def test_flex_attention_that_is_not_read_says_why(name: str) -> None:
    """Its products are inside of one operator: there is nothing to offer as roles."""
    settings, reason = FLEX_REASONS[name]
    torch._dynamo.reset()
    backend = Rewrite()
    torch.compile(lambda q: flex_attention(q, q, q, **settings), backend=backend, fullgraph=True)(
        torch.randn(1, 4, 128, 16)
    )
    assert [match.module_type for match in backend.found] == ["dpa"]
    assert backend.reasons() == [SkipReason.ATTENTION]
    assert backend.found[0].skip[1].startswith("flex_attention: ") and reason in backend.found[0].skip[1]
