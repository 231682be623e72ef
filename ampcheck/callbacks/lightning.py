"""Watch what a Lightning `Trainer` trains."""

from __future__ import annotations

from typing import Any

import torch

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError as error:
        raise ImportError("ampcheck.callbacks.lightning needs lightning or pytorch-lightning: install one") from error

from ampcheck.callbacks.session import Path, Session
from ampcheck.core.limits import Limits
from ampcheck.core.run import Run


class AmpcheckCallback(Callback):
    """`Trainer(..., callbacks=[AmpcheckCallback()])` watches `fit` with `ampcheck.watch`.

    Model, optimizers and scaler are those of the Trainer. At the end, also after an exception, the run is emitted
    (`ampcheck.collect`), kept as `run`, and its verdicts are counted by the Trainer's loggers. every, level, name,
    limits: see `ampcheck.watch`. raises: whether a failure raises `AssertionError` out of `fit`. json, html: where the
    run is written.
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
        super().__init__()
        self._session = Session(every=every, level=level, name=name, limits=limits, raises=raises, json=json, html=html)

    @property
    def run(self) -> Run | None:
        """What was found in the last training; None before its end."""
        return self._session.run

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._session.enter(pl_module, trainer.optimizers, scaler)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the loss of the batch."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._session.step(loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the watch and report."""
        self._end(trainer, raises=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the watch and report, without an exception of its own."""
        self._end(trainer, raises=False)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the watch where nothing else has."""
        self._end(trainer, raises=False)

    def _end(self, trainer: Any, *, raises: bool) -> None:
        if not self._session.entered:
            return
        self._session.leave()
        for logger in trainer.loggers:
            logger.log_metrics(self._session.counts(), step=trainer.global_step)
        self._session.report(writes=trainer.is_global_zero, raises=raises)
