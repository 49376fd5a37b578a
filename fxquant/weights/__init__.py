"""Parameters that have quantized forms: one subclass of Tensor, and its use under FSDP2."""

from fxquant.weights.weight import QuantizedWeight

__all__ = ["QuantizedWeight"]
