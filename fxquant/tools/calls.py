"""Calls of a user's model by tools: what the model itself cannot take is one sentence, and no failure of the tool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.checks import article, first_line, place_of
from fxquant.compat.device import kept_random_state
from fxquant.compat.inside.frames import unwrapped
from fxquant.errors import ArgumentError, FxQuantError


@contextmanager
def called_with(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """A scope in which a model is compiled and called with these inputs.

    Raises ArgumentError, instead of another error, where the model that is not compiled fails with them too.
    """
    try:
        yield
    except FxQuantError:
        raise
    except Exception as failure:
        error = _own_error(model, args, kwargs)
        if error is None:
            raise
        inputs = ", ".join([*map(_shown, args), *(f"{key}={_shown(value)}" for key, value in kwargs.items())])
        name = type(unwrapped(model)).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
        what = f"{type(error).__name__}: {first_line(error)}{place_of(error)}"
        raise ArgumentError(f"{name} itself fails with the inputs ({inputs}): {what}") from failure


def _own_error(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """The error of a call of what was not compiled; None if it succeeds."""
    plain = unwrapped(model) if isinstance(model, nn.Module) else getattr(model, "__wrapped__", model)
    try:
        with torch.no_grad(), kept_random_state():
            plain(*args, **kwargs)
    except Exception as error:
        return error
    return None


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {[*value.shape]} of {value.dtype}".replace("torch.", "")
    return article(type(value).__name__)
