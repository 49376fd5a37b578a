"""The table of forms: functions by their names, and keywords that forms have other names for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Calls, Rewrite, Shape, check, randn

from fxquant.passes.find.forms import FORMS, FUNCTIONS


def test_every_function_has_a_form_of_its_name() -> None:
    assert {function.__name__ for function in FUNCTIONS} <= FORMS.keys()


def test_functions_of_torch_with_a_form_are_captured() -> None:
    """One that is missing from `FUNCTIONS` would stay opaque in spite of its form."""
    found = {vars(home)[name] for home in (torch, F, torch.linalg) for name in FORMS if name in vars(home)}
    assert len(found) > 20 and found <= FUNCTIONS


KEYWORDS: dict[str, tuple[Callable[..., Any], list[Shape]]] = {
    "mm": (lambda x, w: torch.mm(x, mat2=w), [(5, 24), (24, 40)]),
    "bmm": (lambda x, w: x.bmm(mat2=w), [(3, 5, 24), (3, 24, 40)]),
    "mv": (lambda w, x: torch.mv(w, vec=x), [(5, 24), (24,)]),
    "dot": (lambda x, y: x.dot(tensor=y), [(24,), (24,)]),
    "addbmm": (lambda b, x, w: torch.addbmm(b, batch1=x, batch2=w), [(5, 40), (3, 5, 24), (3, 24, 40)]),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_are_those_of_the_operator(name: str) -> None:
    function, shapes = KEYWORDS[name]
    (match,) = check(Calls(function), [randn(*shape) for shape in shapes], Rewrite()).found
    assert (match.form, match.emit is None) == (name, name in ("mv", "dot"))


def test_products_that_write_into_a_given_tensor_are_told_and_left() -> None:
    x, w, b, stack = torch.randn(5, 24), torch.randn(24, 40), torch.randn(5, 40), torch.randn(3, 24, 24)

    def function() -> list[torch.Tensor]:
        return [
            torch.addmm(b, x, w, out=torch.empty(5, 40)),
            torch.addmm(b, x, w, alpha=2, out=torch.empty(5, 40)),
            torch.baddbmm(stack, stack, stack, out=torch.empty(3, 24, 24)),
            torch.addmv(b[:, 0], x, w[:, 0], out=torch.empty(5)),
        ]

    backend = Rewrite()
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(function, backend=backend)(), function())
    assert len(backend.found) == 4 and all("'out'" in str(match.skip) for match in backend.found)
