"""The front door, and what a compiled model may be: any shape, autocast, regions, breaks, modes, caches."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import helpers
import pytest
import torch
import torch.nn.functional as F
from bits import same
from helpers import NAMES, assert_same_bits, compiled, eager_backend, hybrid, linear_step, train_step
from ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import fxquant
from fxquant import CustomRecipe, MXFP8Quantizer, OptionError, RecipeError, SkipReason
from fxquant.report.header import Header

MX = MXFP8Quantizer()


class Mlp(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 48, out: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def reasons(report: fxquant.Report) -> set[str]:
    return {str(d.skip_reason) for d in report.decisions if d.skip_reason}


# The front door


def test_three_spellings_are_one() -> None:
    model, x = Mlp(), torch.randn(8, 32)
    options = {"recipe": "mxfp8", "inner": "aot_eager"}
    results = []
    for make in (
        lambda: torch.compile(model, backend="fxquant", options=options),
        lambda: torch.compile(model, backend=fxquant.Backend("mxfp8", inner="aot_eager")),
        lambda: fxquant.compile(model, "mxfp8", options={"inner": "aot_eager"}),
        lambda: fxquant.compile(model, fxquant.MXFP8BlockScaling(), options={"inner": "aot_eager"}, fullgraph=True),
    ):
        torch.compiler.reset()
        results.append(train_step(model, make(), x))
    for other in results[1:]:
        assert_same_bits(results[0], other)
    assert not torch.equal(results[0]["output"], model(x)), "something was quantized"


def test_the_backend_is_found_by_name() -> None:
    assert "fxquant" in torch._dynamo.list_backends()


def test_unknown_recipes_and_options_are_refused_at_once_with_the_known_ones() -> None:
    model = Mlp()
    with pytest.raises(RecipeError, match=r"unknown recipe 'mxpf8'; did you mean 'mxfp8'\?.*nvfp4"):
        fxquant.compile(model, "mxpf8")
    with pytest.raises(RecipeError, match=r"unknown recipe"):
        fxquant.Backend("mxpf8")
    with pytest.raises(OptionError, match=r"\['recpie'\]; did you mean 'recipe'\? known options: recipe, inner"):
        fxquant.compile(model, "mxfp8", options={"recpie": 1})
    with pytest.raises(OptionError, match="inner must be 'inductor' or 'aot_eager', not 'tvm'"):
        fxquant.Backend("mxfp8", inner="tvm")
    with pytest.raises(OptionError, match=r"no setting 'max_autotunne'"):
        fxquant.Backend("mxfp8", inductor={"max_autotunne": True})
    with pytest.raises(OptionError, match="drop the backend"):
        fxquant.compile(model, "mxfp8", backend="inductor")
    with pytest.raises(OptionError, match="unknown mode 'fast'; known modes: default"):
        fxquant.compile(model, "mxfp8", mode="fast")
    with pytest.raises(OptionError, match="a module or a function is compiled, not a NoneType"):
        fxquant.compile(None, "mxfp8")
    for options, message in (
        (["inner"], "options must be a dict of recipe, .*, not a list$"),
        ({"recipe": "nvfp4"}, "drop it from the options"),
        ({"inductor": 3}, "inductor must be None or a dict, not 3"),
        ({"amax_group": 3}, "amax_group is a process group or 'world', not 3"),
        ({"cache_weights": "no"}, "cache_weights must be True or False, not 'no'"),
    ):
        with pytest.raises(OptionError, match=message):
            fxquant.compile(model, "mxfp8", options=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "mxpf8"}, "unknown recipe 'mxpf8'"),
        ({"recpie": "mxfp8"}, "known options: recipe"),
        ({"inner": "aot_eager"}, "the option 'recipe' is missing"),
    ],
)
def test_the_named_backend_refuses_them_too(options: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, RecipeError), match=message):
        torch.compile(Mlp(), backend="fxquant", options=options)(torch.randn(8, 32))


class Counting(nn.Module):
    """Notes in a buffer that it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.fc = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        self.runs.add_(1)
        return self.fc(x)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_pair_that_cannot_multiply_is_an_error_before_anything_runs(gemm: str) -> None:
    """Invariant 26, found at compile time instead of in the backward."""
    e5m2 = MXFP8Quantizer(fp8_dtype=torch.float8_e5m2)
    operands = {"input": MX, "weight": MX, "grad_output": MX}
    operands |= {
        "fprop": {"input": hybrid(e5m2, MX), "weight": hybrid(e5m2, MX)},
        "dgrad": {"grad_output": hybrid(e5m2, MX), "weight": hybrid(MX, e5m2)},
        "wgrad": {"input": hybrid(MX, e5m2), "grad_output": hybrid(MX, e5m2)},
    }[gemm]
    model, x = Counting(), torch.randn(8, 32, requires_grad=True)
    with pytest.raises(RecipeError) as error:
        compiled(model, helpers.per_role(**operands))(x)
    for part in ("layer 'fc'", gemm, "MXFP8Quantizer(fp8_dtype=torch.float8_e5m2)", "e5m2 by e5m2"):
        assert part in str(error.value)
    assert model.runs == 0


