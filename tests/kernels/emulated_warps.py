"""Gluon for kernels whose warps have different work, in NumPy: a thread for each group of warps, memory that is shared.

What is asynchronous happens as late as it may: a product when it is waited for, a copy from shared memory too. So what
overwrites operands too early, or reads a result before it waited, gives wrong numbers; what never ends, an error.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulated_gluon import Array, Pointer, load
from torch import Tensor

RING = Path(__file__).parents[2] / "kernels" / "gluon_ring.py"
_SECONDS = 20
"""The longest that a group of warps waits for another."""


class Barrier:
    """An mbarrier: a phase ends once all have arrived, and all bytes that were announced."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def update(self, arrivals: int, more_bytes: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += more_bytes
            assert self.missing >= 0, "more arrivals than were announced"
            if not self.missing and not self.bytes:
                self.phase ^= 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        """Waits until the phase of that parity has ended."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != int(parity), _SECONDS), "a barrier that nothing ends"


class Shared:
    """Buffers in shared memory: arrays, or barriers."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def index(self, i: Any) -> Any:
        part = self.memory[int(i)]
        return part if isinstance(part, Barrier) else Shared(part)

    def slice(self, first: int, length: int) -> Shared:
        return Shared(self.memory[first : first + length])

    def load(self, _: Any) -> Array:
        return np.array(self.memory).view(Array)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.transpose(order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.memory.reshape(shape))

    def store(self, value: Any) -> None:
        self.memory[...] = value


class Descriptor:
    """The boxes of what lies in memory from `base` on: zeros are read past its ends, and nothing is written there."""

    def __init__(
        self, x: Tensor, box: Sequence[int], shape: Sequence[int] = (), strides: Sequence[int] = (), base: int = 0
    ) -> None:
        self.memory, self.box, self.base = x.view(-1), box, base
        self.shape, self.strides = shape or x.shape, strides or x.stride()
        self.item, self.dtype, self.layout = x.element_size(), np.float32, None

    def places(self, first: Sequence[Any]) -> tuple[Any, Any]:
        """Returns where the elements of a box lie, and which of them are no further than the ends."""
        at, within = np.int64(self.base), np.bool_(True)
        for axis, length in enumerate(self.box):
            i = int(first[axis]) + np.arange(length).reshape([-1] + [1] * (len(self.box) - axis - 1))
            within, at = within & (i >= 0) & (i < self.shape[axis]), at + i * self.strides[axis]
        assert (np.where(within, at, 0) >= 0).all() and (np.where(within, at, 0) < self.memory.numel()).all()
        return at, within

    def read(self, first: Sequence[Any]) -> Any:
        assert int(first[-1]) * self.item % 16 == 0, "a copy begins at a multiple of 16 bytes of a row, or Hopper stops"
        at, within = self.places(first)
        values = self.memory.float()[torch.from_numpy(np.where(within, at, 0))]
        return torch.where(torch.from_numpy(within), values, 0).numpy()

    def write(self, first: Sequence[Any], value: Any) -> None:
        at, within = self.places(first)
        self.memory[torch.from_numpy(at[within])] = torch.from_numpy(np.array(value)[within]).to(self.memory.dtype)


