"""A change to torch: which defect it mends, in which versions, and when it acts."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fxquant.compat import torch_version
from fxquant.compat.private import CustomGraphPass, inductor_config


class QuantizedGraphPass(CustomGraphPass):
    """The pass that Inductor runs over a quantized graph, forward or backward, behind its own."""


def compiles_quantized_graph(*_: Any, **__: Any) -> bool:
    """Returns True if Inductor compiles a quantized graph: its settings also hold for a backward compiled later."""
    return isinstance(inductor_config.post_grad_custom_post_pass, QuantizedGraphPass)


@dataclass(frozen=True)
class Patch:
    """A change to one function or property of torch.

    `change` is called with the function and its arguments where `acts`, which gets the arguments, returns True; a
    property has two such functions, and the one that assigns gets a value more. `fixed_in` is the first version of
    torch without the defect, None if the newest has it; all since `OLDEST_TORCH` before it have it. `still_needed`
    looks for the defect in the torch that is installed, and needs no GPU.
    """

    module: str
    function: str
    defect: str
    upstream: str
    fixed_in: tuple[int, int] | None
    still_needed: Callable[[], bool]
    change: Callable[..., Any]
    acts: Callable[..., bool] = compiles_quantized_graph

    def changed(self, function: Any) -> Any:
        """Returns the function or the property with the change."""
        both: Any = function
        if inspect.isdatadescriptor(function):
            return property(self._changed(both.__get__), self._changed(both.__set__))
        return self._changed(function)

    def _changed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def changed(*args: Any, **kwargs: Any) -> Any:
            if self.acts(*args, **kwargs):
                return self.change(function, *args, **kwargs)
            return function(*args, **kwargs)

        return changed


@functools.cache
def apply(patch: Patch) -> None:
    """Makes the change, once, if this version of torch has the defect."""
    if patch.fixed_in is None or torch_version() < patch.fixed_in:
        *path, name = patch.function.split(".")
        owner = functools.reduce(getattr, path, importlib.import_module(patch.module))
        setattr(owner, name, patch.changed(getattr(owner, name)))
