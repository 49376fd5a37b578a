"""Every spelling of attention: read as steps on its scores, and rewritten to the same function and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_walk import Calls, Rewrite, check, randn
from torch import Tensor, fx, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fxquant.compat.private import flex_attention_op
from fxquant.decisions import SkipReason
from fxquant.formats import AttentionSpec
from fxquant.passes.find.facts import Match
from fxquant.passes.find.mha import open_modules
from fxquant.passes.find.walk import find_matmuls
from fxquant.passes.graph.builder import Builder


@dataclass
class Attends(Rewrite):
    """Writes every attention as one operator that quantizes nothing."""

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        matches = find_matmuls(gm)
        if self.open_attention and open_modules(matches):
            matches = find_matmuls(gm)
        self.found += matches
        for match in {m.attention.node: m for m in matches if m.attention is not None}.values():
            write(match)
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(gm)
        return gm.forward

    def steps(self) -> str:
        (attention,) = {m.attention.node: m.attention for m in self.found if m.attention is not None}.values()
        return " ".join(f"{s.kind}{'' if s.extra < 0 else s.extra}" for s in attention.steps)


def write(match: Match) -> None:
    builder, attention = Builder(match.node), match.attention
    assert attention is not None
    spec = AttentionSpec(steps=attention.steps, dropout=attention.dropout)
    result = attention.emit(
        builder,
        lambda q, k, v, extras: builder.call(torch.ops.fxquant.attention.default, q, k, v, list(extras), str(spec)),
    )
    match.node.replace_all_uses_with(result)
    match.node.graph.erase_node(match.node)
    for node in reversed(list(result.graph.nodes)):
        if node in attention.inside:
            result.graph.erase_node(node)


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


def made(shapes: Sequence[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    return [shape if isinstance(shape, Tensor) else randn(*shape) for shape in shapes]


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


SLOPES, DOCUMENTS = torch.tensor([0.5, 0.25, 0.125, 0.0]), torch.arange(128).expand(2, -1) // 40
BLOCKS = {
    "causal": create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu"),
    "window": create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 9), None, None, 128, 128, device="cpu"),
    "documents": create_block_mask(
        lambda b, h, i, j: (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (i >= j) & (j != 3), 2, None, 128, 128, device="cpu"
    ),
}
FLEX: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "mul"),
    "causal": ({"block_mask": BLOCKS["causal"], "scale": 0.3}, "mul causal"),
    "window": ({"block_mask": BLOCKS["window"]}, "mul keep0 causal"),
    "documents": ({"block_mask": BLOCKS["documents"]}, "mul keep0"),
    "causal scores": ({"score_mod": lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf)}, "mul causal"),
    "cap": ({"score_mod": lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0)}, "mul mul tanh mul"),
    "alibi": ({"score_mod": lambda s, b, h, i, j: s + SLOPES[h] * (j - i), "block_mask": BLOCKS["causal"]},
              "mul add0 causal"),
    "cap, bias of places": (
        {"score_mod": lambda s, b, h, i, j: -(torch.tanh(s * 0.1).float() * 10 - (i - j).abs() * 0.1) + 1},
        "mul mul tanh mul add0 mul add",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name: str) -> None:
    """Against torch's own, which runs on a CPU without gradients and without graphs."""
    settings, steps = FLEX[name]
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in made([(2, 4, 128, 16), (2, 2, 128, 16), (2, 2, 128, 16)]))
    backend = Attends()
    found = torch.compile(flex_attention, backend=backend, fullgraph=True)(q, k, v, enable_gqa=True, **settings)
    assert backend.steps() == steps
    assert not any(node.target is flex_attention_op for node in backend.graphs[0].graph.nodes)
    torch.testing.assert_close(found, flex_attention(q, k, v, enable_gqa=True, **settings), rtol=1e-4, atol=1e-4)


def test_flex_attention_with_a_learned_bias_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # no backward on a CPU
    torch._dynamo.reset()
    q, slopes = randn(2, 4, 128, 16), SLOPES.clone().requires_grad_()

    def by_hand(q: Tensor, slopes: Tensor) -> Tensor:
        places = torch.arange(128)
        scores = q @ q.mT / 4 + slopes[:, None, None] * (places - places[:, None])
        return scores.softmax(-1) @ q

    def flexible(q: Tensor, slopes: Tensor) -> Tensor:
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i))

    backend = Attends()
    torch.compile(flexible, backend=backend, fullgraph=True)(q, slopes).square().sum().backward()
    found = [q.grad.clone(), slopes.grad.clone()]
    q.grad = slopes.grad = None
    by_hand(q, slopes).square().sum().backward()
    assert all(match.attention.learned for match in backend.found)
    torch.testing.assert_close(found, [q.grad, slopes.grad], rtol=1e-3, atol=1e-3)


FLEX_REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "log-sum-exp": ({"return_lse": True}, "more than its output is read"),
    "score squared": ({"score_mod": lambda s, b, h, i, j: s * s}, "has mul of two scores"),
    "score exp": ({"score_mod": lambda s, b, h, i, j: s.exp()}, "has exp"),
    "replaced": ({"score_mod": lambda s, b, h, i, j: i - j + 0.0}, "its scores are replaced"),
    "not elementwise": ({"score_mod": lambda s, b, h, i, j: s + SLOPES.sum() * i}, "sum in one of its functions"),
    "finite fill": ({"score_mod": lambda s, b, h, i, j: torch.where(i >= j, s, -1e9)}, "has where"),
}


@pytest.mark.parametrize("name", FLEX_REASONS)
def test_flex_attention_that_is_not_read_says_why(name: str) -> None:
    """Its products are inside of one operator: there is nothing to offer as roles."""
    settings, reason = FLEX_REASONS[name]
    torch._dynamo.reset()
    backend = Rewrite()
    torch.compile(lambda q: flex_attention(q, q, q, **settings), backend=backend, fullgraph=True)(
        torch.randn(1, 4, 128, 16)
    )
    assert [match.module_type for match in backend.found] == ["dpa"]
    assert backend.reasons() == [SkipReason.ATTENTION]
    assert backend.found[0].skip[1].startswith("flex_attention: ") and reason in backend.found[0].skip[1]


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_is_one_attention_unless_its_weights_are_read(need_weights: bool) -> None:
    layer, x = nn.MultiheadAttention(32, 2), randn(7, 3, 32)
    model = Calls(lambda x: layer(x, x, x, need_weights=need_weights)[0])
    backend = check(model, [x], Attends(open_attention=True), tolerance=1e-4)
    kinds = [match.module_type for match in backend.found]
    assert kinds == ["linear", "dpa", "linear"] if not need_weights else kinds[0] == kinds[-1] == "linear"
    assert sum(match.attention is not None for match in backend.found) > 0
