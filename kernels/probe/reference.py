"""The statistics of probes: what each means, in plain torch, and the vectors in which a graph adds them up.

An operand is x [*, R, C] with the contracted axis last, and q are the values that its quantized form stands for; for
an operand that is Hadamard-transformed before it is quantized both are those of the transformed one. A vector has one
entry for each name of `COLUMNS`: sums, which are added where graphs run several times in a step and over ranks, then
largest values, then the worst block, then the numbers of elements by exponent. `merge` adds vectors, `NEUTRAL` is that
of nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.values import statically_known_true
from fxquant.formats import Element, Format, QuantSpec
from fxquant.kernels import custom
from fxquant.kernels.cast import blocks, reference
from fxquant.kernels.cast.swizzle import unswizzle

SUMS = (
    "elements", "zeros", "underflow", "saturated", "subnormal", "nonfinite", "overflow", "signal", "noise", "fourth",
    "relative", "scales", "scale_sum", "inner", "product", "exact", "products", "product_error", "change",
    "change_squares",
)  # fmt: skip
"""The entries that are added."""

LARGEST = ("amax", "scale_max", "minus_scale_min")
"""The entries of which the largest counts."""

WORST = ("worst", "worst_row", "worst_column")
"""The noise of the worst block by its signal, -1 where there is none, and where it begins."""

EXPONENTS = range(-48, 16)
"""The exponents that are counted one by one: the first and the last have all beyond them too."""

COLUMNS = (*SUMS, *LARGEST, *WORST, *(f"exponent_{exponent}" for exponent in EXPONENTS))

GROUPS = ("values", "codes", "scales", "blocks", "exponents", "product", "loss")
"""The parts of a vector that are computed together: what is not asked for stays as in `NEUTRAL`."""

NEUTRAL = (*(0.0,) * len(SUMS), 0.0, 0.0, -math.inf, -1.0, 0.0, 0.0, *(0.0,) * len(EXPONENTS))

BEYOND = 1 + 2.0**-20
"""A magnitude is beyond another if it is larger by more than float32 rounds."""

SAMPLE = 128
"""The rows of each operand whose products are compared, at most."""

_AT_ONCE = 16
"""The exponents that are counted in one pass over the tensor."""

BLOCK = (1, 32)
"""The block in whose place stands 'the worst' for formats without blocks."""


def neutral(device: torch.device) -> Tensor:
    """`NEUTRAL` on a device, without a copy from the host, which no CUDA graph takes."""
    runs = [(value, len([*same])) for value, same in itertools.groupby(NEUTRAL)]
    return torch.cat([torch.full((count,), value, dtype=torch.float64, device=device) for value, count in runs])


def merge(old: Tensor, new: Tensor) -> Tensor:
    """The vectors [*, COLUMNS] of two parts of a step taken together."""
    sizes = [len(SUMS), len(LARGEST), len(WORST), len(EXPONENTS)]
    a, b = (torch.split(x, sizes, -1) for x in (old, new))
    worse = b[2].narrow(-1, 0, 1) > a[2].narrow(-1, 0, 1)
    return torch.cat((a[0] + b[0], torch.maximum(a[1], b[1]), torch.where(worse, b[2], a[2]), a[3] + b[3]), -1)


def finite(x: Tensor) -> Tensor:
    """True for numbers: neither NaN nor infinite."""
    return x.abs() < math.inf


def underflow(x: Tensor, q: Tensor) -> Tensor:
    """True where a number that is not zero became zero. (TransformerEngine's ``underflows%``, debug features.)"""
    return (x != 0) & finite(x) & (q == 0)


def overflow(x: Tensor, q: Tensor) -> Tensor:
    """True where a number became NaN or infinite: of a scale that overflowed, or by another number of its block."""
    return finite(x) & ~finite(q)


def saturated(x: Tensor, q: Tensor, code: Tensor, largest: float) -> Tensor:
    """True where a magnitude is beyond the largest that its scale can represent, which stands for it then.

    (TransformerEngine's ``overflows%``, which it has for delayed scaling alone; OCP MX v1.0 section 6.3, saturation.)
    """
    return (code.abs() >= largest) & (x.abs() > q.abs() * BEYOND)


def subnormal(code: Tensor, smallest_normal: float) -> Tensor:
    """True where an element's code is a subnormal of its format: not zero, and below the smallest normal number."""
    return (code != 0) & (code.abs() < smallest_normal)


def exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|) as int32 of finite float32 numbers; -127 for zero and float32's own subnormals."""
    return ((x.view(torch.int32) >> 23) & 255) - 127


