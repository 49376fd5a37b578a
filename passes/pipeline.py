"""Every stage, as the passes that it consists of, in order.

captured   the graph of torch.compile before autograd
bound      a copy of it with more inputs
probed     a copy of that which is measured as well, where a probe asks for it
joint      forward and backward in one graph, before torch cuts it
meaning    the forward or the backward, for `inner="aot_eager"`: what runs are the operators' meanings
split      the forward or the backward, inside Inductor
exported   a program of torch.export
calibrated the program that comes of it, run on inputs
packaged   the same before Inductor, which then takes `split`; those passes alone that are portable
lowered    the same in ATen operators, to be saved
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

import fxquant
from fxquant.compat.patch import QuantizedGraphPass
from fxquant.compat.patches import recomputable
from fxquant.compat.private import (
    CustomGraphPass,
    CustomPartitionerFn,
    get_hash_for_files,
    lazy_format_graph_code,
    min_cut_rematerialization_partition,
    observed,
    trace_artifact,
)
from fxquant.cost.kept import kept_text
from fxquant.decisions import Considered, NotFused
from fxquant.kernels.linear import timing
from fxquant.kernels.operator import OPERATORS
from fxquant.passes import verify
from fxquant.passes.captured import (
    add_observers,
    bind_state,
    cache_weights,
    drop_unprofitable,
    find,
    inputs_first,
    insert,
    localize,
    name_layers,
    open_modules,
    open_products,
    predict_reuse,
    resolve,
    share_regions,
    split_regions,
)
from fxquant.passes.exported import (
    annotate,
    calibrate,
    concatenate_gemms,
    decompose_composites,
    expect_dtypes,
    lift_constants,
    refuse_untouched,
    store_weights,
    strip,
    to_aten,
)
from fxquant.passes.graph.considered import considered
from fxquant.passes.graph.saved import saved
from fxquant.passes.joint.compute_once import compute_once
from fxquant.passes.joint.dispatch_payloads import dispatch_payloads
from fxquant.passes.joint.gather_payloads import gather_payloads
from fxquant.passes.joint.keep_fp8 import keep_fp8
from fxquant.passes.joint.measured import quantize_measured_again
from fxquant.passes.joint.merged import merged, products_of
from fxquant.passes.joint.produce_again import produce_again
from fxquant.passes.joint.repeat import mark_recompute, save_state_itself
from fxquant.passes.joint.reuse import reuse_attention_payload
from fxquant.passes.joint.scales import save_column_amaxes, save_scales
from fxquant.passes.joint.share_amaxes import drop_unused, share_amaxes
from fxquant.passes.joint.swizzle_scales import swizzle_scales
from fxquant.passes.look import half, show, watched
from fxquant.passes.lower.amax_before_views import amax_before_views
from fxquant.passes.lower.directions import pair_directions
from fxquant.passes.lower.epilogues import fuse_epilogues
from fxquant.passes.lower.few_rows import few_rows
from fxquant.passes.lower.lower import lower
from fxquant.passes.lower.materialize import materialize_shared_inputs
from fxquant.passes.lower.producers import fuse_producers
from fxquant.passes.lower.ranges import mark_gemms, name_meanings, name_products
from fxquant.passes.lower.read_kept import read_kept
from fxquant.passes.lower.scale_at_once import scale_at_once
from fxquant.passes.lower.state.advance import advance_state
from fxquant.passes.lower.state.batch_amaxes import batch_amaxes
from fxquant.passes.lower.state.record_in_kernel import record_in_kernel
from fxquant.passes.lower.state.split_scales import split_scales
from fxquant.passes.settings import Settings
from fxquant.passes.verify import check, verifies

log = logging.getLogger(__name__)
S = TypeVar("S")


@dataclass(frozen=True)
class Pass:
    """One step of a stage.

    `run(subject, settings)` changes a graph in place and returns how many places it changed, or it returns a new value
    in the place of `subject`. `because` says why the pass stands where it stands. One that is not `portable` writes
    operators that need fxquant at run time; one that is `training_only` finds nothing to do in inference.
    """

    run: Callable[[Any, Settings], Any]
    because: str
    portable: bool = True
    training_only: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__

    def runs(self, settings: Settings) -> bool:
        """Returns True if a graph of these settings takes this pass: a portable one is for inference elsewhere."""
        return not settings.portable or (self.portable and not self.training_only)


CAPTURED = (
    Pass(inputs_first, "Dynamo of torch 2.11 adds those of a hook where it meets it; states come behind all inputs"),
    Pass(split_regions, "a recipe answers for each module, also where Dynamo has one region for all of them"),
    Pass(localize, "finds the products of tensors that are spread over a mesh; behind it they are like all others"),
    Pass(find, "everything else reads matmuls as facts"),
    Pass(name_layers, "a recipe answers by the names of layers"),
    Pass(open_modules, "the recipe is asked, by name, whether something inside would be quantized"),
    Pass(find, "opened modules have products of their own"),
    Pass(name_layers, "and so have those the names of their layers"),
    Pass(resolve, "all facts are there, and the graph is as it was: pairs are checked before anything is written"),
    Pass(drop_unprofitable, "only complete decisions have a time"),
    Pass(insert, "nothing is decided any more"),
    Pass(share_regions, "bodies that are still equal are compiled once, as Dynamo has it"),
    Pass(predict_reuse, "linears and attentions stand beside each other as operators only now"),
)
BOUND = (
    Pass(bind_state, "the operators that take state are written; a copy of the graph has its tensors as inputs"),
    Pass(cache_weights, "a weight that is scaled by state differs in every step, and is left alone"),
)
PROBED = (
    Pass(open_products, "the graph is the one that runs unmeasured, with all that is quantized in it"),
    Pass(add_observers, "all products are operators of fxquant, and bound to all else that they take"),
)
JOINT = (
    Pass(
        dispatch_payloads, "rows that are exchanged are quantized by whoever has them, which others then need not ask"
    ),
    Pass(gather_payloads, "before scales are shared and saved: it makes those of whole tensors"),
    Pass(share_amaxes, "what follows asks whether two scales are one node"),
    Pass(reuse_attention_payload, "a payload that is reused needs no scale, and is saved once for both"),
    Pass(save_scales, "forward and backward quantize one tensor by one scale, whatever is computed again"),
    Pass(save_column_amaxes, "the forward has the amaxes of the backward's columns for nothing"),
    Pass(mark_recompute, "reads what will be saved: all scales are in the graph", training_only=True),
    Pass(save_state_itself, "marks inputs alone, whose writes no pass before changes", training_only=True),
    Pass(compute_once, "the partitioner, which comes next, does the same in older versions of torch"),
    Pass(quantize_measured_again, "equal quantizations of a probe and of the backward are one", training_only=True),
    Pass(swizzle_scales, "asks who reads a scale, in the forward and the backward: all of them are there, each once"),
    Pass(produce_again, "no pass before reads a quantization behind its producer", training_only=True),
)
MEANING = (
    Pass(dispatch_payloads, "without a backward there is no joint graph"),
    Pass(gather_payloads, "without a backward there is no joint graph"),
    Pass(reuse_attention_payload, "what autograd did not show: a linear of the backward in front of an attention"),
    Pass(mark_gemms, "a product is told from its kin by its operand's one direction, before pairs have both"),
    Pass(pair_directions, "the partitioner has placed each direction, and equal quantizations are left"),
    Pass(name_meanings, "no pass reads products any more"),
)
SPLIT = (
    Pass(dispatch_payloads, "without a backward there is no joint graph"),
    Pass(gather_payloads, "without a backward there is no joint graph; fusions below take what each rank quantizes"),
    Pass(batch_amaxes, "AOTAutograd writes one record for each amax; the passes below want one", training_only=True),
    Pass(advance_state, "looks for the update and all its writes, before fusions take over parts of them",
         portable=False, training_only=True),
    Pass(split_scales, "kernels that are fused below take scales as tensors of their own"),
    Pass(reuse_attention_payload, "before pairs: one direction may be reused, and the other not"),
    Pass(swizzle_scales, "without a backward there is no joint graph; pairs and fusions take the spec as it is"),
    Pass(mark_gemms, "a product is told from its kin by its operand's one direction, before pairs have both",
         portable=False),
    Pass(pair_directions, "the partitioner has placed each direction; fusions below serve both at once"),
    Pass(fuse_producers, "knows by now which directions of a tensor one kernel writes", portable=False),
    Pass(fuse_epilogues, "takes amaxes that no producer has taken", portable=False),
    Pass(amax_before_views, "for amaxes that are left to Inductor"),
    Pass(record_in_kernel, "all kernels that have amaxes are there", portable=False, training_only=True),
    Pass(read_kept, "all operators that kernels make of producers are there", portable=False, training_only=True),
    Pass(few_rows, "takes quantizations and sums that no fusion above has taken"),
    Pass(name_products, "products have their epilogues by now, and are operators still", portable=False),
    Pass(scale_at_once, "passes before this one look for amaxes, and for what is made of them", portable=False),
    Pass(lower, "no pass reads fxquant's operators any more"),
    Pass(materialize_shared_inputs, "launches of kernels stand in the graph only now"),
)  # fmt: skip
EXPORTED = (
    Pass(annotate, "gives an exported graph what the passes over captured ones read"),
    *CAPTURED,
    Pass(refuse_untouched, "all decisions are there, and what is refused need not be written out"),
    Pass(decompose_composites, "a program holds operators alone, and weights are what `quantize` reads"),
    Pass(strip, "no pass reads example values any more; torch's verifier knows `val` alone"),
    Pass(lift_constants, "written out, users' quantizers bring tensors of their own"),
    Pass(store_weights, "reads weights and constants from the state"),
)
CALIBRATED = (Pass(calibrate, "runs the program, whose weights are quantized as they will be"),)
PACKAGED = (Pass(concatenate_gemms, "changes stored weights, which Inductor takes as they are"),)
LOWERED = (
    Pass(decompose_composites, "a program that trains still has products with their backward"),
    Pass(strip, "what was written out has example values"),
    Pass(to_aten, "all operators of fxquant have one meaning each"),
    Pass(lift_constants, "kernels that were traced bring tables of their own"),
    Pass(expect_dtypes, "operators of ATen take bits of any format"),
)


def before_lowering() -> tuple[Pass, ...]:
    """The passes of `SPLIT` behind which a graph still has the operators of fxquant, fused as they will run."""
    return SPLIT[: [step.run for step in SPLIT].index(lower)]


BORDERS = {
    CAPTURED: verify.CAPTURED, BOUND: verify.BOUND, PROBED: verify.PROBED, JOINT: verify.JOINT, MEANING: verify.MEANING,
    SPLIT: verify.SPLIT, EXPORTED: verify.EXPORTED, CALIBRATED: verify.CALIBRATED, PACKAGED: verify.PACKAGED,
    LOWERED: verify.LOWERED, before_lowering(): verify.FUSED_ALONE,
}  # fmt: skip
"""The forms of graphs around each stage."""


def stage_names() -> list[str]:
    """The names by which `Report.stage` knows stages of compiled models, and their passes."""
    stages = (CAPTURED, BOUND, JOINT, MEANING, before_lowering())
    return list(dict.fromkeys(x for stage in stages for x in (BORDERS[stage].stage, *(step.name for step in stage))))


def run(stage: tuple[Pass, ...], subject: S, settings: Settings) -> S:
    """Runs the passes of a stage on a graph, or on facts; returns what they have made of it.

    Whoever watches (`passes/look.py`) is shown what is there before the first and after every pass. Raises
    GraphVerificationError where graphs are checked, and one has not the form that its place asks for.
    """
    border = BORDERS[stage] if verifies() else None
    name = BORDERS[stage].stage if stage in BORDERS else "part of a stage"
    if border is not None:
        check(subject, border.before, settings, f"before the stage {border.stage}")
    show(name, "", "", subject)
    for step in stage:
        if not step.runs(settings):
            continue
        start = time.perf_counter()
        if isinstance(subject, fx.Graph):
            outcome = _change(subject, step, settings)
        else:
            subject, outcome = step.run(subject, settings), "done"
        log.debug("%s: %s in %.1f ms", step.name, outcome, (time.perf_counter() - start) * 1e3)
        show(name, step.name, step.because, subject)
        if border is not None:
            form = border.after if step is stage[-1] else border.between
            check(subject, form, settings, f"behind the pass {step.name} of the stage {border.stage}")
    return subject


def _change(graph: fx.Graph, step: Pass, settings: Settings) -> str:
    """Runs a pass on a graph; returns how many nodes it has changed, as text."""
    changed = observed(graph, step.name, lambda graph: step.run(graph, settings))
    if changed and graph.owning_module is not None:
        log.debug("%s", lazy_format_graph_code(f"fxquant {step.name}", graph.owning_module))
    return "disabled" if changed is None else f"{changed} nodes"


def traced(reasons: list[Considered]) -> list[Considered]:
    """Leaves the reasons against fusions in torch's structured trace, where there is one; returns all of them."""
    lines = [f"{r.step}, {r.layer or '<model>'} in the {r.graph} graph, {r.operator}: {r.sentence}" for r in reasons
             if isinstance(r, NotFused)]  # fmt: skip
    if lines:
        trace_artifact("fxquant_not_fused", lambda: "\n".join(lines))
    return reasons