class Group(threading.local):
    """The copies and products that a group of warps has begun."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []


class Product:
    """A product that tensor cores compute meanwhile."""

    def __init__(self, a: Shared, b: Shared) -> None:
        self.a, self.b, self.result = a, b, None

    def finish(self) -> None:
        self.result = (self.a.memory.astype(np.float64) @ self.b.memory.astype(np.float64)).astype(np.float32)


def emulated(monkeypatch: pytest.MonkeyPatch, path: Path) -> ModuleType:
    """The module of a kernel in Gluon, whose functions are Python's; `run` runs a kernel for a number of programs."""
    group, program = Group(), SimpleNamespace(at=0, count=1)

    def allocate(kind: Any, shape: Sequence[int], _: Any) -> Shared:
        if kind == "barrier":
            return Shared([Barrier() for _ in range(shape[0])])
        return Shared(np.full(shape, np.nan, np.float32))

    def copy_in(source: Descriptor, place: Sequence[Any], barrier: Barrier, to: Shared) -> None:
        to.store(source.read(place))
        barrier.update(0, -to.memory.size * source.item)

    def copy_out(to: Descriptor, place: Sequence[Any], source: Shared) -> None:
        group.stores.append(lambda: to.write(place, source.memory))

    def store_wait(pending: int) -> None:
        while len(group.stores) > pending:
            group.stores.pop(0)()

    def multiply(a: Shared, b: Shared, _: Any, use_acc: bool, is_async: bool) -> Product:
        assert is_async and not use_acc
        group.products.append(Product(a, b))
        return group.products[-1]

    def wait(pending: int, deps: list[Product]) -> Any:
        while len(group.products) > pending:
            group.products.pop(0).finish()
        (product,) = deps
        return np.array(product.result).view(Array)

    def specialize(parts: Sequence[tuple[Any, Any]], warps: Sequence[int], registers: Sequence[int]) -> None:
        assert len(warps) == len(registers) == len(parts) - 1
        errors: list[BaseException] = []

        def run(function: Any, arguments: Any) -> None:
            try:
                function(*arguments)
                assert not group.products and not group.stores, "something was not waited for"
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    barriers = SimpleNamespace(
        MBarrierLayout=lambda: None, init=lambda barrier, count: barrier.init(count),
        wait=lambda barrier, parity: barrier.wait(parity), arrive=lambda barrier: barrier.update(1, 0),
        expect=lambda barrier, size: barrier.update(1, size),
    )  # fmt: skip
    copies = SimpleNamespace(
        async_copy_global_to_shared=copy_in, async_copy_shared_to_global=copy_out, store_wait=store_wait
    )
    language = SimpleNamespace(
        constexpr=lambda x: x, static_range=range, static_assert=lambda *_: None, load=load,
        float8e4nv="float8e4nv", bfloat16="bfloat16", float16="float16", float32=np.float32, int64="barrier",
        dtype=object, program_id=lambda _: program.at, num_programs=lambda _: program.count,
        minimum=np.minimum, where=lambda condition, a, b: a if condition else b, allocate_shared_memory=allocate,
        arange=lambda first, end, _: np.arange(first, end).view(Array), warp_specialize=specialize,
        full=lambda shape, value, *_: np.full(shape, value, np.float32).view(Array),
        inline_asm_elementwise=lambda text, constraints, values, **_: values[0] if values else None,
        NVMMADistributedLayout=lambda *_: None, SliceLayout=lambda *_: None, NVMMASharedLayout=None,
    )  # fmt: skip
    hopper = {
        "fence_async_shared": lambda: None, "mbarrier": barriers, "tma": copies, "warpgroup_mma": multiply,
        "warpgroup_mma_wait": wait,
    }  # fmt: skip

    def jit(*function: Any, **_: Any) -> Any:
        return function[0] if function else lambda f: f

    for name, members in (
        ("triton", {"__file__": "", "knobs": None}), ("triton.experimental", {}),
        ("triton.experimental.gluon", {"jit": jit, "language": language}),
        ("triton.experimental.gluon.language", vars(language)), ("triton.experimental.gluon.language.nvidia", {}),
        ("triton.experimental.gluon.language.nvidia.hopper", hopper), ("triton.experimental.gluon.nvidia", {}),
        ("triton.experimental.gluon.nvidia.hopper", {"TensorDescriptor": Descriptor}),
    ):  # fmt: skip
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["triton.experimental"].gluon = sys.modules["triton.experimental.gluon"]  # type: ignore[attr-defined]
    for name, file in (("fxquant.kernels.gluon_ring", RING), ("emulated_warps_kernel", path)):
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        kernel = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, kernel)
        spec.loader.exec_module(kernel)

    def run(function: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        program.count = programs
        for program.at in range(programs):
            function(*arguments, **constants)

    vars(kernel).update(run=run, Descriptor=Descriptor, Pointer=Pointer)
    return kernel
