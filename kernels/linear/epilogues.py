"""The activations that the epilogue of a GEMM can apply, by name.

Each is plain torch code: the reference meaning of `fused_scaled_mm`, and, traced, the pattern by which
`fxquant.passes.lower.epilogues` finds it in a graph.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import gelu, relu, silu


def _gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": silu,
    "relu": relu,
}
