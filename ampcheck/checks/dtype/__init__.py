"""Dtypes of losses, of modules, and of what lives across steps: what the checks of this family share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ampcheck.core.check import Check, Evidence
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import listed
from ampcheck.records.state import DtypePolicy, Role, StateDtypeStats, StateTensor

LISTED = 3
"""Names in a message."""

_NOUNS: Mapping[str, str] = MappingProxyType(
    {
        "parameter": "parameters",
        "gradient": "gradients",
        "state": "optimizer state",
        "buffer": "buffers",
        "copy": "copies of weights",
    }
)
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "parameter": "keep the weights in float32 and let autocast cast them (no model.half() or model.bfloat16())",
        "gradient": (
            "a gradient has the dtype of its parameter: keep the parameters in float32, or cast before it is summed"
        ),
        "state": "create the optimizer on float32 parameters: its state takes their dtype",
        "buffer": "keep buffers in float32 when the model is cast: buffer.float() after model.to(dtype)",
        "copy": "keep copies that follow the weights (an EMA) in float32: their updates are far below a 16-bit spacing",
    }
)


def judged(stats: StateDtypeStats, check: Check, role: str, tensors: list[StateTensor]) -> list[Finding]:
    """The tensors of a role by the policy, or what is known of them without one."""
    if not tensors:
        return []
    noun = noun_of(role)
    if stats.policy is not None:
        text = f"all {len(tensors)} {noun} have the dtypes of {stats.policy}: {count_of(tensors)}"
        return misfits(stats, stats.policy, check, role, tensors) or [check.passed(stats.subject, text, len(tensors))]
    low = [tensor for tensor in tensors if tensor.low]
    if not low:
        return [check.passed(stats.subject, f"all {len(tensors)} {noun} are float32 or wider", len(tensors))]
    text = f"no policy is declared to judge the dtype by; {list_of(low, len(tensors), noun)}. See stagnation for what "
    return [check.skip(stats.subject, f"{text}they lose, now and later")]


def misfits(
    stats: StateDtypeStats, policy: DtypePolicy, check: Check, role: str, tensors: list[StateTensor]
) -> list[Finding]:
    """The tensors whose dtype the policy does not allow. A copy that may not change in a step only warns."""
    bad = [tensor for tensor in tensors if not _fits(policy, role, tensor)]
    if not bad:
        return []
    sure = [tensor for tensor in bad if role != "copy" or tensor.changed]
    bad = sure or bad
    allowed = " or ".join(policy.allowed(role, bad[0].name))
    message = f"{policy} allows {allowed} for {_NOUNS[role]}; {list_of(bad, len(tensors), noun_of(role))}"
    verdict = Verdict.FAIL if sure else Verdict.WARN
    return [check.finding(verdict, stats.subject, message, **evidence_of(bad, _HINTS[role]))]


def _fits(policy: DtypePolicy, role: str, tensor: StateTensor) -> bool:
    allowed = policy.allowed(role, tensor.name)
    counter = role == "state" and tensor.elements <= 1 and not tensor.low
    return not allowed or tensor.dtype in allowed or counter


def of_roles(stats: StateDtypeStats, *roles: Role) -> list[StateTensor]:
    """The floating tensors of these roles."""
    return [tensor for tensor in stats.tensors if tensor.floating and tensor.role in roles]


def noun_of(role: str) -> str:
    """The tensors of a role in a message."""
    return "tensors of optimizer state" if role == "state" else _NOUNS[role]


def list_of(bad: list[StateTensor], whole: int, noun: str, what: str = "") -> str:
    """Return how many are so, with the first names."""
    names = listed((f"{tensor.name} ({tensor.dtype})" for tensor in bad), LISTED)
    verb = what or f"{'is' if len(bad) == 1 else 'are'} {' or '.join(dict.fromkeys(tensor.dtype for tensor in bad))}"
    return f"{len(bad)} of {whole} {noun} {verb}: {names}"


def count_of(tensors: Sequence[StateTensor]) -> str:
    """Return how many there are of each dtype."""
    return ", ".join(f"{number} {dtype}" for dtype, number in Counter(tensor.dtype for tensor in tensors).items())


def evidence_of(bad: Sequence[StateTensor], hint: str, kind: str = "") -> Evidence:
    """Return what a finding about tensors shows."""
    where = Where("update", module=bad[0].name)
    return Evidence(where=where, observed=len(bad), limit=0.0, unit="tensors", hint=hint, kind=kind)
