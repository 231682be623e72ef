"""The verdicts: the text of `ampcheck explain incomplete`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VERDICTS: Mapping[str, str] = MappingProxyType(
    {
        "fail": "The run shows the damage. The only verdict that fails a build (exit code 1, AssertionError).",
        "warn": "A risk that did not cause a failure with these inputs.",
        "undecided": "The interval of a measurement includes the limit; more time narrows it.",
        "incomplete": "The subject prevents a requested check: its backward raises in every precision, it returns no "
        "floating tensor, no module that ran gets a gradient, its optimizer never steps. Nothing failed, and nothing "
        "was judged; the finding says what to change.",
        "skip": "The check does not apply to the subject, or this machine lacks what it needs. The reason is given.",
        "pass": "The requirement is met. Every pass counts its observations; without any it is a skip.",
    }
)
