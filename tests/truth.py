"""What ran, counted while it runs, beside what a report says.

A dispatch mode sees every operator that runs, of a forward and of a backward, in graphs and outside of them. Each GEMM
of quantized operands is one `Ran`, all others are their FLOPs, by torch's formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fxquant import Backend, Recipe, Report
from fxquant.backend.backend import compile_eager
from fxquant.compat.private import HigherOrderOperator, OpOverload, RunsBesideDynamo, in_backward, is_tracing
from fxquant.compat.values import fake_mode_of
from fxquant.decisions import Decision
from fxquant.formats import AttentionSpec, QuantSpec
from fxquant.passes.graph.meta import layer_of
from fxquant.passes.pipeline import Partition
from fxquant.roles import Direction, Gemm


class Ran(NamedTuple):
    """`many` GEMMs [m, k] x [n, k]^T of operands in these formats; `k` in whole blocks, 0 for a ragged one."""

    layer: str
    left: str
    right: str
    many: int
    m: int
    n: int
    k: int


class Attended(NamedTuple):
    """One attention: the formats of its operands, softmax and gradients, and its sizes."""

    layer: str
    formats: tuple[str, ...]
    entries: int
    queries: int
    keys: int
    width: int


Counts = dict[str, Counter[Any]]
"""What ran or was reported, of the ``forward`` and of the ``backward``."""


def _whole(k: int) -> int:
    """A contracted size, padded to whole blocks of every format."""
    return -(-k // 128) * 128


def _formats(spec: AttentionSpec) -> tuple[str, ...]:
    return tuple(getattr(spec, slot).format for slot in ("qkv", "s", "do", "dp"))


def _product(spec: str, parts: Sequence[Tensor]) -> tuple[str, int, int, int]:
    """The format of an operand, the size of its batch, its rows, and its contracted size."""
    parsed = QuantSpec.parse(spec)
    packed = 1 if parsed.row.element is None else parsed.row.element.packed
    *batch, rows, columns = parts[0].shape
    return parsed.row.name, prod(batch), rows, columns * packed


def _loop(condition: Any, step: Any, carried: Sequence[Any], more: Sequence[Any]) -> Sequence[Any]:
    while condition(*carried, *more):
        carried = step(*carried, *more)
    return carried


def _mapped(body: Any, inputs: Sequence[Tensor], more: Sequence[Any]) -> Sequence[Any]:
    steps = [body(*step, *more) for step in zip(*(x.unbind() for x in inputs), strict=True)]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*steps, strict=True)]


def _scanned(step: Any, carried: Sequence[Any], inputs: Sequence[Tensor], more: Sequence[Any]) -> Sequence[Any]:
    def body(*slices: Any) -> Sequence[Any]:
        nonlocal carried
        result = step(*carried, *slices, *more)
        carried = result[: len(carried)]
        return result[len(carried) :]  # type: ignore[no-any-return]

    outputs = _mapped(body, inputs, ())
    return [*carried, *outputs]


BODIES: dict[str, Callable[..., Any]] = {
    "invoke_subgraph": lambda graph, _, *operands: graph(*operands),
    "cond": lambda holds, yes, no, operands: (yes if holds else no)(*operands),
    "while_loop": _loop,
    "map_impl": _mapped,
    "scan": _scanned,
}
"""The meanings of operators that run graphs, by their names."""


class Counted(RunsBesideDynamo):  # type: ignore[no-untyped-call]
    """Counts what runs in its scope: `quantized` GEMMs and attentions, and `plain` FLOPs by the name of the operator.

    The graphs of a `Layered` backend tell the `layer` of what runs.
    """

    layer = ""

    def __init__(self, formulas: Mapping[Any, Any] = flop_registry) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.formulas = formulas
        self.quantized: Counts = {"forward": Counter(), "backward": Counter()}
        self.plain: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (body := BODIES.get(getattr(func, "_name", ""))) is not None:  # which this sees then
            with self:
                return body(*args)
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if is_tracing() or fake_mode_of(tensors) is not None or any(x.is_meta for x in tensors):
            return result
        phase = "backward" if in_backward() else "forward"
        if isinstance(func, HigherOrderOperator):  # an operator with a random state, in a checkpoint
            place = next((i for i, x in enumerate(args) if isinstance(x, OpOverload)), None)
            if place is not None:
                func, args = args[place], args[place + 1 :]
        packet = getattr(func, "overloadpacket", func)
        name = getattr(packet, "__name__", "")
        if getattr(func, "namespace", "") == "fxquant":
            self.quantized[phase] += _quantized(Counted.layer, name, args)
        elif packet in self.formulas:
            self.plain[phase][name] += self.formulas[packet](*args, **(kwargs or {}), out_val=result)
        return result


class _Layers(fx.Interpreter):
    """Runs a graph, and says for each node which layer it was written for."""

    def run_node(self, n: fx.Node) -> Any:
        Counted.layer = layer_of(n)
        try:
            return super().run_node(n)
        finally:
            Counted.layer = ""


class Layered(Backend):
    """Runs the operators of a graph one by one, under the names of their layers."""

    def __init__(self, recipe: Recipe | str, **options: Any) -> None:
        super().__init__(recipe, inner="aot_eager", **options)

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        partition = Partition(self.settings, reasons=self._record.considered)
        return compile_eager(gm, example_inputs, lambda module, _: _Layers(module).run, partition)


def _quantized(layer: str, name: str, args: Sequence[Any]) -> Counter[Any]:
    if name in ("scaled_mm", "fused_scaled_mm"):
        left, many, m, k = _product(args[2], args[0])
        right, _, n, _ = _product(args[3], args[1])
        return Counter([Ran(layer, left, right, many, m, n, _whole(k))])
    if name == "grouped_scaled_mm":
        left, many, m, k = _product(args[3], args[0])
        right, weights, n, _ = _product(args[4], args[1])
        ragged = args[2] is not None and args[1][0].ndim == 2
        many = args[2].shape[0] if ragged else weights
        return Counter([Ran(layer, left, right, many, m, n, 0 if ragged else _whole(k))])
    if name.startswith(("attention_forward", "attention_backward")):
        backward = name.startswith("attention_backward")
        q, k = args[1:3] if backward else args[:2]
        spec, width = args[-2:] if backward else args[6:8]
        *batch, queries, _ = q[0].shape
        return Counter(
            [Attended(layer, _formats(AttentionSpec.parse(spec)), prod(batch), queries, k[0].shape[-2], width)]
        )
    return Counter()


def _reported(left: Decision, right: Decision) -> Ran:
    """A GEMM as its two operands are reported: an operand's shape is its own, and columnwise it is turned."""
    assert left.matmul is not None
    sizes = []
    for decision in (left, right):
        *_, rows, columns = map(int, decision.shape)
        sizes.append((rows, columns) if decision.direction is Direction.ROWWISE else (columns, rows))
    (m, k), (n, other) = sizes
    assert k == other, (left, right)
    assert left.flops == 2 * max(left.matmul.batch, 1) * m * k * n, left
    formats = [d.quantizer.spec(d.direction).row.name if d.quantizer else "identity" for d in (left, right)]
    ragged = left.matmul.groups > 0 and left.gemm is Gemm.WGRAD
    return Ran(left.layer, *formats, max(left.matmul.batch, left.matmul.groups), m, n, 0 if ragged else _whole(k))


