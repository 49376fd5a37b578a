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


def causal_by_mask(q: Tensor, k: Tensor, v: Tensor, checkpointed: bool = False) -> Tensor:
    place = torch.arange(q.shape[-2])
    mask = (place <= place[:, None])[None, None].expand(q.shape[0], 1, -1, -1)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return checkpoint(attend, q, k, v, mask, use_reentrant=False) if checkpointed else attend(q, k, v, mask)


def test_a_mask_that_says_causality_becomes_the_flag() -> None:
    assert_expected_inline(listing(rewritten("high_precision", causal_by_mask, *inputs()).graph), """\
%0 = input [2, 4, 32, 16]
%1 = input [2, 4, 32, 16]
%2 = input [2, 4, 32, 16]
%3 = arange(32)
%4 = getitem(%3, [slice(None, None, None), None])
%5 = le(%3, %4)
%6 = getitem(%5, [None, None])
%7 = expand(%6, 2, 1, -1, -1)
%8 = scaled_dot_product_attention(%0, %1, %2, attn_mask=None, is_causal=True)
return [%8]""")  # fmt: skip


@pytest.mark.parametrize("recipe", ["high_precision", RECIPE])
def test_also_in_a_checkpointed_body(recipe: Any) -> None:
    args = [x.requires_grad_() for x in inputs()]
    gm = rewritten(recipe, causal_by_mask, *args, True)
    bodies = [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    (call,) = (n for body in bodies for n in body.graph.nodes if "attention" in str(n.target))
    assert "causal" in str(call.args[-1]) if is_fxquant(call) else call.kwargs["is_causal"]
