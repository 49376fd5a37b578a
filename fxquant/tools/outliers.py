"""Operands whose error stands out from that of their kind, as a probe has measured it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

LIMITS = {"product_error": 5.0, "relative_error": 2.5}
"""How many times the usual error of a kind is an outlier's: of a product, and of the elements of an operand.

The error of a product shows what hurts it; that of elements also shows what a heavy tail loses beside its largest ones.
"""

LEAST = {"product_error": 0.04, "relative_error": 0.12}
"""The least usual errors: a few percent hurt nothing, even where they are many times those of a finer format."""


def times_usual(
    errors: Mapping[K, float], kinds: Mapping[K, Hashable], statistic: str = "product_error"
) -> dict[K, float]:
    """How many times the usual error of its kind an operand has: the median, since a format mostly fits."""
    alike = defaultdict(list)
    for key, error in errors.items():
        alike[kinds[key]].append(error)
    usual = {kind: max(statistics.median_low(numbers), LEAST[statistic]) for kind, numbers in alike.items()}
    return {key: error / usual[kinds[key]] for key, error in errors.items()}


def outliers(
    errors: Mapping[str, Mapping[K, Sequence[float]]], kinds: Mapping[K, Hashable]
) -> dict[K, float]:  # fmt: skip
    """The operands of which an error, by its statistic, is many times the usual one, with how many, the most first.

    The mean of steps counts: a product that comes out small in one of them has a large error there.
    """
    result = dict[K, float]()
    for statistic, of_operands in errors.items():
        means = {key: statistics.fmean(numbers) for key, numbers in of_operands.items()}
        for key, times in times_usual(means, kinds, statistic).items():
            if times > LIMITS[statistic]:
                result[key] = max(times, result.get(key, 0.0))
    return dict(sorted(result.items(), key=lambda item: -item[1]))
