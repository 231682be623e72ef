"""Run a subject in low precision under a shadow, and record everything that the checks look at."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.autocast.emulate import active
from ampcheck.autocast.missing import MissingKernels, lacking
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Where
from ampcheck.core.subject import Subject
from ampcheck.health import TensorHealth, health_of
from ampcheck.numerics.arm_format import arm_name
from ampcheck.numerics.run import Outcome, run_subject
from ampcheck.numerics.stats import LOST, NumericsStats, Raised, TensorError, Values, gradient_module
from ampcheck.shadow import Examination, Reference, Shadow
from ampcheck.shadow.bounds import JUDGED_UNIT
from ampcheck.shadow.companions import roundoff
from ampcheck.torchtools.copying import Prepared, modules_of, prepare
from ampcheck.torchtools.pytree import is_plain, tensors
from ampcheck.torchtools.source import users_place

LOSS_SCALES = (65536.0, 4096.0, 256.0, 16.0, 1.0)
"""Where torch.amp.GradScaler starts, and what it backs off to; float16 is judged at the first without overflow."""

_SAMPLE = 4096
"""Elements of a module's result that its histogram shows, at most."""


@dataclass(slots=True)
class References:
    """The exact values of one eager run, with which the compiled run of the same call is compared.

    results: by kind (`output`, `loss`, `gradient`) and name. masked: outputs that are not finite in exact.
    """

    results: dict[tuple[str, str], Reference] = field(default_factory=dict)
    masked: set[str] = field(default_factory=set)

    def examine(self, kind: str, name: str, value: torch.Tensor) -> TensorError | None:
        """Compare a result of another run; None for one that the eager run did not give."""
        reference = self.results.get((kind, name))
        if reference is None:
            return None
        dtype = _name(value.dtype)
        with _disable_current_modes(), torch.no_grad():
            if value.shape != reference.exact.shape:
                return _missing(kind, name, reference)
            seen = reference.examine(value, gradient=kind == "gradient")
            misplaced = 0
            if seen.exact_inf and kind != "gradient" and not value.is_complex():
                infinite = reference.exact.isinf()
                misplaced = int((value.double() != reference.exact)[infinite].sum())
            return TensorError(kind, name, dtype, seen, max(reference.unit, roundoff(value.dtype)), 1.0, misplaced)

    def missing(self, errors: Sequence[TensorError]) -> list[TensorError]:
        """The results that another run did not give."""
        present = {(error.kind, error.name) for error in errors}
        keys = [key for key in self.results if key not in present]
        return [_missing(kind, name, self.results[kind, name]) for kind, name in keys]

    def shares(self, errors: Sequence[TensorError]) -> tuple[TensorError, ...]:
        """The errors with the share that each gradient has in the error of all together."""
        squares = {key: _square(r.exact) for key, r in self.results.items() if key[0] == "gradient"}
        total = sum(squares.values()) ** 0.5
        shared = []
        for error in errors:
            size = squares.get((error.kind, error.name))
            if size is None:
                shared.append(error)
            elif error.seen.flagged:
                shared.append(replace(error, share=error.seen.impact * size**0.5 / max(total, 1e-300)))
            else:
                shared.append(replace(error, share=error.error * size**0.5 / max(total, 1e-300)))
        return tuple(shared)


@dataclass(frozen=True, slots=True)
class Measured:
    """The statistics of an eager run, and its exact values."""

    stats: NumericsStats
    references: References


def measure_numerics(
    subject: Subject,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    native: bool = False,
    scales: Sequence[float] | None = None,
) -> Measured:
    """Run forward and backward in eager mode under autocast to `dtype`, or as the model is when it is `native`.

    float16 is run at the loss scales that GradScaler goes through, until no gradient overflows that is finite in exact;
    scales: at these instead. Raises `UsageError` for a subject that raises in float32 too.
    """
    for scale in scales or (LOSS_SCALES if dtype is torch.float16 else (1.0,)):
        run = _ShadowedRun(prepare(subject, device=device))
        run.execute(subject, device, None if native else dtype, scale)
        lost = {error.kind for error in run.errors if error.nonfinite}
        if "gradient" not in lost or "output" in lost:
            break  # a smaller loss scale mends a gradient, and no output
    raised = None
    if run.outcome.error is not None:
        raised = _raised(subject, run, device, None if native else dtype)
    stats = run.stats(subject, dtype, native, device)
    return Measured(replace(stats, raised=raised), run.references)


