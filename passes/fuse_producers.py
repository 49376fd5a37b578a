"""Fuse producers: a tensor that is made only to be quantized on CUDA is not written.

    h = silu(gate) * up
    both = fxquant.hybrid_quantize(h, "block_1x128_e4m3", "block_1x128_e4m3")
    # becomes
    both = fxquant.produce_quantize([gate, up], "silu_mul", ["block_1x128_e4m3"], ["block_1x128_e4m3"], ...)

for the producers of `fxquant.kernels.producers`, as Inductor has decomposed them. Two results of the same inputs, the
gradients of both factors, come out of one operator.

Only where blocks have the scales: a tensor that is scaled as a whole or by rows is left alone, and so is one that
something else reads, that Inductor would fuse by itself (a cast that is wanted rowwise alone), or where recomputed
activations have to come out with the bits of Inductor's own kernels.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat import detect_fake_mode, inductor_config, inductor_decompositions, make_fx, statically_known_true
from fxquant.formats import QuantSpec
from fxquant.kernels import triton_cast
from fxquant.kernels.producers import PRODUCERS, Producer
from fxquant.passes.base import behind_views, is_fxquant, val

_aten = torch.ops.aten
_VIEWS = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)
_COMMUTATIVE = (_aten.mul.Tensor, _aten.add.Tensor)
_NARROW = (torch.bfloat16, torch.float16)


def fuse_producers(graph: fx.Graph, device: str = "cuda") -> int:
    """Rewrites `graph` in place, for tensors on `device`; returns how many quantizations were fused."""
    if inductor_config.emulate_precision_casts:
        return 0
    sites = list(_sites(graph, device))
    order = {node: i for i, node in enumerate(graph.nodes)}
    count = 0
    for producer in PRODUCERS.values():
        for group in _groups(producer, sites):
            if _pays(group[0]) and _insert(graph, producer, group, order):
                sites = [site for site in sites if site not in group]
                count += len(group)
    if count:
        graph.eliminate_dead_code()
        graph.lint()
    return count


@dataclass(frozen=True)
class _Site:
    """A quantization of a tensor that nothing else reads, with the producers that could make it."""

    quantize: fx.Node
    amax: fx.Node | None
    made: dict[str, tuple[fx.Node, ...]]
    """The inputs of each producer that the tensor is a result of."""
    row: str | None
    column: str | None
    row_state: fx.Node | None
    column_state: fx.Node | None

    @classmethod
    def of(cls, quantize: fx.Node, amax: fx.Node | None, made: dict[str, tuple[fx.Node, ...]]) -> _Site:
        _, *args = quantize.args
        if is_fxquant(quantize, "quantize"):
            spec, _, state, *_ = (*args, None)
            return cls(quantize, amax, made, None, str(spec), None, state)  # type: ignore[arg-type]
        row, column, row_state, column_state, *_ = (*args, None, None)
        return cls(quantize, amax, made, str(row), str(column), row_state, column_state)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash(self.quantize)

    @property
    def kind(self) -> Any:
        """Equal for sites that one kernel can serve."""
        specs = [replace(QuantSpec.parse(s), slot=-1) if s else None for s in (self.row, self.column)]
        return (*specs, self.row_state is None, self.column_state is None, self.amax is None)


def _sites(graph: fx.Graph, device: str) -> Iterator[_Site]:
    """What can be fused, in the order of the graph."""
    seen: set[fx.Node] = set()
    for node in list(graph.nodes):
        if not any(is_fxquant(node, name) for name in ("quantize", "hybrid_quantize")):
            continue
        root = behind_views(node.args[0], _VIEWS)
        if root in seen:
            continue
        seen.add(root)
        users = list(_readers(root))
        quantizations = [user for user in users if is_fxquant(user) and not is_fxquant(user, "amax")]
        amaxes = [user for user in users if is_fxquant(user, "amax")]
        if len(quantizations) + len(amaxes) < len(users) or len(amaxes) > 1:
            continue
        if not all(_transposes(user, device) for user in quantizations):
            continue
        rows, length = val(node.args[0]).shape
        made = {
            name: inputs
            for name, producer in PRODUCERS.items()
            if not producer.parts and (inputs := _match(producer, root, rows, length)) is not None
        }
        if made:
            for i, quantization in enumerate(quantizations):
                yield _Site.of(quantization, amaxes[0] if amaxes and not i else None, made)


def _readers(root: fx.Node) -> Iterator[fx.Node]:
    """What reads a tensor, through views."""
    for user in root.users:
        if user.target in _VIEWS:
            yield from _readers(user)
        else:
            yield user


def _transposes(node: fx.Node, device: str) -> bool:
    """Whether a quantization is one that a Triton kernel makes, of a kind that can be fused."""
    if not any(is_fxquant(node, name) for name in ("quantize", "hybrid_quantize")) or node.args[2] == "rowwise":
        return False
    x = val(node.args[0])
    specs = [QuantSpec.parse(str(s)) for s in node.args[1 : 2 if is_fxquant(node, "quantize") else 3]]
    known = all(map(triton_cast.supports, specs))
    empty = any(statically_known_true(size == 0) for size in x.shape)
    return known and x.ndim == 2 and not empty and x.device.type == device and x.dtype in _NARROW


def _groups(producer: Producer, sites: Sequence[_Site]) -> Iterator[list[_Site]]:
    """The sites that a producer makes together: one for each of its results."""
    if not producer.parts:
        yield from ([site] for site in sites if producer.name in site.made)
        return
    (first, positions), *others = producer.parts
    assert positions == tuple(range(len(producer.inputs)))
    taken: set[_Site] = set()
    for site in sites:
        if site in taken or first not in site.made:
            continue
        group = [site]
        for name, positions in others:
            wanted = tuple(site.made[first][i] for i in positions)
            same = (s for s in sites if s not in taken and s not in group and s.kind == site.kind)
            group += [s for s in same if s.made.get(name) == wanted][:1]
        if len(group) == producer.results:
            taken.update(group)
            yield group


def _pays(site: _Site) -> bool:
    """Whether a fusion is of a kind that trained a model on a GPU, and faster (docs/performance.md).

    Those whose scales come from blocks: then the tensor is neither written nor read. The kernels take per-tensor scales
    that are known beforehand too, and amaxes in a pass of their own.
    """
    return all(QuantSpec.parse(spec).row.family in ("block", "mxfp8") for spec in (site.row, site.column) if spec)


def _insert(graph: fx.Graph, producer: Producer, group: Sequence[_Site], order: dict[fx.Node, int]) -> bool:
    """Puts one operator in the place of a group; False where a state is not there yet."""
    name = producer.parts[0][0] if producer.parts else producer.name
    inputs = group[0].made[name]
    anchor = min((node for site in group for node in (site.quantize, site.amax) if node), key=order.__getitem__)
    states = [[site.row_state for site in group], [site.column_state for site in group]]
    needed = [*inputs, *(state for side in states for state in side if state is not None)]
    if not all(_is_there(node, anchor, order) for node in needed):
        return False
    rows, length = val(group[0].quantize.args[0]).shape
    record = group[0].amax is not None
    with graph.inserting_before(anchor):
        shaped = [
            _shaped(node, {"matrix": [rows, length], "row": [rows, 1], "column": [length]}[kind])
            for node, kind in zip(inputs, producer.inputs, strict=True)
        ]
        specs = [[site.row for site in group] if group[0].row else [], [site.column for site in group]]
        target = torch.ops.fxquant.produce_quantize.default
        fused = graph.call_function(target, (shaped, producer.name, *specs, *states, record))
        fused.meta = {**anchor.meta}
        values: list[Any] = []
        for site in group:
            for item in list(site.quantize.users):
                assert item.target is operator.getitem, item.format_node()
                made = graph.call_function(operator.getitem, (fused, len(values) + item.args[1]))  # type: ignore[operator]
                made.meta = dict(item.meta)
                item.replace_all_uses_with(made)
                graph.erase_node(item)
            values += site.quantize.meta["val"]
            if site.amax is not None:
                made = graph.call_function(operator.getitem, (fused, len(values)))
                made.meta = dict(site.amax.meta)
                site.amax.replace_all_uses_with(made)
                values.append(val(site.amax))
                graph.erase_node(site.amax)
            graph.erase_node(site.quantize)
        fused.meta["val"] = values
    order[fused] = order[anchor]
    return True


def _is_there(node: fx.Node, anchor: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a node stands before another, or is a view that can be moved there, and then is."""
    if order[node] <= order[anchor]:
        return True
    if node.target not in (*_VIEWS, _aten.slice.Tensor):
        return False
    if not all(_is_there(source, anchor, order) for source in node.all_input_nodes):
        return False
    anchor.prepend(node)
    order[node] = order[anchor]
    return True


