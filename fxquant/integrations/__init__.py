"""Callbacks for trainers of other packages, a file for each: `transformers` and `lightning`, which import theirs."""

from typing import Any


def __getattr__(name: str) -> Any:
    places = "fxquant.integrations.transformers and fxquant.integrations.lightning have a QuantizationCallback each"
    raise AttributeError(f"module 'fxquant.integrations' has no attribute {name!r}: {places}")
