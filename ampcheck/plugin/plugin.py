"""The pytest plugin: options, the marker, the fixture; no numerics. Unused, it imports nothing but pytest."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from ampcheck.core.errors import UsageError
from ampcheck.plugin.marker import MARKER, Asked, guarded, watched
from ampcheck.plugin.speed_fixture import SESSION, SPEED_MARKER, Speed, SpeedSession
from ampcheck.plugin.summary import Gather, Report

DEVICES = ("cpu", "cuda", "cuda:N", "xpu", "xpu:N", "mps")
"""What `--ampcheck-device` takes, N being the index of a device."""

OPTIONS = {
    "--ampcheck": ("", "show what ampcheck's asserts and marked tests found, and what they looked at"),
    "--ampcheck-html": ("PATH", "write the findings as one HTML page; implies --ampcheck"),
    "--ampcheck-json": ("PATH", "write the findings as JSON; implies --ampcheck"),
    "--ampcheck-device": ("DEVICE", f"device of the fixture ampcheck_device: {', '.join(DEVICES)} (default: cpu)"),
    "--ampcheck-update": ("", "write the policy locks that tests compare with anew; implies --ampcheck"),
    "--ampcheck-guard": ("", "fail each test that leaves autocast, its precision flags or the default dtype changed"),
    "--ampcheck-history": ("DIR", "append what speed tests measured to the history in this folder; implies --ampcheck"),
}
"""Flag to the name of its value ("" for a switch) and its help. `--ampcheck-html` is `ampcheck_html` in an ini file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add every option and its ini twin."""
    group = parser.getgroup("ampcheck", "mixed precision and compilation (ampcheck)")
    for flag, (value, text) in OPTIONS.items():
        form: dict[str, Any] = {"metavar": value} if value else {"action": "store_const", "const": True}
        group.addoption(flag, default=None, help=text, **form)
        kind: Literal["string", "bool"] = "string" if value else "bool"
        parser.addini(flag[2:].replace("-", "_"), help=text, type=kind, default=None)


@dataclass(frozen=True)
class Settings:
    """What the options and the ini file ask for. The three paths are absolute; a worker of xdist has none of them."""

    enabled: bool
    device: str
    update: bool = False
    guard: bool = False
    html: Path | None = None
    json: Path | None = None
    history: Path | None = None

    @classmethod
    def of(cls, config: pytest.Config) -> Settings:
        """Read and judge the options. Raises `pytest.UsageError` for what cannot be done."""
        html, json, history = (_value(config, f"ampcheck_{name}") for name in ("html", "json", "history"))
        device = _parse_device(_value(config, "ampcheck_device"))
        update, guard = (bool(_value(config, name)) for name in ("ampcheck_update", "ampcheck_guard"))
        written = any(path is not None for path in (html, json, history))
        enabled = bool(_value(config, "ampcheck")) or update or written
        if hasattr(config, "workerinput"):
            return cls(enabled, device, update, guard)
        here = config.invocation_params.dir
        paths = _parse_path("--ampcheck-html", html, here), _parse_path("--ampcheck-json", json, here)
        if paths[0] is not None and paths[0] == paths[1]:
            raise pytest.UsageError(f"--ampcheck-html and --ampcheck-json need a file each, both are {html}")
        return cls(enabled, device, update, guard, *paths, _parse_folder("--ampcheck-history", history, here))


def _value(config: pytest.Config, name: str) -> Any:
    given = config.getoption(name)
    try:
        return config.getini(name) if given is None else given
    except (TypeError, ValueError, pytest.UsageError) as error:
        raise pytest.UsageError(f"{name} of the ini file cannot be read: {error}") from error


def _parse_device(given: str | None) -> str:
    if given is None:
        return "cpu"
    if not re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d+)?", given):
        raise pytest.UsageError(f"--ampcheck-device={given} is no device: choose one of {', '.join(DEVICES)}")
    return given


def _parse_path(flag: str, given: str | None, here: Path) -> Path | None:
    if given is None:
        return None
    path = Path(os.path.abspath(here / given))
    if not given or path.is_dir():
        raise pytest.UsageError(f"{flag}={given} needs the name of a file, not of a folder")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise pytest.UsageError(f"{flag}={given} needs a folder that exists and can be written to: {path.parent}")
    return path


def _parse_folder(flag: str, given: str | None, here: Path) -> Path | None:
    if given is None:
        return None
    path = Path(os.path.abspath(here / given))
    if not given or (path.exists() and not path.is_dir()):
        raise pytest.UsageError(f"{flag}={given} needs the name of a folder, not of a file")
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise pytest.UsageError(f"{flag}={given} needs a folder that can be written to: {existing} cannot")
    return path


_SETTINGS = pytest.StashKey[Settings]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and the two halves of the report where tests are to run and one is wanted."""
    config.addinivalue_line("markers", MARKER)
    config.addinivalue_line("markers", SPEED_MARKER)
    option = config.option
    if option.help or option.collectonly or option.markers or option.showfixtures:
        return
    settings = config.stash[_SETTINGS] = Settings.of(config)
    if settings.enabled:
        config.pluginmanager.register(Gather(settings.update), "ampcheck-gather")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Report(settings), "ampcheck-report")
    speed = config.stash[SESSION] = SpeedSession(config, settings.history)
    config.pluginmanager.register(speed, "ampcheck-speed")


@pytest.hookimpl(wrapper=True, trylast=True)  # the innermost wrapper: it observes the test and no other plugin
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the body of a marked test as its marker asks, and that of every test under a guard where one is wanted."""
    __tracebackhide__ = True
    marker = item.get_closest_marker("ampcheck")
    settings = item.config.stash.get(_SETTINGS, None)
    asked = Asked.of(marker) if marker is not None else None
    if settings is not None and settings.guard:
        asked = guarded(asked)
    if asked is None:
        return (yield)
    raised: BaseException | None = None
    try:
        with watched(item, asked):
            try:
                return (yield)
            except BaseException as error:
                raised = error
                raise
    except (AssertionError, UsageError) as error:
        if error is raised:
            raise
        raise error.with_traceback(None) from None  # the observation's own: its message says where, its frames do not


@pytest.fixture(scope="session")
def ampcheck_device(pytestconfig: pytest.Config) -> str:
    """The device to test on, from `--ampcheck-device` or the ini file's `ampcheck_device`; `cpu` by default.

    Raises `ampcheck.UsageError` where this machine does not have it.
    """
    device = pytestconfig.stash[_SETTINGS].device
    if device != "cpu":
        _require_device(device)
    return device


@pytest.fixture
def speed(request: pytest.FixtureRequest, benchmark: Any, ampcheck_device: str) -> Speed:
    """Measure callables in turn and require a speedup: `speed({"eager": eager, "compiled": compiled}, at_least=1.2)`.

    Defaults come from `@pytest.mark.speed(...)`. pytest-benchmark keeps the times; its options work on them.
    """
    return Speed(request.node, benchmark, ampcheck_device)


def _require_device(device: str) -> None:
    import torch

    kind, _, index = device.partition(":")
    backend: Any = torch.backends.mps if kind == "mps" else getattr(torch, kind)
    if not backend.is_available():
        raise UsageError(f"--ampcheck-device={device}: PyTorch {torch.__version__} finds no such device here, use cpu")
    if index and int(index) >= (count := backend.device_count()):
        raise UsageError(f"--ampcheck-device={device}: this machine has {count} of them, the first is {kind}:0")
