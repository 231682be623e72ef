"""Arguments of a test of which some are slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_cases(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """`cases` for `parametrize`, those in `slow` marked. Raises `ValueError` for a slow case that does not exist."""
    cases = list(cases)
    names = [case.values[0] if hasattr(case, "values") and hasattr(case, "marks") else case for case in cases]
    if missing := [name for name in slow if name not in names]:
        raise ValueError(f"no such cases: {missing}")
    marked = []
    for name, case in zip(names, cases, strict=True):
        if name not in slow:
            marked.append(case)
        elif hasattr(case, "marks"):
            marked.append(pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow]))
        else:
            values = name if isinstance(name, tuple) else (name,)
            marked.append(pytest.param(*values, marks=pytest.mark.slow))
    return marked
