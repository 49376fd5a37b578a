"""Fuse epilogues: a GEMM's result that is only activated, added to something, or measured, is finished by the GEMM.

    y = fxquant.scaled_mm(x_parts, w_parts, ...)
    z = gelu(y) + residual
    parts = fxquant.quantize(z, "per_tensor_e4m3", "rowwise")
    # becomes
    z, amax = fxquant.fused_scaled_mm(x_parts, w_parts, ..., "gelu", residual, record=True)
    parts = fxquant.quantize(z, "per_tensor_e4m3", "rowwise", fxquant.scale_from_amax(amax, "per_tensor_e4m3"))

Sums of GEMMs are such: the gradients of an input that several layers read. What else reads the result in between, as
the backward of an activation does, keeps it apart. Nothing is fused where recomputed activations have to come out with
the bits of Inductor's own kernels.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.device import card_name, is_hopper
from fxquant.compat.values import on_fakes, size_hint, statically_known_true
from fxquant.cost.gemms import choose_gemm
from fxquant.formats import QuantSpec
from fxquant.kernels.linear import timing as gemm_timing
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.linear.epilogues import ACTIVATIONS
from fxquant.kernels.linear.few_rows import MOST_TOKENS
from fxquant.kernels.linear.problem import Problem, triton_multiplies
from fxquant.kernels.operator import Chosen
from fxquant.passes.graph.considered import allowed
from fxquant.passes.graph.match import behind_views, matches, pattern_of, readers, shaped
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import RESHAPES, calls, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.sides import sides_of
from fxquant.passes.lower.few_rows import decodes
from fxquant.passes.settings import Settings

log = logging.getLogger(__name__)

_aten = torch.ops.aten
_MOST_NODES = 32
"""Nodes of an activation, as Inductor decomposes it."""


@dataclass(kw_only=True)
class Epilogue:
    """The operations that a GEMM can do behind its product; its result then is `root`."""

    root: fx.Node
    bias: fx.Node | None
    activation: str = ""
    residual: fx.Node | None = None
    amaxes: tuple[fx.Node, ...] = ()
    """The readers that take the amax of the whole tensor: `amax`, or a quantization without a given scale."""

    @property
    def fuses(self) -> bool:
        """Returns True if anything of it is another kernel behind cuBLAS."""
        return bool(self.activation or self.residual or self.amaxes)


def fuse_epilogues(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many GEMMs were rewritten."""
    # the C++ wrapper of torch 2.11 has workspace for the descriptors of one program alone
    fuses = not (settings.exact_recompute or settings.cpp_wrapper)
    if settings.gemm == "cublas" or (settings.gemm == "triton" and not fuses):
        return 0
    count = 0
    scales: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in _gemms(graph):
        where = val(node).device
        if where.type != settings.device or decodes(node):
            continue
        if where.type == "cuda" and not is_hopper(where):
            allowed(node, _STEP, "Triton's GEMM is for Hopper")
            continue
        # of the graph as it is by now: a sum has one GEMM that takes it
        possible = _epilogue(node)
        epilogue = possible if fuses else Epilogue(root=node, bias=node.args[4])  # type: ignore[arg-type]
        problem = _problem(node, epilogue)
        chosen, apart = _choose(problem, settings.gemm, where), _kept_apart(possible)
        log.info("%s: %s", problem, chosen)
        if chosen.kernel is GemmKernel.TRITON and fuses:
            _insert(graph, node, epilogue)
            count += 1
        elif chosen.kernel is GemmKernel.PER_ROW and _is_per_tensor(node) and isinstance(val(node).shape[0], int):
            _scale_rows(graph, node, scales)
            count += 1
        if chosen.kernel is not GemmKernel.TRITON or not fuses:
            obstacle = "" if fuses else _INEXACT
            reason = obstacle or _problem(node, possible).left_to_others(chosen)
            allowed(node, _STEP, reason if possible.fuses else "")
        allowed(node, _STEP, apart)
    if count:
        graph.eliminate_dead_code()
    return count


_STEP = "fuse_epilogues"
_INEXACT = "Inductor's own kernels have other bits, or only they take the C++ wrapper"


def _kept_apart(epilogue: Epilogue) -> str:
    """Returns why a GEMM leaves a sum with its result to others; empty if it takes it, or there is none."""
    users = list(readers(epilogue.root))
    if epilogue.residual is not None or not any(user.target is _aten.add.Tensor for user in users):
        return ""
    return "something else than a sum reads its result" if len(users) > 1 else "its sum has another shape or dtype"


