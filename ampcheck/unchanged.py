"""The audit of code that runs as it is: a training loop, or a callable without arguments, which cannot be copied."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ampcheck.autocast import judge
from ampcheck.autocast.guards.guard import judge_call
from ampcheck.autocast.missing import unimitated
from ampcheck.autocast.placement import is_open
from ampcheck.checks import for_kind
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.compile import cache_artifacts
from ampcheck.checks.compile.cache_artifacts import CHECK as CACHE_ARTIFACTS
from ampcheck.compiled.accuracy import checks as accuracy_checks
from ampcheck.compiled.graph import checks as graph_checks
from ampcheck.compiled.graph.judge import GraphObservation, judge_graph
from ampcheck.compiled.graph.own import reached_of
from ampcheck.compiled.own_code import judge_own_code
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.plan import Plan
from ampcheck.core.progress import current_listener
from ampcheck.core.run import Finding, Run, Verdict, merge
from ampcheck.core.subject import Kind, Subject
from ampcheck.records.numerics import COMPILED
from ampcheck.stream.calls import subscribed
from ampcheck.torchtools.contexts import attributes, contexts_of, set_attributes
from ampcheck.torchtools.interception import calls_of_compile
from ampcheck.torchtools.source import at_users_line
from ampcheck.training import judge_running
from ampcheck.training.distributed.ranks import world_size
from ampcheck.training.judge import judge_training
from ampcheck.training.loop import STEPS
from ampcheck.training.stopping import ended_after

_OF_GRAPHS = frozenset(
    (*graph_checks.COMPILER_CHECKS, *accuracy_checks.CHECKS),
) - {CACHE_ARTIFACTS.slug, COVERAGE.slug}
"""The checks on compiled code that a loop or a callable compiles itself; caches are judged while it runs."""


def audit_unchanged(plan: Plan, placed: AbstractContextManager[Any]) -> Run:
    """Judge the code as it is in eager mode, and its compiled functions in a second run. placed: where it runs."""
    wrapped: list[object] = []
    contexts = attributes(contexts_of(plan.subject.shape)) if plan.subject.kind is Kind.CALL else []
    with placed, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        with calls_of_compile(wrapped.append):
            run = _judge_eager(_of_eager(plan))
        set_attributes(contexts)
        return _with_graphs(run, plan, bool(wrapped))


def _judge_eager(plan: Plan) -> Run:
    subject, listener = plan.subject, current_listener()
    if subject.kind is Kind.TRAINING:
        return judge_training(plan, listener)
    listener.progress(f"{subject.name}: the callable", 0, 1)
    guards, caches = plan.among(judge.GUARD_CHECKS), plan.judges(CACHE_ARTIFACTS.slug)
    if set(plan.among(for_kind(Kind.CALL)) or ()) - {COVERAGE.slug} == {CACHE_ARTIFACTS.slug}:
        return judge_graph(subject).only((CACHE_ARTIFACTS.slug, COVERAGE.slug))
    runs: list[Run] = []
    raised: list[BaseException] = []
    user = _call_of(subject, raised)

    def call(run: judge_running.Runner) -> None:
        seen = replace(subject, shape=lambda: run(user))
        runs.append(judge.judge_use(seen, guards) if guards != [] else _count_ops(seen))

    def call_with_caches(run: judge_running.Runner) -> None:
        with GraphObservation(subject.name) as seen:
            call(run)
        runs.append(Run(findings=tuple(cache_artifacts.check(seen.stats) if seen.stats is not None else ())))

    name = judge.emulated_name(subject)
    values = judge_running.judge_call(call_with_caches if caches else call, name, plan)
    lack = unimitated(raised[0], name) if raised and is_open() else None
    if lack is not None:
        return _without_kernels([*runs, values], lack)
    begun = raised and "steps" in values.coverage.seen  # its exception is a finding
    judged = values.coverage.seen.get("steps") or (not raised and values.coverage.seen.get("16-bit ops"))
    if subject.trains and not begun and not judged:
        raise UsageError(_neither_trained_nor_returned(subject, next(iter(raised), None))) from next(iter(raised), None)
    if caches and runs[-1].findings and COMPILED in values.coverage.unseen:
        message = "not judged: calls of compiled functions ran in eager mode"
        runs[-1] = Run(findings=(CACHE_ARTIFACTS.skip(subject.name, message),))
    return _with_one_coverage(runs, values)


def _call_of(subject: Subject, raised: list[BaseException]) -> Callable[[], object]:
    """A call of the subject, which notes in `raised` what ended it; `sys.exit(0)` is how trainings end, too."""
    stepped: list[bool] = []

    def note(*_: object, **__: object) -> Iterator[None]:
        stepped[:] = [True]
        yield

    def call() -> object:
        stepped.clear()
        try:
            with subscribed(optimizer_step=note):
                return subject.run_call()
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code and stepped:
                return None
            raised.append(error)
            raise

    return call


def _neither_trained_nor_returned(subject: Subject, error: BaseException | None) -> str:
    """Why a function of a script, which returns nothing, was not judged."""
    judged = "a function is judged as it trains, by what it computes in 16 bits, or by what it returns: (model, args)"
    if error is None:
        return f"{subject.name} returned nothing, stepped no optimizer, and computed nothing in 16 bits: {judged}"
    return f"{subject.name} raised {brief(error)}{at_users_line(error)}, before any step of an optimizer: {judged}"


def _without_kernels(runs: Sequence[Run], lack: Finding) -> Run:
    """The runs of code that ended since it needs CUDA itself: that alone is said of its end."""
    run = merge(list(runs))
    return replace(run, findings=(lack, *(f for f in run.findings if f.check != COVERAGE.slug)))


def _of_eager(plan: Plan) -> Plan:
    """The plan without the checks on compiled code."""
    if plan.checks is None:
        return plan
    return replace(plan, checks=tuple(slug for slug in plan.checks if slug not in _OF_GRAPHS) or (COVERAGE.slug,))


def _with_graphs(run: Run, plan: Plan, wrapped: bool) -> Run:
    """The run of a loop or a callable, with its graphs and caches where it has compiled code. wrapped: it called
    torch.compile."""
    subject = plan.subject
    graphs = plan.compile and plan.among(_OF_GRAPHS) != []
    caches = any(finding.verdict is Verdict.SKIP for finding in run.by(CACHE_ARTIFACTS.slug))
    steps = int(run.coverage.seen.get("steps", 0))
    config = sys.modules.get("torch._dynamo.config")
    if world_size() > 1 or config is None or config.disable or (subject.kind is Kind.TRAINING and not steps):
        return run
    reached = reached_of(subject)
    if not (wrapped or COMPILED in run.coverage.unseen or reached.compiled) or not (graphs or caches):
        return run
    current_listener().progress(f"{subject.name}: compiled code", 0, 1)
    call = subject.shape
    if subject.kind is Kind.CALL and steps:
        subject = replace(subject, shape=lambda: ended_after(steps, call))
    try:
        again = judge_own_code(replace(plan, subject=subject, steps=min(steps, STEPS)), reached)
    except UsageError as error:  # what it reaches cannot be restored
        again = Run(findings=(COVERAGE.skip(subject.name, f"compiled code was not judged: {error}"),))
    if caches:
        run = _with_caches(run, again)
    if not graphs:
        return run
    wanted = {*_OF_GRAPHS, "autocast-state"} if plan.checks is None else {*plan.checks} - {CACHE_ARTIFACTS.slug}
    findings = [f for f in again.findings if f.check in wanted or f.check == COVERAGE.slug]
    if plan.checks is None:  # a skip is reported only where it was asked for
        findings = [f for f in findings if f.verdict is not Verdict.SKIP or f.check == COVERAGE.slug]
    return merge([run, replace(again, findings=tuple(findings))])


def _with_caches(run: Run, again: Run) -> Run:
    """The run of a callable whose compiled functions ran in eager mode, with the caches of a run that compiles."""
    caches = again.by(CACHE_ARTIFACTS.slug)
    findings = [f for f in run.findings if f.check != CACHE_ARTIFACTS.slug or not caches]
    if "calls" in again.coverage.seen:  # it came to its end
        text = "not followed to its end with compiled functions in eager mode: "
        hint = "leave saving and loading caches out of the callable; it comes to its end where it compiles"
        for number, f in enumerate(findings):
            if f.check == COVERAGE.slug and f.verdict is Verdict.FAIL:
                findings[number] = replace(f, verdict=Verdict.INCOMPLETE, message=text + f.message, hint=hint)
    return replace(run, findings=(*findings, *caches))


def _with_one_coverage(runs: Sequence[Run], values: Run) -> Run:
    """The runs of one call as one, in which `coverage` says what its values rest on, and what ended or hid the call."""
    ends = [f for run in runs for f in run.by(COVERAGE.slug) if f.verdict is not Verdict.PASS]
    followed = values.by(COVERAGE.slug)
    lacks = [f for f in followed if f.verdict in (Verdict.WARN, Verdict.INCOMPLETE)]
    kept = {id(f) for f in ([*ends, *lacks] if ends else followed)}
    if "ops" in values.coverage.seen:
        runs = [replace(run, coverage=run.coverage.without("ops")) for run in runs]
    if followed:

        def keep(run: Run) -> Run:
            return replace(run, findings=tuple(f for f in run.findings if f.check != COVERAGE.slug or id(f) in kept))

        runs, values = list(map(keep, runs)), keep(values)
    return merge([*runs, values])


def _count_ops(subject: Subject) -> Run:
    run = judge_call(subject.run_call, subject.name, (), must_run=True)
    if run.findings:
        return run
    return replace(run, findings=(COVERAGE.passed(subject.name, f"looked at {run.coverage}", run.coverage.total),))
