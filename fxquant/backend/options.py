"""The options of the backend and their checks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch.export import ExportedProgram

from fxquant.checks import OneOf, article, checked, did_you_mean
from fxquant.compat.private import inductor_mode_options, inductor_options
from fxquant.errors import ArgumentError, OptionError
from fxquant.kernels.linear.choice import GEMM
from fxquant.passes.settings import SAVE, Settings
from fxquant.recipes import RECIPES, Recipe, resolve

INNER = ("inductor", "aot_eager")
"""The compilers of rewritten graphs."""


@checked(ArgumentError, called="options of fxquant")
@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one compilation, which `Backend` describes.

    Raises RecipeError for an unknown recipe and OptionError for a value that an option does not take.
    """

    recipe: Recipe | str
    inner: Annotated[str, OneOf(*INNER)] = "inductor"
    allow_float64: bool = False
    inductor: Mapping[str, Any] | None = None
    amax_group: Any = None
    save: Annotated[str, OneOf(*SAVE)] = "quantized"
    cache_weights: bool = False
    gemm: Annotated[str, OneOf(*GEMM)] = "auto"
    quantized_dispatch: bool = False
    ranges: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", resolve(self.recipe))
        if self.amax_group not in (None, "world") and not hasattr(self.amax_group, "group_name"):
            mesh = ": of a mesh, give mesh.get_group()" if hasattr(self.amax_group, "get_group") else ""
            raise OptionError(f"amax_group is a process group or 'world', not {self.amax_group!r}{mesh}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        """The options themselves, which nothing changes: a process group cannot be copied."""
        return self

    @classmethod
    def of(cls, options: object) -> Options:
        """The options in a dict. Raises OptionError also for an unknown one, and for a missing recipe."""
        if not isinstance(options, Mapping):
            raise OptionError(f"options are {A_DICT}, not {article(type(options).__name__)}")
        unknown = [key for key in options if key not in OPTIONS]
        if unknown:
            hint = _hint(unknown[0], OPTIONS, end=";")
            raise OptionError(f"unknown options {unknown}{hint} known options: {', '.join(OPTIONS)}")
        if "recipe" not in options:
            raise OptionError(
                f"the option 'recipe' is missing: options={{'recipe': name}} with one of {', '.join(RECIPES)}"
            )
        return cls(**options)

    @property
    def group(self) -> str | None:
        """The name of the process group that `amax_group` gives; None for all ranks."""
        return str(self.amax_group.group_name) if hasattr(self.amax_group, "group_name") else None

    def for_inductor(self, mode: str | None) -> dict[str, Any]:
        """The settings of Inductor, with those of a mode of torch.compile."""
        settings = {**inductor_mode_options(mode), **(self.inductor or {})}
        if unknown := [name for name in settings if name not in inductor_options()]:
            hint = f": options={{{unknown[0]!r}: ...}}" if unknown[0] in OPTIONS else _argument(unknown[0])
            hint = hint or did_you_mean(unknown[0], inductor_options())
            raise OptionError(f"Inductor has no setting {unknown[0]!r}{hint}")
        return settings

    def for_passes(self) -> Settings:
        """The settings of the passes."""
        assert isinstance(self.recipe, Recipe)
        same = {name: getattr(self, name) for name in ("allow_float64", "save", "gemm", "quantized_dispatch", "ranges")}
        return Settings(recipe=self.recipe.fingerprint(), stored_weights=self.cache_weights, **same)


def check_keywords(names: Iterable[str], called: str) -> None:
    """Raises ArgumentError for a keyword of `called` that belongs elsewhere, and says where."""
    for name in names:
        if name == "options":
            raise ArgumentError(f"{called} takes options as keywords: write {called}(recipe, **options)")
        if name not in OPTIONS and (hint := _elsewhere(name)):
            raise ArgumentError(f"{called} got an unexpected keyword {name!r}{hint}")


def _hint(name: object, choices: Iterable[str], end: str) -> str:
    """A hint where an unknown name belongs, or which of `choices` it is like; `end` stands behind another."""
    elsewhere = _elsewhere(name)
    return f"{elsewhere}{end}" if elsewhere else did_you_mean(name, choices) or end


def _elsewhere(name: object) -> str:
    """A hint where a name that is no option of fxquant belongs; empty if that is not known."""
    plain = re.sub(r"[._]", "", str(name))
    settings = [setting for setting in inductor_options() if plain == re.sub(r"[._]", "", setting)]
    if not settings:
        return _argument(name)
    return f": Inductor's settings are one option, options={{'inductor': {{{settings[0]!r}: ...}}}}"


def _argument(name: object) -> str:
    """A hint for a name that is an argument beside the options; empty for another."""
    if name == "mode":
        return (
            ": a mode is an argument, fxquant.compile(model, recipe, mode=...), or "
            "torch.compile(model, backend=fxquant.Backend(recipe, mode=...))"
        )
    if name in ("model", "states"):
        return f": it is an argument of fxquant.Backend(recipe, {name}=...)"
    if name in _OF_TORCH:
        return f": it is an argument of fxquant.compile and of torch.compile, {name}=..., beside the options"
    return ""


def check_model(model: object, verb: str) -> None:
    """Raises OptionError for what cannot be called as a model is; `verb` says what would be done with it."""
    if isinstance(model, ExportedProgram):
        raise OptionError(
            f"a module or a function is {verb}, not an ExportedProgram: fxquant.quantize_program is for programs, and "
            "program.module() is one's module"
        )
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise OptionError(f"a module or a function of Python is {verb}, not one of TorchScript: take what was scripted")
    if not callable(model):
        raise OptionError(f"a module or a function is {verb}, not {article(type(model).__name__)}")
    if isinstance(model, type):
        raise OptionError(f"a module or a function is {verb}, not the class {model.__name__}: make an object of it")


def check_arguments(
    model: object, recipe: Recipe | str, options: object, keywords: Mapping[str, Any], *, called: str
) -> None:
    """Raises OptionError for arguments of `fxquant.compile`, or of its kin that is `called`, that it does not take."""
    if "backend" in keywords:
        raise OptionError(f"{called} is torch.compile with backend='fxquant': drop the backend argument")
    check_model(model, "compiled")
    _check_keywords(keywords, called)
    if isinstance(options, Mapping):
        if "recipe" in options:
            raise OptionError("the recipe is an argument of its own: drop it from the options")
        Options.of({**options, "recipe": recipe})


def _check_keywords(keywords: Iterable[str], called: str) -> None:
    for name in keywords:
        if name in OPTIONS:
            raise ArgumentError(f"{name} is an option of the backend: write options={{{name!r}: ...}}")
        if name not in _OF_TORCH:
            hint = _hint(name, [*_OF_TORCH, "recipe", *OPTIONS], end=".")
            raise ArgumentError(
                f"{called} got an unexpected keyword {name!r}{hint} Known keywords: recipe, {', '.join(_OF_TORCH)}; "
                f"known options: {', '.join(OPTIONS)}"
            )


OPTIONS = tuple(field.name for field in fields(Options))
"""The names of all options."""
_OF_TORCH = tuple(name for name in inspect.signature(torch.compile).parameters if name not in ("model", "backend"))
"""The arguments that torch.compile takes beside a model and a backend."""
A_DICT = f"a dict of {', '.join(OPTIONS)}"
"""The words for what options must be."""
