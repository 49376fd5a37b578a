"""Store weights: quantizes weights now and puts their payloads and scales into the program's state.

    permute = torch.ops.aten.permute.default(p_weight, [1, 0])
    quantize = torch.ops.fxquant.quantize.default(permute, "mxfp8_e4m3", "rowwise")
    # becomes, with two more buffers in the state and one parameter less
    b_weight_data, b_weight_scale

The bytes are those that the operator would have given when run. What else reads a weight keeps it in the state.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fxquant.compat.private import OpOverload
from fxquant.passes.export.dtypes import assert_dtypes
from fxquant.passes.export.program_state import ProgramState
from fxquant.passes.graph.builder import put_in_places
from fxquant.passes.graph.meta import PART, SITE, layer_of
from fxquant.passes.graph.names import is_fxquant, op_name

PARTS = ("data", "scale", "global_amax")
"""The names of the buffers of a quantized weight, behind the weight's own."""

_At = tuple[int, set[fx.Node], int, int]
"""A site, the placeholders that its weight was made of, and the bytes of those and of what is stored."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One quantized weight: the tensors that it was made from, and the bytes before and after.

    `kept_for` names the operators that still read a source, which therefore stays. `broken` names sources with NaN or
    infinities in them, which not every format keeps. `obstacle` says why nothing is stored.
    """

    sources: tuple[str, ...] = ()
    before: int = 0
    after: int = 0
    kept_for: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    obstacle: str = ""


def store_weights(state: ProgramState) -> dict[int, Stored]:
    """Stores every weight of the program; returns them by the sites that multiply them."""
    added: dict[Any, list[fx.Node]] = {}
    stored: list[_At] = []
    for gm in state.bodies.modules:
        for node in list(filter(_quantizes_alone, gm.graph.nodes)):
            value = state.value(node.args[0]) if state.bodies.can_reach(gm.graph) else None
            if value is None or not value[1]:
                continue
            weight, roots = value
            readers = readers_of(node)
            key = (_key(state, node.args[0]), node.target, *node.args[1:])
            if key not in added:
                base, parts = _base(state, node, roots), node.target(weight, *node.args[1:])
                added[key] = [state.add(f"{base}_{part}", t) for part, t in zip(PARTS, parts, strict=False)]
            stored += [(reader.meta[SITE], set(roots), *_sizes(state, roots, added[key])) for reader in readers]
            _replace(node, added[key], state)
    parts, obstacles = _store_parts(state, added)
    stored += parts
    replaced = {root for _, roots, _, _ in stored for root in roots} | state.lifted
    names = {root: state.name(root) for root in replaced}
    broken = {root for root in replaced if not _finite(state.tensor(root))}
    inputs = [node for gm in state.bodies.modules for node in gm.graph.find_nodes(op="placeholder")]
    erase_unused_users(node for node in inputs if state.roots(node) & replaced)
    state.bodies.drop_unused()
    erase_unused_users(replaced)
    kept = {root: tuple(sorted({_text(user) for user in root.users})) for root in replaced}
    state.drop_unused(replaced)
    by_site = {site: Stored(obstacle=text) for site, text in obstacles.items()}
    for site, originals, before, after in stored:
        sources = tuple(sorted(names[root] for root in originals))
        kept_for = tuple(sorted({user for root in originals for user in kept[root]}))
        wrong = tuple(sorted(names[root] for root in originals & broken))
        by_site[site] = Stored(sources=sources, before=before, after=after, kept_for=kept_for, broken=wrong)
    return by_site


