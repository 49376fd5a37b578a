"""The contract of a quantizer, its quantized tensors, and the request that a recipe may return in its place."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from fxquant.checks import AtLeast, Words, article, checked
from fxquant.compat.constants import constants_lifted
from fxquant.compat.values import statically_known_true
from fxquant.errors import RecipeError
from fxquant.formats import IDENTITY, OperandSpec, QuantSpec
from fxquant.quantizers.fingerprint import fingerprint
from fxquant.roles import Direction

if TYPE_CHECKING:
    from typing_extensions import Self


class Format(Words):
    """Element formats of a recipe: (forward, backward)."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    E5M2 = (torch.float8_e5m2, torch.float8_e5m2)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)

    def dtype(self, tensor_type: str) -> torch.dtype:
        """The element dtype of a role's tensor type: the backward one for gradients."""
        return self.value[tensor_type == "grad_output"]

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class QuantizedOperand:
    """One direction of a quantized tensor, with the contracted axis last.

    `data`: [M, K] rowwise, [K, M] columnwise; torch.float4_e2m1fn_x2 packs two elements in one along the last axis.
    `scale`: the factor of dequantization, e8m0 and e4m3 scales raw. `global_amax`: NVFP4 only, float32 [1] or
    one a row of `data` [..., 1].
    """

    data: Tensor
    scale: Tensor | None = None
    global_amax: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The parts that are not None, in order."""
        return [t for t in (self.data, self.scale, self.global_amax) if t is not None]

    def __repr__(self) -> str:
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        parts = ", ".join(f"{name}={_kind_of(tensor)}" for name, tensor in named if tensor is not None)
        return f"{type(self).__name__}({parts}, {_bytes_of(self.tensors()):,} bytes)"


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor quantized in one or both directions. `shape` [*, K] and `dtype` are the original's."""

    rowwise: QuantizedOperand | None = None
    columnwise: QuantizedOperand | None = None
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    _parts: Mapping[Direction, tuple[Sequence[Tensor], QuantSpec]] = field(repr=False, default_factory=dict)

    def dequantize(self, direction: str = "rowwise") -> Tensor:
        """The values of one direction in the original's shape, as float32.

        Raises RecipeError when that direction was not quantized.
        """
        from fxquant.kernels.cast import ops

        side = Direction(direction)
        if side not in self._parts:
            if getattr(self, side) is not None:
                raise RecipeError(
                    f"this tensor does not know the quantizer of your own that made it: quantizer.dequantize(q.{side}) "
                    "gives the values of one half"
                )
            raise RecipeError(f"the {side} representation is not available: quantize with {side}=True")
        parts, spec = self._parts[side]
        assert self.shape is not None
        rows = self.shape.numel() // self.shape[-1] if self.shape[-1] else 0
        size = [rows, self.shape[-1]]
        flat = ops.dequantize_operand(parts, str(spec), str(side), size, torch.float32)
        return flat.reshape(self.shape)

    def __repr__(self) -> str:
        shape = [] if self.shape is None else [f"shape={[*self.shape]}"]
        shape += [] if self.dtype is None else [f"dtype={str(self.dtype).removeprefix('torch.')}"]
        halves = {side: half for side in Direction if (half := getattr(self, side)) is not None}
        specs = {side: self._parts[side][1] for side in halves if side in self._parts}
        formats = {side: f"{spec.key.rpartition('-')[0] or spec} of " for side, spec in specs.items()}
        sides = [f"{side}={formats.get(side, '')}{_kind_of(half.data)}" for side, half in halves.items()]
        size = _bytes_of([tensor for half in halves.values() for tensor in half.tensors()])
        return f"{type(self).__name__}({', '.join([*shape, *sides])}, {size:,} bytes)"

    def __getattr__(self, name: str) -> Tensor:
        hint = ": its halves have, q.rowwise and q.columnwise" if name in ("data", "scale", "global_amax") else ""
        raise AttributeError(f"a {type(self).__name__} has no {name!r}{hint}", name=name, obj=self)