def _shaped(node: fx.Node, shape: list[Any]) -> fx.Node:
    """`node` as a tensor of a shape, in a place where nodes are inserted."""
    value = val(node)
    if len(value.shape) == len(shape) and all(map(statically_known_true, map(operator.eq, value.shape, shape))):
        return node
    made = node.graph.call_function(_aten.reshape.default, (node, shape))
    with detect_fake_mode([value]) or contextlib.nullcontext():
        made.meta = {**node.meta, "val": value.reshape(shape)}
    return made


def _match(producer: Producer, root: fx.Node, rows: Any, length: Any) -> tuple[fx.Node, ...] | None:
    """The inputs of which a producer makes `root`, a tensor of `rows` x `length` elements, if it does."""
    value = val(root)
    if not isinstance(value, Tensor):
        return None
    outputs, names = _pattern(producer.name, value.dtype)
    found: dict[fx.Node, fx.Node] = {}
    if not _matches(outputs, root, found):
        return None
    inputs = tuple(found[name] for name in names)
    for node, kind in zip(inputs, producer.inputs, strict=True):
        x = val(node)
        count = {"matrix": rows * length, "row": rows, "column": length}[kind]
        fits = statically_known_true(x.numel() == count) and x.device == value.device
        last = {"matrix": None, "row": 1, "column": length}[kind]
        fits = fits and (last is None or statically_known_true(x.shape[-1] == last))
        if not fits or (kind == "matrix" and (x.dtype != value.dtype or not x.is_contiguous())):
            return None
    return inputs


