"""One callable, run on examples: as the user runs it, compiled, and in wider formats.

It is copied once. Buffers, random streams and the inputs are restored after each run, so that an example gives the same
result however often, and in whatever order, it is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ampcheck.autocast.emulate import active, arm_of
from ampcheck.autocast.missing import MissingKernels
from ampcheck.core.arm import armed
from ampcheck.core.environment import quiet
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.subject import Subject
from ampcheck.facts.memory import has_companions
from ampcheck.numerics.losses import is_floating
from ampcheck.numerics.record import NUMPY, Execution
from ampcheck.numerics.run import RunPlan, run_subject
from ampcheck.parity.example import Example
from ampcheck.records.results import MOVE, Key
from ampcheck.shadow import Shadow
from ampcheck.shadow.compare import Result
from ampcheck.torchtools.copying import Prepared, prepare
from ampcheck.torchtools.modes import aside
from ampcheck.torchtools.pytree import is_plain
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.snapshot import preserved_objects

_HIDDEN = "outputs that are quantised, opaque or on the device meta"
_LARGEST_INTEGER = torch.iinfo(torch.int64).max

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives the function to run in the place of the callable: it in a circumstance, or compiled."""


class Runner:
    """A copy of a subject in low precision.

    dtype: what autocast casts to, or, where `native`, the dtype of inputs or weights. name: of it in findings. root:
    the module whose paths findings have. plain: the copy, to be compiled. draws: whether a run drew random numbers.
    dropped counts outputs that have no values to judge, substituted the ops that ran in float32 since no 16-bit kernel
    is here.
    """

    def __init__(self, subject: Subject, dtype: torch.dtype, *, device: str = "cpu", native: bool = False) -> None:
        self.subject, self.dtype, self.device, self.native = subject, dtype, device, native
        self.name = armed(subject.name, arm_of(dtype, "eager", native=native))
        self.draws = False
        self.substituted: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._low = prepare(subject, device=device)
        self.root, self.plain = self._low.root, self._low.model

    def run(self, example: Example, shadow: Shadow | None = None, around: Around | None = None) -> Execution:
        """Run the example under autocast, or natively in 16 bits. shadow: of an eager run, whose inputs are exact."""
        own, contexts = example.copied(self.device), list[AbstractContextManager[None]]()
        if shadow is not None:
            self._enter(shadow, own)
            contexts = [self._substituting()] if active() is not None else []
        run = self._run(self._low, own, shadow, around, None if self.native else self.dtype, contexts)
        if shadow is not None and run.error is None:
            kind, *outputs = run.shapes.values()
            self.dropped.update(run.dropped.values() if outputs else [f"results without tensors ({kind})"])
        return run

    def float32_error(self, example: Example, around: Around | None = None) -> str:
        """Return what the example raises in float32, in one line; "" for nothing."""
        own = example.copied(self.device).mapped(lambda t: t.float() if t.is_floating_point() else t)
        error = self._run(self._float32, own, around=around).error
        return brief(error) if error is not None else ""

    def exact(self, example: Example, around: Around | None = None) -> Mapping[Key, Result] | None:
        """The results in float64 without the casts of the model; None where it does not run in float64."""
        run = self._run(self._float64, example.copied(self.device), Shadow(judge=False), around)
        return run.results if run.error is None else None

    @contextmanager
    def differentiable(self) -> Iterator[Callable[..., Any]]:
        """The callable in float64, for gradients of its inputs."""
        model, root = self._float64.model, self._float64.root
        with quiet(), torch.enable_grad(), seeded(self.device), preserved_objects(model, root):
            yield model

    @cached_property
    def _float32(self) -> Prepared:
        return prepare(self.subject, device=self.device, to=torch.float32)

    @cached_property
    def _float64(self) -> Prepared:
        return prepare(self.subject, device=self.device, to=torch.float64)

    def _run(
        self,
        prepared: Prepared,
        example: Example,
        shadow: Shadow | None = None,
        around: Around | None = None,
        cast: torch.dtype | None = None,
        contexts: Sequence[AbstractContextManager[None]] = (),
    ) -> Execution:
        """Run one example forward, and restore what it changed. Raises `UsageError` as the run does."""
        run, function = Execution(shadow), _giving_tensors(prepared.model)
        if around is not None:
            function = _giving_tensors(around(function))

        def keep(key: Key, tensor: torch.Tensor) -> None:
            with aside():
                value = tensor.detach()
                if not is_plain(value):
                    run.dropped[key] = _HIDDEN
                elif value.numel() or not is_floating(value):
                    result = run.results[key] = run.copied(value)
                    if shadow is not None and result.reference is not None:
                        shadow.reach({key[1]: value})

        own = replace(prepared, calls=(example,))
        plan = RunPlan(self.device, cast, no_backward="outputs alone are judged")
        with preserved_objects(prepared.model, prepared.root):
            run_subject(own, plan, keep, run=run, shadow=shadow, around=contexts, transform=lambda _: [function])
        self.draws |= run.streams[NUMPY + 1 :] != run.begun[NUMPY + 1 :]
        if isinstance(run.error, UsageError):
            raise run.error
        return run

    @contextmanager
    def _substituting(self) -> Iterator[None]:
        with MissingKernels() as missing:
            yield
        self.substituted.update(missing.ran)

    def _enter(self, shadow: Shadow, example: Example) -> None:
        """Give the inputs their companions: they are exact, whatever their format.

        Subnormal ones have an absolute error in low precision, and kernels may take those of float32 for zero.
        """
        form = format_of(self.dtype)
        keeps = form.smallest_normal > format_of("float32").smallest_normal
        for tensor in example.floats().values():
            if has_companions(tensor):
                companions = shadow.store.of(tensor)
                companions.unit = min(companions.unit, form.unit_roundoff)
                exact, moved = companions.values.exact, companions.values.moved  # flat: a view may overlap itself
                small = (exact != 0) & (exact.abs() < form.smallest_normal)
                if bool(small.any()):
                    off = exact + (moved - exact).sign() * MOVE * form.smallest_normal if keeps else exact * 0
                    moved.copy_(torch.where(small, off, moved))


def _giving_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results are tensors where they are numbers of Python."""

    def model(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if type(value) in (bool, int) and abs(value) <= _LARGEST_INTEGER:
            return torch.tensor(value)
        return _numbers_as_tensors(value)

    return model


def _numbers_as_tensors(value: Any) -> Any:
    """Python floats, alone or in tuples, lists and dicts, are results too: as tensors without dimensions.

    An integer or bool beside tensors is none: it describes them (a count, their bytes), and may differ by dtype.
    """
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if type(value) in (tuple, list):
        return type(value)(_numbers_as_tensors(item) for item in value)
    if type(value) is dict:
        return {key: _numbers_as_tensors(item) for key, item in value.items()}
    return value
