"""Quantizers: value objects that a recipe returns for a role.

A quantizer says how an operand is quantized in each direction; it holds no tensor and no state, so equal settings
compare equal. Names and keyword arguments follow TransformerEngine. Used eagerly:

    q = MXFP8Quantizer(fp8_dtype=torch.float8_e4m3fn).quantize(x)
    q.rowwise.data, q.rowwise.scale, q.dequantize("rowwise")
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fxquant.errors import RecipeError
from fxquant.formats import IDENTITY, OperandSpec, QuantSpec
from fxquant.roles import Direction

if TYPE_CHECKING:
    from typing_extensions import Self


class Format(Enum):
    """Element formats of a recipe: (forward, backward)."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    E5M2 = (torch.float8_e5m2, torch.float8_e5m2)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)

    def dtype(self, tensor_type: str) -> torch.dtype:
        """The element dtype of a role's tensor type: gradients take the backward one."""
        return self.value[tensor_type == "grad_output"]

    def __repr__(self) -> str:
        return str(self)


class DType:
    """TransformerEngine's names of the element dtypes."""

    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2
    kFloat4E2M1 = torch.float4_e2m1fn_x2


_FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def _fp8_name(dtype: torch.dtype) -> str:
    if dtype not in _FP8_NAMES:
        raise RecipeError(f"fp8_dtype must be torch.float8_e4m3fn or torch.float8_e5m2, not {dtype}")
    return _FP8_NAMES[dtype]


@dataclass(frozen=True)
class QuantizedOperand:
    """One direction of a quantized tensor, with the contracted axis last.

    `data`: [M, K] rowwise, [K, M] columnwise; torch.float4_e2m1fn_x2 packs two elements in one along the last axis.
    `scale`: what dequantization multiplies by, e8m0 and e4m3 scales raw. `global_amax`: NVFP4 only, float32 [1] or
    one a row of `data` [..., 1].
    """

    data: Tensor
    scale: Tensor | None = None
    global_amax: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The parts that there are, in order."""
        return [t for t in (self.data, self.scale, self.global_amax) if t is not None]


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor quantized in one or both directions. `shape` [*, K] and `dtype` are those of the original."""

    rowwise: QuantizedOperand | None = None
    columnwise: QuantizedOperand | None = None
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    _parts: dict[Direction, tuple[Sequence[Tensor], QuantSpec]] = field(repr=False, default_factory=dict)

    def dequantize(self, direction: str = "rowwise") -> Tensor:
        """The values of one direction in the original's shape, as float32.

        Raises RecipeError when that direction was not quantized.
        """
        from fxquant.kernels.cast import ops

        try:
            parts, spec = self._parts[Direction(direction)]
        except KeyError:
            raise RecipeError(
                f"the {direction} representation is not available: quantize with {direction}=True"
            ) from None
        assert self.shape is not None
        rows = self.shape.numel() // self.shape[-1] if self.shape[-1] else 0
        flat = ops.dequantize(parts, str(spec), str(Direction(direction)), [rows, self.shape[-1]], torch.float32)
        return flat.reshape(self.shape)


