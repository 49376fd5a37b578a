"""Attention under recipes: its roles, what may stand in its slots, what is reported, saved and remembered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import Asked, Recorder, assert_same_bits, eager_backend, hybrid, stacked, train_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import (
    Backend,
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8HeadQuantizer,
    IdentityQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizerRole,
    Recipe,
    RecipeError,
    Report,
    factories,
)

FP8, HEAD, MX, HIGH = Float8CurrentScalingQuantizer(), Float8HeadQuantizer(), MXFP8Quantizer(), IdentityQuantizer()


class Block(nn.Module):
    """Grouped-query attention by itself, fused or written by hand."""

    def __init__(self, chain: bool = False, dropout: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.attn = Attend(chain, dropout)
        self.qkv, self.recompute = nn.Linear(64, 128), recompute

    def body(self, x: Tensor) -> Tensor:
        return self.attn(self.qkv(x).unflatten(-1, (8, 16)).transpose(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


class Attend(nn.Module):
    def __init__(self, chain: bool, dropout: float) -> None:
        super().__init__()
        self.chain, self.dropout = chain, dropout

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.split((4, 2, 2), 1)
        if not self.chain:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=True)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mask = torch.full((q.shape[-2], k.shape[-2]), -torch.inf).triu(1)
        return F.dropout((q @ k.mT / 4 + mask).softmax(-1), self.dropout) @ v


def by_slot(fp8_dpa: bool | None = None, **slots: object) -> CustomRecipe:
    """A recipe for attention alone; slots that are not given are in high precision."""
    return CustomRecipe(qfactory=lambda role: slots.get(role.tensor_type, HIGH), fp8_dpa=fp8_dpa)


def block(**settings: object) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block(**settings), torch.randn(2, 32, 64, requires_grad=True)


def run(recipe: Recipe | str, steps: int = 1, **settings: object) -> tuple[dict[str, Tensor], Backend]:
    """The last of several steps, and its backend."""
    model, x = block(**settings)
    torch.compiler.reset()
    backend = eager_backend(recipe)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(steps):
        torch.manual_seed(1)
        result = train_step(model, compiled, x)
    return result, backend


def plain(**settings: object) -> dict[str, Tensor]:
    model, x = block(**settings)
    return train_step(model, model, x)


def attention(report: Report) -> dict[tuple[str, str, str], str]:
    """What stands in each slot in each GEMM and direction."""
    return {
        (d.role.tensor_type, str(d.gemm), str(d.direction)): fxquant.report.result(d)
        for d in report.decisions
        if d.role.module_type == "dpa"
    }


def test_roles() -> None:
    """Invariant 7: a slot for operands, softmax and both gradients, hints for the results, all by the layer's name."""
    asked = Asked(Float8CurrentScaling(fp8_dpa=True))
    run(CustomRecipe(qfactory=asked), chain=True)
    roles = [role for role in asked.roles if role.module_type != "linear"]
    assert roles == [
        *(QuantizerRole("dpa", slot, "attn") for slot in ("qkv", "s", "do", "dp")),
        QuantizerRole("", "", "attn.dpa_output"),
        QuantizerRole("", "", "attn.dpa_grad_input"),
    ]


def test_the_gate_is_what_the_factory_returns() -> None:
    quantized = {"per_tensor_e4m3"}
    for fp8_dpa, expected in ((None, quantized), (True, quantized), (False, {"skipped: HIGH_PRECISION"})):
        _, backend = run(by_slot(fp8_dpa, qkv=FP8, s=FP8, do=FP8, dp=FP8))
        assert set(attention(backend.report()).values()) == expected
        assert (backend.report().coverage > 0.3) == (expected == quantized)
    _, backend = run(by_slot(True))
    assert set(attention(backend.report()).values()) == {"skipped: HIGH_PRECISION"}


@pytest.mark.parametrize("chain", [False, True])
def test_attention_in_high_precision_keeps_its_nodes(chain: bool) -> None:
    assert_same_bits(run("high_precision", chain=chain)[0], run(by_slot(), chain=chain)[0])
    _, backend = run("mxfp8", chain=chain)
    assert set(attention(backend.report()).values()) == {"skipped: HIGH_PRECISION"}


