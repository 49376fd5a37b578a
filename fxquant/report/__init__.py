"""What became of every matmul: `report` has data and the table, `html` the page."""

from fxquant.report.report import Report, aligned, result

__all__ = ["Report", "aligned", "result"]
