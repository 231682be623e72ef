"""Requires: A compiled model returns the dtypes, shapes and containers of eager mode, and every op returns the dtypes
of eager mode. Fails where they differ; of ops, warns where one of the two raises and the other does not.

Measured: The outputs of each call, eager and compiled. For ops alone (assert_dtypes): each op that the model sends
through autocast runs by itself, with the arguments of the model, in eager mode and compiled by Inductor, both under
autocast. Each choice of dtypes counts once.

Causes: An op whose own kernel calls ops that autocast casts, which the compiled graph never sees; operands of two
dtypes that only one of the two accepts.

Fix: Cast the result where the dtype matters, call the op with autocast disabled, bring operands to one dtype.
"""

from __future__ import annotations

from ampcheck.checks.compile import (
    not_run,
    passed,
)
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Where
from ampcheck.core.subject import EVERY
from ampcheck.records.accuracy import AccuracyStats

CHECK = Check("compiled-dtype", "compile", __doc__, subjects=EVERY, needs=("AccuracyStats",), order=560)

_LISTED = 4
"""Differences that a message names."""


def check(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    """Compiled code returns the dtypes, shapes and structure of eager mode."""
    if skipped := not_run(stats, CHECK):
        return [skipped]
    eager, compiled = stats.eager_shapes, stats.compiled_shapes
    paths = list(dict.fromkeys((*eager, *compiled)))
    wrong = [path for path in paths if eager.get(path) != compiled.get(path)]
    if not wrong:
        text = f"{len(paths)} outputs and containers have eager mode's dtype, shape and type"
        return [passed(stats, CHECK, text, len(paths))]
    differences = "; ".join(
        f"{path} is {eager.get(path, 'absent')} in eager mode and {compiled.get(path, 'absent')} compiled"
        for path in wrong[:_LISTED]
    )
    message = f"compiled code must give what eager mode gives; {len(wrong)} of {len(paths)} differ: {differences}"
    hint = "cast the result where its dtype matters, or call the op that makes it with autocast disabled"
    where, count = Where("forward"), len(wrong)
    return [CHECK.fail(stats.name, message, where=where, observed=count, limit=0.0, unit="outputs", hint=hint)]
