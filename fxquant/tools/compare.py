"""The command ``diff``, which compares reports that were saved."""

from __future__ import annotations

import argparse
from typing import Any

from fxquant.files import check_outputs
from fxquant.report.diff_views import diff


def add_diff(commands: Any) -> None:
    """Adds the command to those of the command line."""
    compare = commands.add_parser(
        "diff",
        help="what changed between two saved reports",
        description="Compares two reports: layers whose decision, kernel, time, bytes or error changed.",
        epilog="example: diff yesterday.json today.json -o diff.html",
    )
    compare.add_argument("a", metavar="A.json", help="a report as JSON")
    compare.add_argument("b", metavar="B.json", help="another one")
    compare.add_argument("-o", "--html", metavar="PATH", help="also write the comparison as a page")
    compare.add_argument("--exit-code", action="store_true", help="end with 1 if anything differs, as git diff does")
    compare.set_defaults(run=_diff)


def _diff(options: argparse.Namespace) -> str:
    check_outputs([options.html] if options.html is not None else [], [options.a, options.b])
    difference = diff(options.a, options.b)
    if options.html:
        difference.to_html(options.html)
    options.code = int(options.exit_code and bool(difference))
    return difference.to_json() if options.json else str(difference)
