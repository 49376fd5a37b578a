"""Numbers, links and tables as HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from urllib.parse import quote


class Anchors:
    """The targets of links in a report; those of several on one page have a `key` each."""

    def __init__(self, key: str = "") -> None:
        word = re.sub(r"\W+", "-", key)
        self.prefix = f"{word}:" if word else ""
        self.why, self.also = f"{self.prefix}why", f"{self.prefix}also"

    def row(self, path: str) -> str:
        """The target of a row of the tree, by its path."""
        return quote(f"{self.prefix}{path}", safe=":")


def times(count: int) -> str:
    """The count of equal layers, where there are several."""
    return f"<span class='times'>×{count}</span>" if count > 1 else ""


def capital(text: str) -> str:
    """A text as the beginning of a sentence; names with a point, such as ``torch.compile``, stay."""
    return text if "." in text.partition(" ")[0] else f"{text[:1].upper()}{text[1:]}"


def sentence(text: str) -> str:
    """A text as a sentence."""
    return f"{capital(text)}.".replace("`", "")


def percent(part: float, whole: float) -> str:
    """A share with one digit behind the point."""
    share = 100 * part / whole if whole else 0.0
    return "<0.1%" if 0 < share < 0.05 else f"{share:.1f}%"


def si(number: float) -> str:
    """A number with three digits and the prefix of its unit."""
    power = min((len(str(int(number))) - 1) // 3, 5)
    return f"{number / 1000**power:.3g} {'kMGTP'[power - 1] if power else ''}"


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls where it is too wide; in a narrow window its rows are lists."""
    names = [escape(name) for name in columns]
    head = "".join(f"<th scope='col'>{name}</th>" for name in names)
    body = "".join(f"<tr>{_cells(names, row)}</tr>" for row in rows)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f"<div class='scroll'><table class='list stack'>{inner}</table></div>"


def _cells(names: Sequence[str], row: Sequence[str]) -> str:
    return "".join(f"<td data-label='{name}'>{_lines(cell)}</td>" for name, cell in zip(names, row, strict=True))
