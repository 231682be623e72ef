"""Requires: Every finding that the baseline accepts is still found, and none is older than the date until which it is
accepted.

Measured: The findings of an audit against the file that `ampcheck baseline` wrote, by check, subject, module, op, file
and source line; line numbers may move. A finding is gone if its check judged its subject and did not report it.

Causes: A defect was mended, or its line was rewritten.

Fix: Run `ampcheck baseline --prune`, which removes what is gone and accepts nothing new.
"""

from __future__ import annotations

from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.text import counted, listed
from ampcheck.records.baseline import BaselineStats

CHECK = Check("baseline", "outcome", __doc__, needs=("BaselineStats",), order=900)


def check(stats: BaselineStats, limits: Limits) -> list[Finding]:
    """A warning that names the accepted findings that are gone."""
    if not stats.gone:
        return []
    places = listed(dict.fromkeys(f"{check} in {subject}" for check, subject in stats.gone))
    text = f"{counted(len(stats.gone), 'accepted findings')} no longer found: {places}"
    return [CHECK.warn(stats.subject, text, hint=CHECK.fix)]
