"""Guards: check how a block of code uses autocast while it runs."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.pool import Pool, ThreadPool
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils.checkpoint import CheckpointError

from ampcheck.autocast.emulate import emulated_policy
from ampcheck.autocast.guards.call_sites import call_site
from ampcheck.autocast.guards.checks import GUARD_CHECKS, banned_by, check_guard
from ampcheck.autocast.guards.recorder import OpsMode, Recorder, autocast_devices, current_state
from ampcheck.autocast.guards.stats import Call, Crossing, GuardStats, Raised, Recompute, State
from ampcheck.autocast.policy import Policy
from ampcheck.autocast.state import devices, nesting
from ampcheck.catalog.autocast import AUTOCAST_STATE, POLICY_BANNED
from ampcheck.catalog.numerics import COVERAGE
from ampcheck.core.arguments import parse_names
from ampcheck.core.environment import environment
from ampcheck.core.errors import as_result, brief, require_ran
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.global_state import changed, read_state, restore_state
from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.source import users_place

Function = Callable[..., object]


def _enabled_states() -> tuple[State, ...]:
    """The states of the devices for which autocast is on in this thread."""
    states = (current_state(device) for device in autocast_devices())
    return tuple(state for state in states if state.dtype is not None)


@contextmanager
def backward_and_steps(recorder: Recorder) -> Iterator[None]:
    """Count backward passes and optimizer steps, and record those inside a region."""

    def record(what: str, differentiable: bool = False) -> None:
        if not (recorder.active and recorder.thread.followed):
            return
        site = call_site(sys._getframe(2), backward=False)
        if site is None or site.compiled:
            return  # a compiler that traces forward and backward together
        recorder.counts[what] += 1
        if states := _enabled_states():
            where = site.where("backward" if what == "backward calls" else "update")
            recorder.crossings[Crossing(what, differentiable, states[0], recorder.regions, where)] += 1

    def make(run: Function) -> Function:
        def backward(*args: object, **kwargs: object) -> object:
            if torch._C._current_graph_task_id() == -1:  # not a checkpoint's own, inside another
                record("backward calls", len(args) > 3 and args[3] is True)  # its create_graph
            return run(*args, **kwargs)

        return backward

    # The one function through which Tensor.backward, autograd.backward and autograd.grad enter the engine.
    with replaced(torch.autograd, "_engine_run_backward", make):
        handle = register_optimizer_step_pre_hook(lambda *_: record("optimizer steps"))
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def regions(recorder: Recorder) -> Iterator[None]:
    """Count the outermost regions, and record the regions in which a thread names a dtype itself."""

    def make_init(original: Function) -> Function:
        def __init__(  # noqa: N807
            self: Any, device_type: str, dtype: object = None, enabled: bool = True, cache_enabled: object = None
        ) -> None:
            original(self, device_type, dtype, enabled, cache_enabled)
            self._ampcheck_explicit = dtype is not None or not enabled

        return __init__

    def make_enter(original: Function) -> Function:
        def __enter__(self: Any) -> object:  # noqa: N807
            if recorder.active and nesting() == 0:
                recorder.regions += 1
            recorder.thread.regions.append((self.device, getattr(self, "_ampcheck_explicit", True)))
            return original(self)

        return __enter__

    def make_exit(original: Function) -> Function:
        def __exit__(self: torch.autocast, *exc: object) -> object:  # noqa: N807
            if recorder.thread.regions:
                recorder.thread.regions.pop()
            result = original(self, *exc)
            if recorder.active and nesting() == 0:
                recorder.casts.clear()
            return result

        return __exit__

    with ExitStack() as stack:
        for name, make in (("__init__", make_init), ("__enter__", make_enter), ("__exit__", make_exit)):
            stack.enter_context(replaced(torch.amp.autocast_mode.autocast, name, make))
        yield


@contextmanager
def threads(recorder: Recorder) -> Iterator[None]:
    """Follow the ops of threads that are started, and of work that is submitted to a pool of threads."""

    def follows() -> bool:
        return recorder.active and recorder.thread.followed

    def make_start(original: Function) -> Function:
        def start(self: threading.Thread) -> None:
            module = getattr(getattr(self, "_target", None), "__module__", "")
            if follows() and module not in ("concurrent.futures.thread", "multiprocessing.pool"):  # a pool's worker
                self.run = _followed(recorder, self.run)  # type: ignore[method-assign,assignment]
            original(self)

        return start

    def make_submit(pool: type) -> Callable[[Function], Function]:
        def make(original: Function) -> Function:
            def submit(self: object, *args: Any, **kwargs: Any) -> object:
                if follows() and isinstance(self, pool):
                    if args:
                        args = _followed(recorder, args[0]), *args[1:]
                    elif "func" in kwargs:  # of a pool, which takes it by name too
                        kwargs["func"] = _followed(recorder, kwargs["func"])
                return original(self, *args, **kwargs)

            return submit

        return make

    with ExitStack() as stack:
        stack.enter_context(replaced(threading.Thread, "start", make_start))
        stack.enter_context(replaced(ThreadPoolExecutor, "submit", make_submit(ThreadPoolExecutor)))
        for name in ("apply_async", "_map_async", "imap", "imap_unordered"):  # all others call one of these
            stack.enter_context(replaced(Pool, name, make_submit(ThreadPool)))
        yield


def _followed(recorder: Recorder, run: Function) -> Function:
    """`run`, to be recorded in another thread, with this thread's autocast state as its parent's."""
    parent = {state.device: state for state in _enabled_states()}
    if parent:
        recorder.counts["threads"] += 1

    @functools.wraps(run)
    def follow(*args: object, **kwargs: object) -> object:
        thread = recorder.thread
        before = thread.followed, thread.parent, thread.regions
        thread.followed, thread.parent, thread.regions = True, parent, []
        # The stack of modes belongs to the thread; the mode's own __enter__ also sets flags of the process, which a
        # thread that outlives the block would set back wrongly.
        mode = OpsMode(recorder)  # PyTorch 2.4 keeps no reference of its own
        _push_mode(mode)
        try:
            return run(*args, **kwargs)
        finally:
            _pop_mode()
            thread.followed, thread.parent, thread.regions = before

    return follow


_RAN = ("ops", "backward calls", "optimizer steps")


class AutocastObservation:
    """A context that records what `checks` need; `stats()` returns it once the block is left.

    checks: names out of `GUARD_CHECKS`, all by default. With `autocast-state` alone nothing is hooked, unless `counted`
    requires it: settings are read on entry and exit. On exit the settings are restored. Raises `UsageError` for an
    unknown check.
    """

    def __init__(self, checks: Collection[str] | None = None, *, counted: bool = False) -> None:
        self.checks = parse_names(checks, "a guard's check", GUARD_CHECKS)
        self.hooked = counted or bool(set(self.checks) - {AUTOCAST_STATE.slug})
        self._recorder = Recorder()
        self._before: dict[str, object] = {}
        self._changed: dict[str, tuple[object, object]] = {}
        self._error: BaseException | None = None
        self._open = ExitStack()
        self.ended = False

    def __enter__(self) -> AutocastObservation:
        self._before = read_state()
        recorder = self._recorder
        with ExitStack() as opening:
            if self.hooked:
                recorder.thread.followed = True
                if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
                    opening.callback(dynamo.reset)  # an older Dynamo remembers that it skipped code under a mode
                for hooks in (regions, backward_and_steps, threads, OpsMode):
                    opening.enter_context(hooks(recorder))
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._recorder.active = False
        self.ended = True
        self._open.close()
        self._error = error
        after = read_state()
        self._changed = changed(self._before, after)
        if after != self._before:
            restore_state(self._before)

    def stats(self, subject: str) -> GuardStats:
        """What was recorded, with the rules of the devices that ran ops."""
        recorder = self._recorder
        calls = recorder.calls.copy()
        causes = _chain(self._error)
        for call, error in recorder.raising:
            calls[replace(call, caught=not any(error is cause for cause in causes))] += 1
        raised = None
        if self._error is not None:
            file, line = users_place(self._error)
            raised = Raised(type(self._error).__name__, str(self._error), Where(file=file, line=line))
        counts = {**recorder.counts, "cached casts": recorder.casts.seen}
        if str(AUTOCAST_STATE) in self.checks:
            counts = {"switches": len(self._before), **counts}
        recomputed = recorder.recomputed.copy()
        if not recomputed and isinstance(self._error, CheckpointError):
            # PyTorch's checkpoint compares what it saves and may raise before the first op shows its dtypes.
            recomputed = Counter(recorder.changed_sites.values())
        return GuardStats(
            subject=subject,
            settings=len(self._before),
            changed=self._changed,
            counts={name: count for name, count in counts.items() if count},
            regions=recorder.regions,
            unseen=dict(recorder.unseen),
            calls=calls,
            crossings=recorder.crossings.copy(),
            stale=recorder.casts.stale.copy(),
            recomputed=recomputed,
            policies=self._policies(calls, recorder.recomputed),
            raised=raised,
        )

    def _policies(self, calls: Collection[Call], recomputed: Collection[Recompute]) -> dict[str, Policy]:
        policies = dict(self._recorder.policies)
        names = {call.policy for call in calls} | {op.forward.device for op in recomputed}
        policies.update((name, emulated_policy(name)) for name in sorted(names - set(policies)))
        autocasts_own = isinstance(self._error, RuntimeError) and "autocast" in str(self._error)
        if autocasts_own and POLICY_BANNED.slug in self.checks:
            for name in (*sorted(self._recorder.autocast_devices), *devices()):  # first those with autocast on
                policies.setdefault(name, emulated_policy(name))
                if banned_by(policies[name], str(self._error)):
                    break
        return policies


def judge_call(
    function: Callable[[], object], subject_name: str, checks: Collection[str] | None = None, *, must_run: bool = False
) -> Run:
    """Call `function` under the guards. Nothing is raised and nothing emitted.

    An exception of the function is evidence: where no check explains it, the run fails under `coverage`, since later
    code was not checked. So does a function in which nothing was checked. Where no op ran, though the settings were
    compared, `coverage` is incomplete; must_run: it fails. Raises `UsageError` for an unknown check.
    """
    observation = AutocastObservation(checks, counted=must_run)
    error: BaseException | None = None
    try:
        with observation:
            require_ran(function(), subject_name)
    except BaseException as raised:  # noqa: BLE001  # the user's code may raise anything; the run reports it
        error, must_run = as_result(raised), False
    return guard_run(observation, observation.stats(subject_name), error, must_run=must_run)


def guard_run(
    observation: AutocastObservation, stats: GuardStats, error: BaseException | None = None, *, must_run: bool = False
) -> Run:
    """The findings about observed code. error: what the code raised, a failure where no check explains it; must_run:
    code in which no op ran fails."""
    findings = check_guard(stats, observation.checks)
    if not any(finding.verdict is Verdict.FAIL for finding in findings):
        findings += _coverage(stats, observation, error, must_run)
    unseen = dict(stats.unseen)
    if stats.raised is not None:
        unseen[f"what comes after the {stats.raised.kind}"] = 1
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


def _chain(error: BaseException | None) -> list[BaseException]:
    """An exception with its causes."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
