"""The passes over a captured graph: each takes the facts that are known of it and returns a new value with more.

The work is done in `find`, `plan` and `insert`; here is what one hands to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, fx

from fxquant.compat.private import tag_activation_checkpoint
from fxquant.decisions import Decision
from fxquant.formats import LINEAR_OPERANDS
from fxquant.passes.find import mha
from fxquant.passes.find.facts import Match, decisions_of, quantized
from fxquant.passes.find.walk import find_matmuls
from fxquant.passes.graph.meta import for_layer
from fxquant.passes.graph.names import is_fxquant
from fxquant.passes.insert import bind_state as states
from fxquant.passes.insert import cache_weights as weights
from fxquant.passes.insert import linear, observers, plain, regions
from fxquant.passes.insert import localize as placed
from fxquant.passes.insert.places import mark_places
from fxquant.passes.plan import layers, reuse, weigh
from fxquant.passes.plan import resolve as products
from fxquant.passes.plan.attention import SLOTS
from fxquant.passes.settings import Settings
from fxquant.probes import IN_REGION, Observed, Request, Unmeasured
from fxquant.quantizers import IdentityQuantizer
from fxquant.recipes import HighPrecision, Recipe
from fxquant.roles import QuantizerRole
from fxquant.state import Slots, State


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A captured graph, the bodies inside it, and what the passes before have found out.

    `autocast` has the dtypes of regions entered around the graph, by device type; `names` the full names of modules,
    by their ids. Sites are counted from `first_site`. `all_ranks` says that delayed scaling takes the largest amaxes of
    all ranks. `matches` is None as long as nothing was looked for.
    """

    gm: fx.GraphModule
    recipe: Recipe
    autocast: Mapping[str, torch.dtype] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    first_site: int = 0
    all_ranks: bool = False
    matches: Sequence[Match] | None = None
    named: bool = False
    decisions: Sequence[Decision] = ()
    roles: Sequence[QuantizerRole] = ()
    slots: Slots = field(default_factory=Slots)

    @property
    def known(self) -> Sequence[Match]:
        """The matches, which a pass before has looked for."""
        assert self.matches is not None
        return self.matches

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """The graph and all bodies inside it."""
        return [module for module in self.gm.modules() if isinstance(module, fx.GraphModule)]


C = TypeVar("C", bound=Captured)


def inputs_first(captured: C, settings: Settings) -> C:
    """Moves inputs to the front of their graphs, in their order."""
    for module in captured.graphs:
        first = next(node for node in module.graph.nodes if node.op != "placeholder")
        late = [node for node in module.graph.find_nodes(op="placeholder") if first < node]
        for node in late:
            first.prepend(node)
        if late:
            module.recompile()
    return captured


def localize(captured: C, settings: Settings) -> C:
    """Writes products of tensors that are spread over a mesh as products of this rank's parts."""
    if placed.localize(captured.graphs):
        for module in captured.graphs:
            module.recompile()
    return captured


def split_regions(captured: C, settings: Settings) -> C:
    """Gives each call of a region that is compiled once a body of its own."""
    if regions.split_regions(captured.gm, partial(layers.layer_name, names=captured.names)):
        captured.gm.recompile()
    return captured


def find(captured: C, settings: Settings) -> C:
    """Looks for matmuls, unless they are known."""
    if captured.matches is not None:
        return captured
    return replace(captured, matches=find_matmuls(captured.gm, autocast=captured.autocast))


def name_layers(captured: C, settings: Settings) -> C:
    """Gives every match the name of its layer, unless they have names."""
    if captured.named:
        return captured
    return replace(captured, matches=layers.name_layers(captured.known, captured.names), named=True)


def open_modules(captured: C, settings: Settings) -> C:
    """Opens attention modules inside which the recipe quantizes something; then matches have to be found again."""
    if not _quantizes_inside(captured.known, captured.recipe) or not mha.open_modules(captured.known):
        return captured
    return replace(captured, matches=None, named=False)


def _quantizes_inside(matches: Sequence[Match], recipe: Recipe) -> bool:
    """Returns True if the recipe would quantize a linear, or the attention, inside a node that can be opened."""
    closed = [match.name for match in matches if match.can_open]
    roles = [
        QuantizerRole("linear", kind, f"{name}.{part}".strip("."))
        for name in closed
        for part in ("in_proj", "out_proj")
        for kind in LINEAR_OPERANDS
    ]
    roles += [QuantizerRole("dpa", slot, name) for name in closed for slot in SLOTS]
    return any(recipe.quantizer(role) != IdentityQuantizer() for role in roles)


def undecided(captured: Captured) -> list[str]:
    """Returns the parts of the recipe that go by names and met a linear without one, each with the place of this.

    A name is not known where Dynamo captures a function that calls layers of no module which fxquant knows.
    """
    texts: list[str] = []
    for match in captured.known:
        if match.name or match.skip is not None or layers.has_module(match.node, captured.names):
            continue
        if match.module_type in plain.MODULE_TYPES and match.products[0].rhs_is_weight:
            roles = [QuantizerRole(match.module_type, kind) for kind in LINEAR_OPERANDS]
            rules = dict.fromkeys(text for role in roles for text in captured.recipe.by_name(role))
            texts += [f"{text} (for {match.form} at {layers.line_of(match.node)})" for text in rules]
    return texts


