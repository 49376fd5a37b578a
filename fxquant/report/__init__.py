"""The report of every matmul: `data`, its views `text`, `json` and `html`, and `report` with all of them."""

from fxquant.report.data import result
from fxquant.report.report import Report
from fxquant.report.text import aligned

__all__ = ["Report", "aligned", "result"]
