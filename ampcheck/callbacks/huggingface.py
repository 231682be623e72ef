"""Watch what a Hugging Face `Trainer` trains."""

from __future__ import annotations

import logging
from typing import Any

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("ampcheck.callbacks.huggingface needs transformers and accelerate: install them") from error

from ampcheck.callbacks.session import Path, Session
from ampcheck.core.limits import Limits
from ampcheck.core.run import Run

_log = logging.getLogger("ampcheck")


class AmpcheckCallback(TrainerCallback):
    """`Trainer(..., callbacks=[AmpcheckCallback()])` watches training with `ampcheck.watch`.

    Model, optimizer and scaler are those of the Trainer. At the end the run is emitted (`ampcheck.collect`), kept as
    `run`, and its verdicts are counted in `trainer.state.log_history` and the log. every, level, name, limits: see
    `ampcheck.watch`. raises: whether a failure raises `AssertionError` out of `trainer.train()`. json, html: where the
    run is written.

    The Trainer tells no callback of an exception. `with AmpcheckCallback() as callback: ...` around `train()` ends the
    watch then too, as does the next training with this callback.
    """

    def __init__(
        self,
        *,
        every: int = 10,
        level: str = "casts",
        name: str = "",
        limits: Limits | None = None,
        raises: bool = False,
        json: Path | None = None,
        html: Path | None = None,
    ) -> None:
        self._session = Session(every=every, level=level, name=name, limits=limits, raises=raises, json=json, html=html)

    @property
    def run(self) -> Run | None:
        """What was found in the last training; None before its end."""
        return self._session.run

    def __enter__(self) -> AmpcheckCallback:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._session.entered:
            self._session.leave()
            self._session.report(raises=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        optimizer = kwargs["optimizer"]  # Accelerate's, which holds the scaler
        self._session.enter(kwargs["model"], optimizer, getattr(optimizer, "scaler", None))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note the loss that the Trainer logs."""
        if logs and isinstance(logs.get("loss"), (int, float)):
            self._session.step(logs["loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the watch and report."""
        if not self._session.entered:
            return
        self._session.leave()
        counts = self._session.counts()
        state.log_history.append({**counts, "epoch": state.epoch, "step": state.global_step})
        if state.is_world_process_zero:
            _log.info("%s", ", ".join(f"{name} {count}" for name, count in counts.items()))
        self._session.report(writes=state.is_world_process_zero)
