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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec

from fxquant.backend.inductor import inductor_settings
from fxquant.calibration import Calibration, arguments
from fxquant.checks import checked, did_you_mean
from fxquant.compat.patches import compile_package
from fxquant.compat.private import inductor_options, replacements, tree_map_only
from fxquant.compat.values import unguarded_sizes
from fxquant.decisions import Decision
from fxquant.errors import (
    ArgumentError,
    FxQuantWarning,
    OptionError,
    ProgramError,
    RecipeError,
    UnquantizedWarning,
    UnusedRuleWarning,
    tell,
)
from fxquant.files import check_place, in_its_place
from fxquant.kernels.onnx import MEANINGS, OPSET
from fxquant.passes.export.program_state import ProgramState
from fxquant.passes.exported import Exported, Opened
from fxquant.passes.graph.bodies import Bodies
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.pipeline import CALIBRATED, EXPORTED, LOWERED, PACKAGED, run
from fxquant.passes.settings import Settings
from fxquant.quantizers import DelayedScalingRequest, Float8CurrentScalingQuantizer, Quantizer
from fxquant.recipes import Recipe, resolve
from fxquant.report.header import header_of
from fxquant.report.report import Report
from fxquant.roles import QuantizerRole
from fxquant.weights import QuantizedWeight

REPORT = "fxquant_report"
"""The key in the graph module's `meta` under which a quantized program keeps its report."""

_OF_A_BACKWARD = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)


_PROGRAM = "what torch.export.export(model, args) gives"


@checked(ArgumentError, called="fxquant.quantize_program", takes={"ep": _PROGRAM, "recipe": "a recipe or its name"})
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
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = Calibration(calibration)
    asked = recipe if calibration is None else _Inference(recipe)
    settings = Settings(stored_weights=fold_weights)
    with _opened(ep) as opened:
        exported = Exported(**vars(opened), gm=opened.bodies.top, recipe=asked, calibration=calibration, run=_run)
        exported = run(EXPORTED, exported, settings)
    exported = run(CALIBRATED, exported, settings)
    unused = recipe.unused(exported.roles)
    if calibration is not None:
        unused += calibration.unused({decision.layer for decision in exported.decisions})
        _tell_of(calibration, exported.decisions, recipe)
    exported.gm.meta[REPORT] = Report(
        recipe=str(recipe), decisions=[*exported.decisions], unused=unused, header=header_of(recipe)
    )
    return _program(exported)


def _tell_of(calibration: Calibration, decisions: Sequence[Decision], recipe: Recipe) -> None:
    """Warns of what a calibration was given and did not do."""
    for text in calibration.unused({decision.layer for decision in decisions}):
        tell(f"{text} matched no layer of the program", UnusedRuleWarning)
    details = {decision.detail for decision in decisions}
    without = sorted(
        {decision.layer or "<model>" for decision in decisions if "no calibration input" in decision.detail}
    )
    if without:
        text = "calibration gave no scale, as no input came there with a number in it: scales stay dynamic in "
        tell(text + ", ".join(without), FxQuantWarning)
    elif not any("static amax" in detail or "so the calibration says" in detail for detail in details):
        text = f"calibration has no effect: no activation of {recipe} has a scale of the whole tensor"
        tell(text, FxQuantWarning)


@checked(ArgumentError, called="fxquant.lower_program", takes={"program": "a quantized program"})
def lower_program(program: ExportedProgram) -> ExportedProgram:
    """The same program in ATen operators, for the device that its tensors are on; it loads where fxquant is not.

    Raises ProgramError for anything but a program. Warns of one in which nothing is quantized.
    """
    _check_program(program)
    _tell_of_plain(program)
    with _opened(program) as opened:
        opened = run(LOWERED, opened, Settings(stored_weights=True, portable=True, kernels=False))
    return _program(opened)


