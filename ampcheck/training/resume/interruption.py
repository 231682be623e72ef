"""Does a training loop go on from its checkpoint as if it had never been interrupted?"""

from __future__ import annotations

import io
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampcheck.core.errors import as_result, brief, require_ran
from ampcheck.torchtools.saving import generator_state
from ampcheck.torchtools.snapshot import Snapshot, generators_only
from ampcheck.torchtools.source import users_place
from ampcheck.training.distributed.ranks import agreed, gather, handed_by
from ampcheck.training.distributed.together import settled
from ampcheck.training.loop import Role, StepError, TrainingLoop, same_loss

_WEIGHTS = {
    Role.PARAMETER: "weights",
    Role.STATE: "optimizer state",
    Role.BUFFER: "buffers",
    Role.COPY: "copies of weights",
}

Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Difference:
    """What two runs do not share, to the bit.

    what: `weights`, `optimizer state`, `buffers`, `copies of weights`, `scaler`, `scheduler`, `optimizer settings` or
    `losses`. names: which of them. detail: one of them, with both values. size: the largest relative difference, in
    the Euclidean norm; infinite where one is missing.
    """

    what: str
    names: tuple[str, ...]
    detail: str = ""
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class ResumeStats:
    """An uninterrupted run of 2 * steps steps beside one that was interrupted in the middle.

    skipped: why nothing was compared; prevented: whether the steps themselves prevent it.
    raised: what `save`, `load` or the first steps after them raised.
    forgotten: what differs right after the checkpoint was loaded from what was saved.
    differences: what differs in the end, although random numbers and accumulated gradients were carried over for the
    loop. unaided: the same where nothing was carried over; empty where that makes no difference.
    drew: whether the uninterrupted run draws random numbers. accumulating: whether gradients stood at the interruption.
    """

    subject: str
    steps: int
    skipped: str = ""
    prevented: bool = False
    raised: str = ""
    forgotten: tuple[Difference, ...] = ()
    differences: tuple[Difference, ...] = ()
    unaided: tuple[Difference, ...] = ()
    drew: bool = False
    accumulating: bool = False


@dataclass(slots=True)
class _State:
    """What is compared, copied: tensors by what they are and their name, settings by their owner."""

    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


class _StoppedError(Exception):
    """A step or the user's save or load raised; the message says which."""


HOW = (
    "the mapping declares no way to save and load: add 'save' (a function without arguments that returns a checkpoint) "
    "and 'load' (a function of that checkpoint)"
)


def measure_resume(loop: TrainingLoop, steps: int = 3) -> ResumeStats:
    """Run 2 * steps steps, and again with an interruption: save, back to the initial state, load, go on.

    The checkpoint goes through `torch.save` and `torch.load` in memory. In both runs the scalers start from a scale and
    a growth count that a new scaler does not have, so that a forgotten one shows. The loop is afterwards as it was.

    Of several processes each must call it. One whose `save` gives None loads what the first of the others gave, as all
    read the file that one of them wrote.
    """
    if loop.save is None or loop.load is None:
        return ResumeStats(loop.name, steps, skipped=HOW)
    with loop.preserved() as start:
        try:
            return _measured(loop, start, steps)
        except _StoppedError as error:
            return ResumeStats(loop.name, steps, skipped=str(error), prevented=True)


def _measured(loop: TrainingLoop, start: Snapshot, steps: int) -> ResumeStats:
    before = _random_key(loop)
    whole = _uninterrupted(loop, start, steps)
    stats = ResumeStats(loop.name, steps, drew=_random_key(loop) != before)

    start.restore()
    _disturb_scalers(loop)
    first = _run(loop, range(steps))
    kept, chance, gradients = _state(loop), Snapshot(generators_only(loop.reached)), _gradients(loop)
    stats = replace(stats, accumulating=bool(gradients))
    try:
        checkpoint, own = _written(loop)
        after = _loaded(loop, start, checkpoint)
        # What is another process's may differ in what the next step makes equal: DDP broadcasts buffers.
        stats = replace(stats, forgotten=_compare(kept, after) if own else ())
        chance.restore()
        _put_gradients(loop, gradients)
        differences = _compare(whole, _resumed(loop, first, steps))
        unaided: tuple[Difference, ...] = ()
        differ = agreed(bool(differences))
        if not differ and agreed(stats.drew or bool(gradients)):
            _loaded(loop, start, checkpoint)
            unaided = _compare(whole, _resumed(loop, first, steps))
    except _StoppedError as error:
        return replace(stats, raised=str(error))
    if differ and agreed(bool(_compare(whole, _uninterrupted(loop, start, steps)))):
        why = "two uninterrupted runs from the same state differ: what the step reads cannot be put back, or is random"
        return replace(stats, skipped=why, prevented=True, forgotten=())
    return replace(stats, differences=differences, unaided=unaided)


