"""The quantizers of this package, a class for each kind of format."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor

from fxquant.checks import AtLeast, OneOf, Table, checked
from fxquant.compat.inside.ranks import name_of_all
from fxquant.errors import RecipeError, SettingError
from fxquant.formats import QuantSpec
from fxquant.quantizers.base import QuantizedTensor, Quantizer
from fxquant.roles import Direction


class DType(metaclass=Table):
    """TransformerEngine's names of the element dtypes."""

    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2
    kFloat4E2M1 = torch.float4_e2m1fn_x2


_FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

_Fp8: TypeAlias = Annotated[torch.dtype, OneOf(*_FP8_NAMES)]
_Epsilon: TypeAlias = Annotated[float, AtLeast(0)]

_FIXED_BLOCK = {"block": "a block of MXFP8 has 32 elements", "block_size": "a block of MXFP8 has 32 elements"}


@dataclass(frozen=True)
class _TensorQuantizer(Quantizer):
    """The keywords that TransformerEngine's quantizers share.

    `rowwise` and `columnwise` are the directions of an eager call, ``quantizer(x)``. In a compiled graph the GEMMs
    choose the directions, so a comparison of quantizers leaves both out.

    `with_amax_reduction` takes the largest amax of the ranks of `amax_reduction_group`, all ranks without one, where a
    format has a scale, or a global amax, of the whole tensor: each of them has to quantize its part. Graphs do so by
    themselves for DTensors.
    """

    _: KW_ONLY
    rowwise: bool = field(default=True, compare=False, repr=False)
    columnwise: bool = field(default=True, compare=False, repr=False)
    with_amax_reduction: bool = field(default=False, repr=False)
    amax_reduction_group: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        group = self.amax_reduction_group
        if group is not None and not hasattr(group, "group_name"):
            mesh = ": of a mesh, give mesh.get_group()" if hasattr(group, "get_group") else ""
            raise SettingError(f"amax_reduction_group is a process group, not {group!r}{mesh}")

    def over(self) -> str:
        """The name of the process group over which amaxes are taken; empty for this process alone."""
        if not self.with_amax_reduction:
            return ""
        group = self.amax_reduction_group
        return (name_of_all() or "") if group is None else str(group.group_name)


@checked()
@dataclass(frozen=True)
class Float8CurrentScalingQuantizer(_TensorQuantizer):
    """FP8 with one float32 scale for the tensor, from its own amax (numerics: current scaling)."""

    fp8_dtype: _Fp8 = torch.float8_e4m3fn
    device: Any = field(default=None, compare=False, repr=False)
    force_pow_2_scales: bool = False
    amax_epsilon: _Epsilon = 0.0

    def spec(self, direction: Direction) -> QuantSpec:
        return QuantSpec(
            format=f"per_tensor_{_FP8_NAMES[self.fp8_dtype]}", pow2=self.force_pow_2_scales, eps=self.amax_epsilon,
            over=self.over(),
        )  # fmt: skip


@checked()
@dataclass(frozen=True)
class Float8RowwiseQuantizer(Quantizer):
    """FP8 with one float32 scale for each row of the direction, by torchao's formula."""

    fp8_dtype: _Fp8 = torch.float8_e4m3fn
    force_pow_2_scales: bool = True
    amax_epsilon: _Epsilon = 0.0

    def spec(self, direction: Direction) -> QuantSpec:
        name = f"per_row_{_FP8_NAMES[self.fp8_dtype]}"
        return QuantSpec(format=name, pow2=self.force_pow_2_scales, eps=self.amax_epsilon, torchao=True)


