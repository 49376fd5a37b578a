"""Quantizer factories: TransformerEngine's library and zoo under its names, and functions that compose one's own.

    CustomRecipe(qfactory=fxquant.factories.mxfp8_fwd_nvfp4_bwd)
    CustomRecipe(qfactory=first_and_last(factories.nvfp4, first=2, last=4, layers=model))

A factory answers a `QuantizerRole`. The library answers every role, attention's and None included, as
TransformerEngine's does; a product of two activations outside attention (`matmul`), which TransformerEngine does not
have, stays in high precision. ``mxfp8_factory``, TransformerEngine's spelling, is `mxfp8`, and so on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from fxquant.checks import article, checked, did_you_mean
from fxquant.errors import RecipeError
from fxquant.quantizers import (
    BlockQuantizer,
    DelayedScalingRequest,
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Format,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    value_text,
)
from fxquant.recipes import Answer, QuantizerFactory, Rule, Rules, ask
from fxquant.roles import QuantizerRole

FACTORIES: dict[str, QuantizerFactory] = {}
"""The library, by name."""


A = TypeVar("A", bound=Quantizer | DelayedScalingRequest)


def _library(function: Callable[[QuantizerRole], A]) -> Callable[[QuantizerRole | None], A | IdentityQuantizer]:
    """Makes a function of linear and attention roles a factory of the library."""

    @functools.wraps(function)
    def factory(role: QuantizerRole | None) -> A | IdentityQuantizer:
        role = role or QuantizerRole()
        _check_role(function.__name__, role)
        return IdentityQuantizer() if role.module_type == "matmul" else function(role)

    FACTORIES[function.__name__] = factory
    return factory


def _check_role(name: str, role: object) -> None:
    if isinstance(role, str):
        raise RecipeError(
            f"fxquant.factories.{name} takes a role, such as QuantizerRole('linear', 'input'), not {role!r}"
        )


def _is_linear(role: QuantizerRole, tensor_type: str) -> bool:
    return role.module_type in ("linear", "grouped_linear") and role.tensor_type == tensor_type


def _dequantized(row: Quantizer, column: Quantizer) -> HybridQuantizer:
    """A quantizer whose backward sees the values that the forward multiplied."""
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source="rowwise_dequantized")


def _nvfp4(**settings: Any) -> NVFP4Quantizer:
    return NVFP4Quantizer(fp4_dtype=DType.kFloat4E2M1, **settings)


@_library
def high_precision(role: QuantizerRole) -> IdentityQuantizer:
    """Quantizes nothing."""
    return IdentityQuantizer()


@_library
def delayed_scaling(role: QuantizerRole) -> DelayedScalingRequest:
    """Per-tensor FP8 with scales from earlier steps."""
    return DelayedScalingRequest()


@_library
def current_scaling(role: QuantizerRole) -> Float8CurrentScalingQuantizer:
    """Per-tensor FP8 from the tensor's own amax: e4m3, and e5m2 for grad_output."""
    return Float8CurrentScalingQuantizer(fp8_dtype=Format.HYBRID.dtype(role.tensor_type))


@_library
def float8_block_scaling(role: QuantizerRole) -> Float8BlockQuantizer:
    """FP8 with a scale for 128 elements, or a 128x128 tile of a weight."""
    return Float8BlockQuantizer(block_scaling_dim=2 if _is_linear(role, "weight") else 1)


@_library
def mxfp8(role: QuantizerRole) -> MXFP8Quantizer:
    """MXFP8 in e4m3."""
    return MXFP8Quantizer()


@_library
def nvfp4(role: QuantizerRole) -> NVFP4Quantizer:
    """NVFP4: 16x16 tiles for weights, the Hadamard transform for the rest, stochastic rounding of gradients."""
    if _is_linear(role, "weight"):
        return _nvfp4(with_2d_quantization=True)
    if _is_linear(role, "grad_output"):
        return _nvfp4(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True)
    return _nvfp4(with_rht=True, with_post_rht_amax=True)


