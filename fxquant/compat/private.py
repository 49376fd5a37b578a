"""Every private name of torch that the rest of fxquant imports, and functions that stand for private ones."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._C import _len_torch_dispatch_stack
from torch._compile import _disable_dynamo as uncaptured
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import _clear_fake_mode_weakrefs
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import lazy_format_graph_code  # type: ignore[attr-defined]
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch._higher_order_ops.triton_kernel_wrap import (
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._inductor import aoti_load_package, inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache
from torch._logging._internal import trace_structured
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.nn.functional import ScalingType, SwizzleType
from torch.utils._dtype_abbrs import dtype_abbrs
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from fxquant.errors import FxQuantError, OptionError

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
_Result = TypeVar("_Result")

force_stride_order = inductor_prims.force_stride_order
torch_grouped_mm = torch._grouped_mm
torch_scaled_grouped_mm = torch._scaled_grouped_mm
torch_scaled_mm = torch._scaled_mm


def knows_grouped_kinds() -> bool:
    """Returns True if torch traces a grouped GEMM that is told the kinds of its scales: since 2.15."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_grouped_mm_v2", "Meta")


DENSE = "dislike_padding"
"""A key of `node.meta`: Inductor pads no strides of this node's memory.

It pads rows of more than 1024 elements, from which no kernel of fxquant gains. Seen in torch 2.11: a buffer whose rows
are padded and read through a view got another layout afterwards, and the view read it as if it had the first.
"""


def inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Returns the decomposition table that Inductor's own graphs have been through."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def observed(graph: fx.Graph, name: str, run: Callable[[fx.Graph], _Result]) -> _Result | None:
    """Runs a pass over a graph, timed and logged as torch's own; returns None if it is disabled or bisected away."""
    if graph.owning_module is None:
        return run(graph)
    observer = GraphTransformObserver(graph.owning_module, name, "post_grad_passes")
    return observer.apply_graph_pass(lambda _: run(graph))


def inductor_mode_options(mode: str | None) -> dict[str, Any]:
    """Returns the settings behind `torch.compile(mode=...)`; raises OptionError for an unknown mode."""
    if mode in (None, "default"):
        return {}
    modes = torch._inductor.list_mode_options()
    if mode not in modes:
        raise OptionError(f"unknown mode {mode!r}; known modes: {', '.join(modes)}")
    return dict(modes[mode])


def isolated() -> dict[str, Any]:
    """Returns the argument of `torch.compile` that counts recompilations by model; torch 2.11 has none."""
    name = "isolate_recompiles"
    return {name: True} if name in inspect.signature(torch.compile).parameters else {}


def inductor_options() -> Collection[str]:
    """Returns the dotted names of Inductor's settings."""
    names: dict[str, Any] = vars(inductor_config)["_config"]  # its copy lacks the names of settings that moved
    return names.keys()


@contextmanager
def unlimited_recompiles() -> Iterator[None]:
    """Lets a function be compiled any number of times in this scope."""
    with dynamo_config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16):
        yield


@contextmanager
def inductor_settings_restored() -> Iterator[None]:
    """Gives Inductor at the end of this scope the settings that it had at the start."""
    with inductor_config.patch(inductor_config.get_config_copy()):
        yield


@contextmanager
def compile_to_look() -> Iterator[None]:
    """Lets a function be compiled any number of times in this scope, and its backward at once."""
    with unlimited_recompiles(), functorch_config.patch(force_non_lazy_backward_lowering=True):
        yield


class RunsBesideDynamo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode under which torch.compile still compiles; it sees what runs outside of compiled graphs."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


def is_tracing() -> bool:
    """Returns True if operators run for a graph that is being captured or compiled."""
    return TracingContext.try_get() is not None


