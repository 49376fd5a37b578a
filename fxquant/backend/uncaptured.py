"""Matmuls that run outside of every captured graph: behind a graph break, a disabled function, or an unsupported layer.

No pass sees them. A dispatch mode sees them while `fxquant.explain` runs a model, and in the first call of a compiled
one, so that the report has all of it.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from fxquant.compat.inside.functions import forward_with_gradients
from fxquant.compat.inside.recompiles import graph_breaks
from fxquant.compat.private import OpOverload, RunsBesideDynamo, flex_attention_op, in_backward, is_tracing, tree_leaves
from fxquant.compat.values import viewed
from fxquant.decisions import Decision, SkipReason
from fxquant.formats import LINEAR_OPERANDS
from fxquant.passes.find.opaque import RECURRENT, recurrent_flops, tells
from fxquant.passes.plan.resolve import gemms
from fxquant.quantizers import IdentityQuantizer
from fxquant.recipes import Recipe
from fxquant.roles import GEMM_OPERANDS, SMALLEST, QuantizerRole

_PRODUCTS = frozenset("mm addmm bmm baddbmm".split())
"""The operators [*, M, K] x [*, K, N]; a summand stands first in their arguments."""

_KINDS = LINEAR_OPERANDS[:2]
"""The operands that a linear of inference has too."""

_COUNTED_AS = dict.fromkeys(
    (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, flex_attention_op),
    torch.ops.aten._scaled_dot_product_flash_attention,
)
"""Operators unknown to some versions of torch's counter, and a known one with the same arguments."""

_IN_PLACE = {getattr(torch.ops.aten, f"{name}_"): getattr(torch.ops.aten, name) for name in ("addmm", "baddbmm")}


@dataclass(frozen=True)
class _Product:
    """One matmul [*batch, M, K] x [*batch, N, K], transposed, as it ran, or an operator that holds some.

    `shapes` are those of its operands and of its result. A `function` is the custom one that it ran in, if that gets
    gradients.
    """

    layer: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    has_weight: bool
    needs_grad: tuple[bool, bool]
    flops: int
    function: str

    def decisions(self, site: int, times: int) -> Iterator[Decision]:
        detail = f"{self.op} ran outside of the captured graphs" + (f", {times} times" if times > 1 else "")
        detail += "" if self.flops else " (its FLOPs are unknown)"
        detail += f"; the backward of {self.function} is not counted" if self.function else ""
        for gemm in gemms(self.needs_grad):
            for operand, direction in GEMM_OPERANDS[gemm]:
                kind = "input" if operand == "weight" and not self.has_weight else operand
                shape = self.shapes[LINEAR_OPERANDS.index(operand)]
                yield Decision(
                    role=QuantizerRole("linear" if self.has_weight else "matmul", kind, self.layer), gemm=gemm,
                    direction=direction, shape=shape, skip_reason=SkipReason.NOT_CAPTURED, detail=detail,
                    form=self.op, site=site, flops=times * self.flops,
                )  # fmt: skip


_watching: ContextVar[Uncaptured | None] = ContextVar("watching", default=None)
_ALONE = nullcontext()
"""The scope of a graph that nothing watches: one for all, as each step of a decode enters it."""


class Uncaptured(RunsBesideDynamo):  # type: ignore[no-untyped-call]
    """Records the matmuls of forwards that run in its scope, without traced ones and fxquant's own operators.

    `names` maps ``str(id(module))`` to the path of a module in the user's model. What was `watching` a call of a
    `module` has its graph `breaks` too.
    """

    def __init__(self, names: Mapping[str, str], module: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.module: Callable[[], nn.Module | None] = weakref.ref(module) if module is not None else lambda: None
        self.products: Counter[_Product] = Counter()
        self.breaks: list[str] = []
        self._paused = False
        self._gets_gradients = torch.is_grad_enabled()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records what runs in this scope, but for captured graphs, which say so by `graph_runs`."""
        token = _watching.set(self)
        try:
            with graph_breaks() as breaks, self:
                yield
        finally:
            _watching.reset(token)
            self.breaks += breaks

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing in this scope: a captured graph runs."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", func)  # higher-order operators have none
        ignored = getattr(func, "namespace", "") == "fxquant" or is_tracing() or in_backward()
        whole = torch.is_inference_mode_enabled() and isinstance(func, OpOverload) and packet not in flop_registry
        if whole and not ignored:  # without autograd nothing else takes `linear` and its like apart
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        result = func(*args, **(kwargs or {}))
        packet = _IN_PLACE.get(packet, packet)
        op, counts = packet.__name__, flop_registry.get(_COUNTED_AS.get(packet, packet))
        if (counts or tells(op)) and not op.endswith("_backward") and not ignored:
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.ndim > 1]
            flops = recurrent_flops(tensors) if RECURRENT & set(op.split("_")) else 0
            if counts:
                flops = counts(*args, **(kwargs or {}), out_val=result)
            if len(tensors) > 1:
                self.products[self._product(op, tensors, result, flops)] += 1
        return result

    def _product(self, op: str, tensors: Sequence[Tensor], result: Any, flops: int) -> _Product:
        left, right = tensors[-2:] if op in _PRODUCTS else tensors[:2]
        out = next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        shapes = left.shape, right.mT.shape if op in _PRODUCTS else right.shape, out.shape
        weight = viewed(right)
        needs_grad = (left.requires_grad, right.requires_grad) if torch.is_grad_enabled() else (False, False)
        return _Product(
            layer=_layer(inspect.currentframe(), self.names), op=op, shapes=tuple(map(tuple, shapes)),
            has_weight=isinstance(weight, nn.Parameter), needs_grad=needs_grad, flops=flops,
            function=_function(inspect.currentframe()) if self._gets_gradients else "",
        )  # fmt: skip

    def layers(self, recipe: Recipe) -> list[str]:
        """The layers whose products the recipe would have quantized in a graph."""
        linears = [p for p in self.products if p.op in _PRODUCTS and p.has_weight]
        large = [p.layer for p in linears if min(p.shapes[1][-2:]) >= SMALLEST]
        return [
            layer
            for layer in dict.fromkeys(large)
            if any(recipe.quantizer(QuantizerRole("linear", kind, layer)) != IdentityQuantizer() for kind in _KINDS)
        ]

    def decisions(self, first_site: int) -> list[Decision]:
        """The decisions for the matmuls; equal ones, as in the steps of a recurrent layer, are one site."""
        sites = enumerate(self.products.items(), first_site)
        return [decision for site, (product, times) in sites for decision in product.decisions(site, times)]


def is_watching() -> bool:
    """Returns True in a scope of `watching`."""
    return _watching.get() is not None


def graph_runs() -> AbstractContextManager[None]:
    """A scope in which a captured graph runs."""
    watching = _watching.get()
    return _ALONE if watching is None else watching.paused()


def _layer(frame: FrameType | None, names: Mapping[str, str]) -> str:
    """The path of the innermost module whose method is running."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and str(id(module)) in names:
            return names[str(id(module))]
        frame = frame.f_back
    return ""


def _function(frame: FrameType | None) -> str:
    """The name of the outermost custom `torch.autograd.Function` that is running, and gets gradients."""
    name = ""
    while frame is not None:
        function = forward_with_gradients(frame)
        name = name if function is None else function.__name__
        frame = frame.f_back
    return name
