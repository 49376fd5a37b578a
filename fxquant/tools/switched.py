"""A model compiled once under a recipe, whose products quantize in each run the operands that the run chooses.

A run has the values that the recipe gives when it is compiled for these operands alone (`PerOperand`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from fxquant.backend.blocks import Place
from fxquant.backend.options import Options
from fxquant.compat.inside.ranks import world
from fxquant.formats import (
    ATTENTION_OPERANDS,
    IDENTITY,
    LINEAR_OPERANDS,
    AttentionSpec,
    LinearSpec,
    OperandSpec,
    QuantSpec,
)
from fxquant.kernels import switched
from fxquant.kernels.grouped.autograd import GROUPS
from fxquant.kernels.linear.autograd import MATRICES, Gemms, shown
from fxquant.kernels.probe import reference
from fxquant.kernels.state.step import StepState
from fxquant.kernels.switched import Product
from fxquant.passes.graph.meta import MODULE_TYPE
from fxquant.passes.graph.names import fxquant_op
from fxquant.probes import product_error
from fxquant.quantizers import Quantizer
from fxquant.recipes import Recipe
from fxquant.recipes.operands import Operand, PerOperand
from fxquant.roles import GEMM_OPERANDS, Direction, Gemm, QuantizerRole
from fxquant.state import RandomState, Slots, address
from fxquant.tools.trials import RegionBackend, Trials

R = TypeVar("R")

Chosen = Collection[Operand] | None
"""The operands that are quantized: all for None."""

_SWITCHABLE = ("inner", "allow_float64")
"""The options with which graphs can be switched."""


class NotSwitchable(Exception):
    """A graph whose products cannot be chosen in each run."""


def may_switch(recipe: Recipe, options: Mapping[str, Any]) -> bool:
    """Returns True if models can be switched under a recipe with options, for all that is known before a graph."""
    plain = options.get("inner") == "aot_eager" and options.keys() <= {*_SWITCHABLE}
    return plain and not recipe.only_profitable and world() == 1


class SwitchedModel:
    """Runs a model under one recipe, for one choice of operands after another."""

    def __init__(self, trials: Trials, recipe: Recipe) -> None:
        self.trials, self.recipe = trials, recipe
        self._compiled: tuple[Any, SwitchedBackend] | None = None

    def run(self, chosen: Chosen, use: Callable[[Any], R]) -> R:
        """Calls `use` with the compiled model in which the chosen operands are quantized; keeps the decisions."""
        return self._run(_Choice(self.recipe, chosen), use)

    def errors(self, use: Callable[[Any], object]) -> dict[Operand, float]:
        """The relative errors of products with each operand quantized alone, while `use` runs the unquantized model.

        It is the largest of all products of an operand, as a probe measures it; of an attention the error of its
        output, or of a gradient.
        """
        choice = _Measured(self.recipe, ())
        self._run(choice, use)
        return choice.errors

    def _run(self, choice: _Choice, use: Callable[[Any], R]) -> R:
        if self._compiled is None:
            self._compiled = self.trials.compiled_by(SwitchedBackend, self.recipe)
        compiled, backend = self._compiled
        choice.graphs = backend.graphs
        try:
            with self.trials.scope():
                backend.states.reset()
                with switched.choosing(choice):
                    result = use(compiled)
        finally:
            self.trials.decisions = backend.report().decisions
        if backend.problem:
            raise NotSwitchable(backend.problem)
        return result


@dataclass(frozen=True)
class _Graph:
    """A captured graph: the types of the modules whose products have a spec, by its text, and its slots."""

    types: Mapping[str, str]
    slots: Slots

    @classmethod
    def of(cls, gm: fx.GraphModule, slots: Slots) -> _Graph:
        """Raises NotSwitchable where a product is not known by its spec, or ranks have parts of it."""
        types: dict[str, str] = {}
        modules = (module for module in gm.modules() if isinstance(module, fx.GraphModule))
        for node in (node for module in modules for node in module.graph.nodes):
            if fxquant_op(node) in ("linear", "grouped_linear"):
                text = str(node.args[3])
                if types.setdefault(text, node.meta[MODULE_TYPE]) != node.meta[MODULE_TYPE]:
                    raise NotSwitchable(f"two kinds of products have the spec {text}")
                if any(side.over for operand in _operands(LinearSpec.parse(text)) for side in _sides(operand)):
                    raise NotSwitchable("ranks have parts of an operand")
            elif fxquant_op(node) == "attention":
                spec = AttentionSpec.parse(str(node.args[4]))
                if spec.dropout:
                    raise NotSwitchable("an attention that is quantized drops by other random numbers")
                if any(getattr(spec, slot).stochastic for slot in ATTENTION_OPERANDS):
                    raise NotSwitchable("an attention is rounded stochastically")
        return cls(types, slots)

    def role(self, spec: str, operand: str) -> str:
        """The tensor type of an operand in the roles that recipes are asked for."""
        return "input" if self.types[spec] == "matmul" and operand == "weight" else operand


class SwitchedBackend(RegionBackend):
    """Compiles graphs whose products are chosen when they run; `graphs` has them by number."""

    graphs: list[_Graph]
    problem: str
    """Why a graph cannot be switched: a check may catch all errors."""
    _numbers: dict[int, int]

    def _begin(self, options: Options) -> None:
        super()._begin(options)
        self.graphs, self._numbers, self.problem = [], {}, ""

    def rewrite(self, gm: fx.GraphModule, example_inputs: Sequence[Any], place: Place | None = None) -> Slots:
        """Writes quantized matmuls, and takes a number for the graph."""
        slots = super().rewrite(gm, example_inputs, place)
        self._numbers[id(self._record)] = len(self.graphs)
        try:
            self._check_states(slots)
            self.graphs.append(_Graph.of(gm, slots))
        except NotSwitchable as error:
            self.problem = str(error)
            raise
        return slots

    def __deepcopy__(self, memo: dict[int, Any]) -> SwitchedBackend:
        """Raises NotSwitchable: a copy has graphs of its own."""
        self.problem = "the check copies the compiled model"
        raise NotSwitchable(self.problem)

    def _check_states(self, slots: Slots) -> None:
        """Raises NotSwitchable where graphs hand on states, of which they would have others under a choice."""
        for other in self.graphs:
            for mine, its in ((slots.rounded, other.slots.rounded), (slots.keys, other.slots.keys)):
                if mine != its and {*mine} & {*its}:
                    raise NotSwitchable("two graphs have a state in common, and others of their own")

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph whose products are chosen later."""
        with switched.chosen_later(self._numbers[id(self._record)]):
            return super().compile(gm, example_inputs)


