"""Runs on a Blackwell card what was written without one: ``python tests/gpu/blackwell.py``, in about five minutes.

First whether it is right, then how fast it is, a line for each: the bytes of the casts against the reference on the
CPU, those of groups too; GEMMs on tensor cores against products of the dequantized operands; compiled linear layers and
experts against the emulated path, weights that are stored and cached among them; and times beside bfloat16. Ends with
the number of failures as its exit code. It has not been run yet: whoever does may send what it prints.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor, nn

import fxquant
from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.cast.choice import CastKernel
from fxquant.kernels.cast.ops import hybrid_quantize
from fxquant.kernels.grouped import ops as grouped
from fxquant.kernels.grouped import reference as grouped_reference
from fxquant.kernels.grouped.choice import GroupedGemmFacts
from fxquant.kernels.grouped.ops import grouped_scaled_mm, hybrid_split_quantize
from fxquant.kernels.grouped.places import padded_ends
from fxquant.kernels.grouped.swizzle import plain
from fxquant.kernels.linear.choice import GemmFacts, GemmKernel
from fxquant.kernels.linear.ops import scaled_mm

FAILED: list[str] = []
CASTS = (
    ("mxfp8_e4m3(swizzled)", "mxfp8_e4m3(swizzled)"), ("mxfp8_e5m2(swizzled)", "mxfp8_2d_e4m3(swizzled)"),
    ("nvfp4(swizzled)", "nvfp4(swizzled)"), ("nvfp4_2d(swizzled)", "nvfp4_2d(swizzled)"),
    ("nvfp4(swizzled)", "nvfp4(rht,swizzled)"),
    ("nvfp4(stochastic,swizzled)", "nvfp4(rht,stochastic,stream=1,swizzled)"),
)  # fmt: skip
GROUPS = (
    ("mxfp8_e4m3(swizzled)", "mxfp8_e5m2(swizzled)"), ("nvfp4(swizzled)", "nvfp4(rht,swizzled)"),
    ("nvfp4(stochastic,swizzled)", "nvfp4(rht,stochastic,stream=1,swizzled)"),
)  # fmt: skip
SHAPES = ((1024, 512), (33, 50), (300, 416), (4096, 7168))
PAIRS = (
    ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e5m2", "mxfp8_2d_e4m3"), ("nvfp4", "nvfp4_2d"), ("nvfp4(rht)", "nvfp4(rht)"),
    ("nvfp4(row_scaled)", "nvfp4"),
)  # fmt: skip
LONG = [
    ("per_tensor_e4m3", "per_tensor_e4m3"),
    ("per_tensor_e5m2", "per_tensor_e4m3"),
    ("per_row_e4m3", "per_row_e4m3"),
]
"""Formats with scales of tensors and rows, which a GEMM in bfloat16 has."""
SIZES = [(256, 512, 384), (5, 64, 41), (1000, 4096, 1024)]
"""M, K, N."""
STATE = torch.tensor([1234567, 3, 0])


@contextlib.contextmanager
def checking(what: str) -> Iterator[None]:
    try:
        yield
        print(f"ok    {what}", flush=True)
    except Exception as error:
        FAILED.append(what)
        print(f"FAILED {what}: {str(error).splitlines()[0] if str(error) else type(error).__name__}", flush=True)
        traceback.print_exc(limit=-3)


def values(*shape: int) -> Tensor:
    x = torch.randn(shape) * torch.randint(-8, 8, shape).float().exp2()
    x[shape[0] // 2], x[:, 3] = 0.0, 0.0
    return x.bfloat16()


def same(a: Tensor, b: Tensor) -> bool:
    a, b = (t.cpu().contiguous().view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and torch.equal(a, b)


def bytes_of_casts() -> None:
    for row, column in CASTS:
        for shape in SHAPES:
            with checking(f"bytes of {row} and {column}, {shape[0]} x {shape[1]}"):
                x = values(*shape)
                states = [STATE if "stochastic" in text else None for text in (row, column)]
                arguments = (x.cuda(), row, column, *(None if s is None else s.cuda() for s in states))
                run = hybrid_quantize.run(CastKernel.TRITON)
                got = run(*arguments)
                rows, columns = QuantSpec.parse(row), QuantSpec.parse(column)
                want = [*reference.quantize(x, rows, states[0]), *reference.quantize(x.mT, columns, states[1])]
                wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not same(a, b)]
                assert not wrong, f"parts {wrong} differ"


def gemms() -> None:
    cores, long = (GemmKernel.MXFP8, GemmKernel.NVFP4), (GemmKernel.PER_TENSOR, GemmKernel.PER_ROW)
    for (a, b), kernels in (*((pair, cores) for pair in PAIRS), *((pair, long) for pair in LONG)):
        for m, k, n in SIZES:
            with checking(f"GEMM of {a} by {b}, {m} x {k} x {n}"):
                specs = QuantSpec.parse(a), QuantSpec.parse(b)
                x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
                parts = [reference.quantize(t, spec) for t, spec in ((x, specs[0]), (w, specs[1]))]
                on_card = [[part.cuda() for part in side] for side in parts]
                dtype, most = (torch.float32, 1e-3) if kernels is cores else (torch.bfloat16, 0.01)
                facts = GemmFacts.of(*on_card, a, b, None, dtype, False)
                kernel = scaled_mm.choose(facts).kernel
                assert kernel in kernels, f"{kernel} was chosen"
                got = scaled_mm.best(*on_card, a, b, None, dtype, False).cpu()
                left, right = (reference.dequantize(p, s).double() for p, s in zip(parts, specs, strict=True))
                want = left @ right.mT
                error = ((got - want).norm() / want.norm()).item()
                assert error < most, f"relative error {error:.1e}"


def in_groups(parts: list[Tensor], ends: Tensor, text: str, direction: str) -> list[Tensor]:
    """Payload and scales of a ragged operand, on the CPU, as far as they belong to a group."""
    spec, last = QuantSpec.parse(text), int(ends[-1])
    data, scale, *_ = plain([part.cpu() for part in parts], ends, spec, direction)
    if direction == "rowwise":
        return [data[:last], scale[:last]]
    blocks = int(padded_ends(ends, spec.row.block[1])[-1]) // spec.row.block[1]
    return [data[:, : blocks * spec.row.block[1] // spec.row.packed], scale[:, :blocks]]


def bytes_of_groups() -> None:
    """Ragged groups, the first and the third of which are empty, and batches of weights."""
    for row, column in GROUPS:
        states = [STATE if "stochastic" in text else None for text in (row, column)]
        on_card = [None if s is None else s.cuda() for s in states]
        for ends in ([0, 3, 3, 140, 700], [0, 0], [128, 256]):
            with checking(f"bytes of groups in {row} and {column}, ends {ends}"):
                x, offs = values(ends[-1] + 5, 200), torch.tensor(ends, dtype=torch.int32)
                got = hybrid_split_quantize.run(CastKernel.TRITON)(x.cuda(), offs.cuda(), row, column, *on_card)
                count = len(got) // 2
                for text, direction, state, parts in (
                    (row, "rowwise", states[0], got[:count]), (column, "columnwise", states[1], got[count:]),
                ):  # fmt: skip
                    want = grouped_reference.quantize(x, offs, QuantSpec.parse(text), direction, state)
                    sides = (in_groups(side, offs, text, direction) for side in (parts, want))
                    assert all(map(same, *sides)), f"{direction} differs"
        with checking(f"bytes of a batch in {row} and {column}"):
            w = torch.stack([values(133, 200), values(133, 200)])
            got = hybrid_split_quantize.run(CastKernel.TRITON)(w.cuda(), None, row, column, *on_card)
            want = [*grouped_reference.quantize(w, None, QuantSpec.parse(row), "rowwise", states[0]),
                    *grouped_reference.quantize(w, None, QuantSpec.parse(column), "columnwise", states[1])]  # fmt: skip
            wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not same(a, b)]
            assert not wrong, f"parts {wrong} differ"


def groups() -> None:
    """The three GEMMs of experts, by scales in both orders."""
    ends = torch.tensor([3, 3, 700, 1000], dtype=torch.int32)
    x, w, dy = (torch.randn(*s).bfloat16().cuda() for s in ((1024, 256), (4, 384, 256), (1024, 384)))
    offs, split = ends.cuda(), grouped.split_quantize
    for spec in ("mxfp8_e4m3", "mxfp8_e4m3(swizzled)", "nvfp4", "nvfp4(swizzled)"):
        for name, a, b in (
            ("fprop", split(x, offs, spec, "rowwise"), split(w, None, spec, "rowwise")),
            ("dgrad", split(dy, offs, spec, "rowwise"), split(w, None, spec, "columnwise")),
            ("wgrad", split(dy, offs, spec, "columnwise"), split(x, offs, spec, "columnwise")),
        ):
            with checking(f"groups of {spec}, {name}"):
                facts = GroupedGemmFacts.of(a, b, offs, spec, spec, torch.bfloat16, False)
                kernel = grouped_scaled_mm.choose(facts).kernel
                assert kernel in (GemmKernel.GROUPED_MXFP8, GemmKernel.GROUPED_NVFP4), f"{kernel} was chosen"
                want = grouped_scaled_mm.meaning(
                    [t.cpu() for t in a], [t.cpu() for t in b], ends, spec, spec, torch.float32, False
                )
                got = grouped_scaled_mm.best(a, b, offs, spec, spec, torch.bfloat16, False).float().cpu()
                error = ((got - want).norm() / want.norm()).item()
                assert error < 0.01, f"relative error {error:.1e}"


class Experts(nn.Module):
    """Groups of rows, one of them empty, each times a weight of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 512, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, 256, 512) / 512**0.5)

    def forward(self, x: Tensor) -> Tensor:
        offs = torch.tensor([5, 5, 20, x.shape[0]], dtype=torch.int32, device=x.device)
        hidden = torch.nn.functional.gelu(torch._grouped_mm(x, self.up.mT, offs=offs))
        return torch._grouped_mm(hidden, self.down.mT, offs=offs)


