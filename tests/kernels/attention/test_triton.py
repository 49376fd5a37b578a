"""The attention kernels without a GPU: values in the interpreter, and how their launches are traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from helpers import assembled
from interpreting import run_interpreted
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxquant.compat.patches import written_by
from fxquant.compat.private import make_fx, triton_kernel_wrapper_mutation
from fxquant.formats import AttentionSpec, QuantSpec, Step
from fxquant.kernels.attention import triton_backward, triton_forward, triton_scores
from fxquant.kernels.attention import triton_cast as head_cast
from fxquant.kernels.attention.choice import HEAD_DIMS, AttentionFacts, AttentionKernel
from fxquant.kernels.attention.ops import attention_forward
from fxquant.kernels.attention.scores import Scores


def test_values_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_attention.py"))


def test_launches_are_traced_and_say_what_they_write() -> None:
    """With sizes that are symbols, and k and v as a transposed projection leaves them."""

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        results: list[Tensor] = []
        for scaling in ("head", "block"):
            q8, qs, k8, ks, v8, vs = head_cast.quantize_qkv(q, k, v, scaling)
            operands, scores = ((q8, qs), (k8, ks), (v8, vs)), Scores(causal=True, scale=0.125)
            o, lse = triton_forward.forward(operands, scores, torch.bfloat16, scaling=scaling)
            grads = triton_backward.backward(do, operands, o, lse, scores, scaling)
            results = [o, lse, *grads]
        return tuple(results)

    q = torch.empty(2, 4, 100, 64, dtype=torch.bfloat16)
    k = torch.empty(2, 75, 2, 64, dtype=torch.bfloat16)
    graph = make_fx(run, tracing_mode="symbolic")(q, k, torch.empty_like(k), torch.empty_like(q)).graph
    launches = [n.kwargs for n in graph.nodes if n.target is triton_kernel_wrapper_mutation]
    names = [",".join(written_by(launch)) for launch in launches]
    cast = "q8,k8,v8,q_scale,k_scale,v_scale"
    assert set(names) == {"amax", cast, "data,scale_inv", "q,k,v", "out,lse", "dk,dv", "dq"}
    output = next(n for n in graph.nodes if n.op == "output").args[0]
    sizes = [tuple(map(int, n.meta["val"].shape)) for n in output]
    assert sizes == [(2, 4, 100, 64), (2, 4, 100), (2, 4, 100, 64), (2, 2, 75, 64), (2, 2, 75, 64)]


def compiled_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int) -> str:
    """Returns what ptxas says of a kernel for sm_90a."""
    names = [p.name for p in kernel.params]
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= 232_448
    assert "wgmma.mma_async.sync.aligned.m64" in made.asm["ptx"] and ".e4m3.e4m3" in made.asm["ptx"]
    return assembled(made.asm["ptx"])


@pytest.mark.sweep
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nothing_is_spilled_or_serialized_on_hopper(head_dim: int, causal: bool) -> None:
    sizes = "heads kv_heads batch_heads batches q_len kv_len v_len most_heads"
    steps = "mask_batch_step mask_head_step mask_row_step mask_column_step seen_batch_step seen_head_step"
    numbers = dict.fromkeys(f"{sizes} {steps}".split(), "i32")
    codes = dict.fromkeys(("q", "k", "v", "do"), "*fp8e4nv")
    wide = dict.fromkeys(("out", "q_wide", "k_wide", "do_wide", "dq", "dk", "dv"), "*bf16")
    names = "lse log_sum delta q_scale k_scale v_scale do_scale s_amax dp_amax"
    floats = dict.fromkeys(names.split(), "*fp32")
    others = {"scale": "fp64", "mask": "*i1", "seen": "*i32", "seed": "*i64"}
    types = {**numbers, **codes, **wide, **floats, **others}
    common = {"CAUSAL": causal, "EVEN": False, "MASK": 0, "DROPPED": 0, "RAISED": 1.0, "WIDE": 0, "D": head_dim}
    common["RECORD"] = True
    runs = []
    for plain, scaling, mask in ((True, "head", 0), (False, "block", 0), (False, "head", triton_scores.KEY_MASK.value)):
        config = triton_forward._config(head_dim, lagged=True, plain=plain)
        tiles = {"BM": config.block_m, "BN": config.block_n, "STAGES": config.stages}
        chosen = {**tiles, "SCALING": head_cast.KINDS[scaling], "MASK": mask}
        runs.append((triton_forward.fprop_kernel, chosen, config.warps, config.stages))
    for kernel, table in (
        (triton_backward.dkdv_kernel, triton_backward._KEY_TILES),
        (triton_backward.dq_kernel, triton_backward._QUERY_TILES),
    ):
        block_m, block_n, warps, stages = table[head_dim]
        tiles = {"BM": block_m, "BN": block_n, "STAGES": stages, "SCALING": head_cast.KINDS["block"]}
        runs.append((kernel, tiles, warps, stages))
    for kernel, constants, warps, stages in runs:
        taken = {name: kind for name, kind in types.items() if name in {p.name for p in kernel.params}}
        known = {name: value for name, value in common.items() if name in {p.name for p in kernel.params}}
        log = compiled_for_hopper(kernel, taken, {**known, **constants}, warps, stages)
        assert " 0 bytes spill stores" in log and "C75" not in log, (kernel.__name__, log)


def test_what_is_taken() -> None:
    heads = QuantSpec(format="per_head_e4m3")

    def taken(width: int = 128, dropout: float = 0.0, dtype: torch.dtype = torch.bfloat16, keys: int = 100) -> bool:
        facts = AttentionFacts(
            spec=AttentionSpec(qkv=heads, s=heads, steps=(Step("mul", 0.125),), dropout=dropout),
            axes=4,
            width=width,
            features=width,
            dtype=dtype,
            capability=(9, 0),
            keys=keys,
        )
        return attention_forward.choose(facts).kernel is not AttentionKernel.REFERENCE

    assert all(taken(head_dim) for head_dim in (64, 128, 256))
    assert not taken(96)
    assert taken(dropout=0.1)
    assert not taken(dropout=1.0)
    assert not taken(dtype=torch.float32)
    assert not taken(keys=0)


def test_a_negative_scale_is_refused() -> None:
    x = torch.empty(1, 1, 16, 64, dtype=torch.float8_e4m3fn)
    one = torch.ones(1)
    with pytest.raises(ValueError, match="positive"):
        operands = ((x, one), (x, one), (x.mT, one))
        triton_forward.forward(operands, Scores(causal=False, scale=-1.0), torch.bfloat16)
