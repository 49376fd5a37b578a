"""Errors and warnings that users can meet. Each message names the fault, its place and a remedy."""

from __future__ import annotations


class FxQuantError(RuntimeError):
    """Base of every error that fxquant raises on purpose."""


class RecipeError(FxQuantError, ValueError):
    """A recipe, quantizer or format that cannot work, found before anything runs."""


class OptionError(FxQuantError, ValueError):
    """An option that the backend does not know."""


class SettingError(RecipeError, TypeError):
    """A setting of a recipe or quantizer that it does not have or take, for which Python raises a TypeError."""


class ArgumentError(OptionError, TypeError):
    """An argument that a function does not have or take, for which Python raises a TypeError."""


class ProgramError(FxQuantError, ValueError):
    """An exported program, or a file of one, that cannot be quantized."""


class GraphVerificationError(FxQuantError):
    """A pass left a graph in a state that the next one must not see: a bug in fxquant."""


class FxQuantWarning(UserWarning):
    """Base of every warning of fxquant. Each is given once, and silenced by the filters of `warnings`."""


class UnquantizedWarning(FxQuantWarning):
    """Something ran unquantized that a recipe was given for."""


class UnusedRuleWarning(FxQuantWarning):
    """A part of a recipe matched nothing."""


class NonFiniteWarning(FxQuantWarning):
    """A value or a gradient is NaN or infinite: with ``FXQUANT_VERIFY=1`` the first one is named."""
