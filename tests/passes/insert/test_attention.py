"""An attention that is quantized becomes one operator; one that is not keeps its nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers import captured, listing
from rewritten import rewritten
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxquant import CustomRecipe, Float8HeadQuantizer, IdentityQuantizer, QuantizerRole
from fxquant.passes.graph.names import is_fxquant


def forward_only(role: QuantizerRole) -> Any:
    quantized = role.module_type == "dpa" and role.tensor_type in ("qkv", "s")
    return Float8HeadQuantizer() if quantized else IdentityQuantizer()


RECIPE = CustomRecipe(qfactory=forward_only)


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 4 + mask, -1) @ v


def inputs() -> list[Tensor]:
    return [torch.randn(2, 4, 32, 16) for _ in range(3)]


def test_before_and_after() -> None:
    args = (*inputs(), torch.randn(32, 32))
    assert_expected_inline(listing(captured(written_out, *args)[0].graph), """\
%0 = input [2, 4, 32, 16]
%1 = input [2, 4, 32, 16]
%2 = input [32, 32]
%3 = input [2, 4, 32, 16]
%4 = mT(%0)
%5 = matmul(%1, %4)
%6 = truediv(%5, 4)
%7 = add(%6, %2)
%8 = softmax(%7, -1)
%9 = matmul(%8, %3)
return [%9]""")  # fmt: skip
    assert_expected_inline(listing(rewritten(RECIPE, written_out, *args).graph), """\
%0 = input [2, 4, 32, 16]
%1 = input [2, 4, 32, 16]
%2 = input [32, 32]
%3 = input [2, 4, 32, 16]
%4 = attention(%1, %0, %3, [%2], qkv=per_head_e4m3 s=per_head_e4m3 do=identity dp=identity
    o=identity dqkv=identity steps=mul:0.25:-1;add:0.0:0 dropout=0.0 name=)
return [%4]""")  # fmt: skip


def test_the_repeating_of_keys_goes_away() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.repeat_interleave(x, 2, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    q, k, v = inputs()
    gm = rewritten(RECIPE, run, q, k[:, :2], v[:, :2])
    (node,) = (node for node in gm.graph.nodes if is_fxquant(node))
    assert "repeat_interleave" not in gm.code and node.meta["custom"]["fxquant"] == ""


def test_high_precision_leaves_the_graph_alone() -> None:
    args = (*inputs(), torch.randn(32, 32))
    before = listing(captured(written_out, *args)[0].graph)
    assert listing(rewritten("high_precision", written_out, *args).graph) == before


def causal_by_mask(q: Tensor, k: Tensor, v: Tensor, w: Tensor, checkpointed: bool = False) -> Tensor:
    place = torch.arange(q.shape[-2])
    mask = (place <= place[:, None])[None, None].expand(q.shape[0], 1, -1, -1)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    attended = checkpoint(attend, q, k, v, mask, use_reentrant=False) if checkpointed else attend(q, k, v, mask)
    return F.linear(attended, w)


def attention_of(gm: torch.fx.GraphModule) -> torch.fx.Node:
    bodies = [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    (call,) = (node for body in bodies for node in body.graph.nodes if "attention" in str(node.target))
    return call


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_mask_that_says_causality_becomes_the_flag(checkpointed: bool) -> None:
    """Not in a graph of which nothing is quantized."""
    args = [x.requires_grad_() for x in (*inputs(), torch.randn(32, 16))]
    call = attention_of(rewritten("current_scaling", causal_by_mask, *args, checkpointed))
    assert (call.kwargs["attn_mask"], call.kwargs["is_causal"]) == (None, True)
    in_fp8 = attention_of(rewritten(RECIPE, causal_by_mask, *args, checkpointed))
    assert " steps=mul:0.25:-1;causal:0.0:-1 " in str(in_fp8.args[-1])
    as_it_was = attention_of(rewritten("high_precision", causal_by_mask, *args, checkpointed))
    assert as_it_was.kwargs["attn_mask"] is not None


def test_keys_are_not_repeated_where_torch_reads_them_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        q = q + 0  # the first that is read is the first input
        k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for x in (k, v))
        return F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True), w)

    q, k, v = inputs()
    args = [x.bfloat16().requires_grad_() for x in (q, k[:, ::2], v[:, ::2], torch.randn(32, 16))]
    as_it_is = rewritten("current_scaling", run, *args)
    monkeypatch.setattr("fxquant.passes.find.attention.fused.capability", lambda device: (9, 0))
    graph = rewritten("current_scaling", run, *args)
    call = attention_of(graph)
    assert call.kwargs["enable_gqa"] and isinstance(call.args[1], torch.fx.Node) and call.args[1].op == "placeholder"
    for got, want in zip(graph(*args), as_it_is(*args), strict=True):
        torch.testing.assert_close(got, want)
