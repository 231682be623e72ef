"""Renderers of a `Run`: lines on a terminal, and an HTML page.

Renderers know the `Run` and never a check. rich and jinja2 are imported only when something is drawn.
"""

from __future__ import annotations

from ampcheck.report.html import render_html, write_html
from ampcheck.report.listing import print_tables
from ampcheck.report.progress import progress_bar
from ampcheck.report.terminal import print_run, summary_lines

__all__ = ["print_run", "print_tables", "progress_bar", "render_html", "summary_lines", "write_html"]