def test_none_from_a_factory_is_an_error_that_names_the_role() -> None:
    """Invariant 11."""
    with pytest.raises(RecipeError, match=r"None for role fc \(linear, input\): return an IdentityQ"):
        compiled(Counting(), CustomRecipe(qfactory=lambda role: None))(torch.randn(8, 32))


def test_the_state_dict_and_the_model_stay_as_they_were() -> None:
    model = Mlp()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    train_step(model, compiled(model, "mxfp8"), torch.randn(8, 32))
    assert_same_bits(model.state_dict(), before)
    assert type(model.up) is nn.Linear


# Shapes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "shape",
    [(32,), (1, 32), (0, 32), (5, 32), (2, 3, 32), (2, 3, 5, 32), (2, 0, 32), (130, 32)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_any_leading_axes(name: str, shape: tuple[int, ...]) -> None:
    model, x = Mlp(), torch.randn(shape)
    got, high = train_step(model, compiled(model, name), x), train_step(model, model, x)
    assert got.keys() == high.keys()
    for key in got:
        assert got[key].shape == high[key].shape and got[key].dtype == high[key].dtype
        assert got[key].isfinite().all()
        if high[key].norm() > 0:
            assert (got[key] - high[key]).norm() / high[key].norm() < (0.8 if name == "nvfp4" else 0.25), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dims", [(33, 50, 41), (17, 16, 129), (1, 131, 16)], ids=str)
def test_ragged_sizes_equal_the_layer_padded_with_zeros(name: str, dims: tuple[int, int, int]) -> None:
    """Padding never touches amax, outputs or gradients: zeros around the operands change no bit but the sums' order."""
    m, k, n = dims
    x, w, dy = helpers.problem(m, k, n, torch.float32)
    up = [-size % 128 for size in dims]
    got = linear_step(name, x, w, dy)
    padded = linear_step(
        name, F.pad(x, (0, up[1], 0, up[0])), F.pad(w, (0, up[1], 0, up[2])), F.pad(dy, (0, up[2], 0, up[0]))
    )
    torch.testing.assert_close(got["y"], padded["y"][:m, :n], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got["dx"], padded["dx"][:m, :k], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got["dw"], padded["dw"][:n, :k], rtol=1e-5, atol=1e-4)
    assert all((padded["y"][m:] == 0).flatten())


def test_non_contiguous_inputs_equal_their_copies() -> None:
    model = Mlp()
    wide = torch.randn(32, 6, 64)
    run = compiled(model, "mxfp8")
    for x in (wide[..., ::2], wide.permute(1, 2, 0), wide[:, :, :32].transpose(0, 1), torch.randn(32).expand(7, 32)):
        assert_same_bits(train_step(model, run, x), train_step(model, run, x.contiguous()))


def graphs_of(model: nn.Module, backend: Any, inputs: list[Tensor], **kwargs: Any) -> int:
    counter = CompileCounterWithBackend(backend)
    torch.compiler.reset()
    run = torch.compile(model, backend=counter, **kwargs)
    for x in inputs:
        run(x).sum().backward()
    return counter.frame_count


def graphs_of_sizes(name: str, dynamic: bool | None) -> int:
    inputs = [torch.randn(n, s, 32) for n, s in ((4, 40), (4, 41), (5, 33), (20, 64), (7, 48))]
    return graphs_of(Mlp(), eager_backend(name) if name else "aot_eager", inputs, dynamic=dynamic)


@cache
def plain_graphs_of_sizes(dynamic: bool | None) -> int:
    return graphs_of_sizes("", dynamic)


AUTOMATIC = ("current_scaling", "nvfp4")
"""The recipes that torch finds dynamic sizes under by itself; the others are for `make sweep`."""


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *(pytest.param(name, True, id=f"{name}-dynamic") for name in NAMES),
        *(
            pytest.param(name, None, id=f"{name}-automatic", marks=[] if name in AUTOMATIC else pytest.mark.sweep)
            for name in NAMES
        ),
    ],
)
def test_dynamic_shapes_cost_no_more_compilations_than_without_fxquant(name: str, dynamic: bool | None) -> None:
    assert graphs_of_sizes(name, dynamic) == plain_graphs_of_sizes(dynamic)


