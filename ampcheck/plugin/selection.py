"""Which tests are speed tests, and which tests of earlier sessions this session should have run."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest


def should_have_run(config: pytest.Config, name: str, collected: Collection[str], selected: Collection[str]) -> bool:
    """Return whether this session should have run the test of this name.

    Not if it was deselected (by -k, or as a part of another shard) or is outside the paths of the session. A test
    that was not collected is included if its file is under the paths and no option narrows them: it was removed.
    """
    if name in collected:
        return name in selected
    if any(config.getoption(narrow, None) for narrow in ("lf", "ignore", "ignore_glob", "pyargs")):
        return False
    folder = config.invocation_params.dir
    return any(_covers(folder, argument, config.rootpath, name) for argument in config.args)


def _covers(folder: Path, argument: str, root: Path, name: str) -> bool:
    """Return whether pytest's argument, a path or a node id relative to `folder`, includes the test of this name."""
    path, _, inside = argument.partition("::")
    file, _, test = name.partition("::")
    if not Path(os.path.abspath(root / file)).is_relative_to(os.path.abspath(folder / path)):
        return False
    return not inside or test == inside or test.startswith((f"{inside}::", f"{inside}["))


def is_speed_test(item: pytest.Item) -> bool:
    """Return whether the item uses our fixture `speed`, directly or through a fixture that overrides it."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for definition in reversed(definitions.get("speed", ())):
        function = definition.func
        if (getattr(function, "__module__", ""), getattr(function, "__name__", "")) == _FIXTURE:
            return True
        if "speed" not in definition.argnames:
            return False
    return False


_FIXTURE = ("ampcheck.plugin.plugin", "speed")


def why_disabled(config: pytest.Config) -> str:
    """The reason why pytest-benchmark measures nothing in this session; "" if it measures."""
    option = config.getoption
    if option("benchmark_skip", False) and not option("benchmark_only", False):
        return "--benchmark-skip is on"
    if option("benchmark_disable", False) and not option("benchmark_enable", False):
        return "--benchmark-disable is on"
    if hasattr(config, "workerinput") or option("dist", "no") != "no":
        return "tests run side by side under xdist"
    return ""
