"""The attention kernels in Gluon without a GPU: what ptxas makes of them, and how tiles are dealt out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from helpers import assembled
from triton.backends.compiler import GPUTarget

from fxquant.compat.device import knows_gluon
from fxquant.kernels.attention import gluon_op as warp_attention
from fxquant.kernels.attention.scores import Scores
from fxquant.kernels.attention.triton_cast import KINDS

if not knows_gluon():
    pytest.skip("this Triton's Gluon is not the kernel's", allow_module_level=True)

from triton.experimental.gluon._runtime import GluonASTSource

from fxquant.kernels.attention import gluon as gluon_attention
from fxquant.kernels.attention import gluon_backward

FEW = 80
"""Bytes of registers that may be spilled: those of head dimension 256 lie outside the loop."""


def box(*shape: int) -> str:
    """The type of a descriptor."""
    layout = gluon_attention.gl.NVMMASharedLayout.get_default_for(list(shape), gluon_attention.gl.float8e4nv)
    return f"tensordesc<fp8e4nv[{', '.join(map(str, shape))}],{layout!r}>"


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """Returns what ptxas says of a kernel for sm_90a."""
    names = [p.name for p in kernel.params]
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
    given = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=given, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.metadata.shared <= 232_448
    assert ".e4m3.e4m3" in made.asm["ptx"]
    return assembled(made.asm["ptx"])


LONG = pytest.mark.sweep
COMPILED = ((128, "head"), pytest.param(64, "block", marks=LONG), pytest.param(256, "tensor", marks=LONG))


@pytest.mark.parametrize(("head_dim", "scaling"), COMPILED)
def test_nothing_is_serialized_on_hopper(head_dim: int, scaling: str) -> None:
    kernel, config = gluon_attention.fprop_warps_kernel, gluon_attention.CONFIGS[head_dim]
    types = {"q": box(1, 64, head_dim), "k": box(1, config.block_n, head_dim), "v": box(1, head_dim, config.block_n)}
    types |= {"out": "*bf16", "scale": "fp32"}
    types |= dict.fromkeys(("lse", "weights", "q_scale", "k_scale", "v_scale"), "*fp32")
    types |= dict.fromkeys("tiles heads kv_heads batch_heads q_len kv_len together".split(), "i32")
    constants = {
        "SCALING": KINDS[scaling], "CAUSAL": True, "EVEN": False, "RECORD": True, "Q_HELD": config.q_held,
        "GROUPS": config.groups, "REGISTERS": config.registers, "STAGES": config.stages, "BN": config.block_n,
        "D": head_dim,
    }  # fmt: skip
    log = compiled(kernel, types, constants)
    spilled = int(log.split(" bytes spill stores")[0].split()[-1])
    assert spilled <= (FEW if head_dim == 256 else 0), log
    assert "C75" not in log, log


@pytest.mark.parametrize(("gradient", "scaling"), (("fp8e4nv", "head"), pytest.param("fp8e5", "block", marks=LONG)))
def test_the_backward_is_not_serialized_on_hopper(gradient: str, scaling: str) -> None:
    """What it spills are numbers that stay the same from step to step."""
    codes, values, words = (torch.float8_e4m3fn, "fp8e4nv"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")
    types = {"scale": "fp32", "dk": "*bf16", "dv": "*bf16"}
    for name, (dtype, text), *shape in (
        ("q8", codes, 1, 64, 128), ("k8", codes, 1, 64, 128), ("v", codes, 1, 64, 128), ("q", values, 1, 64, 128),
        ("do8", (torch.float8_e4m3fn, gradient), 1, 64, 128), ("k", values, 1, 128, 64), ("do", values, 1, 64, 128),
        ("log_sum", words, 1, 64), ("delta", words, 1, 64), ("dq", words, 16, 256),
    ):  # fmt: skip
        layout = gluon_backward._layout(tuple(shape), dtype)
        types[name] = f"tensordesc<{text}[{', '.join(map(str, shape))}],{layout!r}>"
    types |= dict.fromkeys(("q_scale", "k_scale", "v_scale", "do_scale"), "*fp32")
    types |= dict.fromkeys("heads kv_heads batch_heads q_len kv_len together".split(), "i32")
    constants = {
        "SCALING": KINDS[scaling], "CAUSAL": True, "EVEN": False, "STAGES": gluon_backward.STAGES, "D": 128,
    }  # fmt: skip
    log = compiled(gluon_backward.bprop_warps_kernel, types, constants)
    assert int(log.split(" bytes spill stores")[0].split()[-1]) <= 260, log
    assert "C75" not in log, log


def busiest(blocks: int, heads: int, together: int, programs: int) -> float:
    """The most work of a program over the mean, as `_tile_at` deals out causal tiles."""
    work, tile = [0.0] * programs, 0
    for first in range(0, heads, together):
        for length in reversed(range(1, blocks + 1)):
            for _ in range(min(together, heads - first)):
                turn, place = divmod(tile, programs)
                work[programs - 1 - place if turn % 2 else place] += length + 0.7
                tile += 1
    return max(work) * programs / sum(work)


@pytest.mark.parametrize(("blocks", "heads"), ((32, 32), (128, 32), (64, 64), (7, 40), (1, 5), (32, 8)))
def test_tiles_are_dealt_evenly_or_by_the_device(blocks: int, heads: int) -> None:
    choices = {1, 2, 4, 8, 16, 32, heads}
    for most in (4, heads):
        got = gluon_attention._dealt_evenly(blocks, 128, 128 * blocks, 128, heads, 1, most, 132)
        known = {width: busiest(blocks, heads, width, 132) for width in choices if width <= min(most, heads)}
        even = [width for width, times in known.items() if times <= 1.04]
        assert got == (min(even) if even else None)
    assert gluon_attention._dealt_evenly(64, 128, 8192, 128, 8, 16, 16, 132) == 8, "fewer heads than fit the cache"


def test_a_negative_scale_is_refused() -> None:
    x, one = torch.empty(1, 1, 16, 64, dtype=torch.float8_e4m3fn), torch.ones(1)
    with pytest.raises(ValueError, match="positive"):
        operands = ((x, one), (x, one), (x.mT, one))
        warp_attention.forward(operands, Scores(causal=False, scale=-1.0), torch.bfloat16)
