"""`fxquant.compile`: recipes that change while a model is used, and quantizers of the user's own."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from dataclasses import dataclass

import pytest
import torch
from helpers import assert_same_bits, eager_backend, stacked, train_step
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxquant
from fxquant import (
    CustomRecipe,
    DelayedScaling,
    MXFP8BlockScaling,
    QuantizedTensor,
    Quantizer,
    RecipeError,
    UnquantizedWarning,
)
from fxquant.compat.private import isolated
from fxquant.quantizers import QuantizedOperand

EAGER = {"inner": "aot_eager"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_switching_back_does_not_recompile() -> None:
    run, x = fxquant.compile(model(), "mxfp8", options=EAGER), torch.randn(16, 64)
    first = run(x)
    run.set_recipe("nvfp4")
    assert not torch.equal(run(x), first)
    compiled = graphs()
    run.set_recipe("mxfp8")
    assert torch.equal(run(x), first)
    run.set_recipe(MXFP8BlockScaling())  # equal recipes are one recipe
    assert torch.equal(run(x), first)
    assert graphs() == compiled


def test_settings_within_a_type_count() -> None:
    run, x = fxquant.compile(model(), "mxfp8", options=EAGER), torch.randn(16, 64)
    run(x)
    compiled = graphs()
    run.set_recipe(MXFP8BlockScaling(enable_2d_quantization=True))
    run(x)
    assert graphs() == compiled + 1
    assert "mxfp8_2d_e4m3" in str(run.report())


def test_a_change_of_type_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """Invariant 22."""
    run, x = fxquant.compile(model(), "mxfp8", options=EAGER), torch.randn(16, 64)
    with caplog.at_level(logging.WARNING, logger="fxquant"):
        for recipe in ("mxfp8", "nvfp4", "mxfp8", "rowwise"):
            run.set_recipe(recipe)
            run(x)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "Recipe type changed from MXFP8BlockScaling to NVFP4BlockScaling. This may affect model behavior."
    ]


def test_autocast_scope_chooses_the_recipe() -> None:
    net = model()
    run, x = fxquant.compile(net, "mxfp8", options=EAGER), torch.randn(16, 64)
    expected = run(x)
    with fxquant.autocast(enabled=False):
        assert torch.equal(run(x), net(x))
    with fxquant.autocast(recipe="nvfp4"):
        assert "nvfp4" in str(run(x) is not None and run.report())
        with fxquant.autocast():
            assert torch.equal(run(x), expected)
    assert torch.equal(run(x), expected)


def test_delayed_state_is_inherited() -> None:
    """Invariants 10 and 23: the same slots keep their scales, a history of another length is cut or filled."""
    run, x = fxquant.compile(model(), DelayedScaling(amax_history_len=4), options=EAGER), torch.randn(16, 64)
    for _ in range(3):
        run(x).sum().backward()
    before = stacked(run.quantization_state_dict())
    run.set_recipe(DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"))
    run(x).sum().backward()
    after = stacked(run.quantization_state_dict())
    assert after["amax_history"].shape == (2, 6)
    assert torch.equal(after["scale"][:2], before["scale"][:2])  # the same input and weight
    assert not any("scale" in key for key in run.state_dict())


def test_copies_keep_recipe_state_and_methods() -> None:
    compiled = fxquant.compile(model(), "mxfp8", options={**EAGER, "cache_weights": True})
    compiled.set_recipe(DelayedScaling())
    x = torch.randn(32, 64)
    for _ in range(2):
        compiled(x).sum().backward()
    state = compiled.quantization_state_dict()
    for copied in (copy.deepcopy(nn.Sequential(compiled))[0], pickle.loads(pickle.dumps(compiled))):
        with torch.no_grad():
            assert torch.equal(copied(x), compiled(x))
            assert_same_bits(copied.quantization_state_dict(), state)
            assert copied.report().recipe == "delayed_scaling"
            copied.get_parameter("_orig_mod.0.weight").mul_(2)
            assert not torch.equal(copied(x), compiled(x)), "it has parameters of its own"


def test_a_backend_is_copied_with_its_states() -> None:
    backend, x = eager_backend("delayed_scaling", cache_weights=True), torch.randn(32, 64)
    compiled = torch.compile(model(), backend=backend)
    compiled(x).sum().backward()
    made = pickle.loads(pickle.dumps(compiled))
    with torch.no_grad():
        assert torch.equal(made(x), compiled(x))
    copied = copy.deepcopy(backend)
    assert_same_bits(copied.state_dict(), backend.state_dict())
    assert copied.report().coverage == 0 and not copied.report().decisions


def test_a_model_of_which_nothing_was_captured_warns() -> None:
    compiled, x = fxquant.compile(model(), "mxfp8", options=EAGER), torch.randn(32, 64)
    with torch.compiler.set_stance("force_eager"):
        with pytest.warns(UnquantizedWarning, match=r"no graph of Sequential, which ran .*set_stance\('force_eager'\)"):
            compiled(x)
        compiled(x)  # told once: another warning would be an error
    since = "2 of 2 calls of Sequential, which ran no graph, since the call was made under torch.compiler.set_stance("
    assert since in compiled.report().text(full=True)


def test_what_keeps_torch_from_compiling_is_told_by_its_name() -> None:
    x, forbidden = torch.randn(32, 64), model()
    forbidden.forward = torch.compiler.disable(forbidden.forward)  # type: ignore[method-assign]
    with pytest.warns(UnquantizedWarning, match="ran unquantized: torch.compiler.disable marks it"):
        fxquant.compile(forbidden, "mxfp8", options=EAGER)(x)
    compiled = fxquant.compile(model(), "mxfp8", options=EAGER)
    compiled(x)
    with torch.compiler.set_stance("eager_on_recompile"):
        compiled(x)  # runs its graph
        with pytest.warns(UnquantizedWarning, match="'eager_on_recompile'.*, which compiles nothing for new inputs"):
            compiled(torch.randn(48, 64))


@pytest.mark.skipif(not isolated(), reason="torch counts the compilations of a function for all its models")
def test_one_models_compilations_do_not_count_for_another() -> None:
    x = torch.randn(32, 64)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            compiled = fxquant.compile(nn.Sequential(nn.Linear(64, 64)), "rowwise", options=EAGER)
            compiled(x)
            assert compiled.report().decisions


def test_functions_have_the_same_methods() -> None:
    weight = torch.randn(32, 64)
    run = fxquant.compile(lambda x: nn.functional.linear(x, weight), "mxfp8", options=EAGER)
    x = torch.randn(16, 64)
    first = run(x)
    run.set_recipe("high_precision")
    assert torch.equal(run(x), nn.functional.linear(x, weight))
    assert run.report().coverage == 0 and not torch.equal(first, run(x))


def test_a_compiled_model_has_the_signature_of_its_forward() -> None:
    """Hugging Face's Trainer drops the columns of a batch that it does not name."""

    class Named(nn.Linear):
        def forward(self, hidden: Tensor, *, labels: Tensor | None = None) -> Tensor:
            return super().forward(hidden)

    net = Named(64, 32)
    compiled = fxquant.compile(net, "mxfp8", options=EAGER)
    for run in (compiled, copy.deepcopy(compiled)):
        assert inspect.signature(run.forward) == inspect.signature(net.forward)
        run(hidden=torch.randn(32, 64), labels=None)
        assert run.report().coverage == 1


