"""A product whose quantization is chosen when it runs, so that one compiled graph tries any number of recipes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from fxquant.errors import RecipeError
from fxquant.kernels.operator import operator


class Multiply(Protocol):
    """A product of two operands with their numbers: a [*, M, K] x b [*, N, K]^T + bias."""

    def __call__(
        self, a: tuple[Tensor, int], b: tuple[Tensor, int], bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Returns the product."""


_running: list[Multiply] = []
"""The products of nested scopes; not by thread, since autograd runs a backward on a thread of its own."""


@contextmanager
def multiplying(multiply: Multiply) -> Iterator[None]:
    """Runs the products of this scope by `multiply`."""
    _running.append(multiply)
    try:
        yield
    finally:
        _running.pop()


@operator(namespace="fxquant_kernels")
def switched_mm(
    a: Tensor, a_number: Tensor, b: Tensor, b_number: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """a [*, M, K] x b [*, N, K]^T + bias, quantized as the scope around says; the numbers are those of operands."""
    if not _running:
        raise RecipeError("a model that fxquant.search has compiled runs in its search alone")
    return _running[-1]((a, int(a_number)), (b, int(b_number)), bias, out_dtype)


@switched_mm.fake
def _switched_mm_fake(
    a: Tensor, a_number: Tensor, b: Tensor, b_number: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=out_dtype)
