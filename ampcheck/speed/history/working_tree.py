"""Of which commit a measurement is."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 20.0


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit's full name and whether the working tree differed from it; "" and None where there is no git."""

    name: str = ""
    dirty: bool | None = None


def commit_of(folder: Path | None = None, *, besides: Path | None = None) -> Commit:
    """The commit that is checked out at `folder` (the working directory).

    besides: a folder whose changes do not count, such as the history itself. Files that git does not track do not
    count either.
    """
    place = folder or Path.cwd()
    name = _git(place, "rev-parse", "--verify", "HEAD")
    root = _git(place, "rev-parse", "--show-toplevel")
    if not name or not root:
        return Commit()
    paths = [":(top)"]
    if besides is not None and besides.resolve().is_relative_to(inside := Path(root).resolve()):
        left_out = besides.resolve().relative_to(inside).as_posix()
        paths += [f":(top,exclude,literal){left_out}"] if left_out != "." else []
    changes = _git(place, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    return Commit(name, None if changes is None else bool(changes))


def _git(place: Path, *command: str) -> str | None:
    """What git says, stripped; None where it cannot say."""
    try:
        done = subprocess.run(
            ["git", "-C", str(place), *command], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
