"""Every spelling of attention: read as steps on its scores, and rewritten to the same function and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attending import Attends, made, write
from rewriting import Calls, check, randn
from torch import Tensor, nn

from fxquant.passes.find.walk import find_matmuls

Q, K, V = (2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 8)

FEW = [(2, 6, 5, 16), (2, 3, 7, 16), (2, 3, 7, 8)]

BOOL = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.4

LOWER = torch.ones(5, 7, dtype=torch.bool).tril()


def repeat_kv(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def llama(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask[:, :, :, : k.shape[-2]]
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.3, training=False), v).transpose(1, 2).contiguous()


def gpt_oss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([weights, column], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return torch.matmul(F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1], v)


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    scores = torch.baddbmm(slopes, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5, alpha=0.25)
    weights = (scores.view(2, 3, 5, 7) + BOOL * -3.0).softmax(-1).view(6, 5, 7)
    return weights.bmm(v.flatten(0, 1)).view(2, 3, 5, 8)


def gemma(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT * 0.25 / 5.0) * 5.0
    return (scores + torch.zeros(5, 7).masked_fill(~LOWER, -1e30)).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT)
    scores += torch.where(LOWER, 0.0, -3.0)
    scores *= 0.5
    return scores.softmax(-1) @ v


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def grouped_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqgrd,bkgd->bgrqk", q, k) + BOOL[:, :, None]
    return torch.einsum("bgrqk,bkgd->bqgrd", scores.softmax(-1), v)


def methods_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.mul_(0.25)
    scores.masked_fill_(~LOWER, -math.inf)
    return scores.softmax(-1) @ v


def zeroed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).masked_fill(~BOOL, -math.inf).softmax(-1)
    return weights.masked_fill(~BOOL, 0.0) @ v


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(x.shape[0] * 6, *x.shape[2:]) for x in (q * 0.5, repeat_kv(k, 2), repeat_kv(v, 2)))
    scores = torch.bmm(q, k.transpose(1, 2)).view(-1, 6, 5, 7) + torch.zeros(5, 7).masked_fill(~LOWER, -math.inf)
    return torch.bmm(scores.softmax(-1).flatten(0, 1), v).view(-1, 6, 5, 8)


def sdpa(**settings: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **settings)


SPELLINGS: dict[str, tuple[Callable[..., Tensor], list[Any], str]] = {
    "plain": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, [Q, K, V], ""),
    "llama": (llama, [*FEW, (2, 1, 5, 7)], "mul add0"),
    "t5": (lambda q, k, v, b: ((q @ k.transpose(3, 2)) + b).float().softmax(-1).type_as(q) @ v, [Q, K, V, (1, 3, 5, 7)],
           "add0"),
    "gpt2": (lambda q, k, v: torch.where(LOWER, q @ k.mT / math.sqrt(16), torch.full([], -1e30)).softmax(-1) @ v,
             [Q, K, V], "mul fill0"),
    "where": (lambda q, k, v: torch.where(~LOWER, -math.inf, q @ k.mT / torch.tensor(4.0)).softmax(-1) @ v, [Q, K, V],
              "mul0 fill1"),
    "bert": (lambda q, k, v: (q @ k.mT / 4).masked_fill(~BOOL, -1e9).softmax(-1) @ v, [Q, K, V], "mul fill0"),
    "alibi": (alibi, [Q, K, V, (6, 1, 7)], "mul add0 add1"),
    "gemma": (gemma, [Q, K, V], "mul mul tanh mul add0"),
    "gpt_oss": (gpt_oss, [Q, K, V, (2, 1, 5, 7), (3,)], "mul add0 sink1"),
    "learned scale": (lambda q, k, v, t: (q @ k.mT * t.exp()).softmax(-1) @ v, [Q, K, V, (3, 1, 1)], "mul0"),
    "by hand": (by_hand, [Q, K, V], ""),
    "in place": (in_place, [Q, K, V], "add0 mul"),
    "einsum": (lambda q, k, v: torch.einsum("hbqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->hbqk", q, k).softmax(-1), v),
               [(2, 5, 3, 16), (2, 7, 3, 16), (2, 7, 3, 8)], ""),
    "grouped einsum": (grouped_einsum, [(2, 5, 3, 2, 16), (2, 7, 3, 16), (2, 7, 3, 8)], "add0"),
    "one key head": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, [Q, (2, 1, 7, 16), (2, 1, 7, 8)], ""),
    "unbatched": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, [(5, 16), (7, 16), (7, 8)], ""),
    "where of a number that is computed": (
        lambda q, k, v, t: torch.where(LOWER, q @ k.mT, t.detach().sum() - 9).softmax(-1) @ v, [Q, K, V, (3,)],
        "fill0 add1",
    ),
    "where of a constant's cast": (
        lambda q, k, v: torch.where(LOWER, q @ k.mT, torch.tensor(-1e9, dtype=torch.float32).to("cpu")).softmax(-1) @ v,
        [Q, K, V], "fill0",
    ),
    "methods in place": (methods_in_place, [Q, K, V], "mul fill0"),
    "zeroed": (zeroed, [Q, K, V], "fill0"),
    "dtype of the scores": (lambda q, k, v: (lambda s: s.float().softmax(-1).type_as(s) @ v)(q @ k.mT), [Q, K, V], ""),
    "bounded": (lambda q, k, v: torch.max(q @ k.mT, torch.tensor(torch.finfo(q.dtype).min)).softmax(-1) @ v, [Q, K, V],
                ""),
    "part of a bias": (lambda q, k, v, b: torch.add(q @ k.mT, b, alpha=0.5).sub(b, alpha=2).softmax(-1) @ v,
                       [Q, K, V, (3, 5, 7)], "add0 add1"),
    "special": (lambda q, k, v: torch.special.softmax(q @ k.mT, -1) @ v, [Q, K, V], ""),
    "keys in front": (
        lambda q, k, v: torch.einsum("bqkh,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqkh", q, k).softmax(2), v),
        [(2, 5, 3, 16), (2, 7, 3, 16), (2, 7, 3, 8)], "",
    ),
    "batch behind, biased": (
        lambda q, k, v, b: torch.einsum("ijbn,jbnd->ibnd", (torch.einsum("ibnd,jbnd->ijbn", q, k) + b).softmax(1), v),
        [(5, 2, 3, 16), (7, 2, 3, 16), (7, 2, 3, 8), (5, 7, 1, 3)], "add0",
    ),
    "columns of queries": (lambda q, k, v: v.mT @ (k @ q.mT + BOOL.mT).softmax(-2), [Q, K, V], "add0"),
    "transposed weights": (lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1).transpose(2, 3), [Q, K, V], ""),
    "channels first": (lambda q, k, v: torch.bmm(v, torch.bmm(q.permute(0, 2, 1), k).softmax(2).permute(0, 2, 1)),
                       [(2, 16, 5), (2, 16, 7), (2, 8, 7)], ""),
    "scaled before": (lambda q, k, v: ((q * 0.5) @ (k / 2.0).mT).softmax(-1) @ v, [Q, K, V], "mul"),
    "merged": (merged, FEW, "mul add0"),
    "fused": (sdpa(scale=0.3), [Q, K, V], "mul"),
    "fused, bool": (sdpa(), [Q, K, V, BOOL], "mul keep0"),
    "fused, bias": (sdpa(), [Q, K, V, (1, 1, 5, 7)], "mul add0"),
    "fused, causal, grouped": (sdpa(is_causal=True, enable_gqa=True), FEW, "mul causal"),
    "fused, one key head": (sdpa(is_causal=True), [Q, (2, 1, 7, 16), (2, 1, 7, 8)], "mul causal"),
    "fused, 3 axes": (sdpa(), [(6, 5, 16), (6, 7, 16), (6, 7, 8)], "mul"),
    "fused, repeated": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, dim=1)),
        FEW, "mul",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    function, shapes, steps = SPELLINGS[name]
    backend = check(Calls(function), made(shapes), Attends(), tolerance=1e-4)
    assert backend.steps() == steps
    assert {match.module_type for match in backend.found} == {"dpa"} and set(backend.reasons()) == {None}
    (attention,) = (n for n in backend.graphs[0].graph.nodes if "fxquant.attention" in str(n.target))
    if shapes[:3] == FEW:
        assert attention.args[1].meta["example_value"].shape == FEW[1], "keys as they were before they were repeated"


@pytest.mark.parametrize("name", ["llama", "merged", "fused, bias"])
def test_spelling_with_dynamic_sizes(name: str) -> None:
    function, shapes, steps = SPELLINGS[name]
    inputs = made(shapes)
    for x in inputs[:3]:
        torch._dynamo.mark_dynamic(x, 0)
    backend = check(Calls(function), inputs, Attends(), tolerance=1e-4)
    assert backend.steps() == steps


REASONS: dict[str, tuple[Callable[..., Any], str]] = {
    "weights returned": (lambda q, k, v: (lambda w: (w @ v, w))((q @ k.mT).softmax(-1)), "reads its scores or weights"),
    "other axis": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "softmax is over axis -2"),
    "two contexts": (lambda q, k, v: (lambda w: (w @ v, w @ v.sin()))((q @ k.mT).softmax(-1)), "several attentions"),
    "mask of scores": (lambda q, k, v: (lambda s: s.masked_fill(s > 9, -9.0).softmax(-1) @ v)(q @ k.mT),
                       "computed from the scores"),
    "heads of values": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v[:, :1], "keys and values differ in their heads"),
    "repeated": (lambda q, k, v: ((q[0] @ k[0].mT) + BOOL).softmax(-1) @ v, "add repeats the scores"),
    "clamped": (lambda q, k, v: (q @ k.mT).clamp(-9, 9).softmax(-1) @ v, "clamp is not read"),
    "masked otherwise": (lambda q, k, v: (q @ k.mT).masked_fill(~LOWER, -9.0).softmax(-1).masked_fill(~LOWER, 0.0) @ v,
                         "masked otherwise than its scores"),
    "rounded weights": (lambda q, k, v: (q @ k.mT).softmax(-1).nan_to_num() @ v, "nan_to_num is not read"),
    "logarithms": (lambda q, k, v: (q @ k.mT).log_softmax(-1).exp() @ v, "exp is not read"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_one_attention_stays_products_and_says_why(name: str) -> None:
    function, reason = REASONS[name]
    backend = check(Calls(function), made([Q, K, V]), Attends(), tolerance=1e-4)
    assert {match.module_type for match in backend.found} == {"matmul"}
    assert all(reason in match.remark and match.emit is not None for match in backend.found)


def test_exported_attention_is_found_before_and_after_decomposition() -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            by_hand = (q @ k.mT).to(torch.float64).softmax(-1).to(q.dtype) @ v
            return fused + by_hand + F.scaled_dot_product_attention(q, k, v, attn_mask=BOOL)

    inputs = [x.detach() for x in made([Q, K, V])]
    program = torch.export.export(Model(), tuple(inputs))
    for form in (program, program.run_decompositions()):
        gm = form.graph_module
        matches = find_matmuls(gm)
        attentions = {m.attention.node: m for m in matches if m.attention is not None}
        assert len(attentions) == 3 and {m.module_type for m in matches} == {"dpa"}
        for match in attentions.values():
            write(match)
        gm.recompile()
        torch.testing.assert_close(gm(*gm_inputs(form, inputs))[0], Model()(*inputs), rtol=1e-4, atol=1e-4)


EXPORTED = {
    "einsum": lambda q, k, v: torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1), v),
    "keys in front": SPELLINGS["keys in front"][0],
    "batch behind": lambda q, k, v: torch.einsum(
        "ijbn,jbnd->ibnd", torch.einsum("ibnd,jbnd->ijbn", q, k).softmax(1), v
    ),
    "matmul": lambda q, k, v: ((q * 0.5) @ k.mT).softmax(-1) @ v,
    "one key head": lambda q, k, v: (q @ k[:, :1].mT).softmax(-1) @ v[:, :1],
    "channels first": lambda q, k, v: v.mT @ (k @ q.mT).softmax(-2),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_decomposed_attention_with_a_dynamic_batch_is_found(name: str) -> None:
    """What was permuted, and merged for `bmm`, has batch and heads as two axes again."""
    inputs, more = torch.randn(3, 3, 4, 5, 16).unbind(), torch.randn(3, 7, 4, 5, 16).unbind()
    batch = 1 if name == "batch behind" else 0
    inputs, more = ([x.transpose(0, batch).contiguous() for x in each] for each in (inputs, more))
    shapes = (tuple({batch: torch.export.Dim("batch")} for _ in range(3)),)
    model = Calls(EXPORTED[name])
    gm = torch.export.export(model, tuple(inputs), dynamic_shapes=shapes).run_decompositions().graph_module
    matches = find_matmuls(gm)
    (attention,) = {m.attention.node: m for m in matches if m.attention is not None}.values()
    assert attention.attention.axes == 4
    write(attention)
    gm.recompile()
    for each in (inputs, more):
        torch.testing.assert_close(gm(*each)[0], model(*each), rtol=1e-4, atol=1e-4)


def gm_inputs(program: torch.export.ExportedProgram, inputs: Sequence[Tensor]) -> list[Any]:
    """What the graph of a program takes: its constants, then the inputs."""
    constants = {**program.constants, **program.state_dict}
    given = iter(inputs)
    specs = program.graph_signature.input_specs
    return [next(given) if spec.target is None else constants[spec.target] for spec in specs]


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_is_one_attention_unless_its_weights_are_read(need_weights: bool) -> None:
    layer, x = nn.MultiheadAttention(32, 2), randn(7, 3, 32)
    model = Calls(lambda x: layer(x, x, x, need_weights=need_weights)[0])
    backend = check(model, [x], Attends(open_attention=True), tolerance=1e-4)
    kinds = [match.module_type for match in backend.found]
    assert kinds == ["linear", "dpa", "linear"] if not need_weights else kinds[0] == kinds[-1] == "linear"
    assert sum(match.attention is not None for match in backend.found) > 0
