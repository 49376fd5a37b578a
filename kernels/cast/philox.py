"""Random bytes for stochastic rounding: a pure function of a seed, a step, a stream and a place.

The same on every device and in every graph, so that a recomputed tensor is rounded as it was at first, and a step
with a restored state as it was before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Word = int | Tensor
"""A 32-bit word: a number, or an int64 tensor of numbers in [0, 2^32)."""


def philox4x32(counter: tuple[Word, Word, Word, Word], keys: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Four random words for each counter; `keys` holds the key of each round. All words broadcast.

    (Philox4x32: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.)
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in keys:
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = k0 ^ (high1 ^ c1), low1, k1 ^ (high0 ^ c3), low0
    return c0, c1, c2, c3  # type: ignore[return-value]


def round_keys(key: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The key [1] of every round."""
    index = _arange(_ROUNDS, key[0])
    schedules = [((index * weyl + word) & _MASK).unbind() for word, weyl in zip(key, _WEYL, strict=True)]
    return list(zip(*schedules, strict=True))


def _arange(length: int, value: Tensor) -> Tensor:
    """int64 [0, length), tied to an int64 tensor: a plain arange is an index for Inductor: it multiplies in 32 bits."""
    return torch.arange(length, device=value.device) + (value & 0)


def _multiply(word: Word, multiplier: int) -> tuple[Word, Word]:
    """The high and the low word of a product."""
    # the multiplier as a negative number of 32 bits: then no product leaves int64, and the high word is short of `word`
    product = word * (multiplier - (1 << 32))
    return (product >> 32) + word, product & _MASK


def random_bytes(shape: torch.Size, state: Tensor, stream: int) -> Tensor:
    """Independent bytes for the elements of an operand [*batch, R, C], C a multiple of 16: int64 in [0, 256).

    `state` is int64 [3]: seed, step and the number of the operand, which has two streams, 0 and 1. 16 elements along C
    take the four words of one counter, (their place in the row, row, 2 number + stream, step), low bytes first; rows
    are counted over the batch. So padding moves no other element's bytes.
    """
    return bytes_of(random_words(shape, state, stream))


def random_words(shape: Sequence[int | torch.SymInt], state: Tensor, stream: int) -> Tensor:
    """The words [*batch, R, C / 16, 4] that `random_bytes` are made of."""
    *outer, columns = shape
    rows: Any = 1
    for size in outer:
        rows = rows * size
    seed, step, number = state.unbind()
    keys = round_keys((seed & _MASK, seed >> 32 & _MASK))
    row = _arange(rows, seed).reshape(*outer, 1)
    words = philox4x32((_arange(columns // 16, seed), row, 2 * number + stream, step & _MASK), keys)
    return torch.stack(words, -1)


def bytes_of(words: Tensor) -> Tensor:
    """The bytes [*, C] of words [*, C / 16, 4], low ones first."""
    shifts = torch.arange(0, 32, 8, device=words.device)
    return (words.unsqueeze(-1) >> shifts & 0xFF).flatten(-3)
