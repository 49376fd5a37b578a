from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import captured, hybrid, per_role
from torch import nn

import fxquant
from fxquant import (
    CustomRecipe,
    Decision,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    Recipe,
    RecipeError,
    SkipReason,
    recipes,
)
from fxquant.passes.find.facts import decisions_of
from fxquant.passes.find.walk import find_matmuls
from fxquant.passes.plan.layers import name_layers
from fxquant.passes.plan.resolve import gemms, resolve
from fxquant.roles import GEMM_OPERANDS, Gemm

MX, NV, ID = MXFP8Quantizer(), NVFP4Quantizer(), IdentityQuantizer()
ROWS, E5M2 = fxquant.Float8RowwiseQuantizer(), torch.float8_e5m2


def resolved(recipe: Recipe | str, run: Callable, *args, **options) -> list[Decision]:
    (gm,) = captured(run, *args)
    matches = name_layers(find_matmuls(gm), {})
    return decisions_of(resolve(matches, recipes.resolve(recipe), **options)[0])


class Model(nn.Module):
    def __init__(self, k: int = 32, n: int = 48) -> None:
        super().__init__()
        self.fc = nn.Linear(k, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def x(k: int = 32, **options) -> torch.Tensor:
    return torch.randn(64, k, requires_grad=True, **options)


def test_every_operand_of_every_gemm_gets_one_decision() -> None:
    found = resolved("mxfp8", Model(), x())
    expected = [(g, op, d) for g, operands in GEMM_OPERANDS.items() for op, d in operands]
    assert [(d.gemm, d.role.tensor_type, d.direction) for d in found] == expected
    assert {(d.role.tensor_type, d.shape) for d in found} == {
        ("input", (64, 32)),
        ("weight", (48, 32)),
        ("grad_output", (64, 48)),
    }
    assert {d.flops for d in found} == {2 * 64 * 32 * 48}
    assert all(d.quantizer == MX and d.layer == "fc" for d in found)


@pytest.mark.parametrize(
    ("needs_grad", "expected"),
    [
        ((True, True), ["fprop", "dgrad", "wgrad"]),
        ((True, False), ["fprop", "dgrad"]),
        ((False, True), ["fprop", "wgrad"]),
        ((False, False), ["fprop"]),
    ],
)
def test_only_the_gemms_of_wanted_gradients_count(needs_grad, expected) -> None:
    assert [str(gemm) for gemm in gemms(needs_grad)] == expected


def test_sites_are_numbered_on_from_the_last_graph() -> None:
    assert {d.site for d in resolved("mxfp8", Model(), x(), first_site=7)} == {7}


TILES, LINES = fxquant.Float8BlockQuantizer(), fxquant.Float8BlockQuantizer(block_scaling_dim=1)
MISMATCHES = {
    "fprop": (
        per_role(input=TILES, weight=hybrid(TILES, LINES), grad_output=LINES),
        "input.rowwise Float8BlockQuantizer()",
        "weight.rowwise Float8BlockQuantizer()",
    ),
    "dgrad": (
        per_role(input=LINES, weight=hybrid(LINES, TILES), grad_output=hybrid(TILES, LINES)),
        "grad_output.rowwise Float8BlockQuantizer()",
        "weight.columnwise Float8BlockQuantizer()",
    ),
    "wgrad": (
        per_role(input=hybrid(LINES, TILES), weight=LINES, grad_output=hybrid(LINES, TILES)),
        "grad_output.columnwise Float8BlockQuantizer()",
        "input.columnwise Float8BlockQuantizer()",
    ),
}


@pytest.mark.parametrize("gemm", MISMATCHES)
def test_a_pair_that_cannot_multiply_names_layer_gemm_and_both_quantizers(gemm: str) -> None:
    """Invariant 26, but here, not in the backward."""
    recipe, first, second = MISMATCHES[gemm]
    with pytest.raises(RecipeError) as error:
        resolved(recipe, Model(), x())
    for part in ("layer 'fc'", f"{gemm} cannot multiply", first, second, "HybridQuantizer"):
        assert part in str(error.value)


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_a_pair_of_a_gemm_that_never_runs_is_not_checked(gemm: str) -> None:
    recipe = MISMATCHES[gemm][0]
    with torch.no_grad():
        assert len(resolved(recipe, Model(), x())) == 2


@pytest.mark.parametrize(
    ("quantizers", "problem"),
    [
        (
            dict.fromkeys(("input", "weight", "grad_output"), fxquant.Float8CurrentScalingQuantizer(E5M2)),
            "e5m2 by e5m2",
        ),
        (dict.fromkeys(("input", "weight", "grad_output"), fxquant.Float8BlockQuantizer()), "128x128"),
        (
            {"input": NVFP4Quantizer(with_rht=True, with_post_rht_amax=True), "weight": NV, "grad_output": NV},
            "Hadamard",
        ),
    ],
    ids=str,
)
def test_other_pairs_that_cannot_multiply(quantizers: dict[str, Quantizer], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        resolved(per_role(**quantizers), Model(), x())


@pytest.mark.parametrize(
    "quantizers",
    [
        {"input": hybrid(MX, ID), "weight": hybrid(MX, ID), "grad_output": ID},
        {"input": hybrid(ID, MX), "weight": hybrid(ID, MX), "grad_output": MX},
        {"input": hybrid(MX, ID), "weight": MX, "grad_output": hybrid(MX, ID)},
        {"input": ROWS, "weight": fxquant.Float8CurrentScalingQuantizer(), "grad_output": ROWS},
        {"input": MX, "weight": MXFP8Quantizer(with_2d_quantization=True), "grad_output": MXFP8Quantizer(E5M2)},
    ],
    ids=str,
)
def test_mixes_that_multiply(quantizers: dict[str, Quantizer]) -> None:
    """The hybrid and identity mixes that TransformerEngine permits."""
    found = resolved(per_role(**quantizers), Model(), x())
    for d in found:
        side = quantizers[d.role.tensor_type].side(d.direction)
        assert d.quantizer == (None if side == ID else side)
        assert (d.skip_reason is SkipReason.HIGH_PRECISION) == (side == ID)


@pytest.mark.parametrize(
    ("make", "reason", "detail"),
    [
        (lambda: (Model(8, 48), x(8)), "TOO_SMALL", "K=8"),
        (lambda: (Model(32, 15), x()), "TOO_SMALL", "N=15"),
        (lambda: (Model().double(), x(dtype=torch.float64)), "DTYPE", "float64"),
        (lambda: (lambda a: a @ a, torch.ones(32, 32, dtype=torch.int64)), "DTYPE", "int64"),
        (lambda: (lambda a: a @ a, torch.randn(32, 32, dtype=torch.complex64)), "DTYPE", "complex64"),
    ],
)
def test_what_cannot_be_quantized_says_why(make, reason: str, detail: str) -> None:
    model, value = make()
    found = resolved("mxfp8", model, value)
    assert found and {str(d.skip_reason) for d in found} == {reason}
    assert all(detail in d.detail for d in found)


def test_float64_is_quantized_when_asked() -> None:
    found = resolved("mxfp8", Model().double(), x(dtype=torch.float64), allow_float64=True)
    assert all(d.quantizer == MX for d in found)


def test_none_from_a_factory_names_the_role() -> None:
    """Invariant 11."""
    with pytest.raises(RecipeError, match=r"role fc \(linear, input\)"):
        resolved(CustomRecipe(qfactory=lambda role: None), Model(), x())


def test_resolving_twice_changes_nothing() -> None:
    (gm,) = captured(Model(), x())
    once, roles = resolve(name_layers(find_matmuls(gm), {}), recipes.get("mxfp8"))
    assert resolve(once, recipes.get("mxfp8")) == (once, roles)
    assert [len(match.resolved) for match in once] == [1]


def test_dynamic_sizes_are_shown_as_symbols() -> None:
    value = x()
    torch._dynamo.mark_dynamic(value, 0)
    found = resolved("mxfp8", Model(), value)
    rows = {d.shape[0] for d in found if d.role.tensor_type != "weight"}
    assert len(rows) == 1 and isinstance(rows.pop(), str)
    assert {d.flops for d in found} == {2 * 64 * 32 * 48}, "counted at the example's size"


def test_each_gemm_is_one_of_three() -> None:
    assert [str(g) for g in Gemm] == ["fprop", "dgrad", "wgrad"]
