"""Requires: The optimizer steps before the scheduler of its learning rate: else the first rate is skipped, and PyTorch
warns. A step that a GradScaler skips counts as none.

Measured: scheduler.step() before optimizer.step() or scaler.step(optimizer) among the statements of one block.

Causes: Code of PyTorch before 1.1, where the order was the other one.

Fix: scheduler.step() after the optimizer's; with a scaler only if its scale has not fallen.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.names import is_scheduler, steps_of_optimizers, steps_of_scalers
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import Source


def _read(source: Source) -> Iterator[Report]:
    for scope in source.scopes:
        steps = [*steps_of_optimizers(scope), *steps_of_scalers(scope)]
        for call in scope.of("step"):
            if not is_scheduler(call.receiver) or not call.loops:
                continue
            later = [step for step in steps if step.block[0] == call.block[0] and step.block[1] > call.block[1]]
            earlier = [step for step in steps if step.order < call.order and not step.excludes(call)]
            if later and not earlier:
                yield Report(
                    call.line, f"{call.receiver}.step() runs before {later[0].receiver}.step in line {later[0].line}"
                )


RULE = Rule(
    Check("AMP108", "lint", __doc__),
    (("sched", "Sched"), (".step(",), ("optim", "opt.")),
    _read,
    fails=False,
    audit="ampcheck audit train.py:main --checks scaler-protocol",
)
