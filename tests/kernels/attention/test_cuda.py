"""What quantized attention becomes on CUDA: kernels, and no tensor with the scores of all heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxquant.compat.patches import written_by
from fxquant.compat.private import make_fx, triton_kernel_wrapper_functional
from fxquant.formats import AttentionSpec, QuantSpec, Step
from fxquant.kernels.attention import choice as attention_choice
from fxquant.kernels.attention import cuda as attention_cuda
from fxquant.kernels.attention import reference as attention_reference
from fxquant.kernels.attention.choice import AttentionFacts, AttentionKernel
from fxquant.kernels.attention.ops import attention_backward, attention_forward
from fxquant.kernels.operator import Chosen
from fxquant.passes.lower.lower import lower
from fxquant.passes.settings import Settings

ops = torch.ops.fxquant
IDENTITY = QuantSpec(format="identity")
CAST = "q8,k8,v8,q_scale,k_scale,v_scale"
FP8_BACKWARD = ["data,scale_inv", "q,k,v", "dk,dv", "dq"]
CASES = (
    # qkv and s, do and dp, steps behind the scale, dropout, what Triton kernels write, calls of cuDNN
    ("per_head_e4m3", False, "", 0.0, ["amax", CAST, "out,lse", "q,k,v"], 1),
    ("per_tensor_e4m3", True, "", 0.0, ["amax", CAST, "out,lse", "amax", *FP8_BACKWARD], 0),
    ("per_head_128_e4m3", False, "causal", 0.0, [CAST, "out,lse", "q,k,v"], 1),
    ("per_head_128_e4m3", False, "keep", 0.1, [CAST, "out,lse", "q,k,v", "dk,dv", "dq"], 0),
    ("per_head_128_e4m3", True, "add", 0.1, [CAST, "out,lse", "amax", *FP8_BACKWARD], 0),
    ("mxfp8_e4m3", False, "causal", 0.0, [], 2),
    ("mxfp8_e4m3", False, "keep", 0.0, ["out,lse", "dk,dv", "dq"], 0),
    ("mxfp8_e4m3", True, "causal", 0.1, ["out,lse", "dk,dv", "dq"], 0),
)
QUERIES, KEYS = 208, 304
LENGTHS = (QUERIES, KEYS, KEYS)


@pytest.mark.parametrize("warps", (False, True))
@pytest.mark.parametrize(("name", "quantized", "step", "dropout", "launches", "library"), CASES)
def test_no_scores_in_memory(
    name: str, quantized: bool, step: str, dropout: float, launches: list[str], library: int, warps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`warps` says whether there is the kernel in Gluon, which an operator launches."""
    monkeypatch.setattr(attention_choice, "knows_gluon", lambda: warps)
    monkeypatch.setattr(attention_choice, "LEAST_WORK_OF_GLUON", 0)
    by_operator = warps and not name.startswith("mxfp8") and step in ("", "causal") and not dropout
    if by_operator:
        launches = [written for written in launches if written != "out,lse"]
    if name.startswith("mxfp8"):  # fake tensors of a device that torch was built without cannot be sliced

        def dequantized(operands: Any, spec: QuantSpec, width: int, dtype: torch.dtype) -> list[Tensor]:
            sides = zip(operands, LENGTHS, strict=False)
            return [x[0].new_empty((*x[0].shape[:2], n, 64), dtype=dtype) for x, n in sides]

        monkeypatch.setattr(attention_cuda, "_dequantized", dequantized)
        monkeypatch.setattr(attention_reference, "rows_and_columns", lambda do, _: (do.clone(), do.clone()))
    spec = QuantSpec(format=name)
    more = [Step(step, extra=-1 if step == "causal" else 0)] if step else []
    gradients = spec if quantized else IDENTITY
    whole = AttentionSpec(
        qkv=spec, s=spec, do=gradients, dp=gradients, steps=(Step("mul", 0.125), *more), dropout=dropout
    )

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Tensor, seed: Tensor) -> list[Tensor]:
        parts = ops.quantize_qkv(q, k, v, name)
        pairs, extras, draw = (parts[:2], parts[2:4], parts[4:]), [mask] * bool(more), seed if dropout else None
        o, lse, _ = ops.attention_forward(*pairs, extras, draw, None, str(whole), 64, q.dtype)
        grads = ops.attention_backward(do, *pairs, o, lse, extras, draw, None, None, None, [], str(whole), 64)
        return [o, lse, *grads]

    with FakeTensorMode():
        sizes = ((2, 8, QUERIES), (2, 4, KEYS), (2, 4, KEYS), (2, 8, QUERIES))
        q, k, v, do = (torch.empty(*size, 64, dtype=torch.bfloat16, device="cuda") for size in sizes)
        mask = torch.empty(2, 1, 1, KEYS, dtype=torch.bool if step != "add" else torch.bfloat16, device="cuda")
        graph = make_fx(run)(q, k, v, do, mask, torch.empty(1, dtype=torch.int64, device="cuda")).graph
    assert lower(graph, Settings()) == 3
    written = [",".join(written_by(n.kwargs)) for n in graph.nodes if n.target is triton_kernel_wrapper_functional]
    assert sorted(written) == sorted(launches)
    operator = torch.ops.fxquant_kernels.attention_fprop.default
    assert sum(n.target is operator for n in graph.nodes) == by_operator
    assert sum("cudnn_attention" in str(n.target) for n in graph.nodes) == library
    shapes = [value.shape for n in graph.nodes if isinstance(value := n.meta.get("val"), Tensor)]
    assert not [shape for shape in shapes if shape[-2:] == (QUERIES, KEYS)]


