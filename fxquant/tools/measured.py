"""Losses that were measured, kept in a file from which a search goes on."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxquant.errors import OptionError
from fxquant.recipes.operands import Operand


class Measured:
    """Losses and other results by key, each written to a file as a line of JSON as soon as it is there.

    The first line has a fingerprint of the search. Raises OptionError for the file of another one.
    """

    def __init__(self, path: str | os.PathLike[str] | None, about: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.results: dict[str, Any] = {}
        fingerprint = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        if self.path is None:
            return
        if not self.path.exists():
            self.path.write_text(json.dumps({"search": fingerprint, **about}) + "\n", encoding="utf-8")
            return
        first, *lines = self.path.read_text(encoding="utf-8").splitlines() or [""]
        try:
            written = json.loads(first)["search"]
            self.results = {row["key"]: row["result"] for row in map(json.loads, filter(_is_whole, lines))}
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{self.path} is no file of fxquant.search: name another one") from error
        if written != fingerprint:
            raise OptionError(
                f"{self.path} is of another search (model, data, candidates, steps or seed differ): name another file"
            )

    def get(self, key: str) -> Any:
        """The result under a key; None if there is none yet."""
        result = self.results.get(key)
        return math.inf if result == "inf" else result

    def put(self, key: str, result: Any) -> None:
        """Keeps a result."""
        shown = "inf" if result == math.inf else result
        self.results[key] = shown
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "result": shown}) + "\n")


def _is_whole(line: str) -> bool:
    """Returns True for a line that was written to its end."""
    return line.startswith("{") and line.endswith("}")


def key_of(chosen: Mapping[Operand, int]) -> str:
    """A short text that is equal for equal choices."""
    text = json.dumps(sorted((*operand, i) for operand, i in chosen.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