def _store_parts(state: ProgramState, added: dict[Any, list[fx.Node]]) -> tuple[list[_At], dict[int, str]]:
    """Stores the parts that users' quantizers made of weights; returns them, and by site why others are not stored."""
    constants = state.constant_nodes()
    values: dict[fx.Node, Any] = {}
    sites: dict[fx.Node, set[int]] = {}
    obstacles: dict[int, str] = {}
    for gm in state.bodies.modules:
        sides: dict[int, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            if PART in node.meta and node in constants and not state.roots(node):
                sides.setdefault(node.meta[SITE], []).append(node)
                sites[node] = _sites(node, constants)
        for parts in sides.values():
            values |= state.values(parts)
    for node, value in values.items():
        if value is None:
            obstacles |= dict.fromkeys(sites[node], "; ".join(state.obstacles(node)))
    stored: dict[int, tuple[set[fx.Node], set[fx.Node]]] = {}
    for node, value in values.items():
        if value is None or not value[1] or not state.bodies.can_reach(node.graph):
            continue
        tensor, roots = value
        key = _key(state, node)
        if key not in added:
            name = f"{_base(state, node, roots)}_{PARTS[node.meta[PART]]}"
            added[key] = [state.add(name, tensor.contiguous())]
        for site in sites[node]:
            sources, payload = stored.setdefault(site, (set(), set()))
            sources.update(roots)
            payload.update(added[key])
        node.replace_all_uses_with(state.bodies.reach(node.graph, added[key][0]))
        assert_dtypes(added[key])
    return [(site, nodes[0], *_sizes(state, *nodes)) for site, nodes in stored.items()], obstacles


def _base(state: ProgramState, node: fx.Node, roots: Collection[fx.Node]) -> str:
    """Returns the name of a weight: its parameter's, or its layer's if it is made from several."""
    return state.name(next(iter(roots))) if len(roots) == 1 else f"{layer_of(node)}.weight".strip(".")


def _sizes(state: ProgramState, before: Iterable[fx.Node], after: Iterable[fx.Node]) -> tuple[int, int]:
    """Returns the bytes of placeholders before and after."""
    sizes = [sum(t.numel() * t.element_size() for t in map(state.tensor, nodes)) for nodes in (before, after)]
    return sizes[0], sizes[1]


def _sites(node: fx.Node, constants: set[fx.Node]) -> set[int]:
    """Returns the sites whose product reads what is computed of a node and of other constants alone."""
    sites: set[int] = set()
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            sites |= {user.meta[SITE]} if SITE in user.meta else set()
            if user not in seen and user in constants:
                seen.add(user)
                todo.append(user)
    return sites


def _quantizes_alone(node: fx.Node) -> bool:
    """Returns True if a node quantizes its first argument and reads no other tensor."""
    quantizes = is_fxquant(node, "quantize", "split_quantize")
    return quantizes and node.all_input_nodes == [node.args[0]]


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Returns the GEMMs that multiply a quantized tensor."""
    return list(dict.fromkeys(reader for item in node.users for reader in item.users if SITE in reader.meta))


def _replace(node: fx.Node, placeholders: list[fx.Node], state: ProgramState) -> None:
    """Points the readers of a quantized tensor's parts at the buffers, and erases the quantization."""
    read: list[Any] = [item.args[1] for item in node.users]
    put_in_places({i: state.bodies.reach(node.graph, placeholders[i]) for i in read}, node)


def _key(state: ProgramState, node: fx.Node, keys: dict[fx.Node, str] | None = None) -> str:
    """Returns a text that is equal for nodes of any graph that compute the same from the same state."""
    keys = {} if keys is None else keys
    if node in keys:
        return keys[node]
    if node.op == "placeholder":
        outer = node.graph is state.bodies.top.graph
        keys[node] = node.name if outer else _key(state, state.bodies.passed(node)[0], keys)
    else:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _key(state, n, keys))
        keys[node] = hashlib.sha256(str((node.target, args, kwargs)).encode()).hexdigest()
    return keys[node]


def erase_unused_users(nodes: Iterable[fx.Node]) -> None:
    """Erases nodes that compute something of weights for nothing, and checks of a weight that always hold."""
    reached: dict[fx.Graph, set[fx.Node]] = {}
    todo = list(nodes)
    while todo:
        for user in todo.pop().users:
            if user not in reached.setdefault(user.graph, set()):
                reached[user.graph].add(user)
                todo.append(user)
    for graph, users in reached.items():
        for user in reversed(graph.nodes):
            called = isinstance(user.target, OpOverload) or user.target is operator.getitem
            if user not in users or user.users or not called:
                continue
            if not user.is_impure() or op_name(user) == "_assert_tensor_metadata":
                graph.erase_node(user)


def _text(node: fx.Node) -> str:
    return "the result" if node.op == "output" else op_name(node).rpartition("::")[2]


def _finite(tensor: Tensor) -> bool:
    """Returns True if all elements that can be looked at are finite."""
    readable = tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.is_meta
    return not readable or bool(tensor.isfinite().all())
