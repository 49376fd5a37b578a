"""The named recipes: one class for each kind of scaling, with TransformerEngine's keywords."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Annotated, Any, Literal, TypeAlias

from torch import Tensor

from fxquant.checks import AtLeast, checked
from fxquant.errors import RecipeError
from fxquant.formats import LINEAR_OPERANDS
from fxquant.quantizers import (
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8HeadQuantizer,
    Float8RowwiseQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fxquant.quantizers.base import Format
from fxquant.recipes.base import FOREIGN, NO_FP8_MHA, RECIPES, Override, Recipe, is_attention, override_backward
from fxquant.roles import QuantizerRole


def _fixed_block(elements: int) -> dict[str, str]:
    """The words for keywords that would set the size of a block."""
    fixed = f"its blocks have {elements} elements, which no setting changes"
    return dict.fromkeys(("block", "block_size", "block_len"), fixed)


_BLOCK_OF_128, _BLOCK_OF_32, _BLOCK_OF_16 = map(_fixed_block, (128, 32, 16))
_DELAYED = {
    "amax_compute_algo": "'max', 'most_recent' or a function",
    "interval": "scales are updated in every step",
    "override_linear_precision": "Float8CurrentScaling(backward_override='high_precision') has such a backward",
}


@dataclass(frozen=True, repr=False)
class _Named(Recipe):
    """Quantizes linear layers, and attention with `fp8_dpa`.

    `backward_override` runs the backward in high precision: ``high_precision`` from the original operands,
    ``dequantized`` from the dequantized rowwise halves that the forward used. TransformerEngine's `fp8_mha` is refused.
    """

    _: KW_ONLY
    fp8_dpa: bool = False
    fp8_mha: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.fp8_mha:
            raise RecipeError(NO_FP8_MHA)
        if self.fp8_dpa and type(self)._attention is _Named._attention:
            raise RecipeError(
                f"{name} keeps attention in high precision: its format is not for attention, so fp8_dpa=True is not "
                "supported. CustomRecipe can have another one for module_type 'dpa'"
            )
        if getattr(self, "fp8_format", None) is Format.E5M2:
            raise RecipeError(f"{name} does not support pure E5M2: use Format.E4M3 or Format.HYBRID")

    @property
    def _override(self) -> Override:
        override: Override = getattr(self, "backward_override", None)
        return override

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        if self.fp8_dpa and is_attention(role):
            return self._attention(role)
        if role.module_type not in ("linear", "grouped_linear"):
            return IdentityQuantizer()
        answer = self._linear(role)
        return override_backward(answer, role, self._override) if isinstance(answer, Quantizer) else answer

    def _linear(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        """The answer for a linear layer's operand."""
        raise NotImplementedError

    def _attention(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        """The answer for a slot of an attention, or for a hint for its results."""
        raise NotImplementedError


@checked()
@dataclass(frozen=True)
class QParams:
    """The quantization of one kind of operand, under TransformerEngine's name; recipes of FP8 refuse the last three."""

    power_2_scale: bool = False
    amax_epsilon: Annotated[float, AtLeast(0)] = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass(frozen=True, repr=False)
class _Float32Scales(_Named):
    """FP8 with float32 scales. Each kind of operand may have a rounding and a least amax of its own."""

    _: KW_ONLY
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            params = getattr(self, name)
            if params and params != QParams(params.power_2_scale, params.amax_epsilon):
                raise RecipeError(f"{name}={params} of {type(self).__name__} asks for what only FP4 has")

    def _params(self, role: QuantizerRole, pow2: bool) -> tuple[bool, float]:
        """Power-of-two scales and least amax of an operand; `pow2` and 0 for one without `QParams`."""
        by_operand = {"weight": self.fp8_quant_fwd_weight, "grad_output": self.fp8_quant_bwd_grad}
        params = by_operand.get(role.tensor_type, self.fp8_quant_fwd_inp)
        return (pow2, 0.0) if params is None else (params.power_2_scale, params.amax_epsilon)


@checked()
@dataclass(frozen=True, repr=False)
class HighPrecision(Recipe):
    """Quantizes nothing: plain Inductor compiles the model."""

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return IdentityQuantizer()


@checked()
@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(_Float32Scales):
    """Per-tensor FP8 from the tensor's own amax: e4m3 forward and e5m2 gradients (HYBRID)."""

    _scaling = "current"
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    backward_override: Override = None

    def _linear(self, role: QuantizerRole) -> Quantizer:
        pow2, eps = self._params(role, self.use_power_2_scales)
        return Float8CurrentScalingQuantizer(
            self.fp8_format.dtype(role.tensor_type), force_pow_2_scales=pow2, amax_epsilon=eps
        )

    _attention = _linear


@checked(takes=_DELAYED)
@dataclass(frozen=True, repr=False)
class DelayedScaling(_Named):
    """Per-tensor FP8 with scales from the amaxes of earlier steps: no pass over the tensor before its cast.

    The state (scales and amax histories) belongs to the compiled model; see `fxquant.Backend.state_dict`. As in
    TransformerEngine there is no `backward_override` but None.
    """

    _scaling = "delayed"
    margin: float = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: Annotated[int, AtLeast(1)] = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, object], Tensor] | None = None
    reduce_amax: bool = True
    backward_override: Override = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.request()
        if self.backward_override is not None:
            raise RecipeError(
                f"DelayedScaling has no backward_override={self.backward_override!r}: Float8CurrentScaling has"
            )
        super().__post_init__()

    def request(self) -> DelayedScalingRequest:
        """The request that every linear operand gets."""
        return DelayedScalingRequest(**{f.name: getattr(self, f.name) for f in fields(DelayedScalingRequest)})

    def _linear(self, role: QuantizerRole) -> DelayedScalingRequest:
        return self.request()

    _attention = _linear