class CapturedInputs:
    """The inputs of the call that a graph is captured for, which its nodes and torch's records of the capture refer to.

    torch forgets them for backends that it knows by name: `swap_tensors`, by which `Module.to` moves subclasses of
    tensors, refuses a tensor that anything refers to weakly.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        inputs = [node.meta for node in gm.graph.find_nodes(op="placeholder")]
        self._held = [meta["grapharg"] for meta in inputs if meta.get("grapharg") is not None]
        self._modes = {getattr(meta.get("example_value"), "fake_mode", None) for meta in inputs}
        self._context = TracingContext.try_get()

    def forget(self) -> None:
        """Drops the references, once torch has compiled the frame."""
        for argument in self._held:
            argument.erase()
        self._held.clear()
        if self._context is not None:
            self._context.tensor_to_context.clear()
            self._modes.add(self._context.fake_mode)
        for mode in self._modes:  # Dynamo's, and the one that its backend gets
            _clear_fake_mode_weakrefs(mode)
        self._context = None
        self._modes.clear()


def compiling_again(fakes: Sequence[Any]) -> AbstractContextManager[Any]:
    """Returns a scope in which a captured graph is compiled for `fakes`, after torch.compile has gone."""
    return tracing(TracingContext(detect_fake_mode(list(fakes))))


def with_hooks(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> AbstractContextManager[Any]:
    """Returns a scope with hooks on saved tensors in the place of others; an empty one where hooks are disabled."""
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined, unused-ignore]
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack) if enabled else nullcontext()


def no_mode_is_on() -> bool:
    """Returns True if no dispatch mode is on for this thread, behind which another would have to go off."""
    return not _len_torch_dispatch_stack()


def in_backward() -> bool:
    """Returns True if the autograd engine is running a backward on this thread."""
    return bool(torch._C._current_autograd_node())


def changed_inputs() -> list[int]:
    """Returns the inputs that the forward graph just compiled by AOTAutograd gives back changed, before its outputs."""
    context = TracingContext.try_get()
    assert context is not None and context.fw_metadata is not None
    return list(context.fw_metadata.mutated_inp_runtime_indices)


def in_short(text: object) -> str:
    """Returns in one line what a message of torch says first, and its explanation if it has one.

    Where nobody has given a reason for a break of theirs, torch's ``(reason: None)`` and ``Message: None`` go.
    """
    title, *lines = map(str.strip, str(text).strip().splitlines())
    if title.endswith(":") and lines:  # what is announced is the error itself
        title = f"{title} {lines.pop(0)}"
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return re.sub(r" \(reason: None\)| Message: (None)?$", "", ": ".join([title, *explained[:1]]))


@contextmanager
def failures_unlogged() -> Iterator[None]:
    """Keeps torch from logging, with their tracebacks, errors of this scope that it raises too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


@contextmanager
def own_errors() -> Iterator[None]:
    """Makes errors of fxquant in this scope reach the caller of a compiled model as they are.

    Dynamo and Inductor wrap every other error of a backend, and add advice to report a bug to PyTorch.
    """
    try:
        yield
    except Exception as error:
        inner = error
        while isinstance(inner, BackendCompilerFailed):
            inner = inner.inner_exception
        if not isinstance(inner, FxQuantError):
            raise
        passed_on = inner if isinstance(inner, ShortenTraceback) else _passed_on(type(inner))(inner)
        raise passed_on from inner.__cause__


def _passed_on(kind: type[FxQuantError]) -> Any:
    """Returns a class that stands for an error of `kind` while Dynamo and Inductor pass it on, who change nothing."""

    def init(self: ShortenTraceback, error: FxQuantError) -> None:
        ShortenTraceback.__init__(self, str(error), first_useful_frame=None)
        self.error = error  # type: ignore[attr-defined]

    members = {
        "__init__": init,
        "__str__": lambda self: str(self.error),
        "__reduce__": lambda self: (kind, self.error.args),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "remove_dynamo_frames": lambda self: self.error,  # what Dynamo raises in the end
    }
    return type(kind.__name__, (kind, ShortenTraceback), members)


def largest_over_ranks(x: torch.Tensor, groups: str) -> torch.Tensor:
    """Returns the elementwise maximum of `x` over the ranks of process groups, as a graph can hold it.

    Their names are joined by ``+``; without any, `x` is returned. It waits for the result: outside of a trace, torch's
    own function returns a subclass that waits when it is used, whose memory compiled kernels would read.
    """
    collectives = torch.ops._c10d_functional
    for group in filter(None, groups.split("+")):
        x = collectives.wait_tensor.default(collectives.all_reduce.default(x, "max", group))
    return x


def fuses_gathers() -> bool:
    """Returns True if Inductor is set to fuse gathers with products (asynchronous tensor parallelism)."""
    return bool(inductor_config._micro_pipeline_tp)


