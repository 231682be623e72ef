"""What each verdict means: the text of `ampcheck explain incomplete`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VERDICTS: Mapping[str, str] = MappingProxyType(
    {
        "fail": "The run shows the damage. The only verdict that fails a build (exit code 1, AssertionError).",
        "warn": "A hazard that these inputs do not turn into damage.",
        "undecided": "A measurement whose interval does not decide; more time does.",
        "incomplete": "The subject prevents a check that was asked for: its backward raises in every precision, it "
        "returns no floating tensor, no gradient leads to a module that ran, its optimizer never steps. Nothing "
        "failed, and nothing was judged; the finding says what to change so that it can be.",
        "skip": "The check does not apply to the subject, or this machine lacks what it needs. The reason is given.",
        "pass": "What was looked at is in order. Every pass counts what it rests on; over nothing it is a skip.",
    }
)