@_library
def high_precision_fwd_mxfp8_bwd(role: QuantizerRole) -> Quantizer:
    """A forward in high precision, and MXFP8 for both GEMMs of the backward."""
    if _is_linear(role, "grad_output"):
        return MXFP8Quantizer()
    return HybridQuantizer(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=MXFP8Quantizer())


@_library
def mxfp8_fwd_high_precision_bwd(role: QuantizerRole) -> Quantizer:
    """MXFP8 forward; the backward in high precision, of the values that the forward multiplied.

    The bits of ``MXFP8BlockScaling(backward_override="dequantized")``.
    """
    if _is_linear(role, "grad_output"):
        return IdentityQuantizer()
    if _is_linear(role, "input") or _is_linear(role, "weight"):
        return _dequantized(MXFP8Quantizer(), IdentityQuantizer())
    return MXFP8Quantizer()


@_library
def mxfp8_fwd_nvfp4_bwd(role: QuantizerRole) -> Quantizer:
    """MXFP8 forward, NVFP4 backward: dgrad from the weight of the forward, wgrad from the input itself.

    NVFP4 has blocks of 16 throughout, the Hadamard transform for both operands of wgrad, and stochastic rounding of
    gradients.
    """
    if _is_linear(role, "input"):
        return HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=nvfp4(role))
    if _is_linear(role, "weight"):
        return _dequantized(MXFP8Quantizer(), _nvfp4())
    return nvfp4(role) if _is_linear(role, "grad_output") else MXFP8Quantizer()


@_library
def nvfp4_1d_weight(role: QuantizerRole) -> Quantizer:
    """NVFP4 with blocks of 16 for weights too, their columnwise half from the dequantized rowwise one."""
    return _dequantized(_nvfp4(), _nvfp4()) if _is_linear(role, "weight") else nvfp4(role)


@_library
def nvfp4_row_scaled_fwd_mxfp8_bwd(role: QuantizerRole) -> Quantizer:
    """Row-scaled NVFP4 forward and MXFP8 backward for experts, MXFP8 for all else (after Composer 2, arXiv 2603.24477).

    The backward is quantized from the values of the forward.
    """
    if role.module_type == "grouped_linear" and role.tensor_type == "input":
        return _dequantized(_nvfp4(row_scaled_nvfp4=True), MXFP8Quantizer())
    if role.module_type == "grouped_linear" and role.tensor_type == "weight":
        return _dequantized(_nvfp4(), MXFP8Quantizer())
    return MXFP8Quantizer()


@_library
def nvfp4_row_scaled_fwd_high_precision_bwd(role: QuantizerRole) -> Quantizer:
    """NVFP4 forward with row-scaled inputs; the backward in high precision, of the values of the forward."""
    if _is_linear(role, "grad_output"):
        return IdentityQuantizer()
    if _is_linear(role, "input"):
        return _dequantized(_nvfp4(row_scaled_nvfp4=True), IdentityQuantizer())
    return _dequantized(_nvfp4(), IdentityQuantizer()) if _is_linear(role, "weight") else _nvfp4()