def reported(report: Report) -> Counts:
    """The GEMMs and attentions that a report calls quantized, in one operand at least."""
    counts: Counts = {"forward": Counter(), "backward": Counter()}
    attentions: dict[int, set[Gemm]] = {}
    for (_, gemm), operands in report.gemms().items():
        left, right = operands
        if left.merged:
            continue
        attended = left.attention
        if attended is not None and attended.spec is not None:
            attentions.setdefault(attended.site, set()).add(gemm)
            if attended.site == left.site and gemm in (Gemm.FPROP, Gemm.DGRAD):
                size = attended.batch * attended.heads, attended.queries, attended.keys, attended.width
                phase = "forward" if gemm is Gemm.FPROP else "backward"
                counts[phase][Attended(left.layer, _formats(attended.spec), *size)] += 1
        elif any(d.quantizer is not None for d in operands):
            counts["forward" if gemm is Gemm.FPROP else "backward"][_reported(left, right)] += 1
    return counts


def plain_flops(report: Report) -> int:
    """The forward FLOPs of GEMMs without a quantized operand."""
    gemms = report.gemms().items()
    return sum(
        operands[0].flops
        for (_, gemm), operands in gemms
        if gemm is Gemm.FPROP and all(d.quantizer is None for d in operands)
    )


def without_layers(counts: Counts) -> Counts:
    """The same counts without the names of layers, which an exported program does not have."""
    return {
        phase: sum((Counter({gemm._replace(layer=""): count}) for gemm, count in gemms.items()), Counter())
        for phase, gemms in counts.items()
    }


def differences(ran: Counts, said: Counts, *, repeated: bool = False, merged: bool = False) -> list[str]:
    """What ran and was not reported, and the other way round.

    A backward may have `repeated` GEMMs of the forward; of equal ones that are `merged`, one has to run.
    """
    problems = []
    for phase in ("forward", "backward"):
        more, less = ran[phase] - said[phase], said[phase] - ran[phase]
        if repeated and phase == "backward":
            more = Counter({gemm: count for gemm, count in more.items() if not said["forward"][gemm]})
        if merged:
            less = Counter({gemm: count for gemm, count in less.items() if not ran[phase][gemm]})
        problems += [f"{phase}: {count} x {gemm} ran, not reported" for gemm, count in more.items()]
        problems += [f"{phase}: {count} x {gemm} reported, did not run" for gemm, count in less.items()]
    return problems
