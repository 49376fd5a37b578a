"""Recipes: which quantizer each role gets.

A recipe is a value: it compares, hashes and prints by its settings, and can be copied and pickled. `get("mxfp8")`
gives a named one; `CustomRecipe(qfactory=...)` asks a function of the user's, see also `fxquant.factories`.
"""

from __future__ import annotations

import copyreg
import difflib
import functools
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor

from fxquant.errors import RecipeError
from fxquant.quantizers import (
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8HeadQuantizer,
    Float8Quantizer,
    Float8RowwiseQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    value_text,
)
from fxquant.quantizers import Format as Format
from fxquant.roles import Direction, QuantizerRole

if TYPE_CHECKING:
    from typing_extensions import Self

QuantizerFactory = Callable[[QuantizerRole], Quantizer | DelayedScalingRequest]
Answer: TypeAlias = "Quantizer | DelayedScalingRequest | Recipe | str | QuantizerFactory"
"""What a rule can hold: an answer, or whom to ask for it."""


def _is_linear(role: QuantizerRole) -> bool:
    return role.module_type in ("linear", "grouped_linear")


class Recipe:
    """Base of all recipes. `quantizer(role)` answers; the boundary roles (output, grad_input) are never asked for."""

    only_profitable: bool = False
    """Whether layers that are estimated to be slower quantized stay in high precision; see `auto`."""

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        """The quantizer of a role. Raises RecipeError when a user's factory gives none."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A text that is equal for equal recipes, in every process."""
        return value_text(self)

    def __repr__(self) -> str:
        return value_text(self)

    def __copy__(self) -> Self:
        return self  # nothing in a recipe changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        for name, value in vars(self).items():
            if callable(value):
                _check_importable(f"{type(self).__name__} with {name}={value_text(value)}", value)
        return copyreg.__newobj__, (type(self),), vars(self)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return next((name for name, recipe in RECIPES.items() if recipe == self), self.fingerprint())

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        """The parts of the recipe that none of these roles reached."""
        return []

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is delayed scaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is per-tensor current scaling."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether tensors have one scale, from this step or from earlier ones."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is FP8 block scaling."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether a factory of the user's decides."""
        return issubclass(cls, CustomRecipe)

    @classmethod
    def fp8(cls) -> bool:
        """Whether this is a named recipe whose elements have 8 bits, whatever their scaling."""
        rowwise = issubclass(cls, Float8RowwiseScaling)
        return rowwise or cls.float8_per_tensor_scaling() or cls.float8_block_scaling() or cls.mxfp8()

    @classmethod
    def block_scaling(cls) -> bool:
        """Whether this is a named recipe with scales for blocks of a tensor: FP8 blocks, MXFP8 or NVFP4."""
        return cls.float8_block_scaling() or cls.mxfp8() or cls.nvfp4()


def _check_importable(what: str, value: object) -> None:
    try:
        pickle.dumps(value)
    except Exception as error:  # pickle raises AttributeError, TypeError or PicklingError
        raise RecipeError(
            f"{what} cannot be pickled: {error}. Define the function with def at the top level of a module, or make "
            "the factory of Rules"
        ) from error


def _reject_e5m2(fp8_format: Format, name: str) -> None:
    if fp8_format is Format.E5M2:
        raise RecipeError(f"{name} does not support pure E5M2: use Format.E4M3 or Format.HYBRID")


_NO_FP8_MHA = "fp8_mha=True is not supported: no FP8 tensor leaves a layer. fp8_dpa=True is for attention"


