"""Judge every op of the run beside its companions: its decisions, what it writes and reads, and each result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from ampcheck.facts.memory import dtype_name, has_companions
from ampcheck.facts.values import Companions, CompanionStore
from ampcheck.records import faults
from ampcheck.records.faults import Fault
from ampcheck.shadow.call import Call
from ampcheck.shadow.casts import is_own_cast
from ampcheck.shadow.decisions import chooses_nan, decides, examine_decision, tests_finiteness
from ampcheck.shadow.found import Found
from ampcheck.shadow.guards import bound_that_decides, divisors, end_that_cuts
from ampcheck.shadow.integers import CONSECUTIVE, IDENTITIES
from ampcheck.shadow.judged_results import ResultJudge
from ampcheck.shadow.norms import error_square, exact_square, honest_share
from ampcheck.shadow.reached import LEFT, UNSCALES
from ampcheck.shadow.suspects import BLURRED, BOUND, COLLIDED, CUT, CUTS, ILL, MASKED, TAKEN, drop, pass_on
from ampcheck.shadow.updates import UpdateJudge
from ampcheck.shadow.wraps import Wraps

_NOTED = ("_to_copy", "_local_scalar_dense", UNSCALES, "_amp_update_scale_")
"""Ops that are noted, besides those that decide."""

_SUSPECTS, _DEPTH, _GRADIENT = attrgetter("suspects"), attrgetter("depth"), attrgetter("gradient")


class Judge:
    """The faults of a run, and what is left of them.

    dropped: count faults in results that nothing used as well. results: see `ResultJudge`. casts: of the code itself,
    by place. wraps: integers that wrapped around.
    """

    def __init__(self, store: CompanionStore, *, dropped: bool = False) -> None:
        self.casts: Counter[tuple[str, int | None, str]] = Counter()
        self._store, self._found = store, Found(store)
        self._updates = UpdateJudge(store, self._found)
        self.results = ResultJudge(store, self._found, self._updates)
        self.reach_values, self.wraps = self._found.reach_values, Wraps(self._found.accuse)
        if dropped:
            store.on_forget = self._found.discard

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults in the order in which they first happened, with what they reached."""
        return self._found.faults

    @property
    def scale(self) -> float:
        """The last scale of a `GradScaler`."""
        return self._found.scale

    def judge(self, call: Call, ruled: bool) -> None:
        """Compare the results of an op that ran. ruled: its companions followed; else they restarted."""
        if call.traits.decides or call.name in _NOTED:
            self._note(call)
        carried = list(filter(_SUSPECTS, call.before))
        if carried or call.inherited:
            self._suffer(call, carried)
        results = call.written + call.fresh
        if not results:
            return
        if carried or call.written:
            self._updates.judge(call)
        self._pass_on(call, results)
        if not ruled:
            for companions in call.after if call.inherited else ():  # nothing is known of it but what it was made of
                companions.faults = call.inherited
            return
        if not call.inherited and not call.written and (call.moves or call.widens):
            return
        statistics = call.name.startswith(("native_", "_ctc_loss")) and not call.name.endswith("backward")
        judged = len(call.written) + 1 if statistics else len(results)
        for tensor, companions in zip(results[:judged], call.after, strict=False):
            if tensor.numel():
                self.results.judge(call, tensor, companions)

    def reach(
        self, outputs: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], weights: Collection[str] = ()
    ) -> None:
        """Record which faults are left in these tensors. weights: outputs of which data may leave anything open."""
        found = self._found
        for name, (tensor, companions) in self._known(outputs).items():
            found.reach_values([companions], name)
            for suspect in found.suspects.of([companions], ILL, TAKEN) if name not in weights else ():
                found.accuse_if_lost(suspect, tensor, name)
        known = self._known(gradients)
        for name, (_, companions) in known.items():
            for suspect in found.suspects.of([companions], MASKED):  # no softmax takes a gradient
                found.accuse(replace(suspect, kind=faults.OVERFLOW), name)
        if any(companions.faults for _, companions in known.values()):
            self._reach_gradients(known)

    def reach_ends(self) -> None:
        """Record which faults are left in values that are alive and that no op has used."""
        for companions in self._store.values():
            if not companions.consumed:
                self._found.reach_values([companions], "a result that is still in use")

    def _known(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, Companions]]:
        """The tensors that have companions, with these."""
        known = {name: (t, self._store.known(t)) for name, t in tensors.items() if has_companions(t)}
        return {name: (t, companions) for name, (t, companions) in known.items() if companions is not None}

    def _reach_gradients(self, known: Mapping[str, tuple[torch.Tensor, Companions]]) -> None:
        """Record faults of gradients, each by its share of the norm of all."""
        total = sum(exact_square(tensor, self._store) for tensor, _ in known.values()) ** 0.5
        for name, (tensor, companions) in known.items():
            if not companions.faults:
                continue
            share = error_square(tensor, self._store) ** 0.5 / max(total, 1e-300)
            if not share <= honest_share(tensor, total, self._store):
                for key in companions.faults:
                    self._found.reached.note(key, name, share)

    def _note(self, call: Call) -> None:
        """Judge a decision; record choices of NaN, casts, tests, numbers that leave the run, and what a scaler does."""
        if call.name == "_to_copy" and call.fresh and is_own_cast(call):
            self.casts[call.where.file, call.where.line, dtype_name(call.fresh[0].dtype)] += 1
        if call.traits.decides and tests_finiteness(call):
            self._found.reached.test(call.inherited)
        elif call.traits.decides and decides(call, faulty=bool(call.inherited)):
            self._decision(call)
            if chooses_nan(call, self._store):
                self.results.chosen[call.where] = None
        elif call.name == "_local_scalar_dense":
            place = LEFT.format(f"{call.where.file}:{call.where.line}")
            self._found.reach_values(call.before, place, reported=True)
        elif call.name == UNSCALES:
            self._found.scale = self._found.reached.unscale(call)
        elif call.name == "_amp_update_scale_":
            self._found.scale = float(call.args[0])

    def _suffer(self, call: Call, carried: Sequence[Companions]) -> None:
        """Accuse the suspects that an op suffers from whatever it returns: whole numbers that collided and are taken
        for ids, bounds that decide what is divided by, terms that a sum lacks."""
        found = self._found
        if call.traits.decides in IDENTITIES or (call.name == "_to_copy" and not call.fresh):
            for suspect in found.suspects.of(carried, COLLIDED):
                found.accuse(suspect, "a comparison or an index")
        if call.where.phase != "backward":
            for suspect in found.suspects.of(call.before[divisors(call)], BOUND):
                found.accuse(suspect, "what is divided by it")
            found.accuse_missing(call)

    def _pass_on(self, call: Call, results: Sequence[torch.Tensor]) -> None:
        """Let results inherit how often their values were rounded, and what may yet do harm."""
        call.depths = tuple(map(_DEPTH, call.before))
        depth = max(call.depths, default=0)
        if carried := list(filter(_SUSPECTS, call.before if not call.traits.shaped else ())):
            pass_on(carried, call.after)
        gradient = call.where.phase == "backward" or call.name == UNSCALES or _takes_gradients(call)
        for tensor, companions in zip(results, call.after, strict=True):
            companions.gradient = gradient
            if not carried:
                companions.suspects = {}
            rounds = tensor.dtype.itemsize <= 2 and not call.moves
            companions.depth = max(depth, companions.depth if call.written else 0) + rounds
            if companions.suspects:
                self._drop(call, companions)
            if call.traits.base.startswith("clamp"):
                self._bound(call, tensor, companions)

    def _bound(self, call: Call, tensor: torch.Tensor, companions: Companions) -> None:
        """Let a bound that decides, or cuts off much, travel on with what a clamp gave."""
        if (bound := bound_that_decides(call, tensor)) is not None:
            fault, is_end = bound
            self._found.suspects.add(companions, BOUND, fault)
            if is_end:
                self._found.accuse(fault, CUTS)
        elif (cut := end_that_cuts(call, tensor)) is not None:
            self._found.suspects.add(companions, CUT, cut)

    def _drop(self, call: Call, companions: Companions) -> None:
        """Drop the suspects that the op makes harmless."""
        if COLLIDED in companions.suspects and (
            (call.traits.sums and all(c.whole for c in call.before))
            or not (companions.whole or call.moves or self._is_position(companions))
        ):
            drop(companions, COLLIDED)  # a measurement
        if call.traits.contracts:
            drop(companions, BLURRED)
        if not call.moves and call.name != "_to_copy":
            drop(companions, BOUND, CUT)

    def _is_position(self, companions: Companions) -> bool:
        """Return whether the numbers that collided were counted through without a gap."""
        return any(suspect.note == CONSECUTIVE for suspect in self._found.suspects.of([companions], COLLIDED))

    def _decision(self, call: Call) -> None:
        found = self._found
        blurred = next(found.suspects.of(call.before, BLURRED, ILL), None)
        if (fault := examine_decision(call, self._store, blurred)) is None:
            return
        name = f"a decision of {call.where.op}"
        for key in call.inherited:
            found.reached.note(key, name)
        causes = list(found.suspects.of(call.before, COLLIDED))
        for suspect in causes:
            found.accuse(suspect, name)
        if not (call.inherited or causes):
            found.add(fault, "the decision")


def _takes_gradients(call: Call) -> bool:
    """Return whether an op scales or copies gradients, as clipping does, or averages them in float32, as optimizers do.

    Gradients are judged as a whole, so their small rows may have any error, which the result has then too.
    """
    if True not in map(_GRADIENT, call.before):
        return False
    op, written = call.traits, {id(tensor) for tensor in call.written}
    averages = "other" in op.linear or (op.adds and not op.divides)
    averages = averages and all(t.itemsize > 2 and not t.requires_grad for t in call.written)
    if not averages and op.copies is None and op.linear[:1] not in (("-1",), ("other",), ("1/other",)):
        return False
    many = [(id(t) in written, c) for t, c in zip(call.inputs, call.before, strict=True) if t.numel() > 1]
    overwrites = averages or op.resets
    sources = [c for was_written, c in many if not (was_written and overwrites)] or [c for _, c in many]
    return bool(sources) and all(companions.gradient for companions in sources)
