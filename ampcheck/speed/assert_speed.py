"""`assert_speed`: arms against the first, a revision against another, or the start of a compiled target."""

from __future__ import annotations

from collections.abc import Mapping

from ampcheck.core.arguments import parse_number
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import StartupLimits
from ampcheck.core.run import Run
from ampcheck.outcome.raising import verify
from ampcheck.speed.judge import measure_until_decided, speed_run
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.paired import Step
from ampcheck.speed.verdict import check_speed, limits_of
from ampcheck.torchtools.restore import restoring


@restoring
def assert_speed(
    arms: Mapping[str, Step] | str,
    *,
    at_least: float | Mapping[str, float] = 1.0,
    base: str | None = None,
    startup: StartupLimits | bool = False,
    device: str | None = None,
    options: SpeedOptions | None = None,
    name: str = "",
) -> Run:
    """Assert that code is fast enough: arms against each other, the working tree against a base, or a compiled start.

    arms: name to a callable without arguments, of which the first is the reference; or, with `base` or `startup`, a
    target `package.module:function` or `path/to/file.py:function`, which fresh processes load. at_least: how many times
    as fast as the reference, or as the base, the rest must be; of arms one ratio for all, or one for each that is
    judged. base: a commit, branch or tag of the same repository, such as `origin/main`. startup: the limits of a start,
    True for the default ones. name: of arms, in findings.

    Returns the run. Raises `AssertionError` for a FAIL, never for an UNDECIDED; `UsageError` for what cannot be
    measured.
    """
    __tracebackhide__ = True
    device = device or "cpu"
    options = options or SpeedOptions()
    if isinstance(arms, str):
        return verify(_target_run(arms, at_least, base, startup, device, options))
    if base is not None or startup is not False:
        which = "startup" if base is None else "base"
        raise UsageError(
            f"{which} needs a target that fresh processes load by its name, 'package.module:function' or "
            f"'path/to/file.py:function'; found a {type(arms).__name__}"
        )
    options.require_used("arms")
    limits = limits_of(arms, at_least)
    rules = {arm: options.rule(limit, max(1, len(limits))) for arm, limit in limits.items()}
    stats = measure_until_decided(arms, rules, options, subject=name or "subject", device=device)
    return verify(speed_run(stats, check_speed(stats, rules)))


def _target_run(
    target: str,
    at_least: float | Mapping[str, float],
    base: str | None,
    startup: StartupLimits | bool,
    device: str,
    options: SpeedOptions,
) -> Run:
    if (base is None) is (startup is False):
        raise UsageError(
            "a target is compared with a revision (base='origin/main') or started in fresh processes (startup=True): "
            f"pass one of the two; found {'neither' if base is None else 'both'}"
        )
    if base is not None:
        from ampcheck.speed.base.judge import judge_base

        return judge_base(target, base, options, at_least=parse_number(at_least, "at_least"), device=device)
    from ampcheck.speed.startup.judge import judge_startup

    if at_least != 1.0:
        raise UsageError("at_least has no effect on a start: leave it out, or set limits with StartupLimits")
    limits = startup if isinstance(startup, StartupLimits) else None
    return judge_startup(target, options, limits=limits, device=device)