@checked()
@dataclass(frozen=True, repr=False)
class Float8RowwiseScaling(_Named):
    """torchao's rowwise FP8: one power-of-two scale for each row of each direction, e4m3 throughout."""

    _scaling = "row"
    use_power_2_scales: bool = True
    fp8_format: Format = Format.E4M3
    backward_override: Override = None

    def _linear(self, role: QuantizerRole) -> Quantizer:
        return Float8RowwiseQuantizer(
            self.fp8_format.dtype(role.tensor_type), force_pow_2_scales=self.use_power_2_scales
        )

    def _attention(self, role: QuantizerRole) -> Quantizer:
        """One scale for each head, as in torchao's attention, and a backward in high precision."""
        return Float8HeadQuantizer() if role.tensor_type in ("qkv", "s") else IdentityQuantizer()


@checked(takes=_BLOCK_OF_128)
@dataclass(frozen=True, repr=False)
class Float8BlockScaling(_Float32Scales):
    """FP8 in blocks of 128: 1x128 inputs and gradients, 128x128 weights, power-of-two scales."""

    _scaling = "block"
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: Literal[1, 2] = 1
    w_block_scaling_dim: Literal[1, 2] = 2
    grad_block_scaling_dim: Literal[1, 2] = 1
    backward_override: Override = None

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if dims.count(2) > 1:
            raise RecipeError("2D by 2D block GEMM is not supported: make one operand of each pair 1-dimensional")

    def _linear(self, role: QuantizerRole) -> Quantizer:
        dims = {"weight": self.w_block_scaling_dim, "grad_output": self.grad_block_scaling_dim}
        dim = dims.get(role.tensor_type, self.x_block_scaling_dim)
        pow2, eps = self._params(role, not self.use_f32_scales)
        return Float8BlockQuantizer(
            self.fp8_format.dtype(role.tensor_type), force_pow_2_scales=pow2, amax_epsilon=eps, block_scaling_dim=dim
        )


@checked(takes=_BLOCK_OF_32)
@dataclass(frozen=True, repr=False)
class MXFP8BlockScaling(_Named):
    """MXFP8: e8m0 scales for blocks of 32; `enable_2d_quantization` uses 32x32 tiles for weights."""

    _scaling = "mxfp8"
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    backward_override: Override = None
    margin: float = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin:
            raise RecipeError(f"the scales of MXFP8 have no margin: leave margin at 0, not {self.margin}")

    def _linear(self, role: QuantizerRole) -> Quantizer:
        tiles = self.enable_2d_quantization and role.tensor_type == "weight"
        return MXFP8Quantizer(self.fp8_format.dtype(role.tensor_type), with_2d_quantization=tiles)

    _attention = _linear


_Scope: TypeAlias = Literal["none", "weights", "activations", "all"]
"""The operands of NVFP4 that 4over6 is for."""


