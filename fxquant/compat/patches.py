"""Changes to torch, each for a defect of some of its versions, and compilations under them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._ops import OpOverloadPacket

from fxquant.compat import torch_version
from fxquant.compat.private import inductor_config

STATIC_LAUNCH = "static_launch_user_defined_triton_kernels"
"""Inductor's setting by which a Triton kernel that it was given is launched and cached as one that it wrote."""


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


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]) -> Any:
    """`compile_fx` with settings that hold for the forward and the (possibly later) backward compilation."""
    from torch._inductor.compile_fx import compile_fx

    _keep_loops_that_do_not_split()
    _launch_early()
    _tell_workers_of_static_launches()
    return compile_fx(gm, list(inputs), config_patches=dict(patches))


def compile_package(program: torch.export.ExportedProgram, path: str, settings: Mapping[str, Any]) -> str:
    """`torch._inductor.aoti_compile_and_package` with what Inductor's C++ backend needs for quantized graphs."""
    from torch._inductor import aoti_compile_and_package

    _keep_loops_that_do_not_split()
    if torch_version() < (2, 13):
        _declare_float8()
    return aoti_compile_and_package(program, package_path=path, inductor_configs=dict(settings))


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


_WRITTEN: dict[Any, Callable[[Mapping[str, Any]], list[str]]] = {}


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


def written_by(launch: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that a launch writes, from the arguments of its `triton_kernel_wrapper_mutation`."""
    table = importlib.import_module("torch._higher_order_ops.triton_kernel_wrap").kernel_side_table
    kernel = table.get_kernel(launch["kernel_idx"])
    declared = _declared(kernel)
    assert declared is not None, kernel
    return declared(launch["kwargs"])


def _declared(kernel: Any) -> Callable[[Mapping[str, Any]], list[str]] | None:
    """What was declared of a kernel, which may be inside the autotuner that options such as num_warps make of it."""
    while kernel not in _WRITTEN:
        if not hasattr(kernel, "configs"):
            return None
        kernel = kernel.fn
    return _WRITTEN[kernel]


def _accesses(arguments: Mapping[str, Any], written: list[str]) -> Any:
    """What torch 2.13 wants to know of a launch: it may read every tensor, and writes those named."""
    from torch._higher_order_ops.triton_kernel_wrap import TensorAccesses
    from torch._inductor.dependencies import Dep, ReadWrites, StarDep
    from torch._inductor.ir import TensorBox
    from torch.utils._ordered_set import OrderedSet

    tensors = [name for name, value in arguments.items() if isinstance(value, (torch.Tensor, TensorBox))]
    reads, writes = (OrderedSet[Dep](StarDep(name) for name in names) for names in (tensors, written))
    return TensorAccesses(ReadWrites(reads=reads, writes=writes, index_exprs=OrderedSet()), can_fuse_epilogue=False)


__all__ = [
    "STATIC_LAUNCH",
    "compile_package",
    "compile_with_inductor",
    "declare_written",
    "recomputable",
    "written_by",
]