@pytest.mark.parametrize("name", NAMES)
def test_dynamic_shapes_give_the_bits_of_static_ones_in_two_compilations_at_most(name: str) -> None:
    """A scale tensor of size one, of a single block of rows, is to torch what a batch of one is: a case of its own."""
    model = Mlp()
    backend = eager_backend(name)
    counter = CompileCounterWithBackend(backend)
    dynamic = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for rows in (8, 9, 200, 30, 130):
        dynamic(torch.randn(rows, 32)).sum().backward()
    model.zero_grad()
    for rows in (33, 5, 128, 200):
        x = torch.randn(rows, 32)
        # random numbers from the first step, as the new backend takes them
        backend.load_state_dict({key: value * torch.tensor([1, 0]) for key, value in backend.state_dict().items()})
        got = train_step(model, dynamic, x)
        assert_same_bits(got, train_step(model, torch.compile(model, backend=eager_backend(name), dynamic=False), x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (Mlp().double(), torch.randn(8, 32, dtype=torch.float64), "DTYPE"),
        (Mlp(8, 12, 8), torch.randn(8, 8), "TOO_SMALL"),
    ],
    ids=["float64", "small"],
)
def test_what_is_skipped_runs_as_without_fxquant(model: nn.Module, x: Tensor, reason: str) -> None:
    backend = eager_backend("mxfp8")
    got = train_step(model, torch.compile(model, backend=backend), x)
    torch.compiler.reset()
    assert_same_bits(got, train_step(model, torch.compile(model, backend="aot_eager"), x))
    assert reasons(backend.report()) == {reason}


