"""Run a subject in low precision beside its reference and record everything that the checks look at."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ampcheck.errors import brief
from ampcheck.formats import format_of
from ampcheck.health import TensorHealth, health_of
from ampcheck.nest import tensors
from ampcheck.numerics.arms import Outcome, Prepared, prepare, run_arm
from ampcheck.numerics.compare import compare
from ampcheck.numerics.compiled import measure_graphs
from ampcheck.numerics.decisions import Decisions
from ampcheck.numerics.equal_random import EqualRandom
from ampcheck.numerics.ops import OpWatch
from ampcheck.numerics.reference import Reference, input_names
from ampcheck.numerics.stats import NumericsStats, Raised
from ampcheck.record import Coverage, Where
from ampcheck.subject import Kind, Subject
from ampcheck.trace import OpEvent, Trace, is_users, short_path

LOSS_SCALES = (65536.0, 4096.0, 256.0, 16.0, 1.0)
"""Where torch.amp.GradScaler starts, and what it backs off to; float16 is judged at the first without overflow."""


def native_format(subject: Subject) -> torch.dtype | None:
    """The 16-bit dtype that the model's own weights, buffers or inputs have; None where autocast is to make it.

    Such a model is run as it is: autocast would change what its author wrote.
    """
    blocks = subject.model if isinstance(subject.model, tuple) else (subject.model,)
    modules = [block for block in blocks if isinstance(block, torch.nn.Module)]
    held: list[torch.Tensor] = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    for call in subject.calls:
        held += [tensor for _, tensor in tensors((call.args, dict(call.kwargs)))]
    return next((t.dtype for t in held if t.is_floating_point() and t.dtype.itemsize == 2), None)


def measure_numerics(
    subject: Subject,
    reference: Reference,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    native: bool = False,
    histogram: bool = True,
) -> NumericsStats:
    """Run forward and backward in eager mode under autocast to `dtype`, or as the model is when it is `native`."""
    decisions, ops, rounded = Decisions(), OpWatch(histogram=histogram), _RoundedInputs()
    prepared = prepare(subject, device=device)
    outcome, trace = Outcome(), Trace()
    for scale in LOSS_SCALES if dtype is torch.float16 else (1.0,):
        decisions, ops, prepared = Decisions(), OpWatch(histogram=histogram), prepare(subject, device=device)
        rounded = _RoundedInputs(prepared)
        trace = Trace(prepared.root, observers=(decisions, ops, rounded))
        outcome = run_arm(
            prepared,
            loss=subject.loss,
            autocast=_autocast(device, dtype, native),
            around=[EqualRandom(), trace],
            scale=scale,
            finite_loss=reference.finite_loss,
        )
        if outcome.finite_gradients or not _finite(outcome.outputs.values()):
            break
    raised = None
    if outcome.error is not None:
        if not _reference_reached(reference, outcome):
            outcome.no_backward = f"backward raises in float32 too: {brief(outcome.error)}"
        else:
            raised = _raised(outcome, prepared, trace.failed)
    errors = compare(outcome, reference, dtype, rounded.names)
    moved = reference.moved(dtype, frozenset(rounded.names))
    dropped = {"module outputs beyond the memory that one run keeps": outcome.dropped} if outcome.dropped else {}
    return NumericsStats(
        subject=subject.name,
        arm=arm_name(dtype, native, compiled=False),
        format=format_of(dtype).name,
        device=device,
        native=native,
        reference=reference.how,
        ops=ops.facts(),
        errors=errors,
        flips=reference.wide.decisions.flips(decisions, [run.decisions for run in moved]),
        health=ops.health(),
        reference_nonfinite=sum(int((~t.isfinite()).sum()) for t in reference.wide.outcome.outputs.values()),
        reference_produced=reference.wide.produced,
        zeroed_buffers=_zeroed_buffers(prepared),
        raised=raised,
        losses=tuple(str(d).removeprefix("torch.") for d in outcome.losses),
        module_dtypes=_module_dtypes(outcome),
        declared_dtypes={pattern: format_of(d).name for pattern, d in subject.dtypes.items()},
        scale=outcome.scale,
        chain=max(1, ops.longest_chain),
        reduction=ops.longest_reduction,
        draws=reference.wide.draws,
        no_backward=outcome.no_backward,
        coverage=Coverage(
            _seen(
                ops=len(trace.events),
                tensors=ops.measured,
                modules=len({e.name for e in errors if e.kind == "module"}),
                outputs=len(outcome.outputs),
                gradients=len(outcome.gradients),
            ),
            {**ops.unseen, **dropped},
        ),
    )


def measure_compiled(
    subject: Subject,
    reference: Reference,
    eager: NumericsStats,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    native: bool = False,
) -> NumericsStats:
    """Run the same under `torch.compile` with Inductor. Outputs, loss and gradients are judged; the inside is not seen.

    The loss scale, the chain of roundings and the sensitivities are those of the `eager` run.
    """
    prepared = prepare(subject, device=device)
    with measure_graphs() as graphs:
        prepared.model = _compiled(prepared)
        outcome = run_arm(
            prepared,
            loss=subject.loss,
            autocast=_autocast(device, dtype, native),
            scale=eager.scale,
            keep_modules=False,
            finite_loss=reference.finite_loss,
        )
    outcome.gradients = {name.replace("_orig_mod.", ""): g for name, g in outcome.gradients.items()}
    raised = None
    if outcome.error is not None and _reference_reached(reference, outcome):
        raised = Raised(Where(phase="compile"), brief(outcome.error))
    inputs = {
        name
        for call, n in zip(prepared.calls, range(len(prepared.calls)), strict=True)
        for name in input_names(call, n)
    }
    health = {}
    for path, tensor in outcome.outputs.items():
        seen = health_of(tensor, histogram=True)
        if isinstance(seen, TensorHealth):
            health["forward", f"output {path}".strip()] = seen
    return NumericsStats(
        subject=subject.name,
        arm=arm_name(dtype, native, compiled=True),
        format=format_of(dtype).name,
        device=device,
        compiled=True,
        native=native,
        reference=reference.how,
        errors=compare(outcome, reference, dtype, inputs if native else ()),
        health=health,
        raised=raised,
        losses=eager.losses,
        scale=eager.scale,
        chain=eager.chain,
        reduction=eager.reduction,
        flips=eager.flips,
        draws=reference.wide.draws,
        no_backward=outcome.no_backward,
        graphs=graphs.count,
        coverage=Coverage(
            _seen(
                graphs=graphs.count,
                outputs=len(outcome.outputs),
                gradients=len(outcome.gradients),
            ),
            graphs.unseen,
        ),
    )


def _finite(values: Iterable[torch.Tensor]) -> bool:
    return all(bool(v.isfinite().all()) for v in values)


def _reference_reached(reference: Reference, outcome: Outcome) -> bool:
    """Whether float32 came past the phase in which this arm raised."""
    return reference.float32.error is None or (outcome.phase == "forward" and reference.float32.phase == "backward")


def _raised(outcome: Outcome, prepared: Prepared, failed: OpEvent | None) -> Raised:
    """Where the model raised: the op that failed, or the place in its own code where composite code gave up."""
    assert outcome.error is not None
    message = brief(outcome.error)
    if failed is not None:
        return Raised(failed.where, message)
    names = {id(m): n for n, m in prepared.root.named_modules()} if prepared.root is not None else {}
    module, file, line = "", "", None
    for frame, number in traceback.walk_tb(outcome.error.__traceback__):
        module = names.get(id(frame.f_locals.get("self")), module)
        if is_users(frame.f_code.co_filename):
            file, line = short_path(frame.f_code.co_filename), number
    return Raised(Where(phase=outcome.phase, module=module, file=file, line=line), message)


def _zeroed_buffers(prepared: Prepared) -> tuple[str, ...]:
    buffers = prepared.root.named_buffers() if prepared.root is not None else ()
    return tuple(
        n for n, b in buffers if b.is_floating_point() and b.dtype.itemsize <= 2 and b.numel() and bool((b == 0).any())
    )


def _seen(**counts: int) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _module_dtypes(outcome: Outcome) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for (module, _, _), tensor in outcome.modules.items():
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in found.setdefault(module, []):
            found[module].append(name)
    return {module: tuple(names) for module, names in found.items()}


def arm_name(dtype: torch.dtype, native: bool, *, compiled: bool) -> str:
    """`float16, eager` under autocast; `float16 native, compiled` for a model that is kept in 16 bits."""
    return f"{format_of(dtype).name}{' native' if native else ''}, {'compiled' if compiled else 'eager'}"


def _autocast(device: str, dtype: torch.dtype, native: bool) -> AbstractContextManager[Any]:
    return nullcontext() if native else torch.autocast(torch.device(device).type, dtype)


def _compiled(prepared: Prepared) -> Any:
    if prepared.kind is Kind.REGIONAL:
        return tuple(torch.compile(block) for block in prepared.blocks)
    return torch.compile(prepared.model)


class _RoundedInputs:
    """An observer that tells which inputs of the model the run rounds to 16 bits."""

    def __init__(self, prepared: Prepared | None = None) -> None:
        self.names: set[str] = set()
        self._storages: dict[int, str] = {}
        for number, call in enumerate(prepared.calls if prepared else ()):
            for name, tensor in input_names(call, number).items():
                if tensor.dtype.itemsize <= 2:
                    self.names.add(name)
                elif tensor.layout is torch.strided and tensor.numel():
                    self._storages[tensor.untyped_storage().data_ptr()] = name

    def before(self, op: Any, args: Any, kwargs: Any) -> None:
        """Nothing is needed before an op runs."""

    def after(self, event: OpEvent, op: Any, args: Any, kwargs: Any, out: Any, held: Any) -> None:
        """Look at casts only."""
        if event.op != "aten::_to_copy" or not out.is_floating_point() or out.dtype.itemsize > 2:
            return
        source = args[0]
        if source.layout is torch.strided and source.numel():
            name = self._storages.get(source.untyped_storage().data_ptr())
            if name is not None:
                self.names.add(name)
