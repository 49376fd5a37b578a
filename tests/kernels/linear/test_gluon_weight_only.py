"""The kernel in Gluon for a weight that alone is quantized, without a GPU: values, instructions, and who gets it."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from emulated_gluon import WAITED, Pointer, emulated
from helpers import assembled
from torch import Tensor
from torch.nn.functional import gelu, silu

import fxquant.kernels.linear
from fxquant.compat.device import knows_gluon
from fxquant.formats import IDENTITY, QuantSpec
from fxquant.kernels.cast import reference
from fxquant.kernels.linear import choice, weight_only
from fxquant.kernels.linear.choice import GemmFacts, GemmKernel
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.kernels.linear.weight_only import Direct, is_packed

W8, W4 = "per_row_e4m3(torchao)", "nvfp4"
SHAPES = ((4096, 14336), (14336, 4096), (8192, 28672))
"""K and N of the weights for which the shares were measured."""


def tiles_of(text: str, rows: int, size: tuple[int, int]) -> Direct | None:
    spec = QuantSpec.parse(text)
    return Direct.of(rows, size[1], size[0] // (2 if is_packed(spec) else 1), spec)


IN_USE = sorted({
    (text, tiles) for text in (W8, W4) for rows in (2, 8, 9, 16) for size in SHAPES
    if (tiles := tiles_of(text, rows, size)) is not None
})  # fmt: skip


class Launched:
    """A compiled kernel whose programs run one after another."""

    def __init__(self, kernel: ModuleType) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(x: Tensor, w: Tensor, blocks: Tensor, *rest: Any) -> None:
            tensors, y = rest[:3], rest[3]
            stored = Pointer.of(y)
            more = [Pointer.of(x, np.uint32), Pointer.of(w, np.uint32), Pointer.of(blocks, np.uint16)]
            self.kernel.gl.program.count = grid[0]
            for program in range(grid[0]):
                self.kernel.gl.program.at = program
                WAITED.clear()
                self.kernel.direct_kernel(*more, *map(Pointer.of, tensors), stored, *rest[4:])
                assert WAITED == (["launch_dependents", "wait"] if rest[-1] else [])
            y.copy_(torch.from_numpy(stored.memory).view(y.shape))

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the kernel, emulated."""
    module = emulated(monkeypatch, Path(fxquant.kernels.linear.__file__).with_name("gluon.py"))
    monkeypatch.setattr(module, "compiled", lambda *_: Launched(module))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(weight_only, "MULTIPROCESSORS", 3)  # which each run here, one after another
    return module


@pytest.mark.parametrize(("text", "tiles"), IN_USE, ids=str)
def test_values_are_those_of_the_reference(kernel: ModuleType, text: str, tiles: Direct) -> None:
    """Every share in use is tried, with fewer rows than it takes, one to three pieces, a bias, and every epilogue.

    Programs have all tiles of a share, one less, or, of few columns, one or none.
    """
    torch.manual_seed(0)
    spec = QuantSpec.parse(text)
    n, rows = 16 * (3 * tiles.tiles - 1), 8 * tiles.groups
    for units, m, epilogue in ((1, rows, None), (2, rows - 3, "add"), (3, 1, "silu_mul"), (1, rows - 1, "gelu"),
                               (2, rows, "gelu_tanh")):  # fmt: skip
        n = 32 if units == 3 else n
        k = units * tiles.step * (2 if is_packed(spec) else 1)
        x, other = torch.randn(m, k).bfloat16(), torch.randn(m, n).bfloat16()
        bias = torch.randn(n).bfloat16() if epilogue else None
        parts = reference.quantize(torch.randn(n, k) * torch.logspace(-2, 0, n)[:, None] / k**0.5, spec)
        more = other if epilogue in ("add", "silu_mul") else None
        dtype = torch.bfloat16 if epilogue else torch.float32
        got = kernel.scaled_mm(x, parts, spec, bias, dtype, tiles, epilogue, more, early=units > 1)
        y = reference.scaled_mm([x], IDENTITY, parts, spec, bias, dtype)
        want = {
            None: y, "add": y + other, "silu_mul": silu(other.float()) * y, "gelu": gelu(y),
            "gelu_tanh": gelu(y, approximate="tanh"),
        }[epilogue]  # fmt: skip
        close = {"rtol": 2**-7, "atol": 2**-7} if epilogue else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got, want.to(dtype), **close)


