from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers import hybrid, per_role, recorded_story
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import (
    CustomRecipe,
    Float8BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    RecipeError,
    Rule,
    Rules,
    SkipReason,
)
from fxquant.compat import torch_version
from fxquant.export.program import report_of
from fxquant.tools import progress

MX, NV = MXFP8Quantizer(), NVFP4Quantizer()


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(64, 96, bias=bias)


def x(**options) -> Tensor:
    return torch.randn(32, 64, **options)


def test_one_linear_forward_and_backward() -> None:
    """The input is quantized in both directions at once, and only its column half is kept for the backward."""
    assert_expected_inline(
        recorded_story(linear(), "mxfp8", x(requires_grad=True)),
        """\
forward:
  #0 = hybrid_quantize([32, 64], mxfp8_e4m3, mxfp8_e4m3)
  #1 = quantize([96, 64], mxfp8_e4m3, rowwise)
  scaled_mm(#0, #1, mxfp8_e4m3, mxfp8_e4m3, [96], float32, True) -> [32, 96]
  saves #0.column
backward:
  #0 = hybrid_quantize([32, 96], mxfp8_e4m3, mxfp8_e4m3)
  #1 = quantize([96, 64], mxfp8_e4m3, columnwise)
  scaled_mm(#0, #1, mxfp8_e4m3, mxfp8_e4m3, None, float32, False) -> [32, 64]
  scaled_mm(#0.column, [64, 32], mxfp8_e4m3, mxfp8_e4m3, None, float32, False) -> [96, 64]""",
    )


def test_hybrid_recipe_has_a_format_for_each_direction() -> None:
    recipe = per_role(input=hybrid(MX, NV), weight=hybrid(MX, NV, "rowwise_dequantized"), grad_output=NV)
    assert_expected_inline(
        recorded_story(linear(False), recipe, x(requires_grad=True)),
        """\
forward:
  #0 = hybrid_quantize([32, 64], mxfp8_e4m3, nvfp4)
  #1 = quantize([96, 64], mxfp8_e4m3, rowwise)
  scaled_mm(#0, #1, mxfp8_e4m3, mxfp8_e4m3, None, float32, True) -> [32, 96]
  dequantize(#1, mxfp8_e4m3, rowwise, [96, 64], float32) -> [96, 64]
  #2 = quantize([96, 64], nvfp4, columnwise)
  saves #2, #0.column
backward:
  #0 = hybrid_quantize([32, 96], nvfp4(nonfinite), nvfp4(nonfinite))
  scaled_mm(#0, [64, 48], nvfp4, nvfp4, None, float32, False) -> [32, 64]
  scaled_mm(#0.column, [64, 16], nvfp4, nvfp4, None, float32, False) -> [96, 64]""",
    )


def test_a_shared_input_is_quantized_once_in_each_direction() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, n, bias=False) for n in (64, 32, 16))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.q(x), self.k(x), self.v(x)

    story = recorded_story(Heads(), "mxfp8", x())
    assert_expected_inline(
        story,
        """\
forward:
  #0 = hybrid_quantize([32, 64], mxfp8_e4m3, mxfp8_e4m3)
  #1 = quantize([64, 64], mxfp8_e4m3, rowwise)
  scaled_mm(#0, #1, mxfp8_e4m3, mxfp8_e4m3, None, float32, True) -> [32, 64]
  #2 = quantize([32, 64], mxfp8_e4m3, rowwise)
  scaled_mm(#0, #2, mxfp8_e4m3, mxfp8_e4m3, None, float32, True) -> [32, 32]
  #3 = quantize([16, 64], mxfp8_e4m3, rowwise)
  scaled_mm(#0, #3, mxfp8_e4m3, mxfp8_e4m3, None, float32, True) -> [32, 16]
  saves #0.column
backward:
  #0 = quantize([32, 16], mxfp8_e4m3, columnwise)
  scaled_mm(#0, [64, 32], mxfp8_e4m3, mxfp8_e4m3, None, float32, False) -> [16, 64]
  #1 = quantize([32, 32], mxfp8_e4m3, columnwise)
  scaled_mm(#1, [64, 32], mxfp8_e4m3, mxfp8_e4m3, None, float32, False) -> [32, 64]
  #2 = quantize([32, 64], mxfp8_e4m3, columnwise)
  scaled_mm(#2, [64, 32], mxfp8_e4m3, mxfp8_e4m3, None, float32, False) -> [64, 64]""",
    )


