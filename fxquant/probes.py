"""Requests to measure, and the statistics that come of the vectors which a graph has added up."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fxquant.checks import article, did_you_mean
from fxquant.errors import OptionError
from fxquant.formats import LINEAR_OPERANDS, AttentionSpec, LinearSpec, OperandSpec, QuantSpec
from fxquant.kernels.probe.plan import ATTENTION_ROLES, GEMMS, LOSS, Plan, Slot, spec_of
from fxquant.kernels.probe.reference import COLUMNS, EXPONENTS
from fxquant.quantizers import DelayedScalingRequest, Quantizer
from fxquant.quantizers.base import quantizer_text
from fxquant.recipes import DelayedScaling, Recipe, resolve
from fxquant.roles import QuantizerRole

STATISTICS = {
    "amax": "values",
    "zeros": "values",
    "underflow": "values",
    "overflow": "values",
    "nonfinite": "values",
    "sqnr": "values",
    "relative_error": "values",
    "crest": "values",
    "kurtosis": "values",
    "saturated": "codes",
    "subnormal": "codes",
    "scale_mean": "scales",
    "scale_min": "scales",
    "scale_max": "scales",
    "scale_spread": "scales",
    "worst_block_sqnr": "blocks",
    "worst_block_row": "blocks",
    "worst_block_column": "blocks",
    "exponents": "exponents",
    "cosine": "product",
    "product_error": "product",
    "loss_change": "loss",
}
"""The statistics of a row, and the group in which each is measured."""

ON_REQUEST = ("loss_change",)
"""The statistics for which a step keeps more than it does otherwise: they are measured if they are named."""

TENSORS = (*LINEAR_OPERANDS, *ATTENTION_ROLES)
"""The operands that are measured: of linear layers, experts and products of two activations, and of attention."""

USUAL = tuple(name for name in STATISTICS if name not in ON_REQUEST)
"""The statistics that are measured if none are named."""

_FOREIGN = {
    "underflows%": "underflow", "overflows%": "saturated", "activation": "input", "gradient": "grad_output",
    "snr": "sqnr", "mse": "sqnr", "scale_inv_min": "scale_min", "scale_inv_max": "scale_max", "saturation": "saturated",
    "qkv": "q", "p": "s", "softmax": "s",
}  # fmt: skip
"""The words of TransformerEngine's debug features, and others."""


@dataclass(frozen=True)
class Candidate:
    """A quantizer that is tried beside the one that there is, or a recipe that is asked for one by the role.

    Rows have its `name`, which is its text if it has none.
    """

    quantizer: Quantizer | Recipe
    name: str = ""

    @classmethod
    def of(cls, answer: object) -> Candidate:
        """The candidate that a user gave. Raises OptionError for what is none."""
        if isinstance(answer, Quantizer):
            return cls(answer)
        if isinstance(answer, str | Recipe):
            recipe = resolve(answer)
            if isinstance(recipe, DelayedScaling):
                raise OptionError(f"whatif: {_NO_HISTORY}")
            return cls(recipe)
        called = f": write {answer.__name__}()" if isinstance(answer, type) and issubclass(answer, Quantizer) else ""
        raise OptionError(
            f"whatif takes quantizers, and recipes or their names, not {article(type(answer).__name__)}{called}"
        )

    def spec(self, role: QuantizerRole) -> OperandSpec | None:
        """The format for a role; None where it is kept in high precision."""
        answer = self.quantizer.quantizer(role) if isinstance(self.quantizer, Recipe) else self.quantizer
        if isinstance(answer, DelayedScalingRequest):
            raise OptionError(f"layer {role.name!r}, {role.tensor_type}: {self}: {_NO_HISTORY}")
        assert isinstance(answer, Quantizer)
        return None if answer.is_identity else answer.operand_spec()

    def __str__(self) -> str:
        text = quantizer_text(self.quantizer) if isinstance(self.quantizer, Quantizer) else str(self.quantizer)
        return self.name or text


