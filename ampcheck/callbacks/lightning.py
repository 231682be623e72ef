"""Watch the training of a Lightning `Trainer`."""

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

from ampcheck.callbacks.base import WatchCallback


class AmpcheckCallback(WatchCallback, Callback):
    """`Trainer(..., callbacks=[AmpcheckCallback()])` watches `fit` with `ampcheck.watch`.

    Model, optimizers and scaler are those of the Trainer. At the end, also after an exception, the run is emitted
    (`ampcheck.collect`), printed, kept as `run`, and its verdicts are counted by the Trainer's loggers. every, level,
    name, limits: see `ampcheck.watch`. fail_on: which verdicts raise `AssertionError` out of `fit`, see there. json,
    html: where the run is written. writer: such as `ampcheck.callbacks.tensorboard.TensorBoardWriter`.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._begin(pl_module, trainer.optimizers, scaler, writes=trainer.is_global_zero)

    def on_train_batch_end(
        self, trainer: object, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Record the loss of the batch."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._step(loss)

    def on_train_end(self, trainer: object, pl_module: object) -> None:
        """End the watch and report."""
        self._finish(trainer, raises=True)

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """End the watch and report, without an exception of its own."""
        self._finish(trainer, raises=False)

    def teardown(self, trainer: object, pl_module: object, stage: str) -> None:
        """End the watch where no other hook has."""
        self._finish(trainer, raises=False)

    def _finish(self, trainer: Any, *, raises: bool) -> None:
        counts = self._end()
        if counts is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(counts, step=trainer.global_step)
        self._report(writes=trainer.is_global_zero, raises=raises)
