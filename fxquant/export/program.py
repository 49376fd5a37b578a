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
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec

from fxquant.backend.inductor import inductor_settings
from fxquant.calibration import Calibration, arguments
from fxquant.compat.patches import compile_package
from fxquant.compat.private import is_inductor_option, replacements, tree_map_only
from fxquant.compat.values import unguarded_sizes
from fxquant.decisions import Decision, SkipReason
from fxquant.errors import OptionError, ProgramError, RecipeError
from fxquant.files import check_place, in_its_place
from fxquant.kernels.onnx import MEANINGS, OPSET
from fxquant.passes.captured import Captured
from fxquant.passes.export.annotate import describe, forget
from fxquant.passes.export.calibrate import calibrate
from fxquant.passes.export.concatenate import join
from fxquant.passes.export.decompose import open_calls
from fxquant.passes.export.dtypes import assert_dtypes
from fxquant.passes.export.program_state import StateTensors
from fxquant.passes.export.store_weights import Folded, fold
from fxquant.passes.graph.bodies import Bodies
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.lower.lower import lower
from fxquant.passes.pipeline import CAPTURED, run
from fxquant.passes.settings import Settings
from fxquant.quantizers import DelayedScalingRequest, Float8CurrentScalingQuantizer, Quantizer
from fxquant.recipes import Recipe, resolve
from fxquant.report.report import Report
from fxquant.roles import QuantizerRole
from fxquant.state import Slots

REPORT = "fxquant_report"
"""The key in the graph module's `meta` under which a quantized program keeps its report."""


_OF_A_BACKWARD = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)


def quantize_program(
    ep: ExportedProgram,
    recipe: Recipe | str,
    *,
    fold_weights: bool = True,
    calibration: Calibration | Iterable[Any] | None = None,
) -> ExportedProgram:
    """A program whose matmuls are quantized by `recipe`; `ep` stays as it is.

    `ep` may be as `torch.export.export` gives it or decomposed. With `fold_weights` the result is for inference: each
    quantized weight is stored as payload and scales, and the original is dropped unless something else reads it.
    Without, the parameters stay and the program can be trained further. `report_of(program)` has every decision.

    `calibration`, a `Calibration` or just its inputs, runs the quantized program and makes the scales of per-tensor
    activations static; without it, and for formats with scales by rows or blocks, they come from each tensor itself.

    Raises RecipeError for a recipe that cannot work here and ProgramError for a program that cannot be quantized.
    """
    recipe = resolve(recipe)
    _check_program(ep)
    if any(spec.kind in _OF_A_BACKWARD for spec in ep.graph_signature.output_specs):
        raise ProgramError(
            "this program has its backward in it, whose matmuls cannot be told from those of the forward: quantize the "
            "forward with fold_weights=False, and add the backward to that"
        )
    if calibration is not None and not fold_weights:
        raise OptionError("calibration makes scales for inference: it needs fold_weights=True")
    given = Calibration(calibration) if not isinstance(calibration, Calibration | None) else calibration
    gm = _copied(ep.graph_module)
    signature = copy.deepcopy(ep.graph_signature)
    asked = _Inference(recipe) if given is not None else recipe
    bodies = Bodies(gm)
    describe(bodies, signature.inputs_to_parameters, trained=not fold_weights)
    with replacements(gm) as names, unguarded_sizes():
        captured = run(CAPTURED, Captured(gm=gm, recipe=asked), Settings(stored_weights=fold_weights))
        decisions, roles, slots = captured.decisions, captured.roles, captured.slots
        _check(decisions, gm)
        _check_state(slots)
        for module in bodies.modules:
            open_calls(module.graph, linears=fold_weights)
        forget(bodies)
        state = StateTensors(bodies, signature, ep.state_dict, ep.constants)
        state.lift_constants()
        if fold_weights:
            decisions = _with_details(decisions, 1, {site: _text(each) for site, each in fold(state).items()})
            if any(decision.quantizer is not None for decision in decisions):
                state.freeze()  # a gradient would stop at the first quantized layer, and nothing would say so
    bodies.recompile()
    unused = recipe.unused(roles)
    if given is not None:
        told, static = calibrate(
            state, given, lambda prepare: _run(_program(ep, _copied(gm), state, signature, names), given, prepare)
        )
        decisions = [_calibrated(d, d.site in static) for d in _with_details(decisions, 0, told)]
        unused += given.unused({decision.layer for decision in decisions})
        bodies.recompile()
    gm.meta[REPORT] = Report(recipe=str(recipe), decisions=[*decisions], unused=unused)
    return _program(ep, gm, state, signature, names)