def test_what_no_attention_takes_stays_in_high_precision_unless_it_is_demanded() -> None:
    _, backend = run(CustomRecipe(qfactory=factories.nvfp4))
    (shown,) = set(attention(backend.report()).values())
    assert shown.startswith("skipped: ATTENTION (NVFP4Quantizer(") and "for qkv is not for attention" in shown
    with pytest.raises(Exception, match=r"layer 'attn', attention slot qkv: NVFP4Quantizer\("):
        run(CustomRecipe(qfactory=factories.nvfp4, fp8_dpa=True))


@pytest.mark.parametrize(
    ("slots", "slot", "problem"),
    [
        (dict(qkv=FP8, s=NVFP4Quantizer(), do=FP8, dp=FP8), "s", "NVFP4Quantizer.* is not for attention"),
        (dict(qkv=Float8BlockQuantizer(), s=FP8, do=FP8, dp=FP8), "qkv", "Float8BlockQuantizer.* is not for attention"),
        (dict(qkv=FP8, s=FP8, do=FP8, dp=hybrid(FP8, MX)), "dp", "Hybrid"),
        (dict(s=FP8, do=FP8, dp=FP8), "qkv", "IdentityQuantizer.* stands beside FP8 in s, do, dp"),
        (dict(qkv=FP8, do=FP8, dp=FP8), "s", "IdentityQuantizer.* stands beside FP8"),
        (dict(qkv=FP8, s=FP8, do=FP8), "dp", "IdentityQuantizer.* stands beside Float8Current.* in do"),
        (dict(qkv=FP8, s=FP8, dp=FP8), "do", "IdentityQuantizer.* stands beside Float8Current.* in dp"),
        (dict(qkv=MX, s=MX, do=FP8, dp=MX), "do", ".*stands beside MXFP8 in qkv"),
        (dict(qkv=FP8, s=MX, do=FP8, dp=FP8), "s", ".*stands beside Float8CurrentScalingQuantizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_slots_that_do_not_go_together_are_refused_when_compiling(
    slots: dict[str, object], slot: str, problem: str
) -> None:
    """Invariant 51: the error names the layer, the slot and what to return."""
    model, x = block()
    torch.compiler.reset()
    with pytest.raises(Exception, match=f"layer 'attn', attention slot {slot}: {problem}.*[Rr]eturn") as raised:
        fxquant.compile(model, by_slot(**slots), fullgraph=True)(x)
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), RecipeError)


PAIRS = {
    "current_scaling": (factories.current_scaling, Float8CurrentScaling(fp8_dpa=True)),
    "mxfp8": (factories.mxfp8, MXFP8BlockScaling(fp8_dpa=True)),
    "delayed_scaling": (factories.delayed_scaling, DelayedScaling(fp8_dpa=True)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep if name != "current_scaling" else ()) for name in PAIRS]
)
def test_a_factory_gives_the_bits_of_its_recipe(name: str) -> None:
    """Invariant 48."""
    factory, recipe = PAIRS[name]
    (first, _), (second, _) = run(CustomRecipe(qfactory=factory), steps=2), run(recipe, steps=2)
    assert_same_bits(first, second)


