"""The targets of a command, and their audits one after the other."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ampcheck.checks import REGISTRY
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.selection import unjudged, with_unjudged
from ampcheck.cli.following import Following, Interrupted
from ampcheck.cli.output import split_names
from ampcheck.cli.profile import Profile
from ampcheck.cli.stage_times import StageTimes
from ampcheck.core.arm import POLICY
from ampcheck.core.errors import UsageError
from ampcheck.core.progress import listening
from ampcheck.core.run import FAIL_ON, Finding, Run, renamed
from ampcheck.core.settings import LEVELS, Settings, Target, load_settings
from ampcheck.core.subject import name_of_target, names_of_targets
from ampcheck.outcome.accept import accept, levels_and_selection
from ampcheck.outcome.raising import with_commands
from ampcheck.report import progress_bar
from ampcheck.target import audit_target


def add_targets(command: argparse.ArgumentParser) -> None:
    """Add TARGET..., and the options of each audit."""
    command.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="package.module:function or path/to/file.py:function, which returns (module, args), or for a "
        "training loop {'model', 'optimizer', 'scaler', 'step'}. A function that trains and returns nothing, such as "
        "train.py:main, is judged while it runs. Without code: the architecture of a library, built small with random "
        "weights (transformers:LlamaForCausalLM, transformers:qwen3, diffusers:UNet2DConditionModel, timm:resnet50, "
        "torchvision:resnet18, hf:ORG/NAME from the local cache or a folder). Random numbers are seeded before each "
        "target. Arguments of a script follow at the end, after --: train.py:main -- --data FOLDER. Default: the "
        "targets in [tool.ampcheck] of pyproject.toml, or else the built-in demo",
    )
    add_audit_options(command)


def add_audit_options(command: argparse.ArgumentParser) -> None:
    """Add the options of an audit."""
    command.add_argument(
        "--device",
        help="device to run on; one that this machine lacks is emulated: cuda, cuda:3070 (default: cpu, or cuda where "
        "the code asks for it)",
    )
    command.add_argument(
        "--dtype",
        metavar="DTYPES",
        help="dtypes of autocast, separated by commas (default: float16,bfloat16). 16-bit models "
        "always run in their own dtype; subjects with a list of calls or blocks do so if --dtype is omitted",
    )
    command.add_argument("--steps", type=int, metavar="N", help="steps of a training loop to observe")
    command.add_argument("--horizon", type=int, metavar="N", help="planned steps of a training loop, for stagnation")
    thorough = command.add_mutually_exclusive_group()
    thorough.add_argument(
        *("--no-compile", "--fast"),
        action="store_true",
        help="eager mode alone, which takes least: torch.compile is not run",
    )
    thorough.add_argument(
        "--full",
        action="store_true",
        help="models also compiled with dynamic shapes and with max-autotune, over three updates of the "
        "weights; training loops for four times as many steps",
    )


def add_selection(command: argparse.ArgumentParser) -> None:
    """Add the options that decide which findings count."""
    command.add_argument("--select", metavar="CHECKS", help="report these checks alone: names or patterns, by commas")
    command.add_argument("--ignore", metavar="CHECKS", help="do not report these checks")
    command.add_argument(
        "--fail-on",
        choices=("fail", "warn", "incomplete", "never"),
        help="the mildest verdict with which the exit code is 1 (default: fail, or that of pyproject.toml)",
    )
    command.add_argument("--no-baseline", action="store_true", help="report accepted findings as any other")


def targets_of(options: argparse.Namespace, settings: Settings) -> list[Target]:
    """The targets of the command line with its options, or else those of the settings; empty for the demo."""
    if not all(text.strip() for text in options.targets):
        raise UsageError(
            "a target must name what to audit, as package.module:function or path/to/file.py:function; found an empty "
            "one, such as an unset variable gives: leave it out to audit the targets of pyproject.toml, or the demo"
        )
    known = {target.target: target for target in settings.targets}
    chosen = [known.get(text, Target(text)) for text in options.targets] or list(settings.targets)
    return [with_options(target, options) for target in chosen]


def with_options(target: Target, options: argparse.Namespace) -> Target:
    """A target with the options of the command line over its own."""
    dtype = target.dtype if options.dtype is None else tuple(split_names(options.dtype))
    if options.dtype is not None and not dtype:
        raise UsageError(f"--dtype names dtypes of autocast, such as float16,bfloat16; found {options.dtype!r}")
    return replace(
        target,
        arguments=options.arguments or target.arguments,
        device=options.device or target.device,
        dtype=dtype,
        compile=target.compile and not options.no_compile,
        full=options.full,
        steps=target.steps if options.steps is None else options.steps,
        horizon=target.horizon if options.horizon is None else options.horizon,
    )


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings of the repository, and over them the options of the command line."""
    settings = load_settings()
    ignored = dict.fromkeys(split_names(options.ignore), LEVELS[-1])
    return replace(
        settings,
        select=tuple(split_names(options.select)) or settings.select,
        severity={**settings.severity, **ignored},
        fail_on=options.fail_on or settings.fail_on,
        baseline="" if options.no_baseline else settings.baseline,
    )


