"""An operator of quantized graphs as one object: its meaning, its schema, its effect on fake tensors, its kernels.

    @operator(traits=Traits(reads_values=1))
    def amax(x: Tensor) -> Tensor:
        return reference.amax(x)                     # the meaning; the schema is inferred from the signature

    @amax.implementation(CastKernel.TRITON, when=lies_in_memory)    # a condition answers "" or the reason why not
    def tensor_amax(x: Tensor) -> Tensor: ...

    amax.choose(facts)                               # the kernel for these facts, and why it is no better one

A condition looks at `Facts` alone, plain values that a node of a graph and a decision about a matmul can both give, so
that a report says what the lowering will do. The body of an implementation imports the code for its device: whoever
only asks needs no Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from fxquant.compat.device import capability
from fxquant.compat.private import fake_kernel, operator_library, tree_leaves
from fxquant.formats import QuantSpec

P = ParamSpec("P")
R = TypeVar("R")
Run = TypeVar("Run", bound=Callable[..., Any])

Parts = Sequence[Tensor]
"""A quantized operand: [data, scale] or [data, scale, global_amax]."""
States = Sequence[Tensor | None]
"""The state of each of several quantizations, such as a scale."""
Dim = int | torch.SymInt | None
"""A size, or None for an unknown one."""

_LIBRARIES = {name: operator_library(name) for name in ("fxquant", "fxquant_kernels")}

OPERATORS: dict[str, Operator[..., Any]] = {}
"""Every operator of `torch.ops.fxquant` by name."""
_BY_TARGET: dict[object, Operator[..., Any]] = {}

TRACED = "CompositeImplicitAutograd"
"""The dispatch key of an operator that tracing goes through, to what it calls, and autograd too."""


class Kernel(str, Enum):
    """The kernels that an operator can be, by names for people, in the order in which they are tried."""

    @property
    def place(self) -> int:
        """The place of a kernel among its kind."""
        return [*type(self)].index(self)

    def __str__(self) -> str:
        return str(self.value)


class Reference(Kernel):
    """The kernels of an operator whose kernels have no names."""

    REFERENCE = "the reference"
    CUDA = "a kernel"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that every choice of a kernel may look at.

    `capability` is that of a CUDA device, (0, 0) for other devices. The others are of the graph: it may have Triton
    kernels; it runs beside fxquant, whose own operators and functions it can then `launch`; the first tensor lies in
    memory, and is not what a kernel of Inductor's has in registers; only GEMMs of few rows read the result.
    """

    capability: tuple[int, int] = (0, 0)
    triton: bool = True
    launches: bool = True
    in_memory: bool = False
    for_few_rows: bool = False

    @property
    def on_cuda(self) -> bool:
        return self.capability > (0, 0)

    @property
    def on_hopper(self) -> bool:
        return self.capability[0] == 9

    @property
    def makes_fp8(self) -> bool:
        """True if the device has instructions that convert to FP8."""
        return self.capability >= (8, 9)

    @property
    def reads_block_scales(self) -> bool:
        """True if tensor cores take the scales of MX and NVFP4 blocks with the elements: those of Blackwell."""
        return self.capability >= (10, 0)

    @property
    def multiplies_groups_of_blocks(self) -> bool:
        """True if torch has grouped GEMMs on such tensor cores: on compute capability 10 alone."""
        return self.capability[0] == 10


K = TypeVar("K", bound=Kernel)


@dataclass(frozen=True)
class Chosen(Generic[K]):
    """A kernel, and why it is no better one."""

    kernel: K
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})" if self.reason else str(self.kernel)


@dataclass(frozen=True)
class Implementation:
    """A function with the meaning of an operator, for the facts to which the condition `when` answers "".

    A `fallback` is chosen for a reason: that for which the last implementation before it which is none was not.
    """

    kernel: Kernel
    run: Callable[..., Any]
    when: Callable[[Any], str]
    fallback: bool


def _device_facts(*args: Any, **kwargs: Any) -> Facts:
    device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return Facts(capability=capability(device))


def runs_beside(facts: Facts) -> str:
    """Returns why a CUDA device does not run code of fxquant."""
    return "" if facts.on_cuda and facts.launches else "not on CUDA beside fxquant"


