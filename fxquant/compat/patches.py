"""Changes to torch, each for a defect of some of its versions, and compilations under them.

A change stays for the life of the process, but acts only where a quantized graph is compiled, or a quantized weight is
kept; everywhere else the function does what it did. Those that mend what Inductor makes of a graph ask for
`QuantizedGraphPass`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops import triton_kernel_wrap
from torch._ops import OpOverloadPacket

from fxquant.compat import fakes, flops, slices, torch_version
from fxquant.compat.inside import copied, memory
from fxquant.compat.patch import Patch, apply
from fxquant.compat.private import CheckpointPolicy, inductor_config, own_errors

STATIC_LAUNCH = "static_launch_user_defined_triton_kernels"
"""Inductor's setting by which a Triton kernel that it was given is launched and cached as one that it wrote."""


def _split_or_leave(split: Callable[..., Any], scheduling: Any, nodes: Any) -> Any:
    states = [dict(vars(node)) for node in nodes]
    try:
        return split(scheduling, nodes)
    except AssertionError:
        for node, state in zip(nodes, states, strict=True):  # torch 2.11 fails after it has split the first
            vars(node).clear()
            vars(node).update(state)
        return nodes


def _splits_loops_by_assertion() -> bool:
    from torch._inductor.exc import InductorError

    def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (x.view(128, 2, 32) * x[:, :2, None]).view(128, 64)
        columns = (x.t().reshape(64, 4, 32) * x[:64, :4, None]).view(64, 128)
        return rows.to(torch.float8_e4m3fn), columns.to(torch.float8_e4m3fn)

    try:
        torch.compile(cast, dynamic=False)(torch.ones(128, 64))
    except InductorError as error:
        return isinstance(error.inner_exception, AssertionError)
    return False


LOOP_SPLIT = Patch(
    "torch._inductor.codegen.cpp",
    "CppScheduling.try_loop_split",
    defect="The C++ backend splits loops at a block's size. Of a row and a column quantization in one kernel the loops "
    "run in different orders, and it fails an assertion instead of leaving them whole.",
    upstream="https://github.com/pytorch/pytorch/issues/183370, whose pull request #183715 (torch 2.13) mends loops "
    "that come out different, but asserts that they go in alike",
    fixed_in=None,
    still_needed=_splits_loops_by_assertion,
    change=_split_or_leave,
)


def _define_early(
    define: Callable[..., Any], wrapper: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any
) -> Any:
    if "custom_kernel=True" in kernel_body and "'EARLY': True" in kernel_body:
        kernel_body = kernel_body.replace("triton_meta={", "triton_meta={'launch_pdl': True, ", 1)
    return define(wrapper, kernel_name, kernel_body, *args, **kwargs)


