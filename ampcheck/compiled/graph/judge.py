"""Does a model stay in its graphs? `assert_graph` runs a subject compiled, `observe_graphs` watches a block."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from ampcheck.compiled.graph.checks import check_graph, tables
from ampcheck.compiled.graph.children import watched_children
from ampcheck.compiled.graph.recorder import Noting
from ampcheck.compiled.graph.records import GraphStats
from ampcheck.compiled.graph.run import (
    Ended,
    build,
    compare_eager,
    count_modes,
    elsewhere,
    own_device,
    run_passes,
)
from ampcheck.compiled.graph.trace import LATE, WARM
from ampcheck.compiled.options import check_options
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, as_result, is_for_the_runner
from ampcheck.core.formats import format_of
from ampcheck.core.run import Run, emit, verify
from ampcheck.core.subject import Kind, Subject, name_of
from ampcheck.numerics.compiled import dynamo_still
from ampcheck.torchtools.copying import NO_SCRIPT, is_scripted
from ampcheck.torchtools.dynamo import reset, untold
from ampcheck.torchtools.restore import restoring

STEPS = 3
"""How many steps of a training loop run; all but the last are its warm-up."""


@restoring
def assert_graph(
    model: Any,
    calls: Any = None,
    *,
    max_breaks: int = 0,
    max_recompiles: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    warmup: int = 1,
    modes: bool = False,
    name: str = "",
) -> Run:
    """Assert that a model, once compiled, stays in its graphs: no break, no recompilation, nothing that runs eager.

    model, calls: a module or function with a list of calls (`assert_graph(step, [(x,), (y,)])`), or with the arguments
    of one call as a tuple, a mapping or the one argument; a list of blocks with a list of one set of arguments; a
    `Subject` or one of its shapes alone; or a callable without arguments that runs compiled code of its own. What went
    through `torch.compile` or `compile()` already, whole or in parts, runs with the settings that it has; everything
    else is copied and compiled with those given here. dtype: what autocast casts to; None runs without it.

    All calls run `warmup` times and then once more. In the warm-up each frame is compiled once, and once more for each
    value that turns out to vary, as a size that Dynamo then makes dynamic; what goes beyond is counted against
    `max_recompiles`, and so is every compilation after it. max_breaks: graph breaks in one call, by how often they are
    run into. modes: also tell how many graphs train, eval, no_grad, autocast and inference_mode make.

    Dynamo is reset before and after. Returns the run; raises `AssertionError` with every failure, `UsageError` for what
    cannot be judged.
    """
    __tracebackhide__ = True
    subject = _subject(model, calls, name)
    return verify(
        judge_graph(
            subject,
            max_breaks=max_breaks,
            max_recompiles=max_recompiles,
            dtype=_autocast_to(dtype),
            device=device,
            backend=backend,
            dynamic=dynamic,
            mode=mode,
            options=options,
            fullgraph=fullgraph,
            warmup=warmup,
            modes=modes,
        )
    )


def judge_graph(
    subject: Subject,
    *,
    max_breaks: int = 0,
    max_recompiles: int = 0,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    **options: Any,
) -> Run:
    """As `assert_graph`, for a `Subject`: the verdict stands in the run, it is neither raised nor emitted."""
    _times_checked(max_breaks, max_recompiles)
    stats = measure_graph(subject, dtype=dtype, device=device, **options)
    return _run(stats, max_breaks, max_recompiles)


@dynamo_still()
def measure_graph(
    subject: Subject,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    warmup: int = 1,
    modes: bool = False,
) -> GraphStats:
    """Run a subject compiled and note what Dynamo tells and what then really runs. Parameters as of `assert_graph`."""
    settings: dict[str, Any] = {
        "backend": backend,
        "dynamic": dynamic,
        "mode": mode,
        "options": options,
        "fullgraph": fullgraph,
    }
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 1:
        raise UsageError(f"warmup is a number of passes through the calls, 1 or more; found {warmup!r}")
    check_options(subject, settings)
    if why := untold():
        return GraphStats(subject.name, untold=why)
    if subject.kind in (Kind.CALL, Kind.TRAINING):
        return _measure_use(subject, device)
    if is_scripted(subject):
        return GraphStats(subject.name, untold=NO_SCRIPT)
    chosen = {key: dict(value) if key == "options" else value for key, value in settings.items() if value is not None}
    device = own_device(subject, device)
    reset()
    noting = Noting()
    try:
        with noting.trace():
            blocks = build(subject, device, chosen)

            def watching(number: int) -> AbstractContextManager[Callable[[], None]]:
                if number < warmup:
                    return nullcontext(noting.notes.next_call)
                noting.notes.stage = LATE
                return noting.calls_counted(blocks.names(), blocks.functions)

            ended = run_passes(subject, blocks, device=device, dtype=dtype, warmup=warmup, watching=watching)
        compare_eager(ended, subject, blocks, device=device, dtype=dtype)
    finally:
        reset()
    stats = noting.stats(subject.name, ended, device=device, asks=_asks_for_cudagraphs(mode, options))
    if stats.breaks and blocks.plain:
        stats = replace(stats, elsewhere=elsewhere(subject, device, dtype))
    return replace(stats, modes=count_modes(subject, device)) if modes and blocks.plain else stats


class GraphObservation:
    """A context that records what compiled code does while a block runs; `stats` is complete when the block ends."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self.stats: GraphStats | None = None
        self._stack = ExitStack()

    def __enter__(self) -> GraphObservation:
        if why := untold():
            self.stats = GraphStats(self._subject, untold=why)
            return self
        self._noting = Noting(fresh=False)
        self._noting.notes.stage = WARM  # no call is known as the first
        with ExitStack() as stack:
            stack.enter_context(self._noting.trace())
            self._noting.children = stack.enter_context(watched_children())
            stack.enter_context(self._noting.calls_counted({}, frozenset()))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        if self.stats is None:
            ended = Ended()
            ended.error = None if error is None or is_for_the_runner(error) else error
            self.stats = self._noting.stats(self._subject, ended, device=_best("cpu"), warm=False)


