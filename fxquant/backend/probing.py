"""Compiled graphs that measure: a second form of a graph, compiled once, which runs in the place of the first.

The plain form is the one that there would be without probes. A session says at each call which of the two runs; the
backward is that of the forward. What was measured lies on the device until the step is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.inside.checkpoints import in_reentrant_checkpoint
from fxquant.compat.inside.ranks import gather_objects, world
from fxquant.compat.private import compiling_again, in_backward, no_modes
from fxquant.compat.values import fake_mode_of
from fxquant.kernels.probe.plan import Slot
from fxquant.kernels.probe.reference import merge, neutral
from fxquant.passes.captured import Bound
from fxquant.passes.graph.meta import EXAMPLE_VALUE, GRAPH_INPUT
from fxquant.passes.insert.observers import copied
from fxquant.passes.pipeline import PROBED, run
from fxquant.passes.settings import Settings
from fxquant.probes import Observed, Request, Unmeasured, rows_of

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_Form = tuple[Callable[..., Any], Sequence[Observed], Sequence[Unmeasured], torch.device]

_Read = dict[tuple[str, Observed], dict[Slot, Tensor]]
"""The vectors of a step by layer, linear and slot."""


@dataclass(frozen=True)
class Taken:
    """The vectors that one graph has measured in a step: on the host once the event has happened, if there is one."""

    observed: Sequence[Observed]
    layers: Sequence[str]
    vectors: Tensor
    event: torch.Event | None = None

    def waited(self) -> Taken:
        """The same with its vectors there, as another process can have it."""
        if self.event is not None:
            self.event.synchronize()
        return replace(self, event=None)

    def by_slot(self) -> _Read:
        """The vectors, each of its slot."""
        vectors = iter(self.waited().vectors)
        return {
            (layer, observed): {slot: next(vectors) for slot in observed.slots()}
            for layer, observed in zip(self.layers, self.observed, strict=True)
        }


class Totals:
    """The tensors to which one graph adds what it measures of the layers of one module."""

    def __init__(self, observed: Sequence[Observed], layers: Sequence[str], device: torch.device) -> None:
        self.observed, self.layers = observed, layers
        slots = [(o.plan.forward(), o.plan.backward()) for o in observed]
        self._neutral = neutral(device)
        self._all = self._neutral.repeat(sum(len(half) for pair in slots for half in pair), 1)
        self._parts = [*torch.split(self._all, [len(half) for pair in slots for half in pair])]

    def tensors(self) -> dict[str, Tensor]:
        """All of them, in the order of the graph's inputs."""
        return {str(i): part for i, part in enumerate(self._parts)}

    @torch.no_grad()
    def take(self) -> Taken:
        """Returns what there is, on its way to the host, and begins anew."""
        event = torch.Event(self._all.device) if self._all.is_cuda else None
        vectors = self._all.to("cpu", copy=True, non_blocking=event is not None)
        if event is not None:
            event.record()
        self._all.copy_(self._neutral.expand_as(self._all))
        return Taken(self.observed, self.layers, vectors, event)


class Session:
    """A probe from its beginning to its end: one step of `every` is measured.

    A step is over at the first forward after a step of an optimizer, or when `end_step` says so.
    """

    def __init__(self, request: Request, every: int) -> None:
        self.request, self.every = request, every
        self.step = 0
        self._rows: list[dict[str, Any]] = []
        self._taken: list[tuple[int, Sequence[Taken]]] = []
        self.stepped = self.ran = False
        self.unmeasured: dict[Unmeasured, None] = {}
        self._totals: dict[tuple[int, tuple[str, ...]], Totals] = {}

    def measures(self) -> bool:
        """Returns True if a forward that is about to run belongs to a step that is measured."""
        if self.stepped and not in_backward():
            self.end_step()
        self.ran = True
        return self.step % self.every == 0

    def end_step(self) -> None:
        """Takes what the step has measured, and goes on to the next."""
        self.read()
        self.step, self.stepped = self.step + 1, False

    def totals(self, observed: Sequence[Observed], names: Mapping[str, str], device: torch.device) -> Totals:
        """The tensors of a graph for the layers of one module; `names` has these by those captured."""
        layers = tuple(names.get(o.layer, o.layer) for o in observed)
        key = (id(observed), layers)
        if key not in self._totals:
            self._totals[key] = Totals(observed, layers, device)
        return self._totals[key]

    def note(self, unmeasured: Sequence[Unmeasured], names: Mapping[str, str]) -> None:
        """Notes what cannot be measured of the layers of one module."""
        here = (replace(one, layer=names.get(one.layer, one.layer)) for one in unmeasured)
        self.unmeasured |= {one: None for one in here if self.request.wants(one.layer)}

    def read(self, *, over_ranks: bool = True) -> None:
        """Takes what the step has measured, to make rows of later; if there are several ranks, all have to call."""
        if self.step % self.every:
            return
        taken = [totals.take() for totals in self._totals.values()]
        if over_ranks and world() > 1:
            taken = [one for of_rank in gather_objects([one.waited() for one in taken]) for one in of_rank]
        self._taken.append((self.step, taken))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all steps that were measured.

        They are made when they are asked for: a step that made them would wait for the device, and that for the host.
        """
        while self._taken:
            step, taken = self._taken.pop(0)
            together: _Read = {}
            for read in (one.by_slot() for one in taken):
                for key, vectors in read.items():
                    before = together.setdefault(key, {})
                    together[key] = {s: merge(before[s], v) if s in before else v for s, v in vectors.items()}
            for (layer, observed), vectors in together.items():
                if self.request.wants(layer):
                    rows = rows_of(observed, layer, vectors, self.request)
                    self._rows += [{"step": step, **row} for row in rows]
        return self._rows


class Probed:
    """The form of a bound graph that measures, for every request that there has been."""

    def __init__(self, bound: Bound, example_inputs: Sequence[Any], settings: Settings, compile: Compile) -> None:
        self._bound = replace(bound, gm=copied(bound.gm))
        inputs = self._bound.gm.graph.find_nodes(op="placeholder")
        for node, example in itertools.zip_longest(inputs, example_inputs):
            node.meta.pop(GRAPH_INPUT, None)  # the inputs of the first call, which nothing should keep
            if EXAMPLE_VALUE not in node.meta and fake_mode_of(example) is not None:  # of a part that DDP has made
                node.meta[EXAMPLE_VALUE] = example
        self._settings, self._compile = settings, compile
        self._forms: dict[str, _Form] = {}

    def form(self, request: Request) -> _Form:
        """The compiled graph that measures what is requested, what that is, and its device."""
        if request.text not in self._forms:
            probed = run(PROBED, replace(self._bound, request=request), self._settings)
            fakes = [node.meta[EXAMPLE_VALUE] for node in probed.gm.graph.find_nodes(op="placeholder")]
            with no_modes(), compiling_again(fakes):
                device = fakes[-1].device if probed.observed else torch.device("cpu")
                form = self._compile(probed.gm, fakes)
            self._forms[request.text] = form, probed.observed, probed.unmeasured, device
        return self._forms[request.text]

    def of_call(self, session: Session, names: Mapping[str, str]) -> tuple[Callable[..., Any], Totals] | None:
        """The graph that a call runs, and what it takes besides; None for the plain one.

        Of a reentrant checkpoint the repetition is measured, which has gradients.
        """
        if not session.measures() or in_reentrant_checkpoint():
            return None
        form, observed, unmeasured, device = self.form(session.request)
        session.note(unmeasured, names)
        return (form, session.totals(observed, names, device)) if observed else None
