"""The attention kernels on CUDA: bytes of the casts, and values against plain torch that rounds where they do."""

from __future__ import annotations

from typing import Any

import attention_rounding as rounding
import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant.compat.device import is_hopper, knows_gluon
from fxquant.formats import QuantSpec
from fxquant.kernels.attention import gluon_op as warp_attention
from fxquant.kernels.attention import reference, triton_backward, triton_dequantize, triton_forward
from fxquant.kernels.attention import triton_cast as triton_head_cast
from fxquant.kernels.attention.cudnn import cudnn_attention, cudnn_attention_backward
from fxquant.kernels.attention.ops import (
    attention_backward,
    attention_forward,
    attention_forward_into,
    quantize_qkv,
    quantize_qkv_into,
)
from fxquant.kernels.attention.scores import Scores

pytestmark = pytest.mark.gpu
ATTENTION = (attention_forward, attention_backward)

SPECS: dict[Any, QuantSpec] = {
    "tensor": QuantSpec(format="per_tensor_e4m3"), "head": QuantSpec(format="per_head_e4m3"),
    "block": QuantSpec(format="per_head_128_e4m3"),
}  # fmt: skip
CAST_SHAPES = (
    # B, H, Hkv, Sq, Sk, D
    (2, 4, 2, 333, 150, 64), (1, 8, 2, 1000, 1000, 128), (1, 2, 2, 77, 300, 256), (1, 32, 8, 4096, 4096, 128)
)  # fmt: skip
CASES = (
    # B, H, Hkv, Sq, Sk, D, causal, mask, scales, dropout
    (1, 32, 32, 1024, 1024, 128, False, None, "head", 0.0),
    (2, 8, 2, 1024, 1024, 128, True, None, "tensor", 0.0),
    (2, 4, 2, 333, 777, 64, False, None, "head", 0.0),
    (1, 4, 1, 1000, 1000, 64, True, None, "block", 0.0),
    (1, 2, 2, 300, 513, 256, True, None, "head", 0.0),
    (1, 4, 2, 500, 1024, 256, False, None, "block", 0.0),
    (2, 4, 2, 1024, 1024, 128, True, None, "block", 0.0),
    (1, 4, 2, 1000, 900, 128, False, None, "block", 0.0),
    (1, 4, 2, 700, 130, 128, True, None, "head", 0.0),
    (1, 2, 1, 1, 77, 128, False, None, "head", 0.0),
    (1, 4, 2, 300, 400, 128, False, "seen", "head", 0.0),
    (1, 4, 4, 300, 400, 64, True, "added", "head", 0.0),
    (1, 2, 1, 100, 50, 256, False, "added", "block", 0.0),
    (3, 4, 2, 300, 400, 128, False, "keys", "head", 0.0),
    (3, 4, 2, 300, 400, 128, True, "keys", "block", 0.0),
    (3, 4, 2, 300, 400, 64, False, "keys", "block", 0.2),
    (1, 4, 2, 300, 400, 128, True, None, "block", 0.2),
    (1, 4, 2, 300, 400, 128, True, None, None, 0.2),
    (3, 4, 2, 300, 400, 64, False, "keys", None, 0.0),
    (1, 2, 2, 300, 400, 256, False, "seen", None, 0.0),
    (1, 4, 2, 300, 400, 64, False, "keys of heads", "head", 0.0),
    (2, 4, 2, 300, 400, 128, False, "batches", "head", 0.0),
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)


