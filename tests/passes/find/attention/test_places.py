"""Masks that are computed of sizes alone are read as conditions on places; all others are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import captured
from torch import Tensor

from fxquant.passes.find.attention.places import Line, is_causal, kept

Mask = Callable[[int, int], Tensor]
BOTH = {-1: Line(0, ((-1, 1),)), -2: Line(0, ((-2, 1),))}


def places(n: int, m: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n)[:, None], torch.arange(m)


def added(keep: Tensor, value: float = -math.inf) -> Tensor:
    return torch.where(keep, 0.0, value)


def packed(n: int, m: int) -> Tensor:
    """As Hugging Face writes it: positions that do not follow each other begin another sequence."""
    position = torch.arange(n).unsqueeze(0).expand(2, -1)
    sequence = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, query, key = torch.arange(2)[:, None, None, None], torch.arange(n)[None, None, :, None], torch.arange(m)
    key = key[None, None, None, :]
    causal = query.new_ones((), dtype=torch.bool) & (position[batch, key] <= position[batch, query])
    return (causal & (sequence[batch, query] == sequence[batch, key])).expand(2, -1, n, m)


READ: dict[str, Mask] = {
    "compared": lambda n, m: torch.le(*places(n, m)[::-1]),
    "tril": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(),
    "tril of floats": lambda n, m: torch.tril(torch.ones(n, m)) == 1,
    "not triu": lambda n, m: ~torch.triu(torch.ones(n, m, dtype=torch.bool), 1),
    "triu of the smallest": lambda n, m: torch.full((n, m), torch.finfo(torch.float32).min).triu(1),
    "triu of infinity": lambda n, m: torch.triu(torch.full((n, m), -math.inf), diagonal=1),
    "filled": lambda n, m: torch.zeros(n, m).masked_fill(torch.gt(*places(n, m)[::-1]), -math.inf),
    "filled twice": lambda n, m: torch.full((n, m), -1e38).mul(3.5).triu(1) * torch.lt(*places(n, m)),
    "added": lambda n, m: added(torch.ge(*places(n, m))),
    "heads": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril()[None, None].expand(2, 4, n, m),
    "transposed": lambda n, m: torch.ones(m, n, dtype=torch.bool).triu().mT,
    "sliced": lambda n, m: torch.ones(n + 3, m + 2, dtype=torch.bool).tril()[:n, :m],
    "packed": packed,
    "wide window": lambda n, m: torch.ge(*places(n, m)) & (torch.sub(*places(n, m)) < n),
    "from the second row": lambda n, m: torch.ones(n + 1, m, dtype=torch.bool).tril(-1)[1:],
}
OTHER: dict[str, Mask] = {
    "all": lambda n, m: torch.ones(n, m, dtype=torch.bool),
    "nothing added": lambda n, m: torch.zeros(n, m).view(1, 1, n, m),
    "window": lambda n, m: torch.ge(*places(n, m)) & (torch.sub(*places(n, m)) < 3),
    "aligned at the end": lambda n, m: torch.ge(*places(n, m)) & (torch.arange(n)[:, None] >= torch.arange(m) + 1),
    "strict": lambda n, m: torch.gt(*places(n, m)),
    "diagonal": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(2),
}


def shown(conditions: tuple[Line, ...], n: int, m: int) -> Tensor:
    """The scores that conditions keep."""
    grid = torch.ones(n, m, dtype=torch.bool)
    for line in conditions:
        steps = dict(line.steps)
        row, column = places(n, m)
        grid &= int(line.offset) + steps.pop(-2, 0) * row + steps.pop(-1, 0) * column >= 0
        assert not steps
    return grid


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [*READ, *OTHER])
def test_what_is_read_is_what_the_mask_keeps(name: str, dynamic: bool) -> None:
    write = (READ | OTHER)[name]

    def run(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=write(q.shape[-2], k.shape[-2]))

    n, m = (7, 7)
    q, k = torch.randn(2, 4, n, 8), torch.randn(2, 4, m, 8)
    if dynamic:
        for x in (q, k):
            torch._dynamo.mark_dynamic(x, -2)
    graph = captured(run, q, k)[0].graph
    (node,) = (node for node in graph.nodes if "scaled_dot_product_attention" in str(node.target))
    conditions = kept(node.kwargs["attn_mask"], {})
    assert conditions is not None
    if not dynamic:
        mask = write(n, m)
        want = mask if mask.dtype == torch.bool else mask == 0
        assert torch.equal(shown(conditions, n, m), want.expand(2, 4, n, m)[0, 0])
    assert is_causal(conditions) == (name in READ)


UNREAD: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda x: x[0, 0, :, :1] * x[0, 0, :, 0] > 0,
    "one written into": lambda x: torch.ones(7, 7, dtype=torch.bool).tril().logical_and_(x[0, 0, :, :1] > 0),
    "a view written into": lambda x: written_view(torch.ones(7, 7, dtype=torch.bool).tril()),
    "filled in place": lambda x: torch.zeros(7, 7).masked_fill_(torch.ones(7, 7).triu(1) == 1, -math.inf),
    "a smaller number": lambda x: torch.full((7, 7), -100.0).triu(1),
    "nothing": lambda x: torch.zeros(7, 7, dtype=torch.bool),
    "either of two": lambda x: torch.ge(*places(7, 7)) | (places(7, 7)[1] < 2),
}


def written_view(mask: Tensor) -> Tensor:
    mask[0].fill_(True)
    return mask


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read(name: str) -> None:
    def run(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=UNREAD[name](q))

    graph = captured(run, torch.randn(2, 4, 7, 8))[0].graph
    (node,) = (node for node in graph.nodes if "scaled_dot_product_attention" in str(node.target))
    assert kept(node.kwargs["attn_mask"], {}) is None