@dataclass(frozen=True, repr=False)
class _WithAttention(Recipe):
    """TransformerEngine's keywords for FP8 attention, which named recipes keep in high precision without `fp8_dpa`."""

    _: KW_ONLY
    fp8_dpa: bool = False
    fp8_mha: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.fp8_mha:
            raise RecipeError(_NO_FP8_MHA)
        if self.fp8_dpa and type(self)._attention is _WithAttention._attention:
            raise RecipeError(
                f"{type(self).__name__} keeps attention in high precision: its format is not for attention, so "
                "fp8_dpa=True is not supported. CustomRecipe can have another one for module_type 'dpa'"
            )

    def _attention(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        """The quantizer of a slot of an attention, or of a hint for its results."""
        raise NotImplementedError


def _is_attention(role: QuantizerRole) -> bool:
    hint = not role.module_type and role.name.endswith(("dpa_output", "dpa_grad_input"))
    return role.module_type == "dpa" or hint


@dataclass(frozen=True, repr=False)
class _LinearRecipe(_WithAttention):
    """Quantizes linear layers, and attention with `fp8_dpa`.

    `backward_override` runs the backward in high precision: ``high_precision`` from the original operands,
    ``dequantized`` from the dequantized rowwise halves that the forward used.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_override(self._override, type(self).__name__)

    @property
    def _override(self) -> str | None:
        override: str | None = getattr(self, "backward_override", None)
        return override

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        if self.fp8_dpa and _is_attention(role):
            return self._attention(role)
        if not _is_linear(role):
            return IdentityQuantizer()
        return _override_backward(self._linear(role), role, self._override)

    def _linear(self, role: QuantizerRole) -> Quantizer:
        """The quantizer of a linear layer's operand."""
        raise NotImplementedError


def _override_backward(quantizer: Quantizer, role: QuantizerRole, override: str | None) -> Quantizer:
    """The quantizer for a forward as before and a backward in high precision."""
    if override is None:
        return quantizer
    if role.tensor_type == "grad_output":
        return IdentityQuantizer()
    source: Literal["original", "rowwise_dequantized"] = (
        "original" if override == "high_precision" else "rowwise_dequantized"
    )
    return HybridQuantizer(quantizer.side(Direction.ROWWISE), IdentityQuantizer(), columnwise_source=source)


def _check_override(override: str | None, name: str) -> None:
    if override not in (None, "high_precision", "dequantized"):
        raise RecipeError(
            f"backward_override of {name} must be None, 'high_precision' or 'dequantized', not {override!r}"
        )


@dataclass(frozen=True)
class QParams:
    """How one kind of operand is quantized: TransformerEngine's name for the settings of a recipe's quantizer.

    The last three are for FP4; recipes of FP8 refuse them.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass(frozen=True, repr=False)
class _Float32Scales(_LinearRecipe):
    """FP8 with float32 scales, whose rounding and least amax each kind of operand may have for itself."""

    _: KW_ONLY
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            params = getattr(self, name)
            if params and (
                params.random_hadamard_transform or params.stochastic_rounding or params.fp4_2d_quantization
            ):
                raise RecipeError(f"{name}={params} of {type(self).__name__} asks for what only FP4 has")

    def _params(self, role: QuantizerRole, pow2: bool) -> tuple[bool, float]:
        """Power-of-two scales and least amax of an operand, `pow2` and 0 unless its own are given."""
        given = {"weight": self.fp8_quant_fwd_weight, "grad_output": self.fp8_quant_bwd_grad}
        params = given.get(role.tensor_type, self.fp8_quant_fwd_inp)
        return (pow2, 0.0) if params is None else (params.power_2_scale, params.amax_epsilon)


@dataclass(frozen=True, repr=False)
class HighPrecision(Recipe):
    """Quantizes nothing: the compilation is the one of plain Inductor."""

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return IdentityQuantizer()


@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(_Float32Scales):
    """Per-tensor FP8 from the tensor's own amax: e4m3 forward and e5m2 gradients (HYBRID)."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    backward_override: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _reject_e5m2(self.fp8_format, type(self).__name__)

    def _linear(self, role: QuantizerRole) -> Quantizer:
        pow2, eps = self._params(role, self.use_power_2_scales)
        return Float8CurrentScalingQuantizer(
            self.fp8_format.dtype(role.tensor_type), force_pow_2_scales=pow2, amax_epsilon=eps
        )

    _attention = _linear


@dataclass(frozen=True, repr=False)
class DelayedScaling(_WithAttention):
    """Per-tensor FP8 with scales from the amaxes of earlier steps: no pass over the tensor before its cast.

    The state (scales and amax histories) belongs to the compiled model; see `fxquant.Backend.state_dict`. As in
    TransformerEngine there is no `backward_override` but None.
    """

    margin: float = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, object], Tensor] | None = None
    reduce_amax: bool = True
    backward_override: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backward_override is not None:
            raise RecipeError(
                f"DelayedScaling has no backward_override={self.backward_override!r}: Float8CurrentScaling has"
            )
        self.request()

    def request(self) -> DelayedScalingRequest:
        """The request that every linear operand gets."""
        return DelayedScalingRequest(**{f.name: getattr(self, f.name) for f in fields(DelayedScalingRequest)})

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        if self.fp8_dpa and _is_attention(role):
            return self._attention(role)
        return self.request() if _is_linear(role) else IdentityQuantizer()

    def _attention(self, role: QuantizerRole) -> DelayedScalingRequest:
        return self.request()


