from __future__ import annotations

import ast
import importlib.util
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fxquant.backend.options import Options

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
    torch._dynamo.reset()
    tables.run_example(code)


@pytest.mark.parametrize("name", PAGES)
def test_generated_parts_are_current(name: str) -> None:
    torch._dynamo.reset()
    text = PAGES[name].read_text(encoding="utf-8")
    assert tables.render(text) == text, "run `make docs`"


def test_the_picture_of_the_pipeline_is_current() -> None:
    picture = tables.load(ROOT / "docs" / "picture.py").draw()
    assert (ROOT / "docs" / "pipeline.svg").read_text(encoding="utf-8") == picture, "run `make docs`"


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
