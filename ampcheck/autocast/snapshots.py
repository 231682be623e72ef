"""The snapshots that ampcheck carries: one a minor release of PyTorch, each made by running that release."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ampcheck.autocast.policy import Snapshot, release_of
from ampcheck.core.errors import UsageError

DATA = Path(__file__).parent / "data"


@cache
def releases() -> tuple[str, ...]:
    """The releases with a snapshot, oldest first: `("2.4", ..., "2.15")`."""
    found = (path.stem.removeprefix("torch-") for path in DATA.glob("torch-*.json"))
    return tuple(sorted(found, key=_number))


@cache
def load_release(release: str) -> Snapshot:
    """The shipped snapshot of a release, such as `2.13` or `2.13.0+cpu`. Raises `UsageError` naming those there are."""
    short = release_of(release)
    if short not in releases():
        raise UsageError(f"ampcheck carries no policy of PyTorch {release}; it has {', '.join(releases()) or 'none'}")
    return Snapshot.load(DATA / f"torch-{short}.json")


def nearest(version: str) -> Snapshot:
    """The snapshot of this version's release; without one that of the newest release before it, else the oldest.

    Raises `UsageError` where nothing was shipped, which is a broken installation.
    """
    if not releases():
        raise UsageError(f"ampcheck's own policy snapshots are missing from {DATA.name}: install ampcheck anew")
    wanted = _number(release_of(version))
    before = [release for release in releases() if _number(release) <= wanted]
    return load_release(before[-1] if before else releases()[0])


def _number(release: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in release.split("."))
    except ValueError:
        raise UsageError(f"{release!r} is no release of PyTorch; write one as 2.13") from None
