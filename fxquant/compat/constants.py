"""Tensors with data that traced code reads, such as a table that a quantizer holds, as constants of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fxquant.compat.values import version
from fxquant.errors import RecipeError

_READS_NUMBERS = frozenset("tolist item numpy __bool__ __int__ __float__ __index__ __repr__ __format__".split())
"""Methods that give numbers of Python, which a tensor with data has while code is traced, too."""


@contextmanager
def without_modes() -> Iterator[None]:
    """A scope in which operators compute with data, also while code is traced."""
    with _disable_current_modes():
        yield


@contextmanager
def constants_lifted(*trees: Any) -> Iterator[None]:
    """Lets code that is traced in this scope, with the fake tensors of the trees, read tensors with data besides.

    Raises RecipeError if it writes to one.
    """
    if detect_fake_mode(tree_leaves(trees)) is None:
        yield
        return
    with _Lifting() as lifting:
        yield
    if any(version(lifted) for _, lifted in lifting.lifted.values()):
        raise RecipeError("a tensor that is held across calls is written to, and a graph has it as a constant")


class _Lifting(TorchFunctionMode):
    """Gives each operator a tensor with data as torch gives it one that is written out in code."""

    def __init__(self) -> None:
        super().__init__()
        self.lifted: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS_NUMBERS and args and _has_data(args[0]):
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Tensor, self._lift, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _lift(self, tensor: Tensor) -> Tensor:
        if not _has_data(tensor):
            return tensor
        if id(tensor) not in self.lifted:
            with _disable_current_modes():
                plain = tensor.detach()
            self.lifted[id(tensor)] = tensor, torch.ops.aten.lift_fresh_copy.default(plain)
        return self.lifted[id(tensor)][1]


def _has_data(value: object) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
