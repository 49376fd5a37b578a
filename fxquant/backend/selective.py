"""Policies of selective activation checkpoints name products of ATen, such as `aten.mm`; they mean fxquant's too.

    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    checkpoint(block, x, use_reentrant=False, context_fn=contexts)

A policy is asked about every operator that runs. Where that is a product of fxquant's, it is then also asked about the
operators of ATen in whose place the product stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.inside.checkpoints import CONTEXTS, selective_modes
from fxquant.compat.private import CheckpointPolicy, no_modes
from fxquant.compat.values import size_hint
from fxquant.formats import QuantSpec

_aten = torch.ops.aten
_fxquant = torch.ops.fxquant

Call = tuple[Any, tuple[Any, ...]]
"""An operator and its arguments."""

_ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten.scaled_dot_product_attention.default,
)
_GROUPED = (_aten._grouped_mm.default, _aten._scaled_grouped_mm.default)


class PolicyOfProducts:
    """A policy that is asked about a product of fxquant's as about ATen's.

    Policies may count what they are asked about. So for one operator of fxquant's they are asked about one of ATen's,
    the first that they have ever saved.
    """

    def __init__(self, policy: Callable[..., Any]) -> None:
        self.policy = policy
        self.saved: dict[Any, Any] = {}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        answer = self.policy(context, operator, *args, **kwargs)
        if _saves(answer) or answer is CheckpointPolicy.MUST_RECOMPUTE:
            return answer
        for stood_for, arguments in _stands_for(operator, args):
            if self.saved.get(operator, stood_for) is stood_for:
                instead = self.policy(context, stood_for, *arguments)
                if _saves(instead):
                    self.saved[operator] = stood_for
                    return instead
        return answer


def _saves(answer: Any) -> bool:
    return answer is True or answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _stands_for(operator: Any, args: tuple[Any, ...]) -> Iterator[Call]:
    """Yields the calls of ATen that a call of fxquant's stands for, that which torch would have made first."""
    if operator is _fxquant.scaled_mm.default:
        yield from _products(*args)
    elif operator is _fxquant.grouped_scaled_mm.default:
        yield from ((grouped, args) for grouped in _GROUPED)
    elif operator is _fxquant.attention_forward.default:
        yield from ((attention, args) for attention in _ATTENTION)


def _products(a: Any, b: Any, a_spec: str, b_spec: str, bias: Tensor | None, *_: Any) -> Iterator[Call]:
    """Yields the products of matrices, or of batches, that a `scaled_mm` may be, of tensors without memory."""
    with no_modes():
        left, weight = _operand(a, a_spec), _operand(b, b_spec)
        right = weight.mT
    if left.ndim > 2:
        yield _aten.bmm.default, (left, right)
        yield _aten.baddbmm.default, (bias, left, right)
    else:
        plain: Call = (_aten.mm.default, (left, right))
        added: Call = (_aten.addmm.default, (bias, left, right))
        yield from (plain, added) if bias is None else (added, plain)
        yield _aten.linear.default, (left, weight, bias)
        yield _aten._scaled_mm.default, (left, right, *a[1:2], *b[1:2], bias)


def _operand(parts: Any, spec: str) -> Tensor:
    data, element = parts[0], QuantSpec.parse(spec).row.element
    *batch, rows, inner = map(size_hint, data.shape)
    shape = (*([math.prod(batch)] if batch else []), rows, inner * (element.packed if element else 1))
    return torch.empty(shape, dtype=data.dtype, device="meta")


class _Contexts:
    """The function of a checkpoint that gives its modes, whose policies are asked about products."""

    def __init__(self, contexts: Callable[[], tuple[Any, Any]]) -> None:
        self.contexts = contexts
        if hasattr(contexts, "cache_hash"):
            self.cache_hash = contexts.cache_hash

    def __call__(self) -> tuple[Any, Any]:
        modes = self.contexts()
        _ask_about_products(modes)
        return modes


def ask_inside(gm: fx.GraphModule) -> None:
    """Lets the selective checkpoints inside a captured graph ask about products."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and CONTEXTS in module.meta:
            module.meta[CONTEXTS] = _Contexts(module.meta[CONTEXTS])


def ask_around() -> None:
    """Lets the selective checkpoints around a call ask about products."""
    _ask_about_products(selective_modes())


def _ask_about_products(modes: Any) -> None:
    for mode in modes:
        policy = getattr(mode, "policy_fn", None)
        if policy is not None and not isinstance(policy, PolicyOfProducts):
            mode.policy_fn = PolicyOfProducts(policy)