def test_integer_and_complex_products_run_and_are_reported() -> None:
    def run(a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return a @ a, c @ c

    backend = eager_backend("mxfp8")
    a, c = torch.randint(5, (32, 32)), torch.randn(32, 32, dtype=torch.complex64)
    for got, expected in zip(torch.compile(run, backend=backend)(a, c), run(a, c), strict=True):
        assert torch.equal(got, expected)
    assert reasons(backend.report()) == {"DTYPE"}


def test_float64_is_quantized_when_asked() -> None:
    model, x = Mlp().double(), torch.randn(8, 32, dtype=torch.float64)
    backend = eager_backend("mxfp8", allow_float64=True)
    got = train_step(model, torch.compile(model, backend=backend), x)
    assert not reasons(backend.report()) and got["up.weight"].dtype == torch.float64
    assert 0 < (got["output"] - model(x)).norm() / model(x).norm() < 0.1


# Autocast


class Autocast(nn.Module):
    def __init__(self, model: nn.Module, enabled: bool = True) -> None:
        super().__init__()
        self.model, self.enabled = model, enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return self.model(x)


class Casts(nn.Module):
    """What autocast means for an Mlp, written out."""

    def __init__(self, model: Mlp) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        def linear(layer: nn.Linear, x: Tensor) -> Tensor:
            return F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())

        return linear(self.model.down, F.gelu(linear(self.model.up, x)))


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("name", ["current_scaling", "mxfp8", "nvfp4"])
def test_autocast_equals_explicit_casts(name: str, where: str) -> None:
    """Float32 weights under bf16 autocast, in the graph or around the compiled call."""
    model, x = Mlp(), torch.randn(8, 32)
    casts = Casts(model)
    # random bits belong to the names of layers, which differ here
    recipe = fxquant.NVFP4BlockScaling(disable_stochastic_rounding=True) if name == "nvfp4" else name
    expected = train_step(casts, compiled(casts, recipe), x)
    wrapped = Autocast(model)
    torch.compiler.reset()
    if where == "inside":
        got = train_step(wrapped, compiled(wrapped, recipe), x)
    else:
        run = compiled(model, recipe)

        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return run(x)

        got = train_step(wrapped, forward, x)
    assert got["output"].dtype == torch.bfloat16 and got["model.up.weight"].dtype == torch.float32
    assert_same_bits(got, expected)


def test_what_no_gradient_needs_may_be_written_into() -> None:
    """As after torch's own linear: the input of a frozen one, and a weight whose input gets no gradient."""
    torch.manual_seed(0)
    frozen, trained = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)
    experts = nn.Parameter(torch.randn(2, 64, 64), requires_grad=False)

    def run(x: Tensor) -> Tensor:
        y = trained(x)
        with torch.no_grad():
            trained.weight.mul_(0.5)
        z = frozen(y)
        y.add_(z).mul_(2)
        groups = y.unflatten(0, (2, -1)) * 1
        out = torch.bmm(groups, experts)
        groups.zero_()
        return out.flatten(0, 1) + y

    weight, x = trained.weight.detach().clone(), torch.randn(32, 64)
    results = []
    for backend in ("aot_eager", eager_backend("mxfp8")):
        with torch.no_grad():
            trained.weight.copy_(weight)
        torch.compiler.reset()
        results.append(train_step(trained, torch.compile(run, backend=backend, fullgraph=True), x))
    for name, expected in results[0].items():
        cosine = F.cosine_similarity(results[1][name].flatten(), expected.flatten(), dim=0)
        assert cosine > 0.99, name
    assert backend.report().coverage == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("loop", ["scan", "while_loop"])
def test_loops_train_in_high_precision(loop: str) -> None:
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight, self.out = nn.Parameter(torch.randn(32, 32) / 6), nn.Linear(32, 32)

        def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(state @ self.weight + x)
            return state, state.clone()

        def forward(self, x: Tensor) -> Tensor:
            if loop == "scan":
                return self.out(scan(self.step, torch.zeros(16, 32), x)[1])
            count = torch.tensor(0)
            looped = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, torch.tanh(y @ self.weight)), (count, x[0]))
            return self.out(looped[1])

    model, backend, x = Loop(), eager_backend("mxfp8"), torch.randn(4, 16, 32, requires_grad=True)
    got = train_step(model, torch.compile(model, backend=backend, fullgraph=True), x)
    assert got["weight"].isfinite().all() and got["weight"].abs().sum() > 0
    reasons = {(d.skip_reason, d.detail) for d in backend.report().decisions if d.layer != "out"}
    counts = "in the body of a loop: one of its steps counts"
    assert reasons == {(SkipReason.UNSUPPORTED_FORM, f"in a {loop} that gets gradients; {counts}")}
    assert {d.skip_reason for d in backend.report().decisions if d.layer == "out"} == {None}
    torch.compiler.reset()
    with torch.no_grad():
        run = eager_backend("mxfp8")
        torch.compile(model, backend=run, fullgraph=True)(x)
    assert run.report().coverage == 1


