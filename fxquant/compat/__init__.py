"""Every private import from torch and every branch on its version. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import lazy_format_graph_code  # type: ignore[attr-defined]
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch._higher_order_ops.triton_kernel_wrap import (
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._inductor import inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import ScalingType
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from fxquant.errors import FxQuantError, OptionError

OLDEST_TORCH = (2, 11)

force_stride_order = inductor_prims.force_stride_order

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def torch_version() -> tuple[int, int]:
    """(major, minor) of the torch in use."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def _keep_loops_that_do_not_split() -> None:
    """Mends Inductor's C++ backend (torch 2.11 to 2.13 at least), which splits loops at a block's size.

    Of kernels fused from a row and a column quantization the loops run in different orders, and instead of leaving
    them whole it fails an assertion, before it has changed anything.
    """
    from torch._inductor.codegen.cpp import CppScheduling

    split: Any = CppScheduling.try_loop_split

    @functools.wraps(split)
    def try_loop_split(self: Any, nodes: Any) -> Any:
        try:
            return split(self, nodes)
        except AssertionError:
            return nodes

    CppScheduling.try_loop_split = try_loop_split  # type: ignore[method-assign]


@functools.cache
def _launch_early() -> None:
    """Lets Inductor launch a user's Triton kernel while the one before it still runs, where its `EARLY` is true.

    Such a kernel waits for that one itself. Inductor (torch 2.11 to 2.13 at least) has the attribute of the launch for
    kernels of its own alone. Where its code is not as expected kernels are launched as ever, and the wait in them
    returns at once.
    """
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    define: Any = PythonWrapperCodegen.define_kernel

    @functools.wraps(define)
    def define_kernel(self: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> Any:
        if "custom_kernel=True" in kernel_body and "'EARLY': True" in kernel_body:
            kernel_body = kernel_body.replace("triton_meta={", "triton_meta={'launch_pdl': True, ", 1)
        return define(self, kernel_name, kernel_body, *args, **kwargs)

    PythonWrapperCodegen.define_kernel = define_kernel  # type: ignore[method-assign]


STATIC_LAUNCH = "static_launch_user_defined_triton_kernels"
"""Inductor's setting by which a Triton kernel that it was given is launched and cached as one that it wrote."""


@functools.cache
def _tell_workers_of_static_launches() -> None:
    """Has the processes that compile kernels follow `STATIC_LAUNCH`, which torch 2.11 to 2.13 does not tell them."""
    from torch._inductor.compile_worker.subproc_pool import SubprocPool
    from torch._inductor.runtime.compile_tasks import _worker_compile_triton

    pool: Any = SubprocPool
    submit = pool.submit

    @functools.wraps(submit)
    def submit_with_setting(self: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
        if run is _worker_compile_triton:
            load, environment, settings = args
            args = (load, environment, {**settings, STATIC_LAUNCH: getattr(inductor_config, STATIC_LAUNCH)})
        return submit(self, run, *args, **kwargs)

    pool.submit = submit_with_setting


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]) -> Any:
    """`compile_fx` with settings that hold for the forward and the (possibly later) backward compilation."""
    from torch._inductor.compile_fx import compile_fx

    _keep_loops_that_do_not_split()
    _launch_early()
    _tell_workers_of_static_launches()
    return compile_fx(gm, list(inputs), config_patches=dict(patches))


@functools.cache
def _declare_float8() -> None:
    """Lets packages for a CPU hold 8-bit floats: the C++ that torch 2.11 writes names their types undeclared."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    write: Any = CppWrapperCpu.write_header

    @functools.wraps(write)
    def write_header(self: Any) -> None:
        write(self)
        for name in ("e4m3fn", "e5m2"):
            self.header.splice(f"#include <c10/util/Float8_{name}.h>")

    CppWrapperCpu.write_header = write_header  # type: ignore[method-assign]


def compile_package(program: torch.export.ExportedProgram, path: str, settings: Mapping[str, Any]) -> str:
    """`torch._inductor.aoti_compile_and_package` with what Inductor's C++ backend needs for quantized graphs."""
    from torch._inductor import aoti_compile_and_package

    _keep_loops_that_do_not_split()
    if torch_version() < (2, 13):
        _declare_float8()
    return aoti_compile_and_package(program, package_path=path, inductor_configs=dict(settings))


def inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decomposition table that Inductor's own graphs have been through."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_cache() -> str:
    """The folder in which Inductor keeps what it has compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def no_modes() -> AbstractContextManager[Any]:
    """A scope in which tensors are real and what is done with them is not traced, within a compilation."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def inductor_mode_options(mode: str | None) -> dict[str, Any]:
    """The settings behind `torch.compile(mode=...)`; raises OptionError with the known modes for another."""
    if mode in (None, "default"):
        return {}
    known = torch._inductor.list_mode_options()
    if mode not in known:
        raise OptionError(f"unknown mode {mode!r}; known modes: {', '.join(known)}")
    return dict(known[mode])


def isolated() -> dict[str, Any]:
    """Arguments of `torch.compile` that let one model's recompilations count for it alone; torch 2.11 has none."""
    name = "isolate_recompiles"
    return {name: True} if name in inspect.signature(torch.compile).parameters else {}


def is_inductor_option(name: str) -> bool:
    """Whether Inductor has a setting of this dotted name."""
    return name in inductor_config.get_config_copy()


@contextmanager
def unguarded_sizes() -> Iterator[None]:
    """A scope in which dynamic sizes stay free where torch only asks how a tensor lies in memory.

    Outside, it answers for the sizes of the example, and holds the program to what it has answered.
    """
    import torch.fx.experimental._config as symbolic_config

    with symbolic_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


@contextmanager
def unlimited_recompiles() -> Iterator[None]:
    """A scope in which compiling a function once more is never refused."""
    import torch._dynamo.config as dynamo_config

    with dynamo_config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16):
        yield


@contextmanager
def compile_to_look() -> Iterator[None]:
    """The same, in which a backward is compiled at once."""
    import torch._functorch.config as functorch_config

    with unlimited_recompiles(), functorch_config.patch(force_non_lazy_backward_lowering=True):
        yield


class RunsBesideDynamo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode under which torch.compile still compiles; it sees what runs outside of compiled graphs."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


def is_tracing() -> bool:
    """Whether operators run for a graph that is being captured or compiled."""
    return TracingContext.try_get() is not None


def in_backward() -> bool:
    """Whether the autograd engine is running a backward on this thread."""
    return bool(torch._C._current_autograd_node())


def changed_inputs() -> list[int]:
    """Which inputs the forward graph that AOTAutograd has compiled just now gives back changed, before its outputs."""
    context = TracingContext.try_get()
    assert context is not None and context.fw_metadata is not None
    return list(context.fw_metadata.mutated_inp_runtime_indices)


@contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """A scope that ends with the reasons for which Dynamo broke graphs in it, or captured none, in its list."""
    from torch._dynamo.utils import counters

    kinds = ("graph_break", "unimplemented")
    before = {kind: Counter(counters[kind]) for kind in kinds}
    reasons: list[str] = []
    yield reasons
    for kind in kinds:
        for text, count in counters[kind].items():
            what, *more = map(str.strip, str(text).strip().splitlines())
            why = [line.removeprefix("Explanation: ") for line in more if line.startswith("Explanation: ")]
            if count > before[kind][text]:
                reasons.append(": ".join([what, *why[:1]]))


