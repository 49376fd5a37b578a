"""The house: which folder knows which, how long files and functions are, and a test file for each pass."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import FILES, FOLDERS, imported, nodes

from fxquant.passes import pipeline
from fxquant.passes.pipeline import Pass

BELOW = {
    "graph": (),
    "find": ("graph",),
    "plan": ("graph", "find"),
    "insert": ("graph", "find"),
    "joint": ("graph",),
    "lower": ("graph", "joint"),
    "export": ("graph", "find", "lower"),
}
"""The folders of passes that each folder may import, besides itself and the settings."""

OF_KERNELS = {
    "graph": (),
    "find": (),
    "plan": (),
    "insert": ("operator", "cast.ops", "grouped.choice", "grouped.ops", "linear.choice"),
    "joint": ("operator", "cast.choice", "cast.producers", "linear.choice", "linear.few_rows", "torch_in_range"),
    "export": ("cast.reference", "custom"),
}
"""The modules of kernels that each folder may import, none with code for a device; `lower` alone imports such."""


def part(module: str) -> str:
    return module.removeprefix("fxquant.passes.").partition(".")[0]


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_of_passes_knows_those_below(folder: str) -> None:
    modules = [module for module in FILES if module.startswith(f"fxquant.passes.{folder}.")]
    arrows = [(module, target) for module in modules for target, _ in imported(FILES[module])]
    assert len(modules) >= 4 and len(arrows) > 20
    allowed = {folder, "settings", *BELOW[folder]}
    assert not [(m, t) for m, t in arrows if t.startswith("fxquant.passes.") and part(t) not in allowed]
    if folder in OF_KERNELS:
        kernels = {f"fxquant.kernels.{name}" for name in OF_KERNELS[folder]}
        assert not [(m, t) for m, t in arrows if t.startswith("fxquant.kernels") and t not in kernels]


LATE = {
    "fxquant": "operators are registered when they are first asked for: a saved program may be all that is loaded",
    "fxquant.__main__": "a command loads what it needs",
    "fxquant.compat.values": "importing the package leaves the compiler of torch alone",
    "fxquant.kernels": "code for devices needs Triton or a compiler, which those who only choose do without",
    "fxquant.report": "the package is the function `fxquant.report(model)` too, which asks backends",
    "fxquant.weights": "a build of torch may have no FSDP",
    "fxquant.quantizers.base": "a description of a format must not load torch's compiler",
    "fxquant.quantizers.blocks": "a description of a format must not load torch's compiler",
}
"""The files and folders that import fxquant inside functions, and the reasons."""


@cache
def functions(path: Path) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    """The functions of a file, but for code of Triton."""
    return tuple(
        node
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    )


def imports_late(node: ast.AST) -> bool:
    names = [node.module] if isinstance(node, ast.ImportFrom) else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return any(str(name).partition(".")[0] == "fxquant" for name in names)


def test_imports_inside_functions_have_a_reason() -> None:
    late = {
        module
        for module, path in FILES.items()
        if any(imports_late(node) for function in functions(path) for node in ast.walk(function))
    }
    reasons = {module if module in LATE else ".".join(module.split(".")[:2]) for module in late}
    assert reasons == set(LATE), "a file without a reason, or a reason without a file"


MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 500, 80, 7
WIDE = ("fxquant.kernels.",)
"""Where a function may have more parameters: operators and launches of kernels take what a GPU is given."""


@pytest.mark.parametrize("module", sorted(FILES))
def test_files_and_functions_fit_a_page(module: str) -> None:
    assert len(FILES[module].read_text().splitlines()) <= MOST_LINES
    for function in functions(FILES[module]):
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno + 1 <= MOST_LINES_OF_A_FUNCTION, function.name
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        count = len(names) + len(function.args.kwonlyargs) - (names[:1] in (["self"], ["cls"]))
        assert count <= MOST_PARAMETERS or module.startswith(WIDE), function.name


def test_the_house_has_functions() -> None:
    assert sum(1 for path in FILES.values() for _ in functions(path)) > 1000


TESTS = Path(__file__).parent
STAGES = {step.run: step for stage in vars(pipeline).values() if isinstance(stage, tuple) for step in stage
          if isinstance(step, Pass)}  # fmt: skip
ON_GRAPHS = sorted({Path(run.__code__.co_filename) for run in STAGES} & {
    path for path in FILES.values() if path.parent != FOLDERS["fxquant.passes"]})  # fmt: skip


@pytest.mark.parametrize("path", ON_GRAPHS, ids=lambda path: path.stem)
def test_every_pass_over_a_graph_has_a_test_file_of_its_name(path: Path) -> None:
    folder = path.relative_to(FOLDERS["fxquant.passes"]).parent
    test = TESTS / "passes" / folder / f"test_{path.stem}.py"
    names = {run.__name__ for run in STAGES if run.__code__.co_filename == str(path)}
    assert names and all(name in test.read_text() for name in names)


@pytest.mark.parametrize("folder", ["insert", "joint"])
def test_every_file_of_insert_and_joint_has_a_test_file(folder: str) -> None:
    files = {path.stem for path in (FOLDERS["fxquant.passes"] / folder).glob("*.py")} - {"__init__", "sides"}
    assert len(files) > 3 and all((TESTS / "passes" / folder / f"test_{name}.py").is_file() for name in files)


def test_every_file_that_does_the_work_of_a_captured_pass_has_a_test_file() -> None:
    """They are imported whole, and called by their names; others lend a name or two."""
    captured = FOLDERS["fxquant.passes"] / "captured.py"
    targets = {target.removeprefix("fxquant.passes.") for target, _ in imported(captured) if target in FILES}
    wholes = {name for name in targets if re.search(rf"import .*\b{name.rpartition('.')[2]}\b", captured.read_text())}
    assert {"find.mha", "plan.layers", "plan.resolve", "plan.reuse", "plan.weigh", "insert.linear"} <= wholes
    for folder, _, name in (name.rpartition(".") for name in wholes - {"settings"}):
        assert (TESTS / "passes" / folder / f"test_{name}.py").is_file(), f"{folder}/{name}.py has no test file"


def test_passes_over_graphs_are_many() -> None:
    assert len(ON_GRAPHS) > 12


VAGUE = frozenset(("each", "made", "found", "known", "given", "own"))
"""Names that do not say what a local holds. `left` is one side of a product, and no more than that."""

INVERTED = frozenset(("What", "Whether", "Of", "Those", "That", "Where", "As", "By"))
"""First words of docstrings without a subject, or with their sentence turned round."""


def docstrings(path: Path) -> Iterator[str]:
    """The texts that stand alone: docstrings of modules, classes and functions, and those below names."""
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


@pytest.mark.parametrize("module", sorted(FILES))
def test_locals_say_what_they_hold_and_docstrings_have_a_subject(module: str) -> None:
    stored = {
        name
        for function in functions(FILES[module])
        for node in ast.walk(function)
        for name in ([node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else [])
        + ([node.arg] if isinstance(node, ast.arg) else [])
    }
    assert not stored & VAGUE and ("left" not in stored or "right" in FILES[module].read_text())
    assert not [text for text in docstrings(FILES[module]) if text.split() and text.split()[0].rstrip(",:") in INVERTED]


@pytest.mark.parametrize("module", [m for m in sorted(FILES) if not m.startswith("fxquant.compat")])
def test_keys_of_nodes_are_named_in_one_file(module: str) -> None:
    for node in nodes(FILES[module]):
        asked, key = None, None
        if isinstance(node, ast.Subscript):
            asked, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            asked, key = node.func.value, node.args[0]
        if isinstance(asked, ast.Attribute) and asked.attr == "meta":
            assert not isinstance(key, ast.Constant), f"{ast.unparse(node)}: passes/graph/meta.py has the keys"


@pytest.mark.parametrize("package", ["fxquant.passes", "fxquant.kernels", "fxquant.compat", "fxquant.compat.inside"])
def test_a_map_has_every_file_and_folder(package: str) -> None:
    names = {
        module.removeprefix(f"{package}.").partition(".")[0] for module in FILES if module.startswith(f"{package}.")
    }
    text = ast.get_docstring(nodes(FILES[package])[0])  # type: ignore[arg-type]
    assert text is not None and len(names) > 6
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


def test_every_folder_is_in_the_package() -> None:
    root = Path(__file__).parents[1]
    listed = set(re.findall(r'^    "(fxquant[\w.]*)",$', (root / "pyproject.toml").read_text(), re.M))
    homes = {"fxquant": root / "fxquant", "fxquant.passes": root / "passes", "fxquant.kernels": root / "kernels"}
    folders = {
        ".".join((name, *file.parent.relative_to(home).parts))
        for name, home in homes.items()
        for file in home.rglob("__init__.py")
    }
    assert listed == folders