@checked()
@dataclass(frozen=True)
class Float8HeadQuantizer(Quantizer):
    """FP8 with one float32 scale for each head of each entry of the batch, for attention alone.

    Queries share the scale of the key head that they attend to. `block_len` 128 gives every 128 positions of the
    sequence a scale of their own. Only graphs quantize by it.
    """

    fp8_dtype: _Fp8 = torch.float8_e4m3fn
    block_len: Literal[128] | None = None
    force_pow_2_scales: bool = False
    amax_epsilon: _Epsilon = 0.0

    def spec(self, direction: Direction) -> QuantSpec:
        block = "" if self.block_len is None else f"{self.block_len}_"
        return QuantSpec(
            format=f"per_head_{block}{_FP8_NAMES[self.fp8_dtype]}", pow2=self.force_pow_2_scales, eps=self.amax_epsilon
        )

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        raise RecipeError("Float8HeadQuantizer is for the attention of a compiled model: it quantizes no single tensor")


@checked()
@dataclass(frozen=True)
class Float8BlockQuantizer(_TensorQuantizer):
    """FP8 with one float32 scale for 128 elements (`block_scaling_dim=1`) or a 128x128 tile (2)."""

    fp8_dtype: _Fp8 = torch.float8_e4m3fn
    amax_epsilon: _Epsilon = 0.0
    force_pow_2_scales: bool = True
    block_scaling_dim: Literal[1, 2] = 2

    def spec(self, direction: Direction) -> QuantSpec:
        block = "1x128" if self.block_scaling_dim == 1 else "128x128"
        return QuantSpec(
            format=f"block_{block}_{_FP8_NAMES[self.fp8_dtype]}", pow2=self.force_pow_2_scales, eps=self.amax_epsilon
        )


@checked(takes=_FIXED_BLOCK)
@dataclass(frozen=True)
class MXFP8Quantizer(_TensorQuantizer):
    """MXFP8: one e8m0 scale for 32 elements, or for a 32x32 tile (OCP MX v1.0, section 5).

    `scale_mode` rounds the scale: ``rceil`` (TransformerEngine, cuBLAS), or torchao's ``floor``, ``ceil``, ``even``.
    """

    fp8_dtype: _Fp8 = torch.float8_e4m3fn
    with_2d_quantization: bool = False
    scale_mode: Literal["rceil", "floor", "ceil", "even"] = "rceil"

    def spec(self, direction: Direction) -> QuantSpec:
        block = "2d_" if self.with_2d_quantization else ""
        return QuantSpec(format=f"mxfp8_{block}{_FP8_NAMES[self.fp8_dtype]}", mode=self.scale_mode)