def _kind_of(tensor: object) -> str:
    """The dtype and shape of a tensor, the type of anything else."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


class Quantizer:
    """The quantization of one operand.

    A format of your own is a subclass with three methods in plain torch code, best a frozen dataclass of its settings:

    - ``quantize(x, *, rowwise=True, columnwise=True) -> QuantizedTensor`` for x [M, K], the columnwise half of x.mT;
    - ``dequantize(operand) -> Tensor`` for one half, in its own orientation;
    - optionally ``qgemm(a, b, *, bias, out_dtype) -> Tensor``, a [M, K] x b [N, K]^T + bias [N].

    They are traced into the graph and compiled with the model, forward and backward. A format in blocks declares
    `alignment`: graphs pad the contracted axis with zeros to a multiple of it, K rowwise and M columnwise. The
    quantizers of this package define `spec` instead, and share kernels.
    """

    alignment: int = 1

    def spec(self, direction: Direction) -> QuantSpec:
        """The format and settings of one direction, whose text crosses into the graph."""
        from fxquant.kernels import custom

        if type(self).quantize is Quantizer.quantize:
            raise RecipeError(f"{type(self).__name__} must define quantize and dequantize")
        key = f"{type(self).__name__}-{fingerprint(self)}"
        custom.register(key, self)
        return QuantSpec(format="custom", key=key)

    def side(self, direction: Direction) -> Quantizer:
        """The quantizer of one direction: itself, unless it is a hybrid."""
        return self

    def operand_spec(self) -> OperandSpec:
        """Both directions at once."""
        source = getattr(self, "columnwise_source", "original")
        return OperandSpec(
            self.spec(Direction.ROWWISE), self.spec(Direction.COLUMNWISE), source == "rowwise_dequantized"
        )

    @property
    def is_identity(self) -> bool:
        """True if both directions keep the tensor as it is, without even a cast."""
        return all(self.spec(d) == IDENTITY for d in Direction)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        """Quantizes `x` [..., K] (leading axes are flattened to M) on its own device, outside any graph.

        Raises RecipeError for a tensor that is not floating point or has no axis, and without a direction.
        """
        return self._quantize(x, rowwise, columnwise)

    def _quantize(
        self, x: Tensor, rowwise: bool, columnwise: bool, generator: torch.Generator | None = None
    ) -> QuantizedTensor:
        """`quantize`; stochastic rounding takes its seed from `generator`."""
        from fxquant.kernels.cast import ops
        from fxquant.kernels.state.step import StepState

        _check_tensor(x)
        if not (rowwise or columnwise):
            raise RecipeError("no direction is asked for: set rowwise=True, columnwise=True or both")
        if not isinstance(generator, torch.Generator | None):
            raise RecipeError(
                f"generator must be a torch.Generator, such as torch.Generator().manual_seed(0), not {generator!r}"
            )
        flat = x.detach().reshape(-1, x.shape[-1]) if x.shape[-1] else x.detach().flatten(0, -2)
        spec, wanted = self.operand_spec(), zip(Direction, (rowwise, columnwise), strict=True)
        random: Tensor | None = None
        if spec.is_stochastic:
            device = "cpu" if generator is None else generator.device
            random = torch.randint(2**63 - 1, (2,), generator=generator, device=device).to(x.device)
        state = StepState(random=random)
        parts = {d: ops.quantize_operand(flat, spec.numbered(0), str(d), state) for d, on in wanted if on}
        shown = {d: _show(p, s, flat.shape[1 if d is Direction.ROWWISE else 0]) for d, (p, s) in parts.items()}
        return QuantizedTensor(shown.get(Direction.ROWWISE), shown.get(Direction.COLUMNWISE), x.shape, x.dtype, parts)

    def __call__(self, x: Tensor) -> QuantizedTensor:
        """Quantizes in the directions that the quantizer has switched on, both without such switches."""
        return self.quantize(x, rowwise=getattr(self, "rowwise", True), columnwise=getattr(self, "columnwise", True))

    def copy(self) -> Self:
        """An equal quantizer that is another object, for the second direction of a HybridQuantizer."""
        return copy.copy(self)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        """The values of one half of a quantized tensor, in its own orientation; quantizers of your own define it.

        Those of this package take a whole QuantizedTensor, which gives its values in the original's shape.
        """
        tensor: object = operand
        if isinstance(tensor, QuantizedTensor):
            return tensor.dequantize(Direction.COLUMNWISE if tensor.rowwise is None else Direction.ROWWISE)
        if type(self).spec is Quantizer.spec:
            raise RecipeError(f"{type(self).__name__} does not define dequantize")
        raise RecipeError(
            f"{type(self).__name__} dequantizes what its quantize gave, not {article(type(tensor).__name__)}: "
            "write q = quantizer.quantize(x) and q.dequantize('rowwise') or q.dequantize('columnwise')"
        )

    def quantize_side(
        self, x: Tensor, direction: str, draw: Callable[[torch.Size], Tensor] | None = None
    ) -> list[Tensor]:
        """One direction of x as the graph holds it, padded to the alignment; see `fxquant.kernels.custom`.

        `draw` is given where the spec is stochastic: random bytes for a size whose last axis 16 divides, as int64.
        """
        x = padded(x, self.alignment, direction)
        with constants_lifted(x):
            quantized = self.quantize(x, rowwise=direction == "rowwise", columnwise=direction == "columnwise")
        return _parts_of(quantized, direction, type(self).__name__)

    def dequantize_side(self, parts: Sequence[Tensor], length: int | None = None) -> Tensor:
        """The values of the parts from `quantize_side`, without the padding of an axis of this length.

        Raises RecipeError for what is no list of one to three tensors.
        """
        most = len(fields(QuantizedOperand))
        listed = isinstance(parts, list | tuple) and all(isinstance(part, Tensor) for part in parts)
        if not listed or not 1 <= len(parts) <= most:
            what = f"{len(parts)} of them" if listed else article(type(parts).__name__)
            raise RecipeError(
                f"{type(self).__name__}.dequantize_side takes a list of the tensors that quantize_side gave, one to "
                f"{most}, not {what}"
            )
        with constants_lifted(parts):
            values = self.dequantize(QuantizedOperand(*parts))
        return values if length is None or self.alignment == 1 else values.narrow(-1, 0, length)

    def multiply(
        self, a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor | None:
        """a x b^T + bias by `qgemm`, or None without one."""
        qgemm = getattr(self, "qgemm", None)
        if qgemm is None:
            return None
        with constants_lifted(a, b):
            return qgemm(QuantizedOperand(*a), QuantizedOperand(*b), bias=bias, out_dtype=out_dtype)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return str(self.operand_spec())


def _parts_of(quantized: object, direction: str, name: str) -> list[Tensor]:
    """The tensors of one half of what a quantizer of the user's gave. Raises RecipeError for anything else."""
    if not isinstance(quantized, QuantizedTensor):
        answer = article(type(quantized).__name__)
        raise RecipeError(f"{name}.quantize has to give a QuantizedTensor(rowwise, columnwise), not {answer}")
    half: object = getattr(quantized, direction)
    if half is None:
        raise RecipeError(f"{name}.quantize gave no {direction} half although it was asked for it")
    if not isinstance(half, QuantizedOperand):
        answer = article(type(half).__name__)
        raise RecipeError(f"{name}.quantize has to give a QuantizedOperand(data, scale) for each half, not {answer}")
    for part in half.tensors():
        if not isinstance(part, Tensor):
            raise RecipeError(f"a QuantizedOperand consists of tensors, and that of {name} has {part!r}")
    return half.tensors()


