"""The frames that Dynamo compiles: their variables, guards of our own, and the backend behind a compiled callable."""

from __future__ import annotations

import functools
import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo import external_utils
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend, innermost_fn, skip_code
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import Guard, TracingContext
from torch.nn.parallel import DistributedDataParallel

from fxquant.compat.private import in_backward

Holds = Callable[[Mapping[str, Any]], bool]
"""A condition on a call: a function of the frame's variables."""


def frame_being_compiled() -> tuple[CodeType | None, Mapping[str, Any]]:
    """Returns the code and the variables of the frame that Dynamo is compiling; None and none outside of Dynamo."""
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # nothing has been compiled on this thread
        translator = None
    if translator is None:
        return None, {}
    return translator.f_code, translator.output.local_scope


CallKey = tuple[weakref.ref[Any], "weakref.ref[nn.Module] | None"]
"""References to what is called: ids come again."""


@dataclass(frozen=True, eq=False)
class CompiledCall:
    """A call of what torch.compile gave, which runs on this thread.

    `compiled` stands for what was compiled, and is the same in each call. `module` is that, or holds the code that runs
    now; None where a function calls none.
    """

    compiled: Any
    module: nn.Module | None
    _at_end: list[Callable[[], object]]
    _caller: nn.Module | None

    @property
    def backend(self) -> Any:
        """The backend that torch.compile was given; None where it is not known."""
        return next((function for _, function, _ in _unwrapped(getattr(self.compiled, "callback", None))), None)

    @property
    def key(self) -> CallKey:
        """The key of what was called, which nothing else ever has."""
        return weakref.ref(self.compiled), None if self.module is None else weakref.ref(self.module)

    def at_end(self, run: Callable[[], object]) -> None:
        """Lets a function run at the end of this call, also if it fails."""
        self._at_end.append(run)

    def around_next(self, scope: Callable[[], AbstractContextManager[object]]) -> None:
        """Lets the next call run in a scope, where it is one of a module."""
        name = "forward" if isinstance(self._caller, OptimizedModule) else "_compiled_call_impl"
        holder, call = self._caller, vars(self._caller).get(name) if self._caller is not None else None
        if call is None:
            return

        @functools.wraps(call)
        def once(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or in_backward():  # a checkpoint repeats the first call
                return call(*args, **kwargs)
            if vars(holder).get(name) is once:
                object.__setattr__(holder, name, call)
            with scope():
                return call(*args, **kwargs)

        # a torch.compile around this one would take its frame, and all it calls
        skip_code(once.__code__)  # type: ignore[attr-defined]
        object.__setattr__(holder, name, once)


def compiled_call() -> CompiledCall | None:
    """Returns the innermost call of what torch.compile gave; None outside of such, as in a backward."""
    frame, owner = sys._getframe(1), None
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        module = frame.f_locals.get("self")
        owner = module if isinstance(module, nn.Module) else owner
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or not {"self", "fn", "cleanups"} <= frame.f_locals.keys():
        return None
    compiled, function, at_end = (frame.f_locals[name] for name in ("self", "fn", "cleanups"))
    module = _module_of(function) or owner
    caller = frame.f_back.f_locals.get("self") if frame.f_back is not None else None
    return CompiledCall(
        compiled,
        None if module is None else unwrapped(module),
        at_end,
        caller if isinstance(caller, nn.Module) else None,
    )


def _module_of(function: Any) -> nn.Module | None:
    """The module that a function calls, which torch has made of it."""
    while function is not None and not isinstance(function, nn.Module):
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if hasattr(function, "__self__"):
            function = function.__self__
        elif function.__module__ == external_utils.__name__ and "fn" in names:
            function = function.__closure__[names.index("fn")].cell_contents
        else:
            return None
    return function


def is_method_of(value: object, code: CodeType | None) -> bool:
    """Returns True if code is that of a method of a value, or of what is left of one behind a graph break."""
    if code is None:
        return False
    name = re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", code.co_name)
    method = getattr(getattr(type(value), name, None), "__code__", None)
    if method is None or method.co_filename != code.co_filename:
        return False
    return code.co_firstlineno in range(method.co_firstlineno, 1 + max(line or 0 for *_, line in method.co_lines()))


def add_guard(holds: Holds, meaning: str) -> None:
    """Lets the graph that is being compiled run only in calls in which `holds`; Dynamo looks for another otherwise.

    `meaning` is what TORCH_LOGS=recompiles shows.
    """
    context = TracingContext.try_get()
    if context is None:
        return

    def fxquant_guard(builder: Any, guard: Guard) -> None:
        builder.guard_manager.root.add_lambda_guard(holds, [meaning], None)

    context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), fxquant_guard))


