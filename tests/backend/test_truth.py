"""What a report calls quantized has run quantized."""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import eager_backend
from torch import Tensor, _higher_order_ops, fx, nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from truth import Counted, Counts, Layered, differences, reported, without_layers

import fxquant
from fxquant import (
    Backend,
    CustomRecipe,
    FxQuantWarning,
    QuantizedTensor,
    Quantizer,
    Rule,
    Rules,
    UnquantizedWarning,
    factories,
)
from fxquant.compat import torch_version
from fxquant.quantizers import QuantizedOperand
from fxquant.roles import Gemm


def test_a_graph_counts_once_where_torch_starts_again() -> None:
    """A Python float of the embedding becomes a tensor: torch compiles the graph twice, and takes the second."""
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 96), nn.Linear(96, 32))
    for recipe in ("rowwise", "delayed_scaling"):
        torch.compiler.reset()
        backend = eager_backend(recipe)
        compiled = torch.compile(model, backend=backend, dynamic=True)
        compiled(torch.randint(64, (2, 8))).sum().backward()
        report = backend.report()
        assert backend.captured == 1 and report.summary()["matmuls"] == 2
        assert len({(d.site, d.gemm, d.direction, d.role) for d in report.decisions}) == len(report.decisions)


class Failing(Backend):
    """Fails to compile graphs of more than one layer, by an error."""

    error: Exception = NotImplementedError()

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if len(gm.graph.find_nodes(op="call_function", target=torch.ops.fxquant.linear.default)) > 1:
            raise self.error
        return super().compile(gm, example_inputs)


@pytest.mark.parametrize("suppressed", [True, False])
def test_a_graph_that_cannot_be_compiled_does_not_count(suppressed: bool) -> None:
    model, x = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)), torch.randn(32, 64)
    backend, name, why = Failing("mxfp8", inner="aot_eager"), "NotImplementedError", "suppress_errors is set"
    if not suppressed:
        backend.error = UnsupportedOperatorException(torch.ops.aten.mm.default)
        name, why = "UnsupportedOperatorException", "torch takes this error for a graph break"
    with torch.no_grad(), torch._dynamo.config.patch(suppress_errors=suppressed):
        with pytest.warns(UnquantizedWarning, match=f"failed to compile, and torch runs it unquantized.*{why}: {name}"):
            assert torch.equal(torch.compile(model, backend=backend)(x), model(x))
    report = backend.report()
    assert f"a graph that failed: {name}" in str(report)
    assert not report.decisions and backend.captured == 0
    assert report.coverage == 0 and "not compiled: no graph has run" in str(report)


def test_a_graph_that_has_not_run_does_not_count() -> None:
    compiled = fxquant.compile(nn.Linear(64, 32), "mxfp8", options={"inner": "aot_eager"})
    assert compiled.report().coverage == 0
    compiled(torch.randn(32, 64))
    assert compiled.report().coverage == 1 and not compiled.report().uncompiled


def told(call: Callable[[], Any], category: type[Warning] = FxQuantWarning) -> list[str]:
    """The warnings of a category in a call, all of them at a line of its own, with those that are the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    ours = [warning for warning in caught if issubclass(warning.category, category)]
    assert {warning.filename for warning in ours} <= {__file__}
    return [str(warning.message) for warning in ours]


class Awaited(nn.Linear):
    async def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.skipif(
    torch_version() < (2, 13) and sys.version_info >= (3, 12), reason="torch 2.11 captures no coroutine of Python 3.12"
)
def test_a_coroutine_counts_when_it_has_ended() -> None:
    compiled, x = fxquant.compile(Awaited(64, 32), "mxfp8", options={"inner": "aot_eager"}), torch.randn(32, 64)

    async def run() -> None:
        for _ in range(2):
            await compiled(x)

    assert not told(lambda: asyncio.run(run()))
    assert compiled.report().coverage == 1 and not compiled.report().uncompiled


class Generates:
    """A class beside the module's, as transformers has it."""

    def generate(self, x: Tensor) -> Tensor:
        return self(x)  # type: ignore[operator, no-any-return]


class Decoder(nn.Module, Generates):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def scores(self, x: Tensor) -> Tensor:
        return self.forward(x).softmax(-1)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    @property
    def width(self) -> int:
        return self.head.in_features


def quantized(model: Any, recipe: Any = "mxfp8", **kwargs: Any) -> Any:
    return fxquant.compile(model, recipe, options={"inner": "aot_eager"}, **kwargs)