def test_a_frozen_weight_costs_no_weight_gradient() -> None:
    story = recorded_story(linear().requires_grad_(False), "mxfp8", x(requires_grad=True))
    assert_expected_inline(
        story,
        """\
forward:
  #0 = quantize([32, 64], mxfp8_e4m3, rowwise)
  #1 = quantize([96, 64], mxfp8_e4m3, rowwise)
  scaled_mm(#0, #1, mxfp8_e4m3, mxfp8_e4m3, [96], float32, True) -> [32, 96]
backward:
  #0 = quantize([32, 96], mxfp8_e4m3, rowwise)
  #1 = quantize([96, 64], mxfp8_e4m3, columnwise)
  scaled_mm(#0, #1, mxfp8_e4m3, mxfp8_e4m3, None, float32, False) -> [32, 64]""",
    )


def test_no_grad_has_no_column_work() -> None:
    with torch.no_grad():
        assert_expected_inline(
            recorded_story(linear(), "mxfp8", x()),
            """\
forward:
  #0 = quantize([32, 64], mxfp8_e4m3, rowwise)
  #1 = quantize([96, 64], mxfp8_e4m3, rowwise)
  scaled_mm(#0, #1, mxfp8_e4m3, mxfp8_e4m3, [96], float32, True) -> [32, 96]""",
        )


def test_a_tied_weight_is_quantized_once_in_each_direction() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight)

    assert_expected_inline(
        recorded_story(Tied(), "mxfp8", x()),
        """\
forward:
  #0 = hybrid_quantize([32, 64], mxfp8_e4m3, mxfp8_e4m3)
  #1 = quantize([64, 64], mxfp8_e4m3, rowwise)
  scaled_mm(#0, #1, mxfp8_e4m3, mxfp8_e4m3, None, float32, True) -> [32, 64]
  #2 = quantize([32, 64], mxfp8_e4m3, rowwise)
  scaled_mm(#2, #1, mxfp8_e4m3, mxfp8_e4m3, None, float32, True) -> [32, 64]
  saves #0.column
backward:
  #0 = hybrid_quantize([32, 64], mxfp8_e4m3, mxfp8_e4m3)
  #1 = quantize([64, 64], mxfp8_e4m3, columnwise)
  scaled_mm(#0, #1, mxfp8_e4m3, mxfp8_e4m3, None, float32, False) -> [32, 64]
  #2 = quantize([32, 64], mxfp8_e4m3, columnwise)
  scaled_mm(#0.column, #2, mxfp8_e4m3, mxfp8_e4m3, None, float32, False) -> [64, 64]
  #3 = quantize([32, 64], mxfp8_e4m3, columnwise)
  scaled_mm(#3, [64, 32], mxfp8_e4m3, mxfp8_e4m3, None, float32, False) -> [64, 64]""",
    )


