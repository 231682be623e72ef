"""`resume`: an interrupted run ends as an uninterrupted one does, and no scaler starts over."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ampcheck.core.errors import as_result, brief, require_ran
from ampcheck.core.run import Table
from ampcheck.facts.memory import dtype_name
from ampcheck.facts.norms import distance
from ampcheck.records.protocol import StepError, same_loss
from ampcheck.records.resume import NOT_DECLARED, UNIT, Difference, ResumeStats
from ampcheck.records.state import Role
from ampcheck.torchtools.restore import random_state_key
from ampcheck.torchtools.saving import generator_state
from ampcheck.torchtools.snapshot import Snapshot, generators_only
from ampcheck.torchtools.source import users_place
from ampcheck.torchtools.storage import local
from ampcheck.training.distributed.ranks import agreed, gather, rank, settled
from ampcheck.training.loop import TrainingLoop

_OF_ROLE = {
    Role.PARAMETER: "weights",
    Role.STATE: "optimizer state",
    Role.BUFFER: "buffers",
    Role.COPY: "copies of weights",
}

_NARROW = (torch.float16, torch.bfloat16)
"""Formats in which checkpoints are written to be small."""

_State: TypeAlias = dict[tuple[str, str], Any]
"""Copies of what is compared, by its part and name: tensors, the settings of an owner, losses."""


class _StoppedError(Exception):
    """A step or the user's save or load raised; the message says which."""


def measure_resume(loop: TrainingLoop, start: Snapshot, steps: int = 3) -> ResumeStats:
    """Run 2 * steps steps, and again with an interruption: save, restore the initial state `start`, load, go on.

    The checkpoint goes through `torch.save` and `torch.load` in memory. In both runs the scalers start from a scale and
    a growth count that a new scaler does not have, so that a forgotten one shows.

    Every process must call it. One whose `save` returns None loads the checkpoint of the first that returned another,
    as all read the file that one of them wrote.
    """
    if loop.save is None or loop.load is None:
        return ResumeStats(loop.name, steps, skipped=NOT_DECLARED)
    try:
        return _measured(loop, start, steps)
    except _StoppedError as error:
        return ResumeStats(loop.name, steps, skipped=str(error))
    finally:
        start.restore()
        loop.reach_again()


def _measured(loop: TrainingLoop, start: Snapshot, steps: int) -> ResumeStats:
    before = _random_state(loop)
    whole = _uninterrupted(loop, start, steps)
    stats = ResumeStats(loop.name, steps, drew=_random_state(loop) != before)

    start.restore()
    _disturb_scalers(loop)
    losses = _losses(loop, range(steps))
    saved, generators = _state(loop), Snapshot(generators_only(loop.reached))
    gradients = {name: p.grad.detach().clone() for name, p in loop.parameters() if p.grad is not None}
    if not any(bool(local(gradient).any()) for gradient in gradients.values()):
        gradients = {}
    stats = replace(stats, accumulating=bool(gradients))
    try:
        checkpoint, own = _written(loop)
        loaded = _loaded(loop, start, checkpoint)
        # Of another process's checkpoint, parts may differ that the next step makes equal: DDP broadcasts buffers.
        stats = replace(stats, forgotten=_compare(saved, loaded) if own else ())
        generators.restore()
        for name, parameter in loop.parameters():
            if name in gradients:
                parameter.grad = gradients[name].clone()
        differences = _compare(whole, _resumed(loop, losses, steps))
        unaided: tuple[Difference, ...] = ()
        differ = agreed(bool(differences))
        if not differ and agreed(stats.drew or stats.accumulating):
            _loaded(loop, start, checkpoint)
            unaided = _compare(whole, _resumed(loop, losses, steps))
    except _StoppedError as error:
        return replace(stats, raised=str(error))
    if differ and agreed(bool(_compare(whole, _uninterrupted(loop, start, steps)))):
        why = "two uninterrupted runs from the same state differ: what the step reads cannot be restored, or is random"
        return replace(stats, skipped=why, forgotten=())
    return replace(stats, differences=differences, unaided=unaided)


def _uninterrupted(loop: TrainingLoop, start: Snapshot, steps: int) -> _State:
    start.restore()
    loop.reach_again()
    _disturb_scalers(loop)
    return _state(loop, _losses(loop, range(2 * steps)))


def _resumed(loop: TrainingLoop, losses: list[float], steps: int) -> _State:
    try:
        return _state(loop, losses + _losses(loop, range(steps, 2 * steps)))
    except _StoppedError as error:
        raise _StoppedError(f"after the checkpoint was loaded, {error}") from error