class _Choice:
    """Multiplies as a recipe does that quantizes the chosen operands alone."""

    def __init__(self, recipe: Recipe, chosen: Chosen) -> None:
        self.chosen = None if chosen is None else frozenset(chosen)
        self.recipe = recipe if chosen is None else PerOperand.of([recipe], dict.fromkeys(chosen, 0))
        self.graphs: Sequence[_Graph] = ()
        self._specs: dict[tuple[int, str], LinearSpec] = {}
        self._rounded: dict[int, tuple[dict[int, int], int]] = {}

    def multiply(
        self, product: Product, a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, state: StepState
    ) -> Tensor:
        spec = self._spec_of(product)
        if state.random is not None and any(operand.is_stochastic for operand in _operands(spec)):
            state = replace(state, random=self._random_of(product.graph, state.random))
        return _multiplied(product, spec, a, b, offs, bias, state)

    def attend(self, spec: AttentionSpec, graph: int, run: Callable[[AttentionSpec], list[Tensor]]) -> list[Tensor]:
        """The results of one direction of an attention, all of whose slots are quantized or none."""
        is_chosen = self.chosen is None or _attention(spec) in self.chosen
        return run(spec if is_chosen else spec.each(lambda _: IDENTITY))

    def _spec_of(self, product: Product) -> LinearSpec:
        """The spec of a product under the choice, with the random streams that it would have."""
        key = product.graph, product.spec
        if key not in self._specs:
            spec = self._without_others(*key)
            if self.chosen is not None:
                for name in LINEAR_OPERANDS:
                    operand: OperandSpec = getattr(spec, name)
                    if operand.is_stochastic:
                        number = self._numbers_of(product.graph)[_number(operand)]
                        spec = _with(spec, {name: operand.numbered(number)})
            self._specs[key] = spec
        return self._specs[key]

    def _without_others(self, graph: int, text: str) -> LinearSpec:
        """A spec in which operands that are not chosen are as they are."""
        spec, chosen = LinearSpec.parse(text), self.chosen
        if chosen is None:
            return spec
        kept = dict[str, OperandSpec]()
        for name in LINEAR_OPERANDS:
            operand: OperandSpec = getattr(spec, name)
            role = self.graphs[graph].role(text, name)
            row, column = (Operand(spec.name, role, side) in chosen for side in ("rowwise", "columnwise"))
            halves = operand.rowwise if row else IDENTITY, operand.columnwise if column else IDENTITY
            kept[name] = operand if row and column else OperandSpec(*halves)
        return _with(spec, kept)

    def _numbers_of(self, graph: int) -> Mapping[int, int]:
        """The numbers that operands which are rounded stochastically would have, by those that they have."""
        return self._streams(graph)[0]

    def _random_of(self, graph: int, random: Tensor) -> Tensor:
        """Seed and step as a graph of the chosen operands alone would have them."""
        return torch.stack((torch.full_like(random[0], self._streams(graph)[1]), random[1]))

    def _streams(self, graph: int) -> tuple[dict[int, int], int]:
        if graph not in self._rounded:
            slots, numbers = Slots(), dict[int, int]()
            for old, (layer, name, _) in enumerate(self.graphs[graph].slots.rounded):
                if self._is_rounded(graph, old, layer, name):
                    numbers[old] = slots.add_rounded((layer, name, 0))
            addresses = [address(key) for key in slots.rounded]
            state = RandomState(addresses, torch.initial_seed(), torch.device("cpu"))
            self._rounded[graph] = numbers, int(state.random[0])
        return self._rounded[graph]

    def _is_rounded(self, graph: int, number: int, layer: str, name: str) -> bool:
        """Returns True if an operand is rounded stochastically under the choice too."""
        if self.chosen is None:
            return True
        for text in self.graphs[graph].types:
            spec = LinearSpec.parse(text)
            operand: OperandSpec = getattr(spec, name)
            if spec.name == layer and operand.is_stochastic and _number(operand) == number:
                kept: OperandSpec = getattr(self._without_others(graph, text), name)
                return kept.is_stochastic
        # no product of a graph without gradients has it, which keeps its number all the same
        answer = self.recipe.quantizer(QuantizerRole("linear", name, layer))
        return isinstance(answer, Quantizer) and answer.operand_spec().is_stochastic