def problems(graph: fx.Graph) -> Iterator[tuple[fx.Node, Problem, fx.Node]]:
    """The GEMMs that a Hopper GPU would have a choice for, wherever they are, each with all that can be fused.

    The last node of each is the result of that.
    """
    taken: set[fx.Node] = set()
    for node in _gemms(graph):
        epilogue = _epilogue(node)
        if epilogue.residual is not None and epilogue.root in taken:
            epilogue = replace(epilogue, residual=None, amaxes=())
        taken.add(epilogue.root)
        problem = _problem(node, epilogue)
        if not problem.fast_accum or problem.m > MOST_TOKENS:
            yield node, problem, epilogue.root


def _gemms(graph: fx.Graph) -> list[fx.Node]:
    """Returns the GEMMs that the Triton kernel can do."""

    def supports(node: fx.Node) -> bool:
        arguments: Any = fx.node.map_arg(node.args, val)
        a, b, a_spec, b_spec, _, dtype, _ = arguments
        return triton_multiplies(a, QuantSpec.parse(a_spec), b, QuantSpec.parse(b_spec), dtype)

    nodes = graph.find_nodes(op="call_function", target=torch.ops.fxquant.scaled_mm.default)
    return [node for node in nodes if supports(node)]


def _epilogue(node: fx.Node) -> Epilogue:
    """Returns all that can be fused with a GEMM, in the order in which the kernel does it."""
    epilogue = Epilogue(root=node, bias=node.args[4])  # type: ignore[arg-type]
    if epilogue.bias is None and (added := _added(epilogue.root, _is_bias)):
        epilogue.root, epilogue.bias = added
    if activated := _activated(epilogue.root):
        epilogue.root, epilogue.activation = activated
    if added := _added(epilogue.root, _is_residual):
        epilogue.root, epilogue.residual = added
    epilogue.amaxes = tuple(user for user in readers(epilogue.root) if _takes_amax(user))
    return epilogue


def _takes_amax(node: fx.Node) -> bool:
    if is_fxquant(node, "amax"):
        return True
    sides = sides_of(node)
    return bool(sides) and all(side.per_tensor and side.state is None for side in sides)


def _problem(node: fx.Node, epilogue: Epilogue) -> Problem:
    """Returns the problem to time; dynamic sizes are those of the example."""
    arguments: Any = fx.node.map_arg(node.args, val)
    a, b, a_spec, b_spec, _, dtype, fast_accum = arguments
    m, k, n = (size_hint(size) for size in (*a[0].shape, b[0].shape[0]))
    return Problem(
        m, k, n, a_spec, b_spec, dtype, fast_accum, epilogue.bias is not None, epilogue.activation,
        epilogue.residual is not None, bool(epilogue.amaxes),
    )  # fmt: skip


def _choose(problem: Problem, gemm: str, device: torch.device) -> Chosen[GemmKernel]:
    """Returns cuBLAS or Triton, and why."""
    if gemm == "triton":
        return Chosen(GemmKernel.TRITON, "as asked for")
    look = gemm_timing.measured if gemm == "autotune" and device.type == "cuda" else gemm_timing.remembered
    times = look(problem, device)
    if times is not None:
        return times.chosen(problem, "measured")
    return choose_gemm(problem, card_name(device))


def _added(root: fx.Node, fits: Callable[[Tensor, Tensor], bool]) -> tuple[fx.Node, fx.Node] | None:
    """Returns the sum that is the only reader of a tensor, and the other term."""
    users = list(readers(root))
    if len(users) != 1 or users[0].target is not _aten.add.Tensor or users[0].kwargs:
        return None
    sides = users[0].args
    is_root = [behind_views(side, RESHAPES) is root for side in sides]
    if all(is_root) or not all(isinstance(side, fx.Node) for side in sides):
        return None
    side, other = sides if is_root[0] else sides[::-1]
    assert isinstance(other, fx.Node)
    total, value = val(users[0]), val(other)
    same = total.shape == val(side).shape and total.dtype == value.dtype == val(root).dtype
    return (users[0], other) if same and value.device == total.device and fits(value, total) else None


def _is_bias(value: Tensor, total: Tensor) -> bool:
    width = total.shape[-1]
    return statically_known_true(value.shape[-1] == width) and statically_known_true(value.numel() == width)