@checked()
@dataclass(frozen=True)
class NVFP4Quantizer(_TensorQuantizer):
    """NVFP4: e2m1 elements, an e4m3 scale for 16 of them or a 16x16 tile, and one float32 amax for the tensor.

    `with_rht` transforms the columnwise half before it is quantized, with `with_random_sign_mask` by the signed
    Hadamard matrix. `stochastic_rounding` rounds elements at random in proportion to their distances from the two
    neighbours, so that the mean over many roundings is the value itself; scales are rounded to nearest. In a compiled
    graph the random bits come from its state (see `fxquant.Backend.state_dict`).

    `row_scaled_nvfp4` takes the float32 amax of each row (columnwise: of each column) in place of the tensor's.
    `nvfp4_use_4over6` maps the largest element of a block to 4 if that gives a smaller error than mapping it to 6, by
    `nvfp4_4over6_err_mode` (``MAE`` or ``MSE``); `nvfp4_e4m3_max` (448 or 256) is then the largest block scale.

    Raises RecipeError for settings that exclude each other: the row amax goes with no transform, no tiles and no
    stochastic rounding, 4over6 with no transform and no stochastic rounding.
    """

    fp4_dtype: Annotated[torch.dtype, OneOf(torch.float4_e2m1fn_x2)] = torch.float4_e2m1fn_x2
    with_rht: bool = False
    with_post_rht_amax: bool = False
    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    row_scaled_nvfp4: bool = False
    nvfp4_use_4over6: bool = False
    nvfp4_e4m3_max: Literal[448, 256] = 448
    nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = "MAE"
    with_random_sign_mask: bool = True

    def __post_init__(self) -> None:
        if self.with_rht and not self.with_post_rht_amax:
            raise RecipeError(
                "NVFP4 takes the columnwise amax after the Hadamard transform: set with_post_rht_amax=True"
            )
        for mode in ("row_scaled_nvfp4", "nvfp4_use_4over6"):
            excluded = ["with_rht", "stochastic_rounding", *["with_2d_quantization"] * (mode == "row_scaled_nvfp4")]
            for other in excluded:
                if getattr(self, mode) and getattr(self, other):
                    raise RecipeError(f"{mode} does not go with {other}: set one of them to False")
        if self.nvfp4_e4m3_max != 448 and not self.nvfp4_use_4over6:
            raise RecipeError(f"nvfp4_e4m3_max={self.nvfp4_e4m3_max} is a setting of 4over6: set nvfp4_use_4over6=True")
        super().__post_init__()

    def quantize(
        self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True, generator: torch.Generator | None = None
    ) -> QuantizedTensor:
        """`Quantizer.quantize`; stochastic rounding takes two numbers from `generator`, or from torch's CPU generator.

        All random bits follow from these numbers, on every device alike.
        """
        return self._quantize(x, rowwise, columnwise, generator)

    def spec(self, direction: Direction) -> QuantSpec:
        return QuantSpec(
            format="nvfp4_2d" if self.with_2d_quantization else "nvfp4",
            rht=self.with_rht and Direction(direction) is Direction.COLUMNWISE,
            random_signs=self.with_random_sign_mask or not self.with_rht,
            stochastic=self.stochastic_rounding,
            row_scaled=self.row_scaled_nvfp4,
            four_over_six=self.nvfp4_4over6_err_mode.lower() if self.nvfp4_use_4over6 else "",
            e4m3_max=self.nvfp4_e4m3_max,
            over="" if self.row_scaled_nvfp4 else self.over(),
        )


@checked()
@dataclass(frozen=True)
class IdentityQuantizer(_TensorQuantizer):
    """Keeps the tensor in high precision, cast to `dtype` if one is given."""

    dtype: torch.dtype | None = None

    def spec(self, direction: Direction) -> QuantSpec:
        return QuantSpec(format="identity", dtype=str(self.dtype).removeprefix("torch.") if self.dtype else "")


@checked(takes={"rowwise_quantizer": "a Quantizer", "columnwise_quantizer": "a Quantizer"})
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
                raise SettingError(f"{name} must be a Quantizer, not {type(value).__name__}{hint}")
            if isinstance(value, HybridQuantizer):
                raise SettingError(f"{name} is itself a HybridQuantizer: name the quantizer of that direction")
        if self.rowwise_quantizer is self.columnwise_quantizer:
            raise RecipeError(
                "rowwise_quantizer and columnwise_quantizer are the same object: make one for each direction"
            )

    def quantize(
        self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True, generator: torch.Generator | None = None
    ) -> QuantizedTensor:
        """`Quantizer.quantize`; stochastic rounding takes two numbers from `generator`."""
        return self._quantize(x, rowwise, columnwise, generator)

    def side(self, direction: Direction) -> Quantizer:
        return self.rowwise_quantizer if Direction(direction) is Direction.ROWWISE else self.columnwise_quantizer

    def spec(self, direction: Direction) -> QuantSpec:
        return self.side(direction).spec(direction)


@checked()
@dataclass(frozen=True)
class Float8Quantizer(Quantizer):
    """FP8 with a scale from earlier steps (delayed scaling), at `slot` of its graph's state.

    A recipe returns a `DelayedScalingRequest`, from which the plan of a graph makes this quantizer.
    """

    fp8_dtype: _Fp8
    slot: int

    def spec(self, direction: Direction) -> QuantSpec:
        return QuantSpec(format=f"per_tensor_{_FP8_NAMES[self.fp8_dtype]}", slot=self.slot)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        raise RecipeError("a delayed scale lives in a compiled graph's state: this quantizer has none of its own")
