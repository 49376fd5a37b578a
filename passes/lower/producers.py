"""Fuse producers: a tensor that is made only to be quantized on CUDA is not written.

    h = silu(gate) * up
    both = fxquant.hybrid_quantize(h, "block_1x128_e4m3", "block_1x128_e4m3")
    # becomes
    both = fxquant.produce_quantize([gate, up], "silu_mul rowwise=block_1x128_e4m3 columnwise=block_1x128_e4m3", ...)

for the producers of `fxquant.kernels.cast.producers`, as Inductor has decomposed them. Two results of the same inputs,
the gradients of both factors, come out of one operator. The amax that delayed scaling records comes out too, also where
the tensor itself is read: then the producer is the ``identity``. The amax that a scale is made of stays in the graph,
for Inductor to take without writing the tensor.

Fused is what moves fewer bytes (`_loss`). A tensor that something else reads is left alone, and so is one that
Inductor would fuse by itself (a cast that is wanted rowwise alone), or where recomputed activations have to come out
with the bits of Inductor's own kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxquant.compat.device import capability
from fxquant.compat.values import statically_known_true, upper_bound
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.choice import supports
from fxquant.kernels.cast.producers import IDENTITY, JOINED_HEADS, PRODUCERS, CastSpec, Producer
from fxquant.kernels.linear.few_rows import MOST_TOKENS
from fxquant.kernels.operator import Side
from fxquant.passes.graph.considered import allowed
from fxquant.passes.graph.match import behind_views, readers, shaped
from fxquant.passes.graph.meta import VAL
from fxquant.passes.graph.names import RESHAPES, SLICES, calls, is_collective, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.produced import NARROW, match_producer
from fxquant.passes.joint.scales import scale_of
from fxquant.passes.joint.sides import in_memory, sides_of
from fxquant.passes.settings import Settings

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default


def fuse_producers(graph: fx.Graph, settings: Settings) -> int:
    """Rewrites `graph` in place; returns how many quantizations were fused."""
    reasons: dict[fx.Node, str] = {}
    sites = list(_sites(graph, settings.device, reasons))
    order = {node: i for i, node in enumerate(graph.nodes)}
    count = 0
    for producer in PRODUCERS.values():
        inexact = settings.exact_recompute and not producer.exact
        for group in _groups(producer, sites):
            reason = _INEXACT if inexact else _loss(producer, group[0]) or _insert(graph, producer, group, order)
            if not inexact and (producer.parts or not reason):  # one kernel makes all results, Inductor's if not ours
                sites = [site for site in sites if site not in group]
            for site in group:
                if not reason:
                    reasons.pop(site.quantize, None)
                elif producer is not IDENTITY or (site.amax is not None and site.quantize not in reasons):
                    reasons[site.quantize] = f"{reason} ({producer.name})"
            count += 0 if reason else len(group)
    for node, reason in reasons.items():
        allowed(node, "fuse_producers", reason)
    if count:
        graph.eliminate_dead_code()
    return count


_INEXACT = "what is computed again must have the bits of Inductor's own kernels"


@dataclass(frozen=True)
class _Site:
    """A quantization of a tensor, with the producers that could make it."""

    quantize: fx.Node
    amax: fx.Node | None
    """The amax of the tensor, if it is recorded."""
    inputs: dict[str, tuple[fx.Node, ...]]
    """The inputs of each producer that the tensor is a result of."""

    def __hash__(self) -> int:
        return hash(self.quantize)

    @property
    def sides(self) -> list[Side]:
        return sides_of(self.quantize)

    @property
    def kind(self) -> Any:
        """Equal for sites that one kernel can serve."""
        sides = ((s.direction, replace(QuantSpec.parse(s.spec), slot=-1), s.state is None) for s in self.sides)
        return (*sides, self.amax is None)

    @property
    def families(self) -> set[str]:
        return {QuantSpec.parse(side.spec).row.family for side in self.sides}

    @property
    def scales_by_own_amax(self) -> bool:
        """True if a scale of the whole tensor is made of its own amax."""
        return any(side.per_tensor and _by_own_amax(side.state) for side in self.sides)


def _sites(graph: fx.Graph, device: str, reasons: dict[fx.Node, str]) -> Iterator[_Site]:
    """Yields the quantizations that can be fused, in the order of the graph; adds the `reasons` for others."""
    seen: set[fx.Node] = set()
    for node in list(graph.nodes):
        if not sides_of(node):
            continue
        root = behind_views(node.args[0], RESHAPES)
        if root in seen or val(root).device.type != device:
            continue
        seen.add(root)
        users = list(readers(root))
        quantizations = [user for user in users if sides_of(user)]
        of_scales = {_own_amax(side.state) for user in quantizations for side in sides_of(user)}
        amaxes = [user for user in users if is_fxquant(user, "amax")]
        recorded = [amax for amax in amaxes if amax not in of_scales]
        obstacles = {user: _obstacle(user) for user in quantizations}
        if len(recorded) > 1:
            obstacles = dict.fromkeys(quantizations, "its amax is recorded more than once")
        fusible = [user for user, obstacle in obstacles.items() if not obstacle]
        alone = len(fusible) + len(amaxes) == len(users) and not any(map(_inductor_fuses, fusible))
        computed = not in_memory(root)
        if computed or recorded:
            reasons.update({user: obstacle for user, obstacle in obstacles.items() if obstacle})
        for quantization in fusible:
            rows, length = val(quantization.args[0]).shape
            inputs = {
                name: matched
                for name, producer in PRODUCERS.items()
                if not producer.parts
                and (alone or producer is IDENTITY)
                and (matched := match_producer(producer, root, rows, length)) is not None
            }
            if computed:
                single = "its producer's other result is not quantized in the same way"
                unknown = single if inputs.keys() - {IDENTITY.name} else "no kernel computes what it quantizes"
                reasons[quantization] = unknown if alone else "something else reads what it quantizes"
            if inputs:
                yield _Site(quantization, next(iter(recorded), None), inputs)
                recorded = []


def _inductor_fuses(node: fx.Node) -> bool:
    """Returns True if Inductor casts where it computes the tensor: rowwise alone, and not after its amax.

    It would compute blocks again for every product that reads them, and divide by their amaxes for every element.
    """
    side, *others = sides_of(node)
    if side.direction != "rowwise" or others:
        return False
    blocks = QuantSpec.parse(side.spec).row.family == "block"
    between = blocks or (side.per_tensor and _by_own_amax(side.state))
    return not between or upper_bound(val(node.args[0]).shape[0]) <= MOST_TOKENS


def _own_amax(state: Any) -> Any:
    """Returns the amax that a scale is made of, if the graph makes it of its own tensor."""
    of_one_rank = (
        isinstance(state, fx.Node) and is_fxquant(state, "scale_from_amax") and not is_collective(state.args[0])
    )
    return state.args[0] if of_one_rank else None


def _by_own_amax(state: Any) -> bool:
    """Returns True if a scale is made of its tensor's amax, in the graph or by the quantization itself."""
    return state is None or _own_amax(state) is not None


