"""Look at the optimizer steps of a loop that someone else runs: gradients, updates and the loss scale, sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ampcheck.core.errors import UsageError
from ampcheck.health import PendingHealth, Unmeasured, measure_health, read_all
from ampcheck.health.plan import Plan
from ampcheck.torchtools.patching import replaced
from ampcheck.training.monitor.expected import rounds_to_nearest
from ampcheck.training.monitor.folded import GradientFold, GradientSum, Trace
from ampcheck.training.monitor.stats import WatchedOptimizer, WatchedParameter, WatchedScaler, WatchStats
from ampcheck.training.monitor.unwrapped import local, narrow_rest, owner_of, unwrapped, wide_copy
from ampcheck.training.monitor.updates import Entry, Updates

_CULPRITS = 16
"""Skipped steps of an optimizer whose gradients are looked at: later ones tell the same."""


class _Steps:
    """The steps of one optimizer."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name, self.optimizer = name, optimizer
        self.taken = self.measured = self.number = 0
        self.came = self.guarded = False
        self.rates, self.skips = Trace(), Trace()
        self.entries: list[Entry] | None = None
        self.late = False
        self.culprits: list[tuple[list[int], list[PendingHealth | Unmeasured]]] = []


class TrainingWatch:
    """Everything that optimizers do inside `watching`, each N-th step of an optimizer measured, the first among them.

    names: of parameters, by their `id`. scaler: whose scale is followed, in every step. The loop computes the same bits
    as without: nothing is changed, and nothing is read from a device before `read`.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], scaler: Any, names: Mapping[int, str], *, every: int = 1
    ) -> None:
        self.every, self.scaler = every, scaler
        many = len(optimizers) > 1
        self._steps = [_Steps(f"optimizer.{i}" if many else "optimizer", one) for i, one in enumerate(optimizers)]
        self._names, self._keys = dict(names), dict[int, int]()
        self._known: list[tuple[str, str, torch.Tensor | None, str, int]] = []
        self._gradients: dict[tuple[torch.device, str, Plan], GradientFold] = {}
        self._still: dict[int, float] | None = None
        self._exempt: dict[int, str] | None = None
        self._scales, self._losses = Trace(), Trace()
        self._unseen: Counter[str] = Counter()
        self._updates = Updates(self._unseen)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what happens inside; all hooks are gone afterwards, also after an exception."""
        with ExitStack() as stack:
            stack.callback(self._leave)
            for one in self._steps:
                stack.callback(one.optimizer.register_step_pre_hook(self._pre(one)).remove)
                stack.callback(one.optimizer.register_step_post_hook(self._post(one)).remove)
            if self.scaler is not None:
                # Of the class, not of the object: a scaler may be copied or pickled inside the block.
                stack.enter_context(replaced(owner_of(self.scaler, "step"), "step", self._scaler_step))
                stack.enter_context(replaced(owner_of(self.scaler, "update"), "update", self._scaler_update))
            yield

    def step(self, loss: torch.Tensor | float) -> None:
        """The loss of a step, as the loop knows it."""
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise UsageError(f"a loss must be one number; found a tensor of shape {tuple(loss.shape)}")
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def _leave(self) -> None:
        self._still = self._compared()
        self._exempt = self._exempted()
        self._known = [(name, owner, None, dtype, numel) for name, owner, _, dtype, numel in self._known]
        for one in self._steps:
            one.entries = None
        self._keys.clear()
        self._updates.forget()

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        return next(one.optimizer for one in self._steps if one.name == name)

    def _key(self, steps: _Steps, parameter: torch.Tensor) -> int:
        key = self._keys.get(id(parameter))
        if key is None:
            key = self._keys[id(parameter)] = len(self._known)
            name = self._names.get(id(parameter), f"{steps.name}.params.{key}")
            dtype = str(parameter.dtype).removeprefix("torch.")
            self._known.append((name, steps.name, parameter, dtype, parameter.numel()))
        return key

    def _pre(self, steps: _Steps) -> Any:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return
            steps.came = True
            found = getattr(optimizer, "found_inf", None)
            if found is not None:
                steps.guarded = True
                steps.skips.append(found)
            if steps.taken % self.every:
                return
            # A closure computes the gradients inside the step: they are there only when it is over.
            steps.late = any(callable(one) for one in (*args[1:], *kwargs.values()))
            with torch.no_grad():
                steps.entries = self._copied(steps, found)
                if not steps.late:
                    self._see_gradients(steps, steps.entries)

        return hook

    def _post(self, steps: _Steps) -> Any:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return
            entries, steps.entries = steps.entries, None
            if entries is not None:
                with torch.no_grad():
                    if steps.late:
                        for one in entries:
                            one.gradient = one.parameter.grad
                        self._see_gradients(steps, entries)
                    for one in entries:
                        if one.group is not None:
                            one.state = steps.optimizer.state.get(one.parameter, {})
                    self._updates.add(entries)
                steps.measured += 1
            steps.taken += 1
            steps.number += 1

        return hook

    def _copied(self, steps: _Steps, found: torch.Tensor | None) -> list[Entry]:
        entries = []
        for place, group in enumerate(steps.optimizer.param_groups):
            rate = group.get("lr")
            alive: Any = True if rate is None else rate != 0
            if found is not None:
                alive = (found == 0) & alive
            if place == 0 and isinstance(rate, (int, float, torch.Tensor)):
                steps.rates.append(rate)
            for parameter in group["params"]:
                key = self._key(steps, parameter)
                before = None
                if (parameter.grad is not None or steps.late) and parameter.requires_grad:
                    before = local(parameter).detach().clone()
                known = rounds_to_nearest(steps.optimizer)
                entries.append(Entry(key, parameter, before, parameter.grad, alive, None if known else group))
        return entries

    def _see_gradients(self, steps: _Steps, entries: Sequence[Entry]) -> None:
        scale = self._scale()
        inverse = getattr(steps.optimizer, "grad_scale", None)  # the gradients of a fused step are still scaled
        folds: dict[tuple[torch.device, str, Plan], tuple[list[int], list[PendingHealth]]] = {}
        for one in entries:
            gradient = one.gradient
            if gradient is None:
                continue
            if gradient.layout is torch.sparse_coo:
                gradient = gradient.coalesce()  # of a gradient on a device this waits for it: how many there are
            if inverse is not None:
                gradient = gradient / inverse.to(gradient.device, non_blocking=True)
            health = measure_health(gradient, histogram=True)
            if isinstance(health, Unmeasured):
                self._unseen[f"gradients that were {health}"] += 1
                continue
            keys, pending = folds.setdefault((local(gradient).device, health.dtype, health.plan), ([], []))
            keys.append(one.key)
            pending.append(health)
        for place, (keys, pending) in folds.items():
            device, dtype, plan = place
            if place not in self._gradients:
                self._gradients[place] = GradientFold(plan, dtype, device)
            self._gradients[place].add(keys, pending, steps.number, 1.0 if scale is None else scale)

    def _scale(self) -> torch.Tensor | None:
        """The loss scale where it is; `get_scale()` would wait for the device."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        scale: torch.Tensor | None = getattr(self.scaler, "_scale", None)
        return scale

    def _scaler_step(self, original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            known = scaler is self.scaler and scaler.is_enabled()
            steps = next((one for one in self._steps if known and one.optimizer is unwrapped(optimizer)), None)
            if steps is None:
                return original(scaler, optimizer, *args, **kwargs)
            steps.came = False
            before = len(steps.skips)
            result = original(scaler, optimizer, *args, **kwargs)
            if len(steps.skips) == before:  # an optimizer that does not skip by itself
                steps.skips.append(0.0 if steps.came else 1.0)
            if not steps.came:
                self._see_culprits(steps)
                steps.number += 1
            return result

        return step

    def _see_culprits(self, steps: _Steps) -> None:
        if len(steps.culprits) == _CULPRITS:
            return
        params = [p for group in steps.optimizer.param_groups for p in group["params"] if p.grad is not None]
        keys = [self._key(steps, p) for p in params]
        steps.culprits.append((keys, [measure_health(p.grad) for p in params]))

    def _scaler_update(self, original: Any) -> Any:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler is not self.scaler or not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            scale = self._scale()
            if not len(self._scales) and scale is not None:
                self._scales.append(scale)
            result = original(scaler, *args, **kwargs)
            if (scale := self._scale()) is not None:
                self._scales.append(scale)
            return result

        return update

    def _exempted(self) -> dict[int, str]:
        exempt = {}
        for key, (_, owner, parameter, _, _) in enumerate(self._known):
            optimizer = self._optimizer(owner)
            with torch.no_grad():
                exempt[key] = wide_copy(optimizer, parameter)
                if not exempt[key] and not rounds_to_nearest(optimizer):
                    exempt[key] = narrow_rest(optimizer, parameter)
        return exempt

    def _compared(self) -> dict[int, float]:
        return self._updates.still({key: one[2] for key, one in enumerate(self._known) if one[2] is not None})

    def read(self, subject: str) -> WatchStats:
        """What was seen so far. Waits for the device."""
        gradients: dict[int, GradientSum] = {}
        for gradient_fold in self._gradients.values():
            for key, one in gradient_fold.read().items():
                gradients[key] = gradients[key] + one if key in gradients else one
        updates = self._updates.read()
        still = self._still if self._still is not None else self._compared()
        parameters = []
        exempt = self._exempt if self._exempt is not None else self._exempted()
        for key, (name, owner, _, dtype, numel) in enumerate(self._known):
            seen = gradients.get(key), updates.get(key), still.get(key), exempt.get(key, "")
            parameters.append(WatchedParameter(name, owner, dtype, numel, *seen))
        return WatchStats(
            subject,
            self.every,
            tuple(_told(one) for one in self._steps),
            tuple(parameters),
            self._told_scaler(gradients),
            tuple(self._losses.read()),
            self._updates.peak,
            dict(self._unseen),
        )

    def _told_scaler(self, gradients: Mapping[int, GradientSum]) -> WatchedScaler | None:
        if self.scaler is None:
            return None
        if not self.scaler.is_enabled():
            return WatchedScaler(enabled=False)
        culprits: Counter[str] = Counter()
        for steps in self._steps:
            for keys, pending in steps.culprits:
                for key, health in zip(keys, read_all(pending), strict=True):
                    culprits[self._known[key][0]] += not isinstance(health, Unmeasured) and health.nonfinite > 0
            if steps.guarded:
                for key, one in gradients.items():
                    culprits[self._known[key][0]] += one.bad
        return WatchedScaler(
            True,
            tuple(self._scales.read()),
            int(self.scaler.get_growth_interval()),
            float(self.scaler.get_growth_factor()),
            float(self.scaler.get_backoff_factor()),
            {name: count for name, count in culprits.most_common() if count},
        )


def _told(one: _Steps) -> WatchedOptimizer:
    skips = one.skips.read()
    skipped = tuple(number for number, found in enumerate(skips) if found)
    taken = one.taken - (len(skipped) if one.guarded else 0)
    return WatchedOptimizer(
        one.name,
        taken,
        one.measured,
        tuple(one.rates.read()),
        len(skips),
        skipped,
        one.guarded,
        nearest=rounds_to_nearest(one.optimizer),
    )
