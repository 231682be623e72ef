"""`ampcheck.watch` with the checks of autocast's use alone."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ampcheck import watch
from ampcheck.autocast.guards.guard import GUARD_CHECKS
from ampcheck.watch import Watched


def guard(*checks: str, subject: str = "this block", raises: bool = True) -> AbstractContextManager[Watched]:
    return watch(checks=checks or GUARD_CHECKS, name=subject, fail_on="fail" if raises else "never")
