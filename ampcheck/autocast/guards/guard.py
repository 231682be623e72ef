"""Guards: check how a block of code uses autocast while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from torch.utils.checkpoint import CheckpointError

from ampcheck.autocast.emulate import emulated_policy
from ampcheck.autocast.guards.hooks import backward_and_steps, regions, threads
from ampcheck.autocast.guards.recorder import OpsRecorder, Recorder
from ampcheck.autocast.state import devices
from ampcheck.checks import REGISTRY, needing
from ampcheck.checks import findings as findings_of
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.core.arguments import parse_names
from ampcheck.core.environment import environment
from ampcheck.core.errors import EnoughSteps, as_result, brief, require_ran
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where
from ampcheck.ops.table import ROWS
from ampcheck.records.autocast import Call, GuardStats, Raised, Recompute
from ampcheck.records.policy import APPEND_DTYPE, BANNED, FIXED, FP32, LOWER, PROMOTE, SET_DTYPE, Policy
from ampcheck.torchtools.global_state import changed, read_state, restore_state
from ampcheck.torchtools.regions import abandoned_regions
from ampcheck.torchtools.source import scaler_method, users_place

GUARD_CHECKS = needing(GuardStats.__name__)
"""The checks of a guard, by name."""

_RAN = ("ops", "backward calls", "optimizer steps")


class AutocastObservation:
    """A context that records what `checks` need; `stats()` returns it once the block is left.

    checks: names out of `GUARD_CHECKS`, all by default. With `autocast-state` alone nothing is hooked, unless `counted`
    requires it: settings are read on entry and exit. On exit the settings are restored. cut: whether ampcheck itself
    ended the block, within regions that the code would have left. Raises `UsageError` for an unknown check.
    """

    def __init__(self, checks: Collection[str] | None = None, *, counted: bool = False) -> None:
        self.checks = parse_names(checks, "a guard's check", GUARD_CHECKS)
        self.hooked = counted or bool(set(self.checks) - {"autocast-state"})
        self._recorder = Recorder()
        self._before: dict[str, object] = {}
        self._changed: dict[str, tuple[object, object]] = {}
        self._error: BaseException | None = None
        self._open = ExitStack()
        self.ended = self.cut = False

    def __enter__(self) -> AutocastObservation:
        self._before = read_state()
        recorder = self._recorder
        with ExitStack() as opening:
            if self.hooked:
                recorder.thread.followed = True
                for hooks in (regions, backward_and_steps, threads, OpsRecorder):
                    opening.enter_context(hooks(recorder))
            opening.enter_context(abandoned_regions())
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._recorder.active = False
        self.ended = True
        self._open.close()
        self.cut = isinstance(error, EnoughSteps)
        self._error = None if self.cut else error
        after = read_state()
        self._changed = changed(self._before, after)
        if after != self._before:
            restore_state(self._before)

    def stats(self, subject: str) -> GuardStats:
        """Return what was recorded, with the rules of the devices that ran ops."""
        recorder = self._recorder
        calls = recorder.calls.copy()
        causes = _chain(self._error)
        for call, error in recorder.raising:
            calls[replace(call, caught=not any(error is cause for cause in causes))] += 1
        raised = None
        if self._error is not None:
            where = Where("", "", scaler_method(self._error), *users_place(self._error))
            raised = Raised(type(self._error).__name__, str(self._error), where)
        counts = {**recorder.counts, "cached casts": recorder.casts.seen}
        if "autocast-state" in self.checks:
            counts = {"switches": len(self._before), **counts}
        recomputed = recorder.recomputed.copy()
        if not recomputed and isinstance(self._error, CheckpointError):
            # PyTorch's checkpoint compares what it saves and may raise before the first op shows its dtypes.
            recomputed = Counter(recorder.changed_sites.values())
        policies = self._policies(calls, recorder.recomputed)
        ordered = sorted(recomputed, key=lambda op: not _rule_of(policies, op.forward.device, op.op))
        return GuardStats(
            subject=subject,
            settings=len(self._before),
            changed=self._changed,
            counts={name: count for name, count in counts.items() if count},
            regions=recorder.regions,
            idle=dict(recorder.idle),
            unseen=dict(recorder.unseen),
            calls={_with_rule(call, policies): count for call, count in calls.items()},
            crossings=recorder.crossings.copy(),
            stale=recorder.casts.stale.copy(),
            cut=recorder.casts.cut.copy(),
            recomputed={op: recomputed[op] for op in ordered},
            banned=_banned(policies, raised),
            banned_on_cuda=recorder.banned_on_cuda() if "policy-banned" in self.checks else (),
            raised=raised,
        )

    def _policies(self, calls: Collection[Call], recomputed: Collection[Recompute]) -> dict[str, Policy]:
        policies = dict(self._recorder.policies)
        names = {call.policy for call in calls} | {op.forward.device for op in recomputed}
        policies.update((name, emulated_policy(name)) for name in sorted(names - set(policies)))
        autocasts_own = isinstance(self._error, RuntimeError) and "autocast" in str(self._error)
        if autocasts_own and "policy-banned" in self.checks:
            for name in (*sorted(self._recorder.autocast_devices), *devices()):  # first those with autocast on
                policies.setdefault(name, emulated_policy(name))
                if _banned_by(policies[name], str(self._error)):
                    break
        return policies


def judge_call(
    function: Callable[[], object],
    subject_name: str,
    checks: Collection[str] | None = None,
    *,
    must_run: bool = False,
    program: bool = False,
) -> Run:
    """Call `function` under the guards. Nothing is raised and nothing emitted.

    An exception of the function is evidence: where no check explains it, the run fails under `coverage`, since later
    code was not checked. So does a function in which nothing was checked. Where no op ran, though the settings were
    compared, `coverage` is incomplete; must_run: it fails. program: the function runs whole, as `python train.py` does;
    if it trains, what it sets beside autocast is its own. Raises `UsageError` for an unknown check.
    """
    observation = AutocastObservation(checks, counted=must_run)
    error: BaseException | None = None
    try:
        with observation:
            require_ran(function(), subject_name)
    except EnoughSteps:
        pass
    except BaseException as raised:  # noqa: BLE001  # the user's code may raise anything; the run reports it
        error, must_run = as_result(raised), False
    stats = observation.stats(subject_name)
    if program and stats.counts.get("optimizer steps"):  # one that trains sets the precision of its process for itself
        left = {name: pair for name, pair in stats.changed.items() if name.startswith("autocast")}
        stats = replace(stats, changed=left)
    return guard_run(observation, stats, error, must_run=must_run)


def guard_run(
    observation: AutocastObservation, stats: GuardStats, error: BaseException | None = None, *, must_run: bool = False
) -> Run:
    """The findings about observed code. error: what the code raised, a failure where no check explains it; must_run:
    code in which no op ran fails."""
    findings = findings_of(stats, Limits(), observation.checks)
    if observation.cut:
        cut = REGISTRY["autocast-state"].skip(
            stats.subject, "not judged: ampcheck ended the code after its last observed step"
        )
        findings = [cut if finding.check == "autocast-state" else finding for finding in findings]
    if not any(finding.verdict is Verdict.FAIL for finding in findings):
        findings += _coverage(stats, observation, error, must_run)
    unseen = dict(stats.unseen)
    if stats.raised is not None:
        unseen[f"code after the {stats.raised.kind}"] = 1
    return Run(environment(), tuple(findings), Coverage(stats.counts, unseen), title=f"autocast in {stats.subject}")


def _coverage(
    stats: GuardStats, observation: AutocastObservation, error: BaseException | None, must_run: bool
) -> Iterator[Finding]:
    if error is not None:
        where = stats.raised.where if stats.raised else Where()
        message = f"the code must run to its end, but it raised {brief(error)}: later code was not checked"
        yield COVERAGE.fail(stats.subject, message, where=where)
    if stats.raised is not None or any(stats.counts.get(what) for what in _RAN):
        return
    only_settings = "switches" in stats.counts and not must_run
    if only_settings and not observation.hooked:
        return
    message = "the code must run an op, a backward pass or an optimizer step, but "
    message += "none was seen: only the switches were compared" if only_settings else "nothing was looked at"
    if stats.unseen:
        message += f"; there were {' and '.join(stats.unseen)}, which are not seen"
    hint = "put the guard around the code that computes, and call it in the eager mode of PyTorch"
    verdict = Verdict.INCOMPLETE if only_settings else Verdict.FAIL
    yield COVERAGE.finding(verdict, stats.subject, message, hint=hint)


def _banned(policies: Mapping[str, Policy], raised: Raised | None) -> dict[str, tuple[str, ...]]:
    """The ops that policies ban with the message that ended the block, and which policies do."""
    text = raised.message.strip() if raised is not None else ""
    banned = {name: _banned_by(policy, text) for name, policy in policies.items()}
    ops = dict.fromkeys(op for of_policy in banned.values() for op in of_policy)
    return {op: tuple(name for name in banned if op in banned[name]) for op in ops}


def _chain(error: BaseException | None) -> list[BaseException]:
    """An exception with its causes."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _rule_of(policies: Mapping[str, Policy], policy: str, op: str) -> str:
    """The rule of an op, as seen below autocast; empty where autocast leaves it alone."""
    if policy not in policies:
        return ""
    rule = policies[policy].rule(op)
    above = ROWS.get(op.removeprefix("aten::"), {}).get("autocast", "")  # the op that autocast sees
    return rule or (policies[policy].rule(f"aten::{above}") if above else "")


def _with_rule(call: Call, policies: Mapping[str, Policy]) -> Call:
    """The call with its rule, and the dtype that autocast would have cast to."""
    rule = _rule_of(policies, call.policy, call.plain_op)
    return replace(call, rule=rule, expected=_expected_dtype(call, rule))


def _expected_dtype(call: Call, rule: str) -> str:
    if not call.dtypes:
        return ""
    if rule in (SET_DTYPE, APPEND_DTYPE):
        return "" if call.dtype_argument or call.dtypes[0] == "float32" else "float32"
    if rule == FP32 or (rule == PROMOTE and "float32" in call.dtypes):
        target = "float32"
    elif rule in (LOWER, PROMOTE):
        target = call.state.dtype or ""
    else:
        target = rule.removeprefix(FIXED) if rule.startswith(FIXED) else ""
    return target if {*call.dtypes} != {target} else ""


def _banned_by(policy: Policy, message: str) -> list[str]:
    """The ops that a policy bans with this message, which is all that is seen of them: autocast raises first."""
    bans = ((op, facts.raises.strip() or f"{op} is unsafe to autocast") for op, facts in policy.ops.items())
    return [op for op, text in bans if policy.rule(op) == BANNED and message.startswith(text)]