def name_source(node: fx.Node, name: str) -> None:
    """Gives an input that stands in no Python frame the source that Dynamo wants of every input."""
    node._dynamo_source = ConstantSource(name)


def source_text(node: fx.Node) -> str:
    """Returns Dynamo's spelling of the place that an input was read from; empty where there is none."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)  # a method before torch 2.11


def held_by_module(node: fx.Node) -> bool:
    """Returns True for an input of a captured graph that a module holds: a parameter, a buffer or an attribute."""
    source: Any = getattr(node, "_dynamo_source", None)
    kind = getattr(source, "guard_source", None)
    return kind is not None and "NN_MODULE" in kind.name


def mark_static(node: fx.Node) -> None:
    """Promises that an input has one address in every call, so that a CUDA graph may write it."""
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def prefer_recompute(node: fx.Node) -> None:
    """Lets the partitioner compute a node of a joint graph in the backward, from values that are saved anyway."""
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def is_recomputed(node: fx.Node) -> bool:
    """Returns True for a node of a joint graph that a policy of checkpoints has the backward compute again."""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def recompute_as(node: fx.Node, other: fx.Node) -> None:
    """Lets the backward compute a node again as it does another."""
    node.meta |= {key: other.meta[key] for key in ("recompute", "ac_graph_id") if key in other.meta}


_BUDGET = "_region_activation_memory_budget"


def recomputes_activations(gm: fx.GraphModule) -> bool:
    """Returns True if the partitioner is told to compute more in the backward again than is cheap."""
    return (
        functorch_config.activation_memory_budget < 1
        or functorch_config.aggressive_recomputation
        or any(budget < 1 for budget in _memory_budgets(gm))
    )


def share_memory_budget(gm: fx.GraphModule, added: Iterable[fx.Node]) -> None:
    """Gives nodes the budget of memory that the model has set for the region of a graph: torch wants it at all."""
    for budget in _memory_budgets(gm):
        for node in added:
            node.meta["custom"] = {_BUDGET: budget}


def _memory_budgets(gm: fx.GraphModule) -> set[float]:
    nodes = [node for module in gm.modules() if isinstance(module, fx.GraphModule) for node in module.graph.nodes]
    annotations = [node.meta.get("custom") or {} for node in nodes]
    return {annotation[_BUDGET] for annotation in annotations if _BUDGET in annotation}


def copy_sources(gm: fx.GraphModule, copy: fx.GraphModule, copies: Mapping[fx.Node, fx.Node]) -> None:
    """Gives a changed copy of a captured graph, and the copies of its nodes, the sources of the parameters and inputs.

    Without them AOTAutograd knows no parameters, and the partitioner saves the results of operators on them.
    """
    for old, new in copies.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source


@contextmanager
def replacements(gm: fx.GraphModule) -> Iterator[dict[str, str]]:
    """Gives a dict from the names of the nodes that are replaced in this scope to those of their replacements."""
    names: dict[str, str] = {}
    with gm._set_replace_hook(lambda old, new, user: names.update({old.name: new})):
        yield names


def operator_library(namespace: str, *, more: bool = False) -> Any:
    """Returns the library that defines a namespace of operators; with `more`, one that adds operators to it."""
    return torch.library.Library(namespace, "FRAGMENT" if more else "DEF")  # type: ignore[no-untyped-call]


def schema_of(operator: OpOverload) -> str:
    """Returns the schema of an operator without its name: ``(Tensor self, Tensor mat2) -> Tensor``."""
    text = str(operator._schema)
    return text[text.index("(") :]


def cache_folder() -> str | None:
    """Returns the folder of Inductor's cache; None where nothing is kept."""
    keeps = inductor_config.fx_graph_cache or functorch_config.enable_autograd_cache
    return inductor_cache() if keeps and not inductor_config.force_disable_caches else None


def fake_kernel(library: Any, name: str) -> Callable[[_Kernel], _Kernel]:
    """Registers the decorated function as the operator's implementation for fake tensors."""
    return torch.library.register_fake(f"{library.ns}::{name}", lib=library)  # type: ignore[no-any-return]


def trace_artifact(name: str, text: Callable[[], str], encoding: str = "string") -> None:
    """Leaves a text under a name, at the compilation that runs now; without a trace the text is not made."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=text)