@dataclass(frozen=True, repr=False)
class Float8RowwiseScaling(_LinearRecipe):
    """torchao's rowwise FP8: one power-of-two scale for each row of each direction, e4m3 throughout."""

    use_power_2_scales: bool = True
    fp8_format: Format = Format.E4M3
    backward_override: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _reject_e5m2(self.fp8_format, type(self).__name__)

    def _linear(self, role: QuantizerRole) -> Quantizer:
        return Float8RowwiseQuantizer(
            self.fp8_format.dtype(role.tensor_type), force_pow_2_scales=self.use_power_2_scales
        )

    def _attention(self, role: QuantizerRole) -> Quantizer:
        """One scale for each head, as in torchao's attention, and a backward in high precision."""
        return Float8HeadQuantizer() if role.tensor_type in ("qkv", "s") else IdentityQuantizer()


@dataclass(frozen=True, repr=False)
class Float8BlockScaling(_Float32Scales):
    """FP8 in blocks of 128: 1x128 inputs and gradients, 128x128 weights, power-of-two scales."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    backward_override: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _reject_e5m2(self.fp8_format, type(self).__name__)
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        x, w, grad = dims
        if any(dim not in (1, 2) for dim in dims):
            raise RecipeError(f"block scaling dims must be 1 or 2, not {dims}")
        if (x, w) == (2, 2) or (grad, w) == (2, 2) or (x, grad) == (2, 2):
            raise RecipeError("2D by 2D block GEMM is not supported: make one operand of each pair 1-dimensional")

    def _linear(self, role: QuantizerRole) -> Quantizer:
        dim = {
            "weight": self.w_block_scaling_dim,
            "grad_output": self.grad_block_scaling_dim,
        }.get(role.tensor_type, self.x_block_scaling_dim)
        pow2, eps = self._params(role, not self.use_f32_scales)
        return Float8BlockQuantizer(
            self.fp8_format.dtype(role.tensor_type), force_pow_2_scales=pow2, amax_epsilon=eps, block_scaling_dim=dim
        )


@dataclass(frozen=True, repr=False)
class MXFP8BlockScaling(_LinearRecipe):
    """MXFP8: e8m0 scales for blocks of 32; `enable_2d_quantization` uses 32x32 tiles for weights."""

    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    backward_override: str | None = None
    margin: float = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin:
            raise RecipeError(f"the scales of MXFP8 have no margin: leave margin at 0, not {self.margin}")
        _reject_e5m2(self.fp8_format, type(self).__name__)

    def _linear(self, role: QuantizerRole) -> Quantizer:
        tiles = self.enable_2d_quantization and role.tensor_type == "weight"
        return MXFP8Quantizer(self.fp8_format.dtype(role.tensor_type), with_2d_quantization=tiles)

    _attention = _linear


_SCOPES = ("none", "weights", "activations", "all")
"""The operands of NVFP4 that 4over6 is for."""


@dataclass(frozen=True, repr=False)
class NVFP4BlockScaling(_LinearRecipe):
    """NVFP4 for all three GEMMs, by the recipe of "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).

    Inputs and gradients go through a randomized Hadamard transform before wgrad (`disable_rht`), gradients are rounded
    stochastically (`disable_stochastic_rounding`; seed and step are state, see `fxquant.Backend.state_dict`), and
    weights are scaled in 16x16 tiles, equal in both directions (`disable_2d_quantization`).

    `row_scaled_activation` gives inputs an amax for each row. `nvfp4_4over6` (``weights``, ``activations``, ``all``)
    maps the largest element of a block to 4 where that is nearer than 6, by `nvfp4_4over6_err_mode`; where
    `nvfp4_4over6_e4m3_use_256` names them, block scales of these operands reach 256 in the place of 448. Gradients are
    never 4over6. Both need `disable_rht`, 4over6 `disable_stochastic_rounding` too: RecipeError otherwise.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    backward_override: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            if getattr(self, name) not in _SCOPES:
                raise RecipeError(f"{name} must be one of {', '.join(_SCOPES)}, not {getattr(self, name)!r}")
        wanted = [name for name in ("disable_rht", "disable_stochastic_rounding") if not getattr(self, name)]
        if self.nvfp4_4over6 != "none" and wanted:
            raise RecipeError(f"nvfp4_4over6 needs {' and '.join(f'{name}=True' for name in wanted)}")
        if self.row_scaled_activation and not self.disable_rht:
            raise RecipeError("row_scaled_activation needs disable_rht=True: a transformed column has no amax of a row")
        for tensor_type in ("input", "weight", "grad_output"):
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


