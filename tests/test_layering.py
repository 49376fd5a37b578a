"""Imports run one way, and torch's private modules have one door."""

from __future__ import annotations

import ast
import fnmatch
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import FILES, imported, nodes
from torch import fx, nn

from fxquant import compat

OUTSIDE_COMPAT = sorted(m for m in FILES if not m.startswith("fxquant.compat"))
LAYERS = (
    ("errors", "checks", "spellings", "files"), ("formats", "roles"), ("compat",), ("kernels",), ("quantizers",),
    ("recipes", "factories"), ("decisions", "snapshots", "state", "calibration", "probes"), ("weights",), ("cost",),
    ("passes",), ("report",), ("backend",), ("integrations",), ("export",), ("tools",), ("bench",), ("__main__",),
)  # fmt: skip
"""The parts of fxquant, each of which is imported by those behind it."""


def layer(module: str) -> int | None:
    """Returns the place of a module in the chain; None for the package itself, which offers names of all parts."""
    parts = module.split(".")
    if parts[0] != "fxquant" or len(parts) == 1:
        return None
    return next(i for i, names in enumerate(LAYERS) if parts[1] in names)


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_run_one_way(module: str) -> None:
    own = layer(module)
    for target, now in imported(FILES[module]):
        if own is not None and now and (other := layer(target)) is not None:
            assert other <= own, f"{module} imports {target}"


WITH_TRITON = ("triton*", "amax", "codes", "gluon", "gluon_backward", "gluon_blocks", "gluon_ring", "cuda")
"""The names of the files of kernels that need Triton when they are imported."""


def needs_triton(module: str) -> bool:
    return module.startswith("fxquant.kernels.") and any(
        fnmatch.fnmatch(module.rpartition(".")[2], name) for name in WITH_TRITON
    )


@pytest.mark.parametrize("module", sorted(FILES))
def test_triton_is_imported_by_kernels_alone(module: str) -> None:
    """So all that decides, counts or reports works where Triton is not installed."""
    if not needs_triton(module) and not module.startswith("fxquant.bench"):
        for target, now in imported(FILES[module]):
            assert not now or not (target.split(".")[0] == "triton" or needs_triton(target)), (
                f"{module} imports {target}"
            )


@pytest.mark.parametrize("module", sorted(m for m in FILES if m.startswith("fxquant.kernels")))
def test_kernels_know_no_passes_and_no_recipes(module: str) -> None:
    for target, _ in imported(FILES[module]):
        assert not target.startswith(("fxquant.passes", "fxquant.recipes", "fxquant.backend")), target


@pytest.mark.parametrize("module", OUTSIDE_COMPAT)
def test_private_torch_modules_are_imported_in_one_package(module: str) -> None:
    for target, _ in imported(FILES[module]):
        parts = target.split(".")
        private = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
        assert parts[0] != "torch" or not private, f"{module} imports {target}: that belongs in fxquant/compat"


@cache
def private_torch_names() -> set[str]:
    """The private attributes of torch and of what graphs are made of, those that Dynamo adds among them."""
    x = torch.ones(1)
    objects: list[Any] = [torch, x, x.untyped_storage(), fx.GraphModule(nn.Module(), fx.Graph()), fx.Graph().output(())]
    objects += [torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.ops.higher_order.cond]
    names = {name for thing in objects for name in dir(thing) if name.startswith("_") and not name.startswith("__")}
    return names | {"_dynamo_source", "_param_name_to_source"}


def attributes(path: Path) -> Iterator[str]:
    """The attributes that a file asks of other objects than `self` and `cls`, operators of torch.ops left out."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            if not ast.unparse(node.value).endswith(("self", "cls", "aten")):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "attrgetter"):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


@pytest.mark.parametrize("module", [m for m in OUTSIDE_COMPAT if not m.startswith("fxquant.passes.graph.")])
def test_private_attributes_of_torch_are_read_by_compat_and_names_of_nodes(module: str) -> None:
    private = private_torch_names().intersection(attributes(FILES[module]))
    assert not private, f"{module} reads {private}: that belongs in fxquant/compat"


@pytest.mark.parametrize("module", OUTSIDE_COMPAT)
def test_nothing_else_branches_on_torchs_version(module: str) -> None:
    for node in nodes(FILES[module]):
        if isinstance(node, (ast.If, ast.IfExp)):
            test = ast.unparse(node.test)
            assert "torch.__version__" not in test and "torch_version" not in test, test


@pytest.mark.parametrize("module", sorted(FILES))
def test_private_names_are_not_imported_from_other_files(module: str) -> None:
    for node in nodes(FILES[module]):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fxquant"):
            private = [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")]
            assert not private, private


def test_compat_has_what_the_rest_imports_from_it() -> None:
    wanted = {
        (node.module, alias.name)
        for module in OUTSIDE_COMPAT
        for node in nodes(FILES[module])
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fxquant.compat")
        for alias in node.names
    }
    assert len(wanted) > 50
    for module, name in wanted:
        assert hasattr(importlib.import_module(str(module)), name), f"{module} has no {name}"
    assert compat.torch_version() >= compat.OLDEST_TORCH
    assert torch.__version__.startswith(".".join(map(str, compat.torch_version())))


def test_importing_the_package_leaves_the_compiler_alone() -> None:
    """Torch imports backends by entry point, maybe while it is itself being imported."""
    import subprocess
    import sys

    names = ("torch._dynamo", "torch._inductor", "passes", "kernels")
    code = f"import sys, fxquant; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
