"""Changes to how Inductor looks at a graph behind a pass that wrote many nodes.

A pass gives each node that it adds a value. Inductor runs the operator of every such node once more, and then of all
that is computed of it, and it traces the launch of each kernel into a graph of its own. For a model of many equal
layers that is a good part of a compilation.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.proxy import _COPY_META_FIELDS

from fxquant.compat.patch import Patch
from fxquant.compat.private import tree_leaves, triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation
from fxquant.compat.values import on_fakes, storage_key

_VAL, _EAGER = "val", "eager_input_vals"


class _Unknown(Exception):
    """A value that is no number and no tensor of sizes that are numbers."""


class _Memories:
    """Describes values by all that an operator asks of them, and by which of them share memory."""

    def __init__(self, *before: Any) -> None:
        self._places: dict[int, int] = {}
        self.before = self.describe(before)

    def describe(self, value: Any) -> Any:
        """Returns what is equal for equal values. Raises _Unknown."""
        if isinstance(value, FakeTensor):
            if value.layout is not torch.strided:
                raise _Unknown
            sizes = (*value.shape, *value.stride(), value.storage_offset())
            if not all(type(size) is int for size in sizes):
                raise _Unknown
            place = self._places.setdefault(storage_key(value), len(self._places))
            return value.dtype, value.device, sizes, place
        if isinstance(value, (list, tuple)):
            return tuple(map(self.describe, value))
        if value is None or type(value) in (bool, int, float, str):
            return type(value), value
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return value
        raise _Unknown


def _memory(value: Any) -> list[int]:
    return [storage_key(x) for x in tree_leaves(value) if isinstance(x, FakeTensor) and x.layout is torch.strided]


def _update_the_unknown(update: Callable[..., Any], updater: Any) -> Any:
    """Tells an updater which nodes have the value of an equal call, and gives others that are known theirs.

    What is left, such as symbolic sizes, it looks at as ever.
    """
    graph: fx.Graph = updater.graph if hasattr(updater, "graph") else updater.gm.graph
    results: dict[Any, Any] = {}
    others: set[fx.Node] = set()  # new nodes, and those with another value, whose readers may not show it by their hash
    taken: set[int] = set()
    for node in graph.nodes:
        value, key = node.meta.get(_VAL), updater.hash_node(node)
        new = key not in updater.processed_hashes
        if new:
            others.add(node)
        if node.op == "call_function" and value is not None and (new or not others.isdisjoint(node.all_input_nodes)):
            with contextlib.suppress(_Unknown):
                value = _value(node, results, taken)
                updater.processed_hashes.add(key)
            if value is not node.meta[_VAL]:
                node.meta[_VAL] = value
                others.add(node)
        taken.update(_memory(value))
    return update(updater)


def _value(node: fx.Node, results: dict[Any, Any], taken: set[int]) -> Any:
    """Returns the value of a node, or another if its operator gives another for the values that it reads.

    `results` has what calls gave, by their descriptions; `taken` the memory of the nodes in front of it.
    """
    value = node.meta[_VAL]
    if any(_VAL not in source.meta for source in node.all_input_nodes):
        raise _Unknown
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta[_VAL])
    if node.target is operator.getitem and isinstance(args[0], (list, tuple, dict)):
        return args[0][args[1]]  # type: ignore[index]
    if not isinstance(node.target, OpOverload):
        raise _Unknown

    def computed() -> Any:
        with on_fakes(value, args, kwargs):
            return node.target(*args, **kwargs)  # type: ignore[operator]

    inputs = (args, tuple(kwargs.items()))
    call = (node.target, _Memories(inputs).before)
    other = None
    if call not in results:
        other = computed()
        results[call] = _Memories(inputs).describe(other)
    not_read = {*_memory(value)} - {*_memory(inputs)}
    if _Memories(inputs).describe(value) == results[call] and taken.isdisjoint(not_read):
        return value
    return computed() if other is None else other


def _runs_new_nodes_again() -> bool:
    from torch._inductor.fx_utils import FakeTensorUpdater
    from torch._inductor.virtualized import V

    ran: list[Any] = []

    class Counting(FakeTensorMode):  # type: ignore[no-untyped-call]
        def dispatch(self, func: Any, *args: Any, **kwargs: Any) -> Any:
            ran.append(func)
            return super().dispatch(func, *args, **kwargs)

    mode, graph, relu = Counting(), fx.Graph(), torch.ops.aten.relu.default
    x = graph.placeholder("x")
    x.meta[_VAL] = mode.from_tensor(torch.ones(2))
    graph.output(x)
    module = fx.GraphModule(torch.nn.Module(), graph)
    x, output = module.graph.nodes
    takes_module = "gm" in inspect.signature(FakeTensorUpdater).parameters
    updater: Any = FakeTensorUpdater(module if takes_module else module.graph)  # type: ignore[arg-type]
    with module.graph.inserting_before(output):
        node = module.graph.call_function(relu, (x,))
    with mode:
        node.meta[_VAL] = relu(x.meta[_VAL])
    ran.clear()
    with V.set_fake_mode(mode):
        updater.incremental_update()
    return relu in ran


VALUES = Patch(
    "torch._inductor.fx_utils",
    "FakeTensorUpdater.incremental_update",
    defect="Behind a pass Inductor runs the operator of each new node on fake tensors again, and then of all nodes "
    "that are computed of it, since what comes out has other memory than the value that the pass gave it.",
    upstream="none found",
    fixed_in=None,
    still_needed=_runs_new_nodes_again,
    change=_update_the_unknown,
)


def _decompose_at_once(decompose: Callable[..., Any], graph: fx.Graph) -> Any:
    launches = graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    for node in reversed(launches):
        what = {name: value for name, value in node.kwargs.items() if name != "tensors_to_clone"}
        if node.users or node.kwargs["tensors_to_clone"] or not what.keys() <= _OF_A_LAUNCH:
            continue
        with graph.inserting_before(node):
            launch = graph.call_function(triton_kernel_wrapper_mutation, (), what)
        launch.meta = {key: node.meta[key] for key in (*_COPY_META_FIELDS, "stack_trace") if key in node.meta}
        traced = node.meta[_EAGER][1] if _EAGER in node.meta else fx.node.map_arg(what, lambda x: x.meta[_VAL])
        launch.meta[_EAGER] = (), {name: traced[name] for name in what}  # whose strides Inductor keeps
        graph.erase_node(node)
    return decompose(graph)


_OF_A_LAUNCH = {"kernel_idx", "constant_args_idx", "grid", "tma_descriptor_metadata", "kwargs"}


def _traces_every_launch() -> bool:
    passes: Any = importlib.import_module("torch._inductor.fx_passes.post_grad")
    return "replace_by_example" in inspect.getsource(passes.decompose_triton_kernel_wrapper_functional)


LAUNCHES = Patch(
    "torch._inductor.fx_passes.post_grad",
    "decompose_triton_kernel_wrapper_functional",
    defect="Inductor traces every launch of a kernel in a graph, twice, to find that nothing has to be cloned for it.",
    upstream="none found",
    fixed_in=None,
    still_needed=_traces_every_launch,
    change=_decompose_at_once,
)
