"""The controls of a model are the same however it was compiled, also after it was wrapped, unwrapped or copied."""

from __future__ import annotations

import copy
import ctypes
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import assert_same_bits, eager_backend
from torch import Tensor, nn

import fxquant
from fxquant import FxQuantWarning, OptionError, RecipeError, UnquantizedWarning
from fxquant.backend import notices
from fxquant.backend.controls import controls_that_compiled, place_of_root, root_at, root_of
from fxquant.formats import LINEAR_OPERANDS

EAGER = {"inner": "aot_eager"}


class Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:  # torch compiles no forward of its own in place
        for part in self:
            x = part(x)
        return x


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


def by_name(net: Any, recipe: str) -> Any:
    return torch.compile(net, backend="fxquant", options={"recipe": recipe, **EAGER})


def by_backend(net: Any, recipe: str) -> Any:
    return torch.compile(net, backend=eager_backend(recipe))


def in_place(net: nn.Module, recipe: str) -> nn.Module:
    net.compile(backend=eager_backend(recipe, model=net))
    return net


def in_place_by_name(net: nn.Module, recipe: str) -> nn.Module:
    net.compile(backend="fxquant", options={"recipe": recipe, **EAGER})
    return net


def in_place_unknown(net: nn.Module, recipe: str) -> nn.Module:
    net.compile(backend=eager_backend(recipe))
    return net


def as_function(net: nn.Module, recipe: str) -> Any:
    return by_name(lambda x: net(x), recipe)


def typed(net: Any, recipe: str) -> Any:
    return fxquant.compile(net, recipe, options=EAGER)


def as_fabric_does(net: Any, recipe: str) -> Any:
    """Unwraps what it is given, and compiles it again with the same arguments."""
    with mock.patch("torch.compile", side_effect=torch.compile) as recorded:
        compiled = typed(net, recipe)
    return torch.compile(compiled._orig_mod, **recorded.call_args.kwargs)


def inside_another(net: Any, recipe: str) -> Any:
    return nn.Sequential(nn.Identity(), typed(net, recipe))


WAYS = (typed, by_name, by_backend, in_place, in_place_by_name, as_function, as_fabric_does, inside_another)
Way = Callable[[nn.Module, str], Any]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


def plain(x: Tensor) -> Tensor:
    return model()(x)


def test_the_scope_and_set_recipe_act(way: Way) -> None:
    run, x = way(model(), "mxfp8"), torch.randn(16, 64)
    first = run(x)
    assert not torch.equal(first, plain(x)) and fxquant.report(run).recipe == "mxfp8"
    with fxquant.autocast(enabled=False):
        assert torch.equal(run(x), plain(x))
    assert torch.equal(run(x), first)
    if way is as_function:
        with pytest.raises(OptionError, match="compiled keeps its recipe"):
            fxquant.set_recipe(run, "nvfp4")
        return
    with fxquant.autocast(recipe="nvfp4"):
        other = run(x)
        assert fxquant.report(run).recipe == "nvfp4" and fxquant.report(run).coverage == 1
    fxquant.set_recipe(run, "nvfp4")
    assert torch.equal(run(x), other) and not torch.equal(other, first)
    fxquant.set_recipe(run, "mxfp8")
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(run(x), first)


def test_the_recipe_is_chosen_before_the_first_call(way: Way) -> None:
    run, x = way(model(), "mxfp8"), torch.randn(16, 64)
    if way is as_function:
        return
    fxquant.set_recipe(run, "high_precision")
    assert torch.equal(run(x), plain(x))
    with pytest.raises(RecipeError, match="Known recipes"):
        fxquant.set_recipe(run, "fp3")


def test_the_state_is_saved_and_restored(way: Way) -> None:
    x = torch.randn(32, 64)

    def trained(run: Any, steps: int) -> Tensor:
        for step in range(steps):
            output = run((1 + step) * x)
            output.sum().backward()
        return output.detach()

    run = way(model(), "delayed_scaling")
    trained(run, 3)
    state = fxquant.state_dict(run)
    before = "1." if way is inside_another else ""
    assert {key.rpartition(".")[0] for key in state} == {f"{before}{i}.{op}" for i in (0, 2) for op in LINEAR_OPERANDS}
    expected = trained(run, 1)
    torch.compiler.reset()
    again = way(model(), "delayed_scaling")
    fxquant.load_state_dict(again, state)
    assert torch.equal(trained(again, 1), expected)


