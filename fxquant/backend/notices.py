"""Warnings about models that run, each given once, at the line of the user's that called the model."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxquant.backend.record import Records, outside_text
from fxquant.backend.uncaptured import Uncaptured
from fxquant.checks import first_line, place_of
from fxquant.compat.inside.frames import compiled_modules
from fxquant.compat.inside.recompiles import (
    is_compiled,
    not_captured,
    runs_without,
    told_not_to_compile,
    watch_limits,
)
from fxquant.errors import FxQuantWarning, UnquantizedWarning, UnusedRuleWarning, tell
from fxquant.recipes import HighPrecision

if TYPE_CHECKING:
    from fxquant.backend.controls import Controls

_untold: list[Records] = []
"""The graphs of every backend, as long as nothing was said about what they quantize."""


def watch(records: Records, instead_of: Iterable[Records] = ()) -> None:
    """Tells of a backend's graphs after the first step of an optimizer, or at exit, what was not told before.

    Nothing is told of graphs `instead_of` which these run, as under another recipe.
    """
    _watch_process()
    for other in instead_of:
        if other in _untold and not other.graphs:
            _untold.remove(other)
    if records not in _untold and not records.told:
        _untold.append(records)


def watch_unmet(names: Callable[[], Iterable[str]]) -> None:
    """Tells at exit of what torch.compile was given, and no graph of it came; `names` then says what that is."""
    _watch_process()
    _unmet.append(names)


@functools.cache
def _watch_process() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda optimizer, *_: _stepped(optimizer))
    atexit.register(_tell_at_exit)
    watch_limits(_tell_limit)


def _tell_what_ran() -> None:
    for records in [records for records in _untold if records.graphs]:
        tell_result(records)


def _tell_at_exit() -> None:
    if hasattr(sys, "last_value"):  # the process ends by an error, maybe before the first call
        return
    _tell_what_ran()
    silent = [records for records in _untold if not records.failed]
    alone = [records for records in silent if records.copy_of is None and not records.elsewhere]
    why = _why_none()
    hints = {records.what: why for records in alone if not records.whole}
    hints |= {calls.name: calls.hint for calls in _uncalled if not calls.ran()}
    hints |= {name: why for names in _unmet for name in names() if name not in _told_idle}
    for name, hint in hints.items():
        text = f"no graph of {name} has run: if its model did, then as it was, unquantized. {hint}"
        tell(text, UnquantizedWarning)


def _why_none() -> str:
    """Says what torch did not capture of late, and what it captures nowhere."""
    breaks = not_captured()[-3:]
    last = f"The last that torch.compile did not capture in this process: {'; '.join(breaks)}. {_BESIDE}. "
    return last + _WHY if breaks else _WHY  # maybe of another model


def _stepped(optimizer: Any) -> None:
    """Tells what ran; behind the second step of an optimizer also of models that it trains, and that ran no graph.

    The first step may run before a graph, under a stance of torch that compiles second calls. All objects are looked
    at then, once for an optimizer, and for a few at a time.
    """
    _tell_what_ran()
    if len(_steps) < _LOOKS or optimizer in _steps:
        _steps[optimizer] = _steps.get(optimizer, 0) + 1
        if _steps[optimizer] == 2 and (_unmet or any(not records.graphs for records in _untold)):
            _tell_idle({id(tensor) for group in optimizer.param_groups for tensor in group["params"]})


def _tell_idle(trained: set[int]) -> None:
    """Tells of compiled models that have one of these parameters, and no graph of which has run."""
    for module, _, backend, keywords in compiled_modules():
        records = getattr(backend, "records", None)
        if isinstance(records, Records):
            ran, name = records not in _untold or bool(records.graphs or records.failed or records.whole), records.what
        elif hasattr(backend, "met"):
            ran, name = backend.met(keywords), backend.what
        else:
            continue
        if ran or name in _told_idle or not any(id(tensor) in trained for tensor in module.parameters()):
            continue
        if isinstance(records, Records):
            _untold.remove(records)  # until it compiles something
        else:
            _told_idle.add(name)
        text = (
            f"no graph of {name} has run in two steps of its optimizer: if its model did, then as it was, unquantized"
        )
        tell(f"{text}. {_why_none()}", UnquantizedWarning)


_LOOKS = 8
_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_told_idle: set[str] = set()


def tell_result(records: Records) -> None:
    """Warns once if nothing was quantized, or if a part of the recipe matched nothing."""
    if records.told:
        return
    records.told = True
    with contextlib.suppress(ValueError):
        _untold.remove(records)
    if isinstance(records.recipe, HighPrecision):
        return
    decisions, unused = records.decisions(), records.unused(trained=True)
    outside = "; ".join(map(outside_text, records.used_outside(trained=True).items()))
    undecided = "; ".join(records.undecided())
    unnamed = f"its products without a layer's name were taken not to match: {undecided}" if undecided else ""
    if all(decision.quantizer is None for decision in decisions):
        skipped = Counter(str(decision.skip_reason) for decision in decisions)
        why = ", ".join(f"{count} x {reason}" for reason, count in skipped.most_common())
        counted = f"operands of matmuls were skipped: {why}" if decisions else "there is no matmul in its graphs"
        also = "".join(f"; unused in the recipe: {part}" for part in unused)
        also += "".join(f"; {text}" for text in (outside, unnamed) if text)
        tell(
            f"nothing of {records.what} was quantized under {records.recipe}: {counted}{also}. "
            "fxquant.explain(model, recipe, *args) shows every operand",
            UnquantizedWarning,
        )
    elif unused:
        also = "".join(f"; {text}" for text in (outside, unnamed) if text)
        tell(
            f"parts of the recipe matched nothing in the first call of {records.what}: {'; '.join(unused)}{also}. The "
            "names of layers are in its report",
            UnusedRuleWarning,
        )
    elif outside:
        also = f"; {unnamed}" if unnamed else ""
        tell(f"in {records.what} {outside}{also}. Its report has the graph breaks", UnusedRuleWarning)
    elif unnamed:
        tell(
            f"parts of the recipe go by names that fxquant does not know in {records.what}: {unnamed}. "
            "fxquant.compile(model, recipe) and Backend(recipe, model=model) know the names of a module's layers",
            UnusedRuleWarning,
        )
    if records.dispatch and not records.report().sent_quantized:
        tell(
            f"quantized_dispatch had no effect in {records.what}: no exchange of tokens for experts was found, or none "
            'that gains from it. print(fxquant.report(model)) has the reasons under "not fused"',
            FxQuantWarning,
        )


def tell_uncaptured(records: Records, seen: Uncaptured) -> None:
    """Warns of layers that ran outside of the captured graphs in a call, where the recipe quantizes them."""
    layers, kind, why = seen.layers(records.recipe), type(seen.module()), told_not_to_compile(seen.module())
    if layers and kind not in records.told_kinds:  # blocks are each a call, and alike
        records.told_kinds.add(kind)
        some = ", ".join(layer or "the model itself" for layer in layers[:5]) + (", .." if len(layers) > 5 else "")
        tell(
            f"{len(layers)} {'layer' if len(layers) == 1 else 'layers'} of {records.what} ran outside of its graphs, "
            f"unquantized: {some}{why and f', since {why}'}. Its report has them as NOT_CAPTURED, and the breaks",
            UnquantizedWarning,
        )


def tell_prompt(records: Records) -> None:
    """Warns if transformers' `generate` compiles the step of a token alone, and so has run the prompt as it is."""
    if isinstance(records.recipe, HighPrecision):
        return
    frame: Any = sys._getframe()
    methods = []
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.generation.utils":
            methods.append(frame.f_code.co_name)
        frame = frame.f_back
    if "generate" in methods and not any("prefill" in name for name in methods):
        tell(
            f"generate compiles the step of a token of {records.what}, and ran the prompt as it is, unquantized: "
            "generate(.., prefill_chunk_size=128) compiles the prompt too, in pieces of so many tokens",
            UnquantizedWarning,
        )


