"""Gluon for kernels that reach shared memory by instructions alone, in NumPy.

The source of a kernel runs as Python, its instructions as here.

A tensor has all elements of all lanes of all warps of a program. Of what an instruction takes, the last axis is the
elements of a lane, the one before it the lanes.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


class Array(np.ndarray[Any, Any]):
    """A tensor of a kernel."""

    def expand_dims(self, axis: int) -> Array:
        return np.expand_dims(self, axis).view(Array)

    def to(self, kind: Any, bitcast: bool = False) -> Array:
        return self.view(kind).view(Array) if bitcast else np.asarray(kind(self)).view(Array)


def bf16_bits(x: Any) -> Any:
    return torch.from_numpy(np.array(x, np.float32)).bfloat16().view(torch.int16).numpy().astype(np.uint32) & 0xFFFF


def of_bf16(bits: Any) -> Any:
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def of_e4m3(codes: Any) -> Any:
    return torch.from_numpy(np.array(codes, np.uint8)).view(torch.float8_e4m3fn).float().numpy()


def bfloat16(x: Any) -> Any:
    return of_bf16(bf16_bits(x))


class Pointer:
    """Places in a tensor's memory, in words of a dtype."""

    def __init__(self, memory: Any, kind: Any, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=kind)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.dtype.element_ty, self.at + more)

    @classmethod
    def of(cls, x: Tensor, words: Any = None) -> Pointer:
        """To a tensor, or to what it has in memory as integers."""
        if words is not None:
            return cls(x.view(torch.uint8).numpy().reshape(-1).view(words), words)
        kind = bfloat16 if x.dtype == torch.bfloat16 else np.float32
        return cls(x.float().numpy().reshape(-1), kind)

    def checked(self, mask: Any) -> tuple[Any, Any]:
        at, mask = np.broadcast_arrays(np.asarray(self.at), np.asarray(mask))
        assert ((at >= 0) & (at < self.memory.size) | ~mask).all(), "outside of a tensor"
        return np.where(mask, at, 0), mask


def load(pointer: Pointer, mask: Any = True, other: Any = 0, eviction_policy: str = "") -> Array:
    at, mask = pointer.checked(mask)
    return np.where(mask, pointer.memory[at], other).astype(pointer.memory.dtype).view(Array)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, mask = pointer.checked(np.broadcast_arrays(mask, pointer.at)[0])
    pointer.memory[at[mask]] = np.broadcast_to(value, at.shape)[mask]


