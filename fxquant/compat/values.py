"""Fake tensors and symbolic sizes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_config
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    statically_known_true,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves


def fake_mode_of(*trees: Any) -> FakeTensorMode | None:
    """Returns the mode of the first fake tensor: the mode of the captured graph, not the one set up for the backend."""
    fakes = (leaf for leaf in tree_leaves(trees) if isinstance(leaf, FakeTensor))
    return next((fake.fake_mode for fake in fakes), None)


@contextmanager
def on_fakes(*trees: Any, guarded: bool = False) -> Iterator[None]:
    """Lets operators run in this scope on the values of nodes, in the mode of the first fake tensor among them.

    It is the one door for that: nothing that runs behind it is left in the shape environment, which is that of a
    compilation or of the program that a graph came from. Sizes stay symbols; how a tensor lies in memory is asked
    without holding the graph to the sizes of its example; and what an operator takes for granted, such as that two
    sizes are equal, the graph has asserted before. `guarded` keeps that last kind of guards, where the code that runs
    chooses by sizes what to do. Real values are computed with as they are.
    """
    # not the mode in force, which may be of another graph; and without the dispatcher, composite operators turn
    # symbolic sizes into numbers
    mode = fake_mode_of(trees)
    shapes = None if guarded or mode is None else mode.shape_env
    quiet = nullcontext() if shapes is None else shapes.suppress_guards()
    with mode or nullcontext(), enable_python_dispatcher(), unguarded_sizes(), quiet:
        yield


def static_fakes(tensors: Sequence[torch.Tensor], example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors as fakes of the mode of the inputs, with sizes that are not symbolic."""
    mode = detect_fake_mode(list(example_inputs))
    return list(tensors) if mode is None else [mode.from_tensor(t, static_shapes=True) for t in tensors]


def fakes_of_any_size(tensors: Sequence[torch.Tensor], free: Collection[int]) -> list[torch.Tensor]:
    """Returns the tensors as fakes, in which the sizes that are `free` are symbols: one for each number."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kinds = ([DimDynamic.DUCK if size in free else DimDynamic.STATIC for size in t.shape] for t in tensors)
    contexts: list[StatelessSymbolicContext[Any, Any]] = [
        StatelessSymbolicContext(dynamic_sizes=dims) for dims in kinds
    ]
    return [mode.from_tensor(t, symbolic_context=context) for t, context in zip(tensors, contexts, strict=True)]


def in_other_memory(fake: FakeTensor) -> FakeTensor:
    """Returns a fake tensor like another one, in memory of its own, as the operator that gave it would."""
    with _disable_current_modes():
        memory = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        return FakeTensor(fake.fake_mode, memory, fake.device)


def has_memory_of_its_own(value: Any, *inputs: Any) -> bool:
    """Returns True for fake tensors of sizes that are numbers, none of which shares memory with another or an input."""
    tensors = tree_leaves(value)
    if not all(isinstance(x, FakeTensor) and x.layout is torch.strided and not x.is_sparse for x in tensors):
        return False
    sizes = [size for x in tensors for size in (*x.shape, *x.stride(), x.storage_offset())]
    keys = [storage_key(x) for x in tensors]
    taken = [storage_key(x) for x in tree_leaves(inputs) if isinstance(x, FakeTensor)]
    plain = all(type(size) is int for size in sizes) and not any(x.storage_offset() for x in tensors)
    return plain and len({*keys}) == len(keys) and {*keys}.isdisjoint(taken)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that tensors in the same memory share, fake ones too."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was written in place; inference tensors do not count it."""
    return int(tensor._version)


def viewed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def size_hint(size: int | torch.SymInt) -> int:
    """Returns the number that a symbolic size had in the example; 1 where there is none."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def depends_on_data(size: int | torch.SymInt) -> bool:
    """Returns True for a size that no shape of an input says, such as the number of nonzero elements."""
    return not isinstance(size, int) and not size.node.has_hint()


def upper_bound(size: int | torch.SymInt) -> int:
    """Returns the largest value of a symbolic size, by the range that its program was exported with."""
    if isinstance(size, int):
        return size
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(bound) if bound.is_Integer else sys.maxsize


@contextmanager
def unguarded_sizes() -> Iterator[None]:
    """Lets torch ask in this scope how a tensor lies in memory without holding the program to its example's sizes."""
    _bound_slices()
    with symbolic_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


@functools.cache
def _bound_slices() -> None:
    from fxquant.compat.patch import apply
    from fxquant.compat.slices import SLICES  # not above: importing the package leaves the compiler alone

    apply(SLICES)
