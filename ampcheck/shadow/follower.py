"""Bring the companions of the results of an op up to date: by its rule, by the op itself, or from the real results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ampcheck.core.errors import brief
from ampcheck.facts.memory import finite, has_companions, roundoff
from ampcheck.facts.values import CompanionStore
from ampcheck.ops.traits import Traits
from ampcheck.shadow.accumulators import note_write
from ampcheck.shadow.call import Call, Side, decides_otherwise, results_of
from ampcheck.shadow.rowwise import is_constant
from ampcheck.shadow.rules.registry import FOLLOWING, OWN, Rule, restart, rule_of
from ampcheck.torchtools.source import op_name


class Follower:
    """Follows ops on both sides of the companions.

    unruled: counts the ops that could not be followed, by reason. independent: exact takes decisions of its own.
    """

    def __init__(
        self, store: CompanionStore, sides: tuple[Side, ...], unruled: Counter[str], *, independent: bool = False
    ) -> None:
        self._store, self._sides, self._unruled, self._independent = store, sides, unruled, independent

    def _rule(self, op: Traits) -> Rule | None:
        """The rule of an op; None where the op itself makes its companions."""
        if self._independent and (op.name in FOLLOWING or (op.jumps and not op.name.startswith("_amp_"))):
            return OWN.get(op.name)
        return rule_of(op.name, op.namespace) or (restart if op.jumps else None)

    def follow(self, call: Call) -> bool:
        """Bring the companions of all results up to date; False where they restart from the real results."""
        op = call.traits
        copies = op.copies == 0 and call.fresh and has_companions(call.args[0])
        if op.unset or (copies and self._store.of(call.args[0]).unset):
            return self._leave_unset(call)
        if copies and self._store.share(call.fresh[0], call.args[0]):
            return True
        unit, whole = 0.0, bool(call.before) or not op.random
        for companions in call.before:
            unit = max(unit, companions.unit)
            whole = whole and companions.whole
        whole = whole and not [v for v in call.args if isinstance(v, float) and not v.is_integer()]
        if call.written:
            self._note_writes(call, unit, whole)
        rule = self._rule(op)
        if op.random and rule is None:
            self._restart(call, moves=True)
            return False
        if op.fills == "units" and is_constant(op, call.results):
            self._store.of(call.fresh[0], moves=False).whole = True
            return True
        try:
            results = self._results(call, rule)
        except Exception as error:  # noqa: BLE001 - a custom op raises what it likes for float64
            self._unruled[f"{op_name(call.op)}: {brief(error)}"] += 1
            self._restart(call)
            return False
        self._keep(call, results, unit, whole=whole and op.whole, ruled=rule is not None)
        for tensor in call.written:
            if self._store.of(tensor).alive is None:
                self._store.reread(tensor)
        return True

    def _leave_unset(self, call: Call) -> bool:
        """Restart the companions of memory that nothing has written: whatever it holds is no value of the run."""
        for tensor in call.written:  # `resize_`
            self._store.to_write(tensor)
        self._restart(call)
        for tensor in call.fresh:
            self._store.of(tensor).unset = True
        return False

    def _note_writes(self, call: Call, unit: float, whole: bool) -> None:
        for tensor in call.written:
            companions = self._store.to_write(tensor)
            companions.unit = max(unit, roundoff(tensor.dtype))
            companions.whole = companions.whole and whole
            note_write(call, tensor, companions, self._store)
            companions.consumed = False

    def _results(self, call: Call, rule: Rule | None) -> list[Any]:
        """Return what the op gives on each side. Raises what it raises there, and where it decides otherwise than the
        run."""
        now = {id(t): c for t, c in zip(call.inputs, call.before, strict=True) if c.alive is not None}
        for side in self._sides:
            side.now = now
        try:
            results = [rule(call, side) if rule is not None else side.run(call) for side in self._sides]
        finally:
            for side in self._sides:
                side.now = {}
        if call.traits.checks and any(decides_otherwise(call.out, result) for result in results):
            raise RuntimeError("companions decide otherwise")
        return results

    def _keep(self, call: Call, results: Sequence[Any], unit: float, *, whole: bool, ruled: bool) -> None:
        """Store the companions of all results. ruled: a rule gave those of the tensors that the op wrote as well."""
        sides, fresh = [results_of(result) for result in results], set(map(id, call.fresh))
        for tensor, exact, moved in zip(call.results, *sides, strict=True):
            if tensor is None:
                continue
            if id(tensor) not in fresh:
                if ruled and exact is not None and moved is not None:
                    self._store.write(tensor, exact, moved)
            elif exact is None or moved is None or exact.shape != tensor.shape:
                self._store.of(tensor, moves=False)
            else:
                own = max(unit, roundoff(tensor.dtype))
                self._store.assign(tensor, exact, moved, own).whole = whole

    def _restart(self, call: Call, *, moves: bool = False) -> None:
        """Let the companions of all results restart from the real results.

        Behind an op at fault what is not finite would pose as exact: zero stands for a finite value that is not known.
        """
        for tensor in call.fresh:
            self._store.of(tensor, moves=moves)
        for tensor in call.written:
            self._store.lift(tensor, moves=moves)
        if not any(companions.faults for companions in call.before):
            return
        for tensor in call.written + call.fresh:
            lost = ~finite(tensor)
            if bool(lost.any()):
                self._store.to_write(tensor)
                for side in self._sides:
                    side.of(tensor).masked_fill_(lost, 0.0)
