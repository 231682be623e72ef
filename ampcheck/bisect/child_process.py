"""The commands of a process that audits a target as one commit has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcheck.core.subject import split_member
from ampcheck.speed.base.checkout import loaded_modules, require_origin
from ampcheck.sweep import child_process

if TYPE_CHECKING:
    from ampcheck.core.run import Run


def commands() -> Commands:
    """The commands: `audit`, then `modules`."""
    return Commands()


class Commands:
    """What a process of a bisection does. root: of the checkout; repository: the user's own; scratch: as in a sweep."""

    def audit(self, target: Mapping[str, Any], scratch: str, root: str, repository: str) -> tuple[Run | None, str]:
        """The run of a target; or None and the traceback of a defect of ampcheck.

        Raises `UsageError` where code of the repository came from another place than the checkout.
        """
        judged = child_process.Commands().audit(target, scratch)
        require_origin(split_member(target["target"])[0], Path(root), Path(repository))
        return judged

    def modules(self, root: str, names: Sequence[str]) -> dict[str, str]:
        """The modules of the checkout that were loaded, and those of these names."""
        return loaded_modules(Path(root), names)
