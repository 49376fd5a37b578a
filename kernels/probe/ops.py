"""The operators of probes: the statistics of one operand, of one product, and their sum over a step.

All give vectors of `fxquant.kernels.probe.reference.COLUMNS`, float64. Compiled graphs call them as they are, with the
tensors that lie in memory: traced, each would be a hundred operators to compile. On CUDA they are compiled apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.formats import QuantSpec
from fxquant.kernels.operator import Facts, Kernel, Parts, Traits, operator
from fxquant.kernels.probe import compiled, grouped, reference


class ProbeKernel(Kernel):
    """The kernels that statistics are."""

    CALL = "torch's operators, one by one"
    REFERENCE = "the reference"


def _beside(facts: Facts) -> str:
    """Returns why a graph does not call code of fxquant."""
    return "" if facts.launches else "not beside fxquant"


@operator(namespace="fxquant_kernels")
def operand_statistics(x: Tensor, parts: Parts, spec: str, groups: str) -> Tensor:
    """`probe_operand`, as lowered graphs call it."""
    return reference.statistics(x, parts, QuantSpec.parse(spec), groups.split("+"))


@operator(namespace="fxquant_kernels")
def product_statistics(a: Tensor, b: Tensor, a_parts: Parts, b_parts: Parts, a_spec: str, b_spec: str) -> Tensor:
    """`probe_product`, as lowered graphs call it."""
    return reference.products((a, b), (a_parts, b_parts), (QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)))


@operator(namespace="fxquant_kernels")
def group_statistics(
    x: Tensor, offs: Tensor | None, parts: Parts, spec: str, direction: str, groups: str
) -> Tensor:  # fmt: skip
    """`probe_groups`, as lowered graphs call it."""
    return grouped.statistics(x, offs, parts, QuantSpec.parse(spec), direction, groups.split("+"))


@group_statistics.on("CUDA")
def _compiled_groups(
    x: Tensor, offs: Tensor | None, parts: Parts, spec: str, direction: str, groups: str
) -> Tensor:  # fmt: skip
    def run(x: Tensor, *more: Tensor) -> Tensor:
        ends, parts = (None, more) if offs is None else (more[0], more[1:])
        return group_statistics.meaning(x, ends, parts, spec, direction, groups)

    taken = [] if offs is None else [offs]
    return compiled.call((spec, direction, groups, offs is None), run, x, *taken, *parts)


@operand_statistics.on("CUDA")
def _compiled_operand(x: Tensor, parts: Parts, spec: str, groups: str) -> Tensor:
    def run(x: Tensor, *parts: Tensor) -> Tensor:
        return operand_statistics.meaning(x, parts, spec, groups)

    return compiled.call((spec, groups), run, x, *parts)


@product_statistics.on("CUDA")
def _compiled_product(a: Tensor, b: Tensor, a_parts: Parts, b_parts: Parts, a_spec: str, b_spec: str) -> Tensor:
    def run(a: Tensor, b: Tensor, *parts: Tensor) -> Tensor:
        return product_statistics.meaning(a, b, parts[: len(a_parts)], parts[len(a_parts) :], a_spec, b_spec)

    return compiled.call((a_spec, b_spec, len(a_parts)), run, a, b, *a_parts, *b_parts)


@operator(reference=ProbeKernel.REFERENCE, traits=Traits(reads_values=1))
def probe_operand(x: Tensor, parts: Parts, spec: str, groups: str) -> Tensor:
    """The statistics of an operand x [*, R, C], its contracted axis last, and of its quantized form: [COLUMNS].

    `groups` names those of `reference.GROUPS` that are wanted, joined by ``+``.
    """
    return operand_statistics.meaning(x, parts, spec, groups)


@operator(reference=ProbeKernel.REFERENCE, traits=Traits(reads_values=1))
def probe_groups(
    x: Tensor, offs: Tensor | None, parts: Parts, spec: str, direction: str, groups: str
) -> Tensor:  # fmt: skip
    """`probe_operand` of an operand in groups, [M, C] whose groups of rows end at `offs`, or [G, R, C]: [COLUMNS]."""
    return group_statistics.meaning(x, offs, parts, spec, direction, groups)


@operator(reference=ProbeKernel.REFERENCE, traits=Traits(reads_values=2))
def probe_product(a: Tensor, b: Tensor, a_parts: Parts, b_parts: Parts, a_spec: str, b_spec: str) -> Tensor:
    """The vector [COLUMNS] of a product of two operands and of their quantized forms, which has its cosine."""
    return product_statistics.meaning(a, b, a_parts, b_parts, a_spec, b_spec)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty([len(reference.COLUMNS)], dtype=torch.float64)


for measured in (
    probe_operand, probe_product, probe_groups, operand_statistics, product_statistics, group_statistics,
):  # fmt: skip
    measured.fake(_fake)
probe_operand.implementation(ProbeKernel.CALL, when=_beside)(operand_statistics)
probe_product.implementation(ProbeKernel.CALL, when=_beside)(product_statistics)
probe_groups.implementation(ProbeKernel.CALL, when=_beside)(group_statistics)


@operator()
def probe_merge(total: Tensor, new: Tensor) -> Tensor:
    """The statistics [*, COLUMNS] of a step so far, and new ones, taken together."""
    return reference.merge(total, new)


@probe_merge.fake
def _fake_merge(total: Tensor, new: Tensor) -> Tensor:
    return torch.empty_like(total)
