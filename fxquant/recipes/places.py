"""The GEMMs of a format or a recipe on each generation of cards and the CPU, by the conditions that lowering asks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxquant.formats import Format, QuantSpec
from fxquant.kernels.linear.choice import GemmFacts, GemmKernel
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.recipes.base import Recipe, of_operands
from fxquant.roles import GEMM_OPERANDS

PLACES: dict[str, tuple[int, int]] = {
    "8.0": (8, 0), "8.9": (8, 9), "9.0": (9, 0), "10.0": (10, 0), "12.0": (12, 0), "CPU": (0, 0),
}  # fmt: skip
"""Compute capabilities of cards by name: A100, Ada, Hopper, B200, RTX Blackwell; and the CPU."""

_SIZE = 4096
_EMULATED = (GemmKernel.EMULATED, GemmKernel.ONE_SIDED, GemmKernel.REFERENCE)


def why_emulated(a: QuantSpec, b: QuantSpec, capability: tuple[int, int]) -> str:
    """Returns why a large GEMM of two operands does not run in their formats; empty if it does."""
    if a.is_identity and b.is_identity:
        return ""
    if "custom" in (a.row.family, b.row.family):
        return "the quantizer's own code"
    one_sided = a.is_identity != b.is_identity
    chosen = scaled_mm.choose(
        GemmFacts(
            a=a, b=b, m=_SIZE, n=_SIZE, k=_SIZE, most_rows=_SIZE, capability=capability,
            high_precision=torch.bfloat16 if one_sided else None,
        )
    )  # fmt: skip
    if chosen.kernel not in _EMULATED:
        return ""
    return _in_short(chosen.reason) if capability > (0, 0) else "a float32 GEMM"


def _in_short(reason: str) -> str:
    return reason.removeprefix("emulated: ").removesuffix(" on this device")


def _of_format(row: Format, capability: tuple[int, int]) -> str:
    """Why no GEMM takes an operand in this format, with an e4m3 partner that it goes with."""
    partner = row.name.replace("e5m2", "e4m3")
    if row.family == "block" and row.block[0] > 1:
        pair = partner.replace("128x128", "1x128"), row.name
    else:
        pair = row.name, partner
    a, b = (QuantSpec(format=name) for name in pair)
    return why_emulated(a, b, capability)


def format_columns(row: Format) -> dict[str, str]:
    """A column for each place, ``native`` or ``emulated``, and one with the reasons."""
    whys = {place: _of_format(row, capability) for place, capability in PLACES.items()}
    return {**{place: "emulated" if why else "native" for place, why in whys.items()}, "because": _by_reason(whys)}


def runs_as(recipe: Recipe, capability: tuple[int, int]) -> str:
    """``native`` if a device has instructions for all GEMMs of a recipe, ``emulated`` for none, else ``in part``.

    Those whose operands are both in high precision do not count.
    """
    whys = _whys(recipe, capability).values()
    return "native" if not any(whys) else "emulated" if all(whys) else "in part"


def recipe_columns(recipe: Recipe) -> dict[str, str]:
    """A column for each place as `runs_as` has it, and one with the reasons."""
    whys: dict[str, str] = {}
    for place, capability in PLACES.items():
        gemms = _whys(recipe, capability)
        every = set(gemms.values())
        whys[place] = _by_reason(gemms) if len(every) > 1 else "".join(every)
    ways = {place: runs_as(recipe, capability) for place, capability in PLACES.items()}
    return {**ways, "because": _by_reason(whys)}


def _whys(recipe: Recipe, capability: tuple[int, int]) -> dict[str, str]:
    """Why each GEMM with a quantized operand does not run in its formats."""
    quantizers = of_operands(recipe)
    whys = {}
    for gemm, sides in GEMM_OPERANDS.items():
        a, b = (quantizers[operand].spec(side) for operand, side in sides)
        if not (a.is_identity and b.is_identity):
            whys[str(gemm)] = why_emulated(a, b, capability)
    return whys


def _by_reason(whys: Mapping[str, str]) -> str:
    """Places with one reason together: ``8.0, 8.9: no such scales; CPU: a float32 GEMM``."""
    reasons = dict.fromkeys(filter(None, whys.values()))
    texts = [f"{', '.join(place for place, why in whys.items() if why == reason)}: {reason}" for reason in reasons]
    return "; ".join(texts)
