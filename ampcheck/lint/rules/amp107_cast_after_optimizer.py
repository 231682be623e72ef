"""Requires: A model has its dtype before the optimizer is built: state that exists keeps the old dtype, and an
optimizer with flat or fused copies steps weights that nobody runs.

Measured: In one function, a model is cast to bfloat16 after an optimizer was built from its parameters; a
cast to float16 is AMP106.

Causes: A cast that was added at the end of the set-up.

Fix: Cast first; better, leave the weights in float32 and use autocast.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.rules.amp106_half_weights import cast_and_held
from ampcheck.lint.source import HALF, NARROW, Source


def _read(source: Source) -> Iterator[Report]:
    for scope in source.scopes:
        for cast, optimizer in cast_and_held(source, scope, NARROW - HALF):
            if cast.order > optimizer.order:
                message = f"{cast.receiver} is cast after the optimizer of line {optimizer.line} was built from it"
                yield Report(cast.line, message)


RULE = Rule(
    Check("AMP107", "lint", __doc__),
    (("bfloat16",), ("optim", "Adam"), (".parameters()",)),
    _read,
    audit="ampcheck audit train.py:main --checks optimizer-state,master-weights",
)