def layer_of(kind: str, recipe: str, width: int) -> nn.Module:
    if kind == "experts":
        return Experts(width).bfloat16().cuda()
    layer = nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16().cuda()
    return fxquant.quantize_parameters(layer, recipe) if kind == "stored weights" else layer


def layers() -> None:
    """A training step through Inductor, beside the meaning of every operator."""
    kinds = ("linear", "stored weights", "cached weights", "experts")
    for recipe, kind, (rows, width) in itertools.product(("mxfp8", "nvfp4"), kinds, ((512, 1024), (37, 256))):
        if kind == "experts" and torch.cuda.get_device_capability()[0] != 10:
            continue
        with checking(f"a compiled step under {recipe}, {kind}, {rows} x {width}"):
            torch.manual_seed(0)
            layer, x, results = layer_of(kind, recipe, width), torch.randn(rows, width).bfloat16().cuda(), []
            for inner in ("inductor", "aot_eager"):
                torch.compiler.reset()
                layer.zero_grad()
                backend = fxquant.Backend(recipe, inner=inner, cache_weights=kind == "cached weights")
                y = torch.compile(layer, backend=backend)(x)
                y.float().square().mean().backward()
                results.append([y.detach().float(), *(p.grad.float().clone() for p in layer.parameters())])
            for got, want in zip(*results, strict=True):
                error = ((got - want).norm() / want.norm()).item()
                assert error < (0.02 if recipe == "mxfp8" else 0.1), f"relative error {error:.1e}"