def _tell_limit(backend: Any, text: str) -> None:
    records = getattr(backend, "records", None)
    if isinstance(records, Records):
        records.limits.append(text)
        if not records.whole:
            _tell_plain(records)


def _tell_plain(records: Records, why: str = "", part: str = "") -> None:
    """Warns once that some inputs run unquantized, in a whole call or in `part`, and why if that is known."""
    if records.told_plain or isinstance(records.recipe, HighPrecision):
        return
    records.told_plain = True
    if records.limits:
        limit = f"{records.limits[0]}. Raise the limit, or mark sizes dynamic"
        text = f"new inputs of {records.what} run unquantized: {limit}"
    elif records.graphs:
        text = f"{part}a call of {records.what} ran no compiled graph, and so unquantized: {why or _WHY}"
    else:
        breaks = "; ".join(text for seen in records.uncaptured for text in seen.breaks[:3])
        why = why or (f"{breaks}. {_BESIDE}" if breaks else _WHY)
        text = f"torch.compile captured no graph of {records.what}, which ran unquantized: {why}"
    tell(text, UnquantizedWarning)


def tell_missed(records: Records, *, whole: bool) -> None:
    """Warns once that a call, or a part of one, had no graph under a stance of torch, which the report says then."""
    why = told_not_to_compile()
    if not records.whole or not whole:  # `Calls` counts the others
        records.missed = f"{'calls' if whole else 'parts of calls'} of {records.what} that had no graph, since {why}"
    _tell_plain(records, why, part="" if whole else "a part of ")


