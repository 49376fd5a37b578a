"""Models whose weights are stored quantized: the bits of plain parameters, and what is there in between."""

from __future__ import annotations

import copy
import functools
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from helpers import NAMES, assert_same_bits, eager_backend
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxquant
import fxquant.weights.parts
import fxquant.weights.state
from fxquant import CustomRecipe, FxQuantError, IdentityQuantizer, ProgramError, RecipeError, Rule, Rules
from fxquant.errors import ArgumentError, FxQuantWarning
from fxquant.weights import QuantizedWeight


class Block(nn.Module):
    """Sizes that all blocks divide, and one that no tile of 128 does."""

    def __init__(self, width: int = 128, hidden: int = 192) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.out = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))


def block(**sizes: int) -> Block:
    torch.manual_seed(0)
    return Block(**sizes)


def batch(step: int, width: int = 128) -> Tensor:
    return torch.randn(32, width, generator=torch.Generator().manual_seed(step))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def trained(model: nn.Module, recipe: str, steps: int = 3) -> tuple[dict[str, Tensor], Any]:
    """The results of steps of AdamW, and the report."""
    torch.compiler.reset()
    backend = eager_backend(recipe, model=model)
    return stepped(model, torch.compile(model, backend=backend), adamw, steps), backend.report()


def stepped(model: nn.Module, run: Any, make_optimizer: Any, steps: int) -> dict[str, Tensor]:
    """Outputs and gradients of each step of `run`, a compiled `model`, and the state dict behind them."""
    optimizer, seen = make_optimizer(model.parameters()), dict[str, Tensor]()
    for step in range(steps):
        y = run(batch(step))
        y.square().mean().backward()
        seen[f"{step} output"] = y.detach()
        seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        assert all(type(p.grad) is Tensor for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **{name: value.detach().clone() for name, value in model.state_dict().items()}}


def parts(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.view(torch.uint8) for k, v in fxquant.payload_state_dict(model).items() if "wise." in k}


@pytest.mark.parametrize("recipe", NAMES)
def test_training_has_the_bits_of_plain_parameters_and_casts_no_weight(recipe: str) -> None:
    """Invariant 43: the weights stay quantized through the steps of an optimizer, the biases are plain."""
    plain, _ = trained(block(), recipe)
    model = fxquant.quantize_parameters(block(), recipe)
    stored, report = trained(model, recipe)
    assert_same_bits(stored, plain)
    assert type(model.up.bias) is nn.Parameter
    for layer in (model.up, model.down, model.out):
        assert isinstance(layer.weight, QuantizedWeight) and isinstance(layer.weight, nn.Parameter)
    weights = [d for d in report.decisions if d.role.tensor_type == "weight"]
    assert weights and all(d.detail.startswith("stored quantized") for d in weights)
    assert "(stored quantized: no cast)" in str(report)


@pytest.mark.parametrize("recipe, count", [("mxfp8", 4), ("current_scaling", 2), ("nvfp4", 3)])
def test_what_is_the_same_in_both_directions_is_stored_once(recipe: str, count: int) -> None:
    model = fxquant.quantize_parameters(block(), recipe)
    assert len(model.out.weight.parts("rowwise") + model.out.weight.parts("columnwise")) == count
    in_rows = fxquant.quantize_parameters(block().eval(), recipe)
    assert not in_rows.out.weight.parts("columnwise")


OPTIMIZERS = {
    "AdamW, all at once": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2, decoupled_weight_decay=True),
    "LBFGS": lambda p: _Closed(torch.optim.LBFGS(list(p), 1e-2, max_iter=2)),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], 1e-2)


class _Closed:
    """LBFGS, which wants a closure."""

    def __init__(self, optimizer: torch.optim.LBFGS) -> None:
        self.optimizer, self.zero_grad = optimizer, optimizer.zero_grad

    def step(self) -> None:
        self.optimizer.step(lambda: torch.tensor(1.0))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_trains_the_masters(optimizer: Any, shared: dict[str, Any]) -> None:
    if not shared:
        for kind, model in (("plain", block()), ("stored", fxquant.quantize_parameters(block(), "mxfp8"))):
            shared[kind] = model, torch.compile(model, backend=eager_backend("mxfp8", model=model))
    results = []
    for model, run in shared.values():
        model.load_state_dict(block().state_dict())
        model.zero_grad()
        results.append(stepped(model, run, optimizer, steps=2))
    assert_same_bits(*results)
    assert not torch.equal(results[1]["up.weight"], block().up.weight)