@pytest.mark.parametrize("name", ["generate", "scores", "logits"])
def test_a_method_that_runs_the_original_is_told_once(name: str) -> None:
    model, x = Decoder(), torch.randn(32, 64)
    compiled = quantized(model)
    (text,) = told(lambda: getattr(compiled, name)(x))
    assert (
        f"Decoder.{name} ran the original model, unquantized" in text and "fxquant.Backend(recipe, model=model)" in text
    )
    assert not told(lambda: [getattr(compiled, name)(x), compiled.generate(x)])
    assert "forward" not in vars(model.head) and name not in vars(compiled)


def test_a_method_that_runs_no_layer_or_a_compiled_one_is_not_told() -> None:
    model, x = Decoder(), torch.randn(32, 64)
    compiled = quantized(model)
    assert not told(lambda: compiled.embed(torch.arange(8))) and compiled.width == 64
    assert not told(lambda: compiled(x))
    model.compile(backend=eager_backend("mxfp8", model=model))
    assert not told(lambda: compiled.generate(x)), "in place, it is quantized"
    assert not torch.equal(compiled.generate(x), model.head(x))


def rules(**patterns: str) -> CustomRecipe:
    return CustomRecipe(qfactory=Rules([Rule(fxquant.MXFP8Quantizer(), **patterns)]))


def test_what_quantizes_nothing_is_told_in_the_first_call() -> None:
    x = torch.randn(32, 64)
    compiled = quantized(nn.Sequential(nn.Linear(64, 64)), rules(name="hed"))
    (text,) = told(lambda: compiled(x), UnquantizedWarning)
    assert "nothing of Sequential was quantized" in text and "HIGH_PRECISION" in text and "name='hed'" in text
    assert not told(lambda: compiled(x))
    for model in (nn.Sequential(nn.Linear(64, 8)), nn.Sequential(nn.LayerNorm(64))):
        (text,) = told(lambda model=model: quantized(model)(x))
        assert "TOO_SMALL" in text or "there is no matmul" in text
    assert not told(lambda: quantized(nn.Linear(64, 8), "high_precision")(x))


def test_a_rule_that_matched_nothing_is_told() -> None:
    x = torch.randn(32, 64)
    recipe = CustomRecipe(qfactory=factories.by_name({"0": "mxfp8", "hed": "high_precision"}, default="rowwise"))
    (text,) = told(lambda: quantized(nn.Sequential(nn.Linear(64, 64)), recipe)(x))
    assert "matched nothing in the first call of Sequential: rule 1: name='hed'" in text
    gradients = CustomRecipe(qfactory=factories.by_tensor_type({"grad_output": "mxfp8"}, default="mxfp8"))
    with torch.no_grad():
        assert not told(lambda: quantized(nn.Linear(64, 64), gradients)(x)), "a training step would match it"


def test_an_option_for_exchanges_that_are_not_there_is_told() -> None:
    x, options = torch.randn(32, 64), {"inner": "aot_eager", "quantized_dispatch": True}
    compiled = fxquant.compile(nn.Linear(64, 64), "mxfp8", options=options)
    (text,) = told(lambda: compiled(x))
    assert text.startswith("quantized_dispatch had no effect in Linear")
    assert not told(lambda: compiled(x))


def test_a_backend_tells_after_the_first_step_of_an_optimizer() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(32, 64)
    compiled = torch.compile(model, backend=eager_backend(rules(name="hed")))
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        compiled(x).sum().backward()
        optimizer.step()

    (text,) = (text for text in told(step) if "name='hed'" in text)  # a step tells of all backends of the process
    assert "nothing of fxquant.Backend" in text
    assert not told(step)


def test_filters_silence_and_a_handler_on_our_logger_hears(capsys: Any) -> None:
    heard: list[str] = []
    handler, terminal = logging.Handler(), logging.StreamHandler()  # the second is torch's under TORCH_LOGS=fxquant
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    for one in (handler, terminal):
        logging.getLogger("fxquant").addHandler(one)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", UnquantizedWarning)
            quantized(nn.Linear(64, 8))(torch.randn(32, 64))
    finally:
        for one in (handler, terminal):
            logging.getLogger("fxquant").removeHandler(one)
    assert len(heard) == 1 and "TOO_SMALL" in heard[0]
    assert "TOO_SMALL" not in capsys.readouterr().err, "warnings are shown there once"