def tell_failed(records: Records, error: Exception) -> None:
    """Warns once that a graph failed to compile and that torch runs its code as it is, which the report says."""
    why = runs_without(error)
    if not why:
        return
    records.failed.append(f"{type(error).__name__}: {first_line(error)}{place_of(error)}")
    if not records.told_plain:
        records.told_plain = True
        tell(
            f"a graph of {records.what} failed to compile, and torch runs it unquantized, since {why}: "
            f"{records.failed[0]}",
            UnquantizedWarning,
        )


def at_end(result: Any, run: Callable[[], object]) -> Any:
    """Returns what a call gave, and runs a function behind it: a call that gave a coroutine ends with that."""
    if not inspect.iscoroutine(result):
        run()
        return result

    async def awaited() -> Any:
        value = await result
        run()
        return value

    return awaited()


def tell_alone(records: Records) -> None:
    """Warns once that delayed scaling takes the amaxes of this rank alone, since others run other layers."""
    if not records.told_alone:
        records.told_alone = True
        tell(
            f"{records.what} runs in a stage of a pipeline, where other ranks run other layers: delayed scaling takes "
            "its amaxes from this rank alone. The option amax_group names the ranks that run the same stage; "
            "reduce_amax=False in the recipe means this rank alone",
            FxQuantWarning,
        )


class Calls:
    """The calls of one compiled model, each of which has to run a compiled graph.

    `ran` answers True once something has, also by way of what another library has compiled again.
    """

    def __init__(self, model: Callable[..., Any] | str, ran: Callable[[], bool], hint: str = "") -> None:
        self.ran, self.hint = ran, hint or _IN_PLACE
        self.name = model if isinstance(model, str) else _name_of(model)
        self._model = weakref.ref(model) if isinstance(model, nn.Module | FunctionType) else lambda: None
        _watch_process()
        _uncalled.append(self)

    def begin(self) -> None:
        """Notes that the model was called, so that nothing is told of it at exit."""
        if self in _uncalled:
            _uncalled.remove(self)

    def over(self, records: Records, ran: bool, *, whole: bool = True) -> None:
        """Tells, behind a call, what was unquantized in it; `ran` says that a compiled graph did.

        One that is not `whole` was a call of the first blocks of a model: of what others do nothing is known yet.
        """
        self.begin()
        records.calls += 1
        why = "" if ran else told_not_to_compile(self._model())
        if not ran:
            records.plain[why] += 1
        if not ran or records.limits:
            _tell_plain(records, why)
        if ran and whole:
            tell_result(records)