def _uninterrupted(loop: TrainingLoop, start: Snapshot, steps: int) -> _State:
    start.restore()
    _disturb_scalers(loop)
    losses = _run(loop, range(2 * steps))
    state = _state(loop)
    state.losses = losses
    return state


def _resumed(loop: TrainingLoop, first: list[float], steps: int) -> _State:
    try:
        losses = first + _run(loop, range(steps, 2 * steps))
    except _StoppedError as error:
        raise _StoppedError(f"after the checkpoint was loaded, {error}") from error
    state = _state(loop)
    state.losses = losses
    return state


def _run(loop: TrainingLoop, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        taken = loop.take(number)
        if isinstance(taken, StepError):
            raise _StoppedError(f"step {number} did not come to its end: {taken.message}")
        losses.append(taken)
    return losses


def _disturb_scalers(loop: TrainingLoop) -> None:
    """A new scaler has a known scale: one that was trained with is told from it only if it has another."""
    for scaler in loop.reached.scalers.values():
        if not scaler.is_enabled():
            continue
        state = dict(scaler.state_dict())
        state["scale"] = state["scale"] / 4
        # The count grows the scale when it equals the interval; beyond it, it never would.
        state["_growth_tracker"] = max(min(state["_growth_tracker"] + 1, state["growth_interval"] - 1), 0)
        scaler.load_state_dict(state)


def _written(loop: TrainingLoop) -> tuple[bytes, bool]:
    """The checkpoint of this process, or that of the first that gave one; whether it is its own."""
    given, what = None, "save() raised"
    caught: BaseException | None = None
    stream = io.BytesIO()
    try:
        given = require_ran(loop.save(), f"save() of {loop.name}") if loop.save is not None else None
        what = "torch.save cannot write what save() returned:"
        torch.save(given, stream)
    except BaseException as error:  # noqa: BLE001  # the user's code, or whatever the pickled objects raise
        caught = as_result(error)
    _all_came_through(what, caught)
    gave = gather(given is not None)
    if all(gave) or not any(gave):
        return stream.getvalue(), True
    made: bytes = handed_by(gave.index(True), stream.getvalue())
    return (stream.getvalue(), True) if given is not None else (made, False)


def _loaded(loop: TrainingLoop, start: Snapshot, checkpoint: bytes) -> _State:
    """The loop in its initial state, as a new process has it, with the checkpoint loaded."""
    start.restore()
    caught: BaseException | None = None
    try:
        given = torch.load(io.BytesIO(checkpoint), weights_only=False)
        if loop.load is not None:
            require_ran(loop.load(given), f"load(checkpoint) of {loop.name}")
    except BaseException as error:  # noqa: BLE001  # the user's code; it is told in the run
        caught = as_result(error)
    _all_came_through("load(checkpoint) raised", caught)
    return _state(loop)


def _all_came_through(what: str, caught: BaseException | None) -> None:
    """Stop on all processes where one of them raised: who goes on alone waits for ever."""
    mine = 0.0 if caught is None else StepError(-1, "raised", f"{what} {brief(caught)}", *users_place(caught))
    found = settled(mine)
    if isinstance(found, StepError):
        raise _StoppedError(found.message) from caught


def _state(loop: TrainingLoop) -> _State:
    found = _State()
    for one in loop.residents():
        what = _WEIGHTS.get(one.role, "weights" if one.role is Role.OTHER and one.tensor.requires_grad else "")
        if what:
            found.tensors[what, one.name] = local(one.tensor).clone()
    for path, optimizer in loop.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            values = {key: _plain(value) for key, value in group.items() if key != "params"}
            found.settings[f"optimizer settings:{path}.param_groups.{number}"] = values
    for path, scheduler in loop.reached.schedulers.items():
        found.settings[f"scheduler:{path}"] = {key: _plain(value) for key, value in scheduler.state_dict().items()}
    for path, scaler in loop.reached.scalers.items():
        if scaler.is_enabled():
            found.settings[f"scaler:{path}"] = {"used": scaler._scale is not None, **scaler.state_dict()}
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process holds; any other tensor itself; detached."""
    held = tensor.detach()
    part = getattr(held, "to_local", None)
    return held if part is None else part()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _gradients(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    """The gradients that stand, where any is not zero."""
    found = {name: p.grad.detach().clone() for name, p in loop.parameters() if p.grad is not None}
    return found if any(bool(local(one).any()) for one in found.values()) else {}


def _put_gradients(loop: TrainingLoop, gradients: dict[str, torch.Tensor]) -> None:
    for name, parameter in loop.parameters():
        if name in gradients:
            parameter.grad = gradients[name].clone()


def _random_key(loop: TrainingLoop) -> Any:
    numpy = sys.modules.get("numpy")
    theirs = None if numpy is None else numpy.random.get_state()
    own = [generator_state(generator) for generator in loop.reached.generators]
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return _plainly((torch.get_rng_state(), *devices, random.getstate(), theirs, *own))


def _plainly(state: Any) -> Any:
    """What a generator says of itself, so that it can be compared."""
    if isinstance(state, dict):
        return tuple((key, _plainly(one)) for key, one in state.items())
    if isinstance(state, tuple):
        return tuple(map(_plainly, state))
    return tuple(state.tolist()) if hasattr(state, "tolist") else state


def _compare(one: _State, other: _State) -> tuple[Difference, ...]:
    """What differs between two states, the losses only where both have some."""
    found: list[Difference] = []
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for what, name in dict.fromkeys((*one.tensors, *other.tensors)):
        size = _distance(one.tensors.get((what, name)), other.tensors.get((what, name)))
        if size is not None:
            groups.setdefault(what, []).append((name, size, _apart(name, size)))
    for owner in dict.fromkeys((*one.settings, *other.settings)):
        what, _, name = owner.partition(":")
        changed = _changed(one.settings.get(owner, {}), other.settings.get(owner, {}), what)
        if changed:
            groups.setdefault(what, []).append((name, 0.0, f"{name}: {changed}"))
    for what, held in groups.items():
        worst = max(held, key=lambda item: item[1])
        found.append(Difference(what, tuple(name for name, _, _ in held), worst[2], worst[1]))
    pairs = list(zip(one.losses, other.losses, strict=False))
    apart = [number for number, (mine, theirs) in enumerate(pairs) if not same_loss(mine, theirs)]
    if apart:
        mine, theirs = pairs[apart[0]]
        detail = f"of step {apart[0]}: {mine:.9g} became {theirs:.9g}"
        found.append(Difference("losses", tuple(f"step {number}" for number in apart), detail, abs(mine - theirs)))
    return tuple(found)


def _distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float | None:
    """None where the bits are the same."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all()):
        return None
    mine, theirs = one.double(), other.double()
    size = float(mine.norm())
    return float((mine - theirs).norm()) / size if size else float(theirs.norm())


def _apart(name: str, size: float) -> str:
    return f"{name} is missing or of another kind" if size == math.inf else f"{name} differs by {size:.2g} of its norm"


def _changed(one: Mapping[str, Any], other: Mapping[str, Any], what: str) -> str:
    """The settings that differ, with both values; those of a scaler that neither run used do not count."""
    if what == "scaler" and not (one.get("used") or other.get("used")):
        return ""
    keys = [key for key in dict.fromkeys((*one, *other)) if key != "used" and one.get(key) != other.get(key)]
    shown = [f"{key.strip('_')} {_short(one.get(key))} became {_short(other.get(key))}" for key in keys[:3]]
    return ", ".join(shown)


def _short(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else f"{value!r:.40}"
