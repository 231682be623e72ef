"""Options of `torch.compile` and of the two families of checks on compiled code, validated before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch

from ampcheck.core.arguments import parse_choice, parse_flag, parse_integer, show
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.subject import Kind, Subject
from ampcheck.torchtools.copying import is_compiled_already

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

Optimizer: TypeAlias = Callable[[list[torch.nn.Parameter]], Any]
"""Makes an optimizer from a list of parameters."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Arguments of `torch.compile`. Raises `UsageError` for those that it refuses."""

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    dynamic: bool | None = None
    fullgraph: bool = False

    def __post_init__(self) -> None:
        if self.mode is not None:
            parse_choice(self.mode, "mode", MODES)
        if self.mode is not None and self.options:
            raise UsageError("torch.compile takes mode or options, not both: put what the mode means into options")
        if self.options is not None and not isinstance(self.options, Mapping):
            raise UsageError(f"options must be a mapping of Inductor's settings; found {show(self.options)}")
        if isinstance(self.backend, str) and self.backend != "inductor":  # listing them imports Dynamo, which is slow
            parse_choice(self.backend, "backend", torch.compiler.list_backends(()))
        if not isinstance(self.backend, str) and not callable(self.backend):
            raise UsageError(f"backend must be a name or a function that compiles a graph; found {show(self.backend)}")
        if self.dynamic is not None:
            parse_flag(self.dynamic, "dynamic")
        parse_flag(self.fullgraph, "fullgraph")
        if self.options and self.backend == "inductor":
            try:
                torch.compile(lambda: None, options=dict(self.options))
            except RuntimeError as error:
                raise UsageError(f"torch.compile refuses these options: {brief(error)}") from error

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `torch.compile`, without those that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["options"] = dict(self.options) if self.options is not None else None
        return {name: value for name, value in values.items() if value is not None}

    def require_effect(self, subject: Subject) -> None:
        """Raise `UsageError` for options of a subject that is compiled already or compiles by itself."""
        chosen = [name for name, value in self.arguments().items() if value not in (False, "inductor")]
        runs_its_own = subject.kind in (Kind.CALL, Kind.TRAINING)
        if chosen and (runs_its_own or is_compiled_already(subject)):
            how = "compiles by itself" if runs_its_own else "is compiled already"
            raise UsageError(
                f"{subject.name} {how}, so {', '.join(chosen)} would have no effect: pass it to its torch.compile"
            )


@dataclass(frozen=True, slots=True)
class AccuracyOptions:
    """Options of the comparison of compiled code and eager mode with float64.

    steps: how often all calls run, each with an update of the weights. optimizer: makes one from a list of parameters;
    plain gradient descent by default. autocast: None decides by the model, so that one whose weights or inputs are
    16-bit already runs without autocast.
    """

    steps: int = 1
    optimizer: Optimizer | None = None
    autocast: bool | None = None

    def __post_init__(self) -> None:
        parse_integer(self.steps, "steps")
        if self.autocast is not None:
            parse_flag(self.autocast, "autocast")
        if self.optimizer is not None and not callable(self.optimizer):
            raise UsageError(
                "optimizer must be a function that makes one from a list of parameters, since every arm trains a copy "
                "of its own: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1); found an instance of "
                f"{type(self.optimizer).__name__}"
            )


@dataclass(frozen=True, slots=True)
class BlameOptions:
    """Budget of `blame`.

    steps: how often all calls run under the compiler, each with an update of the weights. runs: how many sets of
    modules are tried. time: time the step with and without the modules that are kept in float32.
    """

    steps: int = 1
    runs: int = 60
    time: bool = True

    def __post_init__(self) -> None:
        parse_integer(self.steps, "steps")
        parse_integer(self.runs, "runs")
        parse_flag(self.time, "time")