def _obstacle(node: fx.Node) -> str:
    """Returns why a quantization is none that a Triton kernel makes, of a kind that can be fused; empty if it is."""
    x = val(node.args[0])
    if x.ndim != 2 or x.dtype not in NARROW:
        return f"kernels quantize matrices of 16 bits, not {x.ndim} axes of {str(x.dtype).removeprefix('torch.')}"
    if _inductor_fuses(node) and not in_memory(node.args[0]):
        return "Inductor casts rowwise where it computes the tensor"
    if any(statically_known_true(size == 0) for size in x.shape):
        return "it has no elements"
    if x.device.type == "cuda" and capability(x.device) < (8, 9):
        return "the device does not convert to FP8"
    unknown = [side.spec for side in sides_of(node) if not supports(QuantSpec.parse(side.spec))]
    return f"no kernel casts to {unknown[0]}" if unknown else ""


def _groups(producer: Producer, sites: Sequence[_Site]) -> Iterator[list[_Site]]:
    """Yields the sites that a producer makes together: one for each of its results."""
    if not producer.parts:
        yield from ([site] for site in sites if producer.name in site.inputs)
        return
    (first, positions), *others = producer.parts
    assert positions == tuple(range(len(producer.inputs)))
    taken: set[_Site] = set()
    for site in sites:
        if site in taken or first not in site.inputs:
            continue
        group = [site]
        for name, positions in others:
            wanted = tuple(site.inputs[first][i] for i in positions)
            same = (s for s in sites if s not in taken and s not in group and s.kind == site.kind)
            group += [s for s in same if s.inputs.get(name) == wanted][:1]
        if len(group) == producer.results:
            taken.update(group)
            yield group


