"""Times `generate` of a Hugging Face Llama with a static cache, each step of a token a CUDA graph, weights kept.

All providers have the same weights and continue the same prompts greedily; `weights_gib` is what a step reads.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxquant.backend.backend import Backend
from fxquant.backend.model import report
from fxquant.bench.llama import Llama
from fxquant.bench.providers import TORCHAO, TORCHAO_WEIGHT_ONLY, WEIGHT_ONLY, quantize_by_torchao
from fxquant.bench.rounds import Contender, Problem, Row, Turns, compiling, times_text, wait
from fxquant.bench.training import ratios

PROVIDERS = ("bf16", "current_scaling", "rowwise", "float8_blockwise", *WEIGHT_ONLY, *TORCHAO, *TORCHAO_WEIGHT_ONLY)
_STORED = {"bf16": 2.0, "weight_only_nvfp4": 0.5625}
"""Bytes an element of a provider's weights; 1 for all others."""

_LLAMA = Llama(layers=4, hidden=4096, ffn=14336, heads=32, kv_heads=8)


@dataclass(frozen=True)
class Generate(Problem):
    """A Llama, and the number of its sequences, of the tokens of their prompts, and of new tokens."""

    sequences: int
    llama: Llama = _LLAMA
    prompt: int = 32
    tokens: int = 64

    def __str__(self) -> str:
        return f"{self.sequences} x {self.tokens} tokens, {self.llama}"

    def model(self) -> Any:
        """The model with bfloat16 weights that no gradient is wanted of, on the default device."""
        model = self.llama.model(4 * (self.prompt + self.tokens))
        return model.to(torch.bfloat16).eval().requires_grad_(False)

    def contender(self, provider: str, turns: Turns) -> Contender:
        gc.collect()
        if turns.cuda:
            torch.cuda.empty_cache()
        with torch.device(turns.device):
            model, prompt = self.model(), torch.randint(self.llama.vocabulary, (self.sequences, self.prompt))
        settings = dict(max_new_tokens=self.tokens, min_new_tokens=self.tokens, do_sample=False, pad_token_id=0)
        compiled = prepare(provider, model, turns.cuda)

        def step() -> None:
            model.generate(prompt, cache_implementation="static", compile_config=compiled, **settings)

        row: Row = {"weights_gib": f"{_STORED.get(provider, 1.0) * _linear_elements(model) / 2**30:.2f}"}
        with compiling(row):
            step()
            wait(turns.device)
        step()  # the second call of a graph records it
        if isinstance(compiled.backend, Backend):
            row["flops_quantized"] = f"{report(model).coverage:.0%}"
        return Contender(provider, step, row, self.tokens)

    def columns(self, contender: Contender, ms: Mapping[str, float], turns: Turns) -> Row:
        per_second = 1e3 * self.sequences / ms[contender.name]
        return times_text(contender.times) | {"tokens_s": f"{per_second:.0f}"} | ratios(contender.name, ms, None)


SIZES = tuple(Generate(sequences) for sequences in (1, 16, 64))
TINY = (Generate(2, Llama(1, 64, 128, 4, 2, 128), 4, 3),)


def prepare(provider: str, model: nn.Module, cuda: bool) -> Any:
    """Returns how `generate` compiles the step of a token; torchao's providers exchange the model's weights before."""
    from transformers import CompileConfig

    mode = "reduce-overhead" if cuda else None
    if provider == "bf16" or provider.startswith("torchao"):
        if provider != "bf16":
            quantize_by_torchao(provider, model, tunes=False)
        config = CompileConfig(mode=mode, fullgraph=False, dynamic=False)
    else:
        backend = Backend(provider, model=model, cache_weights=True, mode=mode)
        config = CompileConfig(backend=backend, mode=None, fullgraph=False, dynamic=False)
    config._compile_all_devices = True  # transformers compiles on GPUs only, unless it is told so
    return config


def _linear_elements(model: nn.Module) -> int:
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