class Broken(nn.Module):
    """Two graphs, of which only the second is compiled again for another length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x[:rows])


def test_inputs_beyond_the_recompile_limit_are_told() -> None:
    x = torch.randn(64, 64)
    with torch._dynamo.config.patch(recompile_limit=2):
        whole = quantized(nn.Sequential(nn.Linear(64, 64)), dynamic=False)
        texts = told(lambda: [whole(x[:rows]) for rows in range(16, 22)])
        assert len(texts) == 1 and "new inputs of Sequential run unquantized" in texts[0]
        assert "recompile_limit" in texts[0] and "size mismatch at index 0" in texts[0]
        assert "not compiled: 4 of 6 calls of Sequential, which ran no graph" in str(whole.report())
        backend = eager_backend("mxfp8")
        for run, reported in (
            (torch.compile(Broken(), backend=backend, dynamic=False), backend),
            (part := quantized(Broken(), dynamic=False), part),
        ):
            torch.compiler.reset()
            texts = told(lambda run=run: [run(x, rows) for rows in range(16, 22)])
            assert len(texts) == 1 and "resume_in_forward" in texts[0]
            assert "not compiled: new inputs, since" in str(reported.report())


@pytest.mark.usefixtures("without_cpp")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_report_of_a_trained_model_has_its_graphs(inner: str) -> None:
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    compiled = fxquant.compile(model, "mxfp8", options={"inner": inner})
    compiled(x).sum().backward()
    report = compiled.report()
    assert set(report.graphs) == {"forward", "backward"} and not report.recompilations and not report.breaks
    assert [report.graphs[name].count("fxquant.scaled_mm") for name in ("forward", "backward")] == [1, 1]


def test_the_report_of_a_trained_model_has_breaks_and_recompilations() -> None:
    x = torch.randn(64, 64)
    compiled = quantized(Broken(), dynamic=False)
    for rows in (32, 48):
        compiled(x, rows).sum().backward()
    report = compiled.report()
    (broken,) = report.breaks
    line = Broken.forward.__code__.co_firstlineno + 2
    assert "graph_break" in broken and broken.endswith(f"{__file__}:{line})")
    (again,) = report.recompilations
    assert "rows == 32" in again and f"compiled again: {again}" in str(report)
    assert report.graphs["forward"].count("fxquant.scaled_mm") == 3


def test_a_break_before_the_first_operator_is_reported() -> None:
    def run(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x @ x

    compiled = quantized(run)
    compiled(torch.randn(32, 32))
    (broken,) = compiled.report().breaks
    assert broken.endswith(f"{__file__}:{run.__code__.co_firstlineno + 1})")


class Looping(nn.Module):
    """A graph break in a loop, so that torch runs the loop as it is, and compiles what it calls: blocks, not layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(64, 32)

    def block(self, index: int, x: Tensor) -> Tensor:
        return self.blocks[index](x)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(2):
            x = self.block(index, x)
            torch._dynamo.graph_break()
        return self.head(x)


def test_layers_outside_of_graphs_are_reported_and_told() -> None:
    model, x = Looping(), torch.randn(32, 64)
    compiled = quantized(model)
    texts = told(lambda: compiled(x).sum().backward(), UnquantizedWarning)
    assert len(texts) == 1 and "1 layer of Looping ran outside of its graphs, unquantized: head." in texts[0]
    assert not told(lambda: compiled(x))
    report = compiled.report()
    outside = {d.gemm: d.shape for d in report.decisions if d.skip_reason == "NOT_CAPTURED"}
    assert set(outside) == {"fprop", "dgrad", "wgrad"} and report.coverage < 1
    assert {d.layer for d in report.decisions} == {"blocks.0.0", "blocks.1.0", "head"}
    quiet = quantized(Looping(), rules(name=r"blocks\..*"))
    assert not told(lambda: quiet(x), UnquantizedWarning), "the recipe keeps the head as it is"


@torch.library.custom_op("fxquant_tests::own_gemm", mutates_args=())
def own_gemm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.mT


@own_gemm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