def _hint(role: QuantizerRole) -> str:
    return ". With CustomRecipe(fp8_dpa=False) it is not asked about attention" if _is_attention(role) else ""


def _checked(answer: object, asked: str, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
    """An answer for a role, or an error that names the role and who was asked."""
    if answer is None:
        raise RecipeError(
            f"{asked} returned None for role {role}: return an IdentityQuantizer() to keep it in high precision"
            f"{_hint(role)}"
        )
    if not isinstance(answer, (Quantizer, DelayedScalingRequest)):
        raise RecipeError(f"{asked} returned a {type(answer).__name__} for role {role}: a Quantizer is expected")
    return answer


def ask(answer: Answer, role: QuantizerRole, asked: str = "qfactory") -> Quantizer | DelayedScalingRequest:
    """What a quantizer, request, recipe or factory answers for a role.

    Raises RecipeError, naming the role and what was `asked`, for None and whatever else is no quantizer, and when the
    factory itself fails, as a HybridQuantizer with a part missing does, or a dictionary of answers.
    """
    if isinstance(answer, (Quantizer, DelayedScalingRequest)):
        return answer
    if isinstance(answer, (Recipe, str)):
        return resolve(answer).quantizer(role)
    try:
        made = answer(role)
    except Exception as error:
        if isinstance(error, RecipeError) and str(role) in str(error):
            raise
        what = str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__} {error}"
        raise RecipeError(f"{asked} failed for role {role}: {what}{_hint(role)}") from error
    return _checked(made, asked, role)


@dataclass(frozen=True, repr=False, eq=False)
class CustomRecipe(Recipe):
    """Asks `qfactory(role)` for every operand.

    The factory returns a quantizer for each role it is asked about, `IdentityQuantizer()` to keep one in high
    precision; None is refused. It must give equal answers to equal roles. Two custom recipes are equal when their
    factories are; partials of one function with equal arguments are equal too.

    `fp8_dpa`: None quantizes the attention for which the factory returns FP8 (`module_type` ``dpa``), False asks for
    none, and True refuses what is not for attention. `backward_override`: as on the named recipes, on top of what the
    factory answers for linears. `fp8_format` tells readers what the factory makes, and
    `quantization_alignment` modules that pad the rows of experts how far; fxquant needs no padding and uses neither.
    """

    qfactory: QuantizerFactory
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool | None = None
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        if not callable(self.qfactory):
            raise RecipeError(f"qfactory must be callable with a QuantizerRole, not {type(self.qfactory).__name__}")
        if self.fp8_mha:
            raise RecipeError(_NO_FP8_MHA)
        _check_override(self.backward_override, "CustomRecipe")
        if self.quantization_alignment <= 0:
            raise RecipeError(f"quantization_alignment must be positive, not {self.quantization_alignment}")

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        if role.module_type == "dpa" and self.fp8_dpa is False:
            return IdentityQuantizer()
        made = ask(self.qfactory, role)
        if self.backward_override is None or _is_attention(role):
            return made
        if isinstance(made, DelayedScalingRequest):
            raise RecipeError(
                f"backward_override={self.backward_override!r} does not go with delayed scaling (role {role})"
            )
        return _override_backward(made, role, self.backward_override)

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        return self.qfactory.unused(roles) if isinstance(self.qfactory, Rules) else []

    def _key(self) -> tuple[Any, ...]:
        return tuple(_by_value(getattr(self, f.name)) for f in fields(self))

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, CustomRecipe) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


