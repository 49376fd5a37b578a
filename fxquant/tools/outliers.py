"""Operands that lose more than their kin, as a probe has measured them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)

STATISTICS = ("cosine", "product_error", "relative_error", "sqnr", "kurtosis", "zeros", "exponents")
"""The statistics of a row that are read."""

TIMES = {"product": 2.5, "product of a tail": 1.8, "elements": 1.3, "hidden": 1.65}
"""How many times the usual is an outlier's.

Formats lose the same share of all ordinary products, within a fifth; of products of other operands they lose thrice as
much. The elements of layers of a like name lose the same within a fifth, too. What is `hidden` is what is lost of
elements beside what is lost of the norm.
"""

LEAST = {"product": 0.2, "elements": 0.25, "bare": 0.1}
"""The least that an outlier loses: a few percent hurt nothing, even where they are many times what others lose.

That of a `bare` tail is of the elements, too: where it stands in few blocks, it is what a coarse format always loses.
"""

_HEAVY = 100.0
"""The kurtosis of a heavy tail: a hundredth of the elements has the energy. That of normal numbers is 3."""

_CROWD = 32
"""The elements within a quarter of the largest beyond which they are no tail, whose elements thin out."""

_SMALLER = 0.9
"""The share of the usual loss in the norm below which a few large elements make up the norm."""

_BARE = 0.7
"""The share of the usual loss in the norm below which nearly all of it is that of the largest element of a block."""

_TAIL = {"kurtosis": 50.0, "elements": 1.65}
"""The kurtosis of a tail that is not heavy, and how many times the usual is then lost of the elements beside it."""

_SPIKY = 20.0
"""The least kurtosis of what hides others: slow changes from token to token, which a transform gathers, have less."""

_ROWS = {"kurtosis": 40.0, "norm": 0.85, "elements": 1.2}
"""The kurtosis, and the losses beside those of rows, of columns in which a few rows have the norm.

These hide what is beside them in a block, so that more is lost of the elements than in rows, and less of the norm.
"""

_SPREAD = {"row": 1.25, "column": 0.92, "norm": 0.75}
"""The losses of rows' elements beside the usual, and of columns' elements or norm beside rows', if few are large.

