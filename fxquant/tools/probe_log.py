"""The log of a probe: its rows, their order by what is lost, and the files that they are written to."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxquant.backend.probing import Session
from fxquant.checks import did_you_mean
from fxquant.errors import OptionError
from fxquant.files import check_place, write_whole
from fxquant.probes import STATISTICS, Unmeasured
from fxquant.tools.outliers import STATISTICS as LOST
from fxquant.tools.outliers import Place, Seen, outliers

Operand = tuple[str, str, str]
"""A layer, role and direction."""

_LOW = ("sqnr", "cosine", "worst_block_sqnr", "scale_min")
"""The statistics of which the least is the worst."""

_NO_ORDER = ("exponents", "worst_block_row", "worst_block_column")


class ProbeLog:
    """The measurements of a probe: `rows`, a dict for each operand of a step that was measured.

    A row has ``step``, ``layer``, ``role``, ``direction``, ``quantizer``, ``whatif`` and a key a statistic; that of a
    quantizer which is only tried has ``candidate`` too, as it was given.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._session.rows

    @property
    def unmeasured(self) -> list[Unmeasured]:
        """The operands of layers that have no rows, each with the reason; those of a candidate alone name it."""
        return [*self._session.unmeasured]

    def step(self) -> None:
        """Ends a step of training by hand, where no optimizer of torch does; all ranks have to call it."""
        self._session.end_step()

    def worst(self, statistic: str = "kurtosis", count: int | None = 10) -> list[tuple[Operand, float]]:
        """Operands, as (layer, role, direction), in the order of a statistic, the worst first, with its worst value.

        ``kurtosis`` and ``crest`` find outliers whatever the format; ``relative_error``, ``underflow`` and ``sqnr``
        what the quantizers that there are lose. Quantizers that are only tried do not count.
        """
        _check(statistic, [name for name in STATISTICS if name not in _NO_ORDER])
        self._check_measured(statistic)
        worst = min if statistic in _LOW else max
        values: dict[Operand, list[float]] = {}
        for row in self.rows:
            value = row.get(statistic)
            if not row["whatif"] and value is not None and not math.isnan(value):
                values.setdefault(_operand(row), []).append(value)
        ranked = [(operand, worst(numbers)) for operand, numbers in values.items()]
        ranked.sort(key=lambda pair: pair[1], reverse=worst is max)
        return ranked[:count]

    def outliers(self, candidate: str | None = None) -> list[tuple[Operand, float]]:
        """Operands, as (layer, role, direction), of which a format loses much more than of others of their role.

        Their product has more than 2.5 times the usual error in the norm, or a few large elements hide that all others
        lose more than usual; with how many times it is, the most first. Of several steps the mean counts. That is under
        the quantizers that there are, or under a `candidate` of ``whatif``.

        Raises OptionError where nothing is quantized, for a candidate that was not tried, and without all statistics.
        """
        rows = [row for row in self.rows if row["whatif"]] if candidate else self.rows
        names = dict.fromkeys(str(row["candidate"]) for row in self.rows if row["whatif"])
        if candidate and candidate not in names:
            hint = did_you_mean(candidate, list(names)) or "."
            raise OptionError(f"no candidate {candidate!r} was tried{hint} Tried: {', '.join(names) or 'none'}")
        wanted = [row for row in rows if _is_of(row, candidate)]
        if self.rows and not wanted:
            tried = f"outliers(candidate={next(iter(names))!r})" if names else "whatif=['nvfp4'], and name it here"
            raise OptionError(f"nothing is quantized, so nothing is lost: try {tried}")
        if wanted and (missing := [statistic for statistic in LOST if statistic not in wanted[0]]):
            needed, without = ", ".join(map(repr, LOST)), ", ".join(missing)
            raise OptionError(f"outliers needs stats=[{needed}], and this log has no {without}")
        seen: dict[Operand, list[Seen]] = {}
        places: dict[Operand, Place] = {}
        for row in wanted:
            operand = _operand(row)
            places[operand] = Place(*operand, row["quantizer"])
            seen.setdefault(operand, []).append(Seen.of(row))
        return [(operand, one.times) for operand, one in outliers(seen, places).items()]

    def _check_measured(self, statistic: str) -> None:
        """Raises OptionError for a statistic that the probe was not asked for."""
        if self.rows and statistic not in self.rows[0]:
            has = ", ".join(name for name in STATISTICS if name in self.rows[0])
            raise OptionError(f"{statistic} was not measured: name it in stats= (this log has {has})")

    def to_jsonl(self, path: str | Path) -> None:
        """Writes a row a line as JSON: numbers that are not finite are null there."""
        lines = (json.dumps(_plain(row)) for row in self.rows)
        _write(path, "".join(f"{line}\n" for line in lines))

    def to_csv(self, path: str | Path) -> None:
        """Writes the rows as a table, the counts of exponents as JSON in their cell."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in self.rows:
            writer.writerow({k: json.dumps(_plain(v)) if isinstance(v, dict) else v for k, v in row.items()})
        _write(path, file.getvalue())

    def to_tensorboard(self, folder: str | Path) -> None:
        """Writes every statistic as a scalar by step, for TensorBoard.

        Raises OptionError where the package tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise OptionError("to_tensorboard needs TensorBoard: pip install tensorboard") from error
        with SummaryWriter(str(folder)) as writer:
            for row in self.rows:
                name = "/".join((*_operand(row), *([row["candidate"]] if row["whatif"] else [])))
                for statistic in STATISTICS:
                    value = row.get(statistic)
                    if isinstance(value, int | float) and math.isfinite(value):
                        writer.add_scalar(f"{statistic}/{name}", value, row["step"])

    def plot(self, path: str | Path, statistic: str = "sqnr") -> None:
        """Draws a statistic as a map of steps across and operands down, a line for each layer, role and direction.

        Raises OptionError where the package matplotlib is not installed, and for a log without rows.
        """
        check_place(path)
        _check(statistic, [name for name in STATISTICS if name != "exponents"])
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise OptionError('plot needs matplotlib: pip install "fxquant[plot]"') from error
        rows = [row for row in self.rows if not row["whatif"]]
        if not rows:
            raise OptionError("there are no rows to plot")
        self._check_measured(statistic)
        operands, steps = _in_order(rows), sorted({row["step"] for row in rows})
        values = {(_operand(row), row["step"]): row.get(statistic) for row in rows}
        cells = [[_number(values.get((operand, step))) for step in steps] for operand in operands]
        labels = [" ".join(filter(None, operand)) for operand in operands]
        width = 3.2 + 0.075 * max(map(len, labels)) + 0.35 * min(len(steps), 24)
        figure = Figure(figsize=(width, 1.4 + 0.19 * len(operands)), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(cells, aspect="auto", cmap="cividis", interpolation="nearest")
        axes.set_yticks(range(len(operands)), labels, fontsize=7, family="monospace")
        every = -(-len(steps) // 12)
        axes.set_xticks(range(0, len(steps), every), [str(step) for step in steps[::every]], fontsize=8)
        axes.set_xlabel("step")
        axes.set_title(_TITLES.get(statistic, statistic.replace("_", " ")), fontsize=10)
        figure.colorbar(image, ax=axes, shrink=min(1.0, 12 / len(operands)) if len(operands) > 30 else 1.0)
        kind = Path(path).suffix.removeprefix(".") or "png"
        if kind not in (kinds := figure.canvas.get_supported_filetypes()):
            raise OptionError(f"a plot has no format {kind!r}: the path ends in one of .{', .'.join(sorted(kinds))}")
        write_whole(path, lambda file: figure.savefig(file, dpi=150, format=kind))


_TITLES = {
    "sqnr": "SQNR, dB", "worst_block_sqnr": "SQNR of the worst block, dB", "underflow": "share that became zero",
    "saturated": "share that saturated", "scale_spread": "spread of scales, binades",
}  # fmt: skip


def _write(path: str | Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))


def _check(statistic: str, ordered: Sequence[str]) -> None:
    if statistic not in ordered:
        hint = did_you_mean(statistic, ordered) or "."
        raise OptionError(f"there is no statistic {statistic!r} in an order{hint} Known: {', '.join(ordered)}")


def _is_of(row: dict[str, Any], candidate: str | None) -> bool:
    """Returns True for a row of a candidate; of a quantizer that there is, if there is none."""
    if candidate is None:
        return not row["whatif"] and row["quantizer"] != "identity"
    return str(row["candidate"]) == candidate


def _operand(row: dict[str, Any]) -> Operand:
    number = f" {row['product']}" if "product" in row else ""
    return f"{row['layer']}{number}", row["role"], row["direction"]


def _in_order(rows: Sequence[dict[str, Any]]) -> list[Operand]:
    """Operands as layers come, those of one layer together."""
    operands = list(dict.fromkeys(map(_operand, rows)))
    layers = list(dict.fromkeys(layer for layer, _, _ in operands))
    return sorted(operands, key=lambda operand: layers.index(operand[0]))


def _number(value: Any) -> float:
    return math.nan if value is None or math.isinf(value) else float(value)


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