def operands(q: Tensor, k: Tensor, v: Tensor, scaling: Any) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Returns q, k and v quantized, and the values that they stand for."""
    sides = ((q, q.shape[1] // k.shape[1], False), (k, 1, False), (v, 1, True))
    parts = [reference.quantize_heads(x, SPECS[scaling], g, t) for x, g, t in sides]
    wide = [
        reference.dequantize_heads(part, SPECS[scaling], g, t, x.shape[-2:])
        for part, (x, g, t) in zip(parts, sides, strict=True)
    ]
    return [(data.contiguous(), scale) for data, scale in parts], wide


def make_mask(kind: str | None, batches: int, heads: int, queries: int, keys: int) -> Tensor | None:
    if kind is None:
        return None
    if kind == "added":
        return noise(heads, queries, keys)
    if kind == "keys":
        ranges = torch.tensor([[0, 70], [135, keys], [0, 0]], device="cuda")[:batches, None, None]
        place = torch.arange(keys, device="cuda")
        return (place >= ranges[..., :1]) & (place < ranges[..., 1:])
    if kind == "keys of heads":
        return torch.arange(keys, device="cuda") < torch.tensor([20, keys], device="cuda").repeat(2)[:, None, None]
    if kind == "batches":
        return torch.tensor([True, False], device="cuda")[:, None, None, None]
    mask = noise(1, 1, queries, keys) > 0
    mask[..., 7, :] = False
    return mask


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("scaling", SPECS)
@pytest.mark.parametrize("shape", CAST_SHAPES)
def test_casts_have_the_bytes_of_the_reference_and_go_back(shape: tuple[int, ...], scaling: Any) -> None:
    batches, heads, kv_heads, queries, keys, width = shape
    q, k, v = (
        noise(batches, length, own, width, seed=i).transpose(1, 2) * 3
        for i, (own, length) in enumerate(((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    )
    q[0, 0, 3, 5], v[-1, -1] = float("nan"), 0.0
    spec, sides = SPECS[scaling], ((q, heads // kv_heads, False), (k, 1, False), (v, 1, True))
    got = triton_head_cast.quantize_qkv(q, k, v, scaling)
    want = [part for x, groups, transposed in sides for part in reference.quantize_heads(x, spec, groups, transposed)]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert same(a, b), i
    pairs = (got[:2], got[2:4], got[4:])
    back = triton_dequantize.dequantize_qkv(*pairs, scaling, torch.bfloat16)
    for values, parts, (x, groups, transposed) in zip(back, pairs, sides, strict=True):
        exact = reference.dequantize_heads(parts, spec, groups, transposed, x.shape[-2:]).to(torch.bfloat16)
        torch.testing.assert_close(values, exact, rtol=0, atol=0, equal_nan=True)
    codes = triton_dequantize.dequantize_qkv(*pairs, scaling, torch.bfloat16, True)[2]
    assert same(codes, reference.key_order(got[4], back=True)[..., :keys].mT)
    if scaling != "tensor":
        for x, groups, transposed in (*sides, (v, 1, False)):
            one = triton_head_cast.quantize_heads(x, groups, transposed, scaling)
            assert all(map(same, one, reference.quantize_heads(x, spec, groups, transposed)))


@pytest.mark.parametrize("shape", CAST_SHAPES)
def test_a_given_scale_is_one_read_with_the_amax(shape: tuple[int, ...]) -> None:
    batches, heads, kv_heads, queries, keys, width = shape
    q, k, v = (
        noise(batches, length, own, width, seed=i).transpose(1, 2) * 3
        for i, (own, length) in enumerate(((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    )
    q[0, 0, 3, 5], k[0, -1, 7, 1] = float("nan"), 777.0
    multiplier, amax = torch.tensor([3.3], device="cuda"), torch.zeros(1, device="cuda")
    sides = ((q, heads // kv_heads, False), (k, 1, False), (v, 1, True))
    got = triton_head_cast.quantize_qkv(q, k, v, "tensor", multiplier, amax)
    want = [part for x, g, t in sides for part in reference.quantize_heads(x, SPECS["tensor"], g, t, multiplier)]
    assert all(map(same, got, want)) and amax.item() == 776.0
    for dtype, name in ((torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")):
        amax, spec = torch.zeros(1, device="cuda"), QuantSpec(format=f"per_tensor_{name}")
        data, scales = triton_head_cast.quantize_heads(q, 1, False, dtype=dtype, multiplier=multiplier, recorded=amax)
        payload, scale = reference.quantize_heads(q, spec, 1, False, multiplier)
        assert same(data, payload) and same(scales, scale.expand_as(scales))
        assert amax.item() == q.nan_to_num().abs().max().item()


DELAYED = (
    # do and dp, D, steps
    ("identity", 128, "mul:0.125:-1"),
    ("identity", 64, "mul:0.125:-1;causal:0.0:-1"),
    ("per_tensor_e5m2", 128, "mul:0.125:-1;causal:0.0:-1"),
    ("per_tensor_e4m3", 64, "mul:0.125:-1;keep:0.0:0"),
)


@pytest.mark.parametrize("case", DELAYED, ids=str)
def test_delayed_scales_and_their_amaxes(case: tuple[str, int, str]) -> None:
    """Recorded is what the reference records, but for sums in another order."""
    gradients, width, steps = case
    spec = (
        f"qkv=per_tensor_e4m3 s=per_tensor_e4m3 do={gradients} dp={gradients} o=identity dqkv=identity steps={steps}"
        " dropout=0.0 name="
    )
    q, k, v, do = (noise(2, *size, width, seed=i) for i, size in enumerate(((4, 200), (2, 300), (2, 300), (4, 200))))
    extras = [make_mask("keys", 2, 4, 200, 300)] if "keep" in steps else []
    of_qkv, of_s, of_do, of_dp = torch.tensor([37.0, 448.0, 80.0, 200.0], device="cuda").split(1)
    given = (of_s, None, None) if gradients == "identity" else (of_s, of_do, of_dp)
    outputs, amaxes, state = [], [], torch.zeros(4, 4, device="cuda")[:, 0]
    for kind in ("meaning", "best"):
        cast, forward, backward = (getattr(called, kind) for called in (quantize_qkv, *ATTENTION))
        *parts, amax = cast(q, k, v, "per_tensor_e4m3", of_qkv, True)
        pairs = (parts[:2], parts[2:4], parts[4:])
        o, lse, s_amax = forward(*pairs, extras, None, of_s, spec, width, torch.bfloat16)
        grads = backward(do, *pairs, o, lse, extras, None, *given, [], spec, width)
        outputs.append([o, lse, *grads[:3]])
        amaxes.append(torch.cat([amax, s_amax, *(grads[3:] if gradients != "identity" else [])]))
    assert torch.equal(amaxes[0][0], amaxes[1][0])
    torch.testing.assert_close(amaxes[1][:3], amaxes[0][:3], rtol=1e-3, atol=0)
    torch.testing.assert_close(amaxes[1][3:], amaxes[0][3:], rtol=5e-2, atol=0)  # of outputs that are rounded otherwise
    for a, b in zip(*outputs, strict=True):
        assert rounding.relative(b, a) < (0.15 if gradients != "identity" else 0.06)
    into = quantize_qkv_into.best(q, k, v, "per_tensor_e4m3", of_qkv, state[1:2])
    attention_forward_into.best(
        into[:2], into[2:4], into[4:], extras, None, of_s, spec, width, torch.bfloat16, state[2:3]
    )
    assert torch.equal(state, torch.nn.functional.pad(amaxes[1][:2], (1, 1)))


class Layer(nn.Module):
    """Self-attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768, bias=False), nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def trained(device: str) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """The state after each of five steps in which everything has delayed scales, and outputs and gradients of all."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, generator = Layer().bfloat16().to(device), torch.Generator().manual_seed(1)
    inner = "aot_eager" if device == "cpu" else "inductor"
    backend = fxquant.Backend(fxquant.DelayedScaling(fp8_dpa=True, amax_history_len=4), inner=inner)
    run = torch.compile(model, backend=backend, dynamic=False)
    states: list[dict[str, Tensor]] = []
    values: list[Tensor] = []
    for _ in range(5):
        x, grad = (torch.randn(2, 256, 256, generator=generator).bfloat16().to(device) for _ in range(2))
        model.zero_grad()
        y = run(x)
        y.backward(grad)
        values += [each.float().cpu() for each in (y.detach(), *(p.grad for p in model.parameters()))]
        states.append({name: state.cpu() for name, state in backend.state_dict().items()})
    return states, values


def test_training_has_the_states_of_the_reference() -> None:
    """On the CPU, where the softmax and the gradient of the scores, in e5m2, are rounded by their scales.

    The first of these is 1, so that the step it is used in has the state of no other.
    """
    (states, values), (expected_states, expected_values) = trained("cuda"), trained("cpu")
    for got, expected in zip(states[1:], expected_states[1:], strict=True):
        assert got.keys() == expected.keys() and len(got) == 24
        for name, state in got.items():  # gradients of q, k and v, and of the linear there, come behind roundings
            behind = name.startswith(("qkv.grad_output.", "dqkv."))
            torch.testing.assert_close(state, expected[name], rtol=0.25 if behind else 0.06, atol=0)
    for got, expected in zip(values[3:], expected_values[3:], strict=True):
        assert rounding.relative(got, expected) < 0.15


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: tuple[int, int, int, int, int, int, bool, str | None, Any, float]) -> None:
    batches, heads, kv_heads, queries, keys, width, causal, kind, scaling, dropout = case
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    q, k, v, do = (noise(batches, *size, width, seed=i) for i, size in enumerate(sizes))
    v = v * 3
    v[:, :, : keys // 2] *= 8
    mask = make_mask(kind, batches, heads, queries, keys)
    seed = torch.tensor([2**40 + 5], device="cuda") if dropout else None
    options: dict[str, Any] = {
        "causal": causal, "scale": width**-0.5, "mask": mask, "dropout": dropout, "seed": seed
    }  # fmt: skip
    given: list[Any] = [[q], [k], [v]]
    wide = [x.float() for x in (q, k, v)]
    if scaling is not None:
        given, wide = operands(q, k, v, scaling)
    scores = Scores(**options)
    o, lse = triton_forward.forward(given, scores, torch.bfloat16, scaling=scaling or "head")
    exact, exact_lse = rounding.forward(*wide, **options)
    rounded, _ = rounding.forward(*wide, **options, rounded=scaling is not None)
    assert rounding.relative(o, exact) < 1.2 * rounding.relative(rounded, exact) + 2**-7
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
    if kind == "seen":
        assert not o[:, :, 7].any()
    if kind == "keys":
        assert not o[2].any()
    if scaling is None:
        got = triton_backward.wide_backward(do, (q, k, v), o, lse, scores, (do, do.clone()) if kind else None)
    else:
        got = triton_backward.backward(do, given, o, lse, scores, scaling)
    want = rounding.backward(do, *wide, o, lse, **options, wide=scaling is None)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert rounding.relative(a, b) < 2**-6, name


WARPS = (
    # B, H, Hkv, Sq, Sk, D, causal, scales
    (1, 4, 2, 1024, 1024, 128, False, "head"),
    (2, 4, 2, 700, 130, 128, True, "tensor"),
    (1, 4, 2, 333, 777, 128, True, "block"),
    (2, 4, 1, 1000, 900, 128, False, "block"),
    (1, 2, 1, 1, 77, 128, False, "head"),
    (1, 2, 2, 100, 1, 128, True, "head"),
    (2, 16, 4, 2100, 2100, 128, True, "head"),
    (1, 4, 2, 333, 777, 64, False, "head"),
    (1, 32, 8, 2100, 1500, 64, True, "block"),
    (1, 4, 2, 300, 513, 256, True, "head"),
    (1, 32, 8, 1100, 1024, 256, False, "tensor"),
)


@pytest.mark.parametrize("case", WARPS, ids=str)
def test_warps_with_work_of_their_own(case: tuple[int, int, int, int, int, int, bool, Any]) -> None:
    """Against plain torch that rounds where they do, and against the kernel for masks; the same bits each time."""
    batches, heads, kv_heads, queries, keys, width, causal, scaling = case
    if not (knows_gluon() and is_hopper(torch.device("cuda"))):
        pytest.skip("no such kernel here")
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (noise(batches, *size, width, seed=i) for i, size in enumerate(sizes))
    v = v * 3
    v[:, :, : keys // 2] *= 8
    given, wide = operands(q, k, v, scaling)
    options: dict[str, Any] = {"causal": causal, "scale": width**-0.5}
    scores = Scores(**options)
    o, lse, weights = warp_attention.forward(given, scores, torch.bfloat16, scaling, record=True)
    exact, exact_lse = rounding.forward(*wide, **options)
    rounded, _ = rounding.forward(*wide, **options, rounded=True)
    assert rounding.relative(o, exact) < 1.2 * rounding.relative(rounded, exact) + 2**-7
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
    largest = torch.zeros(1, device="cuda")
    masked, _ = triton_forward.forward(given, scores, torch.bfloat16, scaling=scaling, s_amax=largest)
    assert rounding.relative(o, masked.double()) < 2 * rounding.relative(rounded, exact) + 2**-7
    torch.testing.assert_close(weights.amax().reshape(1), largest, rtol=1e-4, atol=0)
    for _ in range(3):
        again = warp_attention.forward(given, scores, torch.bfloat16, scaling)
        assert torch.equal(again[0], o)
        assert torch.equal(again[1], lse)


@pytest.mark.parametrize("case", [case for case in WARPS if case[5] == 128], ids=str)
def test_a_backward_whose_warps_have_work_of_their_own(
    case: tuple[int, int, int, int, int, int, bool, Any],
) -> None:
    """Against plain torch that rounds where it does; dk and dv have the same bits each time."""
    batches, heads, kv_heads, queries, keys, width, causal, scaling = case
    if not (knows_gluon() and is_hopper(torch.device("cuda"))):
        pytest.skip("no such kernel here")
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    q, k, v, do = (noise(batches, *size, width, seed=i) for i, size in enumerate(sizes))
    given, wide = operands(q, k, v, scaling)
    options: dict[str, Any] = {"causal": causal, "scale": width**-0.5}
    o, lse = (x.float() for x in rounding.forward(*wide, **options))
    o = o.to(torch.bfloat16)
    got = triton_backward.backward_by_warps(do, given, o, lse, Scores(**options), scaling)
    want = rounding.backward(do, *wide, o, lse, **options)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert rounding.relative(a, b) < 2**-6, name
    again = triton_backward.backward_by_warps(do, given, o, lse, Scores(**options), scaling)
    assert all(map(torch.equal, got[1:], again[1:]))


def test_the_operator_has_the_fake_that_it_needs() -> None:
    if not (knows_gluon() and is_hopper(torch.device("cuda"))):
        pytest.skip("no such kernel here")
    q, k, v = (noise(1, 2, 200, 64, seed=i) for i in range(3))
    q8, q_scale, k8, k_scale, v8, v_scale = triton_head_cast.quantize_qkv(q, k, v, "head")
    arguments = (q8, k8, v8, q_scale, k_scale, v_scale, True, 0.125, "head", torch.float16, True)
    torch.library.opcheck(torch.ops.fxquant_kernels.attention_fprop.default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("causal", (False, True))
def test_cudnn_gives_what_its_backward_takes(causal: bool) -> None:
    q, k, v, do = (noise(2, heads, 512, 128, seed=i) for i, heads in enumerate((8, 2, 2, 8)))
    options: dict[str, Any] = {"causal": causal, "scale": 0.1}
    o, lse = cudnn_attention(q, k, v, **options)
    wide = [x.float() for x in (q, k, v)]
    exact, exact_lse = rounding.forward(*wide, **options)
    assert rounding.relative(o, exact) < 2**-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
    got = cudnn_attention_backward(do, q, k, v, o, lse, **options)
    for a, b in zip(got, rounding.backward(do, *wide, o, lse, **options, wide=True), strict=True):
        assert rounding.relative(a, b) < 2**-6


OPERATORS = (
    # qkv, s, do and dp, steps, dropout
    ("per_head_e4m3", "per_head_e4m3", "identity", "mul:0.125:-1", 0.0),
    ("per_head_128_e4m3", "per_head_128_e4m3", "identity", "mul:0.125:-1;keep:0.0:0", 0.1),
    ("per_tensor_e4m3", "per_tensor_e4m3", "per_tensor_e4m3", "mul:0.125:-1;keep:0.0:0", 0.0),
    ("mxfp8_e4m3", "mxfp8_e4m3", "identity", "mul:0.125:-1;causal:0.0:-1", 0.0),
    ("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3", "mul:0.125:-1;keep:0.0:0", 0.1),
)


@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_operators_are_near_the_reference(case: tuple[str, str, str, str, float]) -> None:
    """As near as it is to round P at another scale, and in FP8 not to round the gradient of the scores."""
    qkv, s, do_format, steps, dropout = case
    spec = (
        f"qkv={qkv} s={s} do={do_format} dp={do_format} o=identity dqkv=identity steps={steps} dropout={dropout} name="
    )
    sizes = ((4, 200), (2, 300), (2, 300), (4, 200))
    q, k, v, do = (noise(2, *size, 64, seed=i) for i, size in enumerate(sizes))
    extras = [make_mask("keys", 2, 4, 200, 300)] if "keep" in steps else []
    seed = torch.tensor([11], device="cuda") if dropout else None
    parts = quantize_qkv.meaning(q, k, v, qkv)
    pairs = (parts[:2], parts[2:4], parts[4:])
    outputs = []
    for kind in ("meaning", "best"):
        forward, backward = (getattr(called, kind) for called in ATTENTION)
        o, lse, _ = forward(*pairs, extras, seed, None, spec, 64, torch.bfloat16)
        grads = backward(do, *pairs, o, lse, extras, seed, None, None, None, [], spec, 64)
        outputs.append([o, lse, *grads[:3]])
    for a, b in zip(*outputs, strict=True):
        assert rounding.relative(b, a) < (0.12 if do_format.startswith("per") else 0.06)
