"""Writes the tables of README.md and docs/ that come from code, between their markers: ``make docs``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fxquant.__main__ import format_rows, recipe_rows
from fxquant.decisions import SkipReason

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(rows: list[dict[str, str]]) -> str:
    """Rows with equal keys as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def skip_reason_rows() -> list[dict[str, str]]:
    """One row per reason."""
    return [{"reason": f"`{reason}`", "meaning": reason.meaning} for reason in SkipReason]


TABLES: dict[str, Callable[[], list[dict[str, str]]]] = {
    "recipes": recipe_rows,
    "formats": format_rows,
    "skip-reasons": skip_reason_rows,
}


def render(text: str) -> str:
    """The text with every marked table made anew."""
    return MARKED.sub(lambda found: found[1] + markdown(TABLES[found[2]]()) + found[3], text)


def pages() -> list[Path]:
    """The files that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := render(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"updated {page.relative_to(ROOT)}")
