"""Records of a search, by hand."""

from __future__ import annotations

from typing import Any

from ampcheck.core.run import Coverage
from ampcheck.records.property import Breaking, Problem, PropertyStats


class Written:
    """An example that shows itself."""

    def code(self) -> str:
        return "torch.tensor([12.0])"


def record(*problems: Problem, **fields: Any) -> PropertyStats:
    """A search of 200 examples that these problems break."""
    breakings = tuple(Breaking(Written(), problem, found_after=3) for problem in problems)
    known = {"name": "f", "format": "float16", "examples": 200, "budget": 200, "elements": 400}
    return PropertyStats(**{**known, "breakings": breakings, "coverage": Coverage({"elements": 400}), **fields})