def _losses(loop: TrainingLoop, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        taken = loop.take(number)
        if isinstance(taken, StepError):
            raise _StoppedError(f"step {number} did not come to its end: {taken.message}")
        losses.append(taken)
    return losses


def _disturb_scalers(loop: TrainingLoop) -> None:
    """Give scalers a scale and a count that no new scaler has."""
    for scaler in loop.scalers.values():
        state = dict(scaler.state_dict())
        state["scale"] = state["scale"] / 4
        # The count grows the scale when it equals the interval; beyond it, it never would.
        state["_growth_tracker"] = max(min(state["_growth_tracker"] + 1, state["growth_interval"] - 1), 0)
        scaler.load_state_dict(state)


def _written(loop: TrainingLoop) -> tuple[bytes, bool]:
    """The checkpoint of this process, or of the first that returned one; whether it is its own."""
    checkpoint, what, caught = None, "save() raised", None
    stream = io.BytesIO()
    try:
        checkpoint = require_ran(loop.save(), f"save() of {loop.name}") if loop.save is not None else None
        what = "torch.save cannot write what save() returned:"
        torch.save(checkpoint, stream)
    except BaseException as error:  # noqa: BLE001  # the user's code, or whatever the pickled objects raise
        caught = as_result(error)
    _stop_all(what, caught)
    own = checkpoint is not None
    returned = gather(own)
    if all(returned) or not any(returned):
        return stream.getvalue(), True
    written = gather(stream.getvalue() if own else b"")
    return written[rank()] or written[returned.index(True)], own


def _loaded(loop: TrainingLoop, start: Snapshot, checkpoint: bytes) -> _State:
    """The loop in its initial state, as in a new process, with the checkpoint loaded."""
    start.restore()
    loop.reach_again()
    caught: BaseException | None = None
    try:
        content = torch.load(io.BytesIO(checkpoint), weights_only=False)
        if loop.load is not None:
            require_ran(loop.load(content), f"load(checkpoint) of {loop.name}")
    except BaseException as error:  # noqa: BLE001  # the user's code; the run reports it
        caught = as_result(error)
    _stop_all("load(checkpoint) raised", caught)
    loop.reach_again()
    return _state(loop)


def _stop_all(what: str, caught: BaseException | None) -> None:
    """Stop all processes where one of them raised: the others would wait forever."""
    mine = 0.0 if caught is None else StepError(-1, "raised", f"{what} {brief(caught)}", *users_place(caught))
    result = settled(mine)
    if isinstance(result, StepError):
        raise _StoppedError(result.message) from caught


def _state(loop: TrainingLoop, losses: Sequence[float] = ()) -> _State:
    state: _State = {}
    for resident in loop.residents():
        trained = resident.role is Role.OTHER and resident.tensor.requires_grad
        if what := _OF_ROLE.get(resident.role, "weights" if trained else ""):
            state[what, resident.name] = local(resident.tensor).clone()
    for path, optimizer in loop.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            values = {key: _plain(value) for key, value in group.items() if key != "params"}
            state["optimizer settings", f"{path}.param_groups.{number}"] = values
    for path, scheduler in loop.reached.schedulers.items():
        state["scheduler", path] = _plain(scheduler.state_dict())
    for path, scaler in loop.scalers.items():
        state["scaler", path] = {"used": scaler._scale is not None, **scaler.state_dict()}
    return state | {("losses", f"step {step}"): loss for step, loss in enumerate(losses)}


def _plain(value: object) -> Any:
    """A value that can be compared; an object by its type."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _random_state(loop: TrainingLoop) -> Any:
    return random_state_key(), _plain([generator_state(generator) for generator in loop.reached.generators])


def _compare(before: _State, after: _State) -> tuple[Difference, ...]:
    """The parts in which two states differ."""
    differing: dict[str, list[tuple[str, float, str]]] = defaultdict(list)
    for what, name in dict.fromkeys((*before, *after)):
        if (difference := _difference(name, before.get((what, name)), after.get((what, name)))) is not None:
            differing[what].append((name, *difference))
    worst = {what: max(parts, key=lambda part: part[1]) for what, parts in differing.items()}
    return tuple(
        Difference(what, tuple(name for name, _, _ in parts), worst[what][2], worst[what][1])
        for what, parts in differing.items()
    )


def _difference(name: str, before: Any, after: Any) -> tuple[float, str] | None:
    """The relative size of a difference, with its words; None where two values are equal to the bit, NaN to NaN."""
    if isinstance(before, float) and isinstance(after, float):
        same = same_loss(before, after)
        return None if same else (abs(before - after), f"of {name}: {before:.9g} became {after:.9g}")
    if isinstance(before, Mapping) or isinstance(after, Mapping):
        changed = _changed(before or {}, after or {})
        return (0.0, f"{name}: {changed}") if changed else None
    if before is None or after is None:
        return math.inf, f"{name} {'is' if after is None else 'was'} missing"
    if before.dtype != after.dtype:
        return math.inf, f"{name} was {dtype_name(before.dtype)}, is {dtype_name(after.dtype)}"
    if before.shape != after.shape:
        return math.inf, f"{name} was of shape {tuple(before.shape)}, is of {tuple(after.shape)}"
    if torch.equal(before, after) or torch.allclose(before, after, rtol=0.0, atol=0.0, equal_nan=True):
        return None
    size = distance(after, before)
    if size == math.inf:
        return size, f"{name} is infinite or NaN"
    wide = before.dtype in (torch.float32, torch.float64) and bool(after.any())  # zeros are a state that is new
    formats = _NARROW if wide else ()
    narrow = next((form for form in formats if torch.equal(before.to(form).to(before.dtype), after)), None)
    how = f"is rounded to {dtype_name(narrow)} and differs" if narrow is not None else "differs"
    return size, f"{name} {how} by {size:.2g} of its norm"


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The settings that differ, with both values; those of a scaler that neither run used do not count."""
    uses = [settings["used"] for settings in (before, after) if "used" in settings]
    if uses and not any(uses):
        return ""
    keys = [key for key in dict.fromkeys((*before, *after)) if key != "used" and before.get(key) != after.get(key)]
    return ", ".join(f"{key.strip('_')} {_short(before.get(key))} became {_short(after.get(key))}" for key in keys[:3])


def _short(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else f"{value!r:.40}"


def resume_table(stats: ResumeStats) -> tuple[Table, ...]:
    """Return what differed right after loading, and in the end; empty where nothing did."""
    groups = {
        "after loading": stats.forgotten,
        "in the end": stats.differences,
        "in the end, unaided": stats.unaided,
    }
    rows = [(when, d.what, len(d.names), d.size, d.detail) for when, differences in groups.items() for d in differences]
    if not rows or stats.skipped:
        return ()
    columns = ("when", "what", "how many", UNIT, "example")
    title = f"An interrupted run compared with an uninterrupted one: {stats.subject}"
    return (Table(title, columns, rows, "resume"),)