def lower_program(program: ExportedProgram) -> ExportedProgram:
    """The same program in ATen operators, for the device that its tensors are on; it loads where fxquant is not.

    Raises ProgramError for what is no program.
    """
    _check_program(program)
    gm = _copied(program.graph_module)
    bodies = Bodies(gm)
    with replacements(gm) as names, unguarded_sizes():
        lowered = 0
        for module in bodies.modules:
            open_calls(module.graph, linears=True)
            forget(bodies)
            lowered += lower(module.graph, Settings(portable=True, kernels=False))
    signature = copy.deepcopy(program.graph_signature)
    state = StateTensors(bodies, signature, program.state_dict, program.constants)
    state.lift_constants()
    if lowered:
        assert_dtypes(state.placeholders.values())
    bodies.recompile()
    return _program(program, gm, state, signature, names)


def aoti_compile_and_package(
    program: ExportedProgram, *, package_path: str | Path, inductor_configs: Mapping[str, Any] | None = None
) -> str:
    """`torch._inductor.aoti_compile_and_package` for a quantized program; the package runs without fxquant.

    Returns the path of the package, which has to end in ``.pt2``; load it with `torch._inductor.aoti_load_package`.
    It is written as a whole or not at all. `inductor_configs` are settings of Inductor. Raises OptionError for a
    setting that Inductor does not have and ProgramError for a program without example inputs, or where no file can be.
    """
    _check_program(program)
    given = dict(inductor_configs or {})
    for option in given:
        if not is_inductor_option(option):
            raise OptionError(f"Inductor has no setting {option!r}")
    if program.example_inputs is None:
        raise ProgramError("the program has no example inputs, which compiling a package needs: export it again")
    if not str(package_path).endswith(".pt2"):
        raise OptionError(f"a package's path ends in .pt2, unlike {str(package_path)!r}")
    settings = inductor_settings(Settings(recipe="program", portable=True), given, recomputed=False)
    with in_its_place(package_path) as path:
        compile_package(_joined(program), str(path), settings)
    return str(package_path)


def _joined(program: ExportedProgram) -> ExportedProgram:
    """The same program with the layers that read one tensor joined."""
    gm = _copied(program.graph_module)
    signature = copy.deepcopy(program.graph_signature)
    state = StateTensors(Bodies(gm), signature, program.state_dict, program.constants)
    with replacements(gm) as names, unguarded_sizes():
        if not join(state):
            return program
    state.bodies.recompile()
    return _program(program, gm, state, signature, names)


def onnx_export(
    program: ExportedProgram, path: str | Path | None = None, *, opset_version: int = OPSET, **options: Any
) -> torch.onnx.ONNXProgram:
    """`torch.onnx.export` for a quantized program: QuantizeLinear and DequantizeLinear around MatMul.

    Payloads of weights stay FP8 in the file. Takes per-tensor, rowwise and block scaled FP8, and MXFP8 with scales in
    float32. `options` are those of `torch.onnx.export`. Needs the packages onnx and onnxscript.

    Raises ProgramError for a program with a format or an operator that ONNX does not have, and OptionError for an
    opset before 21, the first with scales for blocks.
    """
    _check_program(program)
    if opset_version < OPSET:
        raise OptionError(f"ONNX has the operators for FP8 blocks from opset {OPSET} on, not in {opset_version}")
    table = {getattr(torch.ops.fxquant, name).default: meaning for name, meaning in MEANINGS.items()}
    made = program.run_decompositions(table)
    left = sorted({str(n.target) for gm in _graphs(made) for n in gm.graph.nodes if is_fxquant(n)})
    if left:
        raise ProgramError(f"ONNX has nothing for {', '.join(left)}: export the unquantized program")
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ProgramError(f"torch.onnx.export needs what is not installed: pip install {' '.join(missing)}")
    if path is not None:
        check_place(path)
    options = {"dynamo": True, "verbose": False, **options}
    exported = torch.onnx.export(made, f=path, opset_version=opset_version, **options)
    assert exported is not None
    return exported