class _Measured(_Choice):
    """Multiplies without quantization, and keeps the error of each product with one of its operands quantized."""

    def __init__(self, recipe: Recipe, chosen: Chosen) -> None:
        super().__init__(recipe, chosen)
        self.errors: dict[Operand, float] = {}

    def multiply(
        self, product: Product, a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, state: StepState
    ) -> Tensor:
        spec, table = LinearSpec.parse(product.spec), self.graphs[product.graph]
        for name, direction in GEMM_OPERANDS[Gemm(product.gemm)]:
            operand: OperandSpec = getattr(spec, name)
            side = operand.columnwise if direction == "columnwise" else operand.rowwise
            if not side.is_identity:
                alone = _with(_NOTHING, {name: _of_itself(operand)})
                error = _error(product, alone, a, b, offs)
                key = Operand(spec.name, table.role(product.spec, name), str(direction))
                self.errors[key] = max(self.errors.get(key, 0.0), error)
        return super().multiply(product, a, b, offs, bias, state)

    def attend(self, spec: AttentionSpec, graph: int, run: Callable[[AttentionSpec], list[Tensor]]) -> list[Tensor]:
        exact, quantized = super().attend(spec, graph, run), run(spec)
        key = _attention(spec)
        results = 1 if len(exact) == 5 else 3  # the output, or dq, dk and dv
        for x, y in zip(exact[:results], quantized, strict=False):
            error = float((y.double() - x.double()).norm() / x.double().norm().clamp_min(1e-300))
            self.errors[key] = max(self.errors.get(key, 0.0), error if math.isfinite(error) else math.inf)
        return exact