def test_short_attention_stays_with_the_kernel_that_inductor_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "knows_gluon", lambda: True)
    heads = QuantSpec(format="per_head_e4m3")
    spec = AttentionSpec(qkv=heads, s=heads, steps=(Step("mul", 0.125),))
    for length, kernel in ((1024, AttentionKernel.TRITON), (2048, AttentionKernel.GLUON)):
        facts = AttentionFacts(
            spec=spec, axes=4, width=128, features=128, dtype=torch.bfloat16, capability=(9, 0), keys=length,
            flops=4 * 32 * length * length * 128,
        )  # fmt: skip
        assert attention_forward.choose(facts) == Chosen(kernel)


def test_which_backwards_are_in_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    """In FP8, of long sequences of heads of 128 without a mask, and where no amax of the scores' gradient is taken."""
    monkeypatch.setattr(attention_choice, "knows_gluon", lambda: True)
    heads, delayed = QuantSpec(format="per_head_e4m3"), QuantSpec.parse("per_tensor_e5m2(slot=0)")
    plain, causal, mask = Step("mul", 0.125), Step("causal"), Step("keep", extra=0)

    def kernel(
        gradients: QuantSpec, *steps: Step, width: int = 128, length: int = 4096, repeats: bool = False
    ) -> AttentionKernel:
        spec = AttentionSpec(qkv=heads, s=heads, do=gradients, dp=gradients, steps=steps)
        facts = AttentionFacts(
            spec=spec, axes=4, width=width, features=width, dtype=torch.bfloat16, capability=(9, 0), keys=length,
            flops=4 * 32 * length * length * width, repeats=repeats,
        )  # fmt: skip
        return attention_backward.choose(facts).kernel

    assert kernel(heads, plain, causal) == kernel(heads, plain) == AttentionKernel.GLUON
    assert kernel(heads, plain, width=64) == kernel(heads, plain, length=512) == AttentionKernel.TRITON
    assert kernel(heads, plain, mask) == kernel(delayed, plain) == AttentionKernel.TRITON
    assert kernel(IDENTITY, plain) == AttentionKernel.CUDNN
    assert kernel(heads, plain, repeats=True) == AttentionKernel.TRITON
    assert kernel(IDENTITY, plain, repeats=True) == AttentionKernel.WIDE