def for_target(settings: Settings, target: Target, options: argparse.Namespace) -> Settings:
    """The settings of one target: its own severities are over those of the repository, the command line over both."""
    return replace(
        settings,
        severity={**settings.severity, **target.severity},
        fail_on=options.fail_on or target.fail_on or settings.fail_on,
    )


@dataclass(frozen=True, slots=True)
class Audited:
    """The run of a target as the repository judges it. failed: whether it fails. printed: lines of it that were printed
    while it ran."""

    run: Run
    failed: bool
    printed: int = 0


def audits(
    targets: Sequence[Target],
    settings: Settings,
    options: argparse.Namespace,
    *,
    early: bool = False,
    profile: Profile | None = None,
) -> Iterator[Audited]:
    """Audit each target; the demo without targets. early: print eager verdicts before anything is compiled. profile:
    samples every stage.

    Of several targets that cannot be judged, each is a run with the reason; of one, the `UsageError` is raised. Raises
    `Interrupted`, with what was judged, at Ctrl-C after the first stage of a target has begun.
    """
    from ampcheck.checks.compile.cudagraph import CHECK as CUDAGRAPH
    from ampcheck.checks.compile.eager_fallback import CHECK as EAGER_FALLBACK
    from ampcheck.checks.compile.graph_break import CHECK as GRAPH_BREAK
    from ampcheck.checks.compile.recompile import CHECK as RECOMPILE

    settings_by_target = [
        (target, for_target(settings, target, options)) for target in targets or [with_options(Target(""), options)]
    ]
    of_graphs = {GRAPH_BREAK.slug, RECOMPILE.slug, EAGER_FALLBACK.slug, CUDAGRAPH.slug}
    # A mistyped check is reported before an audit that takes minutes.
    selections = [levels_and_selection(own)[1] for _, own in settings_by_target]
    names = names_of_targets(target.target for target, _ in settings_by_target)
    for (target, own), selected in zip(settings_by_target, selections, strict=True):
        target = replace(target, graphs=bool(own.select) and not selected.isdisjoint(of_graphs))
        judge = partial(_as_judged, target=target, name=names[target.target], settings=own)
        following: Following | None = None
        try:
            with progress_bar() as bar:
                following = Following(bar, StageTimes.of(target), judge, early=early, profile=profile)
                with listening(following.listener):
                    run = audit_target(target)
            following.finish()
        except KeyboardInterrupt as error:
            left = following.partial(target.target or "demo", target.device or "cpu") if following is not None else None
            if following is None or left is None or "RANK" in os.environ:
                raise
            raise Interrupted(judge(left), following.printed) from error
        except UsageError as error:
            if len(targets) < 2:
                raise
            reason = COVERAGE.unjudged(target.target, f"not judged: {error}")
            run = Run(findings=(reason,), title=f"audit of {target.target}")
        if run is None:
            continue
        run = judge(run, gone=True)
        failed = any(run.of(verdict) for verdict in FAIL_ON[own.fail_on])
        yield Audited(run, failed, following.printed if following is not None else 0)


def _as_judged(run: Run, target: Target, name: str, settings: Settings, *, gone: bool = False) -> Run:
    """The run as the repository judges it, under the name of its target, with commands. gone: see `accept`."""
    run = accept(renamed(run, name_of_target(target.target), name), settings, gone=gone)
    return with_commands(run, partial(command_of, target))


def with_selection(
    runs: Sequence[Run], groups: Iterable[Collection[str]], options: argparse.Namespace
) -> tuple[Run, bool]:
    """The last of several runs, in which what was selected and judged in none of them is incomplete, and whether there
    is any."""

    def reason(slug: str) -> str:
        check = REGISTRY[slug]
        kinds = ", ".join(kind.value for kind in check.subjects)
        left_out = ", and compiled runs were left out (--no-compile)" if options.no_compile else ""
        return f"no run took place that it looks at; it judges subjects of kind {kinds or 'none'}{left_out}"

    lacking = unjudged([finding for run in runs for finding in run.findings], groups)
    subject = next((finding.name for finding in runs[-1].findings), "the audit")
    return with_unjudged(runs[-1], lacking, subject, reason)


def command_of(target: Target, finding: Finding) -> str:
    """The command that finds this one again: its check, dtype and mode alone; all checks for one about the outcome
    of the audit."""
    from ampcheck.checks.outcome.baseline import CHECK as BASELINE

    arm = finding.arm
    dtypes = (arm.dtype,) if arm.dtype and not arm.native and arm.mode != POLICY else target.dtype
    words = ["ampcheck", "audit", *([target.target] if target.target else [])]
    words += ["--select", finding.check] if finding.family != BASELINE.family else []
    words += ["--device", target.device] if target.device else []
    words += ["--dtype", ",".join(dtypes)] if dtypes else []
    for name in ("steps", "horizon"):
        words += [f"--{name}", str(count)] if (count := getattr(target, name)) is not None else []
    words += ["--full"] if target.full and arm.mode != "eager" else []
    words += ["--no-compile"] if arm.mode == "eager" or not target.compile else []
    return shlex.join([*words, *(["--", *target.arguments] if target.arguments else [])])
