"""ampcheck: pytest-based checks that a mixed-precision and compiled PyTorch model is numerically safe.

Public names are imported when they are first used (PEP 562): importing ampcheck does not import torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors; tests/contract/test_import.py compares it with _MODULES
    from ampcheck.audit import assert_numerics as assert_numerics
    from ampcheck.audit import audit as audit
    from ampcheck.autocast.emulate import emulate as emulate
    from ampcheck.autocast.judge import assert_policy as assert_policy
    from ampcheck.causes.blame import blame as blame
    from ampcheck.compiled.assert_compiled import assert_compiled as assert_compiled
    from ampcheck.core.errors import UsageError as UsageError
    from ampcheck.core.finding import Finding as Finding
    from ampcheck.core.finding import Verdict as Verdict
    from ampcheck.core.finding import Where as Where
    from ampcheck.core.limits import Limits as Limits
    from ampcheck.core.run import Run as Run
    from ampcheck.core.subject import Subject as Subject
    from ampcheck.numerics.module_dtypes import assert_dtypes as assert_dtypes
    from ampcheck.parity.assert_kernel import assert_kernel as assert_kernel
    from ampcheck.parity.assert_parity import assert_parity as assert_parity
    from ampcheck.search.judge import assert_property as assert_property
    from ampcheck.search.loop import SearchOptions as SearchOptions
    from ampcheck.sharded import ShardedStep as ShardedStep
    from ampcheck.sharded import assert_sharded as assert_sharded
    from ampcheck.speed.assert_speed import assert_speed as assert_speed
    from ampcheck.speed.options import SpeedOptions as SpeedOptions
    from ampcheck.training.judge import assert_training as assert_training
    from ampcheck.watch import watch as watch

    __version__: str

_MODULES = {
    "Finding": "core.finding",
    "Limits": "core.limits",
    "Run": "core.run",
    "SearchOptions": "search.loop",
    "ShardedStep": "sharded",
    "SpeedOptions": "speed.options",
    "Subject": "core.subject",
    "UsageError": "core.errors",
    "Verdict": "core.finding",
    "Where": "core.finding",
    "assert_compiled": "compiled.assert_compiled",
    "assert_dtypes": "numerics.module_dtypes",
    "assert_kernel": "parity.assert_kernel",
    "assert_numerics": "audit",
    "assert_parity": "parity.assert_parity",
    "assert_policy": "autocast.judge",
    "assert_property": "search.judge",
    "assert_sharded": "sharded",
    "assert_speed": "speed.assert_speed",
    "assert_training": "training.judge",
    "audit": "audit",
    "blame": "causes.blame",
    "emulate": "autocast.emulate",
    "watch": "watch",
}
"""Each public name and the module of this package that defines it."""

__all__ = ["__version__", *_MODULES]

if not TYPE_CHECKING:  # a type checker that sees it accepts every misspelt name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("ampcheck")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps a submodule from replacing the public name of the same name, such as `audit`.

    Importing `ampcheck.audit` sets the attribute `audit` of this package to the module, after which Python no longer
    calls `__getattr__`. The module is still in `sys.modules`: `from ampcheck.audit import ...` works.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
