"""Bytes on the wire and in memory of a decoder that FSDP2 and tensor parallelism spread over a mesh, on paper.

A collective of a ring of N ranks moves (N - 1) / N of its whole tensor through each rank. FSDP2 gathers the weights of
a block before its forward and, resharded, before its backward, and reduces their gradients once. Under tensor
parallelism with sequence parallel activations a block gathers its tokens twice in the forward, before q, k and v and
before gate and up, and scatters sums twice; the backward does the same with gradients. What is gathered may travel
quantized, sums do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxquant.formats import FORMATS


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder: elements of the linears of its `blocks`, of all `other` parameters, and of a token."""

    linears: int
    other: int
    blocks: int
    hidden: int


DECODERS = {
    "Llama3 8B": Decoder(linears=32 * 218_103_808, other=1_050_939_392, blocks=32, hidden=4096),
    "Llama3 70B": Decoder(linears=80 * 855_638_016, other=2_102_665_216, blocks=80, hidden=8192),
}
"""Elements counted from the published configurations: q, k, v and o, gate, up and down; embedding, head and norms."""


@dataclass(frozen=True)
class Mesh:
    """Ranks that share a weight by FSDP2, `data`, and ranks that multiply parts of it, `tensor`."""

    data: int
    tensor: int = 1


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank receives in a step: weights, their gradients, and activations between tensor parallel ranks."""

    weights: float
    gradients: float
    activations: float


def _received(ranks: int) -> float:
    """Returns the share of a whole tensor that a rank receives in a gather, or sends in a reduce-scatter."""
    return (ranks - 1) / ranks


def _bytes(format: str | None, dtype: torch.dtype) -> float:
    return dtype.itemsize if format is None else FORMATS[format].bytes_per_element


def _payloads(format: str | None) -> int:
    """Returns how many payloads a product and its backward read: one of a scale for the tensor serves both."""
    return 1 if format is None or FORMATS[format].family == "per_tensor" else 2


def traffic(
    model: Decoder, mesh: Mesh, tokens: int, weights: str | None = None, activations: str | None = None, *,
    dtype: torch.dtype = torch.bfloat16, kept: bool = False,
) -> Traffic:  # fmt: skip
    """The bytes of one step of training with `tokens` tokens a data rank.

    `weights` and `activations` name the formats in which the weights of linears, and tokens and their gradients, are
    gathered; tokens only where all payloads that are read are fewer bytes. None stands for `dtype`, in which all else
    travels, gradients of weights in float32. With `kept`, weights are gathered once for both passes.
    """
    of_linears = model.linears * _bytes(weights, dtype) * (_payloads(weights) if kept else 2)
    of_others = model.other * dtype.itemsize * (1 if kept else 2)
    to_a_rank = _received(mesh.data) / mesh.tensor
    of_token = min(_bytes(activations, dtype) * _payloads(activations), dtype.itemsize)
    moved = model.blocks * tokens * model.hidden * _received(mesh.tensor)
    return Traffic(
        weights=to_a_rank * (of_linears + of_others),
        gradients=to_a_rank * (model.linears + model.other) * torch.float32.itemsize,
        activations=moved * 4 * (of_token + dtype.itemsize),
    )


def state_bytes(model: Decoder, mesh: Mesh, weights: str | None = None) -> float:
    """The bytes of a rank: weights, gradients and AdamW's moments in float32, and two blocks that are gathered."""
    shards = (model.linears + model.other) / (mesh.data * mesh.tensor) * 4 * torch.float32.itemsize
    return shards + 2 * model.linears / model.blocks / mesh.tensor * _bytes(weights, torch.bfloat16)
