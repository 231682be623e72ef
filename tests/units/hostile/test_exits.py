"""Exit codes: 0 only after a verdict, 1 for findings, 2 for what cannot be judged, 3 for a defect of ampcheck."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import main

import ampcheck.audit

assert ampcheck.audit

TARGETS = """
import os, sys
import pytest, torch
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        self.odd(torch.is_autocast_enabled("cpu"))
        return self.inner(x)


def model(odd):
    return lambda: (type("Odd", (Base,), {"odd": lambda self, low: odd(low)})(), (torch.randn(3, 4),))


exits = model(lambda low: sys.exit(0))
exits_low = model(lambda low: sys.exit(0) if low else None)
skips = model(lambda low: pytest.skip("not here"))
interrupts = model(lambda low: exec("raise KeyboardInterrupt"))
leaves = model(lambda low: os._exit(0))


class Length(Base):
    def named_parameters(self, *args, **kwargs):
        raise RuntimeError("boom")

    def odd(self, low):
        pass


def raises_elsewhere():
    return Length(), (torch.randn(3, 4),)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).half(), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x))


def half():
    return Half(), (torch.randn(3, 4).half(),)


def step():
    inner = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    return {"model": inner, "optimizer": optimizer, "step": lambda number: sys.exit(0)}


def call():
    return lambda: sys.exit(0)


def factory():
    sys.exit(0)


def later():
    async def run():
        return 0.0

    return run


def yields():
    yield Base(), ()


def forks():
    def run():
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        torch.ones(3).sum()

    return run
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "odd_targets.py").write_text(TARGETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if "odd_targets" in name]:
        del sys.modules[name]


AUDIT = ("--no-compile", "--dtype", "float16")


@pytest.mark.parametrize(
    ("command", "target", "options", "code", "said"),
    [
        ("audit", "exits", AUDIT, 2, "raises in float32 too.*SystemExit: 0"),
        ("audit", "exits_low", AUDIT, 1, "SystemExit: 0"),
        ("audit", "step", (), 1, "SystemExit: 0"),
        ("audit", "call", (), 1, "SystemExit: 0"),
        ("audit", "factory", (), 2, "factory raised SystemExit: 0"),
        ("audit", "later", (), 2, "must run when it is called; it returned a coroutine"),
        ("audit", "yields", (), 2, "must run when it is called; it returned a generator"),
        ("audit", "skips", AUDIT, 2, "Skipped: not here, which only a test runner understands"),
        ("audit", "interrupts", AUDIT, 130, "interrupted"),
        ("audit", "raises_elsewhere", AUDIT, 2, "its own code raises RuntimeError: boom at odd_targets.py:"),
        ("blame", "exits", AUDIT, 2, "SystemExit: 0"),
        ("blame", "exits_low", (*AUDIT, "--no-time"), 1, "SystemExit: 0"),
        ("blame", "half", ("--no-compile",), 1, "Half"),
        ("policy lock", "exits", (), 2, "SystemExit: 0"),
        ("policy lock", "exits_low", (), 2, "SystemExit: 0"),
    ],
)
def test_a_command_ends_in_the_code_that_its_subject_deserves(
    command: str, target: str, options: Any, code: int, said: str, folder: Path, capfd: Any
) -> None:
    assert main([*command.split(), f"odd_targets.py:{target}", *options]) == code
    out, err = capfd.readouterr()
    text = " ".join((out + err).split())
    assert re.search(said, text), text
    assert "Traceback" not in err


def test_a_defect_of_ampcheck_ends_in_3_with_its_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        return {}["no such key"]

    broken.__code__ = broken.__code__.replace(co_filename=str(Path(main.__code__.co_filename)))  # as a line of ours
    monkeypatch.setattr(sys.modules["ampcheck.audit"], "judge_subject", broken)
    assert main(["audit", "odd_targets.py:exits_low", *AUDIT]) == 3
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert "KeyError: 'no such key'; this is a defect of ampcheck, and nothing was judged" in err


def test_help_lists_every_exit_code(capfd: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = " ".join(capfd.readouterr().out.split())
    for code in ("0:", "1:", "2:", "3:", "130:"):
        assert code in out
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "start.md").read_text(encoding="utf-8")
    assert "3, an internal error" in guide


@pytest.mark.usefixtures("warm_processes")
def test_a_subject_that_ends_the_process_is_no_pass(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ampcheck", "audit", "odd_targets.py:leaves", *AUDIT],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "incomplete: the process that judged ended with exit code 0 before it had a verdict" in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_may_end_as_it_likes(folder: Path, capfd: Any) -> None:
    assert main(["audit", "odd_targets.py:forks"]) == 0
    assert "os._exit" not in capfd.readouterr().err
    assert os._exit.__module__ == "posix"