@checked(
    ArgumentError,
    called="fxquant.aoti_compile_and_package",
    takes={"program": "a quantized program", "package_path": "where the package goes, such as 'model.pt2'"},
)
def aoti_compile_and_package(
    program: ExportedProgram, *, package_path: str | Path, inductor_configs: Mapping[str, Any] | None = None
) -> str:
    """`torch._inductor.aoti_compile_and_package` for a quantized program; the package runs without fxquant.

    Returns the path of the package, which has to end in ``.pt2``; load it with `torch._inductor.aoti_load_package`.
    It is written as a whole or not at all. `inductor_configs` are settings of Inductor. Raises OptionError for a
    setting that Inductor does not have and ProgramError for a program without example inputs, or where no file can be.
    Warns of a program in which nothing is quantized.
    """
    _check_program(program)
    _tell_of_plain(program)
    options = dict(inductor_configs or {})
    for option in options:
        if option not in inductor_options():
            hint = did_you_mean(option, inductor_options())
            raise OptionError(f"Inductor has no setting {option!r}{hint}")
    if program.example_inputs is None:
        raise ProgramError("the program has no example inputs, which compiling a package needs: export it again")
    if not str(package_path).endswith(".pt2"):
        raise OptionError(f"a package's path ends in .pt2, unlike {str(package_path)!r}")
    settings = inductor_settings(Settings(recipe="program", portable=True), options, recomputed=False)
    with in_its_place(package_path) as path:
        compile_package(_concatenated(program), str(path), settings)
    return str(package_path)


def _concatenated(program: ExportedProgram) -> ExportedProgram:
    """The same program with one layer in the place of several that read one tensor."""
    with _opened(program) as opened:
        state = ProgramState(opened.bodies, opened.signature, program.state_dict, program.constants)
        opened = run(PACKAGED, replace(opened, program_state=state), Settings(portable=True))
    return _program(opened) if opened.changed else program


@checked(ArgumentError, called="fxquant.onnx_export", takes={"program": "a quantized program"})
def onnx_export(
    program: ExportedProgram, path: str | Path | None = None, *, opset_version: int = OPSET, **options: Any
) -> torch.onnx.ONNXProgram:
    """`torch.onnx.export` for a quantized program: QuantizeLinear and DequantizeLinear around MatMul.

    Payloads of weights stay FP8 in the file. Takes per-tensor, rowwise and block scaled FP8, and MXFP8 with scales in
    float32. `options` are those of `torch.onnx.export`. Needs the packages onnx and onnxscript.

    Raises ProgramError for a program with a format or an operator that ONNX does not have, and OptionError for an
    opset before 21, the first with scales for blocks. Warns of a program in which nothing is quantized.
    """
    _check_program(program)
    _tell_of_plain(program)
    if opset_version < OPSET:
        raise OptionError(f"ONNX has the operators for FP8 blocks from opset {OPSET} on, not in {opset_version}")
    table = {getattr(torch.ops.fxquant, name).default: meaning for name, meaning in MEANINGS.items()}
    decomposed = program.run_decompositions(table)
    graphs = [gm.graph for gm in decomposed.graph_module.modules() if isinstance(gm, fx.GraphModule)]
    unknown = sorted({str(node.target) for graph in graphs for node in graph.nodes if is_fxquant(node)})
    if unknown:
        raise ProgramError(f"ONNX has nothing for {', '.join(unknown)}: export the unquantized program")
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ProgramError(f"torch.onnx.export needs what is not installed: pip install {' '.join(missing)}")
    if path is not None:
        check_place(path)
    options = {"dynamo": True, "verbose": False, **options}
    exported = torch.onnx.export(decomposed, f=path, opset_version=opset_version, **options)
    assert exported is not None
    return exported


@checked(ArgumentError, called="fxquant.report_of", takes={"program": "a quantized program"})
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
    stored = next((name for name, value in program.state_dict.items() if isinstance(value, QuantizedWeight)), None)
    if stored is not None:
        raise ProgramError(
            f"{stored} is stored quantized in the model that this program was exported from: load the model's "
            "state_dict() into one with plain parameters, and export that"
        )


