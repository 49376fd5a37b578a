"""The rates of the user's own cards, which ``fxquant rates`` has measured and kept, before those that ship."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

from fxquant.cost.rates import RATES, AttentionRate, AttentionRates, CardRates, CastRate, GemmRate
from fxquant.errors import FxQuantWarning, OptionError, tell
from fxquant.files import in_its_place
from fxquant.kernels.linear.choice import GemmKernel

SCHEMA = 1
"""The version of the file of a card's rates."""


def rates_of(card: str) -> CardRates | None:
    """Returns the rates of a card: measured by the user, else those that ship, None if nobody measured it."""
    return kept(str(folder())).get(card) or RATES.get(card)


def known_cards() -> list[str]:
    """Returns the names of all cards with rates."""
    return [*dict.fromkeys((*RATES, *kept(str(folder()))))]


def find_card(text: str) -> str:
    """The one card with rates whose name contains `text`, such as ``H100``. Raises OptionError if there is none."""
    asked, names = text.lower() if isinstance(text, str) else "", known_cards()
    cards = [name for name in names if asked and asked in name.lower()]
    if text not in names and len(cards) != 1:
        raise OptionError(f"no rates for {text!r}; known cards: {', '.join(names)}")
    return text if text in names else cards[0]


def folder() -> Path:
    """Returns the folder of rates in the user's cache: ``fxquant/rates`` of `XDG_CACHE_HOME`, or of ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxquant" / "rates"


def keep(card: str, rates: CardRates) -> Path:
    """Writes the rates of a card for this and later processes; returns the file.

    Raises OptionError where there can be none.
    """
    path = folder() / f"{re.sub('[^A-Za-z0-9]+', '_', card)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"no folder {path.parent} for measured rates: {error.strerror}") from error
    text = {"schema": SCHEMA, "card": card, "rates": dataclasses.asdict(rates)}
    with in_its_place(path) as file:
        file.write_text(json.dumps(text, indent=1), encoding="utf-8")
    kept.cache_clear()
    return path


@functools.cache
def kept(path: str) -> dict[str, CardRates]:
    """Returns the rates in a folder by card. Warns of a file that is not one of `keep`."""
    cards: dict[str, CardRates] = {}
    for file in sorted(Path(path).glob("*.json")):
        try:
            text = json.loads(file.read_text(encoding="utf-8"))
            if text["schema"] == SCHEMA:
                cards[text["card"]] = _rates(text["rates"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            tell(
                f"{file} holds no rates of a card ({type(error).__name__}: {error}): estimates do without it. Delete "
                "it, or measure again with fxquant rates",
                FxQuantWarning,
            )
    return cards


def kept_text() -> str:
    """Returns all rates that the user has measured as text, a part of the key of what they decide."""
    return repr(kept(str(folder())))


def _rates(fields: dict[str, Any]) -> CardRates:
    changed = {
        "capability": tuple(fields["capability"]),
        "bf16": _gemm(fields["bf16"]),
        "bf16_grouped": _gemm(fields["bf16_grouped"]),
        "gemm": {GemmKernel(name): _gemm(rate) for name, rate in fields["gemm"].items()},
        "casts": {family: CastRate(*rate) for family, rate in fields["casts"].items()},
        "attention": {int(width): _attention(rates) for width, rates in fields["attention"].items()},
    }
    return CardRates(**{**fields, **changed})


def _gemm(rate: list[Any]) -> GemmRate:
    fprop, dgrad, wgrad, read, smallest, group = rate
    return GemmRate(fprop, dgrad, wgrad, read, tuple(smallest), group)


def _attention(rates: dict[str, Any]) -> AttentionRates:
    values: dict[str, Any] = {n: AttentionRate(*rate) if isinstance(rate, list) else rate for n, rate in rates.items()}
    return AttentionRates(**values)
