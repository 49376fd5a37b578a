"""The backend under the names that torch knows it by."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from fxquant.backend.backend import Backend
from fxquant.backend.copies import Given, mark_copies
from fxquant.backend.notices import watch_unmet
from fxquant.backend.options import Options
from fxquant.compat.inside.frames import compiled_with_names
from fxquant.compat.private import own_errors
from fxquant.errors import OptionError
from fxquant.recipes import RECIPES


class ByName(Given):
    """``torch.compile(model, backend="fxquant", options={"recipe": "mxfp8"})``, or ``backend="fxquant-mxfp8"``.

    The second form is for trainers that take a backend's name and no options: each built-in recipe has one. `options`
    are the fields of `Options`; `recipe` (a name or a Recipe) is required in the first form, and refused in the second.
    Raises OptionError for another option and RecipeError for an unknown recipe, each with the list of the known ones.
    """

    def __init__(self, recipe: str | None = None) -> None:
        self.__name__ = "fxquant" if recipe is None else f"fxquant-{recipe}"
        self._options = {} if recipe is None else {"recipe": recipe}
        self._none: Mapping[str, Any] = {}
        self._backends: weakref.WeakValueDictionary[tuple[int, str | None], Backend] = weakref.WeakValueDictionary()
        self._compiled: list[tuple[Mapping[str, Any], str | None]] = []

    def __reduce__(self) -> tuple[Callable[[str], ByName], tuple[str]]:
        return found, (next(name for name, backend in BY_NAME.items() if backend is self),)

    @own_errors()
    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compiles one captured graph; torch.compile calls this."""
        if (options or {}, mode) not in self._compiled:
            self._compiled.append(({**(options or {})}, mode))
        return self.backend(mode=mode, options=options)(gm, example_inputs)

    def backend(self, *, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Backend:
        """The backend of one call of torch.compile, whose graphs all get the same options.

        It keeps them alive, since their identity would otherwise pass to another object.
        """
        options = self._none if options is None else options
        if self._options and isinstance(options, Mapping) and "recipe" in options:
            raise OptionError(
                f"{self.__name__!r} names its recipe: write backend='fxquant', options={{'recipe': ..}} for another"
            )
        merged = {**self._options, **options} if isinstance(options, Mapping) else options
        Options.of(merged)
        key = self._key(options, mode)
        backend = self._backends.get(key)
        if backend is None or backend.called_with[1] != dict(options):
            backend = self._backends[key] = Backend(**merged, mode=mode)
            backend.called_with = (options, dict(options))
            backend.controls.share_recipes(self)
        return backend

    def unmet(self) -> Iterator[str]:
        """Names what torch.compile was given this for, as far as no graph of it, or of equal options, has come."""
        for function, keywords in compiled_with_names():
            if function is self and not self.met(keywords):
                yield self.what

    def met(self, keywords: Mapping[str, Any]) -> bool:
        """Returns True if a graph has come with these keywords."""
        return (keywords.get("options") or {}, keywords.get("mode")) in self._compiled

    @property
    def what(self) -> str:
        """The name of what is compiled with this."""
        return f"a model compiled with backend={self.__name__!r}"

    def _key(self, options: Mapping[str, Any] | None, mode: str | None) -> tuple[int, str | None]:
        return id(self._none if options is None else options), mode


BY_NAME = {"fxquant_backend": ByName(), **{recipe: ByName(recipe) for recipe in RECIPES}}
"""The backends by the attributes of `fxquant.backend` that entry points name.

That of a recipe, ``mxfp8``, is ``fxquant-mxfp8`` for torch.
"""


def found(name: str) -> ByName:
    """Returns the backend that torch looks for when a name is first used, which is watched from then on."""
    watch_unmet(BY_NAME[name].unmet)
    mark_copies()
    return BY_NAME[name]