def mma(a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """mma.m16n8k16 of registers [warps, 32]."""
    lane = np.arange(32)
    row, pair = lane // 4, lane % 4 * 2
    warps = a[0].shape[0]
    left, right, sums = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
    for i, (down, along) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        for half in range(2):
            left[:, row + down, pair + along + half] = of_bf16(a[i] >> 16 * half & 0xFFFF)
    for i in range(2):
        for half in range(2):
            right[:, pair + 8 * i + half, row] = of_bf16(b[i] >> 16 * half & 0xFFFF)
    places = [(row + i // 2 * 8, pair + i % 2) for i in range(4)]
    for i, (m, n) in enumerate(places):
        sums[:, m, n] = c[i]
    with np.errstate(all="ignore"):
        sums = (left @ right + sums).astype(np.float32)
    return [sums[:, m, n] for m, n in places]


def _halves(x: Any) -> list[Any]:
    return [x & 0xFFFF, x >> 16]


def _permuted(a: Any, b: Any, selector: int) -> Any:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    picked = [both >> np.uint64(8 * (selector >> 4 * i & 7)) & np.uint64(255) for i in range(4)]
    return sum(byte << np.uint64(8 * i) for i, byte in enumerate(picked)).astype(np.uint32)  # type: ignore[union-attr]


def _f16_of_e4m3(x: Any) -> Any:
    low, high = (of_e4m3(x >> shift & 255).astype(np.float16).view(np.uint16).astype(np.uint32) for shift in (0, 8))
    return low | high << 16


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "cvt.rn.f16x2.e4m3x2": _f16_of_e4m3,
    "cvt.f32.f16": lambda a: a.astype(np.uint16).view(np.float16).astype(np.float32),
    "cvt.rn.bf16x2.f32": lambda high, low: bf16_bits(low) | bf16_bits(high) << 16,
    "mul.f32": lambda a, b: a * b,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: (a.astype(np.uint64) * b).astype(np.uint32),
    "mul.rn.bf16x2": lambda a, b: (
        bf16_bits(of_bf16(a & 0xFFFF) * of_bf16(b & 0xFFFF)) | bf16_bits(of_bf16(a >> 16) * of_bf16(b >> 16)) << 16
    ),
}


def run_instructions(text: str, registers: dict[str, Any]) -> None:
    """Runs PTX on registers [warps, 32], which it changes."""

    def value(name: str) -> Any:
        if name in registers:
            return registers[name]
        return np.uint32(int(name[2:], 16)).view(np.float32) if name.startswith("0f") else np.uint32(int(name, 0))

    if text.lstrip().startswith("{ .reg"):
        text = text.strip()[1:-1]
    for instruction in filter(None, map(str.strip, text.split(";"))):
        opcode, rest = instruction.split(None, 1)
        operands = [
            [name.strip() for name in item[1:-1].split(",")] if item[0] == "{" else item
            for item in re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        ]
        if opcode == ".reg":
            continue
        if opcode == "mov.b32":
            registers.update(zip(operands[0], _halves(value(str(operands[1]))), strict=True))
        elif opcode.startswith("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"):
            results = mma(*([value(name) for name in operand] for operand in operands[1:]))
            registers.update(zip(operands[0], results, strict=True))
        elif opcode == "prmt.b32":
            a, b, selector = map(str, operands[1:])
            registers[str(operands[0])] = _permuted(value(a), value(b), int(selector, 0))
        else:
            with np.errstate(all="ignore"):
                registers[str(operands[0])] = INSTRUCTIONS[opcode](*(value(str(name)) for name in operands[1:]))


WAITED: list[str] = []
"""A program's calls about the launch of others."""


class Shared:
    """A program's shared memory, which copies reach when a group of them is waited for."""

    def __init__(self) -> None:
        self.memory = np.zeros(0, np.uint8)
        self.copies: list[tuple[Any, Any]] = []
        self.groups: list[list[tuple[Any, Any]]] = []

    def run(self, text: str, arguments: list[Any]) -> Any:
        """Runs what instructions do with the memory; returns what they read, or the memory's address."""
        if reserved := re.search(r"queue\[(\d+)\]", text):
            self.memory = np.full(int(reserved[1]), 0xA5, np.uint8)
            return np.array(0).view(Array)
        if text.startswith("cp.async.commit_group"):
            self.groups.append(self.copies)
            self.copies = []
        elif waited := re.match(r"cp\.async\.wait_(?:group (\d+)|all); bar\.warp\.sync", text):
            while len(self.groups) > int(waited[1] or 0):
                for place, data in self.groups.pop(0):
                    self.memory[place] = data
        elif copy := re.search(r"@p cp\.async\.c[ag]\S+ \[\$1\+(\d+)\], \[\$2\], (\d+);", text):
            to, source, wanted = arguments
            self.copy(np.asarray(to) + int(copy[1]), source, np.asarray(wanted), int(copy[2]))
        elif read := re.match(r"ld\.shared\.(u16|v4\.b32) .*\[\$\d\+(\d+)\];", text):
            places = np.asarray(arguments[0]) + int(read[2])
            if read[1] == "u16":
                return (self.memory[places] | self.memory[places + 1].astype(np.uint32) << 8).view(Array)
            return self.memory[places[..., :1] + np.arange(16)].view(np.uint32).view(Array)
        elif written := re.match(r"st\.shared\.v4\.f32 \[\$4\+(\d+)\]", text):
            places = np.asarray(arguments[0])[..., :1] + int(written[1]) + np.arange(16)
            self.memory[places] = np.ascontiguousarray(arguments[1], np.float32).view(np.uint8)
        else:
            assert text.startswith("bar.sync 0;"), text
        return None

    def copy(self, to: Any, source: Pointer, wanted: Any, size: int) -> None:
        memory, bytes_of = source.memory.view(np.uint8), np.arange(size)
        at, to, wanted = np.broadcast_arrays(source.at, to, wanted != 0)
        first, places = at[wanted][:, None] * source.memory.itemsize, to[wanted][:, None]
        assert (first % size == 0).all() and (places % size == 0).all(), "not aligned"
        assert ((first >= 0) & (first + bytes_of < memory.size)).all(), "outside of a tensor"
        self.copies.append((places + bytes_of, memory[first + bytes_of]))


SHARED = Shared()


def inline_asm_elementwise(
    text: str, constraints: str, arguments: list[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    if text.startswith("griddepcontrol"):
        WAITED.append(text.split(";")[0].split(".")[1])
        return None
    if re.search(r"shared|cp\.async|bar\.sync", text):
        return SHARED.run(text, arguments)
    kinds = constraints.split(",")
    written = sum(kind.startswith("=&") for kind in kinds)
    assert pack == 4 and len(kinds) == written + 4 * len(arguments) and is_pure
    whole = np.broadcast_arrays(*arguments)
    shape = whole[0].shape
    assert shape[-2:] == (32, 4)
    registers: dict[str, Any] = {}
    for i, argument in enumerate(whole):
        floats = argument.dtype == np.float32
        for j in range(4):
            assert kinds[written + 4 * i + j] == ("f" if floats else "r")
            words = argument.reshape(-1, 32, 4)[..., j]
            registers[f"${written + 4 * i + j}"] = np.array(words if floats else words.astype(np.uint32))
    run_instructions(text, registers)
    results = [np.stack([registers[f"${i + j}"] for j in range(4)], -1) for i in range(0, written, 4)]
    arrays = [result.reshape(shape).view(Array) for result in results]
    return tuple(arrays) if isinstance(dtype, tuple) else arrays[0]


def _asserted(holds: bool) -> None:
    assert holds


def _jit(*run: Any, **_: Any) -> Any:
    return run[0] if run else lambda function: function


def emulated(monkeypatch: pytest.MonkeyPatch, path: Path) -> ModuleType:
    """The module of a kernel in Gluon, whose functions are Python's."""
    program = SimpleNamespace(at=0, count=1)
    language = SimpleNamespace(
        constexpr=lambda x: x, load=load, store=store, inline_asm_elementwise=inline_asm_elementwise,
        static_range=range, where=lambda *x: np.where(*x).view(Array),
        num_programs=lambda _: program.count,
        BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, int32=np.int32, int64=np.int64, float32=np.float32,
        arange=lambda first, end, _: np.arange(first, end).view(Array), minimum=np.minimum,
        max=lambda x, axis: np.max(x, axis).view(Array), sum=lambda x, axis: np.sum(x, axis).view(Array),
        zeros=lambda shape, kind, _: np.zeros(shape, kind).view(Array), exp=np.exp,
        erf=lambda x: torch.erf(torch.from_numpy(np.array(x))).numpy().view(Array),
        program_id=lambda _: np.array(program.at).view(Array), program=program, static_assert=_asserted,
    )  # fmt: skip
    for name, members in (
        ("triton.experimental", {"gluon": None}), ("triton.experimental.gluon", {
            "jit": _jit, "language": language, "constexpr_function": lambda function: function,
        }),
        ("triton.experimental.gluon.language", vars(language)),
    ):  # fmt: skip
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["triton.experimental"].gluon = sys.modules["triton.experimental.gluon"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", sys.modules.get("triton", ModuleType("triton")))
    spec = importlib.util.spec_from_file_location("emulated_kernel", path)
    assert spec is not None and spec.loader is not None
    kernel = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "emulated_kernel", kernel)
    spec.loader.exec_module(kernel)
    return kernel