class Partition(CustomPartitionerFn):
    """The stage `JOINT`, and behind it the partitioner: `inner`, or torch's min-cut.

    Adds to `reasons` what passes have left of them.
    """

    def __init__(self, settings: Settings, inner: Any = None, reasons: list[Considered] | None = None) -> None:
        self.settings = settings
        self.inner = inner
        self.reasons = [] if reasons is None else reasons

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        before = products_of(gm.graph)
        run(JOINT, gm.graph, self.settings)
        cut = products_of(gm.graph)
        self.reasons += traced(considered(gm.graph, "joint"))
        gm.recompile()
        quantizing = [called.target.overloadpacket for called in OPERATORS.values() if called.traits.both is not None]
        with recomputable(quantizing) if self.settings.save in ("least", "fp8") else contextlib.nullcontext():
            halves = (self.inner or min_cut_rematerialization_partition)(gm, joint_inputs, **kwargs)
        self.reasons += merged(before, cut, {node.name for one in halves for node in one.graph.nodes})
        for one in halves:
            if drop_unused(one.graph):
                one.recompile()
        if self.settings.save == "fp8":
            self.reasons += keep_fp8(halves[0].graph, halves[1].graph, kwargs["num_fwd_outputs"])
            for one in halves:
                one.recompile()
        self.reasons.append(saved(halves[0].graph, kwargs["num_fwd_outputs"]))
        return halves

    def uuid(self) -> Any:
        inner = None if self.inner is None else self.inner.uuid()
        if self.inner is not None and inner is None:
            return None
        return _key(self.settings, inner)


