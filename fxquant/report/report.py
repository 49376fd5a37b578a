"""A report: its data with its views."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fxquant.cost.rates import find_card
from fxquant.files import write_whole
from fxquant.report import html, json, text
from fxquant.report.data import ReportData


class Report(ReportData):
    """What became of every matmul of a compiled model: print it, or write it as JSON or HTML."""

    def on(self, card: str) -> Report:
        """The same report with the kernels and estimated times of another card, named in part, such as ``H100``.

        Raises OptionError for a card without measured rates.
        """
        return replace(self, card=find_card(card))

    def text(self, layer: str = "", *, collapse: bool = False) -> str:
        """Tables, estimate, totals, unused parts of the recipe, graph breaks; see `table` for the arguments."""
        return text.text(self, layer, collapse=collapse)

    def table(self, layer: str = "", *, collapse: bool = False) -> str:
        """One row per operand and GEMM, of the layers in whose name the regular expression `layer` is found.

        `collapse` folds layers that differ in nothing but a number of their name, written as ``layers.{0..11}.mlp``.
        """
        return text.table(self, layer, collapse=collapse)

    def work_table(self, layer: str = "", *, collapse: bool = False) -> str:
        """One row for each GEMM and cast with its kernel and, where rates exist, its estimated time.

        See `table` for the arguments; times are those of one layer.
        """
        return text.work_table(self, layer, collapse=collapse)

    def epilogue_table(self, layer: str = "") -> str:
        """One row for each GEMM on a GPU that has an epilogue, with the kernel that runs it; see `table` for `layer`.

        With Triton the epilogue is part of the GEMM, with cuBLAS of the kernel that Inductor makes of the rest.
        """
        return text.epilogue_table(self, layer)

    def loss_table(self, layer: str = "") -> str:
        """One row for each measured product: the error of its result, and how much of each operand became zero."""
        return text.loss_table(self, layer)

    def verdict(self) -> list[str]:
        """The estimate in one line, then a warning for each kind of layer that becomes slower or has no kernel."""
        return text.verdict(self)

    def totals(self) -> str:
        """One line: matmuls, operands quantized, share of FLOPs, and the skipped by reason."""
        return text.totals(self)

    def to_json(self) -> str:
        """Everything in the report as a JSON object."""
        return json.dumps(self)

    def to_html(self, path: str | Path) -> None:
        """Writes one file that needs no other, and follows the reader's light or dark setting.

        It is written as a whole or not at all. Raises ProgramError where the file cannot be written.
        """
        page = html.page(f"fxquant: {self.recipe}", html.section(self))
        write_whole(path, lambda file: file.write(page.encode()))

    def _repr_html_(self) -> str:
        return html.fragment(self)

    def __str__(self) -> str:
        return self.text()
