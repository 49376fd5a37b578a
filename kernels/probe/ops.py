"""The operators of probes: the statistics of one operand, of one product, and their sum over a step.

All give vectors of `fxquant.kernels.probe.reference.COLUMNS`, float64. Compiled graphs call them as they are, with the
tensors that lie in memory: traced, each would be a hundred operators to compile. On CUDA they launch kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.formats import AttentionSpec, OperandSpec, QuantSpec
from fxquant.kernels.operator import Facts, Kernel, Parts, Traits, operator
from fxquant.kernels.probe import attention, grouped, reference


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
def sampled_rows(x: Tensor) -> Tensor:
    """`probe_rows`, as lowered graphs call it."""
    return reference.sampled(x)


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


@operator(namespace="fxquant_kernels")
def turned_statistics(x: Tensor, vector: Tensor, parts: Parts, spec: str) -> Tensor:
    """`probe_turned`, as lowered graphs call it."""
    return reference.turned(vector, x, parts, QuantSpec.parse(spec))


@operator(namespace="fxquant_kernels")
def merged_statistics(total: Tensor, new: Parts) -> Tensor:
    """`probe_merge`, as lowered graphs call it."""
    return reference.merge(total, torch.stack([*new]))


@operand_statistics.on("CUDA")
def _launched_operand(x: Tensor, parts: Parts, spec: str, groups: str) -> Tensor:
    from fxquant.kernels.probe import triton_launch

    return triton_launch.statistics(x, parts, QuantSpec.parse(spec), groups.split("+"))


@turned_statistics.on("CUDA")
def _launched_turned(x: Tensor, vector: Tensor, parts: Parts, spec: str) -> Tensor:
    from fxquant.kernels.probe import triton_launch

    return reference.turned(vector, x, parts, QuantSpec.parse(spec), triton_launch.statistics)


@product_statistics.on("CUDA")
def _launched_product(
    a: Tensor, b: Tensor, a_parts: Parts, b_parts: Parts, a_spec: str, b_spec: str, gemm: str
) -> Tensor:  # fmt: skip
    from fxquant.kernels.probe import triton_launch

    return triton_launch.products((a, b), (a_parts, b_parts), (QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)), gemm)


@merged_statistics.on("CUDA")
def _launched_merge(total: Tensor, new: Parts) -> Tensor:
    from fxquant.kernels.probe import triton_merge

    return triton_merge.merge(total, torch.stack([*new]))


@operator(reference=ProbeKernel.REFERENCE, traits=Traits(reads_values=1))
def probe_operand(x: Tensor, parts: Parts, spec: str, groups: str) -> Tensor:
    """The statistics of an operand x [*, R, C], its contracted axis last, and of its quantized form: [COLUMNS].

    `groups` names those of `reference.GROUPS` that are wanted, joined by ``+``.
    """
    return operand_statistics.meaning(x, parts, spec, groups)


@operator(reference=ProbeKernel.REFERENCE, traits=Traits(reads_values=1))
def probe_turned(x: Tensor, vector: Tensor, parts: Parts, spec: str) -> Tensor:
    """`probe_operand` of one direction of an operand whose other one has the same values, and this `vector`.

    Both have one scale, that of the tensor: only the blocks of which one is the worst are others.
    """
    return turned_statistics.meaning(x, vector, parts, spec)


@operator(reference=ProbeKernel.REFERENCE, traits=Traits(reads_values=1))
def probe_groups(
    x: Tensor, offs: Tensor | None, parts: Parts, spec: str, direction: str, groups: str
) -> Tensor:  # fmt: skip
    """`probe_operand` of an operand in groups, [M, C] whose groups of rows end at `offs`, or [G, R, C]: [COLUMNS]."""
    return group_statistics.meaning(x, offs, parts, spec, direction, groups)


@operator(reference=ProbeKernel.REFERENCE)
def probe_rows(x: Tensor) -> Tensor:
    """The rows of an operand that `probe_product` reads, [*, SAMPLE, C]: a backward has them saved, and not x."""
    return sampled_rows.meaning(x)


@operator(reference=ProbeKernel.REFERENCE, traits=Traits(reads_values=2))
def probe_product(
    a: Tensor, b: Tensor, a_parts: Parts, b_parts: Parts, a_spec: str, b_spec: str, gemm: str
) -> Tensor:  # fmt: skip
    """The vector [COLUMNS] of a product of two operands and of their quantized forms: its cosine, and its error.

    Of a and b, `probe_rows` are enough.
    """
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
    probe_operand, probe_turned, probe_product, probe_groups, probe_loss, probe_heads, operand_statistics,
    turned_statistics, product_statistics, group_statistics, loss_statistics, heads_statistics,
):  # fmt: skip
    measured.fake(_fake)
probe_operand.implementation(ProbeKernel.CALL, when=_beside)(operand_statistics)
probe_turned.implementation(ProbeKernel.CALL, when=_beside)(turned_statistics)
probe_product.implementation(ProbeKernel.CALL, when=_beside)(product_statistics)
probe_groups.implementation(ProbeKernel.CALL, when=_beside)(group_statistics)
probe_loss.implementation(ProbeKernel.CALL, when=_beside)(loss_statistics)
probe_heads.implementation(ProbeKernel.CALL, when=_beside)(heads_statistics)
for rows in (probe_softmax, softmax_statistics):
    rows.fake(_fake_of_parts)
probe_softmax.implementation(ProbeKernel.CALL, when=_beside)(softmax_statistics)


for picked in (probe_rows, sampled_rows):
    picked.fake(lambda x: x.new_empty([*x.shape[:-2], reference.SAMPLE, x.shape[-1]]))
probe_rows.implementation(ProbeKernel.CALL, when=_beside)(sampled_rows)


@operator(reference=ProbeKernel.REFERENCE)
def probe_merge(total: Tensor, new: Parts) -> Tensor:
    """The statistics [*, COLUMNS] of a step so far, and new ones, a vector for each row, taken together."""
    return merged_statistics.meaning(total, new)


for merged in (probe_merge, merged_statistics):
    merged.fake(lambda total, new: torch.empty_like(total))
probe_merge.implementation(ProbeKernel.CALL, when=_beside)(merged_statistics)