_WHY = (
    "TORCH_LOGS=graph_breaks,recompiles says why. torch gives up after torch._dynamo.config.recompile_limit "
    "compilations of one function, compiles nothing new under torch.compiler.set_stance('force_eager') and its like, "
    "and captures no module of its own classes, such as nn.Sequential, if compiled in place: use "
    "fxquant.compile(model, recipe)"
)

_BESIDE = "fxquant.compile_blocks(model, recipe, modules) compiles the modules beside what torch does not capture"


def _name_of(model: Callable[..., Any]) -> str:
    """The name of a function, of what a partial calls, or of the class of an object."""
    inner = model.func if isinstance(model, functools.partial) else model
    return getattr(inner, "__qualname__", type(inner).__name__)


_uncalled: list[Calls] = []
_unmet: list[Callable[[], Iterable[str]]] = []
_IN_PLACE = (
    "Methods such as generate, and wrappers that look inside, call the original: model.compile(backend="
    "fxquant.Backend(recipe, model=model)) compiles it in place"
)


def watch_methods(compiled: nn.Module, model: nn.Module, calls: Calls, controls: Controls) -> None:
    """Tells once if a method of the original, called on its compiled form, runs layers that are not compiled.

    `controls` count the runs of compiled graphs. Each method is watched in its first call.
    """
    names = [
        name
        for kind in type(model).__mro__  # also of classes beside, such as Hugging Face's, which has generate
        if kind not in nn.Module.__mro__
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType) and not name.startswith("_")
    ]
    watched = {name for name in names if not hasattr(type(compiled), name) and name not in vars(compiled)}

    def watch_method(name: str) -> None:
        @functools.wraps(getattr(model, name))
        def call(*args: Any, **kwargs: Any) -> Any:
            method = getattr(model, name)
            if torch.compiler.is_compiling():
                return method(*args, **kwargs)
            vars(compiled).pop(name, None)
            watched.discard(name)
            before = controls.runs()
            with _layers_run(model) as layers:
                result = method(*args, **kwargs)
            if layers and not controls.ran_since(before):
                calls.begin()
                for other in watched:
                    vars(compiled).pop(other, None)
                tell(
                    f"{type(model).__name__}.{name} ran the original model, unquantized: only a call of the compiled "
                    f"one is compiled. {_IN_PLACE}",
                    UnquantizedWarning,
                )
            return result

        object.__setattr__(compiled, name, call)

    for name in watched:
        watch_method(name)


@contextlib.contextmanager
def _layers_run(model: nn.Module) -> Iterator[list[str]]:
    """Gives a list, to which layers with weights add their class when they run in this scope, but for compiled ones."""
    classes: list[str] = []
    layers = [*_layers(model)]
    before = [vars(layer).get("forward") for layer in layers]

    def watch_layer(layer: nn.Module) -> None:
        forward = layer.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                classes.append(type(layer).__name__)
            return forward(*args, **kwargs)

        object.__setattr__(layer, "forward", run)

    for layer in layers:
        watch_layer(layer)
    try:
        yield classes
    finally:
        for layer, forward in zip(layers, before, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                object.__setattr__(layer, "forward", forward)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a module that have a weight, outside of what is compiled."""
    if isinstance(module, (torch.jit.ScriptModule, nn.Embedding, nn.EmbeddingBag)) or is_compiled(module):
        return
    if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
        yield module
    for child in module.children():
        yield from _layers(child)
