"""NaN and infinities of the reference: handed in with the data, made by an op, or meant by the model.

Elements that are NaN in float64 cannot be compared, so a NaN that reaches an output or a gradient fails here, before
any low precision is judged. Infinities that a model means (a mask, padded logits) are compared in place and sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampcheck.catalog.numerics import LOW_PRECISION_ERROR, NONFINITE_REFERENCE
from ampcheck.core.check import LISTED
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import listed
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.findings import who
from ampcheck.numerics.reference_stats import ReferenceStats, Values
from ampcheck.numerics.stats import NumericsStats, Raised, gradient_module


def check_reference(stats: ReferenceStats) -> list[Finding]:
    """The model runs in float32, and its outputs and gradients are numbers in float64."""
    found = [_raised(stats, stats.raised)] if stats.raised is not None else []
    reached = [values for values in stats.outputs if values.nan]
    if reached:
        return [*found, *_nan_outputs(stats, reached)]
    if stats.outputs and all(values.infinite == values.numel for values in stats.outputs):
        message = (
            f"an output must hold finite values to compare; every element of {_listed(stats.outputs)} is infinite in "
            f"{stats.how}"
        )
        where = stats.made[0].where if stats.made else Where(phase="forward")
        return [*found, _failure(stats, message, where, sum(v.infinite for v in stats.outputs), _OP_HINT)]
    if bad := [values for values in stats.gradients if values.nan or values.infinite]:
        return [*found, _nonfinite_gradients(stats, bad)]
    if bad := [values for values in stats.losses if values.nan or values.infinite]:
        message = f"a loss must be finite in {stats.how}; that of the subject is {'NaN' if bad[0].nan else 'infinite'}"
        where = stats.made[-1].where if stats.made else Where(phase="forward")
        return [*found, _failure(stats, message, where, len(bad), _OP_HINT, unit="losses")]
    numel = sum(values.numel for values in (*stats.outputs, *stats.gradients))
    infinite = sum(values.infinite for values in stats.outputs)
    text = f"no NaN among {numel:,} elements of outputs and gradients in {stats.how}"
    if infinite:
        text += f"; {infinite:,} infinities are compared in place and sign"
    return [*found, NONFINITE_REFERENCE.passed(stats.arm, text, numel, observed=0, limit=0, unit="elements")]


def check_observed(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Of a block without a reference: no op makes a NaN that float64 makes as well, given the same inputs.

    It fails where a result with a NaN is in use when the block ends, else it warns: where() may have left it out.
    """
    if stats.judged:
        return []  # judged once for all arms, see `check_reference`
    made = [fact for fact in stats.ops if fact.nan and not fact.limited]
    if not made:
        calls = sum(fact.calls for fact in stats.ops)
        text = "no op made a NaN that float64 makes as well"
        return [NONFINITE_REFERENCE.passed(who(stats), text, calls, observed=0, limit=0, unit="elements")]
    count = float(sum(fact.nan for fact in made))
    end = "a result with a NaN is in use at the end" if stats.keeps_nan else "nothing holds a NaN at the end"
    verdict = Verdict.FAIL if stats.keeps_nan else Verdict.WARN
    message = f"{_made(made)} in every precision; {end}"
    place = made[0].where
    return [
        NONFINITE_REFERENCE.finding(
            verdict, who(stats), message, where=place, observed=count, limit=0, unit="elements", hint=_OP_HINT
        )
    ]


_CAST_HINT = (
    "the model itself computes here in 16 bits, whatever the precision of the run: keep the value in float32, or scale "
    "it down before the cast"
)
_OP_HINT = (
    "no precision mends this: keep the argument in the domain of the op (clamp before log, sqrt, acos, pow), guard the "
    "divisor, and give every softmax row an element that is not masked"
)


