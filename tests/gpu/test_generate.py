"""Text from a Hugging Face Llama with a static cache: the tokens of CUDA graphs are those of single launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxquant import Backend, report

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "CompileConfig"):
    pytest.skip("needs transformers.CompileConfig", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def tokens(recipe: str, mode: str | None, cache_weights: bool) -> list[list[int]]:
    """Returns the tokens of two calls, the second of which finds everything compiled and recorded."""
    torch.compiler.reset()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=2, vocab_size=512, max_position_embeddings=128, **sizes)
    model = transformers.LlamaForCausalLM(config).bfloat16().cuda().eval()
    prompt = torch.randint(512, (1, 16), device="cuda")
    backend = Backend(recipe, model=model, mode=mode, cache_weights=cache_weights)
    settings: dict[str, Any] = {
        "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0,
        "cache_implementation": "static", "compile_config": transformers.CompileConfig(backend=backend, mode=None),
    }  # fmt: skip
    calls = [model.generate(prompt, **settings)[0].tolist() for _ in range(2)]
    assert any(decision.quantizer for decision in report(model).decisions)
    return calls


@pytest.mark.parametrize("cache_weights", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "current_scaling", "weight_only_fp8"])
def test_tokens_of_cuda_graphs(recipe: str, cache_weights: bool) -> None:
    first, second = tokens(recipe, "reduce-overhead", cache_weights)
    assert first == second
    assert [first, second] == tokens(recipe, None, cache_weights)
