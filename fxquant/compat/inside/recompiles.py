"""Facts of Dynamo about the frame that it compiles: why again, where its graphs break, and when it gives up."""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import FrameSummary
from typing import Any

from torch import fx, nn
from torch._dynamo import config, eval_frame
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import exceptions_allowed_to_be_fallback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters, graph_break_reasons
from torch._guards import CompileContext

from fxquant.compat.inside.frames import call_in_place
from fxquant.compat.private import in_short

_LIMIT = "torch._dynamo hit config."
"""The beginning of the warning that torch logs when it will not compile a function once more."""


class _Limits(logging.Handler):
    """Hears of functions that torch will not compile again, and tells whose backend compiled them."""

    def __init__(self, tell: Callable[[Any, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith(_LIMIT) or not isinstance(record.args, tuple):
            return
        kind, limit, function, reason = record.args[:4]
        variables = _variables_of_compilation()
        if variables:
            text = f"{function} has been compiled {limit} times (torch._dynamo.config.{kind})"
            wrapper: Any = innermost_backend(variables["compiler_fn"])
            backend = getattr(wrapper, "compiler_fn", wrapper)  # torch.compile wraps what it is given
            self._tell(backend, f"{text}, last because {_first(str(reason))}")


def _variables_of_compilation() -> Mapping[str, Any]:
    """The variables of the function of Dynamo that compiles a frame now; none outside of it."""
    frame = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "_compile" and "compiler_fn" in frame.f_locals):
        frame = frame.f_back  # type: ignore[assignment]
    return {} if frame is None else frame.f_locals


def _first(reason: str) -> str:
    """The first line of a reason, without the number of the compilation in front."""
    return _parted(reason)[1]


def _parted(reason: str) -> tuple[str, str]:
    """The number of the earlier compilation that a reason is about, or nothing, and its first line."""
    line = reason.strip().split("\n")[0]
    numbered = re.fullmatch(r"([!\d/_]+): (.*)", line)
    return (numbered[1], numbered[2]) if numbered is not None else ("", line)


@functools.cache
def watch_limits(tell: Callable[[Any, str], None]) -> None:
    """Calls `tell(backend, text)` whenever torch will not compile a function again, and runs new inputs as they are."""
    logging.getLogger("torch._dynamo.convert_frame").addHandler(_Limits(tell))


def runs_without(error: Exception) -> str:
    """Returns why torch runs a frame as it is that failed to compile by an error, and tells its log alone.

    Empty if it does not: the error reaches the user.
    """
    if config.suppress_errors:
        return "torch._dynamo.config.suppress_errors is set"
    translator = _translator()
    if translator is None or not isinstance(error, exceptions_allowed_to_be_fallback):
        return ""
    whole = translator.one_graph or translator.error_on_graph_break
    return "" if whole else "torch takes this error for a graph break"


def _translator() -> Any:
    """Returns the translator of the frame that Dynamo compiles now; None outside of Dynamo."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


_STANCES = {
    "force_eager": "which runs what is compiled as it is",
    "eager_on_recompile": "which compiles nothing for new inputs",
    "eager_then_compile": "which runs first calls as they are",
    "aot_eager_then_compile": "which leaves first calls to another backend",
}
"""The effect of each stance of torch on a call that has no graph."""


def compiles_nothing_new() -> bool:
    """Returns True under the stance of torch that runs what is compiled, and what has no graph as it is."""
    return eval_frame._stance.stance == "eager_on_recompile"


def told_not_to_compile(function: Any = None) -> str:
    """Returns what keeps torch from compiling a call of a function or module now; empty if nothing does."""
    stance: Any = eval_frame._stance
    forward = function.forward if isinstance(function, nn.Module) else function
    if config.disable:
        return "torch._dynamo.config.disable is set, as by the variable TORCH_COMPILE_DISABLE"
    if stance.stance in _STANCES:
        return f"the call was made under torch.compiler.set_stance({stance.stance!r}), {_STANCES[stance.stance]}"
    if stance.backend is not None:
        return "the call was made under torch.compiler.set_stance(force_backend=..), which takes another backend"
    if getattr(forward, "_torchdynamo_disable", False):
        return "torch.compiler.disable marks it"
    return ""


def is_compiled(module: nn.Module) -> bool:
    """Returns True for a module that torch.compile has made, or that was compiled in place."""
    return isinstance(module, OptimizedModule) or call_in_place(module) is not None


def _break_text(reason: str, stack: Sequence[FrameSummary] | None) -> str:
    """A graph break in one line, with the file and line where it happens."""
    place = f" ({stack[-1].filename}:{stack[-1].lineno})" if stack else ""
    return in_short(reason) + place


class _Placed(Counter[str]):
    """Counts what torch does not capture by its reason, as torch does, and knows in which lines of the user's."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        super().__init__(counts)
        self.stacks: dict[str, list[Sequence[FrameSummary] | None]] = defaultdict(list)

    def __setitem__(self, reason: str, count: int) -> None:
        if count > self[reason]:  # the caller is a method of the error
            error = sys._getframe(1).f_locals.get("self")
            stack = getattr(error, "real_stack", None)
            self.stacks[reason].append(stack)
            _latest.append((*_attempt(), _break_text(reason, stack)))
        elif count < self[reason]:
            del self.stacks[reason][-1:]
        super().__setitem__(reason, count)


_KINDS = ("graph_break", "unimplemented")

_latest: deque[tuple[str, int, str]] = deque(maxlen=256)
"""The last things that torch did not capture: the number of the compilation, that of its attempt, and the text."""


def not_captured() -> list[str]:
    """Returns what torch did not capture in this process, the last of it, each with the file and line."""
    return list(dict.fromkeys(text for _, _, text in _latest))


def _attempt() -> tuple[str, int]:
    """The number of the compilation that runs now, and how often its analysis has started again."""
    return compilation(), getattr(CompileContext.try_get(), "attempt", 0)


def _place_counts() -> None:
    """Lets torch's counts know places, from here on or after they were cleared."""
    for kind in _KINDS:
        if not isinstance(counters[kind], _Placed):
            counters[kind] = _Placed(counters[kind])


_place_counts()  # what ends a first graph is found before its backend is called


@contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """Gives a list; at the end of the scope it holds the reasons why Dynamo broke graphs in it or captured none.

    Each has the file and line where that was.
    """
    _place_counts()
    before = {kind: {text: len(stacks) for text, stacks in _stacks(kind).items()} for kind in _KINDS}
    reasons: list[str] = []
    yield reasons
    for kind in _KINDS:
        for text, stacks in _stacks(kind).items():
            reasons += [_break_text(text, stack) for stack in stacks[before[kind].get(text, 0) :]]
    reasons[:] = dict.fromkeys(reasons)


def _stacks(kind: str) -> Mapping[str, list[Sequence[FrameSummary] | None]]:
    counts = counters[kind]
    return counts.stacks if isinstance(counts, _Placed) else {}


def breaks_around(gm: fx.GraphModule) -> list[str]:
    """Returns the graph breaks behind which a graph begins, and at which it ends, each with file and line.

    Where Dynamo cannot break within a call, it ends the graph at an earlier line and gives no reason but
    "step_unsupported". The reason is then what it met in the call, in the analysis before this one.
    """
    _place_counts()
    ends: Any = getattr(gm, "compile_subgraph_reason", None)
    reasons = [ends] if ends is not None and ends.graph_break else []
    if reasons and ends.reason == "step_unsupported":
        number, attempt = _attempt()
        causes = [text for compiled, tried, text in _latest if compiled == number and tried < attempt]
        if number and causes:
            ends.fxquant_cause = causes[-1]  # also for the graph that begins there
    translator = _translator()
    code = None if translator is None else translator.f_code
    resumed = re.fullmatch(r"torch_dynamo_resume_in_.*_at_(\d+)", code.co_name) if code is not None else None
    if code is not None and resumed is not None:
        place = (code.co_filename, int(resumed[1]))
        before = [r for r in graph_break_reasons if place in {(f.filename, f.lineno) for f in r.user_stack}]
        reasons = before[-1:] + reasons
    return list(dict.fromkeys(_reason_text(reason) for reason in reasons))


def _reason_text(reason: Any) -> str:
    return getattr(reason, "fxquant_cause", None) or _break_text(reason.reason, reason.user_stack)


def compilation() -> str:
    """Returns the number that Dynamo gives the compilation of a frame that runs now; empty outside of Dynamo."""
    return str(CompileContext.current_compile_id() or "")


def recompile_reasons() -> dict[str, str]:
    """Returns the reasons why Dynamo compiles a frame again, by the numbers of the earlier compilations.

    Modules and their hooks have code in common, so that the earlier ones may be those of other models.
    """
    reasons = [_parted(str(reason)) for reason in _variables_of_compilation().get("reasons") or ()]
    return {number: text for number, text in reasons if not text.startswith("BACKEND_MATCH")}
