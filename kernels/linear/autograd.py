"""`fxquant::linear`: one linear layer whose three GEMMs are quantized as its spec says.

The operator is CompositeImplicitAutograd: AOTAutograd traces through it, and the joint graph shows the quantize and
GEMM nodes of the forward and of the backward, each direction by itself, for the partitioner to place. So it is for
`fxquant::grouped_linear`, which differs in its `Gemms` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.compat.device import no_autocast
from fxquant.formats import IDENTITY, LinearSpec, OperandSpec, QuantSpec
from fxquant.kernels import custom, switched
from fxquant.kernels.cast.ops import amax, parts_spec, quantize_operand
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.kernels.operator import TRACED, Traits, operator
from fxquant.kernels.probe.observer import GRADIENT, Observation, Observer
from fxquant.kernels.probe.plan import Plan
from fxquant.kernels.state.step import STATELESS, StepState

Quantized = tuple[list[Tensor], QuantSpec]
"""The parts of an operand, and the spec that they have."""


@dataclass(frozen=True)
class Gemms:
    """The functions that a linear's GEMMs consist of, for matrices or for groups of rows whose ends are `offs`.

    `quantize(x, offs, spec, direction, state, stored)` gives the parts and their spec, `amax(x, offs)` largest
    magnitudes, and `multiply(left, right, offs, bias, out_dtype, fast_accum)` left x right^T, the contracted axis of
    each last. `one_batch` says that batches have one axis.
    """

    quantize: Callable[..., Quantized]
    amax: Callable[..., Tensor]
    multiply: Callable[..., Tensor]
    one_batch: bool


class _Operand(NamedTuple):
    """An operand of a GEMM, with its parts, or those of its rowwise half, if it was quantized before."""

    x: Tensor
    offs: Tensor | None
    spec: OperandSpec
    direction: str
    parts: list[Tensor] | None = None
    rowwise: list[Tensor] | None = None

    def quantized(self, gemms: Gemms, state: StepState) -> Quantized:
        if self.parts is None:
            return gemms.quantize(*self[:4], state, self.rowwise)
        return self.parts, parts_spec(self.spec.columnwise if self.direction == "columnwise" else self.spec.rowwise)


@dataclass(frozen=True)
class Context:
    """The arguments of a linear that are no operands.

    `weight_rowwise` and `weight_columnwise` are the parts of a weight that was quantized before. `observer` measures.
    """

    gemms: Gemms
    spec: LinearSpec
    state: StepState
    weight_rowwise: list[Tensor] | None = None
    weight_columnwise: list[Tensor] | None = None
    observer: Observer | None = None

    def multiply(
        self, a: _Operand, b: _Operand, offs: Tensor | None, bias: Tensor | None, dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        """a x b^T, after both are quantized."""
        graph = switched.traced_graph()
        if graph is not None:
            gemm = "fprop" if fast else "dgrad" if a.direction == "rowwise" else "wgrad"
            state = self.state.scale, self.state.random
            return switched.chosen_gemm(
                a.x, b.x, offs, bias, *state, gemm, str(self.spec), graph, self.gemms.one_batch, dtype
            )
        left, right = a.quantized(self.gemms, self.state), b.quantized(self.gemms, self.state)
        return self.gemms.multiply(left, right, offs, bias, dtype, fast)

    def input_of(self, direction: str, input: Tensor, offs: Tensor | None) -> _Operand:
        """The input in one direction."""
        return _Operand(input, offs, self.spec.input, direction)

    def weight_of(self, direction: str, weight: Tensor) -> _Operand:
        """The weight in one direction."""
        if direction == "rowwise":
            return _Operand(weight, None, self.spec.weight, direction, self.weight_rowwise)
        return _Operand(weight, None, self.spec.weight, direction, self.weight_columnwise, self.weight_rowwise)

    def observe_forward(self, input: Tensor, weight: Tensor, offs: Tensor | None) -> None:
        """Measures, where that is wanted, the operands of a forward, and those that it has in common with its backward.

        A backward would have to have them unquantized otherwise.
        """
        if self.observer is None:
            return
        of_input = ("rowwise", "columnwise")[: 1 + self.observer.of_weight]
        of_weight = ("rowwise", "columnwise")[: 1 + self.observer.of_input]
        operands = {("input", d): self.input_of(d, input, offs) for d in of_input}
        operands |= {("weight", d): self.weight_of(d, weight) for d in of_weight}
        self.observer.add_forward(self._observed(operands), self._try)

    def observe_backward(
        self, operands: Mapping[tuple[str, str], _Operand], grad_output: Tensor, input: Tensor, weight: Tensor
    ) -> None:
        """Measures the gradients among the operands of a backward, its products, and what the forward's errors cost."""
        if self.observer is None:
            return
        observed = self._observed(operands)
        if self.measures_loss:
            forward = {("input", "rowwise"): self.input_of("rowwise", input, None)}
            forward |= {("weight", "rowwise"): self.weight_of("rowwise", weight)}
            observed |= {
                **self._observed(forward),
                GRADIENT: (grad_output, None, ([grad_output], IDENTITY), OperandSpec(IDENTITY, IDENTITY)),
            }
        self.observer.add_backward(observed, self._try)

    @property
    def measures_loss(self) -> bool:
        """True if the backward takes the forward's operands as they are to measure what their errors cost."""
        return self.observer is not None and self.observer.of_loss

    def _observed(self, operands: Mapping[tuple[str, str], _Operand]) -> dict[tuple[str, str], Observation]:
        return {key: (o.x, o.offs, o.quantized(self.gemms, self.state), o.spec) for key, o in operands.items()}

    def _try(self, x: Tensor, offs: Tensor | None, spec: OperandSpec, direction: str) -> Quantized:
        """A candidate's quantization; rounded stochastically by the same numbers in every step."""
        random = torch.zeros(2, dtype=torch.int64, device=x.device) if spec.is_stochastic else None
        return self.gemms.quantize(x, offs, spec, direction, StepState(random=random), None)


