"""The backend of torch.compile, its front door `compile`, the scope `autocast`, and the cache of quantized weights."""

from fxquant.backend.backend import BY_NAME, Backend, fxquant_backend

__all__ = ["Backend", "fxquant_backend"]

globals().update(BY_NAME)  # torch finds each by an entry point of the package
