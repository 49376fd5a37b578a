"""The backend of torch.compile, its front door `compile`, the scope `autocast`, and the cache of quantized weights."""

from fxquant.backend.backend import Backend
from fxquant.backend.by_name import BY_NAME, ByName, found

__all__ = ["Backend"]


def __getattr__(name: str) -> ByName:  # torch finds each by an entry point of the package
    if name not in BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found(name)
