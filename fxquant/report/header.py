"""The header of a report: what was asked, with which versions, where and when. It tells two reports apart."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from datetime import datetime

import torch
from torch import nn

import fxquant
from fxquant.compat.device import card_name, triton_version
from fxquant.compat.inside.frames import unwrapped
from fxquant.recipes import Recipe
from fxquant.recipes.source import python_of


@dataclass(frozen=True, kw_only=True)
class Header:
    """The model by its class with the number of its `parameters`, the `recipe` as Python, `versions` by name, the date.

    `device` is where the model's parameters are, a card by its name. What is not known is empty.
    """

    model: str = ""
    parameters: int = 0
    recipe: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    date: str = ""


def header_of(recipe: Recipe, model: object = None) -> Header:
    """The header of a report that is made now, on a module or function, where one is known."""
    versions = {"fxquant": fxquant.__version__, "torch": str(torch.__version__), "triton": triton_version()}
    versions["python"] = platform.python_version()
    name, count, device = "", 0, ""
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        name, parameters = type(model).__name__, list(model.parameters())
        count = sum(p.numel() for p in parameters)
        device = ", ".join(dict.fromkeys(card_name(p.device) for p in parameters))
    elif model is not None:
        name = getattr(model, "__qualname__", type(model).__name__)
    return Header(
        model=name,
        parameters=count,
        recipe=python_of(recipe),
        versions={name: version for name, version in versions.items() if version},
        device=device,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )
