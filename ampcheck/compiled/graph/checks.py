"""Judge what a compiled run left behind: breaks, recompilations, what ran eager, caches, CUDA graphs. No torch runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampcheck.compiled.graph.records import SEE_IT, Fallback, GraphBreak, GraphStats, Recompile
from ampcheck.core.run import Finding, Scalar, Table, Verdict, Where, passed
from ampcheck.torchtools.unsupported import cannot_run

GRAPH_CHECKS = (
    "graph-break",
    "recompile",
    "eager-fallback",
    "cache-artifacts",
    "cudagraph",
    "autocast-state",
    "coverage",
)
"""The slugs of graph hygiene."""

_NAMED = 6
"""How many names a message tells."""
_ROWS = 60
"""Rows of one table."""

_PLAIN = {
    "other": "something else",
    "invalidated": "an object that was freed",
    "constant": "a constant",
    "constant attribute": "a constant attribute",
    "identity": "an object's identity",
    "training flag": "the training flag",
    "grad mode": "the grad mode",
}
"""Kinds of guards as a sentence has them."""

_MEND = {
    "recompile limit": "mend what the guard watches, so that one graph serves them all; or raise "
    "torch._dynamo.config.recompile_limit",
    "backend error": "look at the exception; with torch._dynamo.config.suppress_errors = False it is raised",
    "unseen": SEE_IT,
    "skipped": "look at TORCH_LOGS=dynamo for the reason; functions of files that Dynamo leaves out, generators and "
    "code under a dispatch mode are not compiled",
}


def check_graph(stats: GraphStats, *, max_breaks: int = 0, max_recompiles: int = 0) -> list[Finding]:
    """Every verdict on a compiled run. max_breaks: in one call; max_recompiles: beyond what the warm-up may need."""
    if stats.untold:
        return [Finding("coverage", Verdict.SKIP, stats.subject, f"graphs were not judged: {stats.untold}")]
    findings = [
        *check_breaks(stats, max_breaks),
        *check_recompiles(stats, max_recompiles),
        *check_fallbacks(stats),
        *check_artifacts(stats),
        *check_cudagraphs(stats),
        *check_state(stats),
        *check_stopped(stats),
    ]
    return [*findings, *check_evidence(stats, any(f.verdict is Verdict.FAIL for f in findings))]


# Breaks ----------------------------------------------------------------------------------------------------------


def check_breaks(stats: GraphStats, limit: int) -> list[Finding]:
    """A call runs into no more graph breaks than the limit; one failure for each place."""
    slug = "graph-break"
    count = sum(found.times for found in stats.breaks)
    refused = stats.stopped is not None and stats.stopped.asked and bool(stats.breaks)
    if not refused and count <= limit:
        if not _looked_at(stats):
            return []
        if stats.before:
            told = f"compiled before the block: breaks of {_number(stats.before, 'function')} cannot be told"
            return [_finding(slug, Verdict.SKIP, stats, told, hint=SEE_IT.replace("the reason", "them"))]
        told = f"{_number(count, 'graph break')} in one call, at most {limit} allowed"
        told += f": {_listed(_placed(found) for found in stats.breaks)}" if stats.breaks else ""
        return [_passed(slug, stats, told, observed=count, limit=limit, unit="breaks")]
    findings = []
    for found in stats.breaks:
        message = f"at most {limit} graph breaks are allowed in one call, it has {count}"
        message += f"; {_times(found)} the graph ends here: {found.reason}"
        message += f". fullgraph=True raised it: {stats.stopped.kind}" if refused and stats.stopped else ""
        message += f"; eager because of breaks: {_listed(_broken(stats))}" if _broken(stats) else ""
        message += _elsewhere(stats)
        hint = found.hint or "rewrite the place with tensor operations, or move it out of the compiled function"
        findings.append(_finding(slug, Verdict.FAIL, stats, message, found.where, hint, count, limit, "breaks"))
    return findings


def _times(found: GraphBreak) -> str:
    return "once" if found.times == 1 else f"{found.times} times"


def _placed(found: GraphBreak) -> str:
    return f"{found.where.file}:{found.where.line}"


def _elsewhere(stats: GraphStats) -> str:
    """What the other ways to ask say, where they part from what really ran."""
    count = sum(found.times for found in stats.breaks)
    parted = {
        how: said
        for how, said in stats.elsewhere.items()
        if said not in (f"{count} graph breaks", "raises Unsupported", "raises UserError")
        and not said.startswith("raises Fail")
    }
    return f" ({'; '.join(f'{how} {said}' for how, said in parted.items())})" if parted else ""


# Recompilations --------------------------------------------------------------------------------------------------


def check_recompiles(stats: GraphStats, limit: int) -> list[Finding]:
    """No frame is compiled again beyond the limit; one failure for each frame and kind of guard."""
    slug = "recompile"
    found = [one for one in stats.recompiles if _counts(one, stats)]
    rest = [one for one in stats.recompiles if not _counts(one, stats)]
    spared = f"; {_number(len(rest), 'recompilation')} to learn what varies ({_kinds(rest)})" if rest else ""
    if len(found) <= limit:
        if not _looked_at(stats):
            return []
        told = f"{_number(len(found), 'recompilation')}{' beyond the warm-up' if stats.warm else ''}, at most {limit} "
        told += f"allowed{f' ({_kinds(found)})' if found else ''}{spared}"
        return [_passed(slug, stats, told, observed=len(found), limit=limit, unit="recompilations")]
    groups: dict[tuple[str, str], list[Recompile]] = {}
    for one in found:
        groups.setdefault((one.frame, one.kind), []).append(one)
    findings = []
    for (frame, kind), ones in groups.items():
        message = f"at most {limit} recompilations are allowed{' beyond the warm-up' if stats.warm else ''}, "
        message += f"there were {len(found)}; {len(ones)} of {frame} by its guard on {_PLAIN.get(kind, kind)}: "
        message += _listed(f"`{one.guard}`" for one in ones)
        if any(one.late for one in ones):
            message += f"; {_number(sum(one.late for one in ones), 'compilation')} after the warm-up"
        message += spared
        last = ones[-1]
        findings.append(
            _finding(slug, Verdict.FAIL, stats, message, last.where, last.hint, len(found), limit, "recompilations")
        )
    return findings


def _counts(one: Recompile, stats: GraphStats) -> bool:
    """Whether a recompilation is the user's: after the warm-up, of a value that had varied, or without any warm-up."""
    learnt = one.kind == "shape" and not one.repeated
    return one.late or one.repeated or not (stats.warm or learnt)