def test_tiles_of_a_weight_are_the_same_in_both_directions() -> None:
    story = recorded_story(linear(False), "float8_blockwise", torch.randn(128, 64, requires_grad=True))
    assert_expected_inline(
        story,
        """\
forward:
  #0 = hybrid_quantize([128, 64], block_1x128_e4m3(pow2), block_1x128_e4m3(pow2))
  #1 = quantize([96, 64], block_128x128_e4m3(pow2), rowwise)
  scaled_mm(#0, #1, block_1x128_e4m3(pow2), block_128x128_e4m3(pow2), None, float32, True) -> [128, 96]
  saves #0.column
backward:
  #0 = hybrid_quantize([128, 96], block_1x128_e4m3(pow2,nonfinite), block_1x128_e4m3(pow2,nonfinite))
  #1 = quantize([96, 64], block_128x128_e4m3(pow2), columnwise)
  scaled_mm(#0, #1, block_1x128_e4m3(pow2), block_128x128_e4m3(pow2), None, float32, False) -> [128, 64]
  scaled_mm(#0.column, [64, 128], block_1x128_e4m3(pow2), block_1x128_e4m3(pow2), None, float32, False) -> [96, 64]""",
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 96)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs.add_(1)
        return self.fc(x)


def test_explain_shows_both_graphs_and_changes_nothing() -> None:
    model = Model()
    report = fxquant.explain(model, "mxfp8", x())
    assert model.runs == 0 and model.fc.weight.grad is None
    forward, backward = report.graphs["forward"], report.graphs["backward"]
    assert "fxquant.quantize.default" in forward and "fxquant.scaled_mm.default" in forward
    assert "tangents_1" in backward and "fxquant.scaled_mm.default" in backward
    assert len(report.decisions) == 4 and report.coverage == 1.0


def test_explain_without_gradients_shows_a_forward_only() -> None:
    with torch.no_grad():
        report = fxquant.explain(Model(), "mxfp8", x())
    assert report.graphs["backward"] == ""
    assert {str(d.gemm) for d in report.decisions} == {"fprop"}


def test_explain_takes_functions_and_keyword_arguments() -> None:
    weight = nn.Parameter(torch.randn(32, 64))
    report = fxquant.explain(lambda *, value: F.linear(value, weight), "nvfp4", value=x())
    assert {str(d.quantizer) for d in report.decisions} >= {"nvfp4_2d"}


def test_explain_names_rules_that_matched_nothing() -> None:
    recipe = CustomRecipe(qfactory=Rules([Rule(MX, name="fc"), Rule(NV, name="fcc")], default="mxfp8"))
    assert fxquant.explain(Model(), recipe, x()).unused == ["rule 1: name='fcc'"]


def test_explain_goes_over_graph_breaks_with_full_names() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            torch._dynamo.graph_break()
            return self.blocks[1](x)

    report = fxquant.explain(Broken(), "mxfp8", x())
    assert list(dict.fromkeys(d.layer for d in report.decisions)) == ["blocks.0", "blocks.1"]
    assert report.graphs["forward"].count("class GraphModule") == 2
    assert len(report.breaks) == 1 and "graph_break" in report.breaks[0] and "graph break: " in str(report)
    assert "None" not in report.breaks[0], "nobody gave a reason"
    assert not fxquant.explain(Model(), "mxfp8", x()).breaks


def test_explain_tells_of_uncaptured_forwards_alone_and_under_inference_mode() -> None:
    class Disabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 96), nn.Linear(96, 32)

        @torch._dynamo.disable
        def run(self, x: Tensor) -> Tensor:
            y = self.last(x) + x.new_zeros(len(x), 32).addmm_(x, x.new_ones(96, 32))
            if y.requires_grad:
                torch.autograd.grad(y.sum(), self.last.weight, retain_graph=True)
            return y

        def forward(self, x: Tensor) -> Tensor:
            return self.run(self.first(x))

    with torch.inference_mode():
        report = fxquant.explain(Disabled(), "mxfp8", x()[:16])
    lost = [d for d in report.decisions if d.skip_reason is SkipReason.NOT_CAPTURED]
    assert {(d.layer, d.shape) for d in lost} >= {("last", (16, 96)), ("last", (32, 96)), ("", (16, 96))}
    assert report.flops["total"] == 2 * 16 * 96 * (64 + 32 + 32)
    report = fxquant.explain(Disabled(), "mxfp8", x()[:16])
    assert {d.layer for d in report.decisions if d.skip_reason is SkipReason.NOT_CAPTURED} == {"last", ""}
    assert len({d.site for d in report.decisions}) == 3, "not what goes backward inside"


