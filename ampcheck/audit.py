"""The audit of a subject: plan its checks, run them in stages, and return one `Run` with the evidence."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ampcheck.autocast import judge
from ampcheck.autocast.asked import on_cpu_or_cuda
from ampcheck.autocast.device import Placement, place
from ampcheck.autocast.emulate import active
from ampcheck.autocast.guards.guard import judge_call
from ampcheck.autocast.missing import unimitated
from ampcheck.autocast.placement import is_open
from ampcheck.catalog.autocast import AUTOCAST_STATE
from ampcheck.catalog.causes import with_causes
from ampcheck.catalog.numerics import COVERAGE
from ampcheck.checks import for_kind
from ampcheck.checks.compile import cache_artifacts
from ampcheck.checks.compile.cache_artifacts import CHECK as CACHE_ARTIFACTS
from ampcheck.checks.selection import select_checks, with_selected
from ampcheck.compiled.accuracy import checks as accuracy_checks
from ampcheck.compiled.graph import checks as graph_checks
from ampcheck.compiled.graph.judge import GraphObservation, judge_graph
from ampcheck.compiled.graph.own import reached_of
from ampcheck.compiled.own_code import judge_own_code
from ampcheck.core.arguments import DType, parse_dtypes, parse_flag, parse_integer
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.limits import Limits
from ampcheck.core.progress import current_listener
from ampcheck.core.run import Finding, Run, Scalar, Verdict, merge
from ampcheck.core.settings import resolve_limits
from ampcheck.core.source import with_excerpts
from ampcheck.core.subject import Kind, Subject, as_subject, subject_of
from ampcheck.numerics import native_format
from ampcheck.numerics.run import COMPILED
from ampcheck.outcome.raising import verify
from ampcheck.stages import AuditContext, audit_stages, run_stages
from ampcheck.stream.calls import subscribed
from ampcheck.torchtools.batches import played
from ampcheck.torchtools.contexts import attributes, contexts_of, set_attributes
from ampcheck.torchtools.interception import calls_of_compile
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.source import naming_users_errors, users_place
from ampcheck.training import judge_running
from ampcheck.training.distributed.ranks import world_size
from ampcheck.training.judge import judge_training
from ampcheck.training.loop import STEPS
from ampcheck.training.stopping import ended_after

_OF_GRAPHS = frozenset(
    (*graph_checks.COMPILER_CHECKS, *accuracy_checks.CHECKS),
) - {CACHE_ARTIFACTS.slug, COVERAGE.slug}
"""The checks on compiled code that a loop or a callable compiles itself; caches are judged while it runs."""

_FULL_STEPS = 4
"""Times as many steps of a training loop are observed in a full audit."""


def audit(
    subject: object,
    *,
    device: str | None = None,
    dtype: DType | Sequence[DType] | None = None,
    autocast: bool | None = None,
    compile: bool = True,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    name: str = "",
    steps: int | None = None,
    horizon: int | None = None,
) -> Run:
    """Judge a subject in every dtype, eager and compiled, forward and backward.

    subject: a `Subject`, or a value from which one can be built:

    - `(module, args)`: forward and backward against float64.
    - `(module, [args, args])` and `([block, block], [args])`: also the graphs of the compiled subject, and compiled
      against eager code. If `dtype` is omitted, they run in their own dtypes and 16-bit autocast is not checked.
    - a training loop: all training checks and its use of autocast. `steps`: number of observed steps; `horizon`:
      number of planned steps, for `stagnation`; by default 10,000.
    - a callable without arguments: its values, the sums and norms and float32 products among them, against float64, and
      its use of autocast and of compiler caches. One that trains (it steps an optimizer) is judged as a training loop
      too, and ended after `steps` steps, by default 24.

    A loop and a callable run unchanged, but for their compiled functions: they run in eager mode where values are
    followed, as `coverage` then says. Those with compiled functions run once more as they are, and their graphs are
    judged. What they reach is restored after it. Only `device`, `compile`, `checks`, `limits`, `steps` and `horizon`
    apply. If the model is already compiled, eager runs use the original module and compiled runs keep its compile
    options.

    device: if it is not available, its autocast policy is emulated on the CPU, and every finding is labelled so; None
    is the CPU, or CUDA where the code asks for it by `.cuda()`, `torch.autocast("cuda")` or a `GradScaler`.
    Code that was written for CUDA runs as it stands then, see `emulate`; `cuda:3070` names a GPU; what needs CUDA
    itself, such as its own kernels, is `incomplete`.
    dtype: what autocast casts to, by default float16 and bfloat16. autocast: None decides by the model: one with
    16-bit weights or inputs runs without autocast, in its own dtype. compile: also run under `torch.compile`, which
    resets Dynamo. checks: names of checks, all by default; `coverage`, `nonfinite-reference` and whether the subject
    ran at all are always reported; one that does not apply is skipped, with the reason. limits: by default those of
    `[tool.ampcheck]` of the working directory. name: the subject's name in findings.

    Raises `UsageError` for a subject that cannot be judged, an unknown check, a selection of none or of such that judge
    other kinds of subjects alone, and an unknown device or dtype.
    """
    return on_cpu_or_cuda(
        lambda there: judge_subject(
            subject,
            device=there,
            dtype=dtype,
            autocast=autocast,
            compile=compile,
            checks=checks,
            limits=limits,
            name=name,
            steps=steps,
            horizon=horizon,
        ),
        # The objects of a loop were made without CUDA: a scaler of it stays off.
        "cpu" if device is None and _is_loop(subject) else device,
    )


def _is_loop(subject: object) -> bool:
    return isinstance(subject.shape if isinstance(subject, Subject) else subject, Mapping)


@restoring
@naming_users_errors
def judge_subject(
    subject: object,
    *,
    device: str = "cpu",
    dtype: DType | Sequence[DType] | None = None,
    autocast: bool | None = None,
    compile: bool = True,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    name: str = "",
    steps: int | None = None,
    horizon: int | None = None,
    full: bool = False,
    graphs: bool = False,
) -> Run:
    """What `audit` does. full: also judge compiled code with dynamic shapes and with max-autotune, over three updates
    of the weights; observe four times as many steps of a training loop. graphs: also judge the graphs of a model of
    which one call is given."""
    resolved = subject_of(subject, None, name) if name else as_subject(subject)
    for keyword, count in (("steps", steps), ("horizon", horizon)):
        if count is not None:
            parse_integer(count, keyword)
            if resolved.kind not in (Kind.TRAINING, Kind.CALL):
                kind = resolved.kind.value
                raise UsageError(f"{keyword} applies to training loops; {resolved.name} is of kind '{kind}'")
    parse_flag(compile, "compile")
    parse_flag(full, "full")
    selected = select_checks(checks, resolved)
    placement = place(device)
    if resolved.kind in (Kind.TRAINING, Kind.CALL):
        default = (resolved.shape.get("steps") if resolved.kind is Kind.TRAINING else None) or STEPS
        parse_integer(default, f"steps of {resolved.name}")
        if full and steps is None:
            steps = _FULL_STEPS * default
        if resolved.kind is Kind.TRAINING or resolved.trains:
            current_listener().training(steps or default)
        if resolved.kind is Kind.TRAINING:
            resolved = played(resolved, steps or default)  # data are read once
        wrapped: list[object] = []
        contexts = attributes(contexts_of(resolved.shape)) if resolved.kind is Kind.CALL else []
        with placement.entered(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
            with calls_of_compile(wrapped.append):
                run = _audit_unchanged(resolved, _of_eager(selected), limits, (steps, horizon), placement.device)
            wanted = compile and (selected is None or not _OF_GRAPHS.isdisjoint(selected))
            of_graphs = selected if wanted else ()
            set_attributes(contexts)
            run = _with_graphs(run, resolved, of_graphs, placement.device, bool(wrapped), limits)
        run = with_selected(run, resolved, selected, compiles=compile)
        findings = with_excerpts(with_causes(run.findings))
        return replace(run, findings=findings, environment=_environment(placement), title=f"audit of {resolved.name}")
    native = None if autocast else native_format(resolved)
    if autocast is False and native is None:
        raise UsageError(f"autocast=False needs a model with 16-bit weights or inputs; {resolved.name} has none")
    names = set(selected or ())
    compiled_kind = compile and resolved.kind in (Kind.COMPILE, Kind.REGIONAL)
    graphs_alone = names <= {*accuracy_checks.CHECKS, *graph_checks.COMPILER_CHECKS, COVERAGE.slug}
    own_dtypes = compiled_kind and dtype is None and not autocast and graphs_alone
    dtypes = [] if own_dtypes else _low_dtypes(dtype, placement.device)
    context = AuditContext(
        subject=resolved,
        placement=placement,
        dtypes=tuple([native] if native is not None else dtypes),
        native=native is not None,
        compile=compile,
        full=full,
        graphs=compiled_kind or (compile and (graphs or not names.isdisjoint(graph_checks.COMPILER_CHECKS))),
        checks=selected,
        limits=limits,
        bounds=resolve_limits(limits).with_(resolved.limits, f"the subject {resolved.name}"),
    )
    with placement.entered():
        runs = run_stages(resolved.name, audit_stages(context), current_listener())
    run = with_selected(merge(runs), resolved, selected, compiles=compile)
    findings = with_excerpts(with_causes(_without_repeats(run.findings)))
    return replace(run, findings=findings, environment=_environment(placement), title=f"audit of {resolved.name}")


def _audit_unchanged(
    subject: Subject,
    checks: tuple[str, ...] | None,
    limits: Limits | None,
    planned: tuple[int | None, int | None],
    device: str,
) -> Run:
    """Judge a training loop, or a callable without arguments, which cannot be copied. planned: steps, horizon."""
    (steps, horizon), listener = planned, current_listener()
    if subject.kind is Kind.TRAINING:
        return judge_training(subject, checks, limits, steps=steps, horizon=horizon, device=device, listener=listener)
    listener.progress(f"{subject.name}: the callable", 0, 1)
    guards = None if checks is None else [slug for slug in checks if slug in judge.GUARD_CHECKS]
    caches = checks is None or CACHE_ARTIFACTS.slug in checks
    if checks is not None and set(checks) & set(for_kind(Kind.CALL)) - {COVERAGE.slug} == {CACHE_ARTIFACTS.slug}:
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

    bounds = resolve_limits(limits).with_(subject.limits, f"the subject {subject.name}")
    name = judge.emulated_name(subject)
    values = judge_running.judge_call(
        call_with_caches if caches else call, name, bounds, checks, steps=steps, horizon=horizon
    )
    lack = unimitated(raised[0], name) if raised and is_open() else None
    if lack is not None:
        return _without_kernels([*runs, values], lack)
    begun = raised and "steps" in values.coverage.seen  # its exception is a finding
    if subject.trains and not begun and not values.coverage.seen.get("steps"):
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
    judged = "a function is judged as it trains, or by what it returns, such as (model, args)"
    if error is None:
        return f"{subject.name} returned nothing, and stepped no optimizer: {judged}"
    file, line = users_place(error)
    place = f" at {file}:{line}" if line is not None else ""
    return f"{subject.name} raised {brief(error)}{place}, before any step of an optimizer: {judged}"


def _without_kernels(runs: Sequence[Run], lack: Finding) -> Run:
    """The runs of code that ended since it needs CUDA itself: that alone is said of its end."""
    run = merge(list(runs))
    return replace(run, findings=(lack, *(f for f in run.findings if f.check != COVERAGE.slug)))


def _without_repeats(findings: Sequence[Finding]) -> list[Finding]:
    """Without a failure that another stage found too and of which it says more: the line, or a setting that helps."""

    def adds(other: Finding, to: Finding) -> bool:
        if (other.check, other.verdict) != (to.check, to.verdict):
            return False
        if other.subject == to.subject and other.where == replace(to.where, op=other.where.op):  # a kernel has many ops
            return other.message != to.message and other.message.startswith(to.message)
        error, same = to.message.rpartition(" raised ")[2], other.message.rpartition(" raised ")[2]
        placed = other.where != to.where == replace(other.where, file="", line=None)
        return placed and error == same and other.subject in (to.subject, to.name)  # worded differently

    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    return [f for f in findings if f.verdict is not Verdict.FAIL or not any(adds(other, f) for other in failed)]


def _of_eager(checks: Collection[str] | None) -> tuple[str, ...] | None:
    """The selected checks without those on compiled code."""
    if checks is None:
        return None
    return tuple(slug for slug in checks if slug not in _OF_GRAPHS) or (COVERAGE.slug,)


def _with_graphs(
    run: Run, subject: Subject, checks: Collection[str] | None, device: str, wrapped: bool, limits: Limits | None
) -> Run:
    """The run of a loop or a callable, with its graphs and caches where it has compiled code.

    checks: () judges caches alone, where they could not be judged. wrapped: it called torch.compile.
    """
    caches = any(finding.verdict is Verdict.SKIP for finding in run.by(CACHE_ARTIFACTS.slug))
    steps = int(run.coverage.seen.get("steps", 0))
    config = sys.modules.get("torch._dynamo.config")
    if world_size() > 1 or config is None or config.disable or (subject.kind is Kind.TRAINING and not steps):
        return run
    reached = reached_of(subject)
    if not (wrapped or COMPILED in run.coverage.unseen or reached.compiled) or (checks == () and not caches):
        return run
    current_listener().progress(f"{subject.name}: compiled code", 0, 1)
    call = subject.shape
    if subject.kind is Kind.CALL and steps:
        subject = replace(subject, shape=lambda: ended_after(steps, call))
    try:
        again = judge_own_code(subject, reached, device=device, steps=min(steps, STEPS), limits=limits)
    except UsageError as error:  # what it reaches cannot be restored
        again = Run(findings=(COVERAGE.skip(subject.name, f"compiled code was not judged: {error}"),))
    if caches:
        run = _with_caches(run, again)
    if checks == ():
        return run
    wanted = {*_OF_GRAPHS, AUTOCAST_STATE.slug} if checks is None else {*checks} - {CACHE_ARTIFACTS.slug}
    findings = [f for f in again.findings if f.check in wanted or f.check == COVERAGE.slug]
    if checks is None:  # a skip is reported only where it was asked for
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


def _environment(placement: Placement) -> dict[str, Scalar]:
    facts = environment(placement.device)
    emulated = placement.emulated or (emulation.policy.device if (emulation := active()) is not None else "")
    return {**facts, "autocast policy": f"{emulated}, emulated"} if emulated else facts


def _low_dtypes(dtype: DType | Sequence[DType] | None, device: str) -> list[torch.dtype]:
    names = parse_dtypes(("float16", "bfloat16") if dtype is None else dtype)
    if torch.device(device).type == "cuda" and "bfloat16" in names and not torch.cuda.is_bf16_supported():
        raise UsageError(f"dtype bfloat16 is not supported by device {device!r}: use dtype='float16'")
    return [getattr(torch, name) for name in names]


def assert_numerics(
    model: object,
    inputs: object = None,
    *,
    device: str | None = None,
    dtype: DType | Sequence[DType] | None = None,
    autocast: bool | None = None,
    compile: bool = True,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    name: str = "",
) -> Run:
    """Assert that `model(*inputs)` is numerically safe in low precision, forward and backward.

    model, inputs: a module or function and its arguments (a tuple, a mapping of keyword arguments, or the one
    argument); or a `Subject` alone, which also takes a loss and declared dtypes. Keywords are those of `audit`. Returns
    the run; raises `AssertionError` with every failure, and `UsageError` as `audit` does.
    """
    __tracebackhide__ = True
    subject = subject_of(model, inputs, name)
    return verify(
        audit(subject, device=device, dtype=dtype, autocast=autocast, compile=compile, checks=checks, limits=limits)
    )
