"""Ways to run one subject, compared in this process: eager and compiled, in several precisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Finding, Run, Verdict, Where
from ampcheck.core.subject import Subject
from ampcheck.speed.clock import Clock, clock_of
from ampcheck.speed.compiling import Made, compilations, many_compilations
from ampcheck.speed.judge import measure_until_decided, speed_run
from ampcheck.speed.paired import BUDGET, Step, naming
from ampcheck.speed.steps import EAGER, Way, step_of
from ampcheck.speed.verdict import EFFECT, Rule, check_speed

WHERE = Where(phase="speed")


def judge_ways(
    subject: Subject,
    ways: Sequence[Way],
    *,
    at_least: float | None = None,
    effect: float = EFFECT,
    comparisons: int | None = None,
    device: str = "cpu",
    budget: float = BUDGET,
    clock: Clock | None = None,
    progress: Progress = silent,
) -> Run:
    """Hold each way against the first.

    at_least: how many times as fast each compiled way must be; without it every way is compared with 1, and what is
    slower is a warning: it answers a question and breaks no promise. A compiled way of which PyTorch compiles nothing
    is not timed, as it would be eager mode's time; where `at_least` asks for it, it fails. Dynamo is reset. progress:
    called with what is done now, the number of ways made so far, and of all.

    Raises `UsageError` for fewer than two ways, or where `at_least` speaks of none of them.
    """
    several = list(dict.fromkeys(ways))
    if len(several) < 2:
        told = f"{several[0]} is one" if several else "none was named"
        raise UsageError(f"two ways are required, and {told}: name a mode of torch.compile or more precisions")
    judged = [way for way in several[1:] if at_least is None or way.mode != EAGER]
    if not judged:
        raise UsageError(f"{at_least:g} times as fast is asked of compiled ways, and all are eager: name a mode")
    rule = Rule(1.0 if at_least is None else at_least, effect, len(judged) if comparisons is None else comparisons)
    clock = clock or clock_of(device)
    with many_compilations(device):
        steps: dict[Way, Step] = {}
        first: dict[str, float] = {}
        hollow: list[Finding] = []
        for number, way in enumerate(several):
            progress(f"first call: {way}", number, len(several))
            step = step_of(subject, way, device=device)
            made_since = compilations()
            with naming(str(way), subject.name):
                first[str(way)] = clock.block(step, 1)
            made = made_since()
            if way.mode != EAGER and not made.graphs:
                hollow.append(_hollow(subject, way, made, at_least))
            else:
                steps[way] = step
        rules = {str(way): rule for way in judged if way in steps}
        if not rules:
            return Run(findings=tuple(hollow), title=f"speed of {subject.name}")
        arms = {str(way): step for way, step in steps.items()}
        progress(f"timing all in turn, {budget:g} s at most", len(several), len(several))
        stats = measure_until_decided(arms, rules, subject=subject.name, device=device, budget=budget, clock=clock)
    stats = replace(stats, arms=tuple(replace(arm, first=first.get(arm.name, arm.first)) for arm in stats.arms))
    found = check_speed(stats, rules)
    if at_least is None:
        found = [replace(one, verdict=Verdict.WARN) if one.verdict is Verdict.FAIL else one for one in found]
    return speed_run(stats, [*hollow, *found])


def _hollow(subject: Subject, way: Way, made: Made, at_least: float | None) -> Finding:
    verdict = Verdict.WARN if at_least is None else Verdict.FAIL
    message = f"{way} must be compiled to be timed, and it ran eager: {made.why}"
    return Finding(
        "eager-fallback", verdict, subject.name, message, WHERE, hint="ampcheck.assert_graph tells each break"
    )
