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
    """A text as the beginning of a sentence."""
    return f"{text[:1].upper()}{text[1:]}"


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


def count_text(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls where it is too wide."""
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table class='list'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
