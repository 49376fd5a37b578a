"""`fxquant.compile_blocks`: the repeated blocks of a model, compiled in place one by one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from fxquant.backend.backend import Backend
from fxquant.backend.copies import InPlace
from fxquant.backend.notices import Calls, at_end
from fxquant.backend.options import A_DICT, check_arguments
from fxquant.checks import checked
from fxquant.compat.inside.frames import call_by, call_module, call_of_its_own
from fxquant.compat.private import isolated
from fxquant.errors import ArgumentError, FxQuantError
from fxquant.passes.plan.layers import clean_path
from fxquant.quantizers import value_text
from fxquant.recipes import Recipe
from fxquant.roles import TENSOR_TYPES, QuantizerRole

Model = TypeVar("Model", bound=nn.Module)
Blocks: TypeAlias = Iterable[nn.Module] | type[nn.Module] | tuple[type[nn.Module], ...] | str


@checked(
    ArgumentError,
    called="fxquant.compile_blocks",
    takes={
        "model": "a module whose blocks are compiled (fxquant.compile takes functions)",
        "recipe": 'a name, such as fxquant.compile_blocks(model, "mxfp8"), or a Recipe',
        "options": A_DICT,
    },
)
def compile_blocks(
    model: Model,
    recipe: Recipe | str,
    blocks: Blocks | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Model:
    """Compiles the repeated blocks of a model in place, each as a graph of its own, and returns the model.

    `blocks` are the modules, a class, or a regular expression for their whole names, such as ``layers\\.\\d+``; None
    takes the modules of one class that a list or another module holds several of, the outermost ones. The recipe is
    asked with full names (``layers.3.mlp.up``), each block has scales of its own, and blocks that get equal answers
    share compiled code. `fxquant.report(model)`, `set_recipe` and the quantization state are those of the whole model,
    whose parameters and keys stay as they are. What is outside of the blocks runs as it is, which the report says.
    `options` are the backend's, `kwargs` torch.compile's. Raises ArgumentError where there are no such blocks.
    """
    check_arguments(model, recipe, options, kwargs, called="fxquant.compile_blocks")
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    chosen = _blocks_of(inner, blocks)
    backend = Backend(recipe, **(options or {}), mode=kwargs.pop("mode", None), model=inner)
    backend.controls.within = [*chosen]
    calls = Calls(f"the blocks of {type(inner).__name__}", backend.controls.compiled_any, _UNCALLED)
    records = backend.records
    records.what, records.whole, records.outside = calls.name, True, _outside(inner, chosen)
    codes: dict[Any, _Code] = {}
    for name, block in chosen.items():
        key = type(block), _answers(backend.recipe, name, block)
        code = codes.setdefault(key, _Code({"backend": backend, **isolated(), **kwargs}))
        backend.controls.add_root(block)
        before = call_by(block, _Compiled(code, block, backend, calls))
        if isinstance(before, _Compiled):
            before.leave(block, inner)
    return model


_UNCALLED = "Blocks are compiled where they stand: blocks that took their place are not"


_MOST_COMPILED = 3
"""The blocks that are compiled before those of one kind are taken to share nothing: two also where inputs differ."""


class _Code:
    """The compiled code that blocks share, as long as torch finds that they can.

    It cannot if the code reads a number of the block, such as its place in a cache. Since torch compiles one function
    only a few times, every block but the first then gets one of its own. `compiled` counts the blocks whose first call
    compiled something.
    """

    def __init__(self, keywords: Mapping[str, Any]) -> None:
        self._keywords = dict(keywords)
        self._shared = self._new()
        self._first: nn.Module | None = None
        self.compiled = 0

    def _new(self) -> Callable[..., Any]:
        return torch.compile(call_of_its_own(), **self._keywords)

    def function(self, block: nn.Module, before: Callable[..., Any] | None) -> Callable[..., Any]:
        """The function that calls a block, which was the one `before` in the last call."""
        self._first = block if self._first is None else self._first
        if block is self._first or self.compiled < _MOST_COMPILED:
            return self._shared
        return self._new() if before is None or before is self._shared else before


class _Compiled(InPlace):
    """The compiled call of one block."""

    def __init__(self, code: _Code, block: nn.Module, backend: Backend, calls: Calls) -> None:
        self._code, self._block, self._backend, self._calls = code, block, backend, calls
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # as a part of what is compiled around
            return call_module(self._block, args, kwargs)
        controls = self._backend.controls
        before, graphs, again = controls.runs(), self._graphs(), self._run is not None
        run = self._code.function(self._block, self._run)
        result = run(self._block, args, kwargs)
        self._run = run

        def over() -> None:
            self._code.compiled += not again and self._graphs() > graphs
            ran = controls.ran_since(before)
            self._calls.over(controls.latest().records, ran, whole=again)  # all blocks have run by the second call

        return at_end(result, over)

    def of_copy(self, copied: nn.Module) -> _Compiled:
        return _Compiled(self._code, copied, self._backend, self._calls)

    def _graphs(self) -> int:
        return sum(backend.captured for backend in self._backend.controls.backends.values())

    def leave(self, *modules: nn.Module) -> None:
        """Takes modules from the backend, which another has compiled again."""
        for module in modules:
            self._backend.controls.roots.pop(module, None)


def _answers(recipe: Recipe, name: str, block: nn.Module) -> tuple[str, ...]:
    """All that a recipe could answer for the layers of a block: where it is equal, blocks share compiled code.

    Graphs have a guard that compares what was really asked.
    """
    names = [".".join(filter(None, (name, clean_path(path)))) for path, _ in block.named_modules()]
    roles = [QuantizerRole(kind, of, layer) for layer in names for kind in TENSOR_TYPES for of in TENSOR_TYPES[kind]]
    return tuple(_answer(recipe, role) for role in roles)


def _answer(recipe: Recipe, role: QuantizerRole) -> str:
    try:
        return value_text(recipe.quantizer(role))
    except FxQuantError:  # raised again, with the name, for a layer that is there
        return ""


def _blocks_of(model: nn.Module, blocks: Blocks | None) -> dict[str, nn.Module]:
    """The blocks by their names in a model, in order. Raises ArgumentError if there are none, or not in the model."""
    modules = {clean_path(name): module for name, module in model.named_modules() if name}
    if blocks is None:
        chosen = _repeated(model)
    elif isinstance(blocks, str):
        try:
            chosen = [module for name, module in modules.items() if re.fullmatch(blocks, name)]
        except re.error as error:
            raise ArgumentError(f"blocks={blocks!r} is no regular expression: {error}") from None
    elif kinds := _classes(blocks):
        chosen = [module for module in modules.values() if isinstance(module, kinds)]
    else:
        chosen = [*_items(blocks)]
    if not chosen:
        fit = "" if blocks is None else f" that fit blocks={getattr(blocks, '__name__', repr(blocks))}"
        examples = ", ".join(list(modules)[:8]) or "none"
        raise ArgumentError(
            f"{type(model).__name__} has no repeated blocks{fit}: give blocks= as a list of modules, a class, or a "
            f"regular expression for their whole names (its modules: {examples}), or use fxquant.compile"
        )
    names = {id(module): name for name, module in modules.items()}
    for block in chosen:
        if id(block) not in names:
            what = type(block).__name__ if isinstance(block, nn.Module) else repr(block)
            raise ArgumentError(f"blocks has {what}, which is no module inside of this {type(model).__name__}")
    outermost = set(map(id, chosen)) - {id(part) for block in chosen for part in block.modules() if part is not block}
    return {names[id(block)]: block for block in chosen if id(block) in outermost}


def _items(blocks: Any) -> Iterable[nn.Module]:
    return blocks if isinstance(blocks, Iterable) else (blocks,)


def _classes(blocks: Any) -> tuple[type[nn.Module], ...]:
    kinds = blocks if isinstance(blocks, tuple) else (blocks,)
    return kinds if all(isinstance(kind, type) for kind in kinds) else ()


def _repeated(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of which one holds several of a class: numbered ones if there are, and no containers."""
    for numbered, containers in ((True, False), (False, False), (True, True)):
        if blocks := [*_several(model, numbered, containers)]:
            return blocks
    return []


def _several(module: nn.Module, numbered: bool, containers: bool) -> Iterator[nn.Module]:
    plain = (nn.ModuleList, nn.ModuleDict) if containers else (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    children = dict(module.named_children())
    able = {
        name: type(child)
        for name, child in children.items()
        if (name.isdecimal() or not numbered)
        and not isinstance(child, plain)
        and any(child.children())
        and _layers(child)
    }
    counts = Counter(able.values())
    for name, child in children.items():
        if name in able and counts[able[name]] > 1:
            yield child
        else:
            yield from _several(child, numbered, containers)


def _layers(module: nn.Module) -> dict[str, str]:
    """The classes of the layers with a matrix of their own, by their names."""
    return {
        clean_path(name): type(layer).__name__
        for name, layer in module.named_modules()
        if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        and any(parameter.ndim > 1 for parameter in layer.parameters(recurse=False))
    }


def _outside(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[str]:
    inside = {clean_path(f"{name}.{path}") for name, block in blocks.items() for path, _ in block.named_modules()}
    return [f"{name or 'the model'} ({kind})" for name, kind in _layers(model).items() if name not in inside]
