"""Facts of Dynamo about the frame that it compiles: why again, where its graphs break, and when it gives up."""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import FrameSummary
from typing import Any

from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters, get_metrics_context, graph_break_reasons

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
        frame = sys._getframe()
        while frame is not None and not (frame.f_code.co_name == "_compile" and "compiler_fn" in frame.f_locals):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            text = f"{function} has been compiled {limit} times (torch._dynamo.config.{kind})"
            wrapper: Any = innermost_backend(frame.f_locals["compiler_fn"])
            backend = getattr(wrapper, "compiler_fn", wrapper)  # torch.compile wraps what it is given
            self._tell(backend, f"{text}, last because {_first(str(reason))}")


def _first(reason: str) -> str:
    """The first line of a reason, without the number of the compilation in front."""
    number, separator, text = reason.strip().split("\n")[0].partition(": ")
    return text if separator and number.replace("/", "").replace("_", "").isdecimal() else reason.split("\n")[0]


@functools.cache
def watch_limits(tell: Callable[[Any, str], None]) -> None:
    """Calls `tell(backend, text)` whenever torch will not compile a function again, and runs new inputs as they are."""
    logging.getLogger("torch._dynamo.convert_frame").addHandler(_Limits(tell))


def is_compiled(module: nn.Module) -> bool:
    """Returns True for a module that torch.compile has made, or that was compiled in place."""
    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


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
            self.stacks[reason].append(getattr(error, "real_stack", None))
        elif count < self[reason]:
            del self.stacks[reason][-1:]
        super().__setitem__(reason, count)


_KINDS = ("graph_break", "unimplemented")


@contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """Gives a list; at the end of the scope it holds the reasons why Dynamo broke graphs in it or captured none.

    Each has the file and line where that was.
    """
    for kind in _KINDS:
        if not isinstance(counters[kind], _Placed):
            counters[kind] = _Placed(counters[kind])
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
    """Returns the graph breaks behind which a graph begins, and at which it ends, each with file and line."""
    ends: Any = getattr(gm, "compile_subgraph_reason", None)
    reasons = [ends] if ends is not None and ends.graph_break else []
    try:
        code = InstructionTranslator.current_tx().f_code
    except AttributeError:  # not called by Dynamo
        return [_break_text(reason.reason, reason.user_stack) for reason in reasons]
    resumed = re.fullmatch(r"torch_dynamo_resume_in_.*_at_(\d+)", code.co_name)
    if resumed is not None:
        place = (code.co_filename, int(resumed[1]))
        before = [r for r in graph_break_reasons if place in {(f.filename, f.lineno) for f in r.user_stack}]
        reasons = before[-1:] + reasons
    return list(dict.fromkeys(_break_text(reason.reason, reason.user_stack) for reason in reasons))


def recompile_reason() -> str:
    """Returns the reason why Dynamo compiles a frame again; empty for the first time, and the first by a backend."""
    reason = _first(str(get_metrics_context()._metrics.get("recompile_reason") or ""))
    return "" if reason.startswith("BACKEND_MATCH") else reason