def report_of(program: ExportedProgram) -> Report:
    """The report of a program from `quantize_program`. Raises ProgramError for another, or one that was loaded."""
    _check_program(program)
    report = program.graph_module.meta.get(REPORT)
    if not isinstance(report, Report):
        raise ProgramError("this program has no report: it is made by quantize_program and not saved with the program")
    return report


def _check_program(program: object) -> None:
    if not isinstance(program, ExportedProgram):
        raise ProgramError(
            f"an ExportedProgram is expected, not a {type(program).__name__}: call torch.export.export first"
        )


def _graphs(program: ExportedProgram) -> list[fx.GraphModule]:
    return [each for each in program.graph_module.modules() if isinstance(each, fx.GraphModule)]


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a program's graphs in which nodes have the names that its signature uses."""
    made = copy.deepcopy(gm)
    for old, new in zip(gm.graph.nodes, made.graph.nodes, strict=True):
        if old.name != new.name:  # an input may be called `input`, which copying takes for the Python function
            new.name = old.name
            new.target = old.target
    return made


def _check(decisions: Sequence[Decision], gm: fx.GraphModule) -> None:
    already = any(is_fxquant(node) for each in Bodies(gm).modules for node in each.graph.nodes)
    if not decisions and not already:
        raise ProgramError("the program has no matmul to quantize")
    reasons = Counter(d.skip_reason for d in decisions if d.skip_reason is not None)
    wanted = {SkipReason.HIGH_PRECISION, SkipReason.NOT_PROFITABLE}
    if sum(reasons.values()) == len(decisions) and not wanted & set(reasons):
        if already:
            raise ProgramError("what can be quantized of this program is already: give the program it was made from")
        text = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        first = next((d for d in decisions if d.detail), decisions[0])
        why = f"; the first is {first.layer or '<model>'!r}: {first.detail}" if first.detail else ""
        raise ProgramError(f"no matmul of the program can be quantized: of {len(decisions)} operands, {text}{why}")


def _check_state(slots: Slots) -> None:
    """Refuses what takes its numbers from training."""
    if slots.request is not None:
        raise RecipeError(
            "delayed scaling takes its scales from training steps, of which an exported program has none: give "
            "calibration inputs, or use the recipe current_scaling"
        )
    if slots.rounded:
        layer, operand, _ = slots.rounded[0]
        raise RecipeError(
            f"layer {layer or '<model>'!r}, {operand}: stochastic rounding draws from a seed and step that "
            "torch.compile keeps and an exported program does not: set stochastic_rounding=False, or "
            "disable_stochastic_rounding=True"
        )


def _with_details(decisions: Sequence[Decision], operand: int, told: Mapping[int, str]) -> list[Decision]:
    """The decisions, with what became of the left (0) or right (1) operand of each site."""
    changed: list[Decision] = []
    place: Counter[int] = Counter()
    for decision in decisions:
        place[decision.site] += 1
        if decision.quantizer is not None and place[decision.site] == operand + 1:
            new = told.get(decision.site, "quantized in every call" if decision.role.tensor_type == "weight" else "")
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


def _text(folded: Folded) -> str:
    if folded.obstacle:
        return f"quantized in every call: {folded.obstacle}"
    text = f"stored in {folded.after} bytes instead of {folded.before}"
    if folded.kept_for:
        text += f", and the original {' and '.join(folded.sources)} for {' and '.join(folded.kept_for)}"
    if folded.broken:
        text += f"; NaN or infinite elements in {' and '.join(folded.broken)}"
    return text


