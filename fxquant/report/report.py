"""A report: its data with its views."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fxquant.cost.kept import find_card
from fxquant.files import write_whole
from fxquant.report import html, json, notebook, stages
from fxquant.report import picture as drawing
from fxquant.report import repro as scripts
from fxquant.report import text as views
from fxquant.report.data import ReportData
from fxquant.report.frame import to_dataframe
from fxquant.report.load import arguments_of, read_text


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
    stage = stages.stage
    picture = drawing.picture
    repro = scripts.repro
    to_json = json.dumps
    to_dataframe = to_dataframe
    _repr_html_ = notebook.fragment

    def on(self, card: str) -> Report:
        """A copy with the kernels and estimated times of another card, named in part, such as ``H100``.

        Raises OptionError for a card without measured rates.
        """
        return replace(self, card=find_card(card), estimated={})

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report whose `to_json` this is, with the times as they were estimated then.

        Its quantizers are the texts of their formats; `on` estimates anew. Raises ProgramError for what is not the JSON
        of a report, and for one whose layers are folded.
        """
        return cls(**arguments_of(text))

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """The report that `save`, or ``fxquant explain --json``, wrote to a file; see `from_json`."""
        return cls(**arguments_of(read_text(path), str(path)))

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file, as a whole or not at all. Raises ProgramError if it cannot be written."""
        text = self.to_json()
        write_whole(path, lambda file: file.write(text.encode()))

    def to_html(self, path: str | Path) -> None:
        """Writes one file that needs no other, and follows the reader's light or dark setting.

        It is written as a whole or not at all. Raises ProgramError if the file cannot be written.
        """
        page = html.page(f"fxquant: {self.recipe}", html.section(self))
        write_whole(path, lambda file: file.write(page.encode()))
