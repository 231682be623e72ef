"""The options of the plugin, their ini settings, and how pytest describes the marker."""

from __future__ import annotations

from typing import Any, Literal

import pytest

DEVICES = ("cpu", "cuda", "cuda:N", "xpu", "xpu:N", "mps")
"""Values of `--ampcheck-device`; N is the index of a device."""

OPTIONS = {
    "--ampcheck": ("", "print a summary of the findings and the coverage of ampcheck's asserts and marked tests"),
    "--ampcheck-html": ("PATH", "write the findings as one HTML page; implies --ampcheck"),
    "--ampcheck-json": ("PATH", "write the findings as JSON; implies --ampcheck"),
    "--ampcheck-sarif": ("PATH", "write the findings as SARIF 2.1.0, for code scanning; implies --ampcheck"),
    "--ampcheck-device": (
        "DEVICE",
        f"device of the fixture ampcheck_device, and whose policy --ampcheck-watch follows: {', '.join(DEVICES)} "
        "(default: cpu)",
    ),
    "--ampcheck-update": ("", "write policy locks and goldens instead of comparing with them; implies --ampcheck"),
    "--ampcheck-guard": (
        "",
        "fail a test that changes autocast, a precision flag or the default dtype and does not restore it",
    ),
    "--ampcheck-watch": (
        "",
        "run each test once more under autocast, watched against float64: its findings fail the session, its result "
        "stays that of the run without; implies --ampcheck",
    ),
    "--ampcheck-dtype": (
        "DTYPE",
        "of --ampcheck-watch: autocast to bfloat16 (default) or float16; half: no autocast, models and their floating "
        "inputs in float16",
    ),
    "--ampcheck-compile": ("", "of --ampcheck-watch: run tests that call compiled functions a third time, compiled"),
    "--ampcheck-budget": (
        "FACTOR",
        "of --ampcheck-watch: it takes at most so many times the time of the tests, and half a minute (default: 5)",
    ),
    "--ampcheck-history": (
        "DIR",
        "append the results of speed tests to the history in this folder; implies --ampcheck",
    ),
}
"""Flag to the name of its value ("" for a switch) and its help. `--ampcheck-html` is `ampcheck_html` in an ini file."""

DTYPES = ("bfloat16", "float16", "half")
"""Values of `--ampcheck-dtype`."""

FILES = ("html", "json", "sarif")
"""The files that a session writes, by their options."""

MARKERS = (
    "ampcheck(*checks, lock=False, device=None, speed=None): observe the test's body and fail it with the findings of "
    "these checks, such as 'overflow' or 'autocast-state'; without names, of every check that can be observed. "
    "lock=True (or a path): compare the body's calls under autocast with ampcheck.lock.json in the test's folder. "
    "device='cuda': run the body under that device's autocast policy. speed={'at_least': 1.2}: defaults of the fixture "
    "speed. With lock, device or speed alone nothing is observed. 'parity': compare the two executions that the test "
    "returns, as (a, b, args) or (a, b, args, options of assert_parity). The closest marker counts.",
    "speed: a test of speed; those that ampcheck init writes run only with -m speed.",
)
"""The markers' entries in `pytest --markers`; `marker.py` reads the arguments of the first."""


def add_options(parser: pytest.Parser) -> None:
    """Add every option and its ini setting."""
    group = parser.getgroup("ampcheck", "mixed precision and compilation (ampcheck)")
    for flag, (value, text) in OPTIONS.items():
        form: dict[str, Any] = {"metavar": value} if value else {"action": "store_const", "const": True}
        group.addoption(flag, default=None, help=text, **form)
        kind: Literal["string", "bool"] = "string" if value else "bool"
        parser.addini(flag[2:].replace("-", "_"), help=text, type=kind, default=None)


def are_given(config: pytest.Config) -> bool:
    """Return whether the command line or the ini file sets any option; also if one in the ini file cannot be read."""
    try:
        return any(value(config, flag[2:].replace("-", "_")) is not None for flag in OPTIONS)
    except pytest.UsageError:
        return True


def value(config: pytest.Config, name: str) -> Any:
    """The command line's value of an option, else the ini file's, else None. Raises `pytest.UsageError` for neither."""
    given = config.getoption(name)
    try:
        return config.getini(name) if given is None else given
    except (TypeError, ValueError, pytest.UsageError) as error:
        raise pytest.UsageError(f"{name} of the ini file cannot be read: {error}") from error
