"""Interface of a training logger: receives metrics per step and the final run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ampcheck.core.run import Run


class Writer(Protocol):
    """Writes what a watch measures. `ampcheck.callbacks.tensorboard` and `ampcheck.callbacks.wandb` have one each."""

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a measured step by name. step: of the optimizer, skipped ones counted, from 0."""

    def write_run(self, run: Run) -> None:
        """Write the findings when the watch ends; nothing follows."""