@_library
def nvfp4_linear_fp8_dpa(role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
    """NVFP4 for linear layers, FP8 for attention, whose `s` and `dp` have the scale of the step before.

    Needs ``CustomRecipe(qfactory=nvfp4_linear_fp8_dpa, fp8_dpa=True)``.
    """
    attention = role.module_type == "dpa"
    result = not role.module_type and re.search("dpa_output|dpa_grad_input", role.name)
    if attention and role.tensor_type in ("s", "dp"):
        return DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
    if attention or result:
        backward = role.tensor_type in ("do", "dqkv") if attention else "dpa_grad_input" in role.name
        return Float8CurrentScalingQuantizer(fp8_dtype=DType.kFloat8E5M2 if backward else DType.kFloat8E4M3)
    return nvfp4(role)


PAPERS: dict[str, QuantizerFactory] = {}
"""Recipes of papers and standards, by name; their docstrings have the source."""


def _paper(function: Callable[[QuantizerRole], Quantizer]) -> Callable[[QuantizerRole | None], Quantizer]:
    """Makes a function of roles a factory for linear layers, all else in high precision, unless it takes all roles."""

    @functools.wraps(function)
    def factory(role: QuantizerRole | None) -> Quantizer:
        role = role or QuantizerRole("linear", "input")
        _check_role(function.__name__, role)
        return function(role) if role.module_type in ("linear", "grouped_linear") else IdentityQuantizer()

    PAPERS[function.__name__] = factory
    return factory


@_paper
def fp8_e5m2_gradients(role: QuantizerRole) -> Quantizer:
    """FP8 with a scale for each tensor: e4m3 for weights and activations, e5m2 for gradients.

    FP8 Formats for Deep Learning (arXiv 2209.05433), section 3; scales from the tensor's own amax.
    """
    return Float8CurrentScalingQuantizer(fp8_dtype=Format.HYBRID.dtype(role.tensor_type))


_NOT_QUANTIZED_BY_DEEPSEEK = re.compile(r"(.*\.)?(lm_head|head|router)")


@_paper
def deepseek_v3(role: QuantizerRole) -> Quantizer:
    """FP8 e4m3 in tiles of 1x128 for activations and gradients, and 128x128 for weights, under float32 scales.

    DeepSeek-V3 (arXiv 2412.19437), section 3.3.2; wgrad sees inputs that are quantized a second time, in tiles of
    128x1, from those of the forward (section 3.5.2). The output head and the gates of experts stay in high precision
    (section 3.3.1): layers with the last name ``lm_head``, ``head`` or ``router``; `by_name` keeps others. The paper's
    power-of-two scales of some inputs, and its promotion of partial sums, are not part of it.
    """
    if _NOT_QUANTIZED_BY_DEEPSEEK.fullmatch(role.name):
        return IdentityQuantizer()
    if role.tensor_type == "weight":
        return Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False)
    tiles = Float8BlockQuantizer(block_scaling_dim=1, force_pow_2_scales=False)
    return _dequantized(tiles, tiles.copy()) if role.tensor_type == "input" else tiles


def mxfp8_everywhere(role: QuantizerRole | None) -> Quantizer:
    """MXFP8 in e4m3 for every operand: of linear layers, experts, attention, and products of two activations.

    Recipes for Pre-training LLMs with MXFP8 (arXiv 2506.08027) has e4m3 for weights, activations and gradients of
    linear layers, with scales rounded up, whose conversion is in its appendix; here attention and other products are
    quantized too.
    """
    return MXFP8Quantizer()


PAPERS[mxfp8_everywhere.__name__] = mxfp8_everywhere


@_paper
def mxfp4_weights(role: QuantizerRole) -> Quantizer:
    """MXFP4 for weights, and MXFP6 (e3m2) for activations and gradients, in blocks of 32.

    Microscaling Data Formats for Deep Learning (arXiv 2310.10537), section 5, generative training; OCP MX v1.0,
    sections 5.3.2 and 5.3.3.
    """
    return BlockQuantizer("e2m1" if role.tensor_type == "weight" else "e3m2")


@_paper
def mxfp6(role: QuantizerRole) -> Quantizer:
    """MXFP6 for linear layers, in blocks of 32: e2m3 forward, e3m2 for gradients (OCP MX v1.0, section 5.3.2)."""
    return BlockQuantizer("e3m2" if role.tensor_type == "grad_output" else "e2m3")


@_paper
def mxint8(role: QuantizerRole) -> Quantizer:
    """MXINT8 for linear layers, in blocks of 32 (OCP MX v1.0, section 5.3.4)."""
    return BlockQuantizer("int8")


_ANSWERS = {"answers": 'a dict, such as {"lm_head": "high_precision"}'}


@checked(called="fxquant.factories.by_module_type", takes=_ANSWERS)
def by_module_type(answers: Mapping[str, Answer], default: Answer = "high_precision") -> Rules:
    """An answer for each module type, such as ``{"linear": nvfp4, "grouped_linear": "mxfp8"}``; `default` for others.

    An answer is a quantizer, or a recipe (or its name) or factory that gives one.
    """
    return Rules([Rule(answer, module_type=re.escape(kind)) for kind, answer in _items(answers)], default)