def _leaves_out(attribute: str) -> bool:
    """Returns True if Inductor defines a given Triton kernel without this attribute."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    return attribute not in inspect.getsource(PythonWrapperCodegen.define_user_defined_triton_kernel)


EARLY_LAUNCH = Patch(
    "torch._inductor.codegen.wrapper",
    "PythonWrapperCodegen.define_kernel",
    defect="Only Inductor's own kernels get the attribute by which a kernel is launched while the one before it still "
    "runs. A given kernel whose `EARLY` is true waits for that one itself; without the attribute the wait returns at "
    "once.",
    upstream="https://github.com/pytorch/pytorch/pull/187028, since which (torch 2.14) a launch may name the attribute",
    fixed_in=None,
    still_needed=functools.partial(_leaves_out, "launch_pdl"),
    change=_define_early,
)


def _define_with_fusion(
    define: Callable[..., Any], wrapper: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any
) -> Any:
    names = {getattr(kernel, "__name__", "") for kernel in _written}
    if "custom_kernel=True" in kernel_body and kernel_name.rpartition("_")[0] in names:
        kernel_body = kernel_body.replace("triton_meta={", "triton_meta={'enable_fp_fusion': True, ", 1)
    return define(wrapper, kernel_name, kernel_body, *args, **kwargs)


FUSED_ARITHMETIC = Patch(
    "torch._inductor.codegen.wrapper",
    "PythonWrapperCodegen.define_kernel",
    defect="Inductor tells Triton of its own kernels alone whether a product and a sum may become one instruction. For "
    "others Triton 3.9 warns that 3.10 will have another default, with which the last bits of results change.",
    upstream="none found; the other default is that of triton-lang/triton#11270",
    fixed_in=None,
    still_needed=functools.partial(_leaves_out, "enable_fp_fusion"),
    change=_define_with_fusion,
)


def _submit_with_setting(submit: Callable[..., Any], pool: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor.runtime.compile_tasks import _worker_compile_triton

    if run is _worker_compile_triton:
        load, environment, settings = args
        args = (load, environment, {**settings, STATIC_LAUNCH: getattr(inductor_config, STATIC_LAUNCH)})
    return submit(pool, run, *args, **kwargs)


def _leaves_workers_without_setting() -> bool:
    return STATIC_LAUNCH not in inspect.getsource(importlib.import_module("torch._inductor.async_compile"))


WORKER_SETTING = Patch(
    "torch._inductor.compile_worker.subproc_pool",
    "SubprocPool.submit",
    defect="The processes that compile kernels are not told of `STATIC_LAUNCH`.",
    upstream="https://github.com/pytorch/pytorch/pull/153725, which adds the setting; #153382 tells of its sibling",
    fixed_in=None,
    still_needed=_leaves_workers_without_setting,
    change=_submit_with_setting,
)


def _write_float8_headers(write: Callable[..., Any], wrapper: Any) -> None:
    write(wrapper)
    for name in ("e4m3fn", "e5m2"):
        wrapper.header.splice(f"#include <c10/util/Float8_{name}.h>")


def _leaves_float8_undeclared() -> bool:
    shim = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch/c/shim.h"
    return "Float8_e4m3fn.h" not in shim.read_text()


FLOAT8_HEADERS = Patch(
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "CppWrapperCpu.write_header",
    defect="Packages for a CPU cannot hold 8-bit floats: the C++ that is written names their types undeclared.",
    upstream="https://github.com/pytorch/pytorch/pull/178120",
    fixed_in=(2, 13),
    still_needed=_leaves_float8_undeclared,
    change=_write_float8_headers,
)


def _ask_other_inputs(write: Callable[..., Any], wrapper: Any) -> None:
    inputs = wrapper.get_graph_inputs
    asked = {name: x for name, x in inputs().items() if not (hasattr(x, "get_dtype") and x.get_dtype() in _FLOAT8)}
    wrapper.get_graph_inputs = lambda: asked
    try:
        write(wrapper)
    finally:
        wrapper.get_graph_inputs = inputs


def _ask_other_results(write: Callable[..., Any], wrapper: Any, *args: Any) -> None:
    lines = wrapper.wrapper_call._lines
    first = len(lines)
    write(wrapper, *args)
    question = "if isinstance(var, torch.Tensor):"
    lines[first:] = [
        line.replace(question, f"{question[:-1]} and var.dtype not in ({_NAMES}):") if isinstance(line, str) else line
        for line in lines[first:]
    ]


def _ask_other_arguments(write: Callable[..., Any], kernel: Any) -> None:
    from torch._inductor.virtualized import V

    lines = V.graph.wrapper_code.lines
    first = len(lines)
    write(kernel)
    _, names, signatures, *_ = kernel.args.python_argdefs()
    float8 = {name for name, what in zip(names, signatures, strict=True) if getattr(what, "dtype", None) in _FLOAT8}
    asks = [f"assert not {name}.is" for name in float8] + [f'check_inf_and_nan("{name}"' for name in float8]
    lines[first:] = [line for line in lines[first:] if not any(text in str(line) for text in asks)]


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NAMES = ", ".join(map(str, _FLOAT8))


def _cannot_ask_float8() -> bool:
    try:
        return any(torch.zeros(1).to(dtype).isinf().any().item() for dtype in _FLOAT8)
    except NotImplementedError:
        return True


def _nan_assertion(module: str, function: str, change: Callable[..., Any]) -> Patch:
    return Patch(
        f"torch._inductor.codegen.{module}",
        function,
        defect="Code with the setting `nan_asserts` asks 8-bit floats, such as payloads that a backward takes, whether "
        "they are infinite, for which torch has no kernel.",
        upstream="https://github.com/pytorch/pytorch/issues/149002, mended by #197444",
        fixed_in=(2, 15),
        still_needed=_cannot_ask_float8,
        change=change,
    )


NAN_ASSERTIONS = (
    _nan_assertion("wrapper", "PythonWrapperCodegen.codegen_input_nan_asserts", _ask_other_inputs),
    _nan_assertion("wrapper", "PythonWrapperCodegen.generate_return", _ask_other_results),
    _nan_assertion("cpp_wrapper_cpu", "CppWrapperCpu.codegen_input_nan_asserts", _ask_other_inputs),
    _nan_assertion("triton", "TritonKernel.codegen_nan_check", _ask_other_arguments),
)


_Kernel = TypeVar("_Kernel")
_written: dict[Any, Callable[[Mapping[str, Any]], list[str]]] = {}


def _declared(kernel: Any) -> Callable[[Mapping[str, Any]], list[str]] | None:
    """Returns the declaration of a kernel, also of one in the autotuner that options such as num_warps make."""
    while kernel not in _written:
        if not hasattr(kernel, "configs"):
            return None
        kernel = kernel.fn
    return _written[kernel]


def _accesses(arguments: Mapping[str, Any], written: list[str]) -> Any:
    """Returns what torch 2.13 asks of a launch: it may read every tensor, and writes those named."""
    from torch._inductor.dependencies import Dep, ReadWrites, StarDep
    from torch._inductor.ir import TensorBox
    from torch.utils._ordered_set import OrderedSet

    tensors = [name for name, value in arguments.items() if isinstance(value, (torch.Tensor, TensorBox))]
    reads, writes = (OrderedSet[Dep](StarDep(name) for name in names) for names in (tensors, written))
    accesses = ReadWrites(reads=reads, writes=writes, index_exprs=OrderedSet())
    return triton_kernel_wrap.TensorAccesses(accesses, can_fuse_epilogue=False)


def _state_written(analyse: Callable[..., Any], kernel: Any, arguments: Mapping[str, Any], *_: Any) -> Any:
    declared = _declared(kernel)
    assert declared is not None, kernel
    return declared(arguments) if torch_version() < (2, 13) else _accesses(arguments, declared(arguments))


def _analyses_every_launch() -> bool:
    return "mutation_analysis" not in inspect.getsource(triton_kernel_wrap)


WRITTEN_ARGUMENTS = Patch(
    "torch._higher_order_ops.triton_kernel_wrap",
    "identify_mutated_tensors" if torch_version() < (2, 13) else "identify_accessed_tensors",
    defect="To see which arguments a kernel writes torch translates it again for every launch in a graph, and before "
    "2.13 it gives up at inline assembly and takes every argument for written.",
    upstream="https://github.com/pytorch/pytorch/pull/193227, open; #148043 is about inline assembly",
    fixed_in=None,
    still_needed=_analyses_every_launch,
    change=_state_written,
    acts=lambda kernel, *_: _declared(kernel) is not None,
)


def writes(*names: str, **flags: str) -> Callable[[_Kernel], _Kernel]:
    """Declares the arguments that a Triton kernel writes: `names`, and those of `flags` where another is set.

    An argument is set if it is neither None nor False.
    """

    def written(arguments: Mapping[str, Any]) -> list[str]:
        values = {name: arguments.get(flag) for name, flag in flags.items()}
        return [*names, *(name for name, value in values.items() if value is not None and value is not False)]

    def declare(kernel: _Kernel) -> _Kernel:
        apply(WRITTEN_ARGUMENTS)
        _written[kernel] = written
        return kernel

    return declare


def written_by(launch: Mapping[str, Any]) -> list[str]:
    """Returns the names of the arguments that a launch writes, from those of its `triton_kernel_wrapper_mutation`."""
    table = triton_kernel_wrap.kernel_side_table
    kernel = table.get_kernel(launch["kernel_idx"])
    declared = _declared(kernel)
    assert declared is not None, kernel
    return declared({**launch["kwargs"], **table.get_constant_args(launch["constant_args_idx"])})


_recomputable: ContextVar[tuple[OpOverloadPacket, ...]] = ContextVar("recomputable", default=())


def _list_with_more(op_list: Callable[[], Any]) -> Any:
    types, more = op_list(), _recomputable.get()
    fusible, again = (type(ops)([*ops, *more]) for ops in (types.fusible_ops, types.recomputable_ops))
    return replace(types, fusible_ops=fusible, recomputable_ops=again)


def _bars_custom_operators() -> bool:
    names = [*inspect.signature(min_cut_rematerialization_partition).parameters, *torch.Tag.__members__]
    return not any("recomput" in name for name in names)


RECOMPUTABLE = Patch(
    "torch._functorch.partitioners",
    "get_default_op_list",
    defect="The partitioner never computes a custom operator again, and no operator can say that it is elementwise.",
    upstream="https://github.com/pytorch/pytorch/pull/167083, closed",
    fixed_in=None,
    still_needed=_bars_custom_operators,
    change=_list_with_more,
    acts=lambda: bool(_recomputable.get()),
)


@contextmanager
def recomputable(operators: Iterable[OpOverloadPacket]) -> Iterator[None]:
    """Lets the partitioner compute these operators again in this scope, as it does elementwise ones."""
    apply(RECOMPUTABLE)
    token = _recomputable.set((*operators,))
    try:
        yield
    finally:
        _recomputable.reset(token)


_BESIDE = "_tensors_no_vc_check"
"""The attribute of a call of a compiled forward with the tensors that it keeps beside those that autograd saves."""


def _with_tensors_beside(
    call: Callable[..., Any], compiler: Any, inputs: Any, saved: Any, tensors: Any, context: Any, node: Any, *more: Any
) -> Any:
    def get(function: Callable[..., Any], *args: Any) -> Any:
        return compiler.fx_tracer.create_proxy("call_function", function, args, {})

    beside = get(getattr, context, _BESIDE)
    all_saved = [*saved, *(get(operator.getitem, beside, i) for i in range(len(getattr(node, _BESIDE))))]
    return call(compiler, inputs, all_saved, tensors, context, node, *more)


def _loses_tensors_beside() -> bool:
    return _BESIDE not in inspect.getsource(importlib.import_module("torch._dynamo.compiled_autograd"))


TENSORS_BESIDE = Patch(
    "torch._dynamo.compiled_autograd",
    "AutogradCompilerInstance.proxy_call_aot_backward",
    defect="Compiled autograd calls a compiled backward with the tensors that autograd has saved, and without those "
    "that its forward keeps beside them, so that the inputs of the backward run out.",
    upstream="https://github.com/pytorch/pytorch/pull/171353 (torch 2.11), which keeps them",
    fixed_in=None,
    still_needed=_loses_tensors_beside,
    change=_with_tensors_beside,
    acts=lambda *args: bool(getattr(args[5], _BESIDE, ())),
)


def save_beside_autograd(node: fx.Node) -> None:
    """Lets a forward keep a tensor for its backward as an attribute of the call.

    Autograd then neither shows it to hooks on saved tensors nor refuses a second backward because the first has
    written into it.
    """
    apply(TENSORS_BESIDE)
    node.meta["saved_tensor_with_no_vc_check"] = True


_SAVED = "fxquant_saved"
"""The key under which a node's meta says that it must be saved, by whatever budget."""


