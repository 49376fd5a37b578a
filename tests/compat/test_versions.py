"""Both sides of each branch on a version or on what a version has, whichever is installed."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from fxquant.compat import device, patch, patches, torch_version
from fxquant.compat.private import isolated


@pytest.mark.parametrize(
    ("version", "pair"), [("2.11.0", (2, 11)), ("2.15.0+cu132", (2, 15)), ("2.16.0a0+git1234", (2, 16))]
)
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, version: str, pair: tuple[int, int]) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_version() == pair


@pytest.mark.parametrize(("version", "changed"), [((2, 12), True), ((2, 13), False), ((2, 15), False)])
def test_a_defect_is_mended_until_torch_has_mended_it(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], changed: bool
) -> None:
    owner: Any = types.SimpleNamespace(function=lambda: "torch")
    monkeypatch.setattr(patch, "torch_version", lambda: version)
    monkeypatch.setattr(patch.importlib, "import_module", {"owner": owner}.__getitem__)
    change = patch.Patch(
        "owner", "function", defect="", upstream="", fixed_in=(2, 13), still_needed=lambda: True,
        change=lambda function: f"{function()}, changed", acts=lambda: True,
    )  # fmt: skip
    patch.apply(change)
    assert owner.function() == ("torch, changed" if changed else "torch")


@pytest.mark.parametrize("version", [(2, 12), (2, 13)])
def test_torch_is_told_what_a_kernel_writes(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    if torch_version() < (2, 13) <= version:
        pytest.skip("torch has no such answer yet")
    monkeypatch.setattr(patches, "torch_version", lambda: version)
    kernel, tensor = object(), torch.zeros(1)
    monkeypatch.setitem(patches._written, kernel, lambda arguments: [*arguments][1:2])
    answer = patches.WRITTEN_ARGUMENTS.change(None, kernel, {"read": tensor, "written": tensor, "size": 3})
    if version < (2, 13):
        assert answer == ["written"]
    else:
        assert [access.name for access in answer.read_writes.writes] == ["written"]
        assert [access.name for access in answer.read_writes.reads] == ["read", "written"]


@pytest.mark.parametrize("has", [True, False])
def test_recompilations_count_for_one_model_where_they_can(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    def newer(model: Any, *, isolate_recompiles: bool = False) -> None: ...

    def older(model: Any) -> None: ...

    monkeypatch.setattr(torch, "compile", newer if has else older)
    assert isolated() == ({"isolate_recompiles": True} if has else {})


@pytest.mark.parametrize(("version", "knows"), [("3.6.0", True), ("3.8.0", False), ("3.9.0", False), ("", False)])
def test_gluon_is_that_of_one_version(monkeypatch: pytest.MonkeyPatch, version: str, knows: bool) -> None:
    monkeypatch.setattr(device, "triton_version", lambda: version)
    assert device.knows_gluon() is knows
