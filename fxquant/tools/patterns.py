"""Rules by patterns of names, made of choices for single operands."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from fxquant.quantizers import DelayedScalingRequest, HybridQuantizer, IdentityQuantizer, Quantizer, value_text
from fxquant.recipes import Answer, CustomRecipe, Recipe, Rule, Rules
from fxquant.recipes.operands import Operand
from fxquant.roles import Direction, QuantizerRole

Choice = int | None
"""The number of a recipe; None is high precision."""


def name_pattern(names: Collection[str], others: Collection[str]) -> str:
    r"""A regular expression that matches these names of layers and none of the others.

    ``blocks.0.up``, ``blocks.1.up`` and no other ``blocks.*.up`` become ``blocks\.\d+\.up``, a part of them
    ``blocks\.(0|1)\.up``; ends that have a pattern in common share it.
    """
    remaining, texts = list(names), list[str]()
    for generalize in (_any_numbers, _some_numbers):
        groups = defaultdict(list)
        for name in remaining:
            groups[re.sub(r"\d+", "#", name)].append(name)
        for members in groups.values():
            text = generalize(members)
            if text and not any(re.fullmatch(text, other) for other in others):
                texts.append(text)
                remaining = [name for name in remaining if name not in members]
    return "|".join(_with_common_ends([*texts, *map(re.escape, remaining)]))


def _any_numbers(members: Sequence[str]) -> str:
    return r"\d+".join(map(re.escape, re.split(r"\d+", members[0]))) if len(members) > 1 else ""


def _some_numbers(members: Sequence[str]) -> str:
    """One pattern for names that differ in one number."""
    numbers = [re.findall(r"\d+", name) for name in members]
    varied = [place for place, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    if len(varied) != 1:
        return ""
    parts = list(map(re.escape, re.split(r"\d+", members[0])))
    choices = sorted({row[varied[0]] for row in numbers}, key=int)
    fixed = [f"({'|'.join(choices)})" if place == varied[0] else text for place, text in enumerate(numbers[0])]
    return parts[0] + "".join(map("".join, zip(fixed, parts[1:], strict=True)))


def _with_common_ends(texts: Iterable[str]) -> list[str]:
    r"""Joins ``a\.b\.q`` and ``a\.b\.k`` into ``a\.b\.(q|k)``."""
    by_front: dict[str, list[str]] = {}
    for text in texts:
        front, dot, end = text.rpartition("\\.")
        if "|" in end or ")" in end:
            front, dot, end = "", "", text
        by_front.setdefault(front + dot, []).append(end)
    joined = []
    for front, ends in by_front.items():
        joined += [f"{front}({'|'.join(ends)})"] if front and len(ends) > 1 else [front + end for end in ends]
    return joined


def recipe_of(
    recipes: Sequence[Recipe], chosen: Mapping[Operand, Choice], roles: Mapping[Operand, QuantizerRole]
) -> CustomRecipe:
    """A recipe of rules that answers as was chosen, for the operands of a model.

    What most operands of a kind (such as the weights of linear layers) have is a rule for the kind, and rules by names
    of layers stand before it. A direction without a choice follows the other.
    """
    kinds: dict[tuple[str, str], dict[str, Answer]] = defaultdict(dict)
    for role in dict.fromkeys(roles.values()):
        sides = [Operand(role.name, role.tensor_type, str(direction)) for direction in Direction]
        choices = [chosen.get(side) for side in sides if side in chosen]
        if choices:
            kinds[role.module_type, role.tensor_type][role.name] = _answer(recipes, choices, role)
    usual = {kind: _most(answers.values()) for kind, answers in kinds.items()}
    default = _most(usual.values()) if usual else "high_precision"
    if not isinstance(default, str | Recipe):  # which would answer for all kinds of products
        default = "high_precision"
    exceptions: dict[tuple[str, str, str], tuple[Answer, list[str]]] = {}
    for (module, tensor), answers in kinds.items():
        unusual = {name: answer for name, answer in answers.items() if not _same(answer, usual[module, tensor])}
        for text in dict.fromkeys(map(_text, unusual.values())):
            names = [name for name, answer in unusual.items() if _text(answer) == text]
            answer = unusual[names[0]]
            pattern = name_pattern(names, answers.keys() - set(names))
            exceptions[module, tensor, text] = (answer, [pattern])
    rules = [*_merged(exceptions), *_of_kinds(usual, default)]
    return CustomRecipe(qfactory=Rules(rules, default))


def _answer(recipes: Sequence[Recipe], choices: Sequence[Choice], role: QuantizerRole) -> Answer:
    """The answer for a role whose rowwise and columnwise halves have these choices."""
    first, last = choices[0], choices[-1]
    if first == last or role.module_type == "dpa":
        recipe = "high_precision" if first is None else recipes[first]
        if isinstance(recipe, CustomRecipe) and role.module_type != "dpa":
            return recipe.quantizer(role)  # which reads better than rules within rules
        return recipe
    halves: list[Quantizer] = []
    for choice, direction in zip((first, last), Direction, strict=True):
        answer = IdentityQuantizer() if choice is None else recipes[choice].quantizer(role)
        if isinstance(answer, DelayedScalingRequest):
            return answer
        halves.append(answer.side(direction).copy())
    return HybridQuantizer(halves[0], halves[1])


def _text(answer: Answer) -> str:
    return answer if isinstance(answer, str) else value_text(answer)


def _same(a: Answer, b: Answer) -> bool:
    return _text(a) == _text(b)


def _most(answers: Iterable[Answer]) -> Answer:
    """The answer that is there most often; of several a recipe, and the first."""
    listed = list(answers)
    texts, whole = list(map(_text, listed)), [isinstance(answer, str | Recipe) for answer in listed]
    return listed[max(range(len(texts)), key=lambda i: (texts.count(texts[i]), whole[i], -i))]


def _merged(exceptions: Mapping[tuple[str, str, str], tuple[Answer, list[str]]]) -> list[Rule]:
    """One rule for several kinds of operands of the same layers with the same answer."""
    rules: dict[tuple[str, str, str], tuple[Answer, list[str]]] = {}
    for (module, tensor, text), (answer, patterns) in exceptions.items():
        rules.setdefault((module, patterns[0], text), (answer, []))[1].append(tensor)
    return [
        Rule(answer, name=pattern or None, module_type=module, tensor_type="|".join(tensors))
        for (module, pattern, _), (answer, tensors) in rules.items()
    ]


def _of_kinds(usual: Mapping[tuple[str, str], Answer], default: Answer) -> list[Rule]:
    grouped: dict[tuple[str, str], tuple[Answer, list[str]]] = {}
    for (module, tensor), answer in usual.items():
        if not _same(answer, default):
            grouped.setdefault((module, _text(answer)), (answer, []))[1].append(tensor)
    return [
        Rule(answer, module_type=module, tensor_type="|".join(tensors))
        for (module, _), (answer, tensors) in grouped.items()
    ]
