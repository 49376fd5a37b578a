"""Recipes: which quantizer each role gets.

A recipe is a value: it compares, hashes and prints by its settings. `get("mxfp8")` gives a named one;
`CustomRecipe(qfactory=...)` asks a function of the user's.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from fxquant.errors import RecipeError
from fxquant.quantizers import (
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowwiseQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fxquant.quantizers import Format as Format
from fxquant.roles import QuantizerRole

QuantizerFactory = Callable[[QuantizerRole], Quantizer | DelayedScalingRequest]


def _is_linear(role: QuantizerRole) -> bool:
    return role.module_type in ("linear", "grouped_linear")


class Recipe:
    """Base of all recipes. `quantizer(role)` answers; the boundary roles (output, grad_input) are never asked for."""

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        """The quantizer of a role. Raises RecipeError when a user's factory gives none."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A text that is equal for equal recipes, in every process."""
        return repr(self)

    def __str__(self) -> str:
        return next((name for name, recipe in RECIPES.items() if recipe == self), self.fingerprint())

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        """The parts of the recipe that none of these roles reached."""
        return []

    def delayed(self) -> bool:
        """Whether this is delayed scaling."""
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        """Whether this is per-tensor current scaling."""
        return isinstance(self, Float8CurrentScaling)

    def float8_block_scaling(self) -> bool:
        """Whether this is FP8 block scaling."""
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self) -> bool:
        """Whether this is MXFP8."""
        return isinstance(self, MXFP8BlockScaling)

    def nvfp4(self) -> bool:
        """Whether this is NVFP4."""
        return isinstance(self, NVFP4BlockScaling)

    def custom(self) -> bool:
        """Whether a factory of the user's decides."""
        return isinstance(self, CustomRecipe)


def _reject_e5m2(fp8_format: Format, name: str) -> None:
    if fp8_format is Format.E5M2:
        raise RecipeError(f"{name} does not support pure E5M2: use Format.E4M3 or Format.HYBRID")


class _LinearRecipe(Recipe):
    """Quantizes linear layers and nothing else.

    `backward_override` runs the backward in high precision: ``high_precision`` from the original operands,
    ``dequantized`` from the dequantized rowwise halves that the forward used.
    """

    backward_override: str | None

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        if not _is_linear(role):
            return IdentityQuantizer()
        quantizer = self._linear(role)
        if self.backward_override is None:
            return quantizer
        if role.tensor_type == "grad_output":
            return IdentityQuantizer()
        source: Any = "original" if self.backward_override == "high_precision" else "rowwise_dequantized"
        return HybridQuantizer(quantizer, IdentityQuantizer(), columnwise_source=source)

    def _linear(self, role: QuantizerRole) -> Quantizer:
        """The quantizer of a linear layer's operand."""
        raise NotImplementedError


def _check_override(override: str | None, name: str) -> None:
    if override not in (None, "high_precision", "dequantized"):
        raise RecipeError(
            f"backward_override of {name} must be None, 'high_precision' or 'dequantized', not {override!r}"
        )


@dataclass(frozen=True)
class HighPrecision(Recipe):
    """Quantizes nothing: the compilation is the one of plain Inductor."""

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return IdentityQuantizer()


@dataclass(frozen=True)
class Float8CurrentScaling(_LinearRecipe):
    """Per-tensor FP8 from the tensor's own amax: e4m3 forward and e5m2 gradients (HYBRID)."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check_override(self.backward_override, type(self).__name__)
        _reject_e5m2(self.fp8_format, type(self).__name__)

    def _linear(self, role: QuantizerRole) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            self.fp8_format.dtype(role.tensor_type), force_pow_2_scales=self.use_power_2_scales
        )


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Per-tensor FP8 with scales from the amaxes of earlier steps: no pass over the tensor before its cast.

    The state (scales and amax histories) belongs to the compiled model; see `fxquant.Backend.state_dict`.
    """

    margin: float = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, object], Tensor] | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        self.request()

    def request(self) -> DelayedScalingRequest:
        """The request that every linear operand gets."""
        return DelayedScalingRequest(**{f.name: getattr(self, f.name) for f in fields(self)})

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        return self.request() if _is_linear(role) else IdentityQuantizer()


@dataclass(frozen=True)
class Float8RowwiseScaling(_LinearRecipe):
    """torchao's rowwise FP8: one power-of-two scale for each row of each direction, e4m3 throughout."""

    use_power_2_scales: bool = True
    fp8_format: Format = Format.E4M3
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check_override(self.backward_override, type(self).__name__)
        _reject_e5m2(self.fp8_format, type(self).__name__)

    def _linear(self, role: QuantizerRole) -> Quantizer:
        return Float8RowwiseQuantizer(
            self.fp8_format.dtype(role.tensor_type), force_pow_2_scales=self.use_power_2_scales
        )


