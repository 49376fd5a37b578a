"""Weights for each entry of a batch, in a stack or gathered from one."""

from __future__ import annotations

import pytest
import torch
from rewriting import Form, check_form

from fxquant.decisions import SkipReason

FORMS = {
    "experts bmm": Form(torch.bmm, [(3, 5, 24)], [(3, 24, 40)], "grouped_linear", [((3,), 5, 24, 40)]),
    "experts einsum": Form(
        lambda x, w: torch.einsum("eti,eoi->teo", x, w), [(3, 5, 24)], [(3, 40, 24)], "grouped_linear",
        [((3,), 5, 24, 40)],
    ),
    "experts baddbmm": Form(
        torch.baddbmm, [(3, 5, 40), (3, 5, 24)], [(3, 24, 40)], "grouped_linear", [((3,), 5, 24, 40)]
    ),
    "gathered by row": Form(
        lambda x, w: torch.bmm(w[torch.tensor([2, 0])], x), [(2, 24, 3)], [(3, 40, 24)], "grouped_linear", [(6, 24, 40)]
    ),
    "gathered": Form(
        lambda x, w: torch.einsum("bk,bcnk->bcn", x, w[torch.tensor([[2, 0], [1, 2]])].narrow(1, 0, 2)),
        [(2, 24)], [(3, 40, 24)], "grouped_linear", [((2,), 1, 24, 80)], SkipReason.GATHERED_WEIGHT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, dynamic: bool) -> None:
    check_form(name, FORMS[name], dynamic)