def _check_tensor(x: object) -> None:
    """Raises RecipeError for what is no dense tensor of floating-point numbers with at least one axis."""
    if not isinstance(x, Tensor):
        raise RecipeError(f"a quantizer takes a tensor, not {article(type(x).__name__)}: torch.tensor(...) makes one")
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested tensors" if x.is_nested else f"those of {x.layout}"
        raise RecipeError(f"only dense tensors are quantized, not {kind}: x.to_dense() or torch.cat makes one")
    if not x.is_floating_point() or x.ndim == 0:
        raise RecipeError(
            f"only floating-point tensors with at least one axis are quantized, not {x.dtype} {tuple(x.shape)}"
        )
    if x.element_size() == 1:
        raise RecipeError(f"a tensor of {x.dtype} has been quantized before: x.float() gives numbers of it")


def padded(x: Tensor, multiple: int, direction: str) -> Tensor:
    """x [*, M, K] with zeros behind the axis that is contracted.

    Raises RecipeError for what is no such tensor, and for an unknown direction.
    """
    _check_tensor(x)
    direction = Direction(direction)
    size = x.shape[-2 if direction == "columnwise" else -1]
    if statically_known_true(size % multiple == 0):
        return x
    spare = (size + multiple - 1) // multiple * multiple - size
    return torch.nn.functional.pad(x, (0, 0, 0, spare) if direction == "columnwise" else (0, spare))