def energy(x: Tensor, counted: Tensor) -> Tensor:
    """sum x^2 of what is `counted`, in float64: no square of a float32 number is too large or too small for it."""
    return torch.where(counted, x, 0.0).double().square().sum()


def fourth_moment(x: Tensor, counted: Tensor) -> Tensor:
    """sum x^4 of what is `counted`, in float64, of which a kurtosis is made: E[x^4] / E[x^2]^2, 3 of normal values.

    Computed of x / 2^64, whose fourth powers are none too large.
    """
    return (torch.where(counted, x, 0.0).double() * 2.0**-64).square().square().sum() * 2.0**256


def relative_error(x: Tensor, q: Tensor, counted: Tensor) -> Tensor:
    """The sum of min(|x - q| / |x|, 1) over what is `counted` and not zero: what small elements lose counts as much."""
    counted = counted & (x != 0)
    error = torch.where(counted, (x - q).abs(), 0.0) / torch.where(counted, x.abs(), 1.0)
    return error.clamp(max=1.0).sum()


@dataclass(frozen=True)
class Compared:
    """An operand and its quantized form.

    `original` is x as it is, `x` what the values `q` are compared with, `code` the elements' values without their
    scales, in the format `row`. The last two are None where only a quantizer of a user's own knows them. `valid`, where
    there is one, says what counts; the rest is zero.
    """

    original: Tensor
    x: Tensor
    q: Tensor
    code: Tensor | None
    row: Format | None
    valid: Tensor | None = None
    exact: bool = False

    @property
    def padding(self) -> Tensor | int:
        """The number of elements that do not count."""
        if self.valid is None:
            return 0
        return (~self.valid).sum() * (self.original.numel() // self.valid.numel())


def statistics(x: Tensor, parts: Sequence[Tensor], spec: QuantSpec, groups: Sequence[str]) -> Tensor:
    """The vector [COLUMNS], float64, of an operand x whose quantized form is `parts`: its `groups`."""
    parts, spec = plain_scales(parts, spec)
    seen = compared(x.float(), parts, spec)
    return measured(seen, factors(parts, spec, seen.row), groups)


def turned(
    vector: Tensor, x: Tensor, parts: Sequence[Tensor], spec: QuantSpec,
    measure: Callable[[Tensor, Sequence[Tensor], QuantSpec, Sequence[str]], Tensor] = statistics,
) -> Tensor:  # fmt: skip
    """The `vector` of the other direction of x, whose values are the same, with the worst block of this one."""
    other = measure(x, parts, spec, ("blocks",))
    before = len(SUMS) + len(LARGEST)
    kept = torch.split(vector, [before, len(WORST), len(EXPONENTS)])
    return torch.cat([kept[0], other.narrow(0, before, len(WORST)), kept[2]])


def plain_scales(parts: Sequence[Tensor], spec: QuantSpec) -> tuple[Sequence[Tensor], QuantSpec]:
    """The parts with scales in the order of blocks, without the padding that tensor cores read."""
    if not spec.swizzled:
        return parts, spec
    data, scale, *rest = parts
    scale = unswizzle(scale, data.shape[-2], data.shape[-1] * spec.row.packed // spec.row.block[1])
    return [data, scale, *rest], replace(spec, swizzled=False)


def block_of(row: Format | None) -> tuple[int, int]:
    """The rows and columns of the blocks of which one is the worst."""
    return row.block if row is not None and 0 not in row.block else BLOCK


def measured(seen: Compared, scales: Tensor | None, groups: Sequence[str]) -> Tensor:
    """The vector [COLUMNS] of an operand that was quantized with such scales."""
    original, x, q, entries = seen.original, seen.x, seen.q, dict[str, Any]()
    entries["elements"], entries["amax"] = original.numel() - seen.padding, reference.amax(original)
    if "exponents" in groups:
        _count_exponents(original, entries)
    if "values" in groups:
        ok = finite(x) & finite(q)
        entries["zeros"], entries["nonfinite"] = (original == 0).sum() - seen.padding, (~finite(original)).sum()
        entries["underflow"], entries["overflow"] = underflow(x, q).sum(), overflow(x, q).sum()
        entries["signal"], entries["noise"] = energy(x, ok), energy(x - q, ok)
        entries["fourth"], entries["relative"] = fourth_moment(x, ok), relative_error(x, q, ok)
    if "codes" in groups and not seen.exact:
        _count_codes(seen, entries)
    if "scales" in groups:
        _measure_scales(scales, entries)
    if "blocks" in groups:
        _find_worst(x, q, seen.row, entries)
    return _vector(entries, original)


def _vector(entries: dict[str, Any], like: Tensor) -> Tensor:
    """The vector with what was found, numbers and tensors of one element, or of several under ``exponents``."""
    values = {**dict(zip(COLUMNS, NEUTRAL, strict=True)), **entries}
    counts = values.pop("exponents", None)
    names = COLUMNS if counts is None else COLUMNS[: -len(EXPONENTS)]
    numbers = [values[name] for name in names]
    cells = [
        n.double().reshape(1) if isinstance(n, Tensor) else torch.full((1,), n, dtype=torch.float64, device=like.device)
        for n in numbers
    ]
    return torch.cat([*cells, *([] if counts is None else [counts.double()])])


def compared(x: Tensor, parts: Sequence[Tensor], spec: QuantSpec) -> Compared:
    """An operand x, float32, beside the values that its parts stand for."""
    if spec.is_identity:
        return Compared(x, x, parts[0].float(), None, None, exact=True)
    row = format_of(spec)
    if row is None or row.element is None:
        q = custom.get(spec).dequantize_side(parts).float()
        return Compared(x, x, q.narrow(-1, 0, x.shape[-1]), _plain_codes(parts[0], q, x), None)
    q = custom.get(spec).dequantize_side(parts).float() if spec.key else reference.dequantize(parts, spec)
    code = elements(parts[0], row.element)
    if spec.rht:
        return Compared(x, reference.hadamard(padded(x, q), random_signs=spec.random_signs), q, code, row)
    q, code = (t.narrow(-1, 0, x.shape[-1]) for t in (q, code))
    return Compared(x, x, q, code, row)


def padded(x: Tensor, q: Tensor) -> Tensor:
    """x with zeros behind its last axis, as long as that of q."""
    return torch.nn.functional.pad(x, (0, q.shape[-1] - x.shape[-1]))


def format_of(spec: QuantSpec) -> Format | None:
    """The format of a spec, also of one in blocks that is registered as a quantizer; None for one of a user's own."""
    if not spec.key:
        return spec.row
    row = getattr(custom.get(spec), "row", None)
    return row if isinstance(row, Format) else None


def elements(data: Tensor, element: Element) -> Tensor:
    """The float32 values of stored elements, before they are multiplied by their scales."""
    if element.dtype == torch.float4_e2m1fn_x2 and data.dtype == torch.uint8:
        return reference.decode_e2m1(torch.stack((data & 15, data >> 4), -1).flatten(-2))
    return blocks.element_values(data, element)


def _plain_codes(data: Tensor, q: Tensor, x: Tensor) -> Tensor | None:
    """The payload of a user's quantizer, if there is a number of torch's in the place of each value."""
    if data.shape != q.shape or data.dtype not in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        return None
    return data.narrow(-1, 0, x.shape[-1])


def _count_codes(seen: Compared, entries: dict[str, Any]) -> None:
    """Counts what is saturated and subnormal; NaN where only a user's own quantizer knows."""
    of_codes = ends(seen)
    if seen.code is None or of_codes is None:
        entries["saturated"] = entries["subnormal"] = math.nan
        return
    code, (largest, normal) = seen.code.float(), of_codes
    entries["saturated"] = saturated(seen.x, seen.q, code, largest).sum()
    entries["subnormal"] = subnormal(code, normal).sum()


def ends(seen: Compared) -> tuple[float, float] | None:
    """The largest number of an operand's codes, and the smallest normal one, 0 for integers; None without codes."""
    if seen.code is None:
        return None
    element = None if seen.row is None else seen.row.element
    if (seen.code.dtype if element is None else element.dtype) == torch.int8:
        return (127.0 if element is None else element.max), 0.0
    if element is not None:
        return element.max, element.smallest_normal
    return torch.finfo(seen.code.dtype).max, torch.finfo(seen.code.dtype).smallest_normal


def factors(parts: Sequence[Tensor], spec: QuantSpec, row: Format | None) -> Tensor | None:
    """The factors of dequantization, one for each scale, as float32; None where a user's own quantizer has none."""
    if spec.is_identity or len(parts) < 2:
        return None
    scale = parts[1]
    if row is None:
        return scale.float() if scale.is_floating_point() else None
    if row.scale_dtype == torch.float8_e8m0fnu or (scale.dtype == torch.uint8 and row.element is not None):
        return reference.decode_e8m0(scale.view(torch.uint8))
    if len(parts) > 2 and row.element is not None:
        return scale.float() * parts[2] * (1 / (spec.e4m3_max * row.element.max))
    return scale.float()


def _measure_scales(scales: Tensor | None, entries: dict[str, Any]) -> None:
    """Counts and adds up the factors that are positive numbers, and finds the least and the largest."""
    if scales is None:
        return
    counted = (scales > 0) & finite(scales)
    entries["scales"], entries["scale_sum"] = counted.sum(), torch.where(counted, scales.double(), 0.0).sum()
    beside = torch.nn.functional.pad(torch.where(counted, scales, 0.0).flatten(), (0, 1))
    entries["scale_max"] = beside.amax()
    entries["minus_scale_min"] = torch.where(beside > 0, -beside, -math.inf).amax()


def _find_worst(x: Tensor, q: Tensor, row: Format | None, entries: dict[str, Any]) -> None:
    """Finds the block whose noise is the largest part of its signal, the first of several, and where it begins."""
    high, wide = block_of(row)
    ok, sums, rows = finite(x) & finite(q), [], x.shape[-2]
    down, across = (rows + high - 1) // high, (x.shape[-1] + wide - 1) // wide
    for part in (x, x - q):
        square = torch.where(ok, part, 0.0).double().square()
        square = torch.nn.functional.pad(square, (0, across * wide - x.shape[-1], 0, down * high - rows))
        square = torch.unflatten(square, -1, (across, wide)).sum(-1)
        sums.append(torch.unflatten(square, -2, (down, high)).sum(-2))
    signal, noise = sums
    ratio = torch.nn.functional.pad(torch.where(signal > 0, noise / signal, -1.0).flatten(), (0, 1), value=-1.0)
    place = ratio.argmax()
    line = torch.div(place, across, rounding_mode="floor")
    entries["worst"] = ratio.amax()
    entries["worst_row"] = torch.div(line, down, rounding_mode="floor") * rows + line % down * high
    entries["worst_column"] = place % across * wide


def _count_exponents(x: Tensor, entries: dict[str, Any]) -> None:
    """Counts the numbers that are not zero by their exponents."""
    counted = (x != 0) & finite(x)
    bins = torch.where(counted, exponent(x).clamp(EXPONENTS[0], EXPONENTS[-1]), EXPONENTS[-1] + 1).flatten()
    counts = []
    for first in EXPONENTS[::_AT_ONCE]:
        wanted = torch.arange(first, first + _AT_ONCE, dtype=torch.int32, device=x.device)
        counts.append((bins.unsqueeze(0) == wanted.unsqueeze(1)).sum(1))
    entries["exponents"] = torch.cat(counts)


def products(
    operands: Sequence[Tensor], quantized: Sequence[Sequence[Tensor]], specs: Sequence[QuantSpec], gemm: str
) -> Tensor:
    """The vector of a product a b^T of two operands and that of their quantized forms: its cosine and its error.

    cos = <Y, Y'> / (|Y| |Y'|) for Y = a b^T and Y' = a' b'^T, in float64, over every n-th row of each operand, so that
    there are at most `SAMPLE`: over all of it for operands of no more rows. The rounding of a GEMM's sums is no part.
    """
    values = [dequantized(parts, spec, x) for x, parts, spec in zip(operands, quantized, specs, strict=True)]
    exact, seen = ([sampled(x).double() for x in pair] for pair in (operands, values))
    y, z = (a @ b.mT for a, b in (exact, seen))
    entries = {"inner": (y * z).sum(), "exact": y.square().sum(), "product": z.square().sum()}
    return _vector(entries | {"products": 1, "product_error": product_error(y, z, gemm)}, operands[0])


def product_error(y: Tensor, z: Tensor, gemm: str) -> Tensor:
    """The mean over features, the columns of y, of |y - z|^2 / |y|^2: one that is small counts as much as others.

    What follows a feature may multiply it by anything: the next weight, or an optimizer that divides by its size. The
    rows of a ``wgrad`` are features too, and the larger of both means is its error.
    """
    by_feature = []
    for signal, noise in ((y.square(), (y - z).square()), (y.mT.square(), (y - z).mT.square())):
        of_signal, of_noise = (t.flatten(0, -2).sum(0) for t in (signal, noise))
        counted = of_signal > 0
        ratios = torch.where(counted, of_noise / torch.where(counted, of_signal, 1.0), 0.0)
        by_feature.append(ratios.sum() / counted.sum().clamp(min=1))
    return torch.maximum(*by_feature) if gemm == "wgrad" else by_feature[0]


def loss_change(grad: Tensor, x: Tensor, w: Tensor, parts: Sequence[Tensor], spec: QuantSpec, role: str) -> Tensor:
    """The vector of what the loss changes by if x or w of y = x w^T has the values of `parts`; grad is that of y.

    ``change`` is <grad, y' - y>, in first order. ``change_squares`` is n times the sum of the squares of that of single
    rows, of which there are n: half of it is the second order, of a loss that is a mean over rows, where the gradients
    of rows stand for its curvature (the Fisher information).
    """
    grad, x, w = grad.float(), x.float(), w.float()
    if role == "weight":
        rows = ((grad @ (dequantized(parts, spec, w) - w)) * x).double().sum(-1)
    else:
        rows = ((grad @ w) * (dequantized(parts, spec, x) - x)).double().sum(-1)
    entries = {"elements": rows.numel(), "change": rows.sum(), "change_squares": rows.square().sum() * rows.numel()}
    return _vector(entries, grad)


def dequantized(parts: Sequence[Tensor], spec: QuantSpec, x: Tensor) -> Tensor:
    """The values of an operand in the shape and basis of the unquantized one."""
    if spec.is_identity:
        return parts[0].float()
    if spec.key:
        q = custom.get(spec).dequantize_side(parts).float()
    else:
        q = reference.plain_basis(reference.dequantize(parts, spec), spec)
    return q.narrow(-1, 0, x.shape[-1])


def sampled(x: Tensor) -> Tensor:
    """Every n-th row of x [*, R, C], zeros behind the last of them: [*, SAMPLE, C], of which it gives the same."""
    if not statically_known_true(x.shape[-2] > 0):
        x = torch.nn.functional.pad(x, (0, 0, 0, 1))
    rows = x.shape[-2]
    if statically_known_true(rows % SAMPLE == 0):
        return x[..., :: rows // SAMPLE, :].clone(memory_format=torch.contiguous_format)
    apart = (rows + SAMPLE - 1) // SAMPLE
    places = torch.arange(SAMPLE, device=x.device) * apart
    chosen = x.index_select(-2, places.clamp(max=rows - 1))
    return torch.where((places < rows).unsqueeze(-1), chosen, 0.0)
