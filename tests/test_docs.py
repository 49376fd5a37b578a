from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fxquant
from fxquant import __main__ as command_line
from fxquant.backend.options import Options
from fxquant.bench import run as bench

ROOT = Path(__file__).parents[1]


def load_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tables = load_tables()
PAGES = {
    str(page.relative_to(ROOT)): page for page in [*tables.pages(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
}
EXAMPLES = [
    pytest.param(code, id=f"{name}-{i}") for name, page in PAGES.items() for i, code in enumerate(tables.examples(page))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str) -> None:
    if "from transformers" in code:
        pytest.importorskip("transformers", reason="transformers is not installed")
    torch._dynamo.reset()
    tables.run_example(code)


@pytest.mark.parametrize("name", PAGES)
def test_generated_parts_are_current(name: str) -> None:
    torch._dynamo.reset()
    text = PAGES[name].read_text(encoding="utf-8")
    assert tables.render(text) == text, "run `make docs`"


WHOLE = tables.drawn()


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.name)
def test_pictures_and_pages_from_code_are_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == WHOLE[path](), "run `make docs`"


FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def shell_commands() -> list[str]:
    """The commands in the blocks of all pages, without their comments."""
    found = [block for page in PAGES.values() for block in FENCE.findall(page.read_text(encoding="utf-8"))]
    blocks = [text for language, text in found if not language]
    lines = [line.partition(" #")[0].partition(" > ")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(("python ", "fxquant ", "make "))]


def test_commands_of_the_pages_exist() -> None:
    commands = shell_commands()
    assert len(commands) > 20
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for command in commands:
        program, *words = shlex.split(command)
        if program == "make":
            assert words[0] in targets, command
        elif words[0] == "-m" or program == "fxquant":
            name, *arguments = words[2:] if words[0] == "-m" else words
            parser = bench._parser() if name == "bench" else command_line.commands()[name]
            parser.parse_args(arguments)  # exits where it does not know an option
        else:
            assert (ROOT / words[0]).exists(), command


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    named = set(re.findall(r"fxquant\.(\w+)|`(\w+)`", pages))
    missing = set(fxquant.__all__) - {name for pair in named for name in pair} - {"__version__"}
    assert not missing, f"docs/api has no page for {missing}"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"([\w/]+\.md)$", text, re.M))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"package.md"}
    assert listed == pages | {"index.md", "contributing.md", "changelog.md"}


def test_options_are_all_explained() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").partition("\n## Options\n")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)`", text, re.MULTILINE))
    defaults = {field.name: field.default for field in fields(Options) if field.name != "recipe"}
    assert rows.pop("inductor") == "{}" and defaults.pop("inductor") is None
    assert {name: ast.literal_eval(text) for name, text in rows.items()} == defaults


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name: str) -> None:
    page = PAGES[name]
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text) + re.findall(r"""(?:src|href)=["']([^"']+)""", text):
        assert (page.parent / target).exists(), f"{name} links to {target}"
