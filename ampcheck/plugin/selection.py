"""Which tests are speed tests, and which of those that once ran this session ought to run. No numerics."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest


class Scope:
    """What a session was asked to run: the tests under its paths, without those that were deselected."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._there: frozenset[str] = frozenset()
        self._left: frozenset[str] = frozenset()

    def collected(self, items: Iterable[pytest.Item]) -> None:
        """Take the tests that there are, before any are deselected."""
        self._there = frozenset(item.nodeid for item in items)

    def selected(self, items: Iterable[pytest.Item]) -> None:
        """Take those that are to run."""
        self._left = self._there.difference(item.nodeid for item in items)

    def asks_for(self, name: str) -> bool:
        """Whether this session ought to have run the test of this name.

        Not one that was deselected (by -k, or as another shard's), nor one beside the paths that were given. A test
        that is gone was not collected: it is asked for where its file lies under the paths and no option narrows them.
        """
        if name in self._there:
            return name not in self._left
        option = self.config.getoption
        if any(option(narrow, None) for narrow in ("lf", "ignore", "ignore_glob", "pyargs")):
            return False
        root, here = self.config.rootpath, self.config.invocation_params.dir
        return any(_covers(here, argument, root, name) for argument in self.config.args)


def _covers(here: Path, argument: str, root: Path, name: str) -> bool:
    """Whether pytest's argument, a path or a node id seen from `here`, takes the test of this name in."""
    path, _, inside = argument.partition("::")
    file, _, test = name.partition("::")
    given, wanted = (Path(os.path.abspath(folder / one)) for folder, one in ((here, path), (root, file)))
    if not wanted.is_relative_to(given):
        return False
    return not inside or test == inside or test.startswith((f"{inside}::", f"{inside}["))


def is_speed_test(item: pytest.Item) -> bool:
    """Whether the item takes our fixture, at once or by one that overrides it; a parameter `speed` is none."""
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for found in reversed(known.get("speed", ())):
        made = getattr(found.func, "__module__", ""), getattr(found.func, "__name__", "")
        if made == ("ampcheck.plugin.plugin", "speed"):
            return True
        if "speed" not in found.argnames:
            return False
    return False


def why_disabled(config: pytest.Config) -> str:
    """Why pytest-benchmark measures nothing in this session; "" where it does."""
    option = config.getoption
    if option("benchmark_skip", False) and not option("benchmark_only", False):
        return "--benchmark-skip is on"
    if option("benchmark_disable", False) and not option("benchmark_enable", False):
        return "--benchmark-disable is on"
    if hasattr(config, "workerinput") or option("dist", "no") != "no":
        return "tests run side by side under xdist"
    return ""