def _choose_also_marked(choose: Callable[..., Any], graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
    chosen = choose(graph, *args, **kwargs)
    return [*chosen, *(node for node in graph.nodes if node.meta.get(_SAVED) and node not in chosen)]


def _saves_inputs_alone() -> bool:
    choose: Any = inspect.unwrap(importlib.import_module("torch._functorch.partitioners").choose_saved_values_set)
    inputs: list[fx.Node] = []
    return choose(fx.Graph(), SimpleNamespace(inputs=inputs), 0) is inputs


MEMORY_BUDGET = Patch(
    "torch._functorch.partitioners",
    "choose_saved_values_set",
    defect="Under an activation memory budget of 0 the partitioner saves inputs alone, and between 0 and 1 not what an "
    "operator with several results gives, also where they are marked as `MUST_SAVE`.",
    upstream="none found",
    fixed_in=None,
    still_needed=_saves_inputs_alone,
    change=_choose_also_marked,
    acts=lambda graph, nodes, memory_budget=1: memory_budget != 1,
)


def must_save(node: fx.Node) -> None:
    """Forbids the partitioner to compute a node of a joint graph again, checkpointed or not."""
    apply(MEMORY_BUDGET)
    node.meta.update({"recompute": CheckpointPolicy.MUST_SAVE, _SAVED: True})


_SCALED_MM = torch.ops.aten._scaled_mm_v2.default


def _by_torchs_operator(call: Callable[..., Any], lowering: Any, target: Any, args: Any, kwargs: Any) -> Any:
    lowerings: Any = importlib.import_module("torch._inductor.lowering")
    args, kwargs = lowerings.constrain_to_fx_strides(lowering.current_node, *args, **kwargs)
    return lowerings.fallback_handler(target, add_to_fallback_set=False)(*args, **kwargs)


SWIZZLED_SCALES = Patch(
    "torch._inductor.graph",
    "GraphLowering.call_function",
    defect="Inductor has no GEMM with scales in the order of Blackwell's tensor cores: torch 2.13 stops at an "
    "assertion that no scale is swizzled.",
    upstream="https://github.com/pytorch/pytorch/pull/186384",
    fixed_in=(2, 14),
    still_needed=lambda: not hasattr(importlib.import_module("torch._inductor.kernel.mm"), "scaled_mm_v2_fallback"),
    change=_by_torchs_operator,
    acts=lambda lowering, target, args, kwargs: target is _SCALED_MM and any(map(any, (args[4], args[7]))),
)


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]) -> Any:
    """Calls `compile_fx` with settings that hold for the forward and the (possibly later) backward compilation."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    for patch in (
        LOOP_SPLIT, EARLY_LAUNCH, FUSED_ARITHMETIC, WORKER_SETTING, *NAN_ASSERTIONS, TENSORS_BESIDE, SWIZZLED_SCALES,
        fakes.VALUES, fakes.LAUNCHES,
    ):  # fmt: skip
        apply(patch)
    # around each half, since a backward may be compiled when it runs first
    compile_half = own_errors()(compile_fx_inner)
    return compile_fx(gm, list(inputs), compile_half, config_patches=dict(patches))


def compile_package(program: torch.export.ExportedProgram, path: str, settings: Mapping[str, Any]) -> str:
    """Calls `torch._inductor.aoti_compile_and_package`, with changes to its C++ backend for quantized graphs."""
    from torch._inductor import aoti_compile_and_package

    for patch in (LOOP_SPLIT, FUSED_ARITHMETIC, FLOAT8_HEADERS, *NAN_ASSERTIONS):
        apply(patch)
    return aoti_compile_and_package(program, package_path=path, inductor_configs=dict(settings))


PATCHES = (
    LOOP_SPLIT, EARLY_LAUNCH, FUSED_ARITHMETIC, WORKER_SETTING, FLOAT8_HEADERS, *NAN_ASSERTIONS, WRITTEN_ARGUMENTS,
    RECOMPUTABLE, TENSORS_BESIDE, MEMORY_BUDGET, SWIZZLED_SCALES, fakes.VALUES, fakes.LAUNCHES, *memory.NOTED,
    copied.GIVEN, copied.TAKEN, flops.FORWARD, flops.BACKWARD, slices.SLICES,
)  # fmt: skip
