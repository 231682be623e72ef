"""One callable, run on examples: as the user runs it, compiled, and in wider formats.

It is copied once. Buffers, random streams and the inputs are restored after each run, so that an example gives the same
result however often, and in whatever order, it is run.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ampcheck.autocast.emulate import active, arm_of
from ampcheck.autocast.missing import MissingKernels
from ampcheck.core.arm import armed
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.subject import Subject
from ampcheck.facts.memory import has_companions
from ampcheck.numerics.run import RunPlan, run_subject
from ampcheck.records.results import MOVE
from ampcheck.search.example import Example
from ampcheck.shadow import Shadow
from ampcheck.torchtools.copying import Prepared, prepare
from ampcheck.torchtools.pytree import is_plain
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.snapshot import preserved_objects

_LARGEST_INTEGER = torch.iinfo(torch.int64).max


@dataclass(slots=True)
class Result:
    """What a run returned, an object of type `kind`: tensors by path, Python numbers among them, or an exception."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    kind: str = ""
    error: BaseException | None = None


class Runner:
    """A copy of a subject in low precision.

    dtype: what autocast casts to, or, where `native`, the dtype of inputs or weights. draws: whether a run drew random
    numbers. dropped counts outputs that have no values to judge, substituted the ops that ran in float32 since no
    16-bit kernel is here.
    """

    def __init__(self, subject: Subject, dtype: torch.dtype, *, device: str = "cpu", native: bool = False) -> None:
        self.subject, self.dtype, self.device, self.native = subject, dtype, device, native
        self.draws = False
        self.substituted: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._low = prepare(subject, device=device)

    @property
    def name(self) -> str:
        """How findings name this run: `softmax [float16 native, eager]`."""
        return armed(self.subject.name, arm_of(self.dtype, "eager", native=self.native))

    @property
    def root(self) -> torch.nn.Module | None:
        """The module whose paths findings have."""
        return self._low.root

    @property
    def plain(self) -> Callable[..., Any]:
        """The copy, to be compiled."""
        return self._low.model  # type: ignore[no-any-return]

    @contextmanager
    def run(
        self, example: Example, shadow: Shadow | None = None, function: Callable[..., Any] | None = None
    ) -> Iterator[Result]:
        """Run the example under autocast, or natively in 16 bits. function: the compiled copy.

        Inside the block the outputs are those of the run; on leaving, buffers among them are restored.
        """
        own = example.copied(self.device)
        if shadow is not None:
            self._enter(shadow, own)
        missing = [MissingKernels()] if active() is not None and function is None else []
        around = [*missing, *([shadow] if shadow is not None else [])]
        cast = None if self.native else self.dtype
        with self._run(self._low, own, cast, around, self.plain if function is None else function) as result:
            if shadow is not None:
                for kernels in missing:
                    self.substituted.update(kernels.ran)
                self._drop(result)
            yield result

    def float32_error(self, example: Example) -> str:
        """What the example raises in float32, in one line; "" for nothing."""
        own = example.copied(self.device).mapped(lambda t: t.float() if t.is_floating_point() else t)
        with self._run(self._float32, own) as result:
            return brief(result.error) if result.error is not None else ""

    def exact(self, example: Example) -> dict[str, torch.Tensor] | None:
        """The floating results in float64 without the casts of the model; None where it does not run in float64."""
        shadow = Shadow(judge=False)
        with self._run(self._float64, example.copied(self.device), around=[shadow]) as result:
            if result.error is not None:
                return None
            return {
                path: shadow.exact(t).clone() if t.is_floating_point() else t.clone()
                for path, t in result.outputs.items()
            }

    @contextmanager
    def differentiable(self) -> Iterator[Callable[..., Any]]:
        """The callable in float64, for gradients of its inputs."""
        model = self._float64.model
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the user's own run shows them
            for context in (torch.enable_grad(), seeded(self.device), preserved_objects(model, self._float64.root)):
                stack.enter_context(context)
            yield model

    @cached_property
    def _float32(self) -> Prepared:
        return prepare(self.subject, device=self.device, to=torch.float32)

    @cached_property
    def _float64(self) -> Prepared:
        return prepare(self.subject, device=self.device, to=torch.float64)

    @contextmanager
    def _run(
        self,
        prepared: Prepared,
        example: Example,
        cast: torch.dtype | None = None,
        around: Any = (),
        function: Callable[..., Any] | None = None,
    ) -> Iterator[Result]:
        """Run one example forward, and restore what it changed on leaving. Raises `UsageError` as the run does."""
        result, function = Result(), prepared.model if function is None else function

        def model(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            result.kind = type(value).__name__
            if type(value) in (bool, int) and abs(value) <= _LARGEST_INTEGER:
                return torch.tensor(value)
            return _numbers_as_tensors(value)

        own = replace(prepared, calls=(example,))
        plan = RunPlan(self.device, cast, no_backward="outputs alone are judged")
        with preserved_objects(prepared.model, prepared.root):
            outcome = run_subject(
                own,
                plan,
                lambda key, tensor: result.outputs.update({key[1]: tensor.detach()}),
                around=[self._noting_draws(), *around],
                transform=lambda _: [model],
            )
            if isinstance(outcome.error, UsageError):
                raise outcome.error
            result.error = outcome.error
            yield result

    @contextmanager
    def _noting_draws(self) -> Iterator[None]:
        fresh = torch.get_rng_state()
        yield
        self.draws = self.draws or not torch.equal(torch.get_rng_state(), fresh)

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

    def _drop(self, result: Result) -> None:
        """Leave out what has no values to judge."""
        if result.error is None and not result.outputs:
            self.dropped[f"results without tensors ({result.kind})"] += 1
        for path, tensor in list(result.outputs.items()):
            if is_plain(tensor):
                continue
            self.dropped["outputs that are quantised, opaque or on the device meta"] += 1
            del result.outputs[path]


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