def _matches(pattern: Any, node: Any, found: dict[fx.Node, fx.Node]) -> bool:
    """Whether a node computes what a node of a pattern does, with the pattern's inputs as `found`."""
    if not isinstance(pattern, fx.Node):
        return type(pattern) is type(node) and bool(pattern == node)
    if not isinstance(node, fx.Node):
        return False
    node = behind_views(node, _VIEWS)
    if pattern.op == "placeholder":
        return found.setdefault(pattern, node) is node
    if pattern.op != node.op or pattern.target is not node.target or len(pattern.args) != len(node.args):
        return False
    if pattern.kwargs != node.kwargs:
        return False
    before = dict(found)
    for args in (node.args, node.args[::-1])[: 2 if node.target in _COMMUTATIVE else 1]:
        if all(_matches(a, b, found) for a, b in zip(pattern.args, args, strict=True)):
            return True
        found.clear()
        found.update(before)
    return False


@functools.cache
def _pattern(name: str, dtype: torch.dtype) -> tuple[fx.Node, list[fx.Node]]:
    """What a producer of one result looks like in Inductor's graphs: its output, and its inputs."""
    producer = PRODUCERS[name]
    shapes = {"matrix": (4, 8), "row": (4, 1), "column": (8,)}
    inputs = [torch.zeros(shapes[kind], dtype=torch.float32 if kind == "row" else dtype) for kind in producer.inputs]
    traced = make_fx(lambda *x: producer.run(*x), decomposition_table=dict(inductor_decompositions()))(*inputs)
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    return output.args[0], [node for node in traced.graph.nodes if node.op == "placeholder"]


def inputs_of(name: str, root: fx.Node) -> tuple[fx.Node, ...] | None:
    """The inputs of which a producer makes `root`, if it does; of 16 bits, with the last axis of `root` for columns."""
    value = val(root)
    if not isinstance(value, Tensor) or value.dtype not in _NARROW or value.ndim == 0 or 0 in value.shape:
        return None
    return _match(PRODUCERS[name], root, value.numel() // value.shape[-1], value.shape[-1])


def last_operator(name: str) -> Any:
    """What a producer ends in, as Inductor has decomposed it."""
    return _pattern(name, torch.bfloat16)[0].target


def reshaped(node: fx.Node, shape: list[Any]) -> fx.Node:
    """`node` as a tensor of a shape, in a place where nodes are inserted."""
    return _shaped(node, shape)