def _tell_of_plain(program: ExportedProgram) -> None:
    """Warns of a program in which nothing is quantized: no operator of fxquant, no payload, no such report."""
    nodes = [node for module in Bodies(program.graph_module).modules for node in module.graph.nodes]
    values = [value for node in nodes if isinstance(value := node.meta.get(VAL), Tensor)]
    stored = [*program.state_dict.values(), *program.constants.values()]
    narrow = [x.dtype for x in values if x.is_floating_point()] + [x.dtype for x in stored if isinstance(x, Tensor)]
    report = program.graph_module.meta.get(REPORT)
    if (
        not (isinstance(report, Report) and any(decision.quantizer is not None for decision in report.decisions))
        and not any(is_fxquant(node) for node in nodes)
        and not any(dtype.itemsize == 1 and dtype != torch.bool for dtype in narrow)
    ):
        text = "nothing in this program is quantized: fxquant.quantize_program(program, recipe) makes one that is"
        tell(text, UnquantizedWarning)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a program's graphs in which nodes have the names that its signature uses."""
    copied = copy.deepcopy(gm)
    for old, new in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        if old.name != new.name:  # an input may be called `input`, which copying takes for the Python function
            new.name = old.name
            new.target = old.target
    return copied


class _Inference(Recipe):
    """A recipe after training: operands that ask for delayed scaling get their scales from calibration."""

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


def _run(exported: Exported, prepare: Callable[[fx.GraphModule], None]) -> int:
    """Runs a program on calibration inputs, as `prepare` changed it; returns their number."""
    calibration = exported.calibration
    assert calibration is not None
    module: Any = _program(exported, _copied(exported.gm)).module()
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
                shown = count
                if calibration.progress and sys.stderr.isatty():
                    sys.stderr.write(f"\r{_progress(count, total)}")
                    sys.stderr.flush()
    finally:
        if calibration.progress and shown:
            sys.stderr.write("\n" if sys.stderr.isatty() else f"{_progress(shown, total)}\n")
    if not count:
        raise ProgramError("calibration has no inputs")
    return count


def _sentence(error: Exception) -> str:
    """Returns the first line of an error, or all lines if the first only announces the others."""
    text = str(error).strip()
    first = text.partition("\n")[0].strip()
    return " ".join(text.split()) if first.endswith(":") else first


def _progress(count: int, total: int | None) -> str:
    of = "" if total is None else f" of {total}"
    return f"fxquant: calibrated on {count}{of} inputs"


@contextmanager
def _opened(program: ExportedProgram) -> Iterator[Opened]:
    """A scope in which a copy of a program's graphs is rewritten."""
    gm = _copied(program.graph_module)
    signature = copy.deepcopy(program.graph_signature)
    with replacements(gm) as names, unguarded_sizes():
        yield Opened(program=program, bodies=Bodies(gm), signature=signature, names=names)


def _program(opened: Opened, gm: fx.GraphModule | None = None) -> ExportedProgram:
    """A program of the rewritten graphs, or of a copy of them, which it takes over."""
    ep, state = opened.program, opened.state
    opened.bodies.recompile()
    gm = gm or opened.bodies.top
    output = next(node for node in gm.graph.nodes if node.op == "output")
    renamed = dict(opened.names)
    outputs: list[OutputSpec] = []
    for spec, node in zip(opened.signature.output_specs, output.args[0], strict=True):
        if isinstance(node, fx.Node) and spec.arg.name != node.name:
            renamed[spec.arg.name] = node.name
            spec = replace(spec, arg=replace(spec.arg, name=node.name))
        outputs.append(spec)
    present = {node.name for node in gm.graph.nodes}
    calls = [_renamed(entry, renamed, present) for entry in ep.module_call_graph]
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


def _renamed(entry: ModuleCallEntry, names: Mapping[str, str], present: Collection[str]) -> ModuleCallEntry:
    """Returns a copy of a module's entry in names that are `present`, without a signature if one name has gone."""
    if entry.signature is None:
        return copy.copy(entry)

    def now(name: str) -> str:
        met = set()
        while name not in present and name in names and name not in met:
            met.add(name)
            name = names[name]
        return name

    inputs, outputs = (
        [replace(arg, name=now(arg.name)) for arg in args] for args in (entry.signature.inputs, entry.signature.outputs)
    )
    if not {arg.name for arg in [*inputs, *outputs] if arg.name} <= set(present):
        return replace(entry, signature=None)
    return replace(entry, signature=replace(entry.signature, inputs=inputs, outputs=outputs))


__all__ = ["aoti_compile_and_package", "lower_program", "onnx_export", "quantize_program", "report_of"]
