"""Log-probabilities per token: how far two executions are apart at each, and how much of that rounding explains.

The difference of two values is what their roundings make of it, the errors of both against float64, and what remains
between their exact values: another function, or a decision near a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ampcheck.core.arguments import parse_number
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Table
from ampcheck.core.text import counted, listed
from ampcheck.facts.memory import dtype_name
from ampcheck.facts.norms import finite_parts
from ampcheck.parity.execution import Execution
from ampcheck.records.results import JUDGED_UNIT, MOVE
from ampcheck.shadow.bounds import floor_of
from ampcheck.shadow.compare import Result

_SHOWN = 12
"""Tokens in the table, at the most: those beyond their bounds, and those that differ most."""

_DEVIATIONS, _ROUNDINGS = 4.0, 2.0
"""Bound of the error of a single number, in effects of moving the data and in its own honest errors."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Log-probabilities that `assert_parity` compares token by token.

        assert_parity(trainer, engine, (tokens,), tokens="logprobs")
        assert_parity(trainer, engine, (tokens,), tokens=Tokens("logprobs", clip=0.1))

    path: of the output; empty for the only one. clip: half the width of the band around 1 outside of which policy
    optimization clips a ratio of probabilities; PPO's by default (Schulman et al., 2017, arXiv:1707.06347).
    """

    path: str = ""
    clip: float = 0.2

    def __post_init__(self) -> None:
        parse_number(self.clip, "clip of Tokens")


def tokens_of(runs: Sequence[Execution], tokens: Tokens) -> tuple[Table, ...]:
    """Return a table of the elements of the output; none where both give it in other shapes. Raises `UsageError` where
    there is no such output."""
    path = tokens.path
    results = [run.results.get(("output", path, 0)) for run in runs]
    a, b = (None if result is None or result.reference is None else finite_parts(result.value) for result in results)
    if a is None or b is None:
        outputs = {key[1]: result for key, result in runs[0].results.items() if key[0] == "output"}
        names = [repr(name) for name, result in outputs.items() if result.reference is not None]
        of = f", which is {dtype_name(outputs[path].value.dtype)}" if path in outputs else ""
        raise UsageError(
            f"tokens must be the path of an output of log-probabilities: {listed(names) or 'none'}; found {path!r}{of}"
        )
    if a.shape != b.shape:
        return ()
    (error, limit), (other, more) = (_error_and_limit(result) for result in results if result is not None)
    apart, rounding, limit = (b - a).abs(), (other - error).abs(), limit + more
    rest = (b - a - (other - error)).abs()  # of exact values
    share = torch.minimum(rounding, limit) / (rounding + rest).clamp_min(1e-300)
    share = share.where(apart > 0, 1.0)
    beyond = apart > limit
    order = (beyond * (1 + apart.amax()) + apart).reshape(-1).argsort(descending=True)[:_SHOWN]
    places = torch.ones(a.shape).nonzero()[order].tolist()
    columns = [t.reshape(-1)[order].tolist() for t in (a, b, b - a, share, limit, beyond)]
    rows = [(", ".join(map(str, place)), *row) for place, *row in zip(places, *columns, strict=True)]
    explained = float((share * apart).sum()) / (float(apart.sum()) or 1.0) if bool(apart.any()) else 1.0
    note = (
        f"{counted(a.numel(), 'tokens')} differ by up to {float(apart.amax()):.2g}; rounding explains {explained:.3g} "
    )
    note += f"of the difference; {int(beyond.sum()):,} beyond their bounds"
    clipped, by_rounding = (float(((d.exp() - 1).abs() > tokens.clip).double().mean()) for d in (b - a, other - error))
    note += f"; {clipped:.2%} have a ratio of probabilities outside of 1 ± {tokens.clip:g}, {by_rounding:.2%} by "
    note += "rounding alone"
    titles = ("token", "a", "b", "difference", "share of rounding", "bound", "beyond")
    return (Table("Log-probabilities per token", titles, rows, "parity", note),)


def _error_and_limit(result: Result) -> tuple[torch.Tensor, torch.Tensor]:
    """The errors of the elements against float64, and honest ones; one sample of the spread of an element says little
    without the others."""
    reference = result.reference
    assert reference is not None
    exact, moved = finite_parts(reference.exact), finite_parts(reference.moved)
    spread = (moved - exact).abs()
    spread = torch.maximum(spread, spread.square().mean().sqrt())
    sums = 1.0 if reference.unit >= JUDGED_UNIT else result.terms**0.5  # whose order float32 shows
    rounding = _ROUNDINGS * floor_of(result.roundings) * reference.unit * exact.abs()
    return finite_parts(result.value) - exact, sums * (_DEVIATIONS * spread * (reference.unit / MOVE) + rounding)
