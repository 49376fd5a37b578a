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
from collections.abc import Iterable
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
"""What the buffers of a quantized weight are called, behind the weight's own name."""


_Found = tuple[int, set[fx.Node], int, int]
"""A site, what its weight was made of, and the bytes of that and of what is stored."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One quantized weight: what it was made from, and the bytes of that and of what it became.

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
    made: dict[Any, list[fx.Node]] = {}
    found: list[_Found] = []
    for gm in state.bodies.modules:
        for node in [each for each in gm.graph.nodes if _quantizes_alone(each)]:
            value = state.value(node.args[0]) if state.bodies.can_reach(gm.graph) else None
            if value is None or not value[1]:
                continue
            weight, roots = value
            readers = readers_of(node)
            key = (_story(state, node.args[0]), node.target, *node.args[1:])
            if key not in made:
                base = state.name(next(iter(roots))) if len(roots) == 1 else f"{layer_of(node)}.weight".strip(".")
                parts = node.target(weight, *node.args[1:])
                made[key] = [state.add(f"{base}_{part}", t) for part, t in zip(PARTS, parts, strict=False)]
            before, after = (sum(_bytes(state.tensor(n)) for n in nodes) for nodes in (roots, made[key]))
            found += [(reader.meta[SITE], set(roots), before, after) for reader in readers]
            _replace(node, made[key], state)
    parts, obstacles = _store_parts(state, made)
    found += parts
    replaced = {root for _, roots, _, _ in found for root in roots} | state.lifted
    names = {root: state.name(root) for root in replaced}
    broken = {root for root in replaced if not _finite(state.tensor(root))}
    inputs = [node for gm in state.bodies.modules for node in gm.graph.find_nodes(op="placeholder")]
    erase_unused_users(node for node in inputs if state.roots(node) & replaced)
    state.bodies.drop_unused()
    erase_unused_users(replaced)
    kept = {root: tuple(sorted({_text(user) for user in root.users})) for root in replaced}
    state.drop_unused(replaced)
    by_site = {site: Stored(obstacle=text) for site, text in obstacles.items()}
    for site, originals, before, after in found:
        sources = tuple(sorted(names[root] for root in originals))
        kept_for = tuple(sorted({user for root in originals for user in kept[root]}))
        wrong = tuple(sorted(names[root] for root in originals & broken))
        by_site[site] = Stored(sources=sources, before=before, after=after, kept_for=kept_for, broken=wrong)
    return by_site


def _store_parts(state: ProgramState, made: dict[Any, list[fx.Node]]) -> tuple[list[_Found], dict[int, str]]:
    """Stores what users' own quantizers made of weights; returns that, and by site why of others nothing is stored."""
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
        key = _story(state, node)
        if key not in made:
            base = state.name(next(iter(roots))) if len(roots) == 1 else f"{layer_of(node)}.weight".strip(".")
            made[key] = [state.add(f"{base}_{PARTS[node.meta[PART]]}", tensor.contiguous())]
        for site in sites[node]:
            of, to = stored.setdefault(site, (set(), set()))
            of.update(roots)
            to.update(made[key])
        node.replace_all_uses_with(state.bodies.reach(node.graph, made[key][0]))
        assert_dtypes(made[key])
    found: list[_Found] = []
    for site, (of, to) in stored.items():
        before, after = (sum(_bytes(state.tensor(n)) for n in nodes) for nodes in (of, to))
        found.append((site, of, before, after))
    return found, obstacles


def _sites(node: fx.Node, constants: set[fx.Node]) -> set[int]:
    """The sites whose product reads what comes of a node and of other constants alone."""
    sites: set[int] = set()
    seen, left = {node}, [node]
    while left:
        for user in left.pop().users:
            sites |= {user.meta[SITE]} if SITE in user.meta else set()
            if user not in seen and user in constants:
                seen.add(user)
                left.append(user)
    return sites


def _quantizes_alone(node: fx.Node) -> bool:
    """Whether a node quantizes its first argument and reads no other tensor."""
    quantizes = is_fxquant(node, "quantize") or is_fxquant(node, "split_quantize")
    return quantizes and node.all_input_nodes == [node.args[0]]


def readers_of(node: fx.Node) -> list[fx.Node]:
    """The GEMMs that multiply what a quantize node makes."""
    return list(dict.fromkeys(reader for item in node.users for reader in item.users if SITE in reader.meta))


def _replace(node: fx.Node, placeholders: list[fx.Node], state: ProgramState) -> None:
    """Points the readers of a quantized tensor's parts at the buffers, and erases the quantization."""
    read: list[Any] = [item.args[1] for item in node.users]
    put_in_places({i: state.bodies.reach(node.graph, placeholders[i]) for i in read}, node)


def _story(state: ProgramState, node: fx.Node, told: dict[fx.Node, str] | None = None) -> str:
    """Equal for nodes that make the same tensor from the same state, in whatever graph."""
    told = {} if told is None else told
    if node in told:
        return told[node]
    if node.op == "placeholder":
        outer = node.graph is state.bodies.top.graph
        told[node] = node.name if outer else _story(state, state.bodies.passed(node)[0], told)
    else:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _story(state, n, told))
        told[node] = hashlib.sha256(str((node.target, args, kwargs)).encode()).hexdigest()
    return told[node]


def erase_unused_users(nodes: Iterable[fx.Node]) -> None:
    """Erases what was computed from weights that nothing reads any more, and checks of a weight that always hold."""
    reached: dict[fx.Graph, set[fx.Node]] = {}
    left = list(nodes)
    while left:
        for user in left.pop().users:
            if user not in reached.setdefault(user.graph, set()):
                reached[user.graph].add(user)
                left.append(user)
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
    """Whether all elements are numbers, as far as there are any."""
    known = tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.is_meta
    return not known or bool(tensor.isfinite().all())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


__all__ = ["PARTS", "Stored", "erase_unused_users", "readers_of", "store_weights"]