@checked(called="fxquant.factories.by_tensor_type", takes=_ANSWERS)
def by_tensor_type(answers: Mapping[str, Answer], default: Answer = "high_precision") -> Rules:
    """An answer for each tensor type, such as ``{"weight": "nvfp4", "grad_output": MXFP8Quantizer()}``."""
    return Rules([Rule(answer, tensor_type=re.escape(kind)) for kind, answer in _items(answers)], default)


@checked(called="fxquant.factories.by_name", takes=_ANSWERS)
def by_name(answers: Mapping[str, Answer], default: Answer = "high_precision") -> Rules:
    r"""An answer for each pattern of layer names, such as ``{r"lm_head|.*\.router": "high_precision"}``.

    Patterns are regular expressions for the whole name; the first that matches answers.
    """
    return Rules([Rule(answer, name=pattern) for pattern, answer in _items(answers)], default)


def _items(answers: Mapping[str, Answer]) -> Iterable[tuple[str, Answer]]:
    """The answers with their keys. Raises RecipeError for keys that are no texts."""
    for key in answers:
        if not isinstance(key, str):
            raise RecipeError(f"the keys of answers are texts, not {key!r}")
    return answers.items()


_LAYER = re.compile(r"(?:(?P<stack>.*?)\.)?(?P<layer>\d+)(?:\..*)?")
_ANY_STACK = r"((?!\d+\.)[^.]+\.)*"


@checked(called="fxquant.factories.first_and_last", takes={"factory": "the answer for the layers between"})
def first_and_last(
    factory: Answer,
    *,
    first: int = 0,
    last: int = 0,
    layers: int | nn.Module | None = None,
    ends: Answer = "high_precision",
) -> Rules:
    """`ends`, usually high precision, for the first and the last layers of a model, and `factory` for all between.

    A layer is a member of a stack, usually a transformer block with all linears in it: its index is the first number
    in a role's name, its stack the parts before. ``decoder.layers.3.experts.7.up`` is in layer 3 of ``decoder.layers``.
    Each stack counts its layers from 0, so an encoder and a decoder have a first and a last layer each; names without a
    number (``lm_head``) go to `factory`.

    `last` needs `layers`: the number of layers, or the model, in whose stacks the members are then counted that have
    parameters of two and more axes. The report names the rules of a number that is too large, since they match nothing.
    Raises RecipeError for negative counts, and for `last` without `layers`.
    """
    if first < 0 or last < 0:
        raise RecipeError(f"first and last count layers, so they cannot be negative: first={first}, last={last}")
    if last and layers is None:
        raise RecipeError(f"last={last} needs the number of layers: layers=32, or layers=model to have them counted")
    if isinstance(layers, bool) or not isinstance(layers, int | nn.Module | None):
        raise RecipeError(f"layers is a number of layers or a model, not {article(type(layers).__name__)}")
    if isinstance(layers, int) and layers < 1:
        raise RecipeError(f"layers is the number of layers of a stack, not {layers}")
    if not isinstance(layers, nn.Module):
        at_ends = _ends(range(first if layers is None else layers), first, last)
        return Rules([Rule(ends, name=rf"{_ANY_STACK}{index}(\..*)?") for index in at_ends], factory)
    names = []
    for stack, members in _stacks(layers).items():
        before = f"{re.escape(stack)}\\." if stack else ""
        names += [f"{before}{index}" for index in _ends(members, first, last)]
    # one rule: that a stack has no matmuls, such as one of embeddings, is nothing to be told of
    return Rules([Rule(ends, name=rf"({'|'.join(names)})(\..*)?")] if names else [], factory)


@checked(called="fxquant.factories.nvfp4_last_layers", takes={"layers": "a number of layers or a model"})
def nvfp4_last_layers(layers: Any, *, first: int = 0, last: int | None = None) -> Rules:
    """NVFP4 as its training paper has it: the last layers in high precision, and `nvfp4` for all before.

    Pretraining Large Language Models with NVFP4 (arXiv 2509.25149), section 4: some layers in high precision, mostly
    the last (4.1), the random Hadamard transform for wgrad (4.2), 16x16 tiles for weights (4.3) and stochastic rounding
    of gradients (4.4). `last` is 15% of the layers unless set; the paper's model of 62 blocks has ``first=2, last=8``.
    `layers` is the number of layers, or the model, as for `first_and_last`. The rules are for linear layers alone.
    """
    if last is None:
        count = max(map(len, _stacks(layers).values()), default=1) if isinstance(layers, nn.Module) else layers
        last = max(1, round(0.15 * count)) if isinstance(count, int) else 1
    between = Rules([Rule(nvfp4, module_type="linear|grouped_linear")])
    return first_and_last(between, first=first, last=last, layers=layers)