@contextmanager
def own_errors() -> Iterator[None]:
    """A scope in which an error of ours that arises while compiling arrives as itself, not wrapped by Dynamo."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, FxQuantError):
            raise error.inner_exception from None
        raise


def largest_over_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    """The elementwise maximum of `x` over the ranks of a named process group, in a form that graphs can hold."""
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x, "max", group)  # type: ignore[arg-type, no-any-return, unused-ignore]


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A scope without autocast; of meta tensors, which nothing casts, any scope."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


def artificial_source(name: str) -> Any:
    """What Dynamo wants to know of an input that no Python frame holds."""
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def mark_static(node: fx.Node) -> None:
    """Says of an input that it lies at one address in every call, so that a CUDA graph may write it."""
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def must_save(node: fx.Node) -> None:
    """Forbids the partitioner to compute a node of a joint graph again in the backward, checkpointed or not."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def must_recompute(node: fx.Node) -> None:
    """Has the partitioner compute a node of a joint graph in the backward, of what is saved anyway."""
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def compiles_backwards() -> bool:
    """Whether compiled autograd captures backwards; it knows nothing of tensors saved by `save_without_version`."""
    import torch._dynamo.compiled_autograd as compiled_autograd
    import torch._dynamo.config as dynamo_config

    return bool(dynamo_config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def save_without_version(node: fx.Node) -> None:
    """Has a forward save a tensor that backwards may change, which autograd would refuse to another backward."""
    node.meta["saved_tensor_with_no_vc_check"] = True


@contextmanager
def recomputable(operators: Iterable[OpOverloadPacket]) -> Iterator[None]:
    """A scope in which the partitioner takes these operators for elementwise ones, which it may compute again."""
    import torch._functorch.partitioners as partitioners

    known = partitioners.get_default_op_list
    more = [*operators]

    def with_more() -> Any:
        types = known()
        fusible, again = (type(ops)([*ops, *more]) for ops in (types.fusible_ops, types.recomputable_ops))
        return replace(types, fusible_ops=fusible, recomputable_ops=again)

    with mock.patch.object(partitioners, "get_default_op_list", with_more):
        yield


def copy_sources(gm: fx.GraphModule, copy: fx.GraphModule) -> None:
    """Gives a changed copy of a captured graph what tells AOTAutograd that it was captured.

    Without it the parameters are not known as such, and the partitioner saves what is made of them.
    """
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source


def static_fakes(tensors: Sequence[torch.Tensor], example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors as fakes of the mode that the inputs are in, with sizes that are not symbolic."""
    mode = detect_fake_mode(list(example_inputs))
    return list(tensors) if mode is None else [mode.from_tensor(t, static_shapes=True) for t in tensors]


def declare_written(kernel: Any, written: Callable[[Mapping[str, Any]], list[str]]) -> None:
    """Says which arguments a Triton kernel writes, given all of them by name.

    torch's own analysis translates the kernel again for every launch in a graph, and before 2.13 gives up at inline
    assembly and takes every argument for written.
    """
    if not _WRITTEN:
        wrap: Any = importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")
        name = "identify_mutated_tensors" if torch_version() < (2, 13) else "identify_accessed_tensors"
        analyse = getattr(wrap, name)

        @functools.wraps(analyse)
        def analyse_undeclared(kernel: Any, arguments: Any, *rest: Any) -> Any:
            known = _declared(kernel)
            if known is None:
                return analyse(kernel, arguments, *rest)
            return known(arguments) if torch_version() < (2, 13) else _accesses(arguments, known(arguments))

        setattr(wrap, name, analyse_undeclared)
    _WRITTEN[kernel] = written


def _accesses(arguments: Mapping[str, Any], written: list[str]) -> Any:
    """What torch 2.13 wants to know of a launch: it may read every tensor, and writes those named."""
    from torch._higher_order_ops.triton_kernel_wrap import TensorAccesses
    from torch._inductor.dependencies import Dep, ReadWrites, StarDep
    from torch._inductor.ir import TensorBox
    from torch.utils._ordered_set import OrderedSet

    tensors = [name for name, value in arguments.items() if isinstance(value, (torch.Tensor, TensorBox))]
    reads, writes = (OrderedSet[Dep](StarDep(name) for name in names) for names in (tensors, written))
    return TensorAccesses(ReadWrites(reads=reads, writes=writes, index_exprs=OrderedSet()), can_fuse_epilogue=False)


_WRITTEN: dict[Any, Callable[[Mapping[str, Any]], list[str]]] = {}


def _declared(kernel: Any) -> Callable[[Mapping[str, Any]], list[str]] | None:
    """What was declared of a kernel, which may be inside the autotuner that options such as num_warps make of it."""
    while kernel not in _WRITTEN:
        if not hasattr(kernel, "configs"):
            return None
        kernel = kernel.fn
    return _WRITTEN[kernel]


@contextmanager
def replacements(gm: fx.GraphModule) -> Iterator[dict[str, str]]:
    """A scope that notes, by name, which node of a graph took the place of which."""
    names: dict[str, str] = {}

    def note(old: fx.Node, new: str, user: fx.Node) -> None:
        names[old.name] = new

    with gm._set_replace_hook(note):
        yield names


def written_by(launch: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch writes, from the arguments of its `triton_kernel_wrapper_mutation`."""
    table = importlib.import_module("torch._higher_order_ops.triton_kernel_wrap").kernel_side_table
    kernel = table.get_kernel(launch["kernel_idx"])
    declared = _declared(kernel)
    assert declared is not None, kernel
    return declared(launch["kwargs"])


@contextmanager
def triton_workspace(device: torch.device) -> Iterator[None]:
    """A scope in which kernels that make TMA descriptors can be launched eagerly: they need memory for them."""
    from triton.runtime._allocation import _allocator

    token = _allocator.set(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    try:
        yield
    finally:
        _allocator.reset(token)


def operator_library(namespace: str, *, more: bool = False) -> Any:
    """The library that defines the operators of a namespace, or with `more` one that adds to them."""
    return torch.library.Library(namespace, "FRAGMENT" if more else "DEF")  # type: ignore[no-untyped-call]


def fake_kernel(library: Any, name: str) -> Callable[[_Kernel], _Kernel]:
    """Registers the decorated function as what an operator does to fake tensors."""
    return torch.library.register_fake(f"{library.ns}::{name}", lib=library)  # type: ignore[no-any-return]


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scale) v by cuDNN: o [B, H, Sq, D], and what `cudnn_attention_backward` takes as lse."""
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return o.contiguous(), lse.reshape(q.shape[:3])


def cudnn_attention_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, *,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) of softmax(q k^T * scale) v by cuDNN; all [B, H, S, D] but lse [B, Hq, Sq], the natural logarithm.

    k and v may have fewer heads than q.
    """
    absent: Any = None  # what an attention without bias, dropout and ragged lengths has none of
    none = torch.zeros([], dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        do, q, k, v, o, lse.unsqueeze(-1), none, none, absent, absent, absent, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip


def is_hopper(device: torch.device) -> bool:
    """Whether a CUDA device has compute capability 9.x."""
    return capability(device)[0] == 9


@functools.cache
def knows_gluon() -> bool:
    """Whether Triton has the Gluon that a kernel here is written in: it is experimental, and changes with versions."""
    import triton

    return bool(triton.__version__.startswith("3.6."))


def launches_early(device: torch.device) -> bool:
    """Whether Inductor launches kernels that wait for the one before them while that runs: on Hopper, from Python.

    Not where its own are, which take it that the kernel before them began after the one before that had ended.
    """
    return is_hopper(device) and not inductor_config.triton.enable_pdl and not inductor_config.cpp_wrapper


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device, (0, 0) for others; without a driver, the first that makes FP8."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (8, 9)


def card_name(device: torch.device) -> str:
    """The name of a CUDA device, or the type of another; without a driver ``cuda``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type


def converts_to_fp8(device: torch.device) -> bool:
    """Whether a CUDA device has instructions that make FP8 (compute capability 8.9); without a driver, that it may."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)


def upper_bound(size: int | torch.SymInt) -> int:
    """The most that a symbolic size may be, by the range that its program was exported with."""
    if isinstance(size, int):
        return size
    most = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(most) if most.is_Integer else sys.maxsize


def size_hint(size: int | torch.SymInt) -> int:
    """The number a symbolic size had in the example; 1 where there is none."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return 1 if hint is None else int(hint)


def fake_mode_of(*trees: Any) -> FakeTensorMode | None:
    """The mode of the first fake tensor found: that of the captured graph, not the one set up for the backend."""
    fakes = (leaf for leaf in tree_leaves(trees) if isinstance(leaf, FakeTensor))
    return next((fake.fake_mode for fake in fakes), None)


def faking(*values: Any) -> AbstractContextManager[Any]:
    """The fake mode in force, or that of the values of a graph's nodes; any scope where these are real tensors."""
    return detect_fake_mode(list(values)) or nullcontext()


__all__ = [
    "OLDEST_TORCH",
    "STATIC_LAUNCH",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "RunsBesideDynamo",
    "ScalingType",
    "aot_autograd",
    "artificial_source",
    "capability",
    "card_name",
    "changed_inputs",
    "compile_package",
    "compile_to_look",
    "compile_with_inductor",
    "compiles_backwards",
    "converts_to_fp8",
    "copy_sources",
    "cudnn_attention",
    "cudnn_attention_backward",
    "declare_written",
    "detect_fake_mode",
    "enable_python_dispatcher",
    "enter_autocast",
    "exit_autocast",
    "fake_kernel",
    "fake_mode_of",
    "faking",
    "flex_attention_op",
    "force_stride_order",
    "get_hash_for_files",
    "graph_breaks",
    "in_backward",
    "inductor_cache",
    "inductor_config",
    "inductor_decompositions",
    "inductor_mode_options",
    "is_hopper",
    "is_inductor_option",
    "is_traceable_wrapper_subclass",
    "is_tracing",
    "knows_gluon",
    "largest_over_ranks",
    "launches_early",
    "lazy_format_graph_code",
    "make_boxed_func",
    "make_fx",
    "mark_static",
    "min_cut_rematerialization_partition",
    "must_recompute",
    "must_save",
    "no_autocast",
    "no_modes",
    "operator_library",
    "own_errors",
    "recomputable",
    "replacements",
    "save_without_version",
    "size_hint",
    "static_fakes",
    "statically_known_true",
    "tag_activation_checkpoint",
    "torch_version",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "triton_kernel_wrapper_functional",
    "triton_kernel_wrapper_mutation",
    "triton_workspace",
    "unguarded_sizes",
    "unlimited_recompiles",
    "upper_bound",
    "written_by",
]