class Lowering(QuantizedGraphPass):
    """The stage `SPLIT` as one Inductor pass, and behind it what the user had in the same place.

    Adds the reasons of passes that did not fuse something to `reasons`, and shows the graph to `seen` before, and to
    `fused` when all that is left to do is to choose kernels; `done` is called behind the last pass.
    """

    def __init__(
        self,
        settings: Settings,
        after: Any = None,
        reasons: list[Considered] | None = None,
        seen: Callable[[fx.GraphModule], object] | None = None,
        fused: Callable[[fx.Graph], object] | None = None,
    ) -> None:
        self.settings = settings
        self.seen = seen
        self.fused = fused
        self.done: Callable[[], object] | None = None
        self.reasons = [] if reasons is None else reasons
        self.after: Sequence[Any] = [] if after is None else after if isinstance(after, (list, tuple)) else [after]

    def __call__(self, graph: fx.Graph) -> None:
        if self.seen is not None and graph.owning_module is not None:
            self.seen(graph.owning_module)
        with watched(self._watch):
            run(SPLIT, graph, self.settings)
        self.reasons += traced(considered(graph, half(graph)))
        if self.done is not None:
            self.done()
        for other in self.after:
            other(graph)

    def _watch(self, stage: str, step: str, because: str, graph: fx.Graph) -> None:
        if self.fused is not None and step == before_lowering()[-1].name:
            self.fused(graph)

    def uuid(self) -> Any:
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.after]
        if None in others:
            return None
        times = timing.all_remembered() + kept_text() if self.settings.gemm in ("auto", "autotune") else ""
        return _key(self.settings, times, others)


def _key(*parts: Any) -> Any:
    """Equal where the same source does the same by the same settings."""
    return get_hash_for_files(sources(), repr(parts))


def source_key() -> Any:
    """Equal for equal source of fxquant and an equal version of torch."""
    return _key(torch.__version__)


def sources() -> tuple[str, ...]:
    """The files that decide what becomes of a graph."""
    return tuple(sorted({str(path) for folder in FOLDERS for path in folder.rglob("*.py")}))


FOLDERS = (Path(__file__).parent, Path(fxquant.kernels.__file__).parent, Path(fxquant.__file__).parent)
"""The folders with the source of fxquant, which lie in each other when it is installed."""

__all__ = [
    "BOUND",
    "CALIBRATED",
    "CAPTURED",
    "EXPORTED",
    "JOINT",
    "LOWERED",
    "MEANING",
    "PACKAGED",
    "PROBED",
    "SPLIT",
    "Lowering",
    "Partition",
    "Pass",
    "run",
    "source_key",
    "stage_names",
    "traced",
]
