"""Times training steps of a Hugging Face Llama as users run them: float32 parameters under autocast, AdamW included.

All providers train the same parameters by one optimizer, of which there is one copy on the device: what a provider's
peak has besides is its own. The first step is timed by itself, without caches.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.bench import training
from fxquant.bench.llama import Llama
from fxquant.bench.rounds import Contender, Problem, Row, Turns, compiling, times_text, wait


class Loss(nn.Module):
    """The loss of a causal language model for tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Model(Problem):
    """A Llama and the sizes of its input, tokens [batch, length]."""

    llama: Llama
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.llama}, {self.batch}x{self.length} tokens"

    def contender(self, provider: str, turns: Turns) -> Contender:
        gc.collect()
        if turns.cuda:
            torch.cuda.empty_cache()
        trained, optimizer = _trained(self, turns.device)
        # of its own modules, which torchao exchanges for others, with the same parameters
        model = Loss(copy.deepcopy(trained, {id(p): p for p in trained.parameters()}))
        torch.manual_seed(0)
        tokens = torch.randint(self.llama.vocabulary, (self.batch, self.length), device=turns.device)
        run, backend = training.prepare(provider, model)

        def forward() -> Tensor:
            with torch.autocast(turns.device, torch.bfloat16):
                return run(tokens)

        def step() -> None:
            forward().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        row: Row = {}
        with compiling(row):
            step()
            wait(turns.device)
        saved = training.SavedBytes([*model.parameters(), *model.buffers()])
        with saved:
            loss = forward()
        del loss
        if turns.cuda:
            torch.cuda.reset_peak_memory_stats()
        step()
        wait(turns.device)
        peak = torch.cuda.max_memory_allocated() if turns.cuda else 0
        row |= {"saved_gib": f"{saved.total / 2**30:.2f}", "peak_gib": f"{peak / 2**30:.2f}"}
        row["flops_quantized"] = f"{backend.report().coverage:.0%}" if backend else ""
        return Contender(provider, step, row)

    def columns(self, contender: Contender, ms: Mapping[str, float], turns: Turns) -> Row:
        return times_text(contender.times) | training.ratios(contender.name, ms, None)


LLAMA = Model(Llama(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8), batch=4, length=4096)
"""1.1 billion parameters."""
TINY = Model(Llama(layers=1, hidden=64, ffn=128, heads=4, kv_heads=2, vocabulary=128), batch=2, length=16)


@functools.lru_cache(maxsize=1)
def _trained(size: Model, device: str) -> tuple[Any, torch.optim.Optimizer]:
    """The model, in float32, and its optimizer, which all providers share."""
    with torch.device(device):
        model = size.llama.model(size.length, use_cache=False).float()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
