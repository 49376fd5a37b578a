"""The attention of real models in FP8: every one found, forward and backward close to the unquantized model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from corpus import models
from corpus.test_corpus import cosines, loss_error, step
from helpers import eager_backend

from fxquant import CustomRecipe, Float8HeadQuantizer, IdentityQuantizer, QuantizerRole
from fxquant.report.data import result

pytestmark = pytest.mark.slow

ATTENTIONS = {
    # how many there are of each form: fused, or two products with a softmax between them
    "bert": {"scaled_dot_product_attention": 2},
    "t5": {"matmul": 6},
    "gpt_oss": {"matmul": 2},
    "whisper": {"scaled_dot_product_attention": 6},
    "gpt2": {"scaled_dot_product_attention": 2},
    "vit": {"scaled_dot_product_attention": 2},
    "llama_gqa": {"scaled_dot_product_attention": 2},
    "plain_transformer": {"scaled_dot_product_attention": 4},
    "flex_plain": {"flex_attention": 1},
    "llama_flex": {"flex_attention": 2},
}
IN_CI = ("gpt_oss",)
HEAD, HIGH = Float8HeadQuantizer(), IdentityQuantizer()


def recipe(*slots: str) -> CustomRecipe:
    def qfactory(role: QuantizerRole) -> Any:
        return HEAD if role.module_type == "dpa" and role.tensor_type in slots else HIGH

    return CustomRecipe(qfactory=qfactory)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.sweep) for name in ATTENTIONS]
)
@pytest.mark.filterwarnings("ignore")
def test_attention_of_models(name: str) -> None:
    model, kwargs = models.CASES[name]()
    model.eval()  # dropout has tests of its own
    for module in model.modules():
        if hasattr(module, "top_k") and hasattr(module, "num_experts"):
            module.top_k = module.num_experts  # a router would pick other experts for some tokens
    reference = step(model, kwargs, model)
    for slots in (("qkv", "s"), ("qkv", "s", "do", "dp")):
        torch.compiler.reset()
        backend = eager_backend(recipe(*slots), model=model)
        got = step(model, kwargs, torch.compile(model, backend=backend))
        decisions = [d for d in backend.report().decisions if d.role.module_type in ("dpa", "matmul")]
        found: dict[str, set[int]] = {}
        for d in decisions:
            if d.attention is not None:
                found.setdefault(d.form, set()).add(d.attention.site)
        assert {form: len(sites) for form, sites in found.items()} == ATTENTIONS[name]
        for d in decisions:
            if d.gemm == "fprop" and d.role.module_type == "dpa":
                assert d.quantizer == HEAD, result(d)
            elif d.gemm == "fprop":  # a layer that returns its weights
                assert name == "plain_transformer" and "reads its scores or weights too" in d.detail
        cosine = cosines(got, reference)
        error, least = loss_error(got, reference), min(cosine.values(), default=1.0)
        print(f"{name} {'+'.join(slots)}: loss {error:.4f}, cosines from {least:.4f}")
        assert error < 0.01
        assert least > 0.98
