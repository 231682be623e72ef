"""Packages that some features need and a plain `pip install ampcheck` does not install."""

from __future__ import annotations

from importlib.util import find_spec

from ampcheck.core.errors import UsageError

EXTRAS = {"report": ("matplotlib",)}
"""The modules of each extra in pyproject.toml."""


def require_extra(extra: str, feature: str) -> None:
    """Raise `UsageError` if a module of an extra is missing.

    Call it before the work begins, not when its result is drawn. feature: what the user asked for, such as "--html".
    """
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{feature} needs {' and '.join(missing)}, which is not installed: pip install 'ampcheck[{extra}]'"
        )