def test_a_step_quantizes_a_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 21: the first micro-batch of a step alone."""
    model, counted = fxquant.quantize_parameters(block(), "mxfp8"), []
    again = QuantizedWeight.quantize_again
    monkeypatch.setattr(QuantizedWeight, "quantize_again", lambda self, *a: (counted.append(self), again(self, *a)))
    run = torch.compile(model, backend=eager_backend("mxfp8"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
    for _ in range(2):
        for _ in range(2):  # micro-batches
            run(batch(0)).sum().backward()
        optimizer.step()
    run(batch(0))
    assert len(counted) == 2 * 3
    memory = [part.data_ptr() for part in parts(model).values()]
    optimizer.step()
    run(batch(0))
    assert memory == [part.data_ptr() for part in parts(model).values()], "in place"


@pytest.mark.parametrize("write", [
    lambda m: m.up.weight.data.mul_(2),
    lambda m: m.up.weight.detach().mul_(2),
    lambda m: m.up.weight.t().mul_(2),
    lambda m: m.up.weight[:].mul_(2),
    lambda m: [m.up.weight[:96].mul_(2), m.up.weight[96:].mul_(2)],
    lambda m: m.state_dict()["up.weight"].mul_(2),
    lambda m: m.up.weight.master.mul_(2),
    lambda m: torch._foreach_mul_([m.up.weight], 2),
    lambda m: m.up.weight.copy_(2 * m.up.weight),
    lambda m: m.load_state_dict({"up.weight": 2 * m.up.weight}, strict=False),
])  # fmt: skip
def test_a_write_through_any_view_is_seen(write: Any, shared: dict[str, Any]) -> None:
    if not shared:
        plain, model = block(), fxquant.quantize_parameters(block(), "mxfp8")
        with torch.no_grad():
            plain.up.weight.mul_(2)
        shared["output"] = torch.compile(plain, backend=eager_backend("mxfp8"))(batch(0))
        shared["parts"] = parts(fxquant.quantize_parameters(plain, "mxfp8"))
        shared["model"] = model, torch.compile(model, backend=eager_backend("mxfp8"))
    model, run = shared["model"]
    model.load_state_dict(block().state_dict())
    assert not torch.equal(run(batch(0)), shared["output"])
    with torch.no_grad():
        write(model)
    assert torch.equal(run(batch(0)), shared["output"])
    assert_same_bits(parts(model), shared["parts"])


def test_the_scope_of_quantized_init_names_layers_as_the_whole_model_does() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([block(), block()])
            self.head = nn.Linear(128, 8)

    with fxquant.quantized_model_init("mxfp8", preserve_high_precision_init_val=True):
        model = Outer()
        inner = model.blocks[1].up
        assert not isinstance(inner.weight, QuantizedWeight), "recipes ask for names, which the whole model has"
    assert isinstance(inner.weight, QuantizedWeight) and inner.weight.layer.name == "blocks.1.up"
    assert not isinstance(model.head.weight, QuantizedWeight), "too small for a product to be quantized"
    initial = inner.weight.get_high_precision_init_val()
    assert torch.equal(initial, block().up.weight) and initial.device.type == "cpu"
    with torch.no_grad():
        inner.weight.zero_()
    assert torch.equal(inner.weight.get_high_precision_init_val(), block().up.weight)
    inner.weight.clear_high_precision_init_val()
    assert inner.weight.get_high_precision_init_val() is None
    assert not isinstance(nn.Linear(64, 64).weight, QuantizedWeight)
    with fxquant.quantized_model_init("mxfp8", enabled=False):
        assert not isinstance(block().up.weight, QuantizedWeight)


def test_frozen_weights_are_payload_alone_and_serve_backwards() -> None:
    model = block()
    model.out.requires_grad_(False)
    fxquant.quantize_parameters(model, "mxfp8")
    assert model.out.weight.master is None and model.up.weight.master is not None
    assert not model.out.weight.requires_grad and model.up.weight.requires_grad
    plain = block()
    plain.out.requires_grad_(False)
    results = []
    for run in (model, plain):
        torch.compiler.reset()
        torch.compile(run, backend=eager_backend("mxfp8"))(batch(0)).square().sum().backward()
        results.append({name: p.grad for name, p in run.named_parameters() if p.grad is not None})
    assert len(results[0]) == 5
    assert_same_bits(*results)
    dropped = fxquant.quantize_parameters(block(), "mxfp8", masters=False)
    assert dropped.up.weight.master is None and not dropped.up.weight.requires_grad


def test_rows_alone_give_a_backward_what_they_stand_for() -> None:
    model = block().eval().requires_grad_(False)
    values = fxquant.MXFP8Quantizer().quantize(model.up.weight).dequantize()
    fxquant.quantize_parameters(model, "mxfp8")
    assert torch.equal(model.up.weight + 0, values)
    backend, x = eager_backend("mxfp8"), batch(0).requires_grad_()
    torch.compile(model, backend=backend)(x).sum().backward()
    details = {d.detail for d in backend.report().decisions if d.role.tensor_type == "weight"}
    assert details == {
        "stored quantized: no cast",
        "stored quantized in rows alone: dequantized and quantized in columns",
    }
    plain = block().requires_grad_(False)
    for layer in (plain.up, plain.down, plain.out):
        rounded = fxquant.MXFP8Quantizer().quantize(layer.weight).dequantize()
        layer.weight = nn.Parameter(rounded, requires_grad=False)
    other = batch(0).requires_grad_()
    torch.compiler.reset()
    torch.compile(plain, backend=eager_backend("mxfp8"))(other).sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_a_product_that_is_not_quantized_reads_the_values_and_the_report_says_so() -> None:
    for masters, detail in ((None, "its master is read"), (False, "dequantized")):
        torch.compiler.reset()
        model = fxquant.quantize_parameters(block(), "mxfp8", masters=masters)
        backend = eager_backend("high_precision")
        y = torch.compile(model, backend=backend)(batch(0))
        assert torch.equal(y, model(batch(0)))
        details = {d.detail for d in backend.report().decisions if d.role.tensor_type == "weight"}
        assert details == {f"stored as mxfp8_e4m3: {detail}"}


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_recipe_that_does_not_fit_is_an_error_before_anything_runs(inner: str) -> None:
    model = fxquant.quantize_parameters(block(), "mxfp8")
    run = fxquant.compile(model, "nvfp4", options={"inner": inner})
    with pytest.raises(RecipeError, match=r"^Recipe mismatch for up\.weight: stored as mxfp8_e4m3, recipe wants nvfp4"):
        run(batch(0))


def test_cache_weights_says_that_it_has_nothing_to_do() -> None:
    model = fxquant.quantize_parameters(block(), "mxfp8")
    backend = eager_backend("mxfp8", cache_weights=True)
    torch.compile(model, backend=backend)(batch(0))
    details = {d.detail for d in backend.report().decisions if d.role.tensor_type == "weight"}
    assert details == {"stored quantized: no cast, and cache_weights has nothing to do"}


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Embedding(32, 64), nn.Linear(64, 32))
    model[1].weight = model[0].weight
    model[3].weight = model[2].weight
    fxquant.quantize_parameters(model, "mxfp8")
    assert model[1].weight is model[0].weight and isinstance(model[0].weight, QuantizedWeight)
    assert model[3].weight is model[2].weight and not isinstance(model[2].weight, QuantizedWeight), "an embedding"
    assert len(list(model.parameters())) == 5


def test_copies_and_averages_are_weights_of_their_own() -> None:
    model = fxquant.quantize_parameters(block(), "mxfp8")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.up.weight.mul_(3)
    average.update_parameters(model)
    average.update_parameters(model)
    with torch.no_grad():
        model.up.weight.mul_(3)
    average.update_parameters(model)
    assert torch.equal(average.module.up.weight.master, block().up.weight * 6)
    assert torch.equal(copied.up.weight.master, block().up.weight)
    assert copied.up.weight.requires_grad and copied.up.weight.layer.name == "up"
    torch.compiler.reset()
    y = torch.compile(average.module, backend=eager_backend("mxfp8"))(batch(0))
    plain = block()
    with torch.no_grad():
        plain.up.weight.mul_(6)
    torch.compiler.reset()
    assert torch.equal(y, torch.compile(plain, backend=eager_backend("mxfp8"))(batch(0)))


def test_moves_and_casts_keep_the_parameter() -> None:
    model = fxquant.quantize_parameters(block(), "mxfp8")
    weight = model.up.weight
    model.to(torch.bfloat16)
    assert model.up.weight is weight and weight.dtype == weight.master.dtype == torch.bfloat16
    assert weight.requires_grad
    expected = fxquant.quantize_parameters(block().to(torch.bfloat16), "mxfp8")
    assert_same_bits(parts(model), parts(expected))
    model.to("meta")
    model.to_empty(device="cpu")
    assert isinstance(model.up.weight, QuantizedWeight) and len(parts(model)) == 3 * 4
    model.load_state_dict(block().state_dict())
    assert_same_bits(parts(model), parts(expected))


def test_a_model_without_weights_to_store_is_refused() -> None:
    with pytest.raises(RecipeError, match="up: its scale is the state of delayed scaling"):
        fxquant.quantize_parameters(block(), "delayed_scaling")
    with pytest.raises(RecipeError, match="fewer than 16 features"):
        fxquant.quantize_parameters(nn.Linear(8, 8), "mxfp8")
    with pytest.raises(FxQuantError, match="no module of this Block"):
        fxquant.quantize_parameters(block(), "mxfp8", "layers.*")
    with pytest.raises(ArgumentError, match="model must be a module, not 'mxfp8'"):
        fxquant.quantize_parameters("mxfp8", "mxfp8")


def test_weights_that_are_left_as_they_are_are_told() -> None:
    """The recipe quantizes them: of those that it leaves in high precision nothing is said."""
    rules = Rules([Rule("delayed_scaling", name="up"), Rule(IdentityQuantizer(), name="down")], "mxfp8")
    with pytest.warns(FxQuantWarning, match=r"1 weights of Sequential are not stored quantized.*up\.weight") as told:
        model = nn.Sequential(OrderedDict((name, nn.Linear(32, 32)) for name in ("up", "down", "out")))
        fxquant.quantize_parameters(model, CustomRecipe(qfactory=rules))
    assert len(told) == 1 and isinstance(model.out.weight, QuantizedWeight)


def test_clipping_and_scaling_of_gradients() -> None:
    """Invariant 39: a step that a scaler skips leaves both directions as they are."""
    results = []
    for run in (block(), fxquant.quantize_parameters(block(), "mxfp8")):
        torch.compiler.reset()
        compiled = torch.compile(run, backend=eager_backend("mxfp8"))
        optimizer, scaler = torch.optim.AdamW(run.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            if step == 1:
                before = {k: v.clone() for k, v in run.state_dict().items()}
                bytes = {k: v.clone() for k, v in parts(run).items()}
            loss = compiled(batch(step)).square().mean() * (torch.inf if step == 1 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(run.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 1:
                compiled(batch(0))
                assert_same_bits(run.state_dict(), before)
                assert_same_bits(parts(run), bytes)
        results.append({**run.state_dict(), "scale": torch.tensor(scaler.get_scale())})
    assert_same_bits(*results)


@pytest.mark.parametrize("inside", [False, True])
def test_masters_in_float32_are_rounded_as_autocast_rounds_plain_parameters(inside: bool) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                return checkpoint(self.block, x, use_reentrant=False).float()

    results = []
    for model in (Cast(), fxquant.quantize_parameters(Cast(), "mxfp8")):
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            results.append(trained(model, "mxfp8")[0])
    assert_same_bits(*results)
    assert model.block.up.weight.dtype == model.block.up.weight.master.dtype == torch.float32


def test_views_share_memory_but_not_which_directions_they_have() -> None:
    """Invariant 35."""
    weight = fxquant.quantize_parameters(block(), "mxfp8").up.weight
    for view in (weight.detach(), weight.data, weight.view(192, 128), weight[:]):
        assert isinstance(view, QuantizedWeight)
        for direction in ("rowwise", "columnwise"):
            pairs = zip(view.parts(direction), weight.parts(direction), strict=True)
            assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
        view.column0 = view.column1 = None
        assert not view.parts("columnwise") and len(weight.parts("columnwise")) == 2


def test_a_slice_is_dequantized_and_the_whole_keeps_its_kind() -> None:
    """Invariant 38."""
    weight = fxquant.quantize_parameters(block(), "mxfp8", masters=False).up.weight
    values = fxquant.MXFP8Quantizer().quantize(block().up.weight).dequantize()
    for whole in (weight[:], weight[:192], weight.narrow(0, 0, 192), weight.as_strided((192, 128), (128, 1))):
        assert isinstance(whole, QuantizedWeight) and len(whole.parts("rowwise")) == 2
    for part, expected in (
        (weight[32:], values[32:]),
        (weight[:, :32], values[:, :32]),
        (weight[::2], values[::2]),
        (weight.as_strided((64, 64), (128, 1)), values[:64, :64]),
        (weight.view(96, 256), values.view(96, 256)),
    ):
        assert type(part) is Tensor and torch.equal(part, expected)
    pieces = weight.split(96)
    assert all(type(piece) is Tensor for piece in pieces) and torch.equal(torch.cat(pieces), values)
    trained_one = fxquant.quantize_parameters(block(), "mxfp8").up.weight
    assert torch.equal(trained_one[32:] + 0, block().up.weight[32:]), "the master's"


def test_moves_behind_the_first_call() -> None:
    model = fxquant.quantize_parameters(block(), "mxfp8")
    model.add_module("tied", nn.Linear(128, 192))
    model.tied.weight = model.up.weight
    fxquant.weights.state.watch(model.tied)
    run = torch.compile(model, backend=eager_backend("mxfp8"))
    run(batch(0)).sum().backward()
    weight, grad = model.up.weight, model.up.weight.grad
    assert model.to("cpu").float().up.weight is weight and weight.grad is grad, "nothing to do"
    model.bfloat16()
    assert isinstance(model.up.weight, QuantizedWeight) and model.up.weight.dtype == torch.bfloat16
    assert model.up.weight.requires_grad and model.up.weight.grad.dtype == torch.bfloat16
    assert model.tied.weight is model.up.weight and [*model.up._parameters] == ["weight", "bias"]
    plain = torch.compile(block().bfloat16(), backend=eager_backend("mxfp8"))
    assert torch.equal(run(batch(0).bfloat16()), plain(batch(0).bfloat16()))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    other = torch.load(buffer, weights_only=False)
    assert other.up.weight is other.tied.weight and other.half().up.weight.dtype == torch.float16
    assert model.up.weight.dtype == torch.bfloat16


def test_assigned_data_are_written_into_the_weight() -> None:
    model = fxquant.quantize_parameters(block(), "mxfp8")
    master = model.up.weight.master.data_ptr()
    model.up.weight.data = 2 * block().up.weight.detach()
    assert torch.equal(model.up.weight.master, 2 * block().up.weight) and model.up.weight.master.data_ptr() == master
    values = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(values / 2, model.parameters())
    assert torch.equal(model.up.weight.master, block().up.weight)
    with pytest.raises(ArgumentError, match=r"up\.weight is \[192, 128\], and cannot become \[128\]"):
        model.up.weight.data = torch.zeros(128)
    model.share_memory()
    assert model.up.weight.master.is_shared() and model.up.weight.parts("rowwise")[0].is_shared()


@pytest.mark.usefixtures("casts_as_meant")
def test_inductor_takes_stored_weights() -> None:
    results = []
    for store in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Linear(64, 32, bias=False)
        if store:
            fxquant.quantize_parameters(model, "current_scaling")
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = fxquant.compile(model, "current_scaling")(x)
        y.square().sum().backward()
        results.append({"y": y.detach(), "dx": x.grad, "dw": model.weight.grad})
    assert_same_bits(*results)


def test_a_compiled_optimizer_trains_masters() -> None:
    results, layer = [], nn.Linear(128, 96)
    for model in (copy.deepcopy(layer), fxquant.quantize_parameters(copy.deepcopy(layer), "mxfp8")):
        torch.compiler.reset()
        run, optimizer = (
            torch.compile(model, backend=eager_backend("mxfp8")),
            torch.optim.AdamW(model.parameters(), 1e-2),
        )
        step = torch.compile(optimizer.step, backend="aot_eager")
        for number in range(2):
            run(batch(number)).square().mean().backward()
            step()
            optimizer.zero_grad()
        results.append({**model.state_dict(), "output": run(batch(2)).detach()})
    assert_same_bits(*results)


def test_a_program_of_stored_weights_is_refused() -> None:
    model = fxquant.quantize_parameters(block().requires_grad_(False), "mxfp8")
    program = torch.export.export(model, (batch(0),))
    with pytest.raises(ProgramError, match=r"up\.weight is stored quantized in the model"):
        fxquant.quantize_program(program, "mxfp8")


@functools.cache
def losses_of_pupils(masters: torch.dtype | None) -> list[float]:
    """A teacher's pupils after some steps, one a seed: stored quantized with masters, or bf16 with float32 copies."""
    torch.compiler.reset()
    teacher, model = block(), Block().to(masters or torch.bfloat16)
    if masters is not None:
        fxquant.quantize_parameters(model, "mxfp8")
    run, losses = torch.compile(model, backend=eager_backend("mxfp8")), []
    for seed in range(3):
        torch.manual_seed(1 + seed)
        model.load_state_dict(Block().to(masters or torch.bfloat16).state_dict())
        copies = [p.detach().float() for p in model.parameters()] if masters is None else None
        optimizer = torch.optim.AdamW(copies or model.parameters(), 1e-2)
        for step in range(15):
            x = batch(100 * seed + step)
            with torch.autocast("cpu", torch.bfloat16, enabled=masters == torch.float32):
                y = run(x if masters == torch.float32 else x.bfloat16())
            loss = (y.float() - teacher(x).detach()).square().mean()
            loss.backward()
            for p, copied in zip(model.parameters(), copies or (), strict=False):
                copied.grad, p.grad = p.grad.float(), None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p, copied in zip(model.parameters(), copies or (), strict=False):
                    p.copy_(copied)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
