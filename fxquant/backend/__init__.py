"""The backend of torch.compile, its front door `compile`, the scope `autocast`, and the cache of quantized weights."""

from fxquant.backend.backend import Backend, fxquant_backend

__all__ = ["Backend", "fxquant_backend"]
