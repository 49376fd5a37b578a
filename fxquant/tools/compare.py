"""The command ``diff``, which compares reports that were saved."""

from __future__ import annotations

import argparse

from fxquant.files import check_outputs
from fxquant.report.diff_views import diff


def run(options: argparse.Namespace) -> str:
    """Compares two reports. The exit code is 1 where they differ, if that is asked for."""
    check_outputs([options.html] if options.html is not None else [], [options.a, options.b])
    difference = diff(options.a, options.b)
    if options.html:
        difference.to_html(options.html)
    options.code = int(options.exit_code and bool(difference))
    return difference.to_json() if options.json else str(difference)