def _by_value(value: Any) -> Any:
    """Partials do not compare by value; this does, unless an argument cannot be hashed."""
    if not isinstance(value, functools.partial):
        return value
    key = (functools.partial, value.func, value.args, tuple(sorted(value.keywords.items(), key=lambda item: item[0])))
    try:
        hash(key)
    except TypeError:
        return value
    return key


@dataclass(frozen=True, repr=False)
class Rule:
    """An answer and the roles it is for. Each given pattern must match the whole of its field.

    The answer is a quantizer, or a recipe (or its name) or a factory, which are asked in their turn. `name` and the
    others are regular expressions: ``Rule(IdentityQuantizer(), name=r"lm_head|.*\\.router")``.
    """

    quantizer: Answer
    name: str | None = None
    module_type: str | None = None
    tensor_type: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantizer", _answer(self.quantizer, f"the rule for {self}"))
        for key in _KEYS:
            try:
                re.compile(getattr(self, key) or "")
            except re.error as error:
                raise RecipeError(
                    f"{key}={getattr(self, key)!r} of a rule is not a regular expression: {error}"
                ) from error

    def matches(self, role: QuantizerRole) -> bool:
        """Whether every given pattern matches."""
        patterns = [(getattr(self, key), getattr(role, key)) for key in _KEYS]
        return all(pattern is None or re.fullmatch(pattern, value) for pattern, value in patterns)

    def __str__(self) -> str:
        return ", ".join(f"{key}={value!r}" for key in _KEYS if (value := getattr(self, key)) is not None) or "any role"

    def __repr__(self) -> str:
        return value_text(self)


_KEYS = ("name", "module_type", "tensor_type")


def _answer(answer: Answer, whose: str) -> Answer:
    """An answer of Rules with its names resolved. Raises RecipeError for what cannot answer."""
    if isinstance(answer, str):
        answer = resolve(answer)
    if isinstance(answer, AutoRecipe):
        raise RecipeError(
            f"{whose} is {answer}, which weighs whole layers: wrap the whole recipe, auto(CustomRecipe(...))"
        )
    if not isinstance(answer, (Quantizer, DelayedScalingRequest, Recipe)) and not callable(answer):
        hint = ": IdentityQuantizer() keeps operands in high precision" if answer is None else ""
        raise RecipeError(f"{whose} must have a quantizer, a recipe or a factory, not a {type(answer).__name__}{hint}")
    return answer