def test_training_is_as_good_as_bf16_parameters_with_float32_masters(masters: torch.dtype) -> None:
    """Losses beside the noise of three seeds."""
    reference, stored = losses_of_pupils(None), losses_of_pupils(masters)
    noise = max(reference) - min(reference)
    assert abs(sum(stored) - sum(reference)) / 3 < noise and max(stored) < 0.5


def test_another_recipe_does_not_store_again() -> None:
    model = fxquant.quantize_parameters(block(), "mxfp8")
    weight = model.up.weight
    assert fxquant.quantize_parameters(model, "mxfp8").up.weight is weight
    with pytest.raises(
        RecipeError, match=r"^Recipe mismatch for up\.weight: stored as mxfp8_e4m3, recipe wants nvfp4_2d"
    ):
        fxquant.quantize_parameters(model, "nvfp4")


@pytest.mark.parametrize("foreach", [False, True])
def test_a_weight_without_master_is_not_trained(foreach: bool) -> None:
    model = fxquant.quantize_parameters(block(), "mxfp8", masters=False).requires_grad_()
    torch.compile(model, backend=eager_backend("mxfp8"))(batch(0)).sum().backward()
    with pytest.raises(RecipeError, match=r"up\.weight has no master, .* rounded to mxfp8_e4m3: freeze it"):
        torch.optim.AdamW(model.parameters(), foreach=foreach).step()
    model.load_state_dict(block().state_dict())
    nn.init.normal_(model.up.weight)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "weight_only_nvfp4"])
