"""Writes the parts of README.md and docs/ that come from code, between their markers: ``make docs``."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from fxquant.__main__ import format_rows, recipe_rows
from fxquant.decisions import SkipReason
from fxquant.recipes import RECIPES

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def examples(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return EXAMPLE.findall(page.read_text(encoding="utf-8"))


def run_example(code: str) -> str:
    """Runs an example without Inductor, which none of them is about, and returns what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace('options={"recipe"', 'options={"inner": "aot_eager", "recipe"'), {"__name__": "example"})
    return printed.getvalue()


def markdown(rows: list[dict[str, str]]) -> str:
    """Rows with equal keys as a Markdown table."""
    cells = [[value.replace("|", "\\|") for value in row.values()] for row in rows]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def recipe_settings() -> str:
    """Named recipes with the class behind each and the fields of the class."""
    rows = []
    for name, recipe in RECIPES.items():
        settings = ", ".join(f"`{field.name}`" for field in fields(recipe)) or "none"
        rows.append({"name": f"`{name}`", "class": f"`{type(recipe).__name__}`", "settings": settings})
    return markdown(rows)


TABLES: dict[str, Callable[[], str]] = {
    "recipes": lambda: markdown(recipe_rows()),
    "recipe-settings": recipe_settings,
    "formats": lambda: markdown(format_rows()),
    "skip-reasons": lambda: markdown([{"reason": f"`{r}`", "meaning": r.meaning} for r in SkipReason]),
    "example": lambda: f"```text\n{run_example(examples(ROOT / 'README.md')[0])}```\n",
}


def render(text: str) -> str:
    """The text with every marked part made anew."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def pages() -> list[Path]:
    """The files that may have generated parts or examples."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := render(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"updated {page.relative_to(ROOT)}")
