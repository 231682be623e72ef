"""A small model in a file of its own, and ways to lock it and to spoil its lock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcheck import Run, assert_policy
from ampcheck.autocast.locks.file import NAME
from ampcheck.autocast.locks.lock import LockTarget, write_lock

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.RMSNorm(8)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.up(x))
        return self.down(x)

def net():
    return Net(), (torch.ones(2, 4),)

def attention():
    return (lambda x: (x @ x).softmax(-1)), (torch.ones(4, 4),)

def banned():
    return (lambda x: nn.functional.binary_cross_entropy(x.sigmoid(), x)), (torch.ones(4),)

def broken():
    return (lambda x: (x @ x).index_add(0, torch.zeros(1, dtype=torch.int64), x[:1])), (torch.ones(4, 4),)

class Products(nn.Module):
    def forward(self, a):
        b = a @ a
        c = a @ a.t()
        return b + c

def products():
    return nn.Sequential(Products()), (torch.ones(2, 2),)

def half_broken():
    return (lambda x: (x @ x).index_add(0, torch.zeros(1, dtype=torch.int64), x[:1].half())), (torch.ones(4, 4),)

def loop():
    return {"step": lambda i: 0.0}

def call():
    return lambda: None

def idle():
    return (lambda x: x + 1), (torch.ones(4),)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


def lock(path: Path, factory: str = "net", **options: Any) -> Run:
    return write_lock(LockTarget.of(f"{path}:{factory}"), **options)


def text_of(path: Path) -> str:
    return (path.parent / NAME).read_text(encoding="utf-8")


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(text_of(path))
    change(data)
    (path.parent / NAME).write_text(json.dumps(data), encoding="utf-8")


def failure(path: Path, factory: str = "net", **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_policy(f"{path}:{factory}", **options)
    return str(caught.value)


def line_of(code: str) -> int:
    return next(number for number, line in enumerate(MODEL.splitlines(), 1) if code in line)