def timed(what: str, run: Callable[[], Any], work: float, unit: str) -> None:
    """`work` is FLOPs or bytes; times are of the median run, cold in L2."""
    with checking(f"time of {what}"):
        ms = triton.testing.do_bench(run, warmup=50, rep=200, return_mode="median")
        print(f"      {what}: {1e3 * ms:.1f} us, {work / ms / 1e9:.2f} {unit}", flush=True)


def times() -> None:
    for m, k, n in ((8192, 8192, 8192), (16384, 4096, 14336)):
        x, w = torch.randn(m, k).bfloat16().cuda(), torch.randn(n, k).bfloat16().cuda()
        flops = 2.0 * m * k * n
        timed(f"bfloat16 GEMM {m} x {k} x {n}", partial(torch.matmul, x, w.mT), flops, "TFLOP/s")
        for text in ("per_tensor_e4m3", "per_row_e4m3", "mxfp8_e4m3(swizzled)", "nvfp4(swizzled)"):
            sides = [reference.quantize(t, QuantSpec.parse(text)) for t in (x, w)]
            multiply = partial(scaled_mm.best, *sides, text, text, None, torch.bfloat16, True)
            timed(f"{text} GEMM", multiply, flops, "TFLOP/s")
    x, state, run = torch.randn(16384, 4096).bfloat16().cuda(), STATE.cuda(), hybrid_quantize.run(CastKernel.STORED)
    timed("copy 16384 x 4096", x.clone, 4.0 * x.numel(), "TB/s")
    for row, column in CASTS:
        states = [state if "stochastic" in text else None for text in (row, column)]
        size = 1.125 if "nvfp4" in row else 2.06
        cast = partial(run, x, row, column, *states)
        timed(f"cast to {row} and {column}, with its amaxes", cast, (2 + size) * x.numel(), "TB/s")
    if torch.cuda.get_device_capability()[0] == 10:
        times_of_groups(x)


def times_of_groups(x: Tensor) -> None:
    """Rows of eight experts, with bfloat16 beside."""
    offs = torch.arange(2048, x.shape[0] + 1, 2048, dtype=torch.int32, device="cuda")
    w, flops = torch.randn(8, 4096, x.shape[1]).bfloat16().cuda(), 2.0 * x.shape[0] * x.shape[1] * 4096
    timed("bfloat16 grouped GEMM", lambda: torch._grouped_mm(x, w.mT, offs=offs), flops, "TFLOP/s")
    for text in ("mxfp8_e4m3(swizzled)", "nvfp4(swizzled)"):
        sides = [grouped.split_quantize.best(t, o, text, "rowwise") for t, o in ((x, offs), (w, None))]
        multiply = partial(grouped_scaled_mm.best, *sides, offs, text, text, torch.bfloat16, True)
        timed(f"{text} grouped GEMM", multiply, flops, "TFLOP/s")
        cast = partial(hybrid_split_quantize.run(CastKernel.STORED), x, offs, text, text)
        size = 1.125 if "nvfp4" in text else 2.06
        timed(f"cast of groups to {text} in both directions", cast, (2 + size) * x.numel(), "TB/s")


def main() -> int:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 10:
        print("needs a card of compute capability 10 or above")
        return 1
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    print(f"{name}, {capability[0]}.{capability[1]}, torch {torch.__version__}, triton {triton.__version__}")
    torch.manual_seed(0)
    of_experts = (bytes_of_groups, groups) if capability[0] == 10 else ()
    steps = (bytes_of_casts, gemms, *of_experts, layers, times)
    for step in steps:
        step()
    print(f"{len(FAILED)} failed" if FAILED else "all as it should be")
    return len(FAILED)


if __name__ == "__main__":
    sys.exit(main())
