"""Verdicts on two revisions: signals first, times second, and whose fault it is; on planted numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.checks.speed import whose_fault
from ampcheck.core.git import Side
from ampcheck.core.run import Verdict
from ampcheck.records.speed import BUDGET_SPENT, COMPILED, EAGER, NOISE, STRADDLES, TARGET, UNCHANGED, Decision, Rule
from ampcheck.speed.base.judge import base_run, check_base
from ampcheck.speed.base.stats import BaseStats, Signals, Turns

LUCK = (0.001, -0.002, 0.001)


def rounds(**slower):
    """Three launches of each arm; `slower` is the share by which head takes longer."""
    return tuple(
        {
            arm: Turns((1.0,) * 9, (1.0 + luck,) * 9, ((1.0 + share) * (1.0 - luck),) * 9, calls=4)
            for arm, share in slower.items()
        }
        for luck in LUCK
    )


def stats(made=None, **changes):
    made = rounds(**{TARGET: 0.0}) if made is None else made
    arms = tuple(made[0]) if made else (TARGET,)
    known = BaseStats("model", Side("main", "abc1234567", "before"), Side("topic", "def1234567"), arms, made)
    return replace(known, **changes)


def signals(base=(), head=()):
    return {"base": Signals(graphs=1, breaks=base), "head": Signals(graphs=1 + len(head), breaks=head)}


def one(findings, check):
    return next(found for found in findings if found.check == check)


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.08, Verdict.FAIL), (0.0, Verdict.PASS), (-0.2, Verdict.PASS), (0.028, Verdict.UNDECIDED)]
)
def test_the_head_is_judged_by_its_time(share, verdict):
    (found,) = check_base(stats(rounds(**{TARGET: share})))
    assert (found.check, found.verdict, found.where.phase) == ("regression", verdict, "speed")
    assert found.observed == pytest.approx(1 / (1 + share), rel=0.002)
    assert "main, abc1234567" in found.message
    assert "3 launches of each side and 27 paired cycles" in found.message
    assert bool(found.hint) == (verdict is not Verdict.PASS)


def test_processes_of_the_base_that_differ_are_not_comparable():
    noisy = tuple({TARGET: Turns((1.0,) * 9, (luck,) * 9, (1.05,) * 9)} for luck in (0.9, 1.1, 1.0))
    (found,) = check_base(stats(noisy))
    assert found.verdict is Verdict.UNDECIDED
    assert found.message.startswith("not comparable: base and its own twin differ by up to ")


def test_a_base_that_does_not_run_is_told_and_is_no_failure():
    (found,) = check_base(stats((), failure="model.py has no 'make'"))
    assert found.verdict is Verdict.UNDECIDED
    assert found.message.startswith("not comparable: the base (main, abc1234567) does not run the target: model.py")
    run = base_run(stats((), failure="gone"), [found], Rule())
    assert not run.failed
    assert run.coverage.total == 0


def test_a_base_that_fails_after_some_rounds_is_told_with_those_rounds():
    made = stats(failure="base, launch 3 was ended by SIGKILL while it was to block")
    (found,) = check_base(made)
    assert (found.verdict, found.message.startswith("not comparable: ")) == (Verdict.UNDECIDED, True)
    assert "base, launch 3 was ended by SIGKILL" in found.message
    assert [table.title for table in base_run(made, [found], Rule()).tables][1] == "Launches, round by round"


def test_nothing_that_changed_is_skipped_with_the_reason():
    (found,) = check_base(stats((), stopped=UNCHANGED))
    assert found.verdict is Verdict.SKIP
    assert "nothing changed since base (main, abc1234567)" in found.message
    assert "HEAD~1" in found.hint
    run = base_run(stats((), stopped=UNCHANGED), [found], Rule())
    assert (run.failed, run.coverage.total) == (False, 0)


def test_a_change_that_no_side_imported_is_told_and_does_not_fail():
    (found,) = check_base(stats(idle="neither side imported the file that differs (docs.md)"))
    assert found.verdict is Verdict.PASS
    assert found.message.endswith("; neither side imported the file that differs (docs.md)")


def test_a_budget_that_was_spent_is_the_knob_that_is_named():
    noisy = tuple({TARGET: Turns((1.0,), (luck,), (1.05,))} for luck in (0.9, 1.1))
    (found,) = check_base(stats(noisy, stopped=BUDGET_SPENT))
    assert found.hint.startswith("raise --budget")
    assert base_run(stats(noisy, stopped=BUDGET_SPENT), [found], Rule()).tables[0].note.endswith("Ended: budget.")


def test_a_merge_base_is_named_as_one():
    made = stats(base=Side("main", "abc1234567", how="merge base"))
    (found,) = check_base(made)
    assert "base (merge base with main, abc1234567)" in found.message
    run = base_run(made, [found], Rule())
    assert run.environment["base"] == "main (abc1234567, merge base)"
    assert run.title == "model: head against main", "the same before and after main has gone on"


def test_nothing_measured_is_never_a_pass():
    (found,) = check_base(stats(()))
    assert found.verdict is Verdict.SKIP


BREAK = ("model.py:8", "a call of print")


def test_a_new_graph_break_warns_and_fails_where_the_head_is_slower_too():
    told = signals(head=(BREAK,))
    quiet = one(check_base(stats(rounds(eager=0.0, compiled=0.0), signals=told)), "graph-break")
    assert quiet.verdict is Verdict.WARN
    assert "new: model.py:8: a call of print; a warning, as no slowdown is shown" in quiet.message
    findings = check_base(stats(rounds(eager=0.0, compiled=0.2), signals=told))
    slow = one(findings, "graph-break")
    assert slow.verdict is Verdict.FAIL
    assert slow.message.endswith("and head is slower")
    assert [found.check for found in findings][-1] == "regression", "what does not depend on the load stands first"


def test_a_break_that_only_moved_is_not_new_and_of_two_the_new_one_is_named():
    moved = signals(base=(BREAK,), head=(("model.py:12", BREAK[1]),))
    assert one(check_base(stats(rounds(eager=0.0, compiled=0.0), signals=moved)), "graph-break").verdict is Verdict.PASS
    more = signals(base=(BREAK,), head=(("model.py:12", BREAK[1]), ("model.py:20", "an item()")))
    message = one(check_base(stats(rounds(eager=0.0, compiled=0.0), signals=more)), "graph-break").message
    assert "new: model.py:20: an item();" in message


def test_more_recompilations_and_a_graph_that_is_gone_are_told():
    told = {"base": Signals(graphs=1), "head": Signals(graphs=2, recompiles=(("f", "size 3 and 4"),))}
    assert one(check_base(stats(rounds(eager=0.0, compiled=0.0), signals=told)), "recompile").verdict is Verdict.WARN
    told = {"base": Signals(graphs=1), "head": Signals()}
    found = one(check_base(stats(rounds(eager=0.0, compiled=0.5), signals=told)), "eager-fallback")
    assert (found.verdict, found.observed) == (Verdict.FAIL, None)
    told = {"base": Signals(), "head": Signals()}
    found = one(check_base(stats(rounds(eager=0.0, compiled=0.0), signals=told)), "eager-fallback")
    assert found.verdict is Verdict.WARN


def test_signals_that_pytorch_does_not_tell_are_skipped_and_a_plain_model_has_none():
    told = {
        "base": Signals(unavailable="PyTorch 2.5 does not tell"),
        "head": Signals(unavailable="PyTorch 2.5 does not tell"),
    }
    assert one(check_base(stats(rounds(eager=0.0, compiled=0.0), signals=told)), "graph-break").verdict is Verdict.SKIP
    plain = {"base": Signals(), "head": Signals()}
    assert [found.check for found in check_base(stats(signals=plain))] == ["regression"]


@pytest.mark.parametrize(
    ("eager", "compiled", "said"),
    [
        (0.0, 0.08, "compiled is 8 % slower, eager unchanged (speedup over eager 1 on base, 0.926 on head)"),
        (-0.1, 0.0, "eager is 11 % faster, compiled unchanged (speedup over eager 1 on base, 0.9 on head)"),
        (0.2, 0.2, "compiled is 20 % slower and eager is 20 % slower"),
        (0.0, 0.0, None),
    ],
)
def test_a_changed_speedup_is_told_by_whose_fault_it_is(eager, compiled, said):
    message = check_base(stats(rounds(eager=eager, compiled=compiled)))[-1].message
    assert said in message if said else "speedup over eager" not in message


def test_an_eager_mode_that_became_slower_beside_a_compiled_arm_is_a_warning():
    findings = check_base(stats(rounds(eager=0.2, compiled=0.0)))
    assert [found.verdict for found in findings] == [Verdict.WARN, Verdict.PASS]


def decision(ratio, low, high, reason=""):
    return Decision(Verdict.PASS, ratio, low, high, reason)


@pytest.mark.parametrize(
    ("reference", "arm", "said"),
    [
        (decision(1.0, 0.99, 1.01), decision(0.9, 0.88, 0.92), "compiled is 11 % slower, eager unchanged"),
        (decision(1.0, 0.9, 1.1, STRADDLES), decision(0.9, 0.88, 0.92), "compiled is 11 % slower, eager undecided"),
        (decision(1.1, 1.05, 1.2), decision(1.0, 0.99, 1.01), "eager is 10 % faster, compiled unchanged"),
        (decision(1.1, 1.05, 1.2, NOISE), decision(1.0, 0.99, 1.01), ""),
        (decision(1.1, 0.9, 1.2), decision(0.9, 0.8, 1.2), ""),
        (decision(1.0, 0.0, float("inf"), NOISE), decision(1.0, 0.0, float("inf"), NOISE), ""),
        (decision(1.02, 1.01, 1.025), decision(0.98, 0.975, 0.99), ""),
    ],
)
def test_whose_fault_names_what_is_shown_and_nothing_else(reference, arm, said):
    assert whose_fault(reference, arm, Rule()) == said


def test_the_run_shows_arms_launches_and_sides_and_survives_json():
    made = stats(rounds(eager=0.0, compiled=0.08), notes=("the head is the working tree",))
    run = base_run(made, check_base(made), Rule())
    arms, launches, sides = run.tables
    assert [row[0] for row in arms.rows] == [EAGER, COMPILED]
    assert arms.rows[1][-1] == "fail"
    assert len(launches.rows) == 6
    assert sides.rows[0][:3] == ("base", "main", "abc1234567")
    assert sides.note == "The head is the working tree"
    assert run.failed
    assert type(run).from_json(run.to_json()).findings == run.findings