def test_the_module_that_was_compiled_is_asked_too() -> None:
    net, x = model(), torch.randn(16, 64)
    with pytest.raises(OptionError, match="fxquant has compiled no part of Net: compile it by"):
        fxquant.report(net)
    with pytest.raises(OptionError, match="compiled no part of <function plain"):
        fxquant.set_recipe(plain, "mxfp8")
    by_name(net, "mxfp8")(x)
    assert fxquant.report(net).coverage == 1
    blocks = nn.ModuleList([typed(model(), "rowwise"), typed(model(), "rowwise")])
    for block in blocks:
        block(x)
    report = fxquant.report(blocks)
    assert len(report.decisions) == 20 and len({decision.site for decision in report.decisions}) == 4


def test_models_with_one_backend_have_recipes_of_their_own() -> None:
    options = {"recipe": "mxfp8", **EAGER}
    nets = [model(), model()]
    first, second = (torch.compile(net, backend="fxquant", options=options) for net in nets)
    x = torch.randn(16, 64)
    expected = first(x)
    assert torch.equal(second(x), expected)
    fxquant.set_recipe(second, "high_precision")
    assert torch.equal(second(x), plain(x)) and torch.equal(first(x), expected)


@pytest.mark.parametrize("name", ["by_name", "by_backend"])
def test_models_with_one_backend_have_scales_of_their_own(name: str) -> None:
    x, options = torch.randn(32, 64), {"recipe": "delayed_scaling", **EAGER}

    def outputs(*factors: float) -> list[Tensor]:
        torch.compiler.reset()
        how = (
            {"backend": "fxquant", "options": options} if name == "by_name" else {"backend": fxquant.Backend(**options)}
        )
        runs, results = [torch.compile(model(), **how) for _ in factors], []
        for _ in range(3):
            for run, factor in zip(runs, factors, strict=True):
                y = run(factor * x)
                y.sum().backward()
                results += [y.detach()] if factor == 1 else []
        return results

    assert all(map(torch.equal, outputs(1), outputs(1, 1e4)))


def test_many_blocks_with_one_backend_share_a_graph_and_have_scales_of_their_own() -> None:
    backend, x = eager_backend("delayed_scaling"), torch.randn(32, 64)
    blocks = nn.ModuleList([Net(nn.Linear(64, 64)) for _ in range(7)])
    for block in blocks:
        block.compile(backend=backend)
    for _ in range(2):
        for i, block in enumerate(blocks):
            block((i + 1) * x).sum().backward()
    assert backend.captured == 1
    state = fxquant.state_dict(blocks)
    assert len(state) == 7 * 3 * 2
    for i, block in enumerate(blocks):
        torch.testing.assert_close(state[f"{i}.0.input.scale"], 448 / ((i + 1) * x).abs().max())
        assert_same_bits(fxquant.state_dict(block), {k[2:]: v for k, v in state.items() if k[0] == str(i)})
    with pytest.raises(OptionError, match=r"several modules .* have a state 0\.input\.scale: ask fxquant.state_dict"):
        backend.state_dict()


def test_a_scope_that_met_no_compiled_model_warns() -> None:
    net, x = model(), torch.randn(16, 64)
    with pytest.warns(FxQuantWarning, match=r"autocast\(recipe=mxfp8\) met no compiled model") as caught:
        with fxquant.autocast(recipe="mxfp8"):
            net(x)
    assert caught[0].filename == __file__
    compiled = typed(net, "rowwise")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxQuantWarning)
        with fxquant.autocast(enabled=False), fxquant.autocast():
            net(x)
        with fxquant.autocast(recipe="mxfp8"), fxquant.autocast(recipe="nvfp4"):
            compiled(x)
        with pytest.raises(ZeroDivisionError), fxquant.autocast(recipe="mxfp8"):
            raise ZeroDivisionError


def test_a_part_that_is_compiled_alone_is_not_told_to_run_in_no_graph() -> None:
    for places in ([0], [0, 1]):
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
        for place in places:
            net[place] = fxquant.compile(net[place], "mxfp8", options=EAGER)
        net(torch.randn(16, 64))
        report = fxquant.report(net)
        assert report.uncompiled == [] and report.summary()["matmuls"] == len(places)


def test_a_scope_is_entered_again_and_decorates() -> None:
    net, x = model(), torch.randn(16, 64)
    compiled, scope = typed(net, "mxfp8"), fxquant.autocast(enabled=False)
    with torch.no_grad():
        plain, quantized = net(x), compiled(x)
        for _ in range(2):
            with scope, scope:
                assert torch.equal(compiled(x), plain)
            assert torch.equal(scope(compiled)(x), plain) and torch.equal(compiled(x), quantized)