class Quantizer:
    """How one operand is quantized.

    A format of your own is a subclass with three methods in plain torch code, best a frozen dataclass of its settings:

    - ``quantize(x, *, rowwise=True, columnwise=True) -> QuantizedTensor`` for x [M, K], the columnwise half of x.mT;
    - ``dequantize(operand) -> Tensor`` for one half, in its own orientation;
    - optionally ``qgemm(a, b, *, bias, out_dtype) -> Tensor``, a [M, K] x b [N, K]^T + bias [N].

    They are traced into the graph and compiled with the model, forward and backward. The quantizers of this package
    answer `spec` instead, and share kernels.
    """

    def spec(self, direction: Direction) -> QuantSpec:
        """The text that crosses into the graph for one direction."""
        from fxquant.kernels import custom

        if type(self).quantize is Quantizer.quantize:
            raise RecipeError(f"{type(self).__name__} must define quantize and dequantize")
        key = f"{type(self).__name__}-{_fingerprint(self)}"
        custom.register(key, self)
        return QuantSpec(format="custom", key=key)

    def side(self, direction: Direction) -> Quantizer:
        """The quantizer that does the work in one direction: itself, unless it is a hybrid."""
        return self

    def operand_spec(self) -> OperandSpec:
        """Both directions at once."""
        source = getattr(self, "columnwise_source", "original")
        return OperandSpec(
            self.spec(Direction.ROWWISE), self.spec(Direction.COLUMNWISE), source == "rowwise_dequantized"
        )

    @property
    def is_identity(self) -> bool:
        """Whether both directions keep the tensor as it is, without even a cast."""
        return all(self.spec(d) == IDENTITY for d in Direction)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        """Quantizes `x` [..., K] (leading axes are flattened to M) on its own device, outside any graph.

        Raises RecipeError for a tensor that is not floating point or has no axis.
        """
        return self._quantize(x, rowwise, columnwise)

    def _quantize(
        self, x: Tensor, rowwise: bool, columnwise: bool, generator: torch.Generator | None = None
    ) -> QuantizedTensor:
        """`quantize`, with the generator that stochastic rounding takes its seed from."""
        from fxquant.kernels.cast import ops

        if not x.is_floating_point() or x.ndim == 0:
            raise RecipeError(
                f"only floating-point tensors with at least one axis are quantized, not {x.dtype} {tuple(x.shape)}"
            )
        flat = x.detach().reshape(-1, x.shape[-1]) if x.shape[-1] else x.detach().flatten(0, -2)
        spec = self.operand_spec()
        wanted = [d for d, on in ((Direction.ROWWISE, rowwise), (Direction.COLUMNWISE, columnwise)) if on]
        random: Tensor | None = None
        if spec.is_stochastic:
            device = "cpu" if generator is None else generator.device
            random = torch.randint(2**63 - 1, (2,), generator=generator, device=device).to(x.device)
        parts: dict[Direction, tuple[Sequence[Tensor], QuantSpec]] = {}
        for direction in wanted:
            parts[direction] = ops.quantize_operand(flat, spec.numbered(0), str(direction), random=random)
        shown = {d: _show(p, s, flat.shape[1 if d is Direction.ROWWISE else 0]) for d, (p, s) in parts.items()}
        return QuantizedTensor(shown.get(Direction.ROWWISE), shown.get(Direction.COLUMNWISE), x.shape, x.dtype, parts)

    def __call__(self, x: Tensor) -> QuantizedTensor:
        """Quantizes in the directions that the quantizer was made for: both, unless it says otherwise."""
        return self.quantize(x, rowwise=getattr(self, "rowwise", True), columnwise=getattr(self, "columnwise", True))

    def copy(self) -> Self:
        """An equal quantizer that is another object, as a HybridQuantizer wants for its two directions."""
        return copy.copy(self)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        """The values of one half of a quantized tensor, in its own orientation. For quantizers of your own."""
        raise RecipeError(f"{type(self).__name__} does not define dequantize")

    def quantize_side(self, x: Tensor, direction: str) -> list[Tensor]:
        """One direction of x as the graph holds it; see `fxquant.kernels.custom`."""
        made = self.quantize(x, rowwise=direction == "rowwise", columnwise=direction == "columnwise")
        operand = made.rowwise if direction == "rowwise" else made.columnwise
        if operand is None:
            raise RecipeError(f"{type(self).__name__}.quantize gave no {direction} half although it was asked for it")
        return operand.tensors()

    def dequantize_side(self, parts: Sequence[Tensor]) -> Tensor:
        """The values of what `quantize_side` gave."""
        return self.dequantize(QuantizedOperand(*parts))

    def multiply(
        self, a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor | None:
        """a x b^T + bias by `qgemm`, or None without one."""
        qgemm = getattr(self, "qgemm", None)
        if qgemm is None:
            return None
        return qgemm(QuantizedOperand(*a), QuantizedOperand(*b), bias=bias, out_dtype=out_dtype)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return str(self.operand_spec())


def _fingerprint(quantizer: Quantizer) -> str:
    """Equal for quantizers of equal settings and code, in every process where their source can be read."""
    cls = type(quantizer)
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        source = str(id(cls))
    settings = repr(quantizer) if "__repr__" in vars(cls) else repr(sorted(vars(quantizer).items()))
    text = "\n".join((cls.__module__, cls.__qualname__, settings, source))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _show(parts: Sequence[Tensor], spec: QuantSpec, length: int) -> QuantizedOperand:
    """What users see of an operand: torch's own dtypes, and no padding where an element has a byte of its own."""
    if spec.is_identity:
        return QuantizedOperand(parts[0])
    if spec.key:
        return QuantizedOperand(*parts)
    row, (data, scale, *amax) = spec.row, parts
    assert row.element is not None and row.scale_dtype is not None
    data = data.view(row.element.dtype) if row.element.packed > 1 else data[..., :length]
    return QuantizedOperand(data, scale.view(row.scale_dtype), amax[0] if amax else None)


@dataclass(frozen=True)
class _TensorQuantizer(Quantizer):
    """The keywords that TransformerEngine's quantizers share.

    `rowwise` and `columnwise` are the directions of an eager call, ``quantizer(x)``; in a compiled graph the GEMMs
    decide which are made, so they do not count when quantizers are compared. An amax is never reduced over a process
    group: `with_amax_reduction` is refused.
    """

    _: KW_ONLY
    rowwise: bool = field(default=True, compare=False, repr=False)
    columnwise: bool = field(default=True, compare=False, repr=False)
    with_amax_reduction: bool = field(default=False, compare=False, repr=False)
    amax_reduction_group: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.with_amax_reduction:
            raise RecipeError(
                f"{type(self).__name__} takes the amax of the tensor that it sees, so with_amax_reduction=True is not "
                "supported; delayed scaling reduces its amaxes (the option amax_group of fxquant.Backend)"
            )


@dataclass(frozen=True)
class Float8CurrentScalingQuantizer(_TensorQuantizer):
    """FP8 with one float32 scale for the tensor, from its own amax (numerics: current scaling)."""

    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    device: Any = field(default=None, compare=False, repr=False)
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _fp8_name(self.fp8_dtype)

    def spec(self, direction: Direction) -> QuantSpec:
        return QuantSpec(
            format=f"per_tensor_{_fp8_name(self.fp8_dtype)}", pow2=self.force_pow_2_scales, eps=self.amax_epsilon
        )


@dataclass(frozen=True)
class Float8RowwiseQuantizer(Quantizer):
    """FP8 with one float32 scale for each row of the direction, by torchao's formula."""

    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _fp8_name(self.fp8_dtype)

    def spec(self, direction: Direction) -> QuantSpec:
        return QuantSpec(
            format=f"per_row_{_fp8_name(self.fp8_dtype)}",
            pow2=self.force_pow_2_scales,
            eps=self.amax_epsilon,
            torchao=True,
        )


@dataclass(frozen=True)
class Float8HeadQuantizer(Quantizer):
    """FP8 with one float32 scale for each head of each entry of the batch, for attention alone.

    Queries share the scale of the key head that they attend to. `block_len` 128 gives every 128 positions of the
    sequence a scale of their own. Made inside graphs only.
    """

    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    block_len: int | None = None
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _fp8_name(self.fp8_dtype)
        if self.block_len not in (None, 128):
            raise RecipeError(f"block_len must be None or 128, not {self.block_len}")

    def spec(self, direction: Direction) -> QuantSpec:
        block = "" if self.block_len is None else f"{self.block_len}_"
        return QuantSpec(
            format=f"per_head_{block}{_fp8_name(self.fp8_dtype)}", pow2=self.force_pow_2_scales, eps=self.amax_epsilon
        )

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        raise RecipeError("Float8HeadQuantizer is for the attention of a compiled model: it quantizes no single tensor")


@dataclass(frozen=True)
class Float8BlockQuantizer(_TensorQuantizer):
    """FP8 with one float32 scale for 128 elements (`block_scaling_dim=1`) or a 128x128 tile (2)."""

    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    amax_epsilon: float = 0.0
    force_pow_2_scales: bool = True
    block_scaling_dim: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _fp8_name(self.fp8_dtype)
        if self.block_scaling_dim not in (1, 2):
            raise RecipeError(f"block_scaling_dim must be 1 or 2, not {self.block_scaling_dim}")

    def spec(self, direction: Direction) -> QuantSpec:
        block = "1x128" if self.block_scaling_dim == 1 else "128x128"
        return QuantSpec(
            format=f"block_{block}_{_fp8_name(self.fp8_dtype)}", pow2=self.force_pow_2_scales, eps=self.amax_epsilon
        )


@dataclass(frozen=True)
class MXFP8Quantizer(_TensorQuantizer):
    """MXFP8: one e8m0 scale for 32 elements, or for a 32x32 tile (OCP MX v1.0, section 5).

    `scale_mode` is how the scale is rounded: ``rceil`` (TransformerEngine, cuBLAS), or torchao's ``floor``, ``ceil``,
    ``even``.
    """

    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    with_2d_quantization: bool = False
    scale_mode: str = "rceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spec(Direction.ROWWISE)

    def spec(self, direction: Direction) -> QuantSpec:
        block = "2d_" if self.with_2d_quantization else ""
        return QuantSpec(format=f"mxfp8_{block}{_fp8_name(self.fp8_dtype)}", mode=self.scale_mode)


@dataclass(frozen=True)
class NVFP4Quantizer(_TensorQuantizer):
    """NVFP4: e2m1 elements, an e4m3 scale for 16 of them or a 16x16 tile, and one float32 amax for the tensor.

    `with_rht` transforms the columnwise half before it is quantized, with `with_random_sign_mask` by the signed
    Hadamard matrix. `stochastic_rounding` rounds elements at random in proportion to their distances from the two
    neighbours, so that the mean over many roundings is the value itself; scales are rounded to nearest. In a compiled
    graph the random bits come from its state (see `fxquant.Backend.state_dict`).

    `row_scaled_nvfp4` takes the float32 amax of each row (columnwise: of each column) in the place of the tensor's.
    `nvfp4_use_4over6` maps the largest element of a block to 4 where that gives a smaller error than mapping it to 6,
    by `nvfp4_4over6_err_mode` (``MAE`` or ``MSE``); `nvfp4_e4m3_max` (448 or 256) is then what block scales reach.

    Raises RecipeError for settings that exclude each other: the row amax goes with no transform, no tiles and no
    stochastic rounding, 4over6 with no transform and no stochastic rounding.
    """

    fp4_dtype: torch.dtype = torch.float4_e2m1fn_x2
    with_rht: bool = False
    with_post_rht_amax: bool = False
    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    row_scaled_nvfp4: bool = False
    nvfp4_use_4over6: bool = False
    nvfp4_e4m3_max: int = 448
    nvfp4_4over6_err_mode: str = "MAE"
    with_random_sign_mask: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp4_dtype is not torch.float4_e2m1fn_x2:
            raise RecipeError(f"fp4_dtype must be torch.float4_e2m1fn_x2, not {self.fp4_dtype}")
        if self.with_rht and not self.with_post_rht_amax:
            raise RecipeError(
                "NVFP4 takes the columnwise amax after the Hadamard transform: set with_post_rht_amax=True"
            )
        for mode in ("row_scaled_nvfp4", "nvfp4_use_4over6"):
            excluded = ["with_rht", "stochastic_rounding", *["with_2d_quantization"] * (mode == "row_scaled_nvfp4")]
            for other in excluded:
                if getattr(self, mode) and getattr(self, other):
                    raise RecipeError(f"{mode} does not go with {other}: set one of them to False")
        if self.nvfp4_e4m3_max not in (448, 256):
            raise RecipeError(f"nvfp4_e4m3_max must be 448 or 256, not {self.nvfp4_e4m3_max}")
        if self.nvfp4_e4m3_max != 448 and not self.nvfp4_use_4over6:
            raise RecipeError(f"nvfp4_e4m3_max={self.nvfp4_e4m3_max} is a setting of 4over6: set nvfp4_use_4over6=True")
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise RecipeError(f"nvfp4_4over6_err_mode must be 'MAE' or 'MSE', not {self.nvfp4_4over6_err_mode!r}")

    def quantize(
        self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True, generator: torch.Generator | None = None
    ) -> QuantizedTensor:
        """`Quantizer.quantize`, which for stochastic rounding takes two numbers from `generator`.

        All random bits follow from them, on every device alike. By default they come from torch's CPU generator.
        """
        return self._quantize(x, rowwise, columnwise, generator)

    def spec(self, direction: Direction) -> QuantSpec:
        return QuantSpec(
            format="nvfp4_2d" if self.with_2d_quantization else "nvfp4",
            rht=self.with_rht and direction is Direction.COLUMNWISE,
            random_signs=self.with_random_sign_mask or not self.with_rht,
            stochastic=self.stochastic_rounding,
            row_scaled=self.row_scaled_nvfp4,
            four_over_six=self.nvfp4_4over6_err_mode.lower() if self.nvfp4_use_4over6 else "",
            e4m3_max=self.nvfp4_e4m3_max,
        )


@dataclass(frozen=True)
class IdentityQuantizer(_TensorQuantizer):
    """Keeps the tensor in high precision, cast to `dtype` if one is given."""

    dtype: torch.dtype | None = None

    def spec(self, direction: Direction) -> QuantSpec:
        return QuantSpec(format="identity", dtype=str(self.dtype).removeprefix("torch.") if self.dtype else "")


@dataclass(frozen=True)
class HybridQuantizer(Quantizer):
    """One quantizer for each direction, each an object of its own.

    `columnwise_source`: ``original`` quantizes the columnwise half from the tensor itself, ``rowwise_dequantized`` from
    the rowwise half dequantized to the tensor's dtype.
    """

    rowwise_quantizer: Quantizer
    columnwise_quantizer: Quantizer
    columnwise_source: Literal["original", "rowwise_dequantized"] = "original"

    def __post_init__(self) -> None:
        for name in ("rowwise_quantizer", "columnwise_quantizer"):
            value = getattr(self, name)
            if not isinstance(value, Quantizer):
                hint = ": IdentityQuantizer() keeps a direction in high precision" if value is None else ""
                raise TypeError(f"{name} must be a Quantizer, not {type(value).__name__}{hint}")
            if isinstance(value, HybridQuantizer):
                raise TypeError(f"{name} is itself a HybridQuantizer: name the quantizer of that direction")
        if self.rowwise_quantizer is self.columnwise_quantizer:
            raise ValueError(
                "rowwise_quantizer and columnwise_quantizer are the same object: make one for each direction"
            )
        if self.columnwise_source not in ("original", "rowwise_dequantized"):
            raise ValueError(
                f"columnwise_source must be 'original' or 'rowwise_dequantized', not {self.columnwise_source!r}"
            )

    def quantize(
        self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True, generator: torch.Generator | None = None
    ) -> QuantizedTensor:
        """`Quantizer.quantize`, with the generator that stochastic rounding takes numbers from."""
        return self._quantize(x, rowwise, columnwise, generator)

    def side(self, direction: Direction) -> Quantizer:
        return self.rowwise_quantizer if direction is Direction.ROWWISE else self.columnwise_quantizer

    def spec(self, direction: Direction) -> QuantSpec:
        return self.side(direction).spec(direction)


@dataclass(frozen=True)
class Float8Quantizer(Quantizer):
    """FP8 with a scale from earlier steps (delayed scaling), which stands at `slot` of its graph's state.

    Made from a `DelayedScalingRequest`; a recipe returns the request, not this.
    """

    fp8_dtype: torch.dtype
    slot: int

    def spec(self, direction: Direction) -> QuantSpec:
        return QuantSpec(format=f"per_tensor_{_fp8_name(self.fp8_dtype)}", slot=self.slot)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        raise RecipeError("a delayed scale lives in a compiled graph's state: this quantizer has none of its own")


class QuantizerRequest:
    """Base of what a factory may return in the place of a quantizer."""


@dataclass(frozen=True, kw_only=True, repr=False)
class DelayedScalingRequest(QuantizerRequest):
    """What a factory returns to ask for delayed scaling: the order for a stateful quantizer, not a quantizer.

    All requests of one graph must be equal in every field. `amax_compute_algo`: ``max``, ``most_recent``, or a
    function of the amax history [length, slots]; `scaling_factor_compute_algo`: a function of (amax, old scale,
    largest value, request). `reduce_amax` takes the largest amax over the process group of the recipe.
    """

    fp8_format: Format = Format.HYBRID
    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, object], Tensor] | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if self.fp8_format is Format.E5M2:
            raise RecipeError("delayed scaling does not support pure E5M2: use Format.E4M3 or Format.HYBRID")
        if self.amax_history_len < 1:
            raise RecipeError(f"amax_history_len must be at least 1, not {self.amax_history_len}")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise RecipeError(
                f"amax_compute_algo must be 'max', 'most_recent' or a function, not {self.amax_compute_algo!r}"
            )

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
    """The settings that differ from their defaults, without addresses: functions go by their names.

    Equal for equal values in every process.
    """
    if isinstance(value, functools.partial):
        items = [value_text(value.func), *map(value_text, value.args)]
        items += [f"{key}={value_text(item)}" for key, item in sorted(value.keywords.items())]
        return f"partial({', '.join(items)})"
    if isinstance(value, tuple):
        return f"({''.join(value_text(item) + ', ' for item in value)})"
    if is_dataclass(value) and not isinstance(value, type):
        settings = ((f, getattr(value, f.name)) for f in fields(value) if f.repr)
        shown = ((f.name, item) for f, item in settings if item != f.default)
        return f"{type(value).__name__}({', '.join(f'{name}={value_text(item)}' for name, item in shown)})"
    if isinstance(value, Quantizer):
        return f"{type(value).__name__}-{_fingerprint(value)}"
    if callable(value):
        owner = value if hasattr(value, "__qualname__") else type(value)
        return f"{owner.__module__}.{owner.__qualname__}"
    return repr(value)


__all__ = [
    "DType",
    "DelayedScalingRequest",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8HeadQuantizer",
    "Float8Quantizer",
    "Float8RowwiseQuantizer",
    "Format",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "QuantizedOperand",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRequest",
    "quantizer_text",
    "value_text",
]