def _kinds(ones: Iterable[Recompile]) -> str:
    counts: dict[str, int] = {}
    for one in ones:
        counts[one.kind] = counts.get(one.kind, 0) + 1
    return ", ".join(f"{kind} {count}" if count > 1 else kind for kind, count in counts.items())


# What ran eager --------------------------------------------------------------------------------------------------


def check_fallbacks(stats: GraphStats) -> list[Finding]:
    """Everything that is asked to run compiled does; what a graph break leaves outside is told with the break."""
    slug = "eager-fallback"
    findings = []
    for found in stats.fallbacks:
        if found.cause == "graph break":
            continue
        names = found.names
        what = f"{names[0] or 'the model'} runs" if len(names) == 1 else f"{len(names)} modules run"
        message = f"what is compiled must run compiled; {what} eager without a word"
        message += f" ({_listed(names)})" if len(names) > 1 else ""
        message += f": {found.reason}" if found.cause == "unseen" else f": {found.cause}: {found.reason}"
        where = found.where if len(names) > 1 else _in_module(found)
        findings.append(
            _finding(slug, Verdict.FAIL, stats, message, where, _MEND[found.cause], len(names), 0, "left eager")
        )
    if findings or not _looked_at(stats):
        return findings
    broken = _broken(stats)
    told = "nothing runs eager" if not broken else f"eager because of graph breaks alone: {_listed(broken)}"
    told += " by what Dynamo tells; calls could not be counted" if stats.ran is None else ""
    return [_passed(slug, stats, told, observed=0, limit=0, unit="left eager")]


def _broken(stats: GraphStats) -> list[str]:
    """What runs eager because a graph break cuts it."""
    return [name or "the model" for found in stats.fallbacks if found.cause == "graph break" for name in found.names]


def _in_module(found: Fallback) -> Where:
    known = found.where
    return Where("compile", found.names[0] if "(" not in found.names[0] else "", "", known.file, known.line)


# Caches and CUDA graphs ------------------------------------------------------------------------------------------


