"""The files of the package, and their syntax, which several tests read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fxquant
import fxquant.kernels
import fxquant.passes

FOLDERS = {
    "fxquant": Path(fxquant.__file__).parent,
    "fxquant.passes": Path(fxquant.passes.__file__).parent,
    "fxquant.kernels": Path(fxquant.kernels.__file__).parent,
}
FILES = {
    ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
    for package, folder in FOLDERS.items()
    for path in folder.rglob("*.py")
}
assert len(FILES) > 100


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The syntax of a file, its module first."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imported(path: Path) -> tuple[tuple[str, bool], ...]:
    """Every module that a file imports, and whether it does so when it is itself imported."""

    def walk(node: ast.AST, now: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, now) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path.name}: relative import"
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    yield (whole if whole in FILES else str(child.module)), now
            else:
                lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
                    isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
                )
                yield from walk(child, now and not lazy)

    return tuple(walk(nodes(path)[0], True))
