"""Llama and GPT-2 on CUDA under every recipe: close to the unquantized model, and the bytes of the CPU."""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant import Backend, Direction, QuantizerRole

pytest.importorskip("transformers")
from corpus.models import CASES
from gpu.recipes import RECIPES, resolved

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MODELS = ("llama_gqa", "llama_autocast", "gpt2")
Step = tuple[float, dict[str, Tensor]]


def step(case: str, backend: Any) -> Step:
    """The loss and the gradients of one compiled training step of a fresh model."""
    model, kwargs = CASES[case]()
    model = model.to(DEVICE)
    kwargs = {name: value.to(DEVICE) for name, value in kwargs.items()}
    loss = torch.compile(model, backend=backend, dynamic=False)(**kwargs).loss
    loss.backward()
    gradients = {name: p.grad.double().flatten() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


@cache
def plain(case: str) -> Step:
    return step(case, "inductor")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", MODELS)
def test_close_to_unquantized(case: str, recipe: str) -> None:
    four_bits = recipe in ("nvfp4", "hybrid")
    expected_loss, expected = plain(case)
    torch.compiler.reset()
    loss, gradients = step(case, Backend(resolved(recipe)))
    assert gradients.keys() == expected.keys()
    cosines = {name: torch.cosine_similarity(g, expected[name], dim=0).item() for name, g in gradients.items()}
    median, worst = statistics.median(cosines.values()), min(cosines, key=cosines.__getitem__)
    print(
        f"{case} {recipe}: loss {loss:.4f} ({loss / expected_loss - 1:+.3%}), gradient cosine median {median:.4f}, "
        f"least {cosines[worst]:.4f} ({worst})"
    )
    assert abs(loss / expected_loss - 1) < (0.05 if four_bits else 0.01)
    assert median > (0.9 if four_bits else 0.99)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", MODELS)
def test_weights_have_the_bytes_of_the_cpu(case: str, recipe: str) -> None:
    """Every matrix of the model, in both directions, quantized eagerly on both devices."""
    quantizer = resolved(recipe).quantizer(QuantizerRole("linear", "weight", ""))
    wrong = []
    for name, weight in CASES[case]()[0].named_parameters():
        if weight.ndim != 2:
            continue
        here, there = quantizer.quantize(weight), quantizer.quantize(weight.to(DEVICE))
        for direction in Direction:
            for part in ("data", "scale", "global_amax"):
                a, b = (getattr(getattr(q, direction.value), part) for q in (here, there))
                if a is not None and (count := (as_bytes(a) != as_bytes(b)).sum().item()):
                    wrong.append(f"{name} {direction} {part}: {count} bytes of {as_bytes(a).numel()} differ")
    assert not wrong, "\n".join(wrong)


def as_bytes(x: Tensor) -> Tensor:
    x = x.view(torch.uint8) if x.element_size() == 1 else x  # torch copies no fp4
    return x.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_forward_saves_the_bytes_of_the_cpu(recipe: str) -> None:
    """Two layers compiled by Inductor: every quantized tensor that the forward keeps for the backward."""
    spec = resolved(recipe).quantizer(QuantizerRole("linear", "input", "")).spec(Direction.COLUMNWISE)
    torch.manual_seed(0)
    model = nn.Linear(96, 160, bias=False, dtype=torch.bfloat16)
    x = torch.randn(256, 96, dtype=torch.bfloat16)
    expected = [as_bytes(part) for part in torch.ops.fxquant.quantize(x, str(spec), "columnwise")]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(as_bytes(tensor.detach()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.compile(model.to(DEVICE), backend=Backend(resolved(recipe)), dynamic=False)(x.to(DEVICE))
    for part in expected:
        assert any(torch.equal(part, other) for other in saved if other.shape == part.shape), (
            f"none of {[tuple(t.shape) for t in saved]} holds the columnwise input of {spec}"
        )


def test_report_covers_the_model() -> None:
    model, kwargs = CASES["llama_gqa"]()
    report = fxquant.explain(model.to(DEVICE), "mxfp8", **{k: v.to(DEVICE) for k, v in kwargs.items()})
    assert report.coverage > 0.9
