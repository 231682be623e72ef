"""A target of the command line: a subject by name, loaded for its device and audited."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from traceback import walk_tb

from ampcheck.core.arguments import parse_dtypes
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Run
from ampcheck.core.settings import Target
from ampcheck.core.subject import Kind, Subject, load_subject

_PARSERS_ERROR = ArgumentParser.error.__code__


def load_placed(target: str, device: str, *, trains: bool = False, arguments: Sequence[str] = ()) -> Subject:
    """Load a target for a device: decorators such as @torch.autocast("cuda") query it, where it is emulated too.

    Random numbers are seeded while it is loaded. trains: see `load_subject`; of a target that trains for long while
    it is loaded, standard error says early that its training is not judged. arguments: of its command line.
    """
    from ampcheck.autocast.device import place
    from ampcheck.torchtools.seeds import seeded

    placement = place(device)
    noted = _long_training_noted(target) if trains else nullcontext()
    with placement.entered(), seeded(placement.device), _as_script(target, arguments), noted:
        return load_subject(target, trains=trains)


@contextmanager
def _long_training_noted(target: str) -> Iterator[None]:
    """Hours of training may end in a value that is no subject: what to do instead is said after the first steps."""
    from ampcheck.stream.calls import subscribed
    from ampcheck.training.loop import STEPS

    steps = count(1)

    def note(*_: object, **__: object) -> Iterator[None]:
        yield
        if next(steps) == STEPS + 1:
            text = "trains while it is loaded, unobserved and to its end; to judge its training, interrupt it and name"
            print(f"ampcheck: {target} {text} a function that trains and returns nothing", file=sys.stderr, flush=True)

    with subscribed(optimizer_step=note):
        yield


@contextmanager
def _as_script(target: str, arguments: Sequence[str]) -> Iterator[None]:
    """Code of the target that reads the command line sees its file's name and arguments, none of ampcheck's options.

    An error by which its parser ends the program says what the parser requires, and how it gets that.
    """
    own, sys.argv = sys.argv, [target.rpartition(":")[0] or target, *arguments]
    try:
        yield
    except UsageError as error:
        if not isinstance(end := error.__cause__, SystemExit) or end.code != 2:  # as argparse, click and absl end
            raise
        refused = (f.f_locals["message"] for f, _ in walk_tb(end.__traceback__) if f.f_code is _PARSERS_ERROR)
        text = f"{target} reads the command line and refuses it: {next(refused, 'SystemExit: 2')}; give it arguments"
        raise UsageError(f"{text} after --, as ampcheck audit {target} -- --name value") from end
    finally:
        sys.argv = own


def _needs_cuda(error: UsageError, target: str, device: str) -> Finding | None:
    """The finding about a target that cannot be loaded since it needs CUDA itself, where CUDA is emulated."""
    from ampcheck.autocast.device import place
    from ampcheck.autocast.missing import unimitated

    if error.__cause__ is None or place(device).emulated != "cuda":
        return None
    return unimitated(error.__cause__, target)


def audit_target(target: Target) -> Run | None:
    """The run of one target, without one that of the demo with one layer, which compiles in half the time; under
    torchrun that of all ranks, on rank 0.

    Random numbers are seeded before the target is loaded and before it runs, so that its verdicts repeat.
    """
    from ampcheck.autocast.asked import on_cpu_or_cuda

    run = on_cpu_or_cuda(partial(_audited, target), target.device)
    if "RANK" not in os.environ:
        return run
    from ampcheck.training.distributed.ranks import gather_runs

    return gather_runs(run)


def _audited(target: Target, device: str) -> Run:
    from ampcheck import demo
    from ampcheck.audit import judge_subject
    from ampcheck.autocast.device import place
    from ampcheck.torchtools.seeds import seeded

    try:
        own = partial(load_placed, target.target, device, trains=True, arguments=target.arguments)
        subject = own() if target.target else demo.subject(layers=1)
    except UsageError as error:
        if (lack := _needs_cuda(error, target.target, device)) is None:
            raise
        return Run(findings=(lack,), title=f"audit of {target.target}")
    if target.dtype and subject.kind in (Kind.TRAINING, Kind.CALL):
        parse_dtypes(target.dtype)
        text = "runs in its own dtypes: --dtype, or dtype in pyproject.toml, is for models alone"
        print(f"ampcheck: {target.target} {text}", file=sys.stderr, flush=True)
    with _as_script(target.target, target.arguments), seeded(place(device).device):
        planned = {name: getattr(target, name) for name in ("compile", "full", "graphs", "steps", "horizon")}
        return judge_subject(subject, dtype=target.dtype or None, device=device, **planned)
