"""Guards: does code use autocast as it must be used? `with ampcheck.guard(): ...` around a step or a test."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from ampcheck.autocast.emulate import emulated_policy
from ampcheck.autocast.guards.checks import CHECKS, banned_by, check_guard
from ampcheck.autocast.guards.hooks import watched_regions, watched_scope, watched_threads
from ampcheck.autocast.guards.ops import Notes, OpsMode
from ampcheck.autocast.guards.records import GuardStats, Raised, Recompute
from ampcheck.autocast.state import devices
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, as_result, brief, require_ran
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where, emit, verify
from ampcheck.torchtools.global_state import changed, read_state, restore_state
from ampcheck.torchtools.source import users_place

GUARD_CHECKS = tuple(CHECKS)
"""The slugs of the guards: what leaks, what is crossed, what is stale, what is bypassed, what is lost."""

_OPS = frozenset(GUARD_CHECKS) - {"autocast-state", "autocast-scope"}
_RAN = ("ops", "backward calls", "optimizer steps")
_EVIDENCE = ("switches", *_RAN)
"""What must have been seen for a run to say anything; the rest is counted among the ops."""


class Watch:
    """Entered, everything that `checks` need is noted; `stats()` tells it once the block is left.

    checks: slugs of `GUARD_CHECKS`. With `autocast-state` alone nothing is tapped: switches are read on the way in and
    out. counted: ops, backward passes and optimizer steps are counted whatever is asked for. On the way out the
    switches are put back to what they were. Raises `UsageError` for an unknown slug.
    """

    def __init__(self, checks: Collection[str] | None = None, *, counted: bool = False) -> None:
        self.checks = chosen(checks)
        self._tapped = frozenset(GUARD_CHECKS if counted else self.checks)
        self._notes = Notes()
        self._before: dict[str, Any] = {}
        self._changed: dict[str, tuple[Any, Any]] = {}
        self._error: BaseException | None = None
        self._open = ExitStack()

    @property
    def counts_ops(self) -> bool:
        """Whether ops, backward passes and optimizer steps are all counted."""
        return "autocast-scope" in self._tapped and bool(_OPS & self._tapped)

    def __enter__(self) -> Watch:
        self._before = read_state()
        notes = self._notes
        with ExitStack() as opening:
            if self._tapped - {"autocast-state"}:
                notes.here.watched = True
                opening.enter_context(watched_regions(notes))
            if "autocast-scope" in self._tapped:
                opening.enter_context(watched_scope(notes))
            if _OPS & self._tapped:
                if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
                    opening.callback(_reset_dynamo)
                opening.enter_context(watched_threads(notes))
                opening.enter_context(OpsMode(notes))
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._notes.open = False
        self._open.close()
        self._error = error
        after = read_state()
        self._changed = changed(self._before, after)
        if after != self._before:
            restore_state(self._before)

    def stats(self, subject: str) -> GuardStats:
        """What was seen, with the rules of the devices in play."""
        notes = self._notes
        calls = notes.calls.copy()
        for call, error in notes.raising:
            calls[_caught(call, error, self._error)] += 1
        raised = None
        if self._error is not None:
            file, line = users_place(self._error)
            raised = Raised(type(self._error).__name__, str(self._error), file, line)
        notes.counts["cached casts"] = notes.casts.seen
        counts = {name: n for name, n in notes.counts.items() if n}
        if "autocast-state" in self.checks:
            counts = {"switches": len(self._before), **counts}
        return GuardStats(
            subject=subject,
            settings=len(self._before),
            changed=self._changed,
            counts=counts,
            regions=notes.region,
            unseen=dict(notes.unseen),
            calls=calls,
            crossings=notes.crossings.copy(),
            stale=notes.casts.stale.copy(),
            recomputed=notes.recomputed.copy() or self._stopped_recomputation(),
            policies=self._policies(calls),
            raised=raised,
        )

    def _stopped_recomputation(self) -> Counter[Recompute]:
        """PyTorch's checkpoint compares what it saves and may raise before the first op shows its dtypes."""
        return Counter(self._notes.shifted.values() if isinstance(self._error, CheckpointError) else ())

    def _policies(self, calls: Collection[Any]) -> dict[str, Any]:
        found = dict(self._notes.policies)
        wanted = {call.policy for call in calls} | {op.forward.device for op in self._notes.recomputed}
        found.update((name, emulated_policy(name)) for name in sorted(wanted - set(found)))
        if "policy-banned" in self.checks and isinstance(self._error, RuntimeError) and "autocast" in str(self._error):
            for name in (*sorted(self._notes.on), *devices()):  # first those for which autocast was seen to be on
                found.setdefault(name, emulated_policy(name))
                if banned_by(found[name], str(self._error)):
                    break
        return found


GuardWatch = Watch


def guard_run(stats: GuardStats, watch: Watch) -> Run:
    """The run of a watched block."""
    return _report(stats, watch)


class Guard:
    """What a guarded block gets: `run` holds the findings once the block is left."""

    def __init__(self) -> None:
        self.run: Run | None = None


