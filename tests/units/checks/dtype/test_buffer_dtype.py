"""The check buffer-dtype, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.checks.dtype.buffer_dtype import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.state import DtypePolicy, Role
from checks.dtype.records import state, tensor

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP
FULL = ("float32",)


def test_buffers_and_copies_are_judged_by_the_policy() -> None:
    strict = DtypePolicy(buffer=FULL, copy=FULL)
    table = tensor(Role.BUFFER, "bfloat16", "table")
    average = tensor(Role.COPY, "bfloat16", "ema.weight", changed=True)
    assert [f.verdict for f in check(state(table, average, policy=strict), Limits())] == [FAIL, FAIL]
    assert [f.verdict for f in check(state(table), Limits())] == [SKIP]
    assert [f.verdict for f in check(state(tensor(Role.BUFFER)), Limits())] == [PASS]


def test_a_copy_that_no_step_changes_may_have_any_dtype() -> None:
    teacher = tensor(Role.COPY, "bfloat16", "teacher.weight", changed=False)
    assert [f.verdict for f in check(state(teacher, policy=DtypePolicy(copy=FULL)), Limits())] == [SKIP]
    unknown = replace(teacher, changed=None)
    assert [f.verdict for f in check(state(unknown, policy=DtypePolicy(copy=FULL)), Limits())] == [WARN]