@pytest.mark.parametrize("grad", [False, True])
def test_explain_leaves_what_a_model_writes_into_as_it_was(grad: bool) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
            self.register_buffer("sums", torch.ones(64))

        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            y = self.norm(self.fc(x))
            self.sums.add_(y.detach().sum(0))
            cache[:16].copy_(y.detach()[:16])
            return y

    model, cache = Counting(), torch.full((32, 64), 3.0)
    model.norm.running_var.fill_(7.0)  # type: ignore[union-attr]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.set_grad_enabled(grad):
        report = fxquant.explain(model, "mxfp8", x(), cache)
    assert report.coverage == 1 and torch.equal(cache, torch.full((32, 64), 3.0))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


class Checking(nn.Module):
    """Python between its graphs looks at values: of an input, of a result, and of what the graph before has written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(64, 64), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        marked = (tokens == 7).sum()
        hidden = self.drop(self.up(self.embed(tokens)))
        self.seen.add_(marked)
        if marked.item() != 4 or not hidden.any():
            raise ValueError("wrong values")
        chosen = hidden[tokens == 7]  # a size that depends on values
        if self.seen.item() != 4:
            raise ValueError("a buffer was not written")
        return self.down(chosen)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_python_between_graphs_sees_the_values_of_the_model(mode) -> None:
    model, tokens = Checking(), torch.tensor([[1, 7, 3, 2]] * 4)
    state, seed = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    with mode():
        report = fxquant.explain(model, "mxfp8", tokens)
        compiled = fxquant.compile(model, "mxfp8", options={"inner": "aot_eager"})
        assert torch.equal(torch.get_rng_state(), seed)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        compiled(tokens)
    assert report.totals() == compiled.report().totals()
    assert {d.layer for d in report.decisions} == {"up", "down"} and len(report.breaks) >= 1


class SeveralProducts(nn.Module):
    """Experts of two weights, an attention, a product that is neither, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 64, 96))
        self.down = nn.Parameter(torch.randn(4, 96, 64))
        self.again = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.bmm(torch.bmm(x, self.gate_up), self.down)
        x = F.scaled_dot_product_attention(x, x, x)
        return F.linear(F.linear(x @ x.mT @ x, self.again), self.again)


def test_products_of_one_layer_have_a_name_each() -> None:
    report = fxquant.explain(nn.Sequential(SeveralProducts(), nn.Linear(64, 32)), "mxfp8", torch.randn(4, 32, 64))
    names = ["0.gate_up", "0.down", "0 QK^T", "0 PV", "0 #5", "0 #6", "0.again", "1"]
    assert [layer.name for layer in report.layers()] == names
    assert [layer.name for layer in report.layers("QK")] == ["0 QK^T"] and len(report.layers("^0$")) == 7
    assert report.table("down").splitlines()[1].startswith("0.down  grouped_linear.input ")
    program = torch.export.export(SeveralProducts(), (torch.randn(4, 32, 64),))
    stored = report_of(fxquant.quantize_program(program, "mxfp8"))
    assert {"gate_up", "down", "again", "<model> QK^T"} <= {layer.name for layer in stored.layers()}


def test_graphs_of_meta_tensors_are_answered_without_running() -> None:
    model = Model().to("meta")
    report = fxquant.explain(model, "mxfp8", x().to("meta"))
    assert report.coverage == 1 and report.totals() == fxquant.explain(Model(), "mxfp8", x()).totals()


def test_bodies_of_a_captured_graph_run_as_they_were() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.fc, x, use_reentrant=False)
            if not torch.equal(y.detach(), self.fc(x).detach()):
                raise ValueError("rewritten")
            return y

    report = fxquant.explain(Checkpointed(), "mxfp8", x())
    assert report.coverage == 1 and {d.layer for d in report.decisions} == {"fc"}


