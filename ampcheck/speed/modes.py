"""Modes and precisions of one subject, compared in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampcheck.checks.compile.eager_fallback import CHECK as EAGER_FALLBACK
from ampcheck.checks.speed import WHERE
from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.numerics.compiled import compilations
from ampcheck.records.threads import Threads
from ampcheck.speed.clock import clock_of
from ampcheck.speed.compiling import many_compilations
from ampcheck.speed.judge import measure_until_decided, speed_run
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.paired import BUDGET, Step, naming
from ampcheck.speed.steps import EAGER, StepConfig, require_configurable, step_of
from ampcheck.speed.threads import fit_threads
from ampcheck.speed.verdict import check_speed
from ampcheck.torchtools.restore import restoring


@restoring
def compare_modes(
    subject: Subject,
    configs: Sequence[StepConfig],
    options: SpeedOptions | None = None,
    *,
    at_least: float | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Run:
    """Compare each configuration of a step with the first.

    at_least: how many times as fast each compiled one must be; without it all are compared with 1, and a slower one is
    a warning. A compiled step of which PyTorch compiles nothing is not timed, since its time would be that of eager
    mode; with `at_least` it fails. Dynamo is reset.

    Raises `UsageError` for fewer than two configurations, or where `at_least` applies to none of them.
    """
    options = options or SpeedOptions()
    options.require_used("arms")
    configs = list(dict.fromkeys(configs))
    if len(configs) < 2:
        which = f"found {configs[0]} alone" if configs else "found none"
        raise UsageError(f"two configurations are required, {which}: name a mode of torch.compile or a precision")
    judged = [config for config in configs[1:] if at_least is None or config.mode != EAGER]
    if not judged:
        raise UsageError(f"{at_least:g} times as fast is required of compiled steps, and all are eager: name a mode")
    rule = options.rule(1.0 if at_least is None else at_least, len(judged))
    for config in configs:  # before anything is compiled
        require_configurable(subject, config)
    clock, budget = options.clock or clock_of(device), options.budget or BUDGET
    with many_compilations(device):
        steps: dict[str, Step] = {}
        first: dict[str, float] = {}
        findings: list[Finding] = []
        threads: Threads | None = None
        for number, config in enumerate(configs):
            progress(f"first call: {config}", number, len(configs))
            step = step_of(subject, config, device=device)
            compiled_since = compilations()
            with naming(str(config), subject.name):
                first[str(config)] = clock.block(step, 1)
                if not number:  # compiled code is for a number of threads
                    threads = fit_threads(step, clock)
            compiled = compiled_since()
            if config.mode == EAGER or compiled.count:
                steps[str(config)] = step
                continue
            verdict = Verdict.WARN if at_least is None else Verdict.FAIL
            message = f"{config} must be compiled to be timed, and it ran eager: {compiled.why_none}"
            hint = "ampcheck.assert_compiled reports each break"
            findings.append(EAGER_FALLBACK.finding(verdict, subject.name, message, where=WHERE, hint=hint))
        rules = {str(config): rule for config in judged if str(config) in steps}
        if not rules:
            return Run(findings=tuple(findings), title=f"speed of {subject.name}")
        progress(f"timing all in turn, {budget:g} s at most", len(configs), len(configs))
        options = replace(options, clock=clock)
        stats = measure_until_decided(steps, rules, options, subject=subject.name, device=device, threads=threads)
    stats = replace(stats, arms=tuple(replace(arm, first=first.get(arm.name, arm.first)) for arm in stats.arms))
    for finding in check_speed(stats, rules):
        warns = at_least is None and finding.verdict is Verdict.FAIL
        findings.append(replace(finding, verdict=Verdict.WARN) if warns else finding)
    return speed_run(stats, findings)
