"""Observe every op of a block of the user's code, forward and backward, without a reference."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType

import torch

from ampcheck.core.environment import environment
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Run
from ampcheck.numerics.checks import OBSERVABLE, check_numerics
from ampcheck.numerics.ops import OpWatch
from ampcheck.numerics.stats import NumericsStats
from ampcheck.torchtools.trace import Trace


class OpObservation:
    """A context that observes ops. model: the module whose paths findings report; None for source lines only."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._ops = OpWatch()
        self._trace = Trace(model, observers=(self._ops,))

    def __enter__(self) -> OpObservation:
        self._trace.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trace.__exit__(kind, error, trace)

    def stats(self, subject: str) -> NumericsStats:
        """The facts of every op so far."""
        ops = self._ops
        facts = ops.facts()
        return NumericsStats(
            subject=subject,
            arm="",
            format=min((fact.dtype for fact in facts), key=lambda name: format_of(name).bits, default="float32"),
            device="",
            judged=False,
            keeps_nan=ops.keeps_nan(),
            ops=facts,
            low=ops.low,
            casts=ops.casts,
            coverage=Coverage({"ops": len(self._trace.events), "tensors": ops.measured}, dict(ops.unseen)),
        )


def observation_run(stats: NumericsStats, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """The findings about an observed block. checks: out of `OBSERVABLE`, all by default."""
    findings = check_numerics(stats, limits, checks or OBSERVABLE)
    return Run(environment("cpu"), tuple(findings), stats.coverage)
