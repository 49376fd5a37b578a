"""Calibrate: gives activations the scales that calibration found, so that no pass over them takes their amax.

    quantize = torch.ops.fxquant.quantize.default(x, "per_tensor_e4m3", "rowwise")
    # becomes, with one more buffer in the program's state
    quantize = torch.ops.fxquant.quantize.default(x, "per_tensor_e4m3", "rowwise", b_layer_input_multiplier)

The global amax of NVFP4 becomes static, and its blocks keep scales of their own. Formats whose scales
all belong to rows or blocks take them from the data in any case.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from fxquant.calibration import Calibration, Observer, expect
from fxquant.errors import ProgramError
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.passes.export.program_state import ProgramState
from fxquant.passes.export.store_weights import readers_of
from fxquant.passes.graph.meta import OBSERVER, SITE, VAL, layer_of


def calibrate(
    state: ProgramState, calibration: Calibration, run: Callable[[Callable[[fx.GraphModule], None]], int]
) -> tuple[dict[int, str], set[int]]:
    """Rewrites the program's quantizations of activations.

    Returns a note on each by the sites that read it, and the sites whose scales are static now.

    `run(prepare)` makes a module of the program as it is, gives it to `prepare`, runs it on all inputs and returns
    their number. Observers sit in front of the quantizations, so that each sees what it will quantize.
    """
    observers: dict[int, tuple[fx.Node, Observer]] = {}
    notes: dict[int, str] = {}
    static: set[int] = set()
    for gm in state.bodies.modules:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.fxquant.quantize.default):
            sites = [reader.meta[SITE] for reader in readers_of(node)]
            amax = calibration.amax_of(layer_of(node))
            spec = QuantSpec.parse(str(node.args[1]))
            if spec.row.family != "per_tensor" and (not spec.row.has_global_amax or spec.row_scaled):
                notes |= dict.fromkeys(sites, "dynamic: its scales belong to rows or blocks")
            elif amax is None:
                notes |= dict.fromkeys(sites, "dynamic: so the calibration says")
            elif not state.bodies.can_reach(gm.graph):
                notes |= dict.fromkeys(sites, "dynamic: in a region that takes no scales")
            elif len(node.args) == 3:
                node.meta[OBSERVER] = len(observers)
                observers[len(observers)] = (node, Observer(amax))
    count = run(lambda module: _observe(module, {number: observer for number, (_, observer) in observers.items()}))
    for node, observer in observers.values():
        del node.meta[OBSERVER]
        sites = [reader.meta[SITE] for reader in readers_of(node)]
        layer, seen = layer_of(node), observer.result()
        if seen is None:
            what = "brought a number" if observer.called else "came"
            notes |= dict.fromkeys(sites, f"dynamic: no calibration input {what} here")
            continue
        if not bool(seen.isfinite()):
            raise ProgramError(f"calibration: the input of layer {layer or '<model>'!r} is infinite")
        notes |= dict.fromkeys(sites, f"static amax {seen.item():.4g}: {observer.amax} of {count} inputs")
        static.update(sites)
        placeholder = state.add(*_buffer(layer, QuantSpec.parse(str(node.args[1])), seen))
        node.args = (*node.args, state.bodies.reach(node.graph, placeholder))
    return notes, static


def _buffer(layer: str, spec: QuantSpec, amax: Tensor) -> tuple[str, Tensor]:
    """Returns the name and value [1] of a buffer that saves a quantization the pass over its input."""
    if spec.row.has_global_amax:
        return f"{layer}.input_global_amax".strip("."), amax
    return f"{layer}.input_multiplier".strip("."), reference.multiplier_from_amax(amax, spec)


def _observe(module: fx.GraphModule, observers: dict[int, Observer]) -> None:
    """Puts observers in front of the quantizations of a module and of its bodies, and checks in front of all inputs."""
    inputs = module.graph.find_nodes(op="placeholder")
    for node in reversed(inputs):
        if isinstance(value := node.meta.get(VAL), Tensor):
            with module.graph.inserting_after(inputs[-1]):
                module.graph.call_function(expect, (node, str(node.target), value.dtype))
    for gm in [inner for inner in module.modules() if isinstance(inner, fx.GraphModule)]:
        for node in list(gm.graph.find_nodes(op="call_function", target=torch.ops.fxquant.quantize.default)):
            if OBSERVER in node.meta:
                name = f"fxquant_observer_{node.meta[OBSERVER]}"
                gm.add_submodule(name, observers[node.meta[OBSERVER]])
                with gm.graph.inserting_before(node):
                    gm.graph.call_module(name, (node.args[0],))
        gm.recompile()
