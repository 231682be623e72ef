"""Renderers of a `Run`: lines on a terminal, and an HTML page.

Renderers know the `Run` and never a check. rich, jinja2 and matplotlib are imported only when something is drawn.
"""

from __future__ import annotations

from ampcheck.report.html import render_html as render_html
from ampcheck.report.html import write_html as write_html
from ampcheck.report.terminal import print_run as print_run
from ampcheck.report.terminal import print_tables as print_tables
from ampcheck.report.terminal import progress_bar as progress_bar
from ampcheck.report.terminal import summary_lines as summary_lines