def check_artifacts(stats: GraphStats) -> list[Finding]:
    """Artifacts are saved after compilation, and what was loaded is used."""
    slug = "cache-artifacts"
    findings = []
    for call in stats.artifacts:
        bad, hint = False, ""
        if call.action == "save":
            message = f"torch.compiler.save_cache_artifacts saved {call.keys} artifacts of {call.compiled} graphs"
            if not call.keys:
                bad = True
                message = "torch.compiler.save_cache_artifacts must be called after compilation; it returned None "
                message += f"and saved nothing, with {_number(call.compiled, 'graph')} compiled before it"
                hint = "run the compiled function first, and its backward, in the process that saves"
                if call.compiled:
                    hint = "caches are off or were bypassed: look at torch._inductor.config.fx_graph_cache"
        else:
            message = f"{call.hits} of {call.keys} loaded artifacts were used"
            if not call.keys:
                bad = True
                message = (
                    "torch.compiler.load_cache_artifacts must load what was saved; it found no artifact in its bytes"
                )
                hint = "save and load with one release of PyTorch, and pass on the bytes, the first of the pair"
            elif not call.hits:
                bad = True
                message = f"loaded artifacts must be used; none of {call.keys} was, and {_number(call.later, 'graph')} "
                message += "compiled afterwards"
                hint = (
                    "load before the first compiled call; model, inputs, PyTorch, device and settings must be the same"
                )
        message += f" ({call.process})"
        if bad:
            findings.append(_finding(slug, Verdict.FAIL, stats, message, call.where, hint))
        else:
            findings.append(passed(slug, stats.subject, message, call.keys, where=call.where, hint=hint))
    return findings


def check_cudagraphs(stats: GraphStats) -> list[Finding]:
    """Where CUDA graphs are asked for, every graph becomes one, and no output is read after it was overwritten.

    Code that is compiled already, or compiles by itself, has asked for them where one was skipped.
    """
    slug = "cudagraph"
    if stats.stopped is not None and "overwritten by a subsequent run" in stats.stopped.message:
        message = f"no output may be read after the next run has overwritten it; it was: {stats.stopped.message}"
        hint = "clone the output, or call torch.compiler.cudagraph_mark_step_begin() before each step"
        return [_finding(slug, Verdict.FAIL, stats, message, stats.stopped.where, hint)]
    if not stats.wants_cudagraphs and not stats.skips:
        return []
    asks = stats.wants_cudagraphs or "a mode or option of the compiled code's own"
    on_cpu = bool(stats.skips) and all("cpu device" in reason for reason in stats.skips)
    if stats.device.startswith("cpu") or (on_cpu and not stats.wants_cudagraphs):
        message = f"{asks} asks for CUDA graphs, which need a CUDA device; this is cpu"
        return [_finding(slug, Verdict.SKIP, stats, message)]
    if stats.skips:
        # max-autotune wants speed, with CUDA graphs or without; a mode that is not known may be that one.
        sure = stats.wants_cudagraphs and "autotune" not in stats.wants_cudagraphs
        verdict = Verdict.FAIL if sure else Verdict.WARN
        told = _listed(f"{reason} ({count})" for reason, count in stats.skips.items())
        message = f"{asks} asks for CUDA graphs; they were skipped: {told}"
        hint = "keep every input on the device and unchanged in place, or leave out the mode"
        return [_finding(slug, verdict, stats, message, Where("compile"), hint)]
    return [_passed(slug, stats, "no CUDA graph was skipped")]


# State, exceptions, evidence -------------------------------------------------------------------------------------


def check_state(stats: GraphStats) -> list[Finding]:
    """A compiled call leaves autocast as eager mode leaves it."""
    if not stats.switches:
        return []
    told = ", ".join(f"{name} {old} before and {new} after" for name, (old, new) in stats.switches.items())
    message = f"a compiled call must leave autocast's state as the eager call does; {told}"
    message += f" under backend={stats.switched_by!r}" if stats.switched_by else ""
    message += f"; it raises {stats.stopped.eager or stats.stopped.message}" if stats.stopped is not None else ""
    hint = "enter autocast outside of the compiled function, where an exception closes it again"
    where = stats.stopped.where if stats.stopped is not None else Where("compile")
    return [_finding("autocast-state", Verdict.FAIL, stats, message, where, hint)]


def check_stopped(stats: GraphStats) -> list[Finding]:
    """The compiled run raises nothing that the eager run does not."""
    stopped = stats.stopped
    if stopped is not None and stopped.machine:
        return [_finding("compiled-exception", Verdict.SKIP, stats, f"not judged: {cannot_run(stopped.machine)}")]
    if stopped is None or stopped.eager != "" or (stopped.asked and stats.breaks) or "overwritten" in stopped.message:
        return []
    message = f"the compiled run must not raise where the eager run does not; it raised {stopped.message}"
    return [_finding("compiled-exception", Verdict.FAIL, stats, message, stopped.where)]


