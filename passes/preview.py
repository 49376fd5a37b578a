"""The fusions of the last stage on a copy of a forward or a backward, for reports that compile nothing."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, fx
from torch.fx import traceback

from fxquant.compat.private import inductor_decompositions
from fxquant.passes.graph.meta import FORWARD_MODULE_STACK, MODULE_STACK, VAL
from fxquant.passes.graph.trace import trace
from fxquant.passes.graph.values import val
from fxquant.passes.pipeline import before_lowering, run
from fxquant.passes.settings import Settings


def copy_of(graph: fx.Graph) -> fx.GraphModule:
    """A copy with the same nodes' names, values and owner's tensors."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    for node in copied.nodes:  # what a trace passes on
        if FORWARD_MODULE_STACK in node.meta:
            node.meta.setdefault(MODULE_STACK, node.meta[FORWARD_MODULE_STACK])
    return fx.GraphModule(graph.owning_module or {}, copied)


def fused(gm: fx.GraphModule, settings: Settings) -> fx.GraphModule:
    """The graph as Inductor decomposes it, with what the passes before `lower` fuse on the device of its tensors.

    A CPU, or the meta device, stands for a GPU whose rates are not known: GEMMs then finish nothing.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    with traceback.preserve_node_meta():
        traced = trace(
            fx.Interpreter(gm).run, list(map(val, inputs)), decomposition_table=dict(inductor_decompositions())
        )
    names = iter(inputs)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            original = next(names)
            copies[node] = graph.placeholder(original.name)
            copies[node].meta = {**original.meta, VAL: node.meta.get(VAL, val(original))}
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    devices = [val(node).device.type for node in graph.nodes if isinstance(node.meta.get(VAL), Tensor)]
    device = next((kind for kind in devices if kind != "cpu"), "cpu")
    decomposed = fx.GraphModule(traced, graph)
    gemm = settings.gemm if device == "cuda" else "cublas"  # there are no rates to choose by
    run(before_lowering(), graph, replace(settings, device=device, gemm=gemm))
    return decomposed