def test_long_work_shows_its_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fxquant.explain(Model(), "mxfp8", x())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    fxquant.explain(Model(), "mxfp8", x())
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("fxquant: explain: ") and " matmuls so far" in line for line in lines)


def test_explain_says_that_nothing_was_captured() -> None:
    report = str(fxquant.explain(nn.Sequential(nn.LSTM(64, 64)), "mxfp8", x()))
    assert "skipped: NOT_CAPTURED" in report and "graph break: torch.compile captured no graph at all" in report
    assert "RNN, GRU, or LSTM" in report


def test_a_filter_that_finds_no_layer_says_which_there_are() -> None:
    text = fxquant.explain(Model(), "mxfp8", x()).text("^fd$")
    assert "no layer's name has '^fd$' in it; the layers are fc" in text


class PartlyCaptured(nn.Module):
    """A linear in a graph, then ones that no graph may have: disabled, in a refused layer, and behind that one."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.first, self.disabled, self.last = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 32)
        self.recurrent = nn.LSTM(64, 64, batch_first=True) if recurrent else None

    @torch.compiler.disable
    def outside(self, x: Tensor) -> Tensor:
        x = self.disabled(x)
        return x @ x.mT @ x

    def forward(self, x: Tensor) -> Tensor:
        x = self.outside(self.first(x))
        return self.last(x if self.recurrent is None else self.recurrent(x)[0])


@pytest.mark.parametrize("flex", [False, True])
def test_fused_kernels_outside_of_graphs_are_told_of(flex: bool) -> None:
    """Attention, an operator of higher order, and an encoder layer of inference."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()

        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (4, 16)).transpose(1, 2)
            y = flex_attention(q, q, q) if flex else F.scaled_dot_product_attention(q, q, q)
            return self.encoder(y.transpose(1, 2).flatten(2))

    with torch.no_grad():
        report = fxquant.explain(Fused(), "mxfp8", torch.randn(2, 8, 64))
    names = {"flex_attention" if flex else "_scaled_dot_product_flash_attention_for_cpu": 4 * 2 * 4 * 8 * 8 * 16}
    assert {d.form: d.flops for d in report.decisions} == {**names, "_transformer_encoder_layer_fwd": 0}
    assert {d.skip_reason for d in report.decisions} == {SkipReason.NOT_CAPTURED}
    assert {d.layer for d in report.decisions} == {"", "encoder"}


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ grad.T, grad.T @ grad


