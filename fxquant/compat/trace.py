"""Facts for torch's structured trace, which ``TORCH_TRACE=folder`` writes and tlparse shows."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_structured


def trace_artifact(name: str, text: Callable[[], str], encoding: str = "string") -> None:
    """Leaves a text under a name, at the compilation that runs now; without a trace the text is not made."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=text)