def graph_run(stats: GraphStats) -> Run:
    """The findings about an observed block."""
    return _run(stats, 0, 0)


class Observed:
    """What a watched block gets: `run` holds the findings and `stats` what they rest on, once the block is left."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.stats: GraphStats | None = None


@contextmanager
def observe_graphs(
    *, max_breaks: int = 0, max_recompiles: int = 0, subject: str = "this block", raises: bool = True
) -> Iterator[Observed]:
    """Watch what compiled code does while the block runs: a training step, an evaluation, a whole test.

    Recompilations are told by the kind of guard that failed, among them train and eval, grad mode, inference mode and
    autocast. There is no warm-up: all count against `max_recompiles`, but for the one by which Dynamo learns that a
    size varies. What was compiled before the block, as in a warm-up there, is judged by what it runs: a graph break of
    it fails by its place alone, where none is seen `graph-break` is skipped, and reasons are not known; call
    `torch.compiler.reset()` before the block, or warm up inside it, to see all. Also seen are
    `torch.compiler.save_cache_artifacts` and `load_cache_artifacts`, here and in child processes that run this Python.

    On leaving the run is emitted and stands in `run` of what `as` names; with `raises` a failure raises
    `AssertionError`. An exception of the block itself goes on. Dynamo is not reset. Calls of the thread that entered
    the block are counted with Python's profiling hook, which slows plain Python code down.
    """
    __tracebackhide__ = True
    _times_checked(max_breaks, max_recompiles)
    observed = Observed()
    if why := untold():
        observed.stats = GraphStats(subject, untold=why)
        yield observed
        observed.run = _run(observed.stats, max_breaks, max_recompiles)
        emit(observed.run)
        return
    noting, ended = Noting(fresh=False), Ended()
    noting.notes.stage = WARM  # there is no first call that would be known as such
    try:
        with noting.trace(), watched_children() as noting.children, noting.calls_counted({}, frozenset()):
            yield observed
    except BaseException as error:
        ended.error = None if is_for_the_runner(error) else error
        observed.stats = noting.stats(subject, ended, device=_best("cpu"), warm=False)
        observed.run = _run(observed.stats, max_breaks, max_recompiles)
        emit(observed.run)
        raise
    observed.stats = noting.stats(subject, ended, device=_best("cpu"), warm=False)
    observed.run = _run(observed.stats, max_breaks, max_recompiles)
    (verify if raises else emit)(observed.run)


@dynamo_still()
def _measure_use(subject: Subject, device: str) -> GraphStats:
    """A callable, or a training loop, which runs compiled code of its own."""
    reset()
    noting, ended = Noting(), Ended()
    training = subject.kind is Kind.TRAINING
    try:
        with (
            warnings.catch_warnings(),
            noting.trace(),
            watched_children() as noting.children,
            noting.calls_counted({}, frozenset()) as next_call,
        ):
            warnings.simplefilter("ignore")  # as in the passes of a model
            for step in range(STEPS if training else 1):
                next_call()
                noting.notes.stage = LATE if training and step == STEPS - 1 else WARM
                try:
                    subject.run_step(step) if training else subject.run_call()
                    ended.calls += 1
                except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; the run reports it
                    ended.error = as_result(error)
                    break
    finally:
        reset()
    return noting.stats(subject.name, ended, device=_best(device), warm=training)


def _best(device: str) -> str:
    """Where code of the user's own may run: on a GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else device


def _run(stats: GraphStats, max_breaks: int, max_recompiles: int) -> Run:
    findings = check_graph(stats, max_breaks=max_breaks, max_recompiles=max_recompiles)
    return Run(
        environment(stats.device), tuple(findings), stats.coverage, tables(stats), title=f"graphs of {stats.subject}"
    )


def _subject(model: Any, calls: Any, name: str) -> Subject:
    if calls is None:
        if isinstance(model, Subject):
            if name:
                raise UsageError("a Subject says itself what it is: name belongs into it")
            return model
        return Subject(model, name=name or getattr(model, "__name__", "subject"))
    if isinstance(model, Subject):
        raise UsageError("a Subject has its calls already: leave calls out")
    return Subject((model, calls), name=name or name_of(model))


def _times_checked(max_breaks: Any, max_recompiles: Any) -> None:
    for what, given in (("max_breaks", max_breaks), ("max_recompiles", max_recompiles)):
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise UsageError(f"{what} is a number of times, 0 or more; found {given!r}")


def _autocast_to(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    name = format_of(dtype).name
    if name not in ("float16", "bfloat16"):
        raise UsageError(f"autocast casts to float16 or bfloat16, not to {name}; dtype=None runs without it")
    found: torch.dtype = getattr(torch, name)
    return found


def _asks_for_cudagraphs(mode: str | None, options: Mapping[str, Any] | None) -> str:
    if mode in ("reduce-overhead", "max-autotune"):
        return f"mode={mode!r}"
    return "triton.cudagraphs" if (options or {}).get("triton.cudagraphs") else ""