_NO_HISTORY = "delayed scaling has the history of a run: try current_scaling in its place"


@dataclass(frozen=True)
class Request:
    """The layers (patterns that match the whole of a name), tensors and statistics that are wanted; None for all.

    `candidates` are tried on the same tensors.
    """

    layers: tuple[str, ...] | None = None
    tensors: tuple[str, ...] = TENSORS
    statistics: tuple[str, ...] = USUAL
    candidates: tuple[Candidate, ...] = ()

    @classmethod
    def of(cls, layers: Any, tensors: Any, stats: Any, whatif: Iterable[Any]) -> Request:
        """The request of a user. Raises OptionError for what there is not."""
        chosen = None if layers is None else _words("layers", layers)
        for pattern in chosen or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise OptionError(f"layers={pattern!r} is not a regular expression: {error}") from error
        candidates = whatif if isinstance(whatif, Iterable) and not isinstance(whatif, str) else [whatif]
        return cls(
            chosen,
            _known("tensors", tensors, TENSORS),
            USUAL if stats is None else _known("stats", stats, tuple(STATISTICS)),
            tuple(map(Candidate.of, candidates)),
        )

    @property
    def text(self) -> str:
        """Equal for requests that are measured alike."""
        tried = [f"{c}:{c.quantizer.fingerprint() if isinstance(c.quantizer, Recipe) else c}" for c in self.candidates]
        return repr((self.layers, self.tensors, self.groups, tried))

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of statistics that are measured."""
        return tuple(dict.fromkeys(STATISTICS[name] for name in self.statistics))

    def wants(self, layer: str) -> bool:
        """Returns True for a layer that is measured."""
        return self.layers is None or any(re.fullmatch(pattern, layer) for pattern in self.layers)

    def plan(self, module_type: str, layer: str) -> tuple[Plan, list[Unmeasured]]:
        """The plan of one linear or attention, and what cannot be measured of it."""
        asked = _ROLES.get(module_type, _ROLES["linear"])
        tensors, groups, unmeasured = tuple(kind for kind in self.tensors if kind in asked), self.groups, []
        texts: dict[str, tuple[str, ...]] = {}
        for kind in tensors:
            role, tried = QuantizerRole(module_type, asked[kind], layer), list[str]()
            for candidate in self.candidates:
                spec = candidate.spec(role)
                if spec is not None and module_type == "grouped_linear" and (spec.rowwise.key or spec.columnwise.key):
                    unmeasured.append(Unmeasured(layer, kind, _ONE_MATRIX, str(candidate)))
                    spec = None
                tried.append("" if spec is None else str(spec))
            texts[kind] = tuple(tried)
        if module_type == "grouped_linear":  # whose products are one a group
            groups = tuple(group for group in groups if group not in ("product", "loss"))
        if module_type == "dpa" and tensors:
            unmeasured.append(Unmeasured(layer, "dp", _IN_NO_MEMORY))
        return Plan(tensors, groups, texts), unmeasured

    def closed(self, module_type: str, layer: str, reason: str = "") -> list[Unmeasured]:
        """The operands that are wanted of what no operator of fxquant computes, with the reason."""
        asked = _ROLES.get(module_type, _ROLES["linear"])
        return [Unmeasured(layer, kind, reason or _TORCHS_OWN) for kind in self.tensors if kind in asked]


_TORCHS_OWN = "this attention stays in high precision, and nothing of it can be seen but its results"
_ONE_MATRIX = "a quantizer of your own, or BlockQuantizer, takes one matrix at a time, and experts have many"
_IN_NO_MEMORY = "the gradient of the scores is in no memory, and takes the whole backward to compute again"

IN_REGION = "it is in a region or branch that is compiled by itself (nested_compile_region), where no probe looks"
"""Why a product inside such a graph is not measured."""

_ROLES = {
    "linear": dict(zip(LINEAR_OPERANDS, LINEAR_OPERANDS, strict=True)),
    "matmul": {"input": "input", "weight": "input", "grad_output": "grad_output"},  # `weight` is the second of two
    "dpa": ATTENTION_ROLES,
}
"""The `tensor_type` of the roles of measured operands, by `module_type`."""


def _words(name: str, value: Any) -> tuple[str, ...]:
    words = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(word, str) for word in words):
        raise OptionError(f"{name} must be a str or several, not {article(type(value).__name__)}")
    return words


def _known(name: str, value: Any, choices: Sequence[str]) -> tuple[str, ...]:
    words = tuple(choices) if value is None else _words(name, value)
    for word in words:
        if word not in choices:
            hint = did_you_mean(word, choices, {key: item for key, item in _FOREIGN.items() if item in choices}) or "."
            raise OptionError(f"{name} has no {word!r}{hint} Known: {', '.join(choices)}")
    return words


@dataclass(frozen=True)
class Observed:
    """A linear or attention that is measured: its layer, its number there, its formats, and its plan as text."""

    layer: str
    number: int
    spec: LinearSpec | AttentionSpec
    text: str

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return Plan.parse(self.text)

    def slots(self) -> list[Slot]:
        """All vectors, those of the forward first."""
        return [*self.plan.forward(), *self.plan.backward()]


@dataclass(frozen=True)
class Unmeasured:
    """An operand of a layer that no statistics are measured of, and why; of a candidate alone, if one is named."""

    layer: str
    role: str
    reason: str
    candidate: str = ""


def rows_of(observed: Observed, layer: str, vectors: Mapping[Slot, Tensor], request: Request) -> list[dict[str, Any]]:
    """The rows of a linear, which is `layer` in this model: one for each operand and direction that was multiplied."""
    rows = []
    for slot, vector in vectors.items():
        if slot.gemm or vector[0] == 0:
            continue
        product = next((v for s, v in vectors.items() if s == _product_of(slot, observed.plan)), None)
        row: dict[str, Any] = {
            "layer": layer,
            "role": slot.role,
            "direction": slot.direction,
            "quantizer": name_of(spec_of(observed.spec, observed.plan, slot)),
            "whatif": slot.candidate >= 0,
        }
        if observed.number:
            row["product"] = observed.number
        if slot.candidate >= 0:
            row["candidate"] = str(request.candidates[slot.candidate])
        values = statistics(vector, product, vectors.get(Slot(slot.role, slot.direction, LOSS, slot.candidate)))
        values["exponents"] = next((c for s, v in vectors.items() if s.role == slot.role and (c := exponents(v))), {})
        rows.append(row | {name: values[name] for name in request.statistics})
    return rows


def name_of(spec: QuantSpec) -> str:
    """A format and its settings, without the place of its state in a graph."""
    if spec.key:  # a name, and what tells equal ones apart
        return spec.key.rpartition("-")[0] + ("(stochastic)" if spec.stochastic else "")
    return str(replace(spec, slot=-1, stream=0, over="", nonfinite=False)) + (" delayed" if spec.is_delayed else "")


def _product_of(slot: Slot, plan: Plan) -> Slot | None:
    """The slot of the product of an operand: of its own if a candidate is tried, else one for both operands."""
    gemm = next((name for name, pair in GEMMS.items() if (slot.role, slot.direction) in pair), None)
    if gemm is None:  # of attention
        return None
    if slot.candidate >= 0:
        return Slot(slot.role, slot.direction, gemm, slot.candidate)
    first = next((role, direction) for role, direction in GEMMS[gemm] if role in plan.tensors)
    return Slot(*first, gemm)


def statistics(vector: Tensor, product: Tensor | None = None, loss: Tensor | None = None) -> dict[str, Any]:
    """The statistics of an operand from its vector, from that of its product, and from that of the loss.

    None stands for what is not known.

    Shares are of all elements. ``sqnr`` is 10 log10(sum x^2 / sum (x - q)^2) in decibels, of finite numbers, and
    ``relative_error`` the mean of min(|x - q| / |x|, 1). ``crest`` is amax / rms, ``kurtosis`` E[x^4] / E[x^2]^2.
    Scales are factors of dequantization, of which zeros do not count; their spread is log2(largest / least).
    ``overflow`` counts the numbers that became NaN or infinite, ``nonfinite`` those that were so before. ``cosine`` is
    that of the product with the unquantized one, ``product_error`` its relative error: the root of the mean square over
    features. ``loss_change`` is what the loss grows by, estimated from gradients in first and second order.
    """
    v = dict(zip(COLUMNS, vector.tolist(), strict=True))
    elements, counted = v["elements"], v["scales"] > 0
    numbers = elements - v["zeros"] - v["nonfinite"]
    shares: dict[str, Any] = {name: v[name] / elements for name in ("zeros", "underflow", "saturated", "subnormal")}
    scales = {
        "scale_mean": v["scale_sum"] / v["scales"] if counted else None,
        "scale_min": -v["minus_scale_min"] if counted else None,
        "scale_max": v["scale_max"] if counted else None,
        "scale_spread": math.log2(v["scale_max"] / -v["minus_scale_min"]) if counted else None,
    }
    worst = v["worst"] >= 0
    blocks = {
        "worst_block_sqnr": decibels(1.0, v["worst"]) if worst else None,
        "worst_block_row": int(v["worst_row"]) if worst else None,
        "worst_block_column": int(v["worst_column"]) if worst else None,
    }
    return {
        "amax": v["amax"],
        **{name: None if math.isnan(share) else share for name, share in shares.items()},
        "overflow": int(v["overflow"]),
        "nonfinite": int(v["nonfinite"]),
        "sqnr": decibels(v["signal"], v["noise"]),
        "relative_error": v["relative"] / numbers if numbers > 0 else None,
        "crest": v["amax"] / math.sqrt(v["signal"] / elements) if v["signal"] else None,
        "kurtosis": v["fourth"] * elements / v["signal"] ** 2 if v["signal"] else None,
        **scales,
        **blocks,
        "exponents": exponents(vector),
        "cosine": None if product is None else cosine(product),
        "product_error": None if product is None else product_error(product),
        "loss_change": None if loss is None or loss[0] == 0 else loss_change(loss),
    }


def exponents(vector: Tensor) -> dict[int, int]:
    """The numbers of elements by exponent, those that there are."""
    counts = vector[-len(EXPONENTS) :].tolist()
    return {exponent: int(count) for exponent, count in zip(EXPONENTS, counts, strict=True) if count}


def decibels(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise); infinite without noise, None without either."""
    if not noise:
        return math.inf if signal else None
    return 10 * math.log10(signal / noise) if signal else -math.inf


def cosine(product: Tensor) -> float | None:
    """<Y, Y'> / (|Y| |Y'|) from the vector of a product; None where one of them is zero or was not multiplied."""
    inner, seen, exact = (product[COLUMNS.index(name)].item() for name in ("inner", "product", "exact"))
    return inner / math.sqrt(seen * exact) if seen > 0 and exact > 0 else None


def product_error(product: Tensor) -> float | None:
    """The relative error of a product, from its vector; infinite where it is not finite, None without a product."""
    total, count = (product[COLUMNS.index(name)].item() for name in ("product_error", "products"))
    return _or_infinite(total / count) ** 0.5 if count else None


def loss_change(loss: Tensor) -> float:
    """The growth of the loss, from the vector of an operand; infinite where that is not finite."""
    first, second = (loss[COLUMNS.index(name)].item() for name in ("change", "change_squares"))
    return _or_infinite(abs(first) + second / 2)


def _or_infinite(number: float) -> float:
    return number if math.isfinite(number) else math.inf


WIDTH = len(COLUMNS)
"""The length of a vector."""
