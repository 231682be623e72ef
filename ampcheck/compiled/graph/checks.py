"""Judge a record of a compiled run: breaks, recompilations, eager code, caches, CUDA graphs. No torch runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ampcheck.catalog.autocast import AUTOCAST_STATE
from ampcheck.catalog.compiled import (
    CACHE_ARTIFACTS,
    COMPILED_ERROR,
    COMPILED_EXCEPTION,
    CUDAGRAPH,
    EAGER_FALLBACK,
    GRAPH_BREAK,
    RECOMPILE,
)
from ampcheck.catalog.numerics import COVERAGE
from ampcheck.compiled.graph.stats import RESET_BEFORE, Artifacts, Fallback, GraphStats, Recompile
from ampcheck.core.check import Check
from ampcheck.core.run import Finding, Scalar, Table, Verdict, Where
from ampcheck.core.text import cannot_run, counted, listed

COMPILER_CHECKS = tuple(map(str, (GRAPH_BREAK, RECOMPILE, EAGER_FALLBACK, CACHE_ARTIFACTS, CUDAGRAPH)))
"""The names of the checks that only graphs have."""

GRAPH_CHECKS = (*COMPILER_CHECKS, str(AUTOCAST_STATE), str(COVERAGE))
"""The names of the checks on graphs."""

_NAMES = 6
"""How many names a message lists."""
_ROWS = 60
"""Rows of one table."""

_GUARDS = {
    "other": "something else",
    "invalidated": "an object that was freed",
    "constant": "a constant",
    "constant attribute": "a constant attribute",
    "identity": "an object's identity",
    "length": "the length of a list or dict",
    "type": "the type of a value",
    "training flag": "the training flag",
    "grad mode": "the grad mode",
}
"""Kinds of guards as a message names them."""

_HINTS = {
    "recompile limit": "change what the guard checks, so that one graph serves them all; or raise "
    "torch._dynamo.config.recompile_limit",
    "backend error": "look at the exception; with torch._dynamo.config.suppress_errors = False it is raised",
    "unseen": RESET_BEFORE,
    "switched off": "call torch.compiler.set_stance('default'), and set a stance in a with statement, which ends it",
    "left out": "write torch.compile(layer) and use its result, instead of layer.compile(); or compile the module of "
    "your own that calls the layer",
    "skipped": "look at TORCH_LOGS=dynamo for the reason; functions of files that Dynamo leaves out, generators and "
    "code under a dispatch mode are not compiled",
}


def check_graph(stats: GraphStats, *, max_breaks: int = 0, max_recompiles: int = 0) -> list[Finding]:
    """Every verdict on a compiled run. max_breaks: in one call; max_recompiles: beyond those of the warm-up."""
    if stats.unsupported:
        return [COVERAGE.skip(stats.subject, f"graphs were not judged: {stats.unsupported}")]
    findings = [
        *check_breaks(stats, max_breaks),
        *check_recompiles(stats, max_recompiles),
        *check_fallbacks(stats),
        *check_artifacts(stats),
        *check_cudagraphs(stats),
        *check_state(stats),
        *check_error(stats),
        *check_finite(stats),
    ]
    return [*findings, *check_evidence(stats, any(f.verdict is Verdict.FAIL for f in findings))]


def check_breaks(stats: GraphStats, limit: int) -> list[Finding]:
    """A call runs into no more graph breaks than the limit; one failure for each line."""
    count = sum(each.times for each in stats.breaks)
    raised = stats.error.kind if stats.error is not None and stats.error.expected and stats.breaks else ""
    if not raised and count <= limit:
        if stats.compiled_before and _seen(stats):
            message = f"compiled before the block: breaks of {counted(stats.compiled_before, 'functions')} are unknown"
            return [GRAPH_BREAK.skip(stats.subject, message, hint=RESET_BEFORE.replace("the reason", "them"))]
        message = f"{counted(count, 'graph breaks', 'no')} in one call, at most {limit} allowed"
        message += f": {_listed(each.where.place for each in stats.breaks)}" if stats.breaks else ""
        return _passed(GRAPH_BREAK, stats, message, count, limit)
    eager, findings = _broken(stats), []
    for graph_break in stats.breaks:
        times = "once" if graph_break.times == 1 else f"{graph_break.times} times"
        message = f"at most {limit} graph breaks are allowed in one call, it has {count}"
        message += f"; {times} the graph ends here: {graph_break.reason}"
        message += f". fullgraph=True raised it: {raised}" if raised else ""
        message += f"; eager because of breaks: {_listed(eager)}" if eager else ""
        hint = graph_break.hint or "rewrite the line with tensor operations, or move it out of the compiled function"
        findings.append(
            GRAPH_BREAK.fail(stats.subject, message, where=graph_break.where, hint=hint, observed=count, limit=limit)
        )
    return findings


def check_recompiles(stats: GraphStats, limit: int) -> list[Finding]:
    """No frame is compiled again beyond the limit; one failure for each frame and kind of guard."""
    charged = [recompile for recompile in stats.recompiles if _counts(recompile, stats)]
    free = [recompile for recompile in stats.recompiles if not _counts(recompile, stats)]
    spared = f"; {counted(len(free), 'recompilations')} to learn what varies ({_kinds(free)})" if free else ""
    beyond = " beyond the warm-up" if stats.warm else ""
    if len(charged) <= limit:
        message = f"{counted(len(charged), 'recompilations', 'no')}{beyond}, at most {limit} allowed"
        message += f" ({_kinds(charged)})" if charged else ""
        return _passed(RECOMPILE, stats, message + spared, len(charged), limit)
    groups: dict[tuple[str, str], list[Recompile]] = {}
    for recompile in charged:
        groups.setdefault((recompile.frame, recompile.kind), []).append(recompile)
    findings = []
    for (frame, kind), group in groups.items():
        message = f"at most {limit} recompilations are allowed{beyond}, there were {len(charged)}; "
        message += f"{len(group)} of {frame} by its guard on {_GUARDS.get(kind, kind)}: "
        message += _listed(f"`{recompile.guard}`" for recompile in group)
        if late := sum(recompile.late for recompile in group):
            message += f"; {counted(late, 'compilations')} after the warm-up"
        findings.append(
            RECOMPILE.fail(
                stats.subject,
                message + spared,
                where=group[-1].where,
                hint=group[-1].hint,
                observed=len(charged),
                limit=limit,
            )
        )
    return findings


def _counts(recompile: Recompile, stats: GraphStats) -> bool:
    """Whether a recompilation counts: after the warm-up, of a value that had varied, or without any warm-up."""
    first_size = recompile.kind == "shape" and not recompile.repeated
    return recompile.late or recompile.repeated or not (stats.warm or first_size)


def _kinds(recompiles: Iterable[Recompile]) -> str:
    counts = Counter(recompile.kind for recompile in recompiles)
    return ", ".join(f"{kind} {count}" if count > 1 else kind for kind, count in counts.items())


def check_fallbacks(stats: GraphStats) -> list[Finding]:
    """All code inside the compiled region runs compiled; eager code because of a graph break is part of the break."""
    findings = []
    for fallback in stats.fallbacks:
        if fallback.cause == "graph break":
            continue
        names = fallback.names
        what = f"{names[0] or 'the model'} silently falls" if len(names) == 1 else f"{len(names)} modules silently fall"
        if fallback.cause in ("passed by", "not used"):
            findings.append(_passed_by(stats, fallback))
            continue
        message = f"compiled code must not fall back to eager; {what} back"
        message += f" ({_listed(names)})" if len(names) > 1 else ""
        message += f": {fallback.reason}" if fallback.cause == "unseen" else f": {fallback.cause}: {fallback.reason}"
        where = fallback.where if len(names) > 1 else _in_module(fallback)
        hint = _HINTS[fallback.cause]
        findings.append(
            EAGER_FALLBACK.fail(stats.subject, message, where=where, hint=hint, observed=len(names), limit=0)
        )
    if findings:
        return findings
    broken = _broken(stats)
    message = "nothing runs eager" if not broken else f"eager because of graph breaks alone: {_listed(broken)}"
    message += " in the trace of compilations; calls could not be counted" if stats.ran is None else ""
    return _passed(EAGER_FALLBACK, stats, message, 0, 0)


def _passed_by(stats: GraphStats, fallback: Fallback) -> Finding:
    """The finding for a module that is compiled, and of which only the original ran."""
    sure = fallback.cause == "passed by"
    message = f"what is compiled must run compiled; {fallback.names[0]} is compiled and ran in eager mode alone: "
    message += "no compiled code ran" if sure else "no compiled code ran in the steps that were observed"
    verdict = Verdict.FAIL if sure else Verdict.WARN
    return EAGER_FALLBACK.finding(verdict, stats.subject, message, where=fallback.where, hint=fallback.reason)


def _broken(stats: GraphStats) -> list[str]:
    """Modules and functions that run eager because a graph break splits them."""
    return [
        name or "the model"
        for fallback in stats.fallbacks
        if fallback.cause == "graph break"
        for name in fallback.names
    ]


def _in_module(fallback: Fallback) -> Where:
    return replace(fallback.where, phase="compile", module=fallback.names[0] if "(" not in fallback.names[0] else "")


def check_artifacts(stats: GraphStats) -> list[Finding]:
    """Artifacts are saved after compilation, and those that were loaded are used."""
    findings = []
    for call in stats.artifacts:
        message, hint = _artifact_failure(call)
        if message:
            message = f"{message} ({call.process})"
            findings.append(CACHE_ARTIFACTS.fail(stats.subject, message, where=call.where, hint=hint))
            continue
        message = f"{call.hits} of {call.keys} loaded artifacts were used"
        if call.action == "save":
            message = f"torch.compiler.save_cache_artifacts saved {call.keys} artifacts of {call.compiled} graphs"
        message = f"{message} ({call.process})"
        findings.append(CACHE_ARTIFACTS.passed(stats.subject, message, call.keys, where=call.where))
    return findings


def _artifact_failure(call: Artifacts) -> tuple[str, str]:
    """Message and hint of a call that saved nothing or loaded for nothing; "" for all others."""
    if call.action == "save" and not call.keys:
        message = "torch.compiler.save_cache_artifacts must be called after compilation; it returned None "
        message += f"and saved nothing, with {counted(call.compiled, 'graphs', 'no')} compiled before it"
        if call.compiled:
            return message, "caches are off or were bypassed: look at torch._inductor.config.fx_graph_cache"
        return message, "run the compiled function first, and its backward, in the process that saves"
    if call.action == "load" and not call.keys:
        message = "torch.compiler.load_cache_artifacts must load what was saved; it found no artifact in its bytes"
        return message, "save and load with one release of PyTorch, and pass on the bytes, the first of the pair"
    if call.action == "load" and not call.hits:
        message = f"loaded artifacts must be used; none of {call.keys} was, and {counted(call.later, 'graphs', 'no')} "
        message += "compiled afterwards"
        hint = "load before the first compiled call; model, inputs, PyTorch, device and settings must be the same"
        return message, hint
    return "", ""


def check_cudagraphs(stats: GraphStats) -> list[Finding]:
    """Where CUDA graphs are asked for, every graph becomes one, and no output is read after it was overwritten.

    Code that is compiled already, or compiles by itself, has asked for them where one was skipped.
    """
    if stats.error is not None and "overwritten by a subsequent run" in stats.error.message:
        message = f"no output may be read after the next run has overwritten it; it was: {stats.error.message}"
        hint = "clone the output, or call torch.compiler.cudagraph_mark_step_begin() before each step"
        return [CUDAGRAPH.fail(stats.subject, message, where=stats.error.where, hint=hint)]
    if not stats.wants_cudagraphs and not stats.skips:
        return []
    asks = stats.wants_cudagraphs or "a mode or option of the compiled code's own"
    on_cpu = bool(stats.skips) and all("cpu device" in reason for reason in stats.skips)
    if stats.device.startswith("cpu") or (on_cpu and not stats.wants_cudagraphs):
        message = f"{asks} asks for CUDA graphs, which need a CUDA device; this is cpu"
        return [CUDAGRAPH.skip(stats.subject, message)]
    if stats.skips:
        # max-autotune wants speed, with CUDA graphs or without; a mode that is not known may be that one.
        sure = stats.wants_cudagraphs and "autotune" not in stats.wants_cudagraphs
        reasons = _listed(f"{reason} ({count})" for reason, count in stats.skips.items())
        message = f"{asks} asks for CUDA graphs; they were skipped: {reasons}"
        hint = "keep every input on the device and unchanged in place, or leave out the mode"
        verdict = Verdict.FAIL if sure else Verdict.WARN
        return [CUDAGRAPH.finding(verdict, stats.subject, message, where=Where("compile"), hint=hint)]
    return [CUDAGRAPH.passed(stats.subject, "no CUDA graph was skipped", _seen(stats))]


def check_state(stats: GraphStats) -> list[Finding]:
    """A compiled call leaves autocast as eager mode leaves it."""
    if not stats.state_changes:
        return []
    changes = ", ".join(f"{name} {old} before and {new} after" for name, (old, new) in stats.state_changes.items())
    message = f"a compiled call must leave autocast's state as the eager call does; {changes}"
    message += f" under backend={stats.changed_by!r}" if stats.changed_by else ""
    message += f"; it raises {stats.error.eager or stats.error.message}" if stats.error is not None else ""
    hint = "enter autocast outside of the compiled function, where an exception closes it again"
    where = stats.error.where if stats.error is not None else Where("compile")
    return [AUTOCAST_STATE.fail(stats.subject, message, where=where, hint=hint)]


def check_error(stats: GraphStats) -> list[Finding]:
    """The compiled run raises nothing that the eager run does not."""
    error = stats.error
    if error is not None and error.machine:
        return [COMPILED_EXCEPTION.skip(stats.subject, f"not judged: {cannot_run(error.machine)}")]
    if error is None or error.eager != "" or (error.expected and stats.breaks) or "overwritten" in error.message:
        return []
    message = f"the compiled run must not raise where the eager run does not; it raised {error.message}"
    return [COMPILED_EXCEPTION.fail(stats.subject, message, where=error.where)]


def check_finite(stats: GraphStats) -> list[Finding]:
    """What eager mode keeps finite stays finite in compiled code."""
    if not stats.lost:
        return []
    message = "compiled code must not make infinities or NaN where eager mode makes none; not finite when compiled: "
    hint = "judge the compiled module by itself, audit((model, inputs)): it names the output or gradient; "
    hint += "ampcheck blame finds the op"
    where = Where("compile")
    return [COMPILED_ERROR.fail(stats.subject, message + _listed(stats.lost), where=where, hint=hint)]


def check_evidence(stats: GraphStats, failed: bool) -> list[Finding]:
    """Something was compiled or ran compiled, and the subject ran to its end."""
    error = stats.error
    if error is not None and error.machine:
        return [] if failed else [COVERAGE.skip(stats.subject, f"not judged: {cannot_run(error.machine)}")]
    if error is not None and error.eager != "" and not failed:
        raised = f"raised {error.message}" if error.eager is None else f"raises {error.eager} in eager mode too"
        message = f"the subject must run to its end, but it {raised}"
        return [COVERAGE.fail(stats.subject, message, where=error.where)]
    if _seen(stats) or stats.coverage.seen.get("graphs of child Pythons"):
        return []
    declined = [each.reason for each in stats.breaks] + [each.reason for each in stats.fallbacks]
    if declined:
        return [COVERAGE.skip(stats.subject, f"no graph was compiled: Dynamo declined: {declined[0]}")]
    if failed or stats.artifacts:
        return []
    message = "the subject must compile at least one graph or run compiled code; it did neither"
    hint = "call what torch.compile returned; torch._dynamo.config.disable, TORCHDYNAMO_DISABLE and the stance "
    hint += "'force_eager' switch it off"
    return [COVERAGE.fail(stats.subject, message, hint=hint)]


def _seen(stats: GraphStats) -> int:
    """Graphs that were compiled and compiled runs."""
    return stats.coverage.seen.get("graphs", 0) + stats.coverage.seen.get("compiled runs", 0)


def _passed(check: Check, stats: GraphStats, message: str, observed: float, limit: float) -> list[Finding]:
    """A pass; nothing where neither a graph nor a compiled run was seen, which `coverage` reports."""
    seen = _seen(stats)
    return [check.passed(stats.subject, message, seen, observed=observed, limit=limit)] if seen else []


def _listed(names: Iterable[str]) -> str:
    return listed(dict.fromkeys(names), _NAMES)


def tables(stats: GraphStats) -> tuple[Table, ...]:
    """Graphs with their compile time, recompilations by kind, breaks, caches and modes; empty ones are left out."""
    graphs = [(g.frame, g.ops, round(g.seconds, 2), "after the warm-up" if g.late else "") for g in stats.graphs]
    again = [(r.kind, r.frame, r.guard, _counted(r, stats)) for r in stats.recompiles]
    breaks = [(each.where.place, each.times, each.reason) for each in stats.breaks]
    columns_and_rows: tuple[tuple[str, tuple[str, ...], Sequence[Sequence[Scalar]], Check], ...] = (
        ("Graphs", ("frame", "ops", "compile seconds", "when"), graphs, COVERAGE),
        ("Recompilations", ("kind", "frame", "guard that failed", "counted"), again, RECOMPILE),
        ("Graph breaks", ("line", "times in one call", "reason"), breaks, GRAPH_BREAK),
        ("Compiler caches", ("cache", "count"), list(stats.caches.items()), CACHE_ARTIFACTS),
        ("Graphs of each mode", ("mode", "new graphs"), list(stats.modes.items()), RECOMPILE),
    )
    return tuple(
        Table(
            f"{title}: {stats.subject}",
            columns,
            list(rows[:_ROWS]),
            check.slug,
            f"the first {_ROWS} of {len(rows)}" if len(rows) > _ROWS else "",
        )
        for title, columns, rows, check in columns_and_rows
        if rows
    )


def _counted(recompile: Recompile, stats: GraphStats) -> str:
    if recompile.late:
        return "yes, after the warm-up"
    return "yes" if _counts(recompile, stats) else "no, it shows what varies"
