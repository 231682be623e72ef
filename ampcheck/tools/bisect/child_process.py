"""The commands of a process that audits a target in one version: `audit`, then `modules` or `ops`.

root: of the checkout; repository: the user's own; scratch: as in a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ampcheck.core.arguments import LOW
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.core.settings import Target
from ampcheck.core.subject import split_member
from ampcheck.speed.base.checkout import loaded_modules, require_origin
from ampcheck.target import load_placed
from ampcheck.tools.sweep import child_process


def audit(target: Mapping[str, Any], scratch: str, root: str, repository: str) -> tuple[Run | None, str]:
    """The run of a target; or None and the traceback of a defect of ampcheck.

    Raises `UsageError` where code of the repository, if one is named, came from another place than the checkout.
    """
    judged = child_process.audit(target, scratch)
    if repository:
        require_origin(split_member(target["target"])[0], Path(root), Path(repository))
    return judged


def modules(root: str, names: Sequence[str]) -> dict[str, str]:
    """The modules of the checkout that were loaded, and those of these names."""
    return loaded_modules(Path(root), names)


def ops(target: Mapping[str, Any]) -> list[str]:
    """The overloads that a model sends through autocast on its device; empty for another kind of subject."""
    from ampcheck.autocast.calls import measure_calls

    audited = Target(**target)
    with suppress(UsageError):
        subject = load_placed(audited.target, audited.device, arguments=audited.arguments)
        dtype = (*audited.dtype, *LOW)[0]
        return sorted({call.op for call in measure_calls(subject, device=audited.device, dtype=dtype).calls})
    return []