class WithoutContext(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = WithContext.backward


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("own", [WithContext, WithoutContext])
def test_the_backward_of_a_custom_function_outside_of_graphs_is_said_not_to_count(own: Any, trained: bool) -> None:
    class Owner(PartlyCaptured):
        @torch.compiler.disable
        def outside(self, x: Tensor) -> Tensor:
            return own.apply(x, self.disabled.weight)  # type: ignore[no-any-return]

    with torch.set_grad_enabled(trained):
        report = fxquant.explain(Owner(recurrent=False), "mxfp8", torch.randn(8, 64))
    said = {d.detail for d in report.decisions if d.skip_reason is SkipReason.NOT_CAPTURED}
    backward = f"; the backward of {own.__name__} is not counted" if trained else ""
    assert said == {"mm ran outside of the captured graphs" + backward}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_explain_tells_of_matmuls_that_no_graph_has(device: str) -> None:
    report = fxquant.explain(PartlyCaptured(recurrent=False).to(device), "mxfp8", torch.randn(2, 8, 64, device=device))
    rows = {(d.layer, str(d.role.module_type), d.shape, d.skip_reason) for d in report.decisions if d.gemm == "fprop"}
    assert rows == {
        ("first", "linear", (16, 64), None), ("first", "linear", (96, 64), None),
        ("disabled", "linear", (16, 96), SkipReason.NOT_CAPTURED),
        ("disabled", "linear", (64, 96), SkipReason.NOT_CAPTURED),
        ("", "matmul", (2, 8, 64), SkipReason.NOT_CAPTURED),
        ("", "matmul", (2, 8, 8), SkipReason.NOT_CAPTURED), ("", "matmul", (2, 64, 8), SkipReason.NOT_CAPTURED),
        ("last", "linear", (16, 64), None), ("last", "linear", (32, 64), None),
    }  # fmt: skip
    linears = 2 * 16 * 64 * (2 * 96 + 3 * 96 + 3 * 32)  # the input gets no gradient
    assert report.flops["total"] == linears + 2 * 3 * 2 * 2 * 8 * 8 * 64
    assert len(report.breaks) == 1 and "disable" in report.breaks[0] and "\n" not in report.breaks[0]
    assert "None" not in report.breaks[0]
    assert len({d.site for d in report.decisions}) == 5


def test_explain_of_a_model_that_cannot_be_captured_says_what_runs_instead() -> None:
    model = PartlyCaptured(recurrent=True)
    report = fxquant.explain(model, "mxfp8", torch.randn(2, 8, 64))
    lost = {d.layer for d in report.decisions if d.skip_reason is SkipReason.NOT_CAPTURED}
    captured = {d.layer for d in report.decisions if d.skip_reason is None}
    # from 2.15 on torch begins another graph behind a layer that it refuses; before, it left the rest of the function
    behind = {"last"} if torch_version() < (2, 15) else set()
    assert lost == {"", "disabled", "recurrent"} | behind and captured == {"first", "last"} - behind
    recurrent = [d for d in report.decisions if d.layer == "recurrent" and d.gemm == "fprop"]
    assert sum(d.flops for d in recurrent[::2]) == 2 * 16 * 2 * 4 * 64 * 64
    with torch.no_grad():
        forward = fxquant.explain(model, "mxfp8", torch.randn(2, 8, 64))
    assert {str(d.gemm) for d in forward.decisions} == {"fprop"}


def test_layers_of_blocks_that_are_compiled_keep_their_names() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = torch.compile(Model(), backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            x = self.block(x)
            torch._dynamo.graph_break()
            return x

    report = fxquant.explain(Blocks(), "mxfp8", x())
    assert {d.layer for d in report.decisions} == {"block.fc"}


def test_coverage_is_none_where_nothing_is_quantized_and_no_flops_are_known() -> None:
    report = fxquant.explain(Model(), "high_precision", torch.randn(0, 64))
    assert report.flops["total"] == 0 and report.coverage == 0


def test_explain_raises_as_compiling_would() -> None:
    with pytest.raises(RecipeError, match="unknown recipe"):
        fxquant.explain(Model(), "mxpf8", x())
    with pytest.raises(Exception, match="layer 'fc': wgrad cannot multiply") as error:
        tiles, lines = Float8BlockQuantizer(), Float8BlockQuantizer(block_scaling_dim=1)
        wrong = per_role(input=hybrid(lines, tiles), weight=lines, grad_output=hybrid(lines, tiles))
        fxquant.explain(Model(), wrong, x())
    assert isinstance(getattr(error.value, "inner_exception", error.value), RecipeError)


def test_explain_leaves_compiled_models_and_training_alone() -> None:
    model, value = Model(), x()
    run = torch.compile(model, backend=fxquant.Backend("mxfp8", inner="aot_eager"))
    before = run(value)
    fxquant.explain(model, "nvfp4", value)
    assert torch.equal(run(value), before)


def test_explain_twice_says_the_same() -> None:
    model, value = Model(), x()
    first, second = (fxquant.explain(model, "mxfp8", value) for _ in range(2))
    first.header = second.header  # the second may change between them
    assert first.to_json() == second.to_json()
