"""Times a linear layer with few tokens, as in decoding, beside reading its weight at the rate of a copy.

The weight counts as FP8, in bfloat16 too, and as NVFP4 with its scales where a recipe stores that. The quantization of
the activation is timed too; weights are quantized before. On CUDA calls run in a graph, and
copies of the weight take turns, so that none is in the L2 cache when its turn comes.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.backend.backend import Backend
from fxquant.bench.inference import Inference, quantized_program
from fxquant.bench.providers import CALIBRATED, TORCHAO, TORCHAO_WEIGHT_ONLY, WEIGHT_ONLY, quantize_by_torchao
from fxquant.bench.rounds import Layer, Row, compiling
from fxquant.formats import FORMATS

_OTHERS = ("bf16", *TORCHAO, *TORCHAO_WEIGHT_ONLY)
"""The providers that are not fxquant's."""
PROVIDERS = (
    "bf16", "current_scaling", CALIBRATED, "rowwise", "float8_blockwise", *WEIGHT_ONLY, *TORCHAO, *TORCHAO_WEIGHT_ONLY,
)  # fmt: skip
_ROTATED = 200_000_000
"""The fewest bytes of weights that take turns: four times the L2 cache of an H100."""


@dataclass(frozen=True)
class Decode(Layer, Inference):
    """Sizes of one linear layer and the number of its tokens `m`."""

    def __str__(self) -> str:
        return f"{self.m} tokens {self.k}x{self.n}"

    def weight_bytes(self, provider: str) -> int:
        nvfp4 = provider == "weight_only_nvfp4"
        return int(self.n * self.k * (FORMATS["nvfp4"].bytes_per_element if nvfp4 else 1))

    def prepared(self, provider: str, device: str) -> tuple[list[Callable[[], Any]], Row]:
        torch.manual_seed(0)
        cuda = device == "cuda"
        if cuda:
            torch.cuda.empty_cache()
        with torch.device(device):
            model = nn.Linear(self.k, self.n, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            x = self.input()
        bytes_of_weight = self.weight_bytes(provider) * (2 if provider == "bf16" else 1)
        copies = 2 + _ROTATED // bytes_of_weight if cuda else 2
        row: Row = {}
        with torch.no_grad(), compiling(row):
            layers = prepare(provider, model, x, copies)
            layers[0](x)
        return [torch.no_grad()(functools.partial(layer, x)) for layer in layers], row


SIZES = tuple(Decode(m, k, n) for k, n in ((4096, 14336), (8192, 28672)) for m in (1, 4, 16, 32, 64))
"""The up-projections of Llama3 8B and 70B."""
TINY = (Decode(1, 64, 96), Decode(16, 64, 96))


def prepare(provider: str, model: nn.Linear, x: Tensor, copies: int) -> list[Callable[[Tensor], Tensor]]:
    """Copies of the layer, each with its own weight in the provider's format, that share one compilation."""
    backend = compiler(provider)
    if provider in _OTHERS:
        if provider != "bf16":
            quantize_by_torchao(provider, model)
        call = torch.compile(lambda layer, x: layer(x), backend=backend, fullgraph=True, dynamic=False)
        return [functools.partial(call, copy.deepcopy(model)) for _ in range(copies)]
    program = quantized_program(provider, torch.export.export(model, (x,)), (x,))
    module: nn.Module = program.module()

    def call_with(state: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, state, (x,))  # type: ignore[no-any-return]

    run = torch.compile(call_with, backend=backend, fullgraph=True, dynamic=False)
    state = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    clones = ({name: tensor.detach().clone() for name, tensor in state.items()} for _ in range(copies))
    return [functools.partial(run, clone) for clone in clones]


def compiler(provider: str) -> Any:
    """The backend of a provider's layer; fxquant's only lowers the operators of a quantized program."""
    return "inductor" if provider in _OTHERS else Backend("high_precision")