def _loss(producer: Producer, site: _Site) -> str:
    """Returns why a fusion moves no fewer bytes, empty if it does; `docs/measurements/linear.md` has the times.

    An element that is written, and read by its cast, costs 4 bytes, and 2 more where amaxes of its lines are taken
    first. Unless blocks have the scales or they are given, the fused kernel comes after amaxes of what is not written:
    then the producer's inputs are read, and it is computed, once more.
    """
    if producer is IDENTITY:
        if site.amax is None or site.families != {"per_tensor"}:
            return "no amax of a tensor with one scale is recorded"
        return "its scale needs the amax first" if site.scales_by_own_amax else ""
    if site.families == {"per_row"}:
        cheap = producer.matrices < 3 and producer.results == 1 and not producer.slow
        return "" if cheap else "computing it twice, once for the amaxes of its rows, is slower"
    if site.scales_by_own_amax:
        alone = all(side.state is None for side in site.sides)  # nothing else waits for the amax
        cheap = not producer.slow and (producer.matrices < 2 or (producer.results == 2 and alone))
        return "" if cheap else "computing it twice, once for its amax, is slower"
    others = sorted(site.families - {"block", "mxfp8", "per_tensor"})
    return f"no fused kernel has scales of the kind {' and '.join(others)}" if others else ""


def _insert(graph: fx.Graph, producer: Producer, group: Sequence[_Site], order: dict[fx.Node, int]) -> str:
    """Puts one operator in the place of a group; returns why it cannot, empty if it has."""
    name = producer.parts[0][0] if producer.parts else producer.name
    inputs = group[0].inputs[name]
    anchor = min((node for site in group for node in (site.quantize, site.amax) if node), key=order.__getitem__)
    if not all(_is_there(node, anchor, order) for node in inputs):
        return "its inputs are computed later"
    states = [list(side) for side in zip(*(_states(site, order, producer) for site in group), strict=True)]
    if producer is JOINED_HEADS:
        for amax in filter(None, map(_own_amax, (state for side in states for state in side))):
            amax.args = (inputs[0],)
    if not all(_is_there(state, anchor, order) for side in states for state in side if state is not None):
        return "its scales are computed later"
    rows, length = val(group[0].quantize.args[0]).shape
    record = group[0].amax is not None
    with graph.inserting_before(anchor):
        shapes = {"matrix": [rows, length], "row": [rows, 1], "column": [length], "heads": list(val(inputs[0]).shape)}
        operands = [shaped(node, shapes[kind]) for node, kind in zip(inputs, producer.inputs, strict=True)]
        specs = {side.direction: QuantSpec.parse(side.spec) for side in group[0].sides}
        spec = str(CastSpec(producer.name, specs.get("rowwise"), specs.get("columnwise")))
        fused = graph.call_function(torch.ops.fxquant.produce_quantize.default, (operands, spec, *states, record))
        fused.meta = {**anchor.meta}
        values: list[Any] = []
        gone: list[fx.Node] = []
        for site in group:
            for item in list(site.quantize.users):
                assert item.target is operator.getitem, item.format_node()
                place = len(values) + item.args[1]  # type: ignore[operator]
                output = graph.call_function(operator.getitem, (fused, place))
                output.meta, order[output] = dict(item.meta), order[anchor]
                item.replace_all_uses_with(output)
                gone.append(item)
            values += site.quantize.meta[VAL]
            if site.amax is not None:
                output = graph.call_function(operator.getitem, (fused, len(values)))
                output.meta, order[output] = dict(site.amax.meta), order[anchor]
                site.amax.replace_all_uses_with(output)
                values.append(val(site.amax))
                gone.append(site.amax)
            gone.append(site.quantize)
        fused.meta[VAL] = values
    order[fused] = order[anchor]
    for node in gone:
        graph.erase_node(node)
    return ""


def _states(site: _Site, order: dict[fx.Node, int], producer: Producer) -> list[fx.Node | None]:
    """Returns the state that each direction takes; makes the scale of a whole tensor if there is none yet.

    A producer of two results has a kernel of its own for their amaxes.
    """
    states = {side.direction: side.state for side in site.sides}
    scales: dict[str, fx.Node] = {}
    for direction, spec, state in site.sides:
        if producer.results == 1 and state is None and QuantSpec.parse(spec).row.family == "per_tensor":
            if spec not in scales:
                scales[spec] = scale_of(site.quantize, spec)
                order[scales[spec]] = order[scales[spec].args[0]] = order[site.quantize]  # type: ignore[index]
            states[direction] = scales[spec]
    return [states.get("rowwise"), states.get("columnwise")]


def _is_there(node: fx.Node, anchor: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Returns True if a node stands before another; moves it there if it can."""
    if order[node] < order[anchor]:
        return True
    tags = getattr(node.target, "tags", ())
    movable = calls(node, RESHAPES | SLICES) or node.target is _CONVERT or torch.Tag.pointwise in tags
    if not movable and not is_fxquant(node, "amax", "scale_from_amax"):
        return False
    if not all(_is_there(source, anchor, order) for source in node.all_input_nodes):
        return False
    anchor.prepend(node)
    order[node] = order[anchor] - 1
    return True
