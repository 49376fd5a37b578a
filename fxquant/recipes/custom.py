"""Recipes of the user's: a factory answers for each role, or rules do."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from fxquant.checks import AtLeast, article, checked, did_you_mean, place_of
from fxquant.errors import RecipeError
from fxquant.quantizers import DelayedScalingRequest, Format, IdentityQuantizer, Quantizer, value_text
from fxquant.quantizers.fingerprint import fingerprint
from fxquant.recipes.base import (
    NO_FP8_MHA,
    Answer,
    AutoRecipe,
    Override,
    QuantizerFactory,
    Recipe,
    is_attention,
    override_backward,
    resolve,
)
from fxquant.roles import TENSOR_TYPES, QuantizerRole


def _hint(role: QuantizerRole) -> str:
    return ". With CustomRecipe(fp8_dpa=False) it is not asked about attention" if is_attention(role) else ""


_FOR_STRINGS = "a factory for string roles such as 'linear_input' goes through fxquant.factories.from_string_roles"


def _takes_strings(error: Exception) -> bool:
    """Returns True for what happens to a factory that takes a role for a string."""
    if isinstance(error, TypeError):  # as of `"weight" in role`, `role[:6]` and `re.match(pattern, role)`
        return QuantizerRole.__name__ in str(error) or "expected string" in str(error)
    return isinstance(error, KeyError) or (isinstance(error, AttributeError) and hasattr(str, error.name or ""))


def ask(answer: Answer, role: QuantizerRole, asked: str = "qfactory") -> Quantizer | DelayedScalingRequest:
    """The answer of a quantizer, request, recipe or factory for a role.

    Raises RecipeError, with the role and the name of the one `asked`, if the factory fails or returns no quantizer.
    """
    if isinstance(answer, (Quantizer, DelayedScalingRequest)):
        return answer
    if isinstance(answer, (Recipe, str)):
        return resolve(answer).quantizer(role)
    try:
        answered = answer(role)
    except Exception as error:
        if isinstance(error, RecipeError) and str(role) in str(error):
            raise
        what = str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__} {error}"
        what += f"; {_FOR_STRINGS}" if _takes_strings(error) else ""
        raise RecipeError(f"{asked} failed for role {role}: {what}{_hint(role)}{place_of(error)}") from error
    if answered is None:
        raise RecipeError(
            f"{asked} returned None for role {role}: return an IdentityQuantizer() to keep it in high precision; "
            f"{_FOR_STRINGS}{_hint(role)}"
        )
    if not isinstance(answered, (Quantizer, DelayedScalingRequest)):
        raise RecipeError(
            f"{asked} returned {article(type(answered).__name__)} for role {role}: a Quantizer is expected"
        )
    return answered


@checked(takes={"qfactory": "a function of a QuantizerRole, such as fxquant.factories.mxfp8"})
@dataclass(frozen=True, repr=False, eq=False)
class CustomRecipe(Recipe):
    """Asks `qfactory(role)` for every operand.

    The factory returns a quantizer for each role it is asked about, `IdentityQuantizer()` to keep one in high
    precision; None is refused. It must give equal answers to equal roles. Two custom recipes are equal when their
    factories are; partials of one function with equal arguments are equal too.

    `fp8_dpa`: None quantizes the attention for which the factory returns FP8 (`module_type` ``dpa``), False asks for
    none, and True refuses what is not for attention. `backward_override` changes the factory's answers for linears as
    on the named recipes. fxquant uses neither `fp8_format` nor `quantization_alignment`, TransformerEngine's padding of
    the rows of experts.
    """

    _scaling = "custom"
    qfactory: QuantizerFactory
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool | None = None
    fp8_mha: bool = False
    backward_override: Override = None
    quantization_alignment: Annotated[int, AtLeast(1)] = 128

    def __post_init__(self) -> None:
        factory: Any = self.qfactory  # quantizers can be called, but with tensors
        if isinstance(factory, Quantizer) or (isinstance(factory, type) and issubclass(factory, Quantizer | Recipe)):
            raise RecipeError(
                f"qfactory must be a function that returns a quantizer for a role, not {value_text(factory)} itself: "
                "Rules([Rule(MXFP8Quantizer(), module_type='linear')]) answers so for linear layers"
            )
        if self.fp8_mha:
            raise RecipeError(NO_FP8_MHA)

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        if role.module_type == "dpa" and self.fp8_dpa is False:
            return IdentityQuantizer()
        answer = ask(self.qfactory, role)
        if self.backward_override is None or is_attention(role):
            return answer
        if isinstance(answer, DelayedScalingRequest):
            raise RecipeError(
                f"backward_override={self.backward_override!r} does not go with delayed scaling (role {role})"
            )
        return override_backward(answer, role, self.backward_override)

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        return self.qfactory.unused(roles) if isinstance(self.qfactory, Rules) else []

    def by_name(self, role: QuantizerRole) -> list[str]:
        return self.qfactory.by_name(role) if isinstance(self.qfactory, Rules) else []

    def _key(self) -> tuple[Any, ...]:
        return tuple(_by_value(getattr(self, f.name)) for f in fields(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CustomRecipe):
            return NotImplemented
        try:
            return self._key() == other._key()
        except (RuntimeError, TypeError, ValueError):  # settings that do not compare, such as tables
            return fingerprint(self._key()) == fingerprint(other._key())

    def __hash__(self) -> int:
        try:
            return hash(self._key())
        except TypeError:  # of a quantizer that is a dataclass without frozen=True
            return hash(tuple(type(part).__qualname__ for part in self._key()))


def _by_value(value: Any) -> Any:
    """A key that is equal for equal partials, which themselves are not, unless an argument cannot be hashed."""
    if not isinstance(value, functools.partial):
        return value
    key = (functools.partial, value.func, value.args, tuple(sorted(value.keywords.items(), key=lambda item: item[0])))
    try:
        hash(key)
    except TypeError:
        return value
    return key


_LAYER = "write name=, a regular expression for the whole name of a layer"
_ANSWER = "a quantizer, a recipe or a factory"


@checked(
    takes={
        "quantizer": _ANSWER,
        **dict.fromkeys(
            ("layer", "layers", "fqn", "fqns", "module", "pattern", "filter_fn", "module_filter_fn"), _LAYER
        ),
        "role": "write module_type= and tensor_type=",
        "operand": "write tensor_type='input', 'weight' or 'grad_output'",
        "recipe": "a rule's first argument is its answer, a recipe too",
    }
)
@dataclass(frozen=True, repr=False)
class Rule:
    """An answer and the roles it is for: a pattern that is not None must match the whole of its field.

    The answer is a quantizer, or a recipe (or its name) or a factory, which is asked in its turn. Patterns are regular
    expressions: ``Rule(IdentityQuantizer(), name=r"lm_head|.*\\.router")``.
    """

    quantizer: Answer
    name: str | None = None
    module_type: str | None = None
    tensor_type: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantizer", _answer(self.quantizer, f"the rule for {self}"))
        for key in _KEYS:
            try:
                re.compile(getattr(self, key) or "")
            except re.error as error:
                raise RecipeError(
                    f"{key}={getattr(self, key)!r} of a rule is not a regular expression: {error}"
                ) from error
        self._check_reachable()

    def _check_reachable(self) -> None:
        """Raises RecipeError for a rule that no role of any model matches."""
        fits = {module for module in TENSOR_TYPES if _fits(self.module_type, module)}
        if not fits:
            hint = did_you_mean(self.module_type, TENSOR_TYPES)
            names = ", ".join(filter(None, TENSOR_TYPES))
            raise RecipeError(f"no role has module_type={self.module_type!r} of a rule{hint or '.'} Known: {names}")
        known_types = dict.fromkeys(kind for module in TENSOR_TYPES if module in fits for kind in TENSOR_TYPES[module])
        if not any(_fits(self.tensor_type, kind) for kind in known_types):
            hint = did_you_mean(self.tensor_type, known_types)
            where = f" with module_type={self.module_type!r}" if self.module_type else ""
            names = ", ".join(filter(None, known_types))
            raise RecipeError(
                f"no role{where} has tensor_type={self.tensor_type!r} of a rule{hint or '.'} Known: {names}"
            )

    def matches(self, role: QuantizerRole) -> bool:
        """Returns True if every pattern that is not None matches."""
        return all(_fits(getattr(self, key), getattr(role, key)) for key in _KEYS)

    def __str__(self) -> str:
        return ", ".join(f"{key}={value!r}" for key in _KEYS if (value := getattr(self, key)) is not None) or "any role"

    def __repr__(self) -> str:
        return value_text(self)


_KEYS = ("name", "module_type", "tensor_type")


def _fits(pattern: str | None, value: str) -> bool:
    return pattern is None or re.fullmatch(pattern, value) is not None


def _answer(answer: Answer, whose: str) -> Answer:
    """The answer of a rule, a name resolved. Raises RecipeError for an object that cannot answer."""
    if isinstance(answer, str):
        answer = resolve(answer)
    if isinstance(answer, AutoRecipe):
        raise RecipeError(
            f"{whose} is {answer}, which weighs whole layers: wrap the whole recipe, auto(CustomRecipe(...))"
        )
    if not isinstance(answer, (Quantizer, DelayedScalingRequest, Recipe)) and not callable(answer):
        hint = ": IdentityQuantizer() keeps operands in high precision" if answer is None else ""
        raise RecipeError(f"{whose} must have {_ANSWER}, not {article(type(answer).__name__)}{hint}")
    return answer


@checked(takes={"default": _ANSWER, "rules": "a list of Rule(quantizer, name=...)"})
@dataclass(frozen=True, repr=False)
class Rules:
    """A factory made of rules: the first that matches answers, `default` where none does.

    `default` is an answer like a rule's, a recipe's name for example. A report names the rules that matched nothing.
    """

    rules: Sequence[Rule] = field(default=())
    default: Answer = "high_precision"

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Iterable):
            what = "Rules([...])" if isinstance(self.rules, Rule) else "a list of Rule(quantizer, name=...)"
            raise RecipeError(f"rules must be a list: write {what}, not {article(type(self.rules).__name__)}")
        object.__setattr__(self, "rules", tuple(self.rules))
        for i, rule in enumerate(self.rules):
            if not isinstance(rule, Rule):
                raise RecipeError(f"rule {i} is {article(type(rule).__name__)}, not a Rule(quantizer, name=...)")
        object.__setattr__(self, "default", _answer(self.default, "the default of Rules"))

    def _index(self, role: QuantizerRole) -> int | None:
        return next((i for i, rule in enumerate(self.rules) if rule.matches(role)), None)

    def __call__(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        index = self._index(role)
        if index is not None:
            return ask(self.rules[index].quantizer, role, f"rule {index} ({self.rules[index]})")
        return ask(self.default, role, "the default of Rules")

    def unused(self, roles: Iterable[QuantizerRole]) -> list[str]:
        """The rules that no role reached, also those inside of other rules."""
        reached = [(self._index(role), role) for role in roles]
        unused = []
        for i, (rule, answer) in enumerate([*((r, r.quantizer) for r in self.rules), (None, self.default)]):
            here = [role for index, role in reached if index == (i if rule else None)]
            if rule is not None and not here:
                unused.append(f"rule {i}: {rule}")
            elif isinstance(answer, Rules):
                unused += [f"{f'rule {i}' if rule else 'default'} > {text}" for text in answer.unused(here)]
        return unused

    def by_name(self, role: QuantizerRole) -> list[str]:
        """The rules that would answer for this role if its layer had a name that they match, also inside of others."""
        answer, whose, texts = self.default, "default", list[str]()
        for i, rule in enumerate(self.rules):
            if rule.name is not None and all(_fits(getattr(rule, key), getattr(role, key)) for key in _KEYS[1:]):
                texts.append(f"rule {i}: {rule}")
            elif rule.matches(role):
                answer, whose = rule.quantizer, f"rule {i}"
                break
        inside = answer.by_name(role) if isinstance(answer, Rules | Recipe) else []
        return [*texts, *(f"{whose} > {text}" for text in inside)]

    def __repr__(self) -> str:
        return value_text(self)
