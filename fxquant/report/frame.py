"""The view of a report as a table of pandas."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

from fxquant.checks import OneOf, checked
from fxquant.errors import ArgumentError
from fxquant.report.data import ReportData
from fxquant.report.json import content

TABLES = ("decisions", "work", "epilogues", "losses", "not_fused", "sent_quantized")
"""The lists of a report's JSON that are tables."""


@checked(ArgumentError, called="to_dataframe")
def to_dataframe(report: ReportData, of: Annotated[str, OneOf(*TABLES)] = "decisions", layer: str = "") -> Any:
    """A pandas DataFrame of one list of the JSON, in its columns.

    ``decisions`` has a row for each operand, ``work`` for each GEMM and cast with its time, ``epilogues``, ``losses``,
    ``not_fused`` and ``sent_quantized`` what their names say, of the layers in whose name `layer` is found. Raises
    ImportError where pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError(
            "report.to_dataframe() makes a pandas DataFrame, and pandas is not installed: pip install pandas, or read "
            "the rows of report.to_json()"
        ) from error
    return pandas.DataFrame(content(report, layer, graphs=False)[of])