def test_a_model_that_another_recipe_or_another_library_ran_is_not_told_of_at_exit(monkeypatch: Any) -> None:
    for waiting in ("_untold", "_uncalled", "_unmet"):
        monkeypatch.setattr(notices, waiting, [])
    x = torch.randn(16, 64)
    for change in (by_backend, by_name, typed, as_fabric_does):
        run = change(model(), "mxfp8")
        with fxquant.autocast(recipe="nvfp4"):
            run(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxQuantWarning)
        notices._tell_at_exit()
    never = by_backend(model(), "mxfp8")
    fxquant.set_recipe(never, "nvfp4")
    with pytest.warns(UnquantizedWarning, match=r"no graph of fxquant.Backend\(mxfp8\) has run"):
        notices._tell_at_exit()


def test_tools_keep_the_recipe_that_they_are_given() -> None:
    net, x = model(), torch.randn(16, 64)
    with fxquant.autocast(enabled=False):
        assert fxquant.explain(net, "mxfp8", x).coverage == 1


def test_a_report_is_of_its_own_compilation() -> None:
    net, x = model(), torch.randn(16, 64)
    run = torch.compile(net, backend="fxquant", options={"recipe": "mxfp8", **EAGER})
    run(x)
    matmuls = str(fxquant.report(run)).splitlines()[1]
    fxquant.explain(net, "nvfp4", x)
    fxquant.measure(net, "nvfp4", x)
    assert str(fxquant.report(net)).splitlines()[1] == matmuls, "tools compile nothing that runs"
    fxquant.compile(net, "rowwise", options=EAGER)(x)
    assert str(fxquant.report(run)).splitlines()[1] == matmuls


def test_a_backend_whose_copy_ran_is_not_told_of_at_exit(monkeypatch: Any) -> None:
    for name in ("_untold", "_uncalled", "_unmet"):
        monkeypatch.setattr(notices, name, [])
    backend, idle = (fxquant.Backend("mxfp8", **EAGER) for _ in range(2))
    copied, _ = copy.deepcopy(backend), copy.deepcopy(copy.deepcopy(idle))
    torch.compile(model(), backend=copied)(torch.randn(16, 64))
    assert copied.report().coverage == 1 and not backend.report().decisions
    with pytest.warns(UnquantizedWarning) as told:
        notices._tell_at_exit()
    assert [str(warning.message).partition(" has run")[0] for warning in told] == ["no graph of fxquant.Backend(mxfp8)"]


def test_a_copy_of_a_backend_keeps_the_chosen_recipe() -> None:
    backend, x = eager_backend("delayed_scaling"), torch.randn(32, 64)
    torch.compile(model(), backend=backend)(x).sum().backward()
    backend.set_recipe("mxfp8")
    other = copy.deepcopy(backend)
    assert_same_bits(other.state_dict(), backend.state_dict())
    torch.compile(model(), backend=other)(x)
    assert other.report().recipe == "mxfp8"


def test_the_cached_weights_of_a_model_are_forgotten() -> None:
    net, x = model(), torch.randn(16, 64)
    run = torch.compile(net, backend="fxquant", options={"recipe": "mxfp8", "cache_weights": True, **EAGER})
    with torch.no_grad():
        first = run(x)
        ctypes.memset(net[0].weight.data_ptr(), 0, net[0].weight.nbytes)  # nothing shows it
        assert torch.equal(run(x), first)
        fxquant.clear_cache(run)
        assert not torch.equal(run(x), first)


@pytest.mark.parametrize("way", [by_backend, lambda net, recipe: net.compile(backend=eager_backend(recipe)) or net])
def test_models_of_a_class_with_a_backend_each_report_their_own(way: Way) -> None:
    nets, x = [model(), model()], torch.randn(32, 64)
    runs = [way(net, recipe) for net, recipe in zip(nets, ("mxfp8", "nvfp4"), strict=True)]
    for _ in range(2):
        for run in runs:
            run(x)
    assert [fxquant.report(run).recipe for run in runs] == ["mxfp8", "nvfp4"]
    assert [len(fxquant.report(run).decisions) for run in runs] == [10, 10]
    assert [len(controls_that_compiled(net)) for net in nets] == [1, 1]


@pytest.mark.parametrize("way", [typed, by_name, in_place])
def test_what_was_compiled_is_pickled(way: Way) -> None:
    run, x = way(model(), "mxfp8"), torch.randn(16, 64)
    first = run(x)
    if way is in_place:  # torch leaves out what was compiled
        with pytest.warns(UnquantizedWarning, match="what is loaded runs unquantized until it is compiled"):
            again = pickle.loads(pickle.dumps(run))
        with pytest.raises(OptionError, match="no part of Net"):
            fxquant.report(again)
    else:
        again = pickle.loads(pickle.dumps(run))
    assert torch.equal(again(x), plain(x) if way is in_place else first)


