"""Judge the graphs of a subject (`judge_graph`) or of a block of code (`GraphObservation`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType

import torch

from ampcheck.compiled.graph.calls import CallProfiler
from ampcheck.compiled.graph.checks import check_graph, tables
from ampcheck.compiled.graph.own import accelerator, measure_own_code
from ampcheck.compiled.graph.recorder import GraphRecorder
from ampcheck.compiled.graph.run import Passes, Runner, own_device
from ampcheck.compiled.graph.trace import LATE, WARM
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.environment import environment
from ampcheck.core.errors import is_for_the_runner
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Run
from ampcheck.core.subject import Kind, Subject
from ampcheck.numerics.compiled import dynamo_warnings_suppressed
from ampcheck.records.graphs import GraphStats
from ampcheck.torchtools.copying import NO_SCRIPT, is_scripted
from ampcheck.torchtools.dynamo import reset, trace_unsupported

_DEFAULT_OPTIONS, _DEFAULT_LIMITS = CompileOptions(), GraphLimits()


def judge_graph(
    subject: Subject,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    options: CompileOptions = _DEFAULT_OPTIONS,
    limits: GraphLimits = _DEFAULT_LIMITS,
) -> Run:
    """Run a subject compiled and judge its graphs; nothing is raised or emitted.

    All calls run `limits.warmup` times and then once more. In the warm-up each frame is compiled once, and once more
    for each value that turns out to vary, such as a size that Dynamo then makes dynamic, and for a size of 0 or 1,
    which it always specialises; further compilations count against `limits.max_recompiles`. A subject that is compiled
    already, whole or in parts, runs with its own settings; a callable without arguments and a training loop run as they
    are. dtype: what autocast casts to; None runs without.
    """
    stats = measure_graph(subject, device=device, dtype=dtype, options=options, limits=limits)
    return graph_run(stats, limits)


@dynamo_warnings_suppressed()
def measure_graph(
    subject: Subject,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    options: CompileOptions = _DEFAULT_OPTIONS,
    limits: GraphLimits = _DEFAULT_LIMITS,
    grad: bool = True,
) -> GraphStats:
    """The record of a compiled run, see `judge_graph`. Dynamo is reset before and after.

    grad: the grad mode. A model whose ops have no backward, in eager mode either, runs without gradients.
    """
    options.require_effect(subject)
    if reason := trace_unsupported():
        return GraphStats(subject.name, reason)
    if subject.kind in (Kind.CALL, Kind.TRAINING):
        return measure_own_code(subject, device)
    if is_scripted(subject):
        return GraphStats(subject.name, NO_SCRIPT)
    device = own_device(subject, device)
    runner, recorder = Runner(subject, device, dtype, grad), GraphRecorder()
    reset()
    try:
        with recorder.trace():
            blocks = runner.build(options.arguments())

            @contextmanager
            def around(number: int) -> Iterator[Callable[[], None]]:
                if number < limits.warmup:
                    yield recorder.log.next_call
                    return
                recorder.log.stage = LATE
                with recorder.profile(CallProfiler(recorder.log, blocks.names(), blocks.functions)) as calls:
                    yield calls.next_call

            passes = runner.run_passes(blocks, limits.warmup, around)
        runner.compare_eager(passes, blocks)
    finally:
        reset()
    if grad and subject.loss is None and passes.eager is not None and passes.in_backward:  # the default loss is ours
        return measure_graph(subject, device=device, dtype=dtype, options=options, limits=limits, grad=False)
    stats = recorder.stats(subject.name, passes, device=device, wants_cudagraphs=_wants_cudagraphs(options))
    return replace(stats, modes=runner.count_modes()) if limits.modes and blocks.plain else stats


class GraphObservation:
    """A context that records what compiled code does while a block runs: a training step, an evaluation, a test.

    `stats` is complete when the block ends. There is no warm-up: all recompilations count, but for the one by which
    Dynamo learns that a size varies. Code that was compiled before the block is judged by what it runs: a graph break
    of it has no reason, and where none is seen `graph-break` is skipped; call `torch.compiler.reset()` before the
    block, or warm up inside it, to see all. Also recorded are `torch.compiler.save_cache_artifacts` and
    `load_cache_artifacts`, here and in child processes that run this Python. Dynamo is not reset. Calls of the thread
    that entered the block are counted with Python's profiling hook, which slows plain Python code down.
    """

    def __init__(self, subject: str) -> None:
        self.stats: GraphStats | None = None
        self._subject = subject
        self._stack = ExitStack()

    def __enter__(self) -> GraphObservation:
        if reason := trace_unsupported():
            self.stats = GraphStats(self._subject, reason)
            return self
        self._recorder = GraphRecorder(fresh=False)
        self._recorder.log.stage = WARM  # the first call is not known as such
        self._stack.enter_context(self._recorder.block())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        if self.stats is None:
            passes = Passes()
            passes.error = None if error is None or is_for_the_runner(error) else error
            self.stats = self._recorder.stats(self._subject, passes, device=accelerator("cpu"), warm=False)


def graph_run(stats: GraphStats, limits: GraphLimits = _DEFAULT_LIMITS) -> Run:
    """The findings about the graphs of a subject or a block."""
    findings = check_graph(stats, limits)
    return Run(
        environment(stats.device), tuple(findings), stats.coverage, tables(stats), title=f"graphs of {stats.subject}"
    )


def _wants_cudagraphs(options: CompileOptions) -> str:
    if options.mode in ("reduce-overhead", "max-autotune"):
        return f"mode={options.mode!r}"
    return "triton.cudagraphs" if (options.options or {}).get("triton.cudagraphs") else ""
