"""Requires: A checkpoint from which training goes on has the scaler's state beside the optimizer's: without it the
scale begins at 65536 again, and the first steps after each resume are skipped.

Measured: torch.save of a state_dict of an optimizer, in the function or the class that steps by a gradient scaler,
and a file that calls state_dict of no scaler.

Causes: A scaler that was added after the checkpoint.

Fix: "scaler": scaler.state_dict() in the checkpoint, and scaler.load_state_dict where it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.names import is_optimizer, steps_of_scalers
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import Source

_SAVED = re.compile(r"scaler\w*(\[[^]]*\])?\s*\.\s*state_dict\s*\(", re.IGNORECASE)


def _read(source: Source) -> Iterator[Report]:
    if _SAVED.search(source.text):
        return
    scaled = [scope for scope in source.scopes if any(steps_of_scalers(scope))]
    for scope in source.scopes:
        if not any(one is scope or (one.parent is not None and one.parent is scope.parent) for one in scaled):
            continue
        of_optimizers = [call for call in scope.of("state_dict") if is_optimizer(call.receiver)]
        for save in scope.calls:
            if save.name == "torch.save" and (before := [c for c in of_optimizers if c.order < save.order]):
                message = f"the checkpoint has the state of {before[-1].receiver}, and none of the scaler"
                yield Report(save.line, message)
                break


RULE = Rule(
    Check("AMP115", "lint", __doc__),
    (("scaler", "Scaler"), ("torch.save",), ("state_dict",), (".step(",)),
    _read,
    audit="ampcheck audit train.py:main --checks resume",
)
