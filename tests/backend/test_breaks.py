"""Layers behind graph breaks keep their names, and what runs outside of graphs is reported, in all ways to compile."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from helpers import TwoLinears, assert_same_bits, eager_backend, recomputable_mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxquant
from fxquant import (
    Backend,
    BlockQuantizer,
    CustomRecipe,
    FxQuantWarning,
    IdentityQuantizer,
    QuantizationState,
    Recipe,
    Rule,
    Rules,
    UnquantizedWarning,
    UnusedRuleWarning,
)
from fxquant.backend import notices
from fxquant.backend.model import controls_of
from fxquant.compat.inside.recompiles import graph_breaks
from fxquant.compat.private import no_mode_is_on

EAGER = {"inner": "aot_eager"}
logger = logging.getLogger(__name__)


class Part(TwoLinears):
    """Two layers with a graph break in between."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


class Net(nn.Module):
    """Parts in a loop, which Dynamo therefore does not capture, and a layer behind one that it must not see."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.hidden, self.head = nn.Linear(32, 32), nn.Linear(32, 32)

    @torch.compiler.disable
    def unseen(self, x: Tensor) -> Tensor:
        return self.hidden(x)

    def loop(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.unseen(self.loop(x)))


def by_name(net: nn.Module, recipe: Recipe) -> Any:
    return torch.compile(net, backend="fxquant", options={"recipe": recipe, **EAGER})


def by_backend(net: nn.Module, recipe: Recipe) -> Any:
    return torch.compile(net, backend=eager_backend(recipe))


def in_place(net: nn.Module, recipe: Recipe) -> nn.Module:
    net.compile(backend=eager_backend(recipe))
    return net


def as_function(net: nn.Module, recipe: Recipe) -> Any:
    return torch.compile(lambda x: net(x), backend=eager_backend(recipe))


def typed(net: nn.Module, recipe: Recipe) -> Any:
    return fxquant.compile(net, recipe, options=EAGER)


WAYS = (by_name, by_backend, in_place, as_function, typed)
Way = Callable[[nn.Module, Recipe], Any]
MXFP8 = fxquant.recipes.get("mxfp8")
RULES = Rules([Rule(IdentityQuantizer(), name=r"head|parts\.1\.b")], default="mxfp8")


@pytest.mark.parametrize("way", WAYS)
def test_layers_behind_breaks_are_known_by_name(way: Way) -> None:
    net = Net()
    run = way(net, CustomRecipe(qfactory=RULES))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run(torch.randn(16, 32)).sum().backward()
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, FxQuantWarning)]
    assert len(texts) == 1 and "unquantized: hidden." in texts[0]
    report = fxquant.report(run)
    weights = {d.layer: d.skip_reason for d in report.decisions if d.role.tensor_type == "weight" and d.gemm == "fprop"}
    assert weights == {
        "parts.0.a": None, "parts.0.b": None, "parts.1.a": None,
        "parts.1.b": "HIGH_PRECISION", "head": "HIGH_PRECISION", "hidden": "NOT_CAPTURED",
    }  # fmt: skip
    assert not report.unused and not report.uncompiled
    assert all(f"{__file__}:" in text for text in report.breaks) and len(report.breaks) > 1


class Late(Net):
    """A layer that runs before the first graph, from which on a backend knows of a call."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.unseen(x))


class Early(Net):
    """A layer that runs behind the first graph."""

    def forward(self, x: Tensor) -> Tensor:
        return self.unseen(self.head(x))


@pytest.mark.parametrize("way", [by_backend, as_function])
def test_what_ran_before_the_first_graph_is_seen_in_the_second_call_or_named(way: Way) -> None:
    run = way(Late(), MXFP8)
    run(torch.randn(16, 32))
    assert "hidden" in fxquant.report(run).uncompiled[0]
    with pytest.warns(FxQuantWarning, match="hidden") if way is by_backend else warnings.catch_warnings():
        run(torch.randn(16, 32))
    report = fxquant.report(run)
    assert ("hidden" in {d.layer for d in report.decisions}) == (way is by_backend)