def test_a_state_that_lacks_tensors_is_refused() -> None:
    compiled = fxquant.compile(model(), "delayed_scaling", options=EAGER)
    compiled(torch.randn(32, 64)).sum().backward()
    state = compiled.quantization_state_dict()
    with pytest.raises(RecipeError, match=r"lacks 6 of the 6 states of this .*: 0\.input, .* It holds nothing"):
        compiled.load_quantization_state_dict({})
    with pytest.raises(RecipeError, match="is a dict of tensors, not a NoneType"):
        compiled.load_quantization_state_dict(None)
    assert_same_bits(compiled.quantization_state_dict(), state)


def test_unknown_recipes_are_refused_where_they_are_set() -> None:
    run = fxquant.compile(model(), "mxfp8", options=EAGER)
    with pytest.raises(RecipeError, match="did you mean 'nvfp4'"):
        run.set_recipe("nvpf4")
    with pytest.raises(RecipeError, match="Known recipes"), fxquant.autocast(recipe="fp3"):
        pass


@dataclass(frozen=True)
class ReferenceCurrentScaling(Quantizer):
    """Per-tensor scaling in plain torch, with a GEMM that dequantizes."""

    dtype: torch.dtype

    def half(self, x: Tensor) -> QuantizedOperand:
        largest, x = torch.finfo(self.dtype).max, x.float()
        amax = x.abs().amax()
        scale = torch.where(amax > 0, torch.full_like(amax, largest) / amax, 1.0)
        return QuantizedOperand((x * scale).clamp(-largest, largest).to(self.dtype), (1 / scale).reshape(1))

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        return QuantizedTensor(self.half(x) if rowwise else None, self.half(x.mT) if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        assert operand.scale is not None
        return operand.data.float() * operand.scale

    def qgemm(self, a: QuantizedOperand, b: QuantizedOperand, *, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        out = self.dequantize(a) @ self.dequantize(b).mT
        return (out if bias is None else out + bias.float()).to(out_dtype)


class WithoutGemm(ReferenceCurrentScaling):
    qgemm = None  # type: ignore[assignment]


def reference_recipe(kind: type[ReferenceCurrentScaling]) -> CustomRecipe:
    e4m3, e5m2 = kind(torch.float8_e4m3fn), kind(torch.float8_e5m2)
    return CustomRecipe(qfactory=lambda role: e5m2 if role.tensor_type == "grad_output" else e4m3)


@pytest.mark.parametrize("kind", [ReferenceCurrentScaling, WithoutGemm])
def test_custom_quantizer_equals_the_built_in_recipe(kind: type[ReferenceCurrentScaling]) -> None:
    results = []
    for recipe in ("current_scaling", reference_recipe(kind)):
        net = model()
        run = torch.compile(net, backend=eager_backend(recipe), fullgraph=True)
        results.append(train_step(net, run, torch.randn(16, 64, generator=torch.Generator().manual_seed(0))))
    assert_same_bits(*results)


def test_custom_quantizer_mixes_with_others() -> None:
    custom, plain = ReferenceCurrentScaling(torch.float8_e4m3fn), fxquant.MXFP8Quantizer()
    recipe = CustomRecipe(qfactory=lambda role: custom if role.tensor_type == "input" else plain)
    net, x = model(), torch.randn(16, 64)
    y = torch.compile(net, backend=eager_backend(recipe))(x)
    assert torch.cosine_similarity(y.flatten(), net(x).flatten(), dim=0) > 0.99


def test_custom_saves_its_quantized_half() -> None:
    net, x, saved = nn.Linear(128, 64), torch.randn(256, 128), []
    run = torch.compile(net, backend=eager_backend(reference_recipe(ReferenceCurrentScaling)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
        run(x)
    assert torch.float8_e4m3fn in saved


def test_incomplete_quantizer_is_named() -> None:
    class Nothing(Quantizer):
        pass

    with pytest.raises(RecipeError, match="Nothing must define quantize and dequantize"):
        fxquant.explain(nn.Linear(32, 32), CustomRecipe(qfactory=lambda role: Nothing()), torch.randn(4, 32))
