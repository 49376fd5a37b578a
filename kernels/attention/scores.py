"""The steps on the scores of attention that kernels do, as their launches describe them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.values import statically_known_true


class Mask(Enum):
    """The kinds of masks: none, a boolean or an added [Sq, Sk], a boolean [Sk] that is the same for all queries."""

    NONE, BOOL, ADDED, KEYS = range(4)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The steps on the scores q k^T that kernels do: a scale, a mask, causality and dropout."""

    scale: float
    causal: bool
    mask: Tensor | None = None
    """Broadcasts to [B, H, Sq, Sk]; boolean, True where a key is seen, or added."""
    dropout: float = 0.0
    seed: Tensor | None = None
    """int64 [1]."""

    @property
    def rule(self) -> tuple[int, float]:
        """Returns DROPPED and RAISED: the probability of dropout times 2^32, and the factor of weights that stay."""
        return round(self.dropout * 2**32), 1 / (1 - self.dropout)

    def arguments(self, device: torch.device) -> tuple[int, list[Tensor], tuple[Any, ...]]:
        """Returns the kind of the mask; mask, range of keys that it leaves, and seed; and the mask's strides.

        Those are over [B, H, Sq, Sk], and of the range over [B, H].
        """
        if self.mask is None:
            return Mask.NONE.value, filled(None, None, self.seed, device=device), (0, 0, 0, 0, 0, 0)
        mask = self.mask.reshape(*[1] * (4 - self.mask.ndim), *self.mask.shape)
        steps = _steps(mask)
        of_keys = statically_known_true(mask.shape[2] == 1) and not statically_known_true(mask.shape[3] == 1)
        if mask.dtype != torch.bool or not of_keys:
            kind = Mask.BOOL if mask.dtype == torch.bool else Mask.ADDED
            return kind.value, filled(mask, None, self.seed, device=device), (*steps, 0, 0)
        keys = torch.arange(mask.shape[3], device=device)
        first = torch.where(mask, keys, mask.shape[3] - 1).amin((2, 3))
        after = torch.where(mask, keys + 1, 0).amax((2, 3))
        seen = torch.stack((first, after), -1).to(torch.int32)
        return Mask.KEYS.value, filled(mask, seen, self.seed, device=device), (*steps, *_steps(seen)[:2])


def _steps(x: Tensor) -> list[Any]:
    """Returns strides, 0 for axes that are broadcast."""
    return [0 if statically_known_true(size == 1) else step for size, step in zip(x.shape, x.stride(), strict=True)]


def filled(*tensors: Tensor | None, device: torch.device) -> list[Tensor]:
    """Returns the tensors, each None replaced by one that no kernel reads: for another argument Inductor would copy."""
    return [torch.empty(1, device=device) if tensor is None else tensor for tensor in tensors]
