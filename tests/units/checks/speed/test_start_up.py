"""The check start-up, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.checks.speed.start_up import check
from ampcheck.core.limits import StartupLimits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.startup import AOT, FX, Launch, Lookup
from checks.speed.records import HIT, launch, starts


def judged(warm: Launch) -> Finding:
    first, artifacts = check(starts(warm), StartupLimits())
    assert (artifacts.verdict, "not asked for" in artifacts.message) == (Verdict.SKIP, True)
    return first


def test_a_warm_start_finds_what_it_compiled() -> None:
    found = judged(launch(HIT))
    assert (found.verdict, found.seen, found.observed) == (Verdict.PASS, 1, 0)
    missed = judged(launch(Lookup(FX, "miss", "it differs", {"code": "b"})))
    assert (missed.verdict, missed.observed) == (Verdict.FAIL, 1)
    assert "1 of 1 graph was not in the cache: it differs; the key differs in code (a, now b)" in missed.message
    refused = judged(launch(Lookup(FX, "bypass")))
    assert "refuses to cache" in refused.hint
    off = judged(launch(Lookup(FX, "miss"), off=("force_disable_caches",)))
    assert off.hint.startswith("leave the caches on")
    assert judged(launch(graph=replace(launch().graph, graphs=()))).verdict is Verdict.FAIL  # type: ignore[type-var]


def test_what_is_traced_or_built_again_is_a_warning_and_no_record_a_skip() -> None:
    assert judged(launch(HIT, Lookup(AOT, "miss"))).verdict is Verdict.WARN
    built = judged(launch(HIT, binaries=2))
    assert (built.verdict, built.observed, built.unit) == (Verdict.WARN, 2, "files")
    assert judged(launch(untold="no records")).verdict is Verdict.SKIP
    saved_nothing = replace(starts(launch(HIT)), left_out={"artifacts": "it saved nothing"})
    assert [f.verdict for f in check(saved_nothing, StartupLimits())] == [Verdict.PASS, Verdict.FAIL]
