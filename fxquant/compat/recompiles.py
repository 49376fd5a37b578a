"""Facts of Dynamo about the frame that it compiles: why again, where its graphs break, and when it gives up."""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_metrics_context, graph_break_reasons

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


def _break_text(reason: Any) -> str:
    """A graph break in one line, with the file and line where it happens."""
    place = f" ({reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno})" if reason.user_stack else ""
    return in_short(reason.reason) + place


def breaks_around(gm: fx.GraphModule) -> list[str]:
    """Returns the graph breaks behind which a graph begins, and at which it ends, each with file and line."""
    ends: Any = getattr(gm, "compile_subgraph_reason", None)
    reasons = [ends] if ends is not None and ends.graph_break else []
    try:
        code = InstructionTranslator.current_tx().f_code
    except AttributeError:  # not called by Dynamo
        return list(map(_break_text, reasons))
    resumed = re.fullmatch(r"torch_dynamo_resume_in_.*_at_(\d+)", code.co_name)
    if resumed is not None:
        place = (code.co_filename, int(resumed[1]))
        before = [r for r in graph_break_reasons if place in {(f.filename, f.lineno) for f in r.user_stack}]
        reasons = before[-1:] + reasons
    return list(dict.fromkeys(map(_break_text, reasons)))


def recompile_reason() -> str:
    """Returns the reason why Dynamo compiles a frame again; empty for the first time, and the first by a backend."""
    reason = _first(str(get_metrics_context()._metrics.get("recompile_reason") or ""))
    return "" if reason.startswith("BACKEND_MATCH") else reason