@contextmanager
def guard(*checks: str, subject: str = "this block", raises: bool = True) -> Iterator[Guard]:
    """Judge how the block uses autocast.

    checks: slugs of `GUARD_CHECKS`, all by default. subject: what the block is called in findings. On leaving the run
    is emitted and stands in `run` of what `as` names; with `raises` a failure raises `AssertionError`. A warning never
    raises: warnings stand in `run`, in the summary of `pytest --ampcheck` and in what `ampcheck audit` prints. A block
    in which nothing was looked at fails under `coverage`; one that runs no op is incomplete where its switches were
    compared. An exception of the block itself goes on. Switches that the
    block left changed are put back. Raises `UsageError` for another slug.

    Followed are the threads that the block starts and the work that it hands to a `ThreadPoolExecutor` or a
    `multiprocessing.pool.ThreadPool`, made inside or before. A thread that runs already and takes its work from a
    queue of your own is not followed, nor is another process.
    """
    __tracebackhide__ = True
    watch, seen = Watch(checks or None), Guard()
    try:
        with watch:
            yield seen
    except BaseException:
        seen.run = _run(watch, subject)
        emit(seen.run)
        raise
    seen.run = _run(watch, subject)
    if raises:
        verify(seen.run)
    else:
        emit(seen.run)


def judge_call(
    function: Callable[[], Any], subject_name: str, checks: Collection[str] | None = None, *, must_run: bool = False
) -> Run:
    """Call `function` under the guards. Nothing is raised and nothing emitted.

    An exception of the function is evidence: where no check explains it, the run fails under `coverage`, since what
    comes after it was not looked at. So does a function in which nothing was looked at. Where no op ran, though the
    switches were compared, `coverage` is incomplete; must_run: it fails. Raises `UsageError` for an unknown check.
    """
    watch = Watch(checks, counted=must_run)
    try:
        with watch:
            require_ran(function(), subject_name)
    except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; the run reports it
        return _run(watch, subject_name, as_result(error))
    return _run(watch, subject_name, must_run=must_run)


def chosen(checks: Collection[str] | None) -> tuple[str, ...]:
    """The checks that were asked for, all by default. Raises `UsageError` naming the valid ones for another."""
    asked = GUARD_CHECKS if checks is None else (checks,) if isinstance(checks, str) else tuple(checks)
    for slug in asked:
        if slug not in GUARD_CHECKS:
            raise UsageError(f"there is no guard {slug!r}; there are {', '.join(GUARD_CHECKS)}")
    return asked


def _run(watch: Watch, subject: str, unexplained: BaseException | None = None, *, must_run: bool = False) -> Run:
    return _report(watch.stats(subject), watch, unexplained, must_run=must_run)


def _report(
    stats: GuardStats, watch: Watch, unexplained: BaseException | None = None, *, must_run: bool = False
) -> Run:
    findings = check_guard(stats, watch.checks)
    if not any(finding.verdict is Verdict.FAIL for finding in findings):
        if unexplained is not None:
            findings.append(_stopped(stats, unexplained))
        elif stats.raised is None and not any(stats.counts.get(what) for what in (_RAN if must_run else _EVIDENCE)):
            findings.append(_nothing(stats))
        elif stats.raised is None and watch.counts_ops and not any(stats.counts.get(what) for what in _RAN):
            only = "none was seen: only the switches were compared"
            findings.append(replace(_nothing(stats, only), verdict=Verdict.INCOMPLETE))
    unseen = dict(stats.unseen)
    if stats.raised is not None:
        unseen[f"what comes after the {stats.raised.kind}"] = 1
    return Run(environment(), tuple(findings), Coverage(stats.counts, unseen), title=f"guard of {stats.subject}")


def _reset_dynamo() -> None:
    """An older Dynamo remembers that it skipped what it met under a dispatch mode."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _nothing(stats: GuardStats, found: str = "nothing was looked at") -> Finding:
    text = f"what is judged must run an op, a backward pass or an optimizer step, but {found}"
    if stats.unseen:
        text += f"; there were {' and '.join(stats.unseen)}, which are not seen"
    hint = "put the guard around the code that computes, and call it in the eager mode of PyTorch"
    return Finding("coverage", Verdict.FAIL, stats.subject, text, hint=hint)


def _stopped(stats: GuardStats, error: BaseException) -> Finding:
    place = Where(file=stats.raised.file, line=stats.raised.line) if stats.raised else Where()
    text = f"what is judged must run to its end, but it raised {brief(error)}: what comes after was not looked at"
    return Finding("coverage", Verdict.FAIL, stats.subject, text, place)


def _caught(call: Any, error: BaseException, ended: BaseException | None) -> Any:
    """The call, marked as caught unless its exception is what ended the block, itself or as a cause."""
    chain: list[BaseException] = []
    while ended is not None and ended not in chain:
        chain.append(ended)
        ended = ended.__cause__ or ended.__context__
    return replace(call, caught=not any(error is link for link in chain))
