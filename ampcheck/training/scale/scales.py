"""The scales of GradScalers: each update makes another one."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch

from ampcheck.stream.calls import subscribed
from ampcheck.torchtools.source import users_line
from ampcheck.torchtools.storage import StorageMap
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.scale.degree import Degree
from ampcheck.training.scale.numbers import Numbers, Read


class Scales:
    """Follows the scales of the scalers in use.

    recorder: what it asks a scaler is not the user's. degrees: takes those of the scales. numbers: takes scales that
    the user reads. used: whether one was. scaling: the degree of the scale while `scaler.scale` multiplies by it.
    reading: whether `scaler.get_scale` runs.
    """

    def __init__(self, recorder: Recorder, degrees: StorageMap[Degree], numbers: Numbers) -> None:
        self.scaling: Degree | None = None
        self.used = self.reading = False
        self._recorder, self._degrees, self._numbers = recorder, degrees, numbers
        self._count = count(1)
        self._by_scaler: dict[int, Degree] = {}  # of the scale that its last update made

    def following(self) -> AbstractContextManager[None]:
        """Follow what runs inside."""
        return subscribed(scaler_scale=self._scale, scaler_get_scale=self._read, scaler_update=self._update)

    def _degree_of_scale(self, scaler: Any) -> Degree:
        """The degree of the scale of a scaler, which its own tensor has from now on."""
        degree = self._by_scaler.setdefault(id(scaler), Degree({next(self._count): 1.0}))
        if isinstance(scale := getattr(scaler, "_scale", None), torch.Tensor):  # of an earlier run; else made on use
            self._degrees.put(scale, degree)
        return degree

    def _scale(self, scaler: Any, *_: object, **__: object) -> Iterator[None]:
        if not scaler.is_enabled():
            return
        self.used, self.scaling = True, self._degree_of_scale(scaler)
        try:
            yield
        finally:
            self.scaling = None

    def _read(self, scaler: Any) -> Generator[None, Any, None]:
        if not scaler.is_enabled() or self._recorder.asks:
            yield
            return
        self.used, self.reading = True, True
        try:
            scale = yield
        finally:
            self.reading = False
        degree = self._degree_of_scale(scaler)
        self._numbers.add(Read(float(scale), degree, users_line(sys._getframe()), self._recorder.step, of_scale=True))

    def _update(self, scaler: Any, *_: object, **__: object) -> Iterator[None]:
        yield
        if self._by_scaler.pop(id(scaler), None) is not None:
            self._degree_of_scale(scaler)
