"""`assert_property` with the fields of `SearchOptions` as keywords, for tables of settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ampcheck import Run, assert_property
from ampcheck.search import SearchOptions

_OPTIONS = {field.name for field in fields(SearchOptions)}


def search(model: Any, inputs: Any, **settings: Any) -> Run:
    """The run of a search; without `compile` eager mode only."""
    options = {name: settings.pop(name) for name in list(settings) if name in _OPTIONS}
    return assert_property(model, inputs, **{"compile": False, **settings}, options=SearchOptions(**options))
