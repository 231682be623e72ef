"""A git repository in a folder, for the tests of base against head."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

MODEL = """
import torch
from torch import nn

TIMES = {times}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(96, 96)

    def forward(self, x):
        for _ in range(TIMES):
            x = torch.relu(self.layer(x))
        return x


def make():
    torch.manual_seed(0)
    return Model().eval(), torch.randn(48, 96)
"""
"""A model whose time is its `times`: 24 against 26 are 8.3 per cent more of the same work."""


def git(folder, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def repository(folder: Path, **files) -> Path:
    """A repository with one commit of these files; `a__b.py` stands for `a/b.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.email", "someone@example.com")
    git(folder, "config", "user.name", "someone")
    commit(folder, "first", **files)
    return folder


def commit(folder: Path, message: str, **files) -> str:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")
