"""ampcheck: proof, from inside pytest, that a mixed-precision and compiled PyTorch model is numerically safe.

Public names are found when they are first used (PEP 562): importing ampcheck imports no torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors; tests/test_import.py keeps this and _HOME the same
    from ampcheck.audit import assert_numerics as assert_numerics
    from ampcheck.audit import audit as audit
    from ampcheck.audit import observe as observe
    from ampcheck.autocast.drift import assert_policy as assert_policy
    from ampcheck.autocast.emulate import emulate as emulate
    from ampcheck.autocast.guards.guard import guard as guard
    from ampcheck.autocast.locks.lock import assert_policy_lock as assert_policy_lock
    from ampcheck.autocast.observe import assert_op_dtypes as assert_op_dtypes
    from ampcheck.autocast.observe import observe_ops as observe_ops
    from ampcheck.autocast.probe import measure_policy as measure_policy
    from ampcheck.compiled.assert_compiled import assert_compiled as assert_compiled
    from ampcheck.compiled.blame.blame import blame as blame
    from ampcheck.compiled.graph.judge import observe_graphs as observe_graphs
    from ampcheck.core.chart import Chart as Chart
    from ampcheck.core.errors import UsageError as UsageError
    from ampcheck.core.formats import FORMATS as FORMATS
    from ampcheck.core.formats import FloatFormat as FloatFormat
    from ampcheck.core.formats import format_of as format_of
    from ampcheck.core.limits import Limits as Limits
    from ampcheck.core.run import Coverage as Coverage
    from ampcheck.core.run import Finding as Finding
    from ampcheck.core.run import Run as Run
    from ampcheck.core.run import Table as Table
    from ampcheck.core.run import Verdict as Verdict
    from ampcheck.core.run import Where as Where
    from ampcheck.core.run import collect as collect
    from ampcheck.core.run import emit as emit
    from ampcheck.core.subject import Subject as Subject
    from ampcheck.health import health_of as health_of
    from ampcheck.numerics.module_dtypes import assert_dtypes as assert_dtypes
    from ampcheck.search.judge import assert_amp_property as assert_amp_property
    from ampcheck.speed.base.judge import assert_base as assert_base
    from ampcheck.speed.judge import assert_speed as assert_speed
    from ampcheck.speed.paired import measure_speed as measure_speed
    from ampcheck.speed.startup.judge import assert_startup as assert_startup
    from ampcheck.training.judge import assert_training as assert_training
    from ampcheck.training.state_dtypes.policies import ResidencyPolicy as ResidencyPolicy
    from ampcheck.watch import watch as watch

    __version__: str

_HOME = {
    "FORMATS": "ampcheck.core.formats",
    "Chart": "ampcheck.core.chart",
    "Coverage": "ampcheck.core.run",
    "Finding": "ampcheck.core.run",
    "FloatFormat": "ampcheck.core.formats",
    "Limits": "ampcheck.core.limits",
    "ResidencyPolicy": "ampcheck.training.state_dtypes.policies",
    "Run": "ampcheck.core.run",
    "Subject": "ampcheck.core.subject",
    "Table": "ampcheck.core.run",
    "UsageError": "ampcheck.core.errors",
    "Verdict": "ampcheck.core.run",
    "Where": "ampcheck.core.run",
    "assert_amp_property": "ampcheck.search.judge",
    "assert_base": "ampcheck.speed.base.judge",
    "assert_compiled": "ampcheck.compiled.assert_compiled",
    "assert_dtypes": "ampcheck.numerics.module_dtypes",
    "assert_numerics": "ampcheck.audit",
    "assert_op_dtypes": "ampcheck.autocast.observe",
    "assert_policy": "ampcheck.autocast.drift",
    "assert_policy_lock": "ampcheck.autocast.locks.lock",
    "assert_speed": "ampcheck.speed.judge",
    "assert_startup": "ampcheck.speed.startup.judge",
    "assert_training": "ampcheck.training.judge",
    "audit": "ampcheck.audit",
    "blame": "ampcheck.compiled.blame.blame",
    "collect": "ampcheck.core.run",
    "emit": "ampcheck.core.run",
    "emulate": "ampcheck.autocast.emulate",
    "format_of": "ampcheck.core.formats",
    "guard": "ampcheck.autocast.guards.guard",
    "health_of": "ampcheck.health",
    "measure_policy": "ampcheck.autocast.probe",
    "measure_speed": "ampcheck.speed.paired",
    "observe": "ampcheck.audit",
    "observe_graphs": "ampcheck.compiled.graph.judge",
    "observe_ops": "ampcheck.autocast.observe",
    "watch": "ampcheck.watch",
}
"""Each public name and the module that it is imported from."""

__all__ = [
    "FORMATS",
    "Chart",
    "Coverage",
    "Finding",
    "FloatFormat",
    "Limits",
    "ResidencyPolicy",
    "Run",
    "Subject",
    "Table",
    "UsageError",
    "Verdict",
    "Where",
    "__version__",
    "assert_amp_property",
    "assert_base",
    "assert_compiled",
    "assert_dtypes",
    "assert_numerics",
    "assert_op_dtypes",
    "assert_policy",
    "assert_policy_lock",
    "assert_speed",
    "assert_startup",
    "assert_training",
    "audit",
    "blame",
    "collect",
    "emit",
    "emulate",
    "format_of",
    "guard",
    "health_of",
    "measure_policy",
    "measure_speed",
    "observe",
    "observe_graphs",
    "observe_ops",
    "watch",
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


class _Package(ModuleType):
    """Keeps a public name from being hidden by the module of the same name, as `audit` has one.

    Importing `ampcheck.audit` sets the attribute `audit` of this package to the module, and Python would never ask
    `__getattr__` again. The module stays in `sys.modules`: `from ampcheck.audit import ...` works as ever.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _HOME or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