class _Linear(torch.autograd.Function):
    """input [*batch, M, K] x weight [*batch, N, K]^T + bias [N], all of one dtype, or that of each group of rows."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor | None, context: Context) -> Tensor:
        spec, state, measure = context.spec, context.state, context.gemms.amax
        state.record_forward(spec.input.rowwise, measure, input, offs)
        state.record_forward(spec.weight.rowwise, measure, weight, None)
        context.observe_forward(input, weight, offs)
        left, right = context.input_of("rowwise", input, offs), context.weight_of("rowwise", weight)
        return context.multiply(left, right, offs, bias, input.dtype, fast=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _, offs, ctx.context = inputs
        ctx.dtype = input.dtype
        # what no gradient takes may be written into, as in torch
        of_input, of_weight = (needed or ctx.context.measures_loss for needed in ctx.needs_input_grad[:2])
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None, offs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grads
        input, weight, offs = ctx.saved_tensors
        context: Context = ctx.context
        spec, grad_input, grad_weight, grad_bias = context.spec, None, None, None
        of_grad, observed = spec.grad_output.shown(), dict[tuple[str, str], _Operand]()
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            context.state.record_backward(spec.grad_output.rowwise, context.gemms.amax, grad_output, offs)
        if ctx.needs_input_grad[0]:
            left, right = _Operand(grad_output, offs, of_grad, "rowwise"), context.weight_of("columnwise", weight)
            observed |= {("grad_output", "rowwise"): left, ("weight", "columnwise"): right}
            grad_input = context.multiply(left, right, offs, None, ctx.dtype, fast=False)
            grad_input = shown(grad_input, grad_output, of_grad)
        if ctx.needs_input_grad[1]:
            left = _Operand(grad_output, offs, of_grad, "columnwise")
            right = context.input_of("columnwise", input, offs)
            observed |= {("grad_output", "columnwise"): left, ("input", "columnwise"): right}
            grad_weight = context.multiply(left, right, offs, None, ctx.dtype, fast=False)
            grad_weight = shown(grad_weight, grad_output, of_grad)
        context.observe_backward(observed, grad_output, input, weight)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(tuple(range(grad_output.ndim - 1)))
        return grad_input, grad_weight, grad_bias, None, None


def shown(grad: Tensor, grad_output: Tensor, spec: OperandSpec) -> Tensor:
    """A gradient, NaN if the one it comes from is not finite: a user's own quantizer may have no code for that."""
    custom_side = (spec.rowwise.key or spec.columnwise.key) and switched.traced_graph() is None
    return torch.where(grad_output.isfinite().all(), grad, math.nan) if custom_side else grad


