"""The operands of linears that an attention beside them has quantized already are marked as shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from rewritten import rewrite
from torch import Tensor

from fxquant import CustomRecipe, Float8CurrentScalingQuantizer, Float8HeadQuantizer, IdentityQuantizer, QuantizerRole
from fxquant.decisions import Decision
from fxquant.passes.captured import Captured, predict_reuse
from fxquant.passes.settings import Settings

E4, E5 = (Float8CurrentScalingQuantizer(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
SIZES = ((2, 24, 64), *((64, 64),) * 4)


def qfactory(role: QuantizerRole) -> Any:
    """Linears and results of attention in e4m3, gradients in e5m2."""
    if role.module_type == "dpa":
        return Float8HeadQuantizer() if role.tensor_type in ("qkv", "s") else IdentityQuantizer()
    return E5 if role.tensor_type == "grad_output" or role.name.endswith("dpa_grad_input") else E4


def attention(x: Tensor, *weights: Tensor) -> Tensor:
    q, k, v = (F.linear(x, w).unflatten(-1, (4, 16)).transpose(1, 2) for w in weights[:3])
    return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), weights[3])


def queries_are_read_twice(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (F.linear(x, w).unflatten(-1, (4, 16)).transpose(1, 2) for w in weights[:3])
    return F.scaled_dot_product_attention(q, k, v), q


def linears_alone(x: Tensor, *weights: Tensor) -> Tensor:
    return F.linear(F.linear(x, weights[0]).relu(), weights[1])


def facts(run: Callable[..., Any]) -> Captured:
    torch.compiler.reset()
    return rewrite(CustomRecipe(qfactory=qfactory), run, *(torch.randn(size, requires_grad=True) for size in SIZES))


def marked(decisions: list[Decision]) -> str:
    lines = [f"{d.site} {d.role.tensor_type} {d.direction.value}: {d.detail}" for d in decisions if d.shared]
    return "\n".join(sorted(lines))


def test_what_the_linears_around_an_attention_share() -> None:
    assert_expected_inline(marked([*facts(attention).decisions]), """\
0 grad_output columnwise: as attention <model> quantized its gradient, transposed
0 grad_output rowwise: as attention <model> quantized its gradient
1 grad_output columnwise: as attention <model> quantized its gradient, transposed
1 grad_output rowwise: as attention <model> quantized its gradient
2 grad_output columnwise: as attention <model> quantized its gradient, transposed
2 grad_output rowwise: as attention <model> quantized its gradient
5 input columnwise: as attention <model> quantized its output, transposed
5 input rowwise: as attention <model> quantized its output""")  # fmt: skip


def test_a_gradient_with_more_than_one_part_is_quantized_by_its_linear() -> None:
    assert_expected_inline(marked([*facts(queries_are_read_twice).decisions]), """\
1 grad_output columnwise: as attention <model> quantized its gradient, transposed
1 grad_output rowwise: as attention <model> quantized its gradient
2 grad_output columnwise: as attention <model> quantized its gradient, transposed
2 grad_output rowwise: as attention <model> quantized its gradient""")  # fmt: skip


@pytest.mark.parametrize("run", [attention, linears_alone])
def test_a_second_time_changes_nothing(run: Callable[..., Any]) -> None:
    """And nothing is changed where there is no attention."""
    known = facts(run)
    assert predict_reuse(known, Settings()) == known
    assert any(d.shared for d in known.decisions) is (run is attention)