@checked(takes=_BLOCK_OF_16)
@dataclass(frozen=True, repr=False)
class NVFP4BlockScaling(_Named):
    """NVFP4 for all three GEMMs, by the recipe of "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).

    Inputs and gradients go through a randomized Hadamard transform before wgrad (`disable_rht`), gradients are rounded
    stochastically (`disable_stochastic_rounding`; seed and step are state, see `fxquant.Backend.state_dict`), and
    weights are scaled in 16x16 tiles, equal in both directions (`disable_2d_quantization`).

    `row_scaled_activation` gives inputs an amax for each row. `nvfp4_4over6` (``weights``, ``activations``, ``all``)
    maps the largest element of a block to 4 where that is nearer than 6, by `nvfp4_4over6_err_mode`; block scales of
    the operands in `nvfp4_4over6_e4m3_use_256` then reach 256, not 448. Gradients are never 4over6. Both need
    `disable_rht`, 4over6 `disable_stochastic_rounding` too: RecipeError otherwise.
    """

    _scaling = "nvfp4"
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: _Scope = "none"
    nvfp4_4over6_e4m3_use_256: _Scope = "all"
    nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = "MAE"
    backward_override: Override = None

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = [name for name in ("disable_rht", "disable_stochastic_rounding") if not getattr(self, name)]
        if self.nvfp4_4over6 != "none" and wanted:
            raise RecipeError(f"nvfp4_4over6 needs {' and '.join(f'{name}=True' for name in wanted)}")
        if self.row_scaled_activation and not self.disable_rht:
            raise RecipeError("row_scaled_activation needs disable_rht=True: a transformed column has no amax of a row")
        for tensor_type in LINEAR_OPERANDS:
            self._linear(QuantizerRole("linear", tensor_type))

    def _linear(self, role: QuantizerRole) -> Quantizer:
        gradient = role.tensor_type == "grad_output"
        scope = "weights" if role.tensor_type == "weight" else "activations"
        use_4over6 = not gradient and self.nvfp4_4over6 in (scope, "all")
        blocks: dict[str, Any] = {
            "nvfp4_use_4over6": use_4over6,
            "nvfp4_e4m3_max": 256 if use_4over6 and self.nvfp4_4over6_e4m3_use_256 in (scope, "all") else 448,
            "nvfp4_4over6_err_mode": self.nvfp4_4over6_err_mode,
        }
        if role.tensor_type == "weight":
            return NVFP4Quantizer(with_2d_quantization=not self.disable_2d_quantization, **blocks)
        return NVFP4Quantizer(
            with_rht=not self.disable_rht,
            with_post_rht_amax=not self.disable_rht,
            stochastic_rounding=gradient and not self.disable_stochastic_rounding,
            row_scaled_nvfp4=not gradient and self.row_scaled_activation,
            **blocks,
        )


class _WeightOnly(_Named):
    """Quantizes weights alone, rowwise; the GEMMs are emulated, and a backward sees the weight of the forward."""

    def _linear(self, role: QuantizerRole) -> Quantizer:
        if role.tensor_type != "weight":
            return IdentityQuantizer()
        return HybridQuantizer(self._weight(), IdentityQuantizer(), columnwise_source="rowwise_dequantized")

    def _weight(self) -> Quantizer:
        """The quantizer of the rowwise half of a weight."""
        raise NotImplementedError


@checked()
@dataclass(frozen=True, repr=False)
class Float8WeightOnly(_WeightOnly):
    """FP8 weights with one float32 scale a row, for serving (W8A16): half of the bytes, stored in exported programs."""

    use_power_2_scales: bool = False

    def _weight(self) -> Quantizer:
        return Float8RowwiseQuantizer(force_pow_2_scales=self.use_power_2_scales)


@checked()
@dataclass(frozen=True, repr=False)
class NVFP4WeightOnly(_WeightOnly):
    """NVFP4 weights in blocks of 16, for serving (W4A16): about a quarter of the bytes, stored in exported programs."""

    def _weight(self) -> Quantizer:
        return NVFP4Quantizer()


RECIPES.update(
    {
        "high_precision": HighPrecision(),
        "current_scaling": Float8CurrentScaling(),
        "delayed_scaling": DelayedScaling(),
        "rowwise": Float8RowwiseScaling(),
        "float8_blockwise": Float8BlockScaling(),
        "mxfp8": MXFP8BlockScaling(),
        "nvfp4": NVFP4BlockScaling(),
        "weight_only_fp8": Float8WeightOnly(),
        "weight_only_nvfp4": NVFP4WeightOnly(),
    }
)
FOREIGN.update({type(recipe).__name__: name for name, recipe in RECIPES.items()})