A block of rows loses what it always loses, since a row is large as a whole. A Hadamard transform over rows makes
elements of like size of each large one, of which less is lost: the others are not seen beside them.
"""

_BOTH = 0.75
"""The share of the loss of elements in one direction that is a loss by the same tail in the other."""


class Place(NamedTuple):
    """The layer, role and direction of an operand, and its format."""

    layer: str
    role: str
    direction: str
    format: Hashable


class Seen(NamedTuple):
    """The losses of an operand in a step.

    `product` is the relative error of its product in the norm, None where products are not measured; `elements` the
    mean relative error of its elements, `norm` the relative error of the operand in the norm, `kurtosis` that of its
    elements, `near` the number of those within a quarter of the largest, and `zeros` the share of those that are zero.
    """

    product: float | None
    elements: float
    norm: float
    kurtosis: float = 0.0
    near: int = 0
    zeros: float = 0.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Seen:
        """The losses that a row of a probe tells of."""
        error, cosine = row.get("product_error"), row.get("cosine")
        if cosine is not None and error != math.inf:
            error = math.sqrt(max(0.0, 1.0 - cosine**2)) if math.isfinite(cosine) else math.inf
        counts = {int(exponent): count for exponent, count in (row.get("exponents") or {}).items()}
        near = sum(count for exponent, count in counts.items() if exponent >= max(counts) - 1)
        lost = (row.get("relative_error") or 0.0, noise(row.get("sqnr")), row.get("kurtosis") or 0.0)
        return cls(error, *lost, near, row.get("zeros") or 0.0)


def noise(sqnr: float | None) -> float:
    """The relative error of an operand whose signal is `sqnr` decibels above its noise."""
    return 0.0 if sqnr is None else math.inf if sqnr == -math.inf else 10 ** (-sqnr / 20)


class Outlier(NamedTuple):
    """An operand that loses much more than usual: how many times as much, and by which of the `SIGNS`."""

    times: float
    sign: str


SIGNS = {
    "product": "its product has {0:.1f} times the usual error",
    "tail": "a few large elements hide others, of which {0:.1f} times the usual is lost",
    "bare tail": "a few large elements have nearly all of the norm, others are lost beside them",
    "same tail": "a few large elements hide others, as in the other direction",
    "rows": "a few large rows begin here, beside which others are lost",
}
"""The signs of an outlier, as sentences."""


def outliers(seen: Mapping[K, Sequence[Seen]], places: Mapping[K, Place]) -> dict[K, Outlier]:
    """The operands that lose many times what is usual, those that lose most first.

    An operand hurts its product, or it has a tail whose few large elements hide what all others lose: more than usual
    of the elements, and less of the norm. A gradient takes such tails from gradients behind it, if lesser ones: they
    count where they begin, and in columns only where rows have one, or in the one layer where a few large rows begin.
    The mean of steps counts.
    """
    products = products_times_usual(seen, places)
    hurt = (key for key, x in products.items() if x > TIMES[_product_of(seen[key])] and _loses(seen[key]))
    result = {key: Outlier(products[key], "product") for key in hurt}
    elements = {key: statistics.fmean(one.elements for one in steps) for key, steps in seen.items()}
    norms = {key: statistics.fmean(one.norm for one in steps) for key, steps in seen.items()}
    usual_norms = {key: _median(alike) for key, alike in _by(norms, places, lambda p: p[1:]).items()}
    shares = {key: _times(norm, usual_norms[key]) for key, norm in norms.items()}
    at = {place: key for key, place in places.items() if key in elements}
    tails = {
        places[key]: times
        for key, times in _hidden(seen, elements, shares, places).items()
        if places[key].role != "grad_output" or places[key].direction == "rowwise"
    }
    begun = _first_large_rows(seen, elements, places, tails)
    bare = [place for place in tails if _is_bare(shares[at[place]], seen[at[place]])]
    tails = _without_inherited(tails, [*bare, *(places[key] for key in begun)], places)
    for place, times in tails.items():
        sign = "tail" if place not in bare or times > TIMES["elements"] else "bare tail"
        result[at[place]] = max(Outlier(times, sign), result.get(at[place], Outlier(0.0, "")))
    result |= {key: Outlier(times, "rows") for key, times in begun.items()}
    for key, place in places.items():
        other = next((p for p in tails if p[:2] == place[:2] and p[3] == place[3]), None)
        usual = elements[at[other]] if other else math.inf
        if other and key not in result and elements[key] > max(_BOTH * usual, LEAST["elements"]):
            result[key] = Outlier(elements[key] / usual, "same tail")
    return dict(sorted(result.items(), key=lambda item: -item[1].times))


def _without_inherited(
    tails: Mapping[Place, float], origins: Collection[Place], places: Mapping[K, Place]
) -> dict[Place, float]:
    """The tails without those of gradients that have one of `origins` behind them, from which they take theirs."""
    number = {place.layer: i for i, place in enumerate(places.values())}
    last = defaultdict[Hashable, int](lambda: -1)
    for place in origins:
        if place.role == "grad_output":
            last[place.format] = max(last[place.format], number[place.layer])
    return {
        place: times
        for place, times in tails.items()
        if place in origins or place.role != "grad_output" or number[place.layer] >= last[place.format]
    }


def _first_large_rows(
    seen: Mapping[K, Sequence[Seen]], elements: Mapping[K, float], places: Mapping[K, Place], tails: Collection[Place]
) -> dict[K, float]:
    """The columns of the gradient in which a few large rows begin, with how many times as much they lose as rows do.

    Of all that have such rows it is the layer nearest the loss, from which those before it inherit them. It is none if
    a gradient behind it has a tail. Where columns are transformed, less is lost of them than of rows.
    """
    last = _last(places)
    begins: dict[Hashable, tuple[K, float] | None] = {}
    at = {place: key for key, place in places.items() if place.role == "grad_output" and key in elements}
    rows = {place: key for place, key in at.items() if place.direction == "rowwise"}
    norms = {place: statistics.fmean(one.norm for one in seen[key]) for place, key in at.items()}
    usual = _by({place: norms[place] for place in rows}, {place: place for place in rows}, lambda p: p.format)
    usual_elements = _usual(elements, places)
    for place, key in at.items():
        row = place._replace(direction="rowwise")
        if row == place or row not in rows:
            continue
        of_rows, of_columns = elements[rows[row]], elements[key]
        if of_rows > LEAST["elements"] and _is_of_classes(row, seen[rows[row]], last):
            continue
        is_even = norms[row] > _ROWS["norm"] * _median(usual[row])
        if row in tails:
            begins[place.format] = None
        times = _times(of_columns, of_rows)
        hides = of_columns > LEAST["elements"] and times > _ROWS["elements"]
        hides = hides and norms[place] < _ROWS["norm"] * _median(usual[row]) and _are_few(seen[key])
        is_whole = is_even and of_rows < _SPREAD["row"] * usual_elements[rows[row]] and _are_few(seen[rows[row]])
        if hides:
            begins[place.format] = (key, times)
        elif is_whole and (of_columns < _SPREAD["column"] * of_rows or norms[place] < _SPREAD["norm"] * norms[row]):
            begins[place.format] = (key, _times(of_rows, of_columns))
    return dict(filter(None, begins.values()))


def _are_few(steps: Sequence[Seen]) -> bool:
    """Returns True if a few large rows have the norm in all steps; rows of zeros, as those of padding, do not count."""
    return min(one.kurtosis * (1.0 - one.zeros) for one in steps) > _ROWS["kurtosis"]


def products_times_usual(seen: Mapping[K, Sequence[Seen]], places: Mapping[K, Place]) -> dict[K, float]:
    """How many times the usual error in the norm a product has with each operand quantized, where it is measured.

    The usual one is the median of the role and direction, and that of the format in all of its operands at least.
    """
    errors = {}
    for key, steps in seen.items():
        measured = [one.product for one in steps if one.product is not None]
        if measured:
            errors[key] = statistics.fmean(measured)
    kinds, formats = _by(errors, places, lambda p: p[1:]), _by(errors, places, lambda p: p.format)
    return {key: _times(error, max(_median(kinds[key]), _median(formats[key]))) for key, error in errors.items()}


def _hidden(
    seen: Mapping[K, Sequence[Seen]], elements: Mapping[K, float], shares: Mapping[K, float], places: Mapping[K, Place]
) -> dict[K, float]:
    """The operands with a tail, with how many times as much as usual they lose of their elements.

    The tail is heavy in all steps, or they lose less than usual of the norm. Usual is what layers of a like name lose,
    since an activation makes its own tail. A loss over classes makes one too: the gradient of the last layer has an
    element as large as the largest in each row, that of the row's class.
    """
    last = _last(places)
    usual = _usual(elements, places)
    result = {}
    for key, lost in elements.items():
        norm, times = shares[key], _times(lost, usual[key])
        kurtosis = min(one.kurtosis for one in seen[key])
        is_heavy = kurtosis > _HEAVY and times > TIMES["elements"]
        is_heavy = is_heavy or (kurtosis > _TAIL["kurtosis"] and times > _TAIL["elements"])
        is_hidden = norm < _SMALLER and _times(times, norm) > TIMES["hidden"] and kurtosis > _SPIKY
        is_bare = _is_bare(norm, seen[key]) and places[key].direction == "rowwise"
        is_tail = is_bare or (lost > LEAST["elements"] and (is_heavy or is_hidden))
        if is_tail and not _is_of_classes(places[key], seen[key], last):
            result[key] = times
    return result


def _is_bare(norm: float, steps: Sequence[Seen]) -> bool:
    """Returns True if a few elements have nearly all of the norm; `norm` is the share of its usual loss."""
    lost = statistics.fmean(one.elements for one in steps)
    return norm < _BARE and min(one.kurtosis for one in steps) > _HEAVY and lost > LEAST["bare"]


def _last(places: Mapping[K, Place]) -> str:
    return [*places.values()][-1].layer if places else ""


def _is_of_classes(place: Place, steps: Sequence[Seen], last: str) -> bool:
    """Returns True for the gradient of a loss over classes, of the `last` layer."""
    return place[:2] == (last, "grad_output") and min(one.near for one in steps) > _CROWD


def _usual(elements: Mapping[K, float], places: Mapping[K, Place]) -> dict[K, float]:
    """The usual loss of elements: that of layers of a like name, and the median of the role at least."""
    kinds, peers = _by(elements, places, lambda p: p[1:]), _by(elements, places, lambda p: (_end(p.layer), *p[1:]))
    result = {}
    for key in elements:
        alike = sorted(peers[key])
        peer = alike[len(alike) // 4 if len(alike) > 2 else 0] if len(alike) > 1 else 0.0
        result[key] = max(_median(kinds[key]), peer)
    return result


def _product_of(steps: Sequence[Seen]) -> str:
    """The kind of a product: two signs need less of each, an error and a heavy tail."""
    return "product of a tail" if min(one.kurtosis for one in steps) > _HEAVY else "product"


def _loses(steps: Sequence[Seen]) -> bool:
    return statistics.fmean(one.product or 0.0 for one in steps) > LEAST["product"]


def _end(layer: str) -> str:
    return layer.rpartition(".")[2]


def _by(numbers: Mapping[K, float], places: Mapping[K, Place], kind: Any) -> dict[K, list[float]]:
    """For each operand the numbers of all operands of its kind."""
    alike = defaultdict[Any, list[float]](list)
    for key, number in numbers.items():
        alike[kind(places[key])].append(number)
    return {key: alike[kind(places[key])] for key in numbers}


def _median(numbers: Sequence[float]) -> float:
    return statistics.median_low(numbers)


def _times(number: float, usual: float) -> float:
    if math.isinf(number) and math.isinf(usual):
        return 1.0
    return number / usual if usual > 0 else 1.0 if number == 0 else math.inf
