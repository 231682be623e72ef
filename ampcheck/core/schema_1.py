"""Runs of schema 1, in which only the subject of a finding names its arm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ampcheck.core.arm import POLICY, Arm

_DTYPE = r"(?P<dtype>b?float\d+\w*)"
_FORMS = (
    rf"(?P<device>\w+) {_DTYPE}(?:, emulated)?",
    r"(?P<device>\w+) emulated",
    rf"{_DTYPE}(?P<native> native)?(?:, (?P<mode>eager|compiled))?(?:, (?P<device>\w+) emulated)?"
    r"(?: by (?P<backend>.+))?",
)


def with_arm(finding: Mapping[str, Any]) -> dict[str, Any]:
    """A finding with the arm that its subject names; a bracket with anything else is part of the subject."""
    text = finding["subject"].rpartition(" [")[2]
    found = next((match for form in _FORMS if (match := re.fullmatch(rf"{form}\]", text))), None)
    fields = {name: value or "" for name, value in found.groupdict().items()} if found else {}
    native = bool(fields.pop("native", ""))
    mode = POLICY if {*fields} == {"device", "dtype"} else fields.pop("mode", "")
    return {**finding, "arm": asdict(Arm(**fields, mode=mode, native=native))}