class Side(NamedTuple):
    """One direction of a quantization; `state` is its input besides the tensor, such as a scale."""

    direction: str
    spec: str
    state: Any

    @property
    def per_tensor(self) -> bool:
        return QuantSpec.parse(self.spec).row.family == "per_tensor"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The properties of an operator that passes ask for, and the operators that can take its place.

    reads_values    the number of tensors, the first arguments, on whose last bit the result depends
    operands        the number of arguments that are quantized
    sides           gives the directions of a quantization from the operator's arguments
    amax            takes the amaxes of the same operands
    both            quantizes the same operands in both directions
    recording       takes the amaxes into the state by itself
    stateful        takes the state of a graph besides
    stored_weights  takes weights that were quantized before
    """

    reads_values: int = 0
    operands: int = 1
    sides: Callable[..., list[Side]] | None = None
    amax: Operator[..., Any] | None = None
    both: Operator[..., Any] | None = None
    recording: Operator[..., Any] | None = None
    stateful: Operator[..., Any] | None = None
    stored_weights: bool = False


class Operator(Generic[P, R]):
    """An operator of `torch.ops`; calling it calls that. Its `reference` is the kernel that is its meaning."""

    def __init__(
        self, meaning: Callable[P, R], namespace: str, key: str, schema: str, reference: Kernel, traits: Traits
    ) -> None:
        self.name = meaning.__name__
        self.meaning = meaning
        self.schema = schema
        self.key = key
        self.reference = reference
        self.traits = traits
        self.implementations: list[Implementation] = []
        self.pieces: Callable[..., R] | None = None
        self._facts: Callable[..., Any] = _device_facts
        self._fake: Callable[..., R] = meaning
        self._library = _LIBRARIES[namespace]
        self._library.define(self.name + self.schema, tags=torch.Tag.pt2_compliant_tag)
        self._library.impl(self.name, meaning, key)
        if key != TRACED:
            fake_kernel(self._library, self.name)(lambda *args, **kwargs: self._fake(*args, **kwargs))
        packet = getattr(getattr(torch.ops, namespace), self.name)
        self.target = packet.default
        _BY_TARGET.update({packet: self, self.target: self})
        if namespace == "fxquant":
            OPERATORS[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.target(*args, **kwargs)  # type: ignore[no-any-return]

    def fake(self, run: Callable[..., R]) -> Callable[..., R]:
        """Registers the shapes and dtypes of the results, for an operator whose meaning takes long on fake tensors."""
        self._fake = run
        return run

    def in_pieces(self, run: Callable[..., R]) -> Callable[..., R]:
        """Registers the meaning with casts that are operators of their own (see `fxquant.kernels.cast.pieces`)."""
        self.pieces = run
        return run

    def on(self, key: str) -> Callable[[Run], Run]:
        """Registers another function for a dispatch key, such as ``CUDA``."""

        def register(run: Run) -> Run:
            self._library.impl(self.name, run, key)
            return run

        return register

    def facts(self, run: Run) -> Run:
        """Registers the function that gives the facts of the operator's arguments; else these are their device's."""
        self._facts = run
        return run

    def facts_of(self, *args: Any, **kwargs: Any) -> Any:
        """The facts of arguments, which may be fake tensors."""
        return self._facts(*args, **kwargs)

    def implementation(
        self, kernel: Kernel, *, when: Callable[[Any], str], fallback: bool = False
    ) -> Callable[[Run], Run]:
        """Registers an implementation, one for each kernel; whichever comes first, the order is that of the kernels."""
        assert all(type(one.kernel) is type(kernel) and one.kernel is not kernel for one in self.implementations)

        def register(run: Run) -> Run:
            self.implementations.append(Implementation(kernel, run, when, fallback))
            self.implementations.sort(key=lambda one: one.kernel.place)
            return run

        return register

    def choose(self, facts: Facts) -> Chosen[Any]:
        """The first kernel, in the order of its kind, that takes what the facts say."""
        reason = ""
        for implementation in self.implementations:
            refusal = implementation.when(facts)
            if not refusal:
                return Chosen(implementation.kernel, reason if implementation.fallback else "")
            reason = reason if implementation.fallback else refusal
        return Chosen(self.reference, reason)

    def run(self, kernel: Kernel) -> Callable[..., R]:
        """The function that is a kernel."""
        return next((choice.run for choice in self.implementations if choice.kernel is kernel), self.meaning)

    @functools.cached_property
    def in_range(self) -> Any:
        """The operator behind two arguments: a name, under which a profiler shows it, and True for its best kernel.

        By False it runs its meaning.
        """
        name, library = f"{self.name}_in_range", _LIBRARIES["fxquant_kernels"]

        def run(range: str, best: bool, *args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(range):
                return (self.best if best else self.meaning)(*args, **kwargs)

        library.define(
            f"{name}(str range, bool best, {self.schema.removeprefix('(')}", tags=torch.Tag.pt2_compliant_tag
        )
        library.impl(name, run, "CompositeExplicitAutograd")
        fake_kernel(library, name)(lambda range, best, *args, **kwargs: self._fake(*args, **kwargs))
        return getattr(torch.ops.fxquant_kernels, name).default

    def best(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The result by the kernel that is chosen for the arguments."""
        return self.run(self.choose(self.facts_of(*args, **kwargs)).kernel)(*args, **kwargs)


def operator(
    *, namespace: str = "fxquant", key: str = "CompositeExplicitAutograd", mutates: Sequence[str] = (),
    schema: str = "", reference: Kernel = Reference.REFERENCE, traits: Traits = Traits(),
) -> Callable[[Callable[P, R]], Operator[P, R]]:  # fmt: skip
    """Makes a function, which is its meaning, an operator of the same name.

    `key` is the dispatch key of the devices that have the meaning, or `TRACED`. `mutates` names the arguments that it
    writes into; a `schema` says so itself, where torch cannot infer one.
    """

    def make(meaning: Callable[P, R]) -> Operator[P, R]:
        text = schema or torch.library.infer_schema(meaning, mutates_args=mutates)
        return Operator(meaning, namespace, key, text, reference, traits)

    return make


def operator_of(target: object) -> Operator[..., Any] | None:
    """The operator that a node of a graph calls."""
    return _BY_TARGET.get(target)


def traits_of(node: Any) -> Traits:
    """The traits of the operator that a node calls; those of none for other nodes."""
    called = _BY_TARGET.get(node.target)
    return _NO_TRAITS if called is None else called.traits


_NO_TRAITS = Traits()
