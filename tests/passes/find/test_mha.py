"""Multi-head attention that was captured as one node, opened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rewriting import Rewrite, check, flops, randn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxquant.decisions import SkipReason
from fxquant.passes.graph.meta import PROJECTION
from fxquant.passes.graph.values import value_of


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