def test_what_torch_skips_has_a_place_too() -> None:
    net = Net()
    with graph_breaks() as breaks:
        torch.compile(net, backend="eager")(torch.randn(16, 32))
    lines = {int(text.rpartition(":")[2].strip(")")) for text in breaks}
    assert all(f"({__file__}:" in text for text in breaks) and len(lines) > 1
    assert fxquant.explain(net, "mxfp8", torch.randn(16, 32)).breaks == breaks


def doubled(x: Tensor) -> Tensor:
    logger.debug("Dynamo does not capture this")
    return x * 2


def scaled(x: Tensor) -> Tensor:
    return doubled(x)


class Logs(TwoLinears):
    """Layers around a function that calls one which cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b(hidden + scaled(hidden)).sum()


@pytest.mark.parametrize("way", [in_place, typed])
def test_a_break_in_a_call_is_reported_once_with_its_reason_in_each_step(way: Way) -> None:
    run, x = way(Logs(), fxquant.recipes.get("mxfp8")), torch.randn(16, 32)
    seen = []
    for _ in range(3):
        run(x).backward()
        seen.append(fxquant.report(run).breaks)
    (text,) = seen[0]
    assert "Logger" in text and f"({__file__}:{doubled.__code__.co_firstlineno + 1})" in text
    assert seen == [[text]] * 3 and fxquant.explain(Logs(), "mxfp8", x).breaks == [text]


def test_a_report_has_recompilations_of_its_own_graphs_alone() -> None:
    torch._dynamo.reset()
    small, large = Logs(32), Logs(64)
    for net in (small, large):
        net.compile(backend=eager_backend("mxfp8", model=net))
    small(torch.randn(16, 32))
    large(torch.randn(16, 64))
    assert not fxquant.report(large).recompilations
    small(torch.randn(24, 32))
    again = fxquant.report(small).recompilations
    assert again and all("size mismatch at index 0" in text for text in again), again
    assert not fxquant.report(large).recompilations


class Holder:
    """Layers that no module holds, so that nothing says what they are called."""

    layers = (nn.Linear(32, 32), nn.Linear(32, 32))

    def __call__(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return second(first(x))


def test_a_rule_by_name_that_cannot_be_decided_is_told_once() -> None:
    layers, known = Holder.layers, nn.ModuleDict({"body": nn.Linear(32, 32), "head": nn.Linear(32, 32)})

    def run(x: Tensor) -> Tensor:
        return layers[1](known["head"](known["body"](x)))

    recipe = CustomRecipe(qfactory=Rules([Rule(IdentityQuantizer(), name="head")], default="mxfp8"))
    compiled, x = fxquant.compile(run, recipe, options=EAGER), torch.randn(16, 32)
    with pytest.warns(FxQuantWarning, match=r"names that fxquant does not know in .*run") as caught:
        compiled(x)
    line = f"rule 0: name='head' (for linear at {__file__}:{run.__code__.co_firstlineno + 1})"
    assert len(caught) == 1 and line in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxQuantWarning)
        compiled(x)
    report = fxquant.report(compiled)
    assert {d.layer for d in report.decisions} == {"body", "head", ""} and report.unused == [line]


def test_models_compiled_under_a_name_of_which_nothing_was_captured_are_told_at_exit(monkeypatch: Any) -> None:
    monkeypatch.setattr(notices, "_untold", [])
    monkeypatch.setattr(notices, "_uncalled", [])

    class Skipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = x @ self.weight
                torch._dynamo.graph_break()
            return x

    net = Skipped(32, 32)
    net.compile(backend="fxquant-nvfp4", options=EAGER)
    net(torch.randn(16, 32))
    with pytest.warns(UnquantizedWarning, match="no graph of a model compiled with backend='fxquant-nvfp4' has run"):
        notices._tell_at_exit()


def test_a_partial_has_the_names_of_its_module() -> None:
    net = nn.ModuleDict({"body": nn.Linear(32, 32), "head": nn.Linear(32, 32)})
    compiled = fxquant.compile(partial(lambda net, x: net["head"](net["body"](x)), net), "mxfp8", options=EAGER)
    compiled(torch.randn(16, 32))
    assert {d.layer for d in fxquant.report(compiled).decisions} == {"body", "head"}


def layers_of(report: fxquant.Report) -> set[tuple[str, bool]]:
    return {(d.layer, d.skip_reason == "NOT_CAPTURED") for d in report.decisions}


@pytest.mark.parametrize("way", [by_name, by_backend])
def test_models_that_share_graphs_are_all_reported(way: Way) -> None:
    first_net, second_net = Net(), Net()
    runs = [way(first_net, MXFP8)]
    if way is by_backend:
        (controls,) = controls_of(runs[0])
        runs.append(torch.compile(second_net, backend=controls.first()))
    else:
        runs.append(way(second_net, MXFP8))
    for run in runs:
        run(torch.randn(16, 32))
    first, second = (fxquant.report(run) for run in runs)
    assert layers_of(first) == layers_of(second) and ("hidden", True) in layers_of(second)
    assert len(layers_of(first)) == 6 and not second.uncompiled


def test_a_second_call_that_fails_or_is_a_repetition_changes_no_record() -> None:
    net, x = Net(), torch.randn(16, 32, requires_grad=True)
    run = by_backend(net, MXFP8)
    checkpoint(run, x, use_reentrant=False).sum().backward()  # the second call is in the backward
    hidden, net.hidden = net.hidden, None
    with pytest.raises(TypeError):
        run(x)
    net.hidden = hidden
    assert ("hidden", True) in layers_of(fxquant.report(run)) and no_mode_is_on()


def test_blocks_compiled_in_place_report_what_each_runs_outside_of_graphs_and_tell_once() -> None:
    net = nn.Sequential(Early(), Early())
    fxquant.compile_blocks(net, "mxfp8", Early, options=EAGER)
    with pytest.warns(UnquantizedWarning, match="hidden") as caught:
        for _ in range(2):
            net(torch.randn(16, 32))
    seen = {layer for layer, outside in layers_of(fxquant.report(net)) if outside}
    assert seen == {"0.hidden", "1.hidden"} and len(caught) == 1


def test_products_of_what_a_probe_compiles_are_not_the_models() -> None:
    """A probe that is there before the first call makes its form of the graph in it, and runs its operators to see."""
    torch.compiler.reset()
    rules = Rules([Rule(BlockQuantizer("e2m3"), module_type="linear")])
    compiled = fxquant.compile(nn.Linear(64, 64), CustomRecipe(qfactory=rules), options={"inner": "aot_eager"})
    with fxquant.probe(compiled, every=1):
        compiled(torch.randn(64, 64)).sum().backward()
    report = fxquant.report(compiled)
    assert report.coverage == 1 and report.summary()["matmuls"] == 1


class Wrapper(nn.Module):
    """A wrapper that calls its layer's forward by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x)