def _is_residual(value: Tensor, total: Tensor) -> bool:
    aligned = statically_known_true(value.storage_offset() * value.dtype.itemsize % 16 == 0)  # it comes by TMA
    return value.shape == total.shape and value.is_contiguous() and aligned


def _activated(root: fx.Node) -> tuple[fx.Node, str] | None:
    """The activation of a tensor that nothing else reads, and its name."""
    following = list(_following(root, None))
    for end in following:
        if not isinstance(val(end), Tensor) or val(end).dtype != val(root).dtype or calls(end, RESHAPES):
            continue
        for name, decomposed in itertools.product(ACTIVATIONS, (True, False)):
            output, (source,) = pattern_of(ACTIVATIONS[name], (((4, 8), val(root).dtype),), decomposed=decomposed)
            matched: dict[fx.Node, fx.Node] = {}
            if matches(output, end, matched) and matched[source] is root:
                inside = set(_following(root, end))
                if all(user in inside or user is end for node in (root, *inside) for user in node.users):
                    return end, name
    return None


def _following(root: fx.Node, end: fx.Node | None) -> Iterator[fx.Node]:
    """Yields some nodes that are computed of a node without passing `end`, the nearest first."""
    seen, queue = {root}, [root]
    for node in queue:
        for user in node.users:
            if user is not end and user not in seen and user.op == "call_function" and len(seen) <= _MOST_NODES:
                seen.add(user)
                queue.append(user)
                yield user


def _insert(graph: fx.Graph, node: fx.Node, epilogue: Epilogue) -> None:
    """Puts the operator in the place of what it computes last."""
    a, b, a_spec, b_spec, _, dtype, fast_accum = node.args
    y, root = val(node), epilogue.root
    with graph.inserting_before(root):
        bias, residual = epilogue.bias, epilogue.residual
        bias = None if bias is None else shaped(bias, [y.shape[1]])
        residual = None if residual is None else shaped(residual, [*y.shape])
        record = bool(epilogue.amaxes)
        fused = graph.call_function(
            torch.ops.fxquant.fused_scaled_mm.default,
            (a, b, a_spec, b_spec, bias, dtype, fast_accum, epilogue.activation, residual, record),
        )
        results = [graph.call_function(operator.getitem, (fused, i)) for i in range(1 + record)]
        fused.meta = {**node.meta, VAL: [y, *([_amax_value(y)] if record else [])]}
        for result, value in zip(results, fused.meta[VAL], strict=True):
            result.meta = {**node.meta, VAL: value}
        end = results[0] if root is node else shaped(results[0], [*val(root).shape])
    root.replace_all_uses_with(end)
    graph.erase_node(root)
    for amax in epilogue.amaxes:
        if is_fxquant(amax, "amax"):
            amax.replace_all_uses_with(results[1])
            graph.erase_node(amax)
        else:
            target = torch.ops.fxquant.scale_from_amax.default
            with graph.inserting_before(amax):
                scales = [graph.call_function(target, (results[1], side.spec)) for side in sides_of(amax)]
            for scale in scales:
                scale.meta = dict(results[1].meta)
            amax.args = (*amax.args, *scales)


def _is_per_tensor(node: fx.Node) -> bool:
    return all(QuantSpec.parse(str(spec)).row.family == "per_tensor" for spec in node.args[2:4])


def _scale_rows(graph: fx.Graph, node: fx.Node, scales: dict[tuple[fx.Node, int], fx.Node]) -> None:
    """Gives a GEMM the left scale once for each row, so that it becomes the kernel for scales of rows.

    `scales` maps (scale, rows) to the expanded scale that an earlier GEMM uses.
    """
    arguments: Any = node.args
    (data, scale), b, _, b_spec, *rest = arguments
    element = QuantSpec.parse(str(node.args[2])).row.element
    assert element is not None
    key = (scale, val(node).shape[0])
    if key not in scales:
        shape = [key[1], 1]
        with graph.inserting_before(node), on_fakes(val(scale)):
            wide = graph.call_function(_aten.expand.default, (scale, shape))
            rows = graph.call_function(_aten.clone.default, (wide,), {"memory_format": torch.contiguous_format})
            wide.meta = {**scale.meta, VAL: val(scale).expand(shape)}
            rows.meta = {**scale.meta, VAL: val(wide).contiguous()}
        scales[key] = rows
    node.args = ([data, scales[key]], b, f"per_row_{element.name}", b_spec, *rest)


def _amax_value(y: Tensor) -> Tensor:
    with on_fakes(y):
        return y.new_empty(1, dtype=torch.float32)