def check_evidence(stats: GraphStats, failed: bool) -> list[Finding]:
    """Something was compiled or ran compiled, and the subject ran to its end."""
    slug = "coverage"
    stopped = stats.stopped
    if stopped is not None and stopped.machine:
        return [] if failed else [_finding(slug, Verdict.SKIP, stats, f"not judged: {cannot_run(stopped.machine)}")]
    if stopped is not None and stopped.eager != "" and not failed:
        told = f"raised {stopped.message}" if stopped.eager is None else f"raises {stopped.eager} in eager mode too"
        message = f"what is judged must run to its end, but it {told}"
        return [_finding(slug, Verdict.FAIL, stats, message, stopped.where)]
    if _looked_at(stats) or stats.coverage.seen.get("graphs of child Pythons"):
        return []
    declined = [*(found.reason for found in stats.breaks), *(found.reason for found in stats.fallbacks)]
    if declined:
        return [_finding(slug, Verdict.SKIP, stats, f"no graph was compiled: Dynamo declined: {declined[0]}")]
    if failed or stats.artifacts:
        return []
    message = "what is judged must compile a graph or run compiled code, but nothing was compiled and none ran"
    hint = "call what torch.compile returned; torch._dynamo.config.disable, TORCHDYNAMO_DISABLE and the stance "
    hint += "'force_eager' switch it off"
    return [_finding(slug, Verdict.FAIL, stats, message, hint=hint)]


def _looked_at(stats: GraphStats) -> bool:
    seen = stats.coverage.seen
    return bool(seen.get("graphs") or seen.get("compiled runs"))


def _finding(
    slug: str,
    verdict: Verdict,
    stats: GraphStats,
    message: str,
    where: Where = Where(),  # noqa: B008  # frozen
    hint: str = "",
    observed: float | None = None,
    limit: float | None = None,
    unit: str = "",
) -> Finding:
    return Finding(slug, verdict, stats.subject, message, where, observed, limit, unit, hint)


def _passed(
    slug: str,
    stats: GraphStats,
    message: str,
    observed: float | None = None,
    limit: float | None = None,
    unit: str = "",
) -> Finding:
    """A pass that rests on the graphs that were compiled and the compiled runs."""
    seen = stats.coverage.seen.get("graphs", 0) + stats.coverage.seen.get("compiled runs", 0)
    return passed(slug, stats.subject, message, seen, observed=observed, limit=limit, unit=unit)


def _number(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'s' if count != 1 else ''}"


def _listed(names: Iterable[str]) -> str:
    given = list(dict.fromkeys(names))
    more = f" and {len(given) - _NAMED} more" if len(given) > _NAMED else ""
    return ", ".join(given[:_NAMED]) + more


# Tables ----------------------------------------------------------------------------------------------------------


def tables(stats: GraphStats) -> tuple[Table, ...]:
    """Graphs with their compile time, recompilations by kind, breaks, caches and modes; empty ones are left out."""
    graphs = [(g.frame, g.ops, round(g.seconds, 2), "after the warm-up" if g.late else "") for g in stats.graphs]
    again = [(one.kind, one.frame, one.guard, _when(one, stats)) for one in stats.recompiles]
    broken = [(_placed(found), found.times, found.reason) for found in stats.breaks]
    made = (
        ("Graphs", ("frame", "ops", "compile seconds", "when"), graphs, "coverage"),
        ("Recompilations", ("kind", "frame", "guard that failed", "counted"), again, "recompile"),
        ("Graph breaks", ("place", "times in one call", "reason"), broken, "graph-break"),
        ("Graph breaks, asked in other ways", ("way", "answer"), list(stats.elsewhere.items()), "graph-break"),
        ("Compiler caches", ("cache", "count"), list(stats.caches.items()), "cache-artifacts"),
        ("Graphs of each mode", ("mode", "new graphs"), list(stats.modes.items()), "recompile"),
    )
    return tuple(_table(stats, *one) for one in made if one[2])


def _when(one: Recompile, stats: GraphStats) -> str:
    if one.late:
        return "yes, after the warm-up"
    return "yes" if _counts(one, stats) else "no, it shows what varies"


def _table(
    stats: GraphStats, title: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]], check: str
) -> Table:
    note = f"the first {_ROWS} of {len(rows)}" if len(rows) > _ROWS else ""
    return Table(f"{title}: {stats.subject}", columns, list(rows[:_ROWS]), check, note)
