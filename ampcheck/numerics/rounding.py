"""Eager mode with other roundings: how far an honest run may lie from float64, whatever this one run's luck was.

One run shows one draw of its rounding errors, and that draw may be zero: a sum that came out exact, an output whose
roundings cancel. Stochastic arithmetic (Vignes, 1993; Parker, 1997) shows more of them. Each op is evaluated in float64
on the inputs that it has in the run, and rounded up or down at random, in proportion to the distance, to the dtype that
the op gives. A result that its format represents stays exact.

What a float32 sum of n terms loses is added once, as `sum_error` says: to the terms of a sum of inputs or products,
which then cancel as the terms do (its backward error, Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
4.2), to the result of every other sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.subject import Subject
from ampcheck.numerics.arms import run_arm
from ampcheck.numerics.compare import compare
from ampcheck.numerics.decisions import Decisions
from ampcheck.numerics.equal_random import DRAWS, EqualRandom
from ampcheck.numerics.measure import Eager
from ampcheck.numerics.ops import EXACT, draws_numbers_itself, floating, in_float64, summed_terms
from ampcheck.numerics.reference import Reference
from ampcheck.torchtools.copying import prepare
from ampcheck.torchtools.pytree import is_plain, map_tensors, tensors
from ampcheck.torchtools.trace import OpEvent, Trace

_CASTS = frozenset(("aten::_to_copy", "aten::copy_", "aten::set_"))
"""Rounded to nearest in every arm: what the user casts is part of the function, and compiled code must round it too."""

_SUMS = frozenset(("sum", "mean", "nansum"))
_PRODUCTS = frozenset("mm addmm bmm baddbmm dot mv linear convolution _convolution addmv addbmm".split())
"""Sums whose terms are the inputs, or products of two of them: they cancel as their inputs do."""

_RECURRENCES = ("cumsum", "cumprod", "_logcumsumexp")
"""Running sums, by the beginning of their names: each term is added to what all before it gave."""

BLOCK = 256
"""Terms that a library adds one after the other before it adds the sums of such blocks."""

REROUNDINGS = (3, 12)
"""How often eager mode is run with other roundings before an excess counts: the size of a large tensor's error is known
after a few, that of a single number after a dozen."""


def sum_error(terms: int, *, recurrent: bool = False) -> float:
    """How far a float32 sum of so many terms usually moves each of them, relative to it; 0 for one term.

    Roundings are independent, so that k of them add up to the square root of k (Higham and Mary, A new approach to
    probabilistic rounding error analysis, SISC 41, 2019). Each term goes through all roundings of a recurrence; in a
    kernel, through those of its block of `BLOCK` terms and of the tree of the blocks above (Blanchard, Higham and Mary,
    A class of fast and accurate summation algorithms, SISC 42, 2020).
    """
    if terms <= 1:
        return 0.0
    roundings = terms if recurrent or terms <= BLOCK else BLOCK + math.log2(terms / BLOCK)
    return math.sqrt(roundings) * format_of("float32").unit_roundoff


class Rerounded:
    """An observer of `ampcheck.torchtools.trace.Trace` that gives every rounding another outcome, forward and backward.

    Casts, ops that only move values, and draws of random numbers are left alone, and so is what float64 cannot repeat.
    seed: of the outcomes. rounded: how many results have been rounded again.
    """

    def __init__(self, seed: int) -> None:
        self.rounded = 0
        self._generator = torch.Generator().manual_seed(seed)

    def before(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Keep the inputs of an op that overwrites them."""
        if op._schema.is_mutable:
            return map_tensors(lambda t: t.clone() if t.is_floating_point() else t, (args, kwargs))
        return None

    def after(self, event: OpEvent, op: Any, args: Any, kwargs: Any, out: Any, held: Any) -> Any:
        """Replace the result."""
        name = op._schema.name
        if op.is_view or name in EXACT or name in _CASTS or name in DRAWS:
            return None
        given = held if held is not None else (args, kwargs)
        results = floating(out)
        if not results or not floating(given) or draws_numbers_itself(op, given):
            return None
        if any(not is_plain(t) or t.is_complex() for _, t in tensors((given, out))):
            return None
        short = name.rpartition("::")[2]
        recurrent = short.startswith(_RECURRENCES)
        slacks = [sum_error(summed_terms(op, given, r), recurrent=recurrent) for r in results]
        if short in _SUMS or short in _PRODUCTS:
            factors = 2 if short in _PRODUCTS else 1  # a product is moved by as much as a term is
            amount, slacks = max(slacks) / math.sqrt(factors), [0.0] * len(results)
            wide = in_float64(op, map_tensors(lambda t: self._moved(t, amount), given) if amount else given)
        else:
            wide = in_float64(op, given)
        twins = floating(wide)
        if [t.shape for t in twins] != [r.shape for r in results]:
            return None
        self.rounded += len(results)
        written = {id(t) for _, t in tensors((args, kwargs))}
        moved = [self._moved(w, slack) for w, slack in zip(twins, slacks, strict=True)]
        again = iter([self._round(r, w) for r, w in zip(results, moved, strict=True)])

        def replaced(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or not tensor.numel():
                return tensor
            target = tensor if id(tensor) in written else tensor.clone()
            return target.copy_(next(again))

        return map_tensors(replaced, out)

    def _moved(self, tensor: torch.Tensor, amount: float) -> torch.Tensor:
        """Each element up or down by this part of itself, in float64."""
        if not amount or not tensor.is_floating_point() or not tensor.numel():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=self._generator).to(tensor.device, torch.float64) * 2 - 1
        return tensor.double() * (1 + amount * signs)

    def _round(self, result: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        """`wide` to one of its two neighbours in the dtype of `result`; `result` where one of them is not finite."""
        fmt = format_of(result.dtype)
        exponent = torch.frexp(wide).exponent
        step = torch.ldexp(torch.full_like(wide, fmt.unit_roundoff), exponent).clamp_(min=fmt.smallest_subnormal)
        chance = torch.rand(wide.shape, dtype=torch.float64, generator=self._generator).to(wide.device)
        rounded = ((wide / step + chance).floor() * step).to(result.dtype)
        return torch.where(rounded.isfinite() & wide.isfinite() & result.isfinite(), rounded, result)


def usual_errors(
    subject: Subject,
    reference: Reference,
    eager: Eager,
    dtype: torch.dtype,
    *,
    times: int,
    device: str = "cpu",
    native: bool = False,
) -> dict[tuple[str, str], float]:
    """How far outputs and gradients of eager mode usually lie from the reference, by kind and name.

    The root mean square over so many runs with other roundings; those in which a decision falls otherwise are left out.
    eager: what `measure_numerics` gave for the same dtype, device and `native`.
    """
    wide = reference.following(eager.decisions) if eager.stats.followed else reference.wide
    squares: dict[tuple[str, str], list[float]] = {}
    for seed in range(1, times + 1):
        prepared, decisions = prepare(subject, device=device), Decisions()
        outcome = run_arm(
            prepared,
            device=device,
            dtype=None if native else dtype,
            loss=subject.loss,
            around=[EqualRandom(), Trace(prepared.root, observers=(Rerounded(seed), decisions))],
            scale=eager.stats.scale,
            keep_modules=False,
            finite_loss=reference.finite_loss,
        )
        if outcome.error is None and not eager.decisions.flips(decisions):
            for error in compare(outcome, wide, [], []):
                if math.isfinite(error.error):
                    squares.setdefault((error.kind, error.name), []).append(error.error**2)
    return {key: math.sqrt(sum(found) / len(found)) for key, found in squares.items()}
