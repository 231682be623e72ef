"""The calls in the first steps of a monitored loop, recorded as an audit records them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ampcheck.records.protocol import ProtocolStats, StepError, applied_nonfinite
from ampcheck.torchtools.reachable import Reached
from ampcheck.training.loop import STEPS, TrainingLoop, ended_by
from ampcheck.training.protocol.recorder import Recorder


class _HandedLoop(TrainingLoop):
    """The parts that the user handed over; it has no step. names: of parameters, by their `id`."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], scaler: Any, names: Mapping[int, str]) -> None:
        self.reached = Reached(optimizers=dict(optimizers), scalers={} if scaler is None else {"scaler": scaler})
        self._names = names

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for path, parameter in super().parameters():
            yield self._names.get(id(parameter), path), parameter


class CallRecord:
    """Records the calls to scaler, optimizers, clipping and schedulers in the first `STEPS` steps inside `recording`.

    optimizers: by their names. scaler: None for none. recorder: one that listens to these steps anyway. They read the
    loss scale, which waits for its device; later ones repeat the same calls, and cost nothing.
    """

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        scaler: Any,
        names: Mapping[int, str],
        recorder: Recorder | None = None,
    ) -> None:
        self._optimizers, self._listens = len(optimizers), recorder is None
        self._parts = {**optimizers, "scaler": scaler}
        self._scalers = () if scaler is None or not scaler.is_enabled() else ("scaler",)
        self._recorder = recorder or Recorder(_HandedLoop(optimizers, scaler, names))
        self._hooks = ExitStack()
        self._ended = 0
        self._between = False
        self._stopped: StepError | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside, up to the end of the last step that counts."""
        try:
            with self._hooks:
                if self._listens:
                    self._recorder.on_backward = self._begin
                    self._hooks.enter_context(self._recorder.listening())
                yield
        except Exception as error:
            self._stopped = ended_by(error, self._recorder.step)
            raise

    def _begin(self, roots: object, scale: float | None) -> None:
        """The first backward pass after a step belongs to the next one."""
        self._recorder.step += self._between
        self._between = False

    def ended(self) -> None:
        """Note that an optimizer was stepped, or its step skipped."""
        self._ended += 1
        if self._ended % self._optimizers or not self._listens:
            return
        self._between = True
        self._recorder.forget_graphs()
        if self._ended >= STEPS * self._optimizers:
            self._hooks.close()

    def read(self, subject: str) -> ProtocolStats:
        """The events so far."""
        events = tuple(self._recorder.renamed(self._parts))
        return ProtocolStats(
            subject,
            events,
            self._recorder.step + 1,
            stopped=self._stopped,
            applied=applied_nonfinite(events) or None,
            scalers=self._scalers,
        )