@dataclass(frozen=True, repr=False)
class Rules:
    """A factory made of rules: the first that matches answers, `default` where none does.

    `default` is whatever a rule can have, a recipe's name for example; a report names the rules that matched nothing.
    """

    rules: Sequence[Rule] = field(default=())
    default: Answer = "high_precision"

    def __post_init__(self) -> None:
        for i, rule in enumerate(self.rules):
            if not isinstance(rule, Rule):
                raise RecipeError(f"rule {i} is a {type(rule).__name__}, not a Rule(quantizer, name=...)")
        object.__setattr__(self, "rules", tuple(self.rules))
        object.__setattr__(self, "default", _answer(self.default, "the default of Rules"))

    def _index(self, role: QuantizerRole) -> int | None:
        return next((i for i, rule in enumerate(self.rules) if rule.matches(role)), None)

    def __call__(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        index = self._index(role)
        if index is not None:
            return ask(self.rules[index].quantizer, role, f"rule {index} ({self.rules[index]})")
        return ask(self.default, role, "the default of Rules")

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        """The rules that no role reached, with those of rules inside of rules."""
        reached = [(self._index(role), role) for role in roles]
        unused = []
        for i, (rule, answer) in enumerate([*((r, r.quantizer) for r in self.rules), (None, self.default)]):
            here = [role for index, role in reached if index == (i if rule else None)]
            if rule is not None and not here:
                unused.append(f"rule {i}: {rule}")
            elif isinstance(answer, Rules):
                unused += [f"{f'rule {i}' if rule else 'default'} > {text}" for text in answer.unused(here)]
        return unused

    def __repr__(self) -> str:
        return value_text(self)


@dataclass(frozen=True, repr=False)
class AutoRecipe(Recipe):
    """Another recipe without the layers that `fxquant.cost` estimates to be slower quantized than in high precision.

    They are reported as NOT_PROFITABLE, with the estimate. Attention is left out as a whole, and always where no FP8
    kernel of a GPU takes it; of all else nothing is left out on a device without measured rates.
    """

    recipe: Recipe
    only_profitable = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", resolve(self.recipe))

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        return self.recipe.quantizer(role)

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        return self.recipe.unused(roles)

    def __str__(self) -> str:
        return f"auto({self.recipe})"


def auto(recipe: Recipe | str) -> AutoRecipe:
    """The recipe for the layers that it makes faster; others stay in high precision, see `AutoRecipe`.

    Also by name, ``"auto(mxfp8)"``. Raises RecipeError for an unknown recipe.
    """
    inner = resolve(recipe)
    return inner if isinstance(inner, AutoRecipe) else AutoRecipe(inner)


RECIPES: dict[str, Recipe] = {
    "high_precision": HighPrecision(),
    "current_scaling": Float8CurrentScaling(),
    "delayed_scaling": DelayedScaling(),
    "rowwise": Float8RowwiseScaling(),
    "float8_blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


def get(name: str) -> Recipe:
    """A named recipe, ``mxfp8`` or ``auto(mxfp8)``. Raises RecipeError, with the known names, for another one."""
    if wrapped := re.fullmatch(r"auto\((.*)\)", name):
        return auto(wrapped[1])
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise RecipeError(f"unknown recipe {name!r}{hint} Known recipes: {', '.join(RECIPES)}")
    return RECIPES[name]


def resolve(recipe: Recipe | str) -> Recipe:
    """A recipe from itself or its name."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return get(recipe)
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise RecipeError(f"{recipe.__name__} is a class of recipes: pass an instance, {recipe.__name__}()")
    if isinstance(recipe, Quantizer):
        raise RecipeError("a quantizer is not a recipe: pass CustomRecipe(qfactory=...) with a factory that returns it")
    if callable(recipe):
        raise RecipeError("a factory is not a recipe by itself: pass CustomRecipe(qfactory=...)")
    raise RecipeError(f"a recipe is a Recipe or one of {', '.join(RECIPES)}, not a {type(recipe).__name__}")


def of_operands(recipe: Recipe) -> dict[str, Quantizer]:
    """The quantizers of a linear's operands; delayed scaling has those of its format with a slot of state."""
    answers = {
        operand: recipe.quantizer(QuantizerRole("linear", operand)) for operand in ("input", "weight", "grad_output")
    }
    return {
        operand: Float8Quantizer(answer.fp8_format.dtype(operand), 0)
        if isinstance(answer, DelayedScalingRequest)
        else answer
        for operand, answer in answers.items()
    }


def runs_as(recipe: Recipe, place: str) -> str:
    """``native`` if ``Hopper`` or ``the CPU`` has instructions for the GEMMs of all its formats, else ``emulated``."""
    formats = [quantizer.spec(direction).row for quantizer in of_operands(recipe).values() for direction in Direction]
    kinds = {(row.hopper if place == "Hopper" else row.cpu).partition(":")[0] for row in formats}
    return "emulated" if "emulated" in kinds else "native"
