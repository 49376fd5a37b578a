"""The facts of compiled graphs beside torch's cache, for reports of graphs that torch takes from there.

The passes behind autograd do not run over those. A file has the texts and nodes of both halves, the reasons of passes,
and what is saved, about a tenth of what torch keeps of the same graph.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from fxquant.backend.record import GraphRecord
from fxquant.compat.private import cache_folder
from fxquant.decisions import Considered, NotFused
from fxquant.errors import ProgramError
from fxquant.files import in_its_place
from fxquant.report.codec import decode, encode
from fxquant.snapshots import NodeText, Snapshot

_KINDS = {kind.__name__: kind for kind in get_args(Considered)}


@dataclass(kw_only=True)
class Facts:
    """The parts of a `GraphRecord` that come with a compilation."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    views: dict[str, list[Snapshot]] = field(default_factory=dict)
    considered: list[Considered] = field(default_factory=list)

    @classmethod
    def of(cls, record: GraphRecord) -> Facts:
        """A copy of what a record has by now."""
        texts, views = ({name: [*all] for name, all in part.items()} for part in (record.texts, record.views))
        return cls(texts=texts, views=views, considered=[*record.considered])

    def since(self, before: Facts) -> Facts:
        """The facts that were not there before."""

        def new(now: dict[str, list[Any]], old: dict[str, list[Any]]) -> dict[str, list[Any]]:
            grown = {name: all[len(old.get(name, ())) :] for name, all in now.items()}
            return {name: items for name, items in grown.items() if items}

        considered = self.considered[len(before.considered) :]
        return Facts(texts=new(self.texts, before.texts), views=new(self.views, before.views), considered=considered)

    def with_halves(self, other: Facts, halves: Sequence[str]) -> Facts:
        """These facts, and those of another that are of some halves of the graph."""
        considered = [one for one in other.considered if isinstance(one, NotFused) and one.graph in halves]
        return Facts(
            texts={**self.texts, **{name: other.texts[name] for name in halves if name in other.texts}},
            views={**self.views, **{name: other.views[name] for name in halves if name in other.views}},
            considered=[*self.considered, *considered],
        )

    def add_to(self, record: GraphRecord) -> None:
        """Gives a record these facts."""
        for name, texts in self.texts.items():
            record.texts.setdefault(name, []).extend(texts)
        for name, views in self.views.items():
            record.views.setdefault(name, []).extend(views)
        record.considered += self.considered


def key_of(text: str, inputs: Sequence[Any], *others: Any) -> str:
    """A name that is the same for the same graph of equal inputs, compiled under equal settings (`others`)."""
    described = [
        (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else type(x) for x in inputs
    ]
    return hashlib.sha256(repr((text, described, others)).encode()).hexdigest()


class Keeper:
    """Keeps the facts that one compilation adds to a record, or gives it those of an earlier one.

    A backward is compiled when it first runs, which may be after the forward has run.
    """

    def __init__(self, record: GraphRecord, key: str) -> None:
        self._record, self._path = record, _path(key)
        self._before = Facts.of(record)

    def keep(self) -> None:
        """Writes what there is by now; halves that are missing stay as they were kept before."""
        if self._path is None:
            return
        added, kept = Facts.of(self._record).since(self._before), _read(self._path)
        kept_alone = [name for name in kept.texts if name not in added.texts] if kept is not None else []
        both = added if kept is None else added.with_halves(kept, kept_alone)
        if added.texts and both != kept:
            _write(self._path, both)

    def complete(self) -> None:
        """Adds what is kept of a graph that torch has taken from its cache, as a whole or its forward."""
        if self._path is None:
            return
        added = Facts.of(self._record).since(self._before)
        whole = added == Facts()
        if (whole or "forward" not in added.texts) and (kept := _read(self._path)) is not None:
            missing = kept if whole else Facts().with_halves(kept, ["forward"])
            missing.add_to(self._record)


def _path(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else Path(folder) / "fxquant" / key[:2] / f"{key}.json.gz"


def _write(path: Path, facts: Facts) -> None:
    considered = [{"kind": type(one).__name__, **asdict(one)} for one in facts.considered]
    content = {"texts": facts.texts, "views": encode(facts.views), "considered": considered}
    packed = gzip.compress(json.dumps(content).encode(), 1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with in_its_place(path) as file:
            file.write_bytes(packed)
    except (OSError, ProgramError):  # a report of a later process has less in it
        return


def _node(fields: dict[str, Any]) -> NodeText:
    """A node of a snapshot; `decode` would look at the annotations of each of some ten thousand."""
    values: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return NodeText(**values)


def _read(path: Path) -> Facts | None:
    """The facts of a file; None if there is none that can be read."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        considered = [decode(_KINDS[one.pop("kind")], one) for one in content["considered"]]
        views = {name: [tuple(map(_node, view)) for view in all] for name, all in content["views"].items()}
        return Facts(texts=content["texts"], views=views, considered=considered)
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError):
        return None
