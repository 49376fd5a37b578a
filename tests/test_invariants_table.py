"""Every invariant of TransformerEngine is held by a test, or says why it is not."""

from __future__ import annotations

import invariants
import pytest

HELD = invariants.tests()


def test_all_numbers_are_there() -> None:
    assert list(invariants.INVARIANTS) == list(range(1, 67))
    assert set(HELD) <= set(invariants.INVARIANTS), "a docstring names an invariant that there is not"


@pytest.mark.parametrize("number", invariants.INVARIANTS)
def test_an_invariant_is_tested_or_says_why_not(number: int) -> None:
    untested = invariants.INVARIANTS[number].untested
    if number in HELD:
        assert not untested or untested.startswith("Partly: "), "there are tests by now: drop the reason"
    else:
        assert untested.startswith(("No meaning: ", "Waits for ")), "neither a test nor a reason"
