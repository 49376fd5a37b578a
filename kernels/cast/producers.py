"""The functions that commonly stand before a quantization, by name: activations, their gradients, and normalizations.

`produce_quantize` computes one of these and quantizes the result. Each is plain torch code: the reference meaning of
the operator, and, traced, the pattern by which `fxquant.passes.lower.producers` finds it in a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference


@dataclass(frozen=True, kw_only=True)
class Producer:
    """`run` makes tensors [M, K] of one dtype of its inputs.

    `inputs` says what each of these is: a ``matrix`` [M, K] of that dtype (the first is, unless it has ``heads``
    [B, H, S, D] whose result is [B S, H D]), a float32 ``row`` vector [M, 1], or a ``column`` vector [K]. A producer
    of several results is made of `parts` that each take the inputs named by their positions. A `slow` one takes longer
    to compute than to read. An `exact` one has the bits of Inductor's kernels where these round every 16-bit result. A
    `wide` one makes bfloat16 of float32, as the cast of a linear under autocast does. Where the first inputs are `kept`
    they are payloads [M, K] of bfloat16 in the format `KEPT`, K a multiple of 128, whose ``scale`` [M, K / 128] each
    come last; kernels take these transposed.
    """

    name: str
    run: Callable[..., Tensor | list[Tensor]]
    inputs: tuple[str, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    slow: bool = False
    exact: bool = False
    wide: bool = False
    kept: int = 0

    @property
    def results(self) -> int:
        return max(1, len(self.parts))

    @property
    def matrices(self) -> int:
        return self.inputs.count("matrix") + self.inputs.count("heads")

    def read(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of matrices and columns of which a result of a dtype is made."""
        return torch.float32 if self.wide else dtype

    def made(self, x: Tensor) -> torch.dtype:
        """The dtype of results, from the first input."""
        return torch.bfloat16 if self.wide or self.kept else x.dtype

    def shape(self, x: Tensor) -> tuple[Any, Any]:
        """M and K, from the first input."""
        if self.inputs[0] == "heads":
            return x.shape[0] * x.shape[2], x.shape[1] * x.shape[3]
        return x.shape[0], x.shape[1]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = self.run(*inputs)
        return results if isinstance(results, list) else [results]


def _identity(x: Tensor) -> Tensor:
    return x