def _attention(spec: AttentionSpec) -> Operand:
    """The operand by which an attention is chosen."""
    return Operand(spec.name, "qkv", str(Direction.ROWWISE))


def _operands(spec: LinearSpec) -> tuple[OperandSpec, ...]:
    return spec.input, spec.weight, spec.grad_output


def _sides(operand: OperandSpec) -> tuple[QuantSpec, QuantSpec]:
    return operand.rowwise, operand.columnwise


def _number(operand: OperandSpec) -> int:
    """The number of an operand that is rounded stochastically."""
    return next(side.stream // 2 for side in _sides(operand) if side.stochastic)


def _with(spec: LinearSpec, operands: Mapping[str, OperandSpec]) -> LinearSpec:
    """A spec with other operands, by name."""
    input, weight, grad_output = (operands.get(name, getattr(spec, name)) for name in LINEAR_OPERANDS)
    return replace(spec, input=input, weight=weight, grad_output=grad_output)


_KEPT = OperandSpec(IDENTITY, IDENTITY)
_NOTHING = LinearSpec(_KEPT, _KEPT, _KEPT)


def _of_itself(operand: OperandSpec) -> OperandSpec:
    """An operand whose scale is its own, where it was one of earlier steps."""
    row, column = (replace(side, slot=-1) if side.is_delayed else side for side in _sides(operand))
    return OperandSpec(row, column, operand.from_rowwise)


def _quantized(
    product: Product, spec: LinearSpec, a: Tensor, b: Tensor, offs: Tensor | None, state: StepState
) -> tuple[Gemms, list[tuple[list[Tensor], QuantSpec]]]:
    """The functions of a product, and its operands quantized."""
    gemms, quantized = GROUPS if product.grouped else MATRICES, []
    for x, (name, direction) in zip((a, b), GEMM_OPERANDS[Gemm(product.gemm)], strict=True):
        operand: OperandSpec = getattr(spec, name)
        operand = operand.shown() if name == "grad_output" else operand
        quantized.append(gemms.quantize(x, None if name == "weight" else offs, operand, str(direction), state, None))
    return gemms, quantized


def _multiplied(
    product: Product, spec: LinearSpec, a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, state: StepState
) -> Tensor:
    """The product of operands that are quantized by a spec."""
    forward = product.gemm == Gemm.FPROP
    gemms, (left, right) = _quantized(product, spec, a, b, offs, state)
    out = gemms.multiply(left, right, offs, bias, product.out_dtype, forward)
    return out if forward else shown(out, a, spec.grad_output.shown())


def _error(product: Product, spec: LinearSpec, a: Tensor, b: Tensor, offs: Tensor | None) -> float:
    """The relative error of a product whose operands are quantized by a spec."""
    rounds = any(operand.is_stochastic for operand in _operands(spec))
    state = StepState(random=torch.zeros(2, dtype=torch.int64, device=a.device) if rounds else None)
    if product.grouped:
        product = product._replace(out_dtype=torch.float32)
        y, z = (_multiplied(product, one, a, b, offs, None, state).double() for one in (_NOTHING, spec))
        square = float(reference.product_error(y, z, product.gemm))
        return math.sqrt(square) if math.isfinite(square) else math.inf
    _, pairs = _quantized(product, spec, a, b, offs, state)
    directions = [direction for _, direction in GEMM_OPERANDS[Gemm(product.gemm)]]
    exact = [x.mT if direction == "columnwise" else x for x, direction in zip((a, b), directions, strict=True)]
    parts, specs = zip(*pairs, strict=True)
    return product_error(reference.products(exact, parts, specs, product.gemm)) or 0.0