@checked(called="fxquant.factories.first_and_last_layer", takes={"factory": "the answer for the layers between"})
def first_and_last_layer(factory: Answer, layers: Any) -> Rules:
    """`factory` for all layers but the first and the last, which stay in high precision.

    DoReFa-Net (arXiv 1606.06160), section 2.7, and many after it. `layers` is as for `first_and_last`, which takes
    other numbers.
    """
    return first_and_last(factory, first=1, last=1, layers=layers)


def _ends(members: Sequence[int], first: int, last: int) -> list[int]:
    """The first and the last of some members, each once and in order."""
    return sorted({*members[:first], *members[max(len(members) - last, 0) :]})


def _stacks(model: nn.Module) -> dict[str, list[int]]:
    """The members of each stack of a model that have weights, by their index, in order."""
    members: dict[str, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim > 1 and (numbered := _LAYER.fullmatch(name)):
            members.setdefault(numbered["stack"] or "", set()).add(int(numbered["layer"]))
    return {stack: sorted(indices) for stack, indices in members.items()}


@checked(called="fxquant.factories.from_string_roles", takes={"factory": "a function of a str such as 'linear_input'"})
@dataclass(frozen=True, repr=False)
class StringRoles:
    """A factory that asks one written for TransformerEngine's older roles.

    They are ``linear_input``, ``linear_weight``, ``linear_output``, ``linear_grad_output`` and ``linear_grad_input``.
    `factory` is asked with the first, second and fourth, since outputs and input gradients are never quantized, and for
    experts as for linears; all other roles, such as attention's, stay in high precision, and so does an operand for
    which it answers None.
    """

    factory: Callable[[str], Quantizer | DelayedScalingRequest | None]

    def __call__(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        if role.module_type not in ("linear", "grouped_linear"):
            return IdentityQuantizer()
        text = f"linear_{role.tensor_type}"

        def answer(_: QuantizerRole) -> Quantizer | DelayedScalingRequest:
            quantizer = self.factory(text)
            return IdentityQuantizer() if quantizer is None else quantizer

        return ask(answer, role, f"the factory for {text!r}")

    def __repr__(self) -> str:
        return value_text(self)


from_string_roles = StringRoles


def __getattr__(name: str) -> QuantizerFactory:
    base = name.removesuffix("_factory").removesuffix("_quantizer")
    if base != name and base in FACTORIES:
        return FACTORIES[base]
    hint = did_you_mean(name, [*FACTORIES, *PAPERS])
    raise AttributeError(f"module 'fxquant.factories' has no attribute {name!r}{hint}")


__all__ = [
    "FACTORIES",
    "PAPERS",
    "StringRoles",
    "by_module_type",
    "by_name",
    "by_tensor_type",
    "current_scaling",
    "deepseek_v3",
    "delayed_scaling",
    "first_and_last",
    "first_and_last_layer",
    "float8_block_scaling",
    "fp8_e5m2_gradients",
    "from_string_roles",
    "high_precision",
    "high_precision_fwd_mxfp8_bwd",
    "mxfp4_weights",
    "mxfp6",
    "mxfp8",
    "mxfp8_everywhere",
    "mxfp8_fwd_high_precision_bwd",
    "mxfp8_fwd_nvfp4_bwd",
    "mxint8",
    "nvfp4",
    "nvfp4_1d_weight",
    "nvfp4_last_layers",
    "nvfp4_linear_fp8_dpa",
    "nvfp4_row_scaled_fwd_high_precision_bwd",
    "nvfp4_row_scaled_fwd_mxfp8_bwd",
]