def _show(parts: Sequence[Tensor], spec: QuantSpec, length: int) -> QuantizedOperand:
    """The operand that users see, with torch's own dtypes, and without padding if an element fills a byte."""
    if spec.is_identity:
        return QuantizedOperand(parts[0])
    if spec.key:
        return QuantizedOperand(*parts)
    row, (data, scale, *amax) = spec.row, parts
    assert row.element is not None and row.scale_dtype is not None
    data = data.view(row.element.dtype) if row.element.packed > 1 else data[..., :length]
    return QuantizedOperand(data, scale.view(row.scale_dtype), amax[0] if amax else None)


_HISTORY = {
    "interval": "scales are updated in every step",
    "amax_compute_algo": "'max', 'most_recent' or a function",
}


class QuantizerRequest:
    """Base of the requests that a factory may return in place of a quantizer."""


@checked(takes=_HISTORY)
@dataclass(frozen=True, kw_only=True, repr=False)
class DelayedScalingRequest(QuantizerRequest):
    """The answer of a factory that asks for delayed scaling, whose scales are state of a graph.

    All requests of one graph must be equal in every field. `amax_compute_algo`: ``max``, ``most_recent``, or a
    function of the amax history [length, slots]; `scaling_factor_compute_algo`: a function of (amax, old scale,
    largest value, request). `reduce_amax` takes the largest amax over the process group of the recipe.
    """

    fp8_format: Format = Format.HYBRID
    margin: float = 0
    amax_history_len: Annotated[int, AtLeast(1)] = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, object], Tensor] | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if self.fp8_format is Format.E5M2:
            raise RecipeError("delayed scaling does not support pure E5M2: use Format.E4M3 or Format.HYBRID")

    def __repr__(self) -> str:
        return value_text(self)


def quantizer_text(quantizer: Quantizer) -> str:
    """A short name with the settings that differ from their defaults."""
    if not is_dataclass(quantizer):
        return type(quantizer).__name__
    changed = [
        f"{f.name}={getattr(quantizer, f.name)!r}"
        for f in fields(quantizer)
        if f.repr and getattr(quantizer, f.name) != f.default
    ]
    return f"{type(quantizer).__name__}({', '.join(changed)})"


def value_text(value: object) -> str:
    """The settings that differ from their defaults, functions by their names. Equal for equal values everywhere."""
    if isinstance(value, functools.partial):
        items = [value_text(value.func), *map(value_text, value.args)]
        items += [f"{key}={value_text(item)}" for key, item in sorted(value.keywords.items())]
        return f"partial({', '.join(items)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(value_text, value))}{',' if len(value) == 1 else ''})"
    if is_dataclass(value) and not isinstance(value, type):
        settings = ((f, getattr(value, f.name)) for f in fields(value) if f.repr)
        shown = ((f.name, item) for f, item in settings if item != f.default)
        return f"{type(value).__name__}({', '.join(f'{name}={value_text(item)}' for name, item in shown)})"
    if isinstance(value, Quantizer):
        return f"{type(value).__name__}-{fingerprint(value)}"
    if callable(value):
        owner = value if hasattr(value, "__qualname__") else type(value)
        return f"{owner.__module__}.{owner.__qualname__}"
    return repr(value)