class Looped(nn.Module):
    """A wrapped layer and another one in a frame that torch leaves as it is, for a break in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped, self.head = Wrapper(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for factor in (1, 2):
            torch._dynamo.graph_break()
            x = x * factor
        return self.head(self.wrapped(x))


def test_rules_match_the_same_layers_in_explain_and_compile_and_those_outside_of_graphs_count() -> None:
    recipe = CustomRecipe(qfactory=Rules([Rule(IdentityQuantizer(), name="head")], default="mxfp8"))
    model, x = Looped(), torch.randn(2, 16, 32)
    explained = fxquant.explain(model, recipe, x)
    compiled = fxquant.compile(model, recipe, options=EAGER)
    with pytest.warns(UnusedRuleWarning, match="matches only layers that run outside of the captured graphs: head"):
        compiled(x)
    for report in (explained, fxquant.report(compiled)):
        assert report.unused == [
            "rule 0: name='head' matches only layers that run outside of the captured graphs: head"
        ]
        assert {d.layer for d in report.decisions} == {"wrapped.inner", "head"}


def test_another_compiler_around_a_model_compiled_in_place_takes_no_call_of_it() -> None:
    """Accelerate compiles a model once more if its environment says so."""

    def states(around: bool) -> Mapping[str, Tensor]:
        torch._dynamo.reset()
        model = recomputable_mlp()
        model.compile(backend=Backend("delayed_scaling", model=model, inner="aot_eager"))
        run = torch.compile(model, backend="eager") if around else model
        for factor in (1, 2, 3, 4):
            run(factor * torch.ones(32, 64)).sum().backward()
        assert fxquant.report(model).coverage == 1
        return QuantizationState(model).state_dict()

    assert_same_bits(states(around=True), states(around=False))