@pytest.mark.parametrize("way", [in_place, in_place_by_name])
@pytest.mark.parametrize("wrap", [copy.deepcopy, torch.optim.swa_utils.AveragedModel])
def test_a_copy_of_what_was_compiled_in_place_is_compiled(way: Way, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """With the recipe that was set and with the state, but its recipe and state are its own from then on."""
    run, x = way(model(), "mxfp8"), torch.randn(32, 64)
    fxquant.set_recipe(run, "delayed_scaling")
    for _ in range(2):
        run(x).sum().backward()
    copied = wrap(wrap(run))
    state = fxquant.state_dict(run)
    assert_same_bits({key.removeprefix("module.module."): x for key, x in fxquant.state_dict(copied).items()}, state)
    copied = wrap(run)
    assert torch.equal(copied(x), run(x)) and not torch.equal(copied(x), plain(x))
    copied(2 * x)
    fxquant.set_recipe(copied, "nvfp4")
    assert not torch.equal(copied(x), run(x))
    assert [fxquant.report(one).recipe for one in (run, copied)] == ["delayed_scaling", "nvfp4"]
    assert {d.layer.removeprefix("module.") for d in fxquant.report(copied).decisions} == {"0", "2"}


@pytest.mark.parametrize("way", [in_place, in_place_by_name, in_place_unknown])
def test_a_copy_made_before_the_first_call_is_compiled(way: Way) -> None:
    """The backend may know the model or not; a deep copy has a state of its own."""
    run, x = way(model(), "delayed_scaling"), torch.randn(16, 64)
    copied = copy.deepcopy(torch.optim.swa_utils.AveragedModel(run))
    assert torch.equal(copied(x), run(x)) and not torch.equal(copied(x), plain(x))
    run(2 * x)
    ours, others = fxquant.state_dict(run), fxquant.state_dict(copied)
    assert {*ours} == {key.removeprefix("module.") for key in others}
    assert any(not torch.equal(value, others[f"module.{key}"]) for key, value in ours.items())


@pytest.mark.parametrize("way", [in_place, in_place_by_name, in_place_unknown])
def test_a_shallow_copy_is_compiled_and_its_copies_are(way: Way) -> None:
    run, x = way(model(), "mxfp8"), torch.randn(16, 64)
    before = copy.copy(run)
    expected = run(x)
    for copied in (before, copy.copy(run), copy.deepcopy(before), copy.copy(copy.copy(run))):
        assert torch.equal(copied(x), expected) and not torch.equal(expected, plain(x))


def test_what_is_pickled_before_the_first_call_is_said_to_be_plain() -> None:
    run = in_place_by_name(model(), "mxfp8")
    with pytest.warns(UnquantizedWarning, match="what is loaded runs unquantized"):
        pickle.dumps(run)


def test_scales_begin_anew_where_the_model_ran_on_meta_before() -> None:
    with torch.device("meta"):
        net = model()
    run = typed(net, "delayed_scaling")
    run(torch.empty(16, 64, device="meta"))
    net.to_empty(device="cpu").load_state_dict(model().state_dict())
    x = torch.randn(16, 64)
    assert (run(x) - plain(x)).norm() < 0.1 * plain(x).norm()


def test_runs_of_another_thread_do_not_count() -> None:
    controls = eager_backend("mxfp8").controls
    before = controls.runs()
    thread = threading.Thread(target=controls.run)
    thread.start()
    thread.join()
    assert not controls.ran_since(before)
    controls.run()
    assert controls.ran_since(before)


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed_scaling"])
def test_tensors_of_a_compiled_model_can_be_swapped(recipe: str) -> None:
    """`Module.to` swaps DTensors, and all parameters if it is told to."""
    net, x = model(), torch.randn(16, 64)
    run = fxquant.compile(net, recipe, options={**EAGER, "cache_weights": True})
    run(x).sum().backward()
    torch.utils.swap_tensors(net[0].weight, nn.Parameter(torch.rand(96, 64) / 8))
    net.zero_grad()
    run(x).sum().backward()
    torch.utils.swap_tensors(net[0].weight, nn.Parameter(-torch.rand(96, 64) / 8))
    with torch.no_grad():
        assert (run(x) - net(x)).norm() < 0.2 * net(x).norm()


def test_the_module_of_a_frame_is_where_it_was_in_the_one_captured() -> None:
    """A guard that searched all variables for it took the host 10 microseconds in each step of a decode."""
    first, second = nn.Linear(2, 2), nn.Sequential()
    frame = {"args": (first,), "kwargs": {"x": 1}, "flag": None}
    assert place_of_root(frame) == ("args", True)
    assert root_at({"args": (second,), "flag": None}, ("args", True)) is second
    assert root_at({"args": ()}, ("args", True)) is root_at({}, ("self", False)) is None
    assert root_of({"a": second, "fn": first.forward, "self": 1}) is first
    assert place_of_root({"a": (1,), "b": {}}) is None
