"""Build wheel and source distribution, check them, and use the wheel in environments without anything else of ours.

    python .ci/wheels.py                 over the packages of this environment: half a minute
    python .ci/wheels.py 2.6.0 2.14.1    with these releases of PyTorch from the package index: gigabytes each
    python .ci/wheels.py --keep dist     leave what was checked in this folder, which must be new

Needs build, twine and pip. Exits with the status of the first command that fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

MODEL = """
import torch
from torch import nn

def subject():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)), (torch.randn(4, 16),)
"""

TESTS = """
import sys
from pathlib import Path

import ampcheck
import pytest
from model import subject

def test_the_wheel_is_imported():
    assert Path(ampcheck.__file__).is_relative_to(sys.prefix)

def test_numerics():
    ampcheck.assert_numerics(*subject(), compile=False)

@pytest.mark.ampcheck("overflow", "autocast-state")
def test_marked():
    model, inputs = subject()
    model(*inputs).sum().backward()

def test_speed(speed):
    speed({"one": lambda: sum(range(999)), "other": lambda: sum(range(999))}, at_least=0.1)
"""


def main(words: list[str]) -> None:
    """Build once; then use the wheel with each release, or with the packages of this environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("releases", nargs="*", default=[""])
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        for release in options.releases:
            with tempfile.TemporaryDirectory() as environment:
                use(wheel, release, Path(environment))
        if options.keep:
            shutil.copytree(folder, options.keep)


def build(folder: Path) -> Path:
    """The wheel, built from the source distribution."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, quiet=True)
    run(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir())
    (wheel,) = folder.glob("*.whl")
    return wheel


def use(wheel: Path, release: str, folder: Path) -> None:
    """Install the wheel into a new environment and run what a new user runs."""
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    if release:
        run(*pip, f"torch=={release}", wheel)
        run(sys.executable, "-m", "pip", "--python", python, "check")
    else:
        run(*pip, "--no-deps", wheel)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    home = folder / "home"
    home.mkdir()
    (home / "model.py").write_text(MODEL, encoding="utf-8")
    (home / "test_model.py").write_text(TESTS, encoding="utf-8")
    command = python.with_name("ampcheck")
    run(command, "policy", "show", "cuda", at=home, quiet=True)
    run(command, "known", "torch", at=home, quiet=True)
    run(command, "policy", "diff", "2.6", "2.12", "--device", "cuda", at=home, quiet=True)
    run(command, "guide", at=home, quiet=True)
    audit = (command, "audit", "--no-compile")
    run(*audit, "--device", "cuda", "model.py:subject", "--html", "page.html", at=home, quiet=True)
    if release:
        run(*audit, at=home)
    run(python, "-m", "pytest", "-q", "--ampcheck", "-p", "no:cacheprovider", at=home)


def run(*command: str | Path, at: Path | None = None, quiet: bool = False) -> None:
    """Run a command without the PYTHONPATH of this process. quiet: print its output only if it fails."""
    print("$", *command, flush=True)
    done = subprocess.run(
        [*map(str, command)], cwd=at, env=ENVIRONMENT, stdout=subprocess.PIPE if quiet else None, text=True, check=False
    )
    if done.returncode:
        print(done.stdout or "")
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