@dataclass(frozen=True)
class Float8BlockScaling(_LinearRecipe):
    """FP8 in blocks of 128: 1x128 inputs and gradients, 128x128 weights, power-of-two scales."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check_override(self.backward_override, type(self).__name__)
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
        return Float8BlockQuantizer(
            self.fp8_format.dtype(role.tensor_type), force_pow_2_scales=not self.use_f32_scales, block_scaling_dim=dim
        )


@dataclass(frozen=True)
class MXFP8BlockScaling(_LinearRecipe):
    """MXFP8: e8m0 scales for blocks of 32; `enable_2d_quantization` uses 32x32 tiles for weights."""

    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check_override(self.backward_override, type(self).__name__)
        _reject_e5m2(self.fp8_format, type(self).__name__)

    def _linear(self, role: QuantizerRole) -> Quantizer:
        tiles = self.enable_2d_quantization and role.tensor_type == "weight"
        return MXFP8Quantizer(self.fp8_format.dtype(role.tensor_type), with_2d_quantization=tiles)


_SCOPES = ("none", "weights", "activations", "all")
"""The operands of NVFP4 that 4over6 is for."""


@dataclass(frozen=True)
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
        _check_override(self.backward_override, type(self).__name__)
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


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Asks `qfactory(role)` for every operand.

    The factory returns a quantizer for each role it is asked about, `IdentityQuantizer()` to keep one in high
    precision; None is refused. It must give equal answers to equal roles.
    """

    qfactory: QuantizerFactory

    def __post_init__(self) -> None:
        if not callable(self.qfactory):
            raise RecipeError(f"qfactory must be callable with a QuantizerRole, not {type(self.qfactory).__name__}")

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        made = self.qfactory(role)
        if made is None:
            raise RecipeError(
                f"qfactory returned None for role {role}: return an IdentityQuantizer() to keep it in high precision"
            )
        if not isinstance(made, (Quantizer, DelayedScalingRequest)):
            raise RecipeError(f"qfactory returned a {type(made).__name__} for role {role}: a Quantizer is expected")
        return made

    def fingerprint(self) -> str:
        return f"CustomRecipe({_callable_text(self.qfactory)})"

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        return self.qfactory.unused(roles) if isinstance(self.qfactory, Rules) else []


def _callable_text(call: object) -> str:
    """A name for a factory that is the same in every process; what it decided is in the graph itself."""
    if isinstance(call, functools.partial):
        return f"partial({_callable_text(call.func)}, {call.args!r}, {sorted(call.keywords.items())!r})"
    if isinstance(call, Rules):
        return repr(call)
    owner = call if hasattr(call, "__qualname__") else type(call)
    return f"{owner.__module__}.{getattr(owner, '__qualname__', type(call).__name__)}"


@dataclass(frozen=True)
class Rule:
    """A quantizer and the roles it is for. Each given pattern must match the whole of its field.

    `name` and the others are regular expressions: ``Rule(IdentityQuantizer(), name=r"lm_head|.*\\.router")``.
    """

    quantizer: Quantizer | DelayedScalingRequest
    name: str | None = None
    module_type: str | None = None
    tensor_type: str | None = None

    def matches(self, role: QuantizerRole) -> bool:
        """Whether every given pattern matches."""
        keys = ("name", "module_type", "tensor_type")
        patterns = [(getattr(self, key), getattr(role, key)) for key in keys]
        return all(pattern is None or re.fullmatch(pattern, value) for pattern, value in patterns)

    def __str__(self) -> str:
        keys = ("name", "module_type", "tensor_type")
        return ", ".join(f"{key}={value!r}" for key in keys if (value := getattr(self, key)) is not None) or "any role"


@dataclass(frozen=True)
class Rules:
    """A factory made of rules: the first that matches answers, `default` where none does.

    `default` is a recipe or its name; a report names the rules that matched nothing.
    """

    rules: Sequence[Rule] = field(default=())
    default: Recipe | str = "high_precision"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        object.__setattr__(self, "default", resolve(self.default))

    def _index(self, role: QuantizerRole) -> int | None:
        return next((i for i, rule in enumerate(self.rules) if rule.matches(role)), None)

    def __call__(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        index = self._index(role)
        if index is not None:
            return self.rules[index].quantizer
        assert isinstance(self.default, Recipe)
        return self.default.quantizer(role)

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        """The rules that no role reached."""
        used = {self._index(role) for role in roles}
        return [f"rule {i}: {rule}" for i, rule in enumerate(self.rules) if i not in used]


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
    """A named recipe. Raises RecipeError, with the known names, for another one."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RecipeError(f"unknown recipe {name!r}{hint} Known recipes: {', '.join(RECIPES)}")
    return RECIPES[name]


def resolve(recipe: Recipe | str) -> Recipe:
    """A recipe from itself or its name."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return get(recipe)
    if callable(recipe):
        raise RecipeError("a factory is not a recipe by itself: pass CustomRecipe(qfactory=...)")
    raise RecipeError(f"a recipe is a Recipe or one of {', '.join(RECIPES)}, not a {type(recipe).__name__}")
