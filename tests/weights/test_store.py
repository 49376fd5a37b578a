"""Models whose weights are stored quantized: the bits of plain parameters, and what is there in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import NAMES, assert_same_bits, eager_backend
from torch import Tensor, nn

import fxquant
from fxquant import FxQuantError, RecipeError
from fxquant.errors import ArgumentError
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


def trained(model: nn.Module, recipe: str, optimizer: Any = None, steps: int = 3) -> tuple[dict[str, Tensor], Any]:
    """Outputs and gradients of each step and the state dict behind them, and the report."""
    torch.compiler.reset()
    backend = eager_backend(recipe, model=model)
    run = torch.compile(model, backend=backend)
    optimizer = (optimizer or (lambda p: torch.optim.AdamW(p, 1e-2)))(model.parameters())
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        y = run(batch(step))
        y.square().mean().backward()
        seen[f"{step} output"] = y.detach()
        seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        assert all(type(p.grad) is Tensor for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **model.state_dict()}, backend.report()


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
def test_every_optimizer_trains_the_masters(optimizer: Any) -> None:
    plain, _ = trained(block(width=128), "mxfp8", optimizer, steps=2)
    stored, _ = trained(fxquant.quantize_parameters(block(), "mxfp8"), "mxfp8", optimizer, steps=2)
    assert_same_bits(stored, plain)
    assert not torch.equal(stored["up.weight"], block().up.weight)


def test_a_step_quantizes_a_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_write_through_any_view_is_seen(write: Any) -> None:
    model = fxquant.quantize_parameters(block(), "mxfp8")
    run = torch.compile(model, backend=eager_backend("mxfp8"))
    run(batch(0))
    with torch.no_grad():
        write(model)
    plain = block()
    with torch.no_grad():
        plain.up.weight.mul_(2)
    assert torch.equal(run(batch(0)), torch.compile(plain, backend=eager_backend("mxfp8"))(batch(0)))
    assert_same_bits(parts(model), parts(fxquant.quantize_parameters(plain, "mxfp8")))


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
    with pytest.raises(ArgumentError, match=r"model is an nn\.Module, not a str"):
        fxquant.quantize_parameters("mxfp8", "mxfp8")


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