def _nan_outputs(stats: ReferenceStats, reached: list[Values]) -> Iterator[Finding]:
    nan = sum(values.nan for values in reached)
    seen = f"{nan:,} of {sum(v.numel for v in reached):,} elements of {_listed(reached)} are NaN in {stats.how}"
    if stats.handed_in:
        first = stats.handed_in[0]
        bad = _listed(stats.handed_in, holding=True)
        module = "" if first.kind == "input" else gradient_module(first.name)
        hint = "fill or mask missing inputs, and load weights that were saved before they became NaN"
        message = f"inputs and weights must be finite; {bad}, and {seen}"
        yield _failure(stats, message, Where(phase="forward", module=module), nan, hint)
    made = [fact for fact in stats.made if fact.nan and fact.where.phase == "forward"]
    casts = [fact for fact in stats.made if fact.produced and format_of(fact.dtype).bits <= 16]
    if made and casts and casts[0].index < made[0].index:
        yield _failure(stats, f"{_made(casts)} in {casts[0].dtype}, and {seen}", casts[0].where, nan, _CAST_HINT)
    elif made:
        yield _failure(stats, f"{_made(made)}, and {seen}", made[0].where, nan, _OP_HINT)
    elif written := [fact for fact in stats.made if fact.written]:
        message = f"{seen}: the model writes NaN itself, and a NaN cannot be compared"
        hint = "pad with -inf or a finite value, or return the mask with the values"
        where = written[0].where
        yield NONFINITE_REFERENCE.incomplete(
            stats.arm, message, where=where, observed=nan, limit=0, unit="elements", hint=hint
        )
    elif not stats.handed_in:
        message = f"outputs must be numbers; {seen}, and no op was seen to make them from finite inputs"
        yield _failure(stats, message, Where(phase="forward"), nan, _OP_HINT)


def _nonfinite_gradients(stats: ReferenceStats, bad: list[Values]) -> Finding:
    message = (
        f"gradients must be finite in {stats.how}; {len(bad)} of {len(stats.gradients)} are not, nearest to the loss "
        f"{bad[-1].name}"
    )
    where = Where(phase="backward", module=gradient_module(bad[-1].name))
    if stats.masked:
        message += "; the outputs hold infinities, which the default loss leaves out, and a loss of your own may not"
        hint = "pass loss= to Subject(...), so that the gradients of the real loss are judged"
        return NONFINITE_REFERENCE.incomplete(stats.arm, message, where=where, hint=hint)
    made = [fact for fact in stats.made if fact.where.phase == "backward"]
    if made:
        message, where = f"{message}; {_made(made)}", made[0].where
    hint = (
        "the derivative has a pole where forward has a value: clamp before sqrt, log, norm and division, and select "
        "with where before the op as well as after it"
    )
    return _failure(stats, message, where, len(bad), hint, unit="gradients")


def _raised(stats: ReferenceStats, raised: Raised) -> Finding:
    message = (
        "what runs under autocast must run in float32 too; without autocast the model raises "
        f"({raised.message}), and an operand comes from this cast to 16 bits"
    )
    hint = "cast to the dtype of what the tensor meets: .to(self.weight.dtype) or .to(x.dtype) instead of a fixed dtype"
    return LOW_PRECISION_ERROR.fail(stats.arm, message, where=raised.where, hint=hint)


def _made(made: list[OpFacts]) -> str:
    """The first op that made NaN or infinities, and how many others did."""
    first = made[0]
    op = first.where.op.removeprefix("aten::")
    count = first.nan or first.produced
    what = "NaN" if first.nan else "infinite"
    text = f"finite inputs must give finite results; {op} made {count:,} of {first.numel:,} elements {what}"
    return text + (f", and {len(made) - 1} further ops do so" if len(made) > 1 else "")


def _failure(
    stats: ReferenceStats, message: str, where: Where, count: int, hint: str, *, unit: str = "elements"
) -> Finding:
    return NONFINITE_REFERENCE.fail(stats.arm, message, where=where, observed=count, limit=0, unit=unit, hint=hint)


def _listed(values: Sequence[Values], *, holding: bool = False) -> str:
    def text(v: Values) -> str:
        return f"{v} holds {v.nan or v.infinite:,} {'NaN' if v.nan else 'infinities'}" if holding else str(v)

    return listed(map(text, values), LISTED)