def test_autocast_counts_by_the_device_of_each_matmul() -> None:
    """Not by that of the first input, such as lengths on the CPU beside activations on a GPU."""
    model, x, other = Mlp(), torch.randn(8, 32), torch.ones(3, device="meta")
    run = torch.compile(lambda other, x: (other + 1, model(x)), backend=eager_backend("mxfp8"), fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(other, x)[1]
        torch.compiler.reset()
        expected = compiled(model, "mxfp8")(x)
    assert torch.equal(got, expected)
    torch.compiler.reset()
    assert not torch.equal(got.float(), compiled(model, "mxfp8")(x))


def test_autocast_switched_off_inside_is_off() -> None:
    model, x = Mlp(), torch.randn(8, 32)
    wrapped = Autocast(model, enabled=False)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return wrapped(x)

    got = train_step(model, torch.compile(run, backend=eager_backend("mxfp8"), fullgraph=True), x)
    assert got["output"].dtype == torch.float32
    torch.compiler.reset()
    assert_same_bits(got, train_step(model, compiled(model, "mxfp8"), x))


def test_gradients_of_half_precision_models_keep_their_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model, x = Mlp().to(dtype), torch.randn(8, 32, dtype=dtype)
        got = train_step(model, compiled(model, "mxfp8"), x)
        assert {value.dtype for value in got.values()} == {dtype}
        torch.compiler.reset()


# Regions, breaks and modes


def test_both_branches_of_cond_are_quantized() -> None:
    class Branches(helpers.TwoLinears):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x), (x,))

    model, backend = Branches(), eager_backend("mxfp8")
    run = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(8, 32).abs()
    for sign, layer in ((1, model.a), (-1, model.b)):
        got = train_step(model, run, sign * x)
        torch.compiler.reset()
        alone = train_step(layer, compiled(layer, "mxfp8"), sign * x)
        assert torch.equal(got["output"], alone["output"])
        run = torch.compile(model, backend=backend, fullgraph=True)
    assert {d.layer for d in backend.report().decisions} >= {"a", "b"}


def test_nested_compile_regions_are_quantized() -> None:
    model, x = Mlp(), torch.randn(8, 32)

    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.region = torch.compiler.nested_compile_region(lambda x: self.model(x))

        def forward(self, x: Tensor) -> Tensor:
            return self.region(x) + self.region(2 * x)

    outer = Regions()
    backend = eager_backend("mxfp8")
    got = train_step(outer, torch.compile(outer, backend=backend, fullgraph=True), x)
    assert backend.report().coverage == 1.0
    torch.compiler.reset()
    plain = train_step(model, compiled(lambda x: model(x) + model(2 * x), "mxfp8"), x)
    assert torch.equal(got["output"], plain["output"])
    torch.testing.assert_close(got["model.up.weight"], plain["up.weight"], rtol=1e-4, atol=1e-4)


