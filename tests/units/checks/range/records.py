"""Records of runs in low precision and of compiled graphs, by hand."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.core.arm import Arm
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Verdict, Where
from ampcheck.numerics import NumericsStats, check_numerics
from ampcheck.records import faults
from ampcheck.records.faults import Fault
from ampcheck.records.results import Examination, ResultError
from ampcheck.records.telemetry import SiteStats, TelemetryStats
from ampcheck.telemetry.checks import check_telemetry

U = 2.0**-8
SEEN = Examination(64, error=0.002, spread=0.004)
OUTPUT = ResultError(("output", "", 0), "bfloat16", SEEN, U, judged=64)
GRADIENT = ResultError(("gradient", "layer.weight", 0), "float32", SEEN, U, norm=0.001, judged=64)
HEALTHY = NumericsStats(
    "model",
    Arm("bfloat16", "eager"),
    "bfloat16",
    "cpu",
    errors=(OUTPUT, GRADIENT),
    ops=20,
    low=10,
    coverage=Coverage({"ops": 20, "16-bit ops": 10}),
)
PLACE = Where("forward", "layer", "aten::mm", "model.py", 3)
LOSSY = Examination(64, flagged=2, groups=4, error=0.9, spread=0.01, limit=0.1, impact=0.9)
FAULT = Fault(faults.CANCELLATION, PLACE, "float16", LOSSY, (4, 16), 10.0, 5.0, 6.0, reaches={"output": 1.0})


def run_findings(stats: NumericsStats, check: str, limits: Limits | None = None) -> list[Finding]:
    return [f for f in check_numerics(stats, limits or Limits()) if f.check == check]


def run_verdicts(stats: NumericsStats, check: str, limits: Limits | None = None) -> list[Verdict]:
    return [f.verdict for f in run_findings(stats, check, limits)]


def far(error: ResultError, far: float = 0.9, limit: float = 0.1) -> ResultError:
    seen = replace(error.seen, error=far, limit=limit, flagged=1, impact=far)
    return replace(error, seen=seen, norm=0.5 if error.kind == "gradient" else 1.0)


LIMITS = Limits()


def site(order: int = 0, phase: str = "forward", **told: object) -> SiteStats:
    """A cast to float16 of 100 values around 1 in each of 10 calls."""
    where = Where(phase, f"blocks.{order}", "aten::gelu", "model.py", 10 + order)
    plain = SiteStats(where, "float16", True, order=(0, order), calls=10, numel=1000, amax=1.0, smallest=0.5, fed=True)
    return replace(plain, **told)


def stats(*sites: SiteStats, **told: object) -> TelemetryStats:
    return TelemetryStats("model", "casts", sites=sites, **({"graphs": 2, "calls": 20, "measured": 20} | told))


def found(check: str, *sites: SiteStats, harmed: bool | None = None) -> list[Finding]:
    return [one for one in check_telemetry(replace(stats(*sites), harmed=harmed), LIMITS) if one.check == check]


def verdicts(check: str, *sites: SiteStats, harmed: bool | None = None) -> list[Verdict]:
    return [one.verdict for one in found(check, *sites, harmed=harmed)]


LOST = {"overflowed": 3, "bad": 2, "born": 2, "first": 4}
CARRIED = {"infs": 3, "bad": 2, "born": 0, "first": 4}
OF_GRADIENT = {"phase": "backward", "infs": 3, "first": 0}