class _Inference(Recipe):
    """A recipe as it is after training: what asks for delayed scaling gets scales from calibration."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.only_profitable = recipe.only_profitable

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        answer = self.recipe.quantizer(role)
        if not isinstance(answer, DelayedScalingRequest):
            return answer
        if answer.margin:
            raise RecipeError(f"{role}: a calibrated scale has no margin, and its DelayedScalingRequest has one")
        return Float8CurrentScalingQuantizer(answer.fp8_format.dtype(role.tensor_type))


def _run(program: ExportedProgram, calibration: Calibration, prepare: Callable[[fx.GraphModule], None]) -> int:
    """Runs a program on calibration inputs, as `prepare` changed it; returns their number."""
    module: Any = program.module()
    for name, buffer in list(module.named_buffers()):  # a program may write into its buffers
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, buffer.clone())
    prepare(module)
    total = len(calibration.inputs) if isinstance(calibration.inputs, Sized) else None
    count = 0
    shown = 0
    try:
        with torch.no_grad():
            for count, inputs in enumerate(calibration.inputs, 1):
                # copies, since a program may write into what it is given
                args, kwargs = tree_map_only(Tensor, Tensor.clone, arguments(inputs))
                try:
                    module(*args, **kwargs)
                except Exception as error:
                    raise ProgramError(
                        f"calibration input {count} does not fit the program: {_sentence(error)}"
                    ) from error
                if calibration.progress:
                    _show(count, total)
                    shown = count
    finally:
        if shown:
            sys.stderr.write("\n")
    if not count:
        raise ProgramError("calibration has no inputs")
    return count


def _sentence(error: Exception) -> str:
    """The first line of an error, or all of one whose first line only announces the others."""
    text = str(error).strip()
    first = text.partition("\n")[0].strip()
    return " ".join(text.split()) if first.endswith(":") else first


def _show(count: int, total: int | None) -> None:
    of = "" if total is None else f" of {total}"
    sys.stderr.write(f"\rfxquant: calibrated on {count}{of} inputs")
    sys.stderr.flush()


def _program(
    ep: ExportedProgram,
    gm: fx.GraphModule,
    state: StateTensors,
    signature: ExportGraphSignature,
    names: Mapping[str, str],
) -> ExportedProgram:
    """A program of the rewritten graphs, which it takes over. `names` says which node replaced which."""
    output = next(node for node in gm.graph.nodes if node.op == "output")
    renamed = dict(names)
    outputs: list[OutputSpec] = []
    for spec, node in zip(signature.output_specs, output.args[0], strict=True):
        if isinstance(node, fx.Node) and spec.arg.name != node.name:
            renamed[spec.arg.name] = node.name
            spec = replace(spec, arg=replace(spec.arg, name=node.name))
        outputs.append(spec)
    left = {node.name for node in gm.graph.nodes}
    calls = [_renamed(entry, renamed, left) for entry in ep.module_call_graph]
    return ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=ExportGraphSignature(list(state.inputs), outputs),
        state_dict=dict(state.state),
        range_constraints=copy.copy(ep.range_constraints),
        module_call_graph=calls,
        example_inputs=ep.example_inputs,
        constants=dict(state.constants),
        verifiers=ep.verifiers,
    )


def _renamed(entry: ModuleCallEntry, names: Mapping[str, str], left: Collection[str]) -> ModuleCallEntry:
    """A copy of what is kept of a module's signature, in names that are `left`; without it, where one has none."""
    if entry.signature is None:
        return copy.copy(entry)

    def now(name: str) -> str:
        met = set()
        while name not in left and name in names and name not in met:
            met.add(name)
            name = names[name]
        return name

    inputs, outputs = (
        [replace(arg, name=now(arg.name)) for arg in args] for args in (entry.signature.inputs, entry.signature.outputs)
    )
    if not {arg.name for arg in [*inputs, *outputs] if arg.name} <= set(left):
        return replace(entry, signature=None)
    return replace(entry, signature=replace(entry.signature, inputs=inputs, outputs=outputs))


__all__ = ["aoti_compile_and_package", "lower_program", "onnx_export", "quantize_program", "report_of"]
