"""The commands of a process of a sweep: the members of a collection; the audit of one target, or its compilation."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ampcheck.core.errors import UsageError
from ampcheck.core.settings import Target
from ampcheck.core.subject import load_attribute, load_collection

if TYPE_CHECKING:
    from ampcheck.core.run import Run


def commands() -> Commands:
    """The commands: `members`, `audit` or `compilation`, once."""
    return Commands()


class Commands:
    """What a process of a sweep does."""

    def members(self, collection: str) -> list[tuple[str, str]]:
        """The names of a collection and their families, from `META` beside it: name to {"family": ...}."""
        names = load_collection(collection)
        meta: Mapping[str, Any] = {}
        with suppress(UsageError):
            meta = load_attribute(f"{collection.rpartition(':')[0]}:META")
        return [(name, str(meta[name]["family"]) if name in meta else "") for name in names]

    def audit(self, target: Mapping[str, Any]) -> tuple[Run | None, str]:
        """The run of a target; or None and the traceback of a defect of ampcheck."""
        from ampcheck.target import audit_target

        return _guarded(audit_target, target)

    def compilation(self, target: Mapping[str, Any]) -> tuple[Run | None, str]:
        """The same for `measure_compilation`."""
        from ampcheck.sweep.compilation import measure_compilation

        return _guarded(measure_compilation, target)


def _guarded(judge: Callable[[Target], Run | None], target: Mapping[str, Any]) -> tuple[Run | None, str]:
    warnings.simplefilter("ignore")  # of the packages of a hundred models
    try:
        return judge(Target(**target)), ""
    except UsageError:
        raise
    except Exception:  # noqa: BLE001  # a crash of ampcheck must not end the sweep
        return None, traceback.format_exc()
