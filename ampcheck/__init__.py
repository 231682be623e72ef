"""ampcheck: proof, from inside pytest, that a mixed-precision and compiled PyTorch model is numerically safe.

Public names are found when they are first used (PEP 562): importing ampcheck imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors; tests/test_import.py keeps this and _HOME the same
    from ampcheck.errors import UsageError as UsageError
    from ampcheck.record import Chart as Chart
    from ampcheck.record import Coverage as Coverage
    from ampcheck.record import Finding as Finding
    from ampcheck.record import Run as Run
    from ampcheck.record import Table as Table
    from ampcheck.record import Verdict as Verdict
    from ampcheck.record import Where as Where
    from ampcheck.record import collect as collect
    from ampcheck.record import emit as emit

    __version__: str

_HOME = {
    "Chart": "ampcheck.record",
    "Coverage": "ampcheck.record",
    "Finding": "ampcheck.record",
    "Run": "ampcheck.record",
    "Table": "ampcheck.record",
    "UsageError": "ampcheck.errors",
    "Verdict": "ampcheck.record",
    "Where": "ampcheck.record",
    "collect": "ampcheck.record",
    "emit": "ampcheck.record",
}
"""Each public name and the module that defines it. No name may be a module's too, which would hide it."""

__all__ = [
    "Chart",
    "Coverage",
    "Finding",
    "Run",
    "Table",
    "UsageError",
    "Verdict",
    "Where",
    "__version__",
    "collect",
    "emit",
]

if not TYPE_CHECKING:  # a type checker that saw it would accept every misspelt name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("ampcheck")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
