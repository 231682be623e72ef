"""Write what a watch measures to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    import wandb
except ImportError as error:
    raise ImportError("ampcheck.callbacks.wandb needs wandb: pip install 'ampcheck[wandb]'") from error

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict

_COLUMNS = ("verdict", "check", "subject", "where", "message", "hint")


class WandbWriter:
    """`seen.follow(WandbWriter())` in a block of `ampcheck.watch`, or `AmpcheckCallback(writer=WandbWriter())`.

    Logged are the figures of each measured step as `ampcheck/NAME` over `ampcheck/step`, and at the end the table
    `ampcheck/findings`; the summary has the number of findings of each verdict and the text of all. run: of
    `wandb.init`, by default the active one. Raises `UsageError` where there is none.
    """

    def __init__(self, run: Any = None) -> None:
        active = wandb.run if run is None else run
        if active is None:
            raise UsageError("WandbWriter needs a run: call wandb.init(...) before it, or pass the run")
        if not all(hasattr(active, name) for name in ("log", "summary", "define_metric")):
            raise UsageError(f"WandbWriter takes a run of wandb.init; found {type(active).__name__}")
        self._run = active
        # A step of its own: the run's step is the user's, and W&B drops what is logged to an earlier one.
        self._run.define_metric("ampcheck/step")
        self._run.define_metric("ampcheck/*", step_metric="ampcheck/step")

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures of a measured step."""
        self._run.log({"ampcheck/step": step, **{f"ampcheck/{name}": value for name, value in values.items()}})

    def write_run(self, run: Run) -> None:
        """Log the findings."""
        rows = [
            [str(f.verdict), f.check, f.subject, str(f.where), f.message, f.hint]
            for f in run.findings
            if f.verdict is not Verdict.PASS
        ]
        self._run.log({"ampcheck/findings": wandb.Table(columns=list(_COLUMNS), data=rows)})
        self._run.summary.update({f"ampcheck/{verdict}": count for verdict, count in run.counts().items()})
        self._run.summary["ampcheck/text"] = str(run)
