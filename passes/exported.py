"""The passes over an exported program: a captured graph with bodies, a state and a signature around it.

The work is done in `export`; here is what one hands to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from fxquant.calibration import Calibration
from fxquant.decisions import Decision, SkipReason
from fxquant.errors import ProgramError, RecipeError
from fxquant.passes.captured import Captured
from fxquant.passes.export import annotate as values
from fxquant.passes.export import calibrate as scales
from fxquant.passes.export import concatenate, decompose, dtypes
from fxquant.passes.export import store_weights as weights
from fxquant.passes.export.program_state import ProgramState
from fxquant.passes.export.store_weights import Stored
from fxquant.passes.graph.bodies import Bodies
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.lower.lower import lower
from fxquant.passes.settings import Settings

Run = Callable[["Exported", Callable[[fx.GraphModule], None]], int]
"""Runs a program on calibration inputs, as a function of its module has changed it; returns their number."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The graphs of a copy of a program, and its state; `names` says which node has replaced which.

    `changed` counts the operators that have become ATen's, or part of another.
    """

    program: ExportedProgram
    bodies: Bodies
    signature: ExportGraphSignature
    names: Mapping[str, str]
    program_state: ProgramState | None = None
    changed: int = 0

    @property
    def state(self) -> ProgramState:
        """The state, which `lift_constants` has opened."""
        assert self.program_state is not None
        return self.program_state


@dataclass(frozen=True, kw_only=True)
class Exported(Opened, Captured):
    """A program that is being quantized; `run` is for its `calibration`."""

    calibration: Calibration | None = None
    run: Run | None = None


P = TypeVar("P", bound=Opened)


def annotate(exported: Exported, settings: Settings) -> Exported:
    """Gives nodes the example values that captured graphs have; gradients flow where weights are not stored."""
    signature = exported.signature
    changed = set(signature.buffers_to_mutate.values())
    held = {node for node, buffer in signature.inputs_to_buffers.items() if buffer not in changed}
    held |= signature.inputs_to_lifted_tensor_constants.keys()
    trained = not settings.stored_weights
    values.annotate(exported.bodies, signature.inputs_to_parameters, held, trained=trained)
    return exported


def refuse_untouched(exported: Exported, settings: Settings) -> Exported:
    """Raises ProgramError where nothing can be quantized, and RecipeError for numbers that come from training."""
    source = Bodies(exported.program.graph_module)  # the passes before this one have written in the copy
    written = any(is_fxquant(node) for module in source.modules for node in module.graph.nodes)
    stored = [*exported.program.state_dict.values(), *exported.program.constants.values()]
    _check_decisions(exported.decisions, written or any(_is_payload(x) for x in stored))
    if exported.slots.request is not None:
        raise RecipeError(
            "delayed scaling takes its scales from training steps, of which an exported program has none: give "
            "calibration inputs, or use the recipe current_scaling"
        )
    if exported.slots.rounded:
        layer, operand, _ = exported.slots.rounded[0]
        raise RecipeError(
            f"layer {layer or '<model>'!r}, {operand}: stochastic rounding draws from a seed and step that "
            "torch.compile keeps and an exported program does not: set stochastic_rounding=False, rounding='nearest', "
            "or disable_stochastic_rounding=True"
        )
    return exported


def _is_payload(value: object) -> bool:
    """Returns True for a tensor of FP8 or FP4, such as the payload of a stored weight."""
    return isinstance(value, Tensor) and value.dtype.is_floating_point and value.dtype.itemsize == 1


def _check_decisions(decisions: Sequence[Decision], already: bool) -> None:
    """Raises ProgramError where nothing is quantized that could be; `already` says that something is from before."""
    if not decisions and not already:
        raise ProgramError("the program has no matmul to quantize")
    reasons = Counter(d.skip_reason for d in decisions if d.skip_reason is not None)
    wanted = {SkipReason.HIGH_PRECISION, SkipReason.NOT_PROFITABLE}
    if sum(reasons.values()) != len(decisions) or (not already and wanted & set(reasons)):
        return
    if already:
        raise ProgramError("what can be quantized of this program is already: give the program it was made from")
    text = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    first = next((d for d in decisions if d.detail), decisions[0])
    why = f"; the first is {first.layer or '<model>'!r}: {first.detail}" if first.detail else ""
    raise ProgramError(f"no matmul of the program can be quantized: of {len(decisions)} operands, {text}{why}")


def decompose_composites(opened: P, settings: Settings) -> P:
    """Writes out Python functions, and products too where weights are stored."""
    for module in opened.bodies.modules:
        decompose.decompose_composites(module.graph, linears=settings.stored_weights)
    return opened


def strip(opened: P, settings: Settings) -> P:
    """Takes away what `annotate` gave."""
    values.strip(opened.bodies)
    return opened


def to_aten(opened: P, settings: Settings) -> P:
    """Runs the pass `lower` on every graph of the program."""
    return replace(opened, changed=sum(lower(module.graph, settings) for module in opened.bodies.modules))


def lift_constants(opened: P, settings: Settings) -> P:
    """Puts tensors that are in the graphs into the state."""
    program = opened.program
    state = ProgramState(opened.bodies, opened.signature, program.state_dict, program.constants)
    state.lift_constants()
    return replace(opened, program_state=state)


def expect_dtypes(opened: P, settings: Settings) -> P:
    """Has a lowered program check the dtypes of its inputs, which fixed what it was lowered to."""
    if opened.changed:
        dtypes.assert_dtypes(opened.state.placeholders.values())
    return opened


def store_weights(exported: Exported, settings: Settings) -> Exported:
    """Quantizes weights, if they are to be stored, and freezes the other parameters."""
    if not settings.stored_weights:
        return exported
    stored = weights.store_weights(exported.state)
    decisions = _with_details(exported.decisions, 1, {site: _text(weight) for site, weight in stored.items()})
    if any(decision.quantizer is not None for decision in decisions):
        exported.state.freeze()  # a gradient would stop at the first quantized layer, and nothing would say so
    return replace(exported, decisions=decisions)


def calibrate(exported: Exported, settings: Settings) -> Exported:
    """Makes scales of activations static, if there are calibration inputs."""
    if exported.calibration is None or exported.run is None:
        return exported
    run = exported.run
    exported.bodies.recompile()
    notes, static = scales.calibrate(exported.state, exported.calibration, lambda prepare: run(exported, prepare))
    decisions = [_calibrated(d, d.site in static) for d in _with_details(exported.decisions, 0, notes)]
    return replace(exported, decisions=decisions)


def concatenate_gemms(opened: P, settings: Settings) -> P:
    """Multiplies one tensor by the weights of several layers at once."""
    return replace(opened, changed=concatenate.concatenate_gemms(opened.state))


def _with_details(decisions: Sequence[Decision], operand: int, notes: Mapping[int, str]) -> list[Decision]:
    """Returns the decisions with notes on the left (0) or right (1) operand of sites."""
    changed: list[Decision] = []
    place: Counter[int] = Counter()
    for decision in decisions:
        place[decision.site] += 1
        if decision.quantizer is not None and place[decision.site] == operand + 1:
            new = notes.get(decision.site, "quantized in every call" if decision.role.tensor_type == "weight" else "")
            detail = "; ".join(filter(None, (decision.detail, new)))
            decision = replace(decision, detail=detail)
        changed.append(decision)
    return changed


def _calibrated(decision: Decision, static: bool) -> Decision:
    """A decision of a calibrated program, its layer's input `static` or not."""
    matmul, role = decision.matmul, decision.role
    if static and matmul is not None:
        return replace(decision, matmul=replace(matmul, calibrated=True))
    if decision.quantizer is None or role.tensor_type == "weight" or role.module_type == "linear":
        return decision
    detail = "dynamic: calibration is for the inputs of linear layers"
    return replace(decision, detail="; ".join(filter(None, (decision.detail, detail))))


def _text(stored: Stored) -> str:
    if stored.obstacle:
        return f"quantized in every call: {stored.obstacle}"
    text = f"stored in {stored.after} bytes instead of {stored.before}"
    if stored.kept_for:
        text += f", and the original {' and '.join(stored.sources)} for {' and '.join(stored.kept_for)}"
    if stored.broken:
        text += f"; NaN or infinite elements in {' and '.join(stored.broken)}"
    return text