def test_scales_lie_as_tensor_cores_of_the_device_read_them(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads in files, and on other devices, have them by rows; what is computed is the same."""
    expected = parts(fxquant.quantize_parameters(block(), recipe))
    plain, _ = trained(block(), recipe, steps=2)
    card = [(10, 0)]
    monkeypatch.setattr(fxquant.weights.parts, "capability", lambda device: card[0] if device.type == "cpu" else (0, 0))
    model = fxquant.quantize_parameters(block(), recipe)
    weight = model.up.weight
    assert ("swizzled" in weight.spec) == (recipe != "weight_only_nvfp4")
    assert_same_bits(parts(model), expected)
    assert torch.equal(weight.values(), fxquant.quantize_parameters(block(), recipe).up.weight.values())
    stored, _ = trained(model, recipe, steps=2)
    assert_same_bits(stored, plain)
    restored = fxquant.quantize_parameters(block(), recipe, masters=False)
    restored.load_state_dict(fxquant.payload_state_dict(model))
    assert_same_bits(parts(restored), parts(model))
    lying = restored.up.weight.parts("rowwise")
    card[0] = (9, 0)
    elsewhere = fxquant.quantize_parameters(block(), recipe, masters=False)
    elsewhere.load_state_dict(fxquant.payload_state_dict(model))
    assert_same_bits(parts(elsewhere), parts(model))
    assert "swizzled" not in elsewhere.up.weight.spec
    card[0] = (10, 0)
    model.to("meta").to_empty(device="cpu")
    assert [x.shape for x in model.up.weight.parts("rowwise")] == [x.shape for x in lying]