def test_backwards_repeat_to_the_bit_where_torch_asks_for_it() -> None:
    tensors = [torch.empty(1, 4, 64, 64, dtype=torch.float8_e4m3fn), torch.empty(4)]
    spec = str(AttentionSpec(qkv=QuantSpec(format="per_head_e4m3"), s=QuantSpec(format="per_head_e4m3")))
    try:
        for asked in (True, False):
            torch.use_deterministic_algorithms(asked)
            assert AttentionFacts.of(tensors, tensors, tensors, spec, 64, torch.bfloat16).repeats is asked
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("quantized", (False, True))
def test_delayed_scales_take_the_kernels(quantized: bool) -> None:
    """And no tensor with the scores; the amaxes come out of what casts and multiplies."""
    e4m3, e5m2 = QuantSpec(format="per_tensor_e4m3"), QuantSpec(format="per_tensor_e5m2") if quantized else IDENTITY
    spec = str(AttentionSpec(qkv=e4m3, s=e4m3, do=e5m2, dp=e5m2, steps=(Step("mul", 0.125),)))

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *scales: Tensor) -> list[Tensor]:
        *parts, amax = ops.quantize_qkv(q, k, v, "per_tensor_e4m3", scales[0], True)
        pairs = (parts[:2], parts[2:4], parts[4:])
        o, lse, s_amax = ops.attention_forward(*pairs, [], None, scales[1], spec, 64, q.dtype)
        given = (scales[1], *(scales[2:] if quantized else (None, None)))
        return [o, amax, s_amax, *ops.attention_backward(do, *pairs, o, lse, [], None, *given, [], spec, 64)]

    with FakeTensorMode():
        sizes = ((2, 8, QUERIES), (2, 4, KEYS), (2, 4, KEYS), (2, 8, QUERIES))
        given = [torch.empty(*size, 64, dtype=torch.bfloat16, device="cuda") for size in sizes]
        graph = make_fx(run)(*given, *(torch.empty(1, device="cuda") for _ in range(4))).graph
    assert lower(graph, Settings()) == 3
    written = [",".join(written_by(n.kwargs)) for n in graph.nodes if n.target is triton_kernel_wrapper_functional]
    backward = ["data,scale_inv,recorded", "q,k,v", "dk,dv", "dq,dp_amax"] if quantized else ["q,k,v"]
    assert sorted(written) == sorted([f"{CAST},recorded", "out,lse,s_amax", *backward])
    assert sum("cudnn_attention" in str(n.target) for n in graph.nodes) == (not quantized)
    shapes = [value.shape for n in graph.nodes if isinstance(value := n.meta.get("val"), Tensor)]
    assert not [shape for shape in shapes if shape[-2:] == (QUERIES, KEYS)]


@pytest.mark.parametrize("record", (False, True))
def test_a_given_scale_takes_one_launch(record: bool) -> None:
    """Which takes the amax along that a delayed scale records."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> list[Tensor]:
        return ops.quantize_qkv(q, k, v, "per_tensor_e4m3", scale, record)  # type: ignore[no-any-return]

    with FakeTensorMode():
        x = torch.empty(2, 4, KEYS, 64, dtype=torch.bfloat16, device="cuda")
        graph = make_fx(run)(x, x, x, torch.empty(1, device="cuda")).graph
    lower(graph, Settings())
    scale = next(n for n in graph.nodes if n.op == "placeholder" and n.meta["val"].numel() == 1)
    (launch,) = (n for n in graph.nodes if n.target is triton_kernel_wrapper_functional)
    assert launch in scale.users
    assert written_by(launch.kwargs) == ["q8", "k8", "v8", "q_scale", "k_scale", "v_scale", *["recorded"] * record]