def resolve(captured: C, settings: Settings) -> C:
    """Asks the recipe for a quantizer of every operand."""
    reached, slots = states.stateful_graphs(captured.gm), Slots()
    matches, roles = products.resolve(
        [replace(match, takes_state=match.node.graph in reached) for match in captured.known], captured.recipe, slots,
        allow_float64=settings.allow_float64, first_site=captured.first_site, stored_weights=settings.stored_weights,
        all_ranks=captured.all_ranks,
    )  # fmt: skip
    return replace(captured, matches=matches, decisions=decisions_of(matches), roles=roles, slots=slots)


def drop_unprofitable(captured: C, settings: Settings) -> C:
    """Keeps in high precision what is estimated to be slower quantized, where the recipe wants that."""
    if not captured.recipe.only_profitable:
        return captured
    matches = weigh.weigh(captured.known)
    slots = captured.slots if any(map(quantized, matches)) else Slots()
    return replace(captured, matches=matches, decisions=decisions_of(matches), slots=slots)


def insert(captured: C, settings: Settings) -> C:
    """Writes one operator for each quantized product into the graphs."""
    if any(map(quantized, captured.known)):  # else the graph is torch's own, to the bit
        mark_places(captured.known, captured.first_site)
    if settings.ranges:
        for match in captured.known:
            for_layer(match.node, match.name)
    linear.insert(captured.known)
    for module in captured.graphs:
        module.recompile()
    return captured


def share_regions(captured: C, settings: Settings) -> C:
    """Has calls of a region whose bodies got the same answers share one again."""
    if not settings.own_regions:
        regions.share_regions(captured.gm)
    return captured


def predict_reuse(captured: C, settings: Settings) -> C:
    """Marks the operands that `reuse_attention_payload` will not quantize again."""
    return replace(captured, decisions=reuse.predict_reuse(captured.graphs, captured.decisions))


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A rewritten graph with what it takes behind its own inputs: `tensors` of its states, then `parts` of weights.

    One that is a step of `training` writes its states. What is `observed` of a `request` to measure adds up in tensors
    behind all these; of one that other modules run too (`shared`), it is everything. `names` and `autocast` are
    those of `Captured`.
    """

    gm: fx.GraphModule
    slots: Slots
    states: Sequence[State] = ()
    group: str | None = None
    training: bool = field(default_factory=torch.is_grad_enabled)
    tensors: Sequence[Tensor] = ()
    taken: Sequence[weights.Taken] = ()
    parts: Sequence[Tensor] = ()
    request: Request | None = None
    shared: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    autocast: Mapping[str, torch.dtype] | None = None
    observed: Sequence[Observed] = ()
    unmeasured: Sequence[Unmeasured] = ()

    def tensors_of(self, states: Sequence[State]) -> list[Tensor]:
        """The tensors of other states in the places of those that the graph was bound with."""
        others = [tensor for state in states for tensor in state.tensors().values()]
        return [*others, *self.tensors[len(others) :]]


def bind_state(bound: Bound, settings: Settings) -> Bound:
    """Gives a graph the tensors of its states, if it has any."""
    if not bound.states:
        return bound
    gm, tensors = states.bind_state(bound.gm, bound.slots, bound.states, training=bound.training, group=bound.group)
    return replace(bound, gm=gm, tensors=tensors)


def cache_weights(bound: Bound, settings: Settings) -> Bound:
    """Lets a graph take its weights quantized, where they are stored."""
    if not settings.stored_weights:
        return bound
    gm, taken, parts = weights.cache_weights(bound.gm)
    return replace(bound, gm=gm, taken=taken, parts=parts)


def open_products(bound: Bound, settings: Settings) -> Bound:
    """Writes what stays in high precision so that it can be measured, where that is asked for."""
    request = bound.request
    if request is None:
        return bound
    gm = observers.copied(bound.gm)
    reached = states.stateful_graphs(gm)
    named = layers.name_layers(find_matmuls(gm, autocast=bound.autocast), bound.names)
    wanted = [match for match in named if bound.shared or request.wants(match.name)]
    matches = [match for match in wanted if match.node.graph in reached]
    inside = [match for match in wanted if match.node.graph not in reached]
    regions = [one for match in inside for one in request.closed(match.module_type, match.name, IN_REGION)]
    resolved, _ = products.resolve(
        [match for match in matches if match.module_type in plain.MODULE_TYPES], HighPrecision()
    )
    plain.open_products(gm, resolved)
    attention = [match for match in matches if match.module_type == "dpa"]
    return replace(bound, gm=gm, unmeasured=[*plain.closed([*resolved, *attention], request), *regions])


def add_observers(bound: Bound, settings: Settings) -> Bound:
    """Has the products of a graph measured, where that is asked for."""
    if bound.request is None:
        return bound
    gm, observed, unmeasured = observers.add_observers(bound.gm, bound.request, bound.shared)
    return replace(bound, gm=gm, observed=observed, unmeasured=[*bound.unmeasured, *unmeasured])


def quantizes(gm: fx.GraphModule, *, recomputed: bool = False) -> bool:
    """Returns True if a rewritten graph has a quantized matmul; with `recomputed`, one in an activation checkpoint."""
    if not recomputed and any(is_fxquant(node) for node in gm.graph.nodes):
        return True
    for node in gm.graph.nodes:
        for attribute in (n for n in node.all_input_nodes if n.op == "get_attr"):
            body = getattr(gm, str(attribute.target), None)
            again = recomputed and node.target is not tag_activation_checkpoint
            if isinstance(body, fx.GraphModule) and quantizes(body, recomputed=again):
                return True
    return False
