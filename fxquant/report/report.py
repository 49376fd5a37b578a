"""A report: its data with its views."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fxquant.cost.rates import find_card
from fxquant.files import write_whole
from fxquant.report import html, json
from fxquant.report import text as views
from fxquant.report.data import ReportData


class Report(ReportData):
    """The fate of every matmul of a compiled model: print it, or write it as JSON or HTML."""

    text = __str__ = views.text
    table = views.table
    overview = views.overview
    work_table = views.work_table
    epilogue_table = views.epilogue_table
    loss_table = views.loss_table
    verdict = views.verdict
    totals = views.totals
    to_json = json.dumps
    _repr_html_ = html.fragment

    def on(self, card: str) -> Report:
        """A copy with the kernels and estimated times of another card, named in part, such as ``H100``.

        Raises OptionError for a card without measured rates.
        """
        return replace(self, card=find_card(card))

    def to_html(self, path: str | Path) -> None:
        """Writes one file that needs no other, and follows the reader's light or dark setting.

        It is written as a whole or not at all. Raises ProgramError if the file cannot be written.
        """
        page = html.page(f"fxquant: {self.recipe}", html.section(self))
        write_whole(path, lambda file: file.write(page.encode()))