@dataclass(frozen=True)
class Own(Quantizer):
    """Rounds to a quarter, and multiplies by an operator that can be counted."""

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        halves = [QuantizedOperand((t * 4).round(), t.new_full((1,), 0.25)) for t in (x, x.mT)]
        return QuantizedTensor(halves[0] if rowwise else None, halves[1] if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        return operand.data * operand.scale

    def qgemm(self, a: QuantizedOperand, b: QuantizedOperand, *, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        y = own_gemm(a.data, b.data) * (a.scale * b.scale)
        return (y if bias is None else y + bias).to(out_dtype)


def test_gemms_of_an_own_quantizer_are_those_that_run() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(32, 64)
    recipe = CustomRecipe(qfactory=Rules([Rule(Own(), name="0"), Rule("mxfp8", name="2")]))
    backend = Layered(recipe, model=model)
    with Counted({torch.ops.fxquant_tests.own_gemm: lambda *_, **__: 1}) as counted:
        torch.compile(model, backend=backend)(x).sum().backward()
    gemms = backend.report().gemms().values()
    runs = Counter("forward" if d.gemm is Gemm.FPROP else "backward" for d, _ in gemms if d.layer == "0")
    assert (
        {phase: sum(names.values()) for phase, names in counted.plain.items()} == runs == {"forward": 1, "backward": 1}
    )
    assert sum(gemms.total() for gemms in counted.quantized.values()) == 3, "the other layer's"


def test_operands_without_a_quantizer_run_as_they_are() -> None:
    def weights_alone(role: str) -> Any:
        return None if role.endswith(("input", "output", "grad_input")) else fxquant.MXFP8Quantizer()

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    backend = Layered(CustomRecipe(qfactory=factories.from_string_roles(weights_alone)), model=model)
    with Counted() as counted:
        torch.compile(model, backend=backend)(torch.randn(32, 64)).sum().backward()
    assert not differences(counted.quantized, reported(backend.report()))
    pairs = {(gemm.left, gemm.right) for gemms in counted.quantized.values() for gemm in gemms}
    assert ("identity", "mxfp8_e4m3") in pairs and ("mxfp8_e4m3", "mxfp8_e4m3") not in pairs


def test_calls_breaks_and_recompilations_run_what_is_reported() -> None:
    model, x = Broken(), torch.randn(64, 64)
    backend = Layered("mxfp8", model=model)
    run = torch.compile(model, backend=backend, dynamic=False)

    def step(rows: int) -> Counts:
        with Counted() as counted:
            run(x, rows).sum().backward()
        return counted.quantized

    first = step(32)
    assert not differences(first, reported(backend.report())) and first["forward"].total() == 2
    assert step(32) == first and not differences(first, reported(backend.report())), "a call more is no graph more"
    second = step(48)
    said = reported(backend.report())
    for phase, gemms in said.items():
        new = Counter({gemm: n for gemm, n in second[phase].items() if gemm.layer == "second"})
        assert gemms == first[phase] + new, "the first graph takes all rows, and the second is compiled again"


class Choosing(nn.Module):
    """One layer or two, by the inputs' sum; then the first again, so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor, times: Tensor | None = None) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.down(self.up(x)), (x,))
        if times is None:
            return y
        return torch.while_loop(lambda n, y: n > 0, lambda n, y: (n - 1, self.one(y)), (times, y))[1]


@pytest.mark.parametrize(("sign", "layers"), [(1, 1), (-1, 2)])
def test_a_branch_runs_quantized_and_a_loop_as_often_as_it_goes(sign: int, layers: int) -> None:
    model, x = Choosing(), sign * torch.rand(32, 64)
    backend = Layered("mxfp8", model=model)
    with Counted() as counted:
        torch.compile(model, backend=backend)(x).sum().backward()
    ran, said = without_layers(counted.quantized), without_layers(reported(backend.report()))
    assert not any(sum(names.values()) for names in counted.plain.values())
    assert ran["forward"] <= said["forward"] and ran["backward"].total() >= 2 * layers - 1
    assert ran["forward"].total() == layers and said["forward"].total() == 3, "both branches are reported"
    assert all("one of its branches runs" in d.detail for d in backend.report().decisions)
    again = Layered("mxfp8", model=model)
    with Counted() as counted, torch.no_grad():
        torch.compile(model, backend=again, dynamic=False)(x, torch.tensor(3))
    assert counted.quantized["forward"].total() == layers + 3
    assert sum("one of its steps counts" in d.detail for d in again.report().decisions) == 2


class Stepping(nn.Module):
    """A layer in each step of a loop."""

    def __init__(self, loop: str) -> None:
        super().__init__()
        self.loop, self.layer = loop, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        if self.loop == "map":
            return _higher_order_ops.map(self.layer, x)  # type: ignore[no-any-return]
        start = torch.zeros_like(x[0])
        return _higher_order_ops.scan(lambda c, y: (c + self.layer(y), c.clone()), start, x)[0]  # type: ignore


@pytest.mark.parametrize("loop", ["map", "scan"])
def test_each_step_of_a_loop_runs_quantized(loop: str) -> None:
    model, x = Stepping(loop), torch.randn(3, 32, 64)
    backend = Layered("mxfp8", model=model)
    with Counted() as counted, torch.set_grad_enabled(loop == "map"):
        y = torch.compile(model, backend=backend)(x)
        if loop == "map":
            y.sum().backward()
    said = without_layers(reported(backend.report()))
    for phase, gemms in without_layers(counted.quantized).items():
        assert gemms == Counter({gemm: 3 * count for gemm, count in said[phase].items()})
    assert not any(sum(names.values()) for names in counted.plain.values())


def once(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w: f(x, w[0])


def without_gradients(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.vmap(lambda row: w[0] @ row)(x)
    return y * x[:, :1]


PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "vmap": once(lambda x, w: torch.vmap(lambda row: nn.functional.linear(row, w))(x)),
    "vmap of matrix and vector": once(lambda x, w: torch.vmap(lambda row: w @ row)(x)),
    "vmap in vmap": once(lambda x, w: torch.vmap(torch.vmap(lambda row: row @ w))(x.view(4, 8, 64))),
    "vmap of weights": lambda x, w: torch.vmap(nn.functional.linear)(x.view(2, 16, 64), w),
    "vmap of one input": lambda x, w: torch.vmap(nn.functional.linear, in_dims=(None, 0))(x, w),
    "vmap of activations": lambda x, w: torch.vmap(lambda a: a @ a.mT)((x * x.sum()).view(2, 16, 64)),
    "vmap of einsum": lambda x, w: torch.vmap(lambda a, b: torch.einsum("mk,nk->nm", a, b))(x.view(2, 16, 64), w),
    "vmap, detached": once(lambda x, w: torch.vmap(lambda row: w @ (w @ row).detach())(x)),
    "vmap without gradients": without_gradients,
    "einsum of one": once(lambda x, w: torch.einsum("mk,nk->mn", x[:, :1], w[:, :1])),
    "einsum of one weight": lambda x, w: torch.einsum("mk,ok->mo", x[:, :1], w.view(-1, 1)),
    "product of one": once(lambda x, w: x[:, :1] @ w[:, :1].mT),
}
"""Functions of x [32, 64] and weights [2, 64, 64]; einsum multiplies elementwise where it contracts one entry."""


@pytest.mark.parametrize("form", PLAIN)
def test_what_is_left_as_it_is_has_the_flops_that_run(form: str) -> None:
    weights, x = nn.Parameter(torch.randn(2, 64, 64)), torch.randn(32, 64, requires_grad=True)
    backend = Layered("mxfp8")
    with Counted() as counted:
        torch.compile(PLAIN[form], backend=backend)(x, weights).square().sum().backward()
    said = Counter[str]()
    for (_, gemm), (left, right) in backend.report().gemms().items():
        assert left.quantizer is None and right.quantizer is None
        said["forward" if gemm is Gemm.FPROP else "backward"] += left.flops
    ran = {phase: sum(flops.values()) for phase, flops in counted.plain.items()}
    assert ran == {phase: said[phase] for phase in ran}


def test_generate_that_runs_its_prompt_as_it_is_says_so() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not hasattr(transformers, "CompileConfig"):
        pytest.skip("needs transformers.CompileConfig")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model, prompt = transformers.LlamaForCausalLM(config).eval(), torch.ones(1, 8, dtype=torch.int64)

    def said(**more: Any) -> list[str]:
        compilation = transformers.CompileConfig(
            backend=Backend("rowwise", model=model, inner="aot_eager"), mode=None, fullgraph=False
        )
        compilation._compile_all_devices = True
        torch.compiler.reset()
        vars(model).pop("_compiled_call", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.generate(
                prompt,
                max_new_tokens=2,
                do_sample=False,
                cache_implementation="static",
                compile_config=compilation,
                **more,
            )
        return [str(w.message) for w in caught if w.category is UnquantizedWarning]

    (text,) = said()
    assert "ran the prompt as it is, unquantized" in text and "prefill_chunk_size" in text
    assert said(prefill_chunk_size=8) == []