class Broken(nn.Module):
    """Two graphs with a break between them, inside an inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner[0](x)
        torch._dynamo.graph_break()
        return self.inner[1](x)


def test_models_that_break_keep_their_full_names() -> None:
    model, x = Broken(), torch.randn(8, 32)
    backend = eager_backend("mxfp8", model=model)
    got = train_step(model, torch.compile(model, backend=backend), x)
    layers = list(dict.fromkeys(d.layer for d in backend.report().decisions))
    assert layers == ["inner.0.up", "inner.0.down", "inner.1.up", "inner.1.down"]
    assert len({d.site for d in backend.report().decisions}) == 4
    torch.compiler.reset()
    whole = nn.Sequential(*model.inner)
    names = {k.replace("inner.", ""): v for k, v in got.items()}
    assert_same_bits(names, train_step(whole, compiled(whole, "mxfp8"), x))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])
def test_inference_gives_the_output_of_training_and_quantizes_rows_only(mode: Callable[[], Any]) -> None:
    model, x = Mlp(), torch.randn(8, 32)
    trained = compiled(model, "mxfp8")(x)
    torch.compiler.reset()
    recorder = helpers.Recorder("mxfp8")
    with mode():
        output = torch.compile(model, backend=recorder, fullgraph=True)(x)
    assert torch.equal(output, trained)
    assert recorder.story().count("quantize(") == 4 and "column" not in recorder.story()


def test_frozen_weights_have_no_weight_gradient_gemm() -> None:
    model, x = Mlp(), torch.randn(8, 32, requires_grad=True)
    model.up.requires_grad_(False)
    model.down.weight.requires_grad_(False)
    backend = eager_backend("mxfp8")
    output = torch.compile(model, backend=backend, fullgraph=True)(x)
    output.sum().backward()
    assert {str(d.gemm) for d in backend.report().decisions} == {"fprop", "dgrad"}
    assert x.grad is not None and model.down.bias.grad is not None and model.up.weight.grad is None


class Lora(nn.Module):
    """A frozen layer and two small trained ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 48).requires_grad_(False)
        self.a, self.b = nn.Linear(32, 16, bias=False), nn.Linear(16, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def test_adapters_are_trained_beside_a_frozen_layer() -> None:
    model, x = Lora(), torch.randn(8, 32)
    backend = eager_backend("mxfp8")
    got = train_step(model, torch.compile(model, backend=backend, fullgraph=True), x)
    found = backend.report().decisions
    gemms = {layer: {str(d.gemm) for d in found if d.layer == layer} for layer in ("base", "a", "b")}
    assert gemms == {"base": {"fprop"}, "a": {"fprop", "wgrad"}, "b": {"fprop", "dgrad", "wgrad"}}
    high = train_step(model, model, x)
    assert got.keys() == high.keys() == {"output", "a.weight", "b.weight"}


def test_models_in_eval_mode_and_after_weight_updates_use_the_new_weights() -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    run = compiled(model, "mxfp8")
    first = run(x)
    with torch.no_grad():
        model.up.weight.mul_(2)
    assert not torch.equal(run(x), first)


def test_gradients_accumulate() -> None:
    model, x = Mlp(), torch.randn(8, 32)
    run = compiled(model, "mxfp8")
    one = train_step(model, run, x)["up.weight"]
    for _ in range(2):
        run(x).square().sum().backward()
    assert torch.equal(model.up.weight.grad, 2 * one)


def test_equal_backends_of_one_model_see_each_other_only_through_it() -> None:
    model, x = Mlp(), torch.randn(8, 32)
    a, b = eager_backend("mxfp8"), eager_backend("nvfp4")
    first, second = torch.compile(model, backend=a), torch.compile(model, backend=b)
    outputs = first(x), second(x), first(x)
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])
    assert {str(d.quantizer) for d in a.report().decisions} == {"mxfp8_e4m3"}


def test_the_story_of_the_graphs_is_the_one_that_runs() -> None:
    model, x = Mlp(), torch.randn(8, 32)
    story = helpers.recorded_story(model, "mxfp8", x)
    assert story.count("scaled_mm(") == 5, "two forward, two weight gradients, one input gradient"


# Inductor


INDUCTOR = ["current_scaling", "mxfp8", "nvfp4"]


@pytest.mark.slow
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_quantizes_to_the_bytes_of_the_reference(name: str) -> None:
    """The path that users take: `fxquant::hybrid_quantize` lowered, fused and compiled."""
    quantizer = fxquant.recipes.get(name).quantizer(fxquant.QuantizerRole("linear", "input"))
    specs = [str(quantizer.spec(direction)) for direction in fxquant.Direction]

    def run(inputs: list[Tensor]) -> list[list[Tensor]]:
        made = [F.gelu(x) + 1 for x in inputs]
        return [[y, *torch.ops.fxquant.hybrid_quantize(y, *specs)] for y in made]

    dtypes = (torch.bfloat16, torch.float32)[: 1 if name == "nvfp4" else 2]  # whose compilation takes longest
    inputs = [(torch.randn(33, 50) * 3).to(dtype) for dtype in dtypes]
    for y, *got in torch.compile(run, backend=fxquant.Backend("high_precision"), fullgraph=True)(inputs):
        expected = torch.ops.fxquant.hybrid_quantize(y, *specs)
        for a, b in zip(got, expected, strict=True):
            assert same(a, b), (name, y.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["high_precision", "mxfp8"])
