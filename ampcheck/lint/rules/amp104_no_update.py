"""Requires: scaler.update() follows scaler.step(optimizer): without it the scale never falls after an overflow, every
later step is skipped, and a second step of the same optimizer raises.

Measured: A call of scaler.step(optimizer) in a file without any call of update of the same scaler.

Causes: A line that was lost; a loop that steps two optimizers by two scalers.

Fix: scaler.update() once in each iteration, after the last step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.names import scaled_passes, steps_of_scalers
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import Source


def _read(source: Source) -> Iterator[Report]:
    for scope in source.scopes:
        for step in steps_of_scalers(scope):
            last = re.escape(step.receiver.rpartition(".")[2])
            if list(scaled_passes(scope)) and not re.search(rf"{last}\s*\.\s*update\s*\(", source.text):
                yield Report(step.line, f"no {step.receiver}.update() follows: the scale never changes")
                break


RULE = Rule(
    Check("AMP104", "lint", __doc__),
    (("scaler", "Scaler"), (".step(",), (".scale(",)),
    _read,
    audit="ampcheck audit train.py:main --checks scaler-protocol",
)