class _ShadowedRun:
    """One run of a prepared subject under a shadow."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.shadow = Shadow(prepared.root)
        self.references = References()
        self.errors: list[TensorError] = []
        self.missing = MissingKernels()
        self.lost_in: str | None = None
        self._gradients: dict[str, torch.Tensor] = {}
        self._health: dict[tuple[str, str], TensorHealth] = {}

    def execute(self, subject: Subject, device: str, dtype: torch.dtype | None, scale: float) -> None:
        """Run it, and see what is left of the faults."""
        around: list[AbstractContextManager[Any]] = [self.missing] if active() is not None else []
        self.outcome = run_subject(
            self.prepared,
            self._receive,
            device=device,
            dtype=dtype,
            loss=subject.loss,
            around=[*around, self.shadow],
            scale=scale,
            masked=self.references.masked,
            module_output=self._module_output,
        )
        if self.outcome.prevented and (inside := [r for r in self.shadow.unruled if r.startswith("what runs inside")]):
            self.outcome.no_backward += f", though {inside[0]} was not seen and may have one"
        buffers = dict(self.prepared.root.named_buffers()) if self.prepared.root is not None else {}
        self.shadow.reach({f"buffer {name}": buffer for name, buffer in buffers.items()}, self._gradients)
        self.errors = list(self.references.shares(self.errors))

    def _receive(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        self.references.results[kind, name] = self.shadow.reference(tensor)
        error = self.references.examine(kind, name, tensor)
        assert error is not None
        self.errors.append(error)
        if kind == "gradient":
            self._gradients[f"gradient {name}"] = tensor
            with _disable_current_modes():
                self._note(("backward", gradient_module(name)), tensor)
            return
        if kind == "output" and error.seen.exact_nan + error.seen.exact_inf:
            self.references.masked.add(name)
        self.shadow.reach({f"the {kind} {name}".strip(): tensor})

    def _module_output(self, name: str, tensor: torch.Tensor) -> None:
        self._note(("forward", name), tensor)
        companions = self.shadow.store.known(tensor) if self.lost_in is None else None
        if companions is not None and companions.unit >= JUDGED_UNIT:
            reference = Reference(self.shadow.exact(tensor), self.shadow.moved(tensor), companions.unit)
            seen = reference.examine(tensor)
            if seen.error > LOST / 2 and seen.spread * roundoff(torch.float32) <= companions.unit * LOST / 2:
                self.lost_in = name

    def _note(self, key: tuple[str, str], tensor: torch.Tensor) -> None:
        """Add the magnitudes of a sample of a tensor to the histogram of a module."""
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // _SAMPLE))]
        health = health_of(sample, histogram=True)
        if isinstance(health, TensorHealth):
            self._health[key] = self._health[key] + health if key in self._health else health

    def stats(self, subject: Subject, dtype: torch.dtype, native: bool, device: str) -> NumericsStats:
        """The frozen record."""
        outcome, judge = self.outcome, self.shadow.judge
        assert judge is not None
        faults = self.shadow.faults
        places = {f.where for f in faults} | set(judge.nonfinite)
        return NumericsStats(
            subject=subject.name,
            arm=arm_name(dtype, native, compiled=False),
            format=format_of(dtype).name,
            device=device,
            native=native,
            faults=faults,
            nonfinite=tuple(judge.nonfinite.items()),
            largest=dict(judge.largest),
            errors=tuple(self.errors),
            data=tuple(_data(subject)),
            health=self._health,
            sources=source_lines(places),
            lost_in=self.lost_in,
            losses=tuple(map(_name, outcome.losses)),
            module_dtypes={module: tuple(dtypes) for module, dtypes in outcome.modules.items()},
            declared_dtypes={pattern: format_of(d).name for pattern, d in subject.dtypes.items()},
            scale=outcome.scale,
            no_backward=outcome.no_backward,
            prevented=outcome.prevented,
            cut=_cut(self.prepared, outcome),
            masked=bool(self.references.masked) and subject.loss is None,
            left={name: (_name(old), _name(new)) for name, (old, new) in outcome.left.items()},
            ops=self.shadow.ops,
            low=judge.low,
            whole=judge.whole,
            coverage=Coverage(
                positive(
                    {
                        "ops": self.shadow.ops,
                        "16-bit ops": judge.low,
                        "tensors": judge.judged,
                        "modules": len(outcome.modules),
                        "outputs": sum(kind == "output" for kind, _ in self.references.results),
                        "gradients": sum(kind == "gradient" for kind, _ in self.references.results),
                    }
                ),
                {**unruled(self.shadow), **outcome.unseen, **_substituted(self.missing), **_off()},
            ),
        )


def source_lines(places: set[Where]) -> dict[tuple[str, int | None], str]:
    """The text of the source lines of these places."""
    lines = {(where.file, where.line) for where in places if where.file and where.line}
    texts = {(file, line): linecache.getline(file, line or 0).strip() for file, line in lines}
    return {place: text for place, text in texts.items() if text}


def unruled(shadow: Shadow) -> dict[str, int]:
    """What the shadow could not follow, for the coverage."""
    partly = {f"{op} of a large matrix (followed in the rows that ops read)": n for op, n in shadow.partly.items() if n}
    return {f"{reason} (followed from its results on)": n for reason, n in shadow.unruled.items()} | partly


def positive(counts: dict[str, int]) -> dict[str, int]:
    """The counts that are not zero."""
    return {name: count for name, count in counts.items() if count}


def _raised(subject: Subject, run: _ShadowedRun, device: str, dtype: torch.dtype | None) -> Raised | None:
    """What the run raised; None where float32 raises in backward too and the default loss is at fault.

    Raises `UsageError` where float32 raises too: there is nothing to judge.
    """
    outcome = run.outcome
    assert outcome.error is not None
    lack = lacking(outcome.error)
    around = [MissingKernels()] if active() is not None else []
    plain = run_subject(
        prepare(subject, device=device), device=device, dtype=dtype, loss=subject.loss, around=around,
        scale=outcome.scale,
    )  # fmt: skip
    if plain.error is None:
        return Raised(_place(run, outcome), f"float64 cannot follow the run: {brief(outcome.error)}", missing=True)
    float32 = run_subject(prepare(subject, device=device, to=torch.float32), device=device, loss=subject.loss)
    if (error := float32.error) is not None and (float32.phase == "forward" or subject.loss is not None):
        file, line = users_place(error)
        place = f" at {file}:{line}" if file else ""
        raise UsageError(
            f"{subject.name} raises in float32 too, in {float32.phase}{place} ({brief(error)}); "
            "a model is judged in low precision once it runs in float32"
        ) from error
    if error is not None and outcome.phase == "backward":
        outcome.no_backward = f"backward raises in float32 too: {brief(outcome.error)}"
        outcome.prevented = True
        return None
    where = _place(run, outcome)
    if lack:
        return Raised(where, f"{where.op or 'an op'}: {lack}", missing=True)
    return Raised(where, brief(outcome.error))


def _place(run: _ShadowedRun, outcome: Outcome) -> Where:
    """Where the model raised: the op that failed, or the place in its own code where composite code gave up."""
    error, root = outcome.error, run.prepared.root
    assert error is not None
    if run.shadow.failed is not None:
        return run.shadow.failed
    names = {id(m): n for n, m in root.named_modules()} if root is not None else {}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = [names[id(frame.f_locals.get("self"))] for frame in frames if id(frame.f_locals.get("self")) in names]
    file, line = users_place(error)
    return Where(phase=outcome.phase, module=inside[-1] if inside else "", file=file, line=line)


def _cut(prepared: Prepared, outcome: Outcome) -> tuple[str, ...]:
    """The parameters of modules that ran while gradients were off, and of which none gets a gradient.

    A reentrant checkpoint whose inputs need none runs so, and so does a teacher under no_grad.
    """
    if outcome.no_backward or outcome.error is not None or prepared.root is None:
        return ()
    off = outcome.without_grad - {gradient_module(name) for name in outcome.gradients}
    named = prepared.root.named_parameters()
    return tuple(name for name, p in named if p.requires_grad and p.numel() and gradient_module(name) in off)


def _data(subject: Subject) -> Iterator[Values]:
    """Inputs, weights and buffers with a NaN, and weights with an infinity: a buffer of -inf is a mask."""
    for number, call in enumerate(subject.calls):
        prefix = f"{number}." if len(subject.calls) > 1 else ""
        for path, tensor in tensors({"args": call.args, "kwargs": dict(call.kwargs)}):
            yield from _bad("input", prefix + path, tensor)
    modules = modules_of(subject.model)
    for number, module in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            yield from _bad("parameter", prefix + name, parameter)
        for name, buffer in module.named_buffers():
            yield from _bad("buffer", prefix + name, buffer)


def _bad(kind: str, name: str, tensor: torch.Tensor) -> Iterator[Values]:
    uninitialized = (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)
    floating = tensor.is_floating_point() or tensor.is_complex()
    if not floating or isinstance(tensor, uninitialized) or not is_plain(tensor):
        return
    plain = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()  # float8 has no isnan
    values = Values(kind, name, plain.numel(), int(plain.isnan().sum()), int(plain.isinf().sum()))
    if values.nan or (kind == "parameter" and values.infinite):
        yield values


def _substituted(missing: MissingKernels) -> dict[str, int]:
    return {f"{op} has no 16-bit kernel on this CPU: run in float32 and rounded": n for op, n in missing.ran.items()}


def _off() -> dict[str, int]:
    emulation = active()
    earlier = emulation.made_before if emulation is not None else 0
    text = "regions of torch.autocast that are off since they were made before the emulation"
    return {text: earlier} if earlier else {}


def _missing(kind: str, name: str, reference: Reference) -> TensorError:
    return TensorError(kind, name, "missing", Examination(reference.exact.numel()), reference.unit)


def _square(values: torch.Tensor) -> float:
    finite = torch.where(values.isfinite(), values, 0.0)
    return float(torch.linalg.vector_norm(finite)) ** 2


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")
