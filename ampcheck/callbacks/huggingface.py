"""Watch the training of a Hugging Face `Trainer`."""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("ampcheck.callbacks.huggingface needs transformers and accelerate: install them") from error

from ampcheck.callbacks.base import WatchCallback


class AmpcheckCallback(WatchCallback, TrainerCallback):
    """`Trainer(..., callbacks=[AmpcheckCallback()])` watches training with `ampcheck.watch`.

    Model, optimizer and scaler are those of the Trainer. At the end the run is emitted (`ampcheck.collect`), printed,
    kept as `run`, and its verdicts are counted in `trainer.state.log_history`. every, level, name, limits: see
    `ampcheck.watch`. fail_on: which verdicts raise `AssertionError` out of `trainer.train()`, see there. json, html:
    where the run is written. writer: such as `ampcheck.callbacks.tensorboard.TensorBoardWriter`.

    The Trainer has no callback for exceptions. `with AmpcheckCallback() as callback: ...` around `train()` ends the
    watch then too, as does the next training with this callback.
    """

    def __enter__(self) -> AmpcheckCallback:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._end() is not None:
            self._report(raises=False)

    def on_train_begin(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        """Begin to watch."""
        optimizer = kwargs["optimizer"]  # Accelerate's, which has the scaler
        self._begin(kwargs["model"], optimizer, getattr(optimizer, "scaler", None), writes=state.is_world_process_zero)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the loss that the Trainer logs."""
        if logs and isinstance(logs.get("loss"), (int, float)):
            self._step(logs["loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the watch and report."""
        counts = self._end()
        if counts is None:
            return
        state.log_history.append({**counts, "epoch": state.epoch, "step": state.global_step})
        self._report(writes=state.is_world_process_zero)