def without_switch(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function without what turns capturing off around each call: Dynamo does so around a whole graph."""
    return innermost_fn(compiled)  # type: ignore[no-any-return, unused-ignore]


def call_module(self: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls a module with its hooks, and without what was compiled in its place."""
    return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def call_of_its_own() -> Callable[..., Any]:
    """Returns `call_module` with code of its own: torch keeps compiled graphs by the code of the function."""
    return FunctionType(call_module.__code__.replace(), call_module.__globals__, call_module.__name__)


def call_by(module: nn.Module, call: Callable[..., Any]) -> Any:
    """Lets a function run in the place of a module's calls, as `nn.Module.compile` does.

    Returns the function before it, or None.
    """
    before = call_in_place(module)
    module._compiled_call_impl = call
    return before


def call_in_place(module: nn.Module) -> Any:
    """The function that runs in the place of a module's calls; None for one that is not compiled in place."""
    return vars(module).get("_compiled_call_impl")


def compiled_alike(call: Any, copied: nn.Module) -> Any:
    """The calls of a copy, compiled with the settings that torch was given for `call`; None for another call."""
    while call is not None:
        names = getattr(getattr(call, "__code__", None), "co_freevars", ())
        if {"self", "callback"} <= {*names}:
            return call.__closure__[names.index("self")].cell_contents(copied._call_impl)
        call = getattr(call, "__wrapped__", None)
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module that wrappers of torch hold: torch.compile's, and those for several devices."""
    while isinstance(module, OptimizedModule | DistributedDataParallel | nn.DataParallel):
        module = module._orig_mod if isinstance(module, OptimizedModule) else module.module
    return module


def is_compiled_form(module: Any) -> bool:
    """Returns True for what torch.compile gave for a module, which is one compilation of it, perhaps of several."""
    return isinstance(module, OptimizedModule)


def backends_of(call: Any) -> Iterator[Any]:
    """The backends that torch.compile was given for a function."""
    yield from (function for _, function, _ in _of_function(call))


def backends_behind(compiled: Any) -> Iterator[tuple[nn.Module | None, Any, Any, Mapping[str, Any]]]:
    """The backends that torch.compile was given for a callable, or for a module and what it consists of.

    Each is the module, what holds the backend, the function, and the keywords that it is called with.
    """
    yield from ((None, *backend) for backend in _of_function(compiled))
    for module in compiled.modules() if isinstance(compiled, nn.Module) else ():
        yield from _of_module(module)


def compiled_with_names() -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """The backends that torch.compile was given as names, as far as what it gave is alive, and their keywords."""
    for value in gc.get_objects():
        if type(value) is torch._TorchCompileWrapper:
            yield value.compiler_fn, value.kwargs


def compiled_modules() -> Iterator[tuple[nn.Module, Any, Any, Mapping[str, Any]]]:
    """The modules of this process that torch.compile was given, or that are compiled in place, as `backends_behind`."""
    for value in gc.get_objects():
        if issubclass(type(value), nn.Module):
            yield from _of_module(value)


def _of_module(module: nn.Module) -> Iterator[tuple[nn.Module, Any, Any, Mapping[str, Any]]]:
    callback = getattr(vars(module).get("dynamo_ctx"), "callback", None)
    for backend in (*_unwrapped(callback), *_of_function(call_in_place(module))):
        yield (unwrapped(module), *backend)


def _of_function(function: Any) -> Iterator[tuple[Any, Any, Mapping[str, Any]]]:
    while function is not None:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if hasattr(function, "_torchdynamo_orig_callable") and "callback" in names:
            yield from _unwrapped(function.__closure__[names.index("callback")].cell_contents)
        function = getattr(function, "__wrapped__", None)


def _unwrapped(callback: Any) -> Iterator[tuple[Any, Any, Mapping[str, Any]]]:
    if callable(callback):
        holder = innermost_backend(callback)
        yield holder, getattr(holder, "compiler_fn", holder), getattr(holder, "kwargs", {})