def test_inductor_agrees_with_aot_eager(name: str) -> None:
    model, x = Mlp(50, 70, 41), torch.randn(33, 50)
    eager = train_step(model, compiled(model, name), x)
    torch.compiler.reset()
    got = train_step(model, torch.compile(model, backend=fxquant.Backend(name), fullgraph=True), x)
    if name == "high_precision":
        torch.compiler.reset()
        assert_same_bits(got, train_step(model, torch.compile(model, fullgraph=True), x))
    for key in got:
        assert (got[key] - eager[key]).norm() / eager[key].norm() < 1e-2, key


def found_in(folder: str, recipes: Sequence[str]) -> list[dict[str, Any]]:
    """Two steps of a layer under each recipe: what torch's caches in a folder had, and what came of it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    rules = fxquant.Rules([fxquant.Rule(fxquant.Float8CurrentScalingQuantizer())])
    results = []
    for name in recipes:
        counters.clear()
        torch.manual_seed(0)
        model, x = nn.Linear(32, 16, bias=False), torch.randn(8, 32)
        run = fxquant.compile(model, fxquant.CustomRecipe(qfactory=rules) if name == "custom" else name)
        outputs = []
        for _ in range(2):
            y = run(x)
            y.square().sum().backward()
            outputs += y.sum(1).tolist()
        caches = [
            [counters[cache][f"{key}_{what}"] for what in ("hit", "miss", "bypass")]
            for cache, key in (("aot_autograd", "autograd_cache"), ("inductor", "fxgraph_cache"))
        ]
        state = {key: tensor.tolist() for key, tensor in run.quantization_state_dict().items()}
        report = dataclasses.replace(run.report(), header=Header()).to_json()
        results.append({"caches": caches, "got": [outputs, model.weight.grad.tolist(), state, report]})
    return results


@pytest.mark.slow
def test_a_second_process_finds_both_caches_and_another_recipe_does_not(tmp_path) -> None:
    def ran(*recipes: str) -> list[dict[str, Any]]:
        process = Ranks(world=1)
        (results,) = process.run(found_in, str(tmp_path), recipes)
        process.end()
        return results

    recipes = ("current_scaling", "delayed_scaling", "float8_blockwise")
    for name, cold, warm in zip(recipes, ran(*recipes), (found := ran(*recipes, "custom")), strict=False):
        (aot, graphs), (aot_again, graphs_again) = cold["caches"], warm["caches"]  # casts of a CPU among them
        assert aot[1] >= 1 and graphs[1] >= 2 and not aot[2] + graphs[2], name
        assert aot_again[0] >= 1 and graphs_again[0] >= 2 and not any((*aot_again[1:], *graphs_again[1:])), name
        assert warm["got"] == cold["got"], name
    (aot, (hits, *_)) = found[-1]["caches"]
    assert aot[0] == hits == 0 and aot[1] >= 1, "the fingerprint is part of the key"


def test_compiling_warns_of_nothing() -> None:
    model, x = Mlp(), torch.randn(8, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(model, compiled(model, "nvfp4"), x)


def test_a_checkpoint_around_a_compiled_model_compiles_it() -> None:
    """A checkpoint counts what a forward saves, and the first one runs while the model is compiled."""
    model, x = Mlp(), torch.randn(32, 32, requires_grad=True)
    run = torch.compile(model, backend=eager_backend("mxfp8"))
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
    got, x.grad = x.grad, None
    run(x).sum().backward()
    assert torch.equal(x.grad, got)


@pytest.mark.parametrize("settings", [{"mode": "max-autotune"}, {"inductor": {"max_autotune": True}}])
def test_settings_of_inductor_that_nothing_reads_are_told(settings: dict[str, Any]) -> None:
    with pytest.warns(fxquant.FxQuantWarning, match="no effect with inner='aot_eager': .*max_autotune"):
        fxquant.Backend("mxfp8", inner="aot_eager", **settings)
