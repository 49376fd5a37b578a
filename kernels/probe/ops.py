"""The operators of probes: the statistics of one operand, of one product, and their sum over a step.

All give vectors of `fxquant.kernels.probe.reference.COLUMNS`, float64. Compiled graphs call them as they are, with the
tensors that lie in memory: traced, each would be a hundred operators to compile. On CUDA they are compiled apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.formats import AttentionSpec, OperandSpec, QuantSpec
from fxquant.kernels.operator import Facts, Kernel, Parts, Traits, operator
from fxquant.kernels.probe import attention, compiled, grouped, reference


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
def product_statistics(
    a: Tensor, b: Tensor, a_parts: Parts, b_parts: Parts, a_spec: str, b_spec: str, gemm: str
) -> Tensor:  # fmt: skip
    """`probe_product`, as lowered graphs call it."""
    return reference.products((a, b), (a_parts, b_parts), (QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)), gemm)


@operator(namespace="fxquant_kernels")
def loss_statistics(grad: Tensor, x: Tensor, w: Tensor, parts: Parts, spec: str, role: str) -> Tensor:
    """`probe_loss`, as lowered graphs call it."""
    return reference.loss_change(grad, x, w, parts, QuantSpec.parse(spec), role)


@operator(namespace="fxquant_kernels")
def group_statistics(
    x: Tensor, offs: Tensor | None, parts: Parts, spec: str, direction: str, groups: str
) -> Tensor:  # fmt: skip
    """`probe_groups`, as lowered graphs call it."""
    return grouped.statistics(x, offs, parts, QuantSpec.parse(spec), direction, groups.split("+"))


@operator(namespace="fxquant_kernels")
def heads_statistics(x: Tensor, parts: Parts, spec: str, heads: int, transposed: bool, groups: str) -> Tensor:
    """`probe_heads`, as lowered graphs call it."""
    return attention.statistics(x, parts, QuantSpec.parse(spec), heads, transposed, groups.split("+"))


@operator(namespace="fxquant_kernels")
def softmax_statistics(
    q: Parts, k: Parts, extras: Parts, scale: Tensor | None, spec: str, width: int, tried: str, groups: str
) -> Tensor:  # fmt: skip
    """`probe_softmax`, as lowered graphs call it."""
    candidate = OperandSpec.parse(tried) if tried else None
    return attention.softmax_statistics(
        q, k, extras, scale, AttentionSpec.parse(spec), width, candidate, groups.split("+")
    )


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
def _compiled_product(
    a: Tensor, b: Tensor, a_parts: Parts, b_parts: Parts, a_spec: str, b_spec: str, gemm: str
) -> Tensor:  # fmt: skip
    def run(a: Tensor, b: Tensor, *parts: Tensor) -> Tensor:
        return product_statistics.meaning(a, b, parts[: len(a_parts)], parts[len(a_parts) :], a_spec, b_spec, gemm)

    return compiled.call((a_spec, b_spec, len(a_parts), gemm == "wgrad"), run, a, b, *a_parts, *b_parts)


@loss_statistics.on("CUDA")
def _compiled_loss(grad: Tensor, x: Tensor, w: Tensor, parts: Parts, spec: str, role: str) -> Tensor:
    def run(grad: Tensor, x: Tensor, w: Tensor, *parts: Tensor) -> Tensor:
        return loss_statistics.meaning(grad, x, w, parts, spec, role)

    return compiled.call((spec, role, "loss"), run, grad, x, w, *parts)


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
def probe_product(
    a: Tensor, b: Tensor, a_parts: Parts, b_parts: Parts, a_spec: str, b_spec: str, gemm: str
) -> Tensor:  # fmt: skip
    """The vector [COLUMNS] of a product of two operands and of their quantized forms: its cosine, and its error."""
    return product_statistics.meaning(a, b, a_parts, b_parts, a_spec, b_spec, gemm)


@operator(reference=ProbeKernel.REFERENCE, traits=Traits(reads_values=3))
def probe_loss(grad: Tensor, x: Tensor, w: Tensor, parts: Parts, spec: str, role: str) -> Tensor:
    """The vector [COLUMNS] of what the loss changes by if one operand of x w^T is quantized; grad is its gradient."""
    return loss_statistics.meaning(grad, x, w, parts, spec, role)


@operator(reference=ProbeKernel.REFERENCE, traits=Traits(reads_values=1))
def probe_heads(x: Tensor, parts: Parts, spec: str, heads: int, transposed: bool, groups: str) -> Tensor:
    """`probe_operand` of q, k, v or the output's gradient, [*, H, S, D], and of what `quantize_heads` made of it."""
    return heads_statistics.meaning(x, parts, spec, heads, transposed, groups)


@operator(reference=ProbeKernel.REFERENCE)
def probe_softmax(
    q: Parts, k: Parts, extras: Parts, scale: Tensor | None, spec: str, width: int, tried: str, groups: str
) -> Tensor:  # fmt: skip
    """`probe_operand` of rows of the softmax of q k^T, quantized as `spec` says, or as `tried` does."""
    return softmax_statistics.meaning(q, k, extras, scale, spec, width, tried, groups)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty([len(reference.COLUMNS)], dtype=torch.float64)


def _fake_of_parts(q: Sequence[Tensor], *_: Any) -> Tensor:
    return _fake(q[0])


for measured in (
    probe_operand, probe_product, probe_groups, probe_loss, probe_heads, operand_statistics, product_statistics,
    group_statistics, loss_statistics, heads_statistics,
):  # fmt: skip
    measured.fake(_fake)
probe_operand.implementation(ProbeKernel.CALL, when=_beside)(operand_statistics)
probe_product.implementation(ProbeKernel.CALL, when=_beside)(product_statistics)
probe_groups.implementation(ProbeKernel.CALL, when=_beside)(group_statistics)
probe_loss.implementation(ProbeKernel.CALL, when=_beside)(loss_statistics)
probe_heads.implementation(ProbeKernel.CALL, when=_beside)(heads_statistics)
for rows in (probe_softmax, softmax_statistics):
    rows.fake(_fake_of_parts)
probe_softmax.implementation(ProbeKernel.CALL, when=_beside)(softmax_statistics)


@operator()
def probe_merge(total: Tensor, new: Tensor) -> Tensor:
    """The statistics [*, COLUMNS] of a step so far, and new ones, taken together."""
    return reference.merge(total, new)


@probe_merge.fake
def _fake_merge(total: Tensor, new: Tensor) -> Tensor:
    return torch.empty_like(total)
