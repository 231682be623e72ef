"""Write what a watch measures for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError(
        "ampcheck.callbacks.tensorboard needs tensorboard: pip install 'ampcheck[tensorboard]'"
    ) from error

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.report.markdown import tables_of


class TensorBoardWriter:
    """`seen.follow(TensorBoardWriter("runs/amp"))` in a block of `ampcheck.watch`, or `AmpcheckCallback(writer=...)`.

    Scalars: the figures of each measured step as `ampcheck/NAME`, and at the end the number of findings of each verdict
    as `ampcheck/findings/VERDICT`. Texts: the findings, and their tables. where: a folder, or a `SummaryWriter` of your
    own, which stays open. Raises `UsageError` for anything else.
    """

    def __init__(self, where: Any) -> None:
        self._own = isinstance(where, (str, os.PathLike))
        if not self._own and not all(hasattr(where, name) for name in ("add_scalar", "add_text", "flush")):
            raise UsageError(f"TensorBoardWriter takes a folder or a SummaryWriter; found {type(where).__name__}")
        self._writer = SummaryWriter(os.fspath(where)) if self._own else where
        self._last = 0

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a measured step."""
        self._last = step
        for name, value in values.items():
            self._writer.add_scalar(f"ampcheck/{name}", value, step)

    def write_run(self, run: Run) -> None:
        """Write the findings."""
        for verdict, count in run.counts().items():
            self._writer.add_scalar(f"ampcheck/findings/{verdict}", count, self._last)
        indented = "\n".join(f"    {line}" for line in str(run).splitlines())  # Markdown's block of code
        self._writer.add_text("ampcheck/findings", indented, self._last)
        self._writer.add_text("ampcheck/tables", tables_of(run), self._last)
        if self._own:
            self._writer.close()
        else:
            self._writer.flush()
