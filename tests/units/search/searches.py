"""`assert_property` with the fields of `SearchOptions` as keywords, for tables of settings; single examples."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from ampcheck import Run, assert_property
from ampcheck.core.subject import Subject
from ampcheck.parity.example import Example
from ampcheck.records.property import Look
from ampcheck.search import SearchOptions
from ampcheck.search.evaluate import Evaluator
from ampcheck.search.runner import Runner

_OPTIONS = {field.name for field in fields(SearchOptions)}


def search(model: Any, inputs: Any, **settings: Any) -> Run:
    """The run of a search; without `compile` eager mode only."""
    options = {name: settings.pop(name) for name in list(settings) if name in _OPTIONS}
    return assert_property(model, inputs, **{"compile": False, **settings}, options=SearchOptions(**options))


def evaluator(function: Any, *args: torch.Tensor, dtype: torch.dtype | None = None, **settings: Any) -> Evaluator:
    """What judges examples of a function; without `dtype` in that of its first argument."""
    runner = Runner(Subject((function, args)), dtype or args[0].dtype, native=dtype is None)
    return Evaluator(runner, **settings)


def look(function: Any, *args: torch.Tensor, dtype: torch.dtype | None = None, **settings: Any) -> Look:
    """What one example shows."""
    return evaluator(function, *args, dtype=dtype, **settings).look(Example(args))


def kinds(function: Any, *args: torch.Tensor, dtype: torch.dtype | None = None, **settings: Any) -> list[str]:
    """The kinds of problems of one example."""
    return [problem.kind for problem in look(function, *args, dtype=dtype, **settings).problems]
