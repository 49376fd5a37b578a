"""Exported programs: `quantize_program` does to a `torch.export` graph what the backend does to a captured one.

    program = torch.export.export(model, args)
    quantized = fxquant.quantize_program(program, "mxfp8")
    torch.export.save(quantized, "model.pt2")

The result is an ordinary `torch.export.ExportedProgram`. Its weights are payloads and scales in its state, and its
graph still says what is meant: `fxquant::quantize` and `fxquant::scaled_mm`, which `lower_program` or the compilation
of a package replace by what runs on the device.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputSpec

from fxquant.decisions import Decision, SkipReason
from fxquant.errors import ProgramError, RecipeError
from fxquant.passes import Rewriter
from fxquant.passes.bodies import Bodies
from fxquant.passes.describe import describe, forget
from fxquant.passes.fold import Folded, fold
from fxquant.passes.open_calls import open_calls
from fxquant.passes.state_tensors import StateTensors
from fxquant.recipes import Recipe, resolve
from fxquant.report import Report

REPORT = "fxquant_report"
"""The key in the graph module's `meta` under which a quantized program keeps its report."""


def quantize_program(
    ep: ExportedProgram, recipe: Recipe | str, *, fold_weights: bool = True, calibration: Any = None
) -> ExportedProgram:
    """A program whose matmuls are quantized by `recipe`; `ep` stays as it is.

    `ep` may be as `torch.export.export` gives it or decomposed. With `fold_weights` the result is for inference: each
    quantized weight is stored as payload and scales, and the original is dropped unless something else reads it.
    Without, the parameters stay and the program can be trained further. `report_of(program)` has every decision.

    Raises RecipeError for a recipe that cannot work here and ProgramError for a program that cannot be quantized.
    """
    recipe = resolve(recipe)
    if not isinstance(ep, ExportedProgram):
        raise ProgramError(f"an ExportedProgram is expected, not a {type(ep).__name__}: call torch.export.export first")
    gm = _copied(ep.graph_module)
    signature = copy.deepcopy(ep.graph_signature)
    bodies = Bodies(gm)
    describe(bodies, set(signature.inputs_to_parameters), trained=not fold_weights)
    rewriter = Rewriter(recipe)
    decisions, roles, slots = rewriter(gm, autocast=None)
    _check(decisions)
    if slots.request is not None:
        raise RecipeError("delayed scaling takes its scales from training steps, which an exported program has none of")
    for module in bodies.modules:
        open_calls(module.graph, linears=fold_weights)
    forget(bodies)
    state = StateTensors(bodies, signature, ep.state_dict, ep.constants)
    if fold_weights:
        decisions = _with_folded(decisions, fold(state))
    bodies.recompile()
    gm.meta[REPORT] = Report(recipe=str(recipe), decisions=decisions, unused=recipe.unused(roles))
    return _program(ep, bodies, state, signature)


def report_of(program: ExportedProgram) -> Report:
    """The report of a program from `quantize_program`. Raises ProgramError for another, or one that was loaded."""
    report = program.graph_module.meta.get(REPORT)
    if not isinstance(report, Report):
        raise ProgramError("this program has no report: it is made by quantize_program and not saved with the program")
    return report


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a program's graphs in which nodes have the names that its signature uses."""
    made = copy.deepcopy(gm)
    for old, new in zip(gm.graph.nodes, made.graph.nodes, strict=True):
        if old.name != new.name:  # an input may be called `input`, which copying takes for the Python function
            new.name = old.name
            new.target = old.target
    return made


def _check(decisions: Sequence[Decision]) -> None:
    if not decisions:
        raise ProgramError("the program has no matmul to quantize")
    reasons = Counter(d.skip_reason for d in decisions if d.skip_reason is not None)
    if sum(reasons.values()) == len(decisions) and SkipReason.HIGH_PRECISION not in reasons:
        text = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        raise ProgramError(f"no matmul of the program can be quantized: of {len(decisions)} operands, {text}")


def _with_folded(decisions: Sequence[Decision], folded: Mapping[str, Sequence[Folded]]) -> list[Decision]:
    """The decisions, with what became of each weight."""
    told: list[Decision] = []
    for decision in decisions:
        if decision.quantizer is not None and decision.role.tensor_type == "weight":
            texts = dict.fromkeys(map(_text, folded.get(decision.layer, ())))
            detail = "; ".join(texts) or "quantized in every call: it depends on an input"
            decision = replace(decision, detail="; ".join(filter(None, (decision.detail, detail))))
        told.append(decision)
    return told


def _text(folded: Folded) -> str:
    text = f"stored in {folded.after} bytes instead of {folded.before}"
    if folded.kept_for:
        text += f", and the original {' and '.join(folded.sources)} for {' and '.join(folded.kept_for)}"
    return text


def _program(
    ep: ExportedProgram, bodies: Bodies, state: StateTensors, signature: ExportGraphSignature
) -> ExportedProgram:
    """A program of the rewritten graphs."""
    gm = bodies.top
    output = next(node for node in gm.graph.nodes if node.op == "output")
    renamed: dict[str, str] = {}
    outputs: list[OutputSpec] = []
    for spec, node in zip(signature.output_specs, output.args[0], strict=True):
        if isinstance(node, fx.Node) and spec.arg.name != node.name:
            renamed[spec.arg.name] = node.name
            spec = replace(spec, arg=replace(spec.arg, name=node.name))  # type: ignore[type-var]
        outputs.append(spec)
    calls = copy.deepcopy(ep.module_call_graph)
    for entry in calls:
        for arg in [*entry.signature.inputs, *entry.signature.outputs] if entry.signature is not None else []:
            arg.name = renamed.get(arg.name, arg.name)
    return ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=ExportGraphSignature(state.inputs, outputs),
        state_dict=state.state,
        range_constraints=copy.copy(ep.range_constraints),
        module_call_graph=calls,
        example_inputs=ep.example_inputs,
        constants=state.constants,
        verifiers=ep.verifiers,
    )


__all__ = ["quantize_program", "report_of"]
