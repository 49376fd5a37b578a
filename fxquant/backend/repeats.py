"""Forwards inside activation checkpoints, which the backward runs again: they begin with what they first began with.

A checkpoint around compiled code (`torch.utils.checkpoint`, reentrant or not) runs it again when other forwards may
have changed a state. The first run leaves what it reads with every checkpoint around it; a repetition takes it from
there, in the order of the calls.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from fxquant.compat.inside.checkpoints import Around, Repeat, checkpoints_around, in_reentrant_checkpoint
from fxquant.compat.private import compiling_again, no_modes
from fxquant.errors import FxQuantError
from fxquant.passes.captured import Bound
from fxquant.passes.graph.meta import EXAMPLE_VALUE, GRAPH_INPUT
from fxquant.state import State

if TYPE_CHECKING:
    from fxquant.backend.probing import Totals

T = TypeVar("T")


class _Call(Generic[T]):
    """The value that one call of an owner began with; the owner stays alive with it."""

    def __init__(self, owner: Any, value: T) -> None:
        self.owner, self.value = owner, value


class _Calls:
    """The calls in the first run of a checkpoint, and how many of each owner every repetition has come to."""

    def __init__(self) -> None:
        self.calls: list[_Call[Any]] = []
        self.taken: dict[tuple[Any, int], int] = {}

    def add(self, call: _Call[Any]) -> None:
        if not any(call is other for other in self.calls):  # a backward inside of a forward repeats calls of it
            self.calls.append(call)

    def next(self, owner: Any, repeat: Repeat) -> _Call[Any] | None:
        """The call that a repetition has come to; None if the first run has still to come to it."""
        place = self.taken.get((repeat.run, id(owner)), 0)
        self.taken[repeat.run, id(owner)] = place + 1
        calls = [call for call in self.calls if call.owner is owner]
        if place < len(calls):
            return calls[place]
        if repeat.complete:
            raise FxQuantError(
                f"an activation checkpoint has run a compiled graph {len(calls)} times in the forward, and repeats it "
                f"{place + 1} times: with delayed scaling or stochastic rounding both runs have to be the same"
            )
        return None


_checkpoints: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()


def once(owner: Any, make: Callable[[], T], around: Around | None = None) -> tuple[T, bool]:
    """The value that `make` gave when this call ran first, and True if a checkpoint is repeating it now."""
    around = around or checkpoints_around()
    repeat = next((repeat for repeat in around.repeats if _is_checkpoint(repeat, owner)), None)
    call = repeat and _checkpoints.setdefault(repeat.checkpoint, _Calls()).next(owner, repeat)
    call = call or _Call(owner, make())
    for checkpoint in around.first:
        _checkpoints.setdefault(checkpoint, _Calls()).add(call)
    return call.value, repeat is not None


def _is_checkpoint(repeat: Repeat, owner: Any) -> bool:
    """Returns True for a repetition; a reentrant checkpoint repeats only what its first run has done for this owner."""
    first = _checkpoints.get(repeat.checkpoint)
    return repeat.certain or (first is not None and any(call.owner is owner for call in first.calls))


@contextmanager
def states_of_first_run(states: Sequence[State | Totals]) -> Iterator[None]:
    """A scope for one forward, which reads and writes its states.

    If a checkpoint is repeating the forward, they are for so long as they were when it ran first.
    """
    around = checkpoints_around() if states else Around()  # without states there is nothing to look for
    if not around.first and not around.repeats:
        yield
        return
    now: list[tuple[Tensor, Tensor]] = []
    with _by_itself():
        for state in states:
            tensors = list({id(tensor): tensor for tensor in state.tensors().values()}.values())
            contents, repeated = once(state, functools.partial(_copies, tensors), around)
            if repeated:
                now += zip(tensors, _copies(tensors), strict=True)
                for tensor, content in zip(tensors, contents, strict=True):
                    tensor.copy_(content)
    try:
        yield
    finally:
        with _by_itself():
            for tensor, content in now:
                tensor.copy_(content)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


@contextmanager
def _by_itself() -> Iterator[None]:
    """A scope whose operators nothing around it sees, such as the modes of a selective checkpoint."""
    with no_modes(), torch.no_grad():
        yield


def without_gradients(
    by_use: Mapping[bool, Bound],
    example_inputs: Sequence[Any],
    compile: Callable[[Bound, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A forward without gradients that may be a step of training: the first run of a reentrant checkpoint.

    `by_use` has its graph as such a step (True), which writes its states, and as another (False), which only reads
    them. Each is compiled when it is first called for.
    """
    use = in_reentrant_checkpoint()
    compiled = {use: compile(by_use[use], example_inputs)}
    waiting = {not use: by_use[not use]}
    placeholders = waiting[not use].gm.graph.find_nodes(op="placeholder")
    for node in placeholders:
        node.meta.pop(GRAPH_INPUT, None)  # the inputs of the first call, which nothing should keep
    fakes = [node.meta[EXAMPLE_VALUE] for node in placeholders[: len(example_inputs)]]

    def run(*inputs: Any) -> Any:
        use = in_reentrant_checkpoint()
        if use in waiting:
            with compiling_again(fakes):
                compiled[use] = compile(waiting.pop(use), fakes)
        return compiled[use](*inputs)

    return run
