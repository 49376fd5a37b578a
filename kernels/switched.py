"""A product whose quantization is chosen when it runs, so that one compiled graph tries any number of recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fxquant.errors import RecipeError
from fxquant.formats import AttentionSpec
from fxquant.kernels.operator import operator
from fxquant.kernels.state.step import StepState

T = TypeVar("T")


@contextmanager
def _within(scopes: list[T], value: T) -> Iterator[None]:
    """Enters a scope of a value inside those that there are."""
    scopes.append(value)
    try:
        yield
    finally:
        scopes.pop()


class Multiply(Protocol):
    """A product of two operands with their numbers: a [*, M, K] x b [*, N, K]^T + bias."""

    def __call__(
        self, a: tuple[Tensor, int], b: tuple[Tensor, int], bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Returns the product."""


_running: list[Multiply] = []
"""The products of nested scopes; not by thread, since autograd runs a backward on a thread of its own."""


def multiplying(multiply: Multiply) -> AbstractContextManager[None]:
    """Runs the products of a scope by `multiply`."""
    return _within(_running, multiply)


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


class Product(NamedTuple):
    """One product of a linear: its `gemm`, the text of the whole `LinearSpec`, and the number of its graph.

    `grouped` is true for experts.
    """

    gemm: str
    spec: str
    graph: int
    grouped: bool
    out_dtype: torch.dtype


class Choice(Protocol):
    """Runs linears and attentions, of operands as they are before their quantization."""

    def multiply(
        self, product: Product, a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, state: StepState
    ) -> Tensor:
        """Returns a product of a linear."""

    def attend(self, spec: AttentionSpec, graph: int, run: Callable[[AttentionSpec], list[Tensor]]) -> list[Tensor]:
        """Returns what `run` makes of one direction of an attention: of `spec`, or of one that quantizes nothing."""


_traced: list[int] = []
"""The numbers of the graphs that are traced now, whose products are `chosen_gemm`."""
_choosing: list[Choice] = []


def chosen_later(graph: int) -> AbstractContextManager[None]:
    """Traces linears and attentions, in a scope, as such that are quantized as the scope says in which they run."""
    return _within(_traced, graph)


def traced_graph() -> int | None:
    """The number of the graph that is traced, where its products are chosen later."""
    return _traced[-1] if _traced else None


def choosing(choice: Choice) -> AbstractContextManager[None]:
    """Runs linears and attentions of a scope, which were traced to be chosen later, by a choice."""
    return _within(_choosing, choice)


def running() -> Choice:
    """The choice by which the scope around runs. Raises RecipeError outside of all."""
    if not _choosing:
        raise RecipeError("a model that fxquant.bisect has compiled runs inside its check alone")
    return _choosing[-1]


@operator(namespace="fxquant_kernels")
def chosen_gemm(
    a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, scale: Tensor | None, random: Tensor | None,
    gemm: str, spec: str, graph: int, grouped: bool, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """One of the three products of a linear, of operands [*, rows, columns] as autograd has them.

    It is quantized as the scope around says; `scale` and `random` are those of `StepState`.
    """
    state = StepState(scale=scale, random=random)
    return running().multiply(Product(gemm, spec, graph, grouped, out_dtype), a, b, offs, bias, state)


@chosen_gemm.fake
def _chosen_gemm_fake(
    a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, scale: Tensor | None, random: Tensor | None,
    gemm: str, spec: str, graph: int, grouped: bool, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if gemm == "wgrad":
        groups = () if offs is None else (offs.shape[0],)
        return a.new_empty((*groups, *a.shape[:-2], a.shape[-1], b.shape[-1]), dtype=out_dtype)
    return a.new_empty((*a.shape[:-1], b.shape[-2 if gemm == "fprop" else -1]), dtype=out_dtype)