RECIPES = {
    "tensor": by_slot(qkv=FP8, s=FP8, do=FP8, dp=FP8),
    "head": by_slot(qkv=HEAD, s=HEAD, do=HEAD, dp=HEAD),
    "head, backward in high precision": by_slot(qkv=HEAD, s=HEAD),
    "blocks": by_slot(qkv=Float8HeadQuantizer(block_len=128), s=HEAD),
    "mxfp8": by_slot(qkv=MX, do=MX),
    "delayed": CustomRecipe(
        qfactory=lambda role: HIGH if role.module_type == "linear" else DelayedScalingRequest(amax_history_len=2)
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep if name == "tensor" else ()) for name in RECIPES]
)
def test_training_step(name: str) -> None:
    chain = name in ("head", "delayed")
    result, backend = run(RECIPES[name], steps=2, chain=chain)
    reference = plain(chain=chain)
    assert result.keys() == reference.keys()
    for key, got in result.items():
        cosine = torch.cosine_similarity(got.flatten().double(), reference[key].flatten().double(), 0)
        assert cosine > 0.98, key
    shown = attention(backend.report())
    backward = {key: value for key, value in shown.items() if key[0] in ("do", "dp")}
    assert len(shown) == 9
    if "high" in name or name == "blocks":
        assert set(backward.values()) == {"skipped: HIGH_PRECISION"}
        assert shown["s", "wgrad", "columnwise"].endswith("(computed again in high precision)")
        assert shown["qkv", "dgrad", "columnwise"].endswith("(as stored, dequantized)")
    if name == "mxfp8":
        assert shown["s", "fprop", "rowwise"].endswith("(MXFP8 attention leaves it unquantized)")


def test_delayed_attention_has_a_scale_for_each_slot() -> None:
    """Invariant 8 too: MXFP8 has none."""
    _, backend = run(RECIPES["delayed"], steps=3)
    state = stacked(backend.state_dict())
    assert state["scale"].shape == (6,) and (state["scale"] != 1).all()
    assert state["amax_history"].shape == (2, 6)
    assert run(RECIPES["mxfp8"])[1].state_dict() == {}


@pytest.mark.parametrize("name", ["head", pytest.param("delayed", marks=pytest.mark.sweep)])
def test_recomputed_attention_gives_the_same_bits(name: str) -> None:
    """Invariant 45, with dropout: the mask is the same in the recomputed forward and in the backward."""
    recipe = RECIPES[name]
    steps = 1 if name == "delayed" else 2
    assert_same_bits(run(recipe, steps, dropout=0.3)[0], run(recipe, steps, dropout=0.3, recompute=True)[0])


def test_attention_that_is_no_one_attention_is_offered_as_products() -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = (q @ k.mT).softmax(-1)
        return weights @ v, weights.mean(1)

    q, k, v = torch.randn(3, 2, 4, 32, 32)
    for recipe, expected in (
        (CustomRecipe(qfactory=lambda role: FP8), "per_tensor_e4m3 (attention of "),
        (CustomRecipe(qfactory=lambda role: HIGH), "skipped: ATTENTION (attention of "),
    ):
        torch.compiler.reset()
        backend = eager_backend(recipe)
        torch.compile(forward, backend=backend, fullgraph=True)(q, k, v)
        decisions = backend.report().decisions
        assert {d.role.module_type for d in decisions} == {"matmul"} and len(decisions) == 4
        assert all(fxquant.report.result(d).startswith(expected) for d in decisions)
        assert all(d.detail.endswith("reads its scores or weights too") for d in decisions)


def test_half_of_what_is_saved_is_saved() -> None:
    """q, k and v in eight bits, the output as it is, and the log-sum-exp; no 16-bit q, k or v."""
    q, k, v = (torch.randn(2, heads, 64, 32, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # sines, so that no operand is an input, which is there anyway
        return F.scaled_dot_product_attention(q.sin(), k.sin(), v.sin(), is_causal=True, enable_gqa=True).cos()

    torch.compiler.reset()
    backend = Recorder(by_slot(qkv=HEAD, s=HEAD))
    torch.compile(forward, backend=backend, fullgraph=True)(q, k, v).sum().backward()
    (forward_graph, _) = backend.graphs
    (call,) = forward_graph.graph.find_nodes(op="call_function", target=torch.ops.fxquant.attention_forward.default)
    (output,) = forward_graph.graph.find_nodes(op="output")
    saved = {node for node in output.args[0] if isinstance(node, torch.fx.Node)}
    for parts in call.args[:3]:
        assert set(parts) <= saved and parts[0].meta["val"].dtype == torch.float8_e4m3fn
        assert parts[0].args[0].args[0] not in saved
    assert sum(node.meta["val"].dtype == torch.float8_e4m3fn for node in saved) == 3
