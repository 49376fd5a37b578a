"""The report of every matmul: `data`, its views `text`, `json` and `html`, and `report` with all of them.

The package is a function too: `fxquant.report(model)` is the report of a compiled model.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from fxquant.checks import checked
from fxquant.errors import ArgumentError
from fxquant.report.data import result
from fxquant.report.report import Report
from fxquant.report.text import aligned

__all__ = ["Report", "aligned", "result"]


class _Reports(ModuleType):
    @staticmethod
    @checked(ArgumentError, called="fxquant.report", takes={"model": "a compiled model"})
    def __call__(model: Any) -> Report:
        from fxquant.backend.model import report

        return report(model)


sys.modules[__name__].__class__ = _Reports
