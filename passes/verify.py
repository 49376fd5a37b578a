"""The form of graphs at the borders of stages: checked after every pass where ``FXQUANT_VERIFY`` is 1 or ``graphs``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxquant.compat.private import OpOverload
from fxquant.errors import GraphVerificationError
from fxquant.passes.captured import Captured
from fxquant.passes.exported import Opened
from fxquant.passes.find.facts import quantized
from fxquant.passes.graph.meta import EXAMPLE_VALUE, VAL
from fxquant.passes.graph.names import COMPOSITES, fxquant_op
from fxquant.passes.settings import Settings

VERIFY = "FXQUANT_VERIFY"
"""The environment variable that switches the checks on."""

STATEFUL = frozenset(f"{name}_stateful" for name in COMPOSITES)
"""Operators that it differentiates too, with the state of delayed scaling as inputs."""

PRODUCED = frozenset(("produce_quantize",))
"""Operators that passes write behind autograd."""

FUSED = frozenset((
    "attention_forward_into", "delayed_advance", "fused_scaled_mm", "produce_quantize_into", "quantize_qkv_into",
    "tensor_scale",
))  # fmt: skip
"""Operators that only the passes of `lower` write, behind autograd and the partitioner."""


@dataclass(frozen=True)
class Form:
    """The graphs that may stand at a border.

    `without` are operators of fxquant that have no place there; `computed` names the key in the meta of nodes under
    which what operators compute has a value, `stripped` one that none has. Where nodes are `lowered` no operator of
    fxquant is left; where products are `written`, none is left that was to be quantized.
    """

    without: Collection[str] = ()
    computed: str = ""
    stripped: str = ""
    lowered: bool = False
    written: bool = False


@dataclass(frozen=True)
class Border:
    """The name of a stage, and the forms of graphs before, while and after its passes run."""

    stage: str
    before: Form
    between: Form
    after: Form


_FOUND = Form(STATEFUL | FUSED | PRODUCED)
_STATED = Form(FUSED | PRODUCED)
_DIFFERENTIATED = Form(COMPOSITES | STATEFUL | FUSED, computed=VAL)
_TRACED = Form(COMPOSITES | STATEFUL | FUSED | PRODUCED, computed=VAL)
_FUSING = Form(COMPOSITES | STATEFUL, computed=VAL)
_PROGRAM = Form(STATEFUL | FUSED | PRODUCED, stripped=EXAMPLE_VALUE)

CAPTURED = Border("captured", _FOUND, _FOUND, replace(_FOUND, written=True))
BOUND = Border("bound", _FOUND, _STATED, _STATED)
PROBED = Border("probed", _STATED, _STATED, _STATED)
JOINT = Border("joint", _TRACED, _DIFFERENTIATED, _DIFFERENTIATED)
MEANING = replace(JOINT, stage="meaning")
SPLIT = Border("split", _DIFFERENTIATED, _FUSING, Form(computed=VAL, lowered=True))
FUSED_ALONE = replace(SPLIT, after=_FUSING)
EXPORTED = Border("exported", _PROGRAM, _FOUND, replace(_PROGRAM, written=True))
CALIBRATED = Border("calibrated", _PROGRAM, _PROGRAM, _PROGRAM)
PACKAGED = replace(CALIBRATED, stage="packaged")
LOWERED = Border("lowered", _PROGRAM, _FOUND, Form(stripped=EXAMPLE_VALUE, lowered=True))


def verifies() -> bool:
    """Returns True if graphs are checked."""
    return os.environ.get(VERIFY) in ("1", "graphs")


def checks_values() -> bool:
    """Returns True if the values of runs are checked too."""
    return os.environ.get(VERIFY) == "1"


def check(subject: Any, form: Form, settings: Settings, place: str) -> None:
    """Raises GraphVerificationError, which names the place, where a graph is none of a form."""
    problem = next(_problems(subject, form, settings), None)
    if problem is not None:
        raise GraphVerificationError(f"{place}: {problem}")


def _graphs_of(subject: Any) -> list[fx.Graph]:
    """Returns the graphs that a pass works on."""
    if isinstance(subject, fx.Graph):
        return [subject]
    top: fx.GraphModule = subject.bodies.top if isinstance(subject, Opened) else subject.gm
    return [module.graph for module in top.modules() if isinstance(module, fx.GraphModule)]


def _problems(subject: Any, form: Form, settings: Settings) -> Iterator[str]:
    """Yields every way in which graphs are none of a form."""
    graphs = _graphs_of(subject)
    for graph in graphs:
        try:
            graph.lint()
        except Exception as error:
            yield f"torch's lint: {error}"
        for node in graph.nodes:
            if problem := _problem(node, form, settings):
                yield f"{node.format_node() or node}: {problem}"
    if form.written and isinstance(subject, Captured):
        yield from _unwritten(subject, {node for graph in graphs for node in graph.nodes})


def _problem(node: fx.Node, form: Form, settings: Settings) -> str:
    """Returns what is wrong with a node; empty for one of the form."""
    name = fxquant_op(node)
    if name in form.without or (name and form.lowered):
        return f"fxquant::{name} has no place here"
    if form.lowered and settings.portable and str(node.target).startswith("fxquant_kernels."):
        return "it needs fxquant where it runs"
    if name and not {VAL, EXAMPLE_VALUE} & node.meta.keys():
        return "it has no value"
    if form.computed and isinstance(node.target, OpOverload) and node.users and form.computed not in node.meta:
        return f"nothing is under {form.computed!r} in its meta"
    return f"{form.stripped!r} is left in its meta" if form.stripped in node.meta else ""


def _unwritten(captured: Captured, nodes: Collection[fx.Node]) -> Iterator[str]:
    """Yields what was decided to be quantized and was not written."""
    for match in filter(quantized, captured.matches or ()):
        if match.node in nodes:
            yield f"{match.node.format_node()}: it was to be quantized"