def _joined_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1] * x.shape[3])


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def _silu_mul_grad_gate(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(grad * up, gate)  # type: ignore[no-any-return]


def _silu_mul_grad(gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
    return [_silu_mul_grad_gate(gate, up, grad), _silu_mul(gate, grad)]


def _gelu(x: Tensor) -> Tensor:
    return gelu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def _gelu_grad(x: Tensor, grad: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, x)  # type: ignore[no-any-return]


def _gelu_tanh_grad(x: Tensor, grad: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")  # type: ignore[no-any-return]


def _rms_norm(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * rstd * weight).to(x.dtype)


def _rms_norm_rounded(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * rstd).to(x.dtype)


def _layer_norm(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ((x.float() - mean) * rstd * weight + bias).to(x.dtype)


def _rms_norm_wide(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    return (x * rstd * weight).to(torch.bfloat16)


def _layer_norm_wide(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ((x - mean) * rstd * weight + bias).to(torch.bfloat16)


IDENTITY = Producer(name="identity", run=_identity, inputs=("matrix",), exact=True)
"""The producer of a tensor that is there already: it gives the amax along with the cast."""
JOINED_HEADS = Producer(name="joined_heads", run=_joined_heads, inputs=("heads",), exact=True)
"""The producer of an attention's output as the next linear reads it. It has the amax of its input."""
_TWO, _THREE = ("matrix",) * 2, ("matrix",) * 3

PRODUCERS: dict[str, Producer] = {
    producer.name: producer
    for producer in (
        Producer(
            name="silu_mul_grad", run=_silu_mul_grad, inputs=_THREE,
            parts=(("silu_mul_grad_gate", (0, 1, 2)), ("silu_mul", (0, 2))),
        ),
        Producer(name="silu_mul", run=_silu_mul, inputs=_TWO),
        Producer(name="silu_mul_grad_gate", run=_silu_mul_grad_gate, inputs=_THREE),
        Producer(name="gelu", run=_gelu, inputs=("matrix",), slow=True),
        Producer(name="gelu_tanh", run=_gelu_tanh, inputs=("matrix",), slow=True),
        Producer(name="gelu_grad", run=_gelu_grad, inputs=_TWO, slow=True),
        Producer(name="gelu_tanh_grad", run=_gelu_tanh_grad, inputs=_TWO, slow=True),
        Producer(name="rms_norm", run=_rms_norm, inputs=("matrix", "row", "column"), exact=True),
        Producer(name="rms_norm_rounded", run=_rms_norm_rounded, inputs=("matrix", "row", "column")),
        Producer(name="layer_norm", run=_layer_norm, inputs=("matrix", "row", "row", "column", "column")),
        Producer(name="rms_norm_wide", run=_rms_norm_wide, inputs=("matrix", "row", "column"), wide=True, exact=True),
        Producer(
            name="layer_norm_wide",
            run=_layer_norm_wide,
            inputs=("matrix", "row", "row", "column", "column"),
            wide=True,
        ),
        JOINED_HEADS,
        IDENTITY,
    )
}  # fmt: skip
"""Every producer of tensors as they are, by name: the patterns that passes look for."""


def _of_kept(producer: Producer, kept: int) -> Producer:
    """The producer that reads the first inputs of another as they are kept for a backward."""

    def run(*inputs: Tensor) -> Tensor | list[Tensor]:
        payloads, others, scales = inputs[:kept], inputs[kept:-kept], inputs[-kept:]
        restored = (reference.dequantize(parts, _KEPT_SPEC).bfloat16() for parts in zip(payloads, scales, strict=True))
        return producer.run(*restored, *others)

    inputs = (*producer.inputs, *("scale",) * kept)
    return replace(producer, name=f"{producer.name}{_SUFFIX}", run=run, inputs=inputs, kept=kept)


KEPT = "block_1x128_e4m3"
"""The format in which a forward keeps tensors for its backward, rowwise."""
_KEPT_SPEC, _SUFFIX = QuantSpec.parse(KEPT), "_kept"
_OF_KEPT = {
    producer.name: producer
    for producer in (
        *(_of_kept(PRODUCERS[name], 2) for name in ("silu_mul", "silu_mul_grad", "silu_mul_grad_gate")),
        *(_of_kept(PRODUCERS[name], 1) for name in ("gelu", "gelu_tanh", "gelu_grad", "gelu_tanh_grad")),
        *(_of_kept(PRODUCERS[name], 1) for name in ("rms_norm", "rms_norm_rounded")),
    )
}


def named(name: str) -> Producer:
    """The producer of a name, of tensors as they are or of kept ones."""
    return PRODUCERS.get(name) or _OF_KEPT[name]


def of_kept(name: str) -> Producer | None:
    """The producer that reads what another one reads as it is kept, if there is one."""
    return _OF_KEPT.get(f"{name}{_SUFFIX}")


@dataclass(frozen=True)
class CastSpec:
    """How the results of a producer are quantized: all alike, in one direction or in both."""

    name: str
    rowwise: QuantSpec | None
    columnwise: QuantSpec | None

    @property
    def producer(self) -> Producer:
        return named(self.name)

    def __str__(self) -> str:
        sides = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        return " ".join([self.name, *(f"{side}={spec}" for side, spec in sides.items() if spec is not None)])

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> CastSpec:
        """The inverse of `str(spec)`."""
        name, *sides = text.split()
        specs = {side: QuantSpec.parse(spec) for side, _, spec in (side.partition("=") for side in sides)}
        return cls(name, specs.get("rowwise"), specs.get("columnwise"))