@pytest.mark.parametrize("text", [W8, "per_tensor_e4m3", W4, "nvfp4(row_scaled)"])
def test_every_code_in_every_place(kernel: ModuleType, text: str) -> None:
    """Multiplied by the identity, scales that are not finite among them; x lies where no lane could read it."""
    spec, tiles = QuantSpec.parse(text), Direct(2, 2, 2, 3)
    k = tiles.step * (2 if is_packed(spec) else 1)
    parts = reference.quantize(torch.randn(32, k), spec)
    codes = torch.arange(32)[:, None] * 77 + torch.arange(parts[0].shape[1]) * 5
    codes = codes % 256 if is_packed(spec) else torch.where(codes % 128 == 127, 0, codes % 256)
    parts[0] = codes.to(torch.uint8).view(parts[0].dtype)
    if is_packed(spec):
        codes = torch.arange(parts[1].numel()) % 127
        parts[1] = codes.to(torch.uint8).view(torch.float8_e4m3fn).view(parts[1].shape)
    values = reference.dequantize(parts, spec)
    for first in range(0, k, 16):
        x = torch.zeros(16, k + 3, dtype=torch.bfloat16)[:, 3:]
        x[torch.arange(16), first + torch.arange(16)] = 1
        got = kernel.scaled_mm(x, parts, spec, None, torch.float32, tiles)
        torch.testing.assert_close(got, values.T[first : first + 16], rtol=1e-6, atol=0)
    for part in range(1, len(parts)):
        broken = [p.clone() for p in parts]
        broken[part].view(-1)[-1] = math.nan
        got = kernel.scaled_mm(torch.ones(9, k).bfloat16(), broken, spec, None, torch.float32, tiles)
        assert got[:, -1].isnan().all()
        assert broken[part].numel() == 1 or not got[:, 0].isnan().any()


@pytest.mark.skipif(not knows_gluon(), reason="this Triton's Gluon is not the kernel's")
@pytest.mark.parametrize(("text", "tiles"), IN_USE, ids=str)
def test_what_is_made_for_hopper(text: str, tiles: Direct) -> None:
    """Nothing spills, lanes read 16 bytes at a time, the weight before they wait, and all else behind."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from fxquant.kernels.linear import gluon

    kernel, packed = gluon.direct_kernel, text == W4
    names = [p.name for p in kernel.params]
    constants = dict(zip(names[10:], (1.0, packed, not packed, True, 2, *tiles, True), strict=True))
    types = {"x": "*i32", "w": "*i32", "blocks": "*i16", "w_scale": "*fp32"}
    types |= dict.fromkeys(("bias", "other", "y"), "*bf16") | dict.fromkeys(("M", "N", "UNITS"), "i32")
    made = triton.compile(
        GluonASTSource(
            fn=kernel, signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiles.warps, "launch_pdl": True},
    )  # fmt: skip
    before, behind = made.asm["ptx"].split("griddepcontrol.wait")
    copies, ahead = (3 if packed else 2), tiles.depth - 1
    assert len(re.findall(r"cp\.async\.c[ag]\S+ ", before)) == copies * ahead and "ld.global" not in before
    assert len(re.findall(r"cp\.async\.c[ag]\S+ ", behind)) == copies * tiles.tiles
    assert "griddepcontrol.launch_dependents" in before and "st.global" not in before
    x_words = tiles.groups * (4 if packed else 2)
    assert len(re.findall(r"ld\.global\.v4\.b32", behind)) == 2 * x_words
    assert behind.count("mma.sync") == (8 if packed else 4) * tiles.groups * tiles.tiles
    log = assembled(made.asm["ptx"])
    assert " 0 bytes spill stores" in log, log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) * 32 * tiles.warps * (1 if tiles.groups == 2 else 2) <= 65536, log
    assert made.metadata.shared == 0 and tiles.warps * tiles.depth * (1152 if packed else 1024) <= 49152


@pytest.mark.parametrize("known", [True, False])
def test_who_gets_it(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Sizes for which it was the faster kernel, beside fxquant, where Triton has its Gluon."""
    monkeypatch.setattr(choice, "knows_gluon", lambda: known)

    def kernel(spec: str, rows: int, size: tuple[int, int], **more: Any) -> GemmKernel:
        facts: dict[str, Any] = {"m": rows, "capability": (9, 0), "high_precision": torch.bfloat16, "most_rows": rows}
        k, n = size
        chosen = scaled_mm.choose(GemmFacts(a=IDENTITY, b=QuantSpec.parse(spec), k=k, n=n, **{**facts, **more}))
        assert isinstance(chosen.kernel, GemmKernel)
        return chosen.kernel

    best = GemmKernel.WEIGHT_ONLY_DIRECT if known else GemmKernel.WEIGHT_ONLY
    for size in SHAPES:
        for rows in (2, 8, 16):
            assert kernel(W8, rows, size) is kernel("per_tensor_e4m3", rows, size) is best
        for rows in (1, 8, 16):
            assert kernel(W4, rows, size) is kernel("nvfp4(row_scaled)", rows, size) is best
            assert kernel(W4, rows, size, m=None) is best
            assert kernel(W4, rows, size, launches=False) is GemmKernel.WEIGHT_ONLY
            assert kernel(W4, rows, size, high_precision=torch.float16) is GemmKernel.WEIGHT_ONLY
        vector = GemmKernel.WEIGHT_ONLY if size[0] <= 8192 else best
        assert kernel(W8, 1, size) is vector, "a matrix-vector product, if K is not long"
        assert kernel(W8, 17, size) is kernel(W4, 32, size) is GemmKernel.WEIGHT_ONLY
    for size in ((4096, 512), (512, 14336), (4096 + 16, 4096), (4096, 4096 + 8), (37, 4096)):
        assert kernel(W8, 8, size) is kernel(W4, 8, size) is GemmKernel.WEIGHT_ONLY, size