def run_linear(input: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor | None, context: Context) -> Tensor:
    """The linear of operands of any dtype and number of axes. The autocast dtype of the spec is applied here."""
    autocast, batch = context.spec.autocast, weight.shape[:-2]
    dtype = getattr(torch, autocast) if autocast else torch.promote_types(input.dtype, weight.dtype)
    input, weight = input.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    if context.observer is not None:
        of_input, of_weight = (torch.is_grad_enabled() and x.requires_grad for x in (input, weight))
        context = replace(context, observer=replace(context.observer, of_input=of_input, of_weight=of_weight))
    with no_autocast(input.device):
        if not batch:
            rows = input.reshape(-1, input.shape[-1]) if input.shape[-1] else input.flatten(0, -2)
            output = _Linear.apply(rows, weight, bias, offs, context)  # type: ignore[no-untyped-call]
            return output.reshape(*input.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]
        flat = context.gemms.one_batch and offs is None and len(batch) > 1
        if flat:
            input, weight = input.flatten(0, -3), weight.flatten(0, -3)
        output = _Linear.apply(input, weight, bias, offs, context)  # type: ignore[no-untyped-call]
        return output.unflatten(0, batch) if flat else output  # type: ignore[no-any-return]


def _multiply(
    left: Quantized, right: Quantized, offs: None, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    (a, a_spec), (b, b_spec) = left, right
    if a_spec.key or b_spec.key:
        return custom.gemm(a, a_spec, b, b_spec, bias, out_dtype)
    if a_spec.is_identity and b_spec.is_identity:
        dtype = torch.promote_types(a[0].dtype, b[0].dtype)
        if bias is not None:
            return torch.nn.functional.linear(a[0].to(dtype), b[0].to(dtype), bias.to(dtype)).to(out_dtype)
        return torch.matmul(a[0].to(dtype), b[0].to(dtype).mT).to(out_dtype)
    return scaled_mm(a, b, str(a_spec), str(b_spec), bias, out_dtype, fast_accum)


MATRICES = Gemms(
    quantize=lambda x, offs, *more: quantize_operand(x, *more),
    amax=lambda x, offs: amax(x),
    multiply=_multiply,
    one_batch=False,
)


STATEFUL = (
    "Tensor? scale, Tensor(a!)? forward_amax, Tensor(b!)? backward_amax, Tensor? step, Tensor? random, str spec,"
    " Tensor[]? weight_rowwise=None, Tensor[]? weight_columnwise=None, Tensor(c!)? probe_forward=None,"
    " Tensor(d!)? probe_backward=None, str probe='') -> Tensor"
)
"""The end of the schema of an operator that takes the state of a graph: torch infers no optional lists."""


def observer(
    probe_forward: Tensor | None, probe_backward: Tensor | None, probe: str, *, grouped: bool = False
) -> Observer | None:
    """The observer of a linear, by the text of a `Plan`; None where none is given."""
    if probe_forward is None or probe_backward is None:
        return None
    return Observer(Plan.parse(probe), probe_forward, probe_backward, grouped)


@operator(
    key=TRACED, traits=Traits(stored_weights=True), schema=f"(Tensor input, Tensor weight, Tensor? bias, {STATEFUL}"
)
def linear_stateful(
    input: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, forward_amax: Tensor | None,
    backward_amax: Tensor | None, step: Tensor | None, random: Tensor | None, spec: str,
    weight_rowwise: list[Tensor] | None = None, weight_columnwise: list[Tensor] | None = None,
    probe_forward: Tensor | None = None, probe_backward: Tensor | None = None, probe: str = "",
) -> Tensor:  # fmt: skip
    """`linear` with operands whose specs name slots or random streams of the `StepState`.

    A weight whose parts are given is not quantized again, and gets its gradient all the same. `probe` says what is
    measured of the operands, and added to the two tensors before it.
    """
    state = StepState(scale, forward_amax, backward_amax, step, random)
    measuring = observer(probe_forward, probe_backward, probe)
    context = Context(MATRICES, LinearSpec.parse(spec), state, weight_rowwise, weight_columnwise, measuring)
    return run_linear(input, weight, bias, None, context)


@operator(key=TRACED, traits=Traits(stateful=linear_stateful))
def linear(input: Tensor, weight: Tensor, bias: Tensor | None, spec: str) -> Tensor:
    """input [*, K] x weight [N, K]^T + bias [N]; or, batched, input [*batch, M, K] x weight [*batch, N, K]^T.

    The autocast dtype of the spec is applied here, since no autocast rule knows this operator.
    """
    return run_linear(input, weight, bias, None, Context(MATRICES, LinearSpec.parse(spec), STATELESS))
