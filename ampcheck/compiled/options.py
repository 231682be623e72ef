"""What `torch.compile` may be given, checked before anything runs: a wrong name is bad input, and no defect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ampcheck.core.errors import UsageError, brief
from ampcheck.core.subject import Kind, Subject
from ampcheck.torchtools.copying import is_compiled_already

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_options(subject: Subject, settings: Mapping[str, Any]) -> None:
    """Raise `UsageError` for what `torch.compile` refuses, and for settings that nobody would apply.

    settings: of `backend`, `mode`, `options`, `dynamic` and `fullgraph` those that were given.
    """
    backend, mode, options = settings.get("backend", "inductor"), settings.get("mode"), settings.get("options")
    if mode is not None and mode not in MODES:
        raise UsageError(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
    if mode is not None and options:
        raise UsageError("torch.compile takes mode or options, not both: put what the mode means into options")
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"options is a mapping of Inductor's settings; found {options!r}")
    if isinstance(backend, str) and backend not in (known := torch.compiler.list_backends(())):
        raise UsageError(f"there is no backend {backend!r}; there are {', '.join(known)}")
    if not isinstance(backend, str) and not callable(backend):
        raise UsageError(f"backend is a name or a function that compiles a graph; found {backend!r}")
    if settings.get("dynamic") not in (None, True, False):
        raise UsageError(f"dynamic is None, True or False; found {settings['dynamic']!r}")
    if options and backend == "inductor":
        try:
            torch.compile(lambda: None, options=dict(options))
        except RuntimeError as error:
            raise UsageError(f"torch.compile refuses these options: {brief(error)}") from error
    given = [key for key, value in settings.items() if value not in (None, False, "inductor")]
    runs_its_own = subject.kind in (Kind.CALL, Kind.TRAINING)
    if given and (runs_its_own or is_compiled_already(subject)):
        how = "compiles by itself" if runs_its_own else "is compiled already"
        raise UsageError(
            f"{subject.name} {how}, so {', '.join(given)} would not be heeded: give it to its torch.compile"
        )
