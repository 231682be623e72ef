"""Locks that are bad or missing, models that raise or do nothing, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from locked_model import MODEL, failure, lock, model, text_of

from ampcheck import UsageError, Verdict, assert_policy, demo
from ampcheck.autocast.calls import measure_calls
from ampcheck.autocast.locks.file import NAME
from ampcheck.autocast.locks.lock import LockTarget, judge_lock, to_locked
from ampcheck.cli.main import main
from ampcheck.core.run import Coverage, collect
from ampcheck.core.updating import updating

__all__ = ["model"]  # the fixture


# Bad locks -------------------------------------------------------------------------------------------------------


def test_without_a_lock_nothing_passes(model: Path) -> None:
    message = failure(model)
    assert f"must be locked in {NAME}" in message
    assert "ampcheck policy lock" in message


def a_lock(name: str = "models.py:net", key: str = "cpu/float16", **entry: Any) -> str:
    held = {"torch": "2.13.0", "build": "cpu", "ops": {}, **entry}
    return json.dumps({"schema": 1, "targets": {name: {key: held}}})


BAD = {
    "not json": ("{", "is damaged"),
    "no object": ("[]", "is no lock of ampcheck"),
    "no schema": ("{}", "is no lock of ampcheck"),
    "newer": ('{"schema": 99, "targets": {}}', "newer than this ampcheck reads"),
    "no targets": ('{"schema": 1}', "is damaged"),
    "another model": (a_lock("other.py:f"), "no entry for models.py:net; it has other.py:f"),
    "no entries": ('{"schema": 1, "targets": {"models.py:net": {}}}', "for nothing"),
    "no dtype": (a_lock(key="cuda"), "is damaged"),
    "a number": (a_lock(torch=2), "is damaged"),
    "no ops": (a_lock(ops=1), "is damaged"),
    "half a place": (a_lock(ops={"a": {"rule": "fp32", "calls": {"a -> b": [["m"]]}}}), "is damaged"),
    "another dtype": (a_lock(key="cpu/float64"), "float16, bfloat16"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_lock_is_one_clear_sentence_and_never_a_pass(model: Path, kind: str) -> None:
    text, message = BAD[kind]
    (model.parent / NAME).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        assert_policy(f"{model}:net")
    assert "\n" not in str(caught.value)


def test_a_device_that_was_not_locked_is_refused_with_those_that_were(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    for options in ({"device": "cpu"}, {"dtype": "bfloat16"}, {"device": ("cuda", "mps")}):
        with pytest.raises(UsageError, match="for cuda/float16, not for"):
            assert_policy(f"{model}:net", **options)


def test_an_update_of_a_damaged_lock_is_refused(model: Path) -> None:
    (model.parent / NAME).write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="damaged"), updating():
        assert_policy(f"{model}:net")
    assert text_of(model) == "{"


# Models that raise, or do nothing -----------------------------------------------------------------------------------


def test_a_model_that_raises_is_not_locked(model: Path) -> None:
    with pytest.raises(UsageError, match=r"aten::index_add.*nothing was locked"):
        lock(model, "broken")
    assert not (model.parent / NAME).exists()


def test_a_model_that_raises_now_fails(model: Path) -> None:
    lock(model, "attention", device="cuda", dtype="float16")
    model.write_text(MODEL.replace("(x @ x).softmax(-1)", "(x @ x).nonsense()"), encoding="utf-8")
    assert "must run to its end" in failure(model, "attention")


def test_a_ban_is_locked_and_fails_by_itself_with_the_replacement(model: Path) -> None:
    run = lock(model, "banned", dtype="float16")
    (banned,) = (finding for finding in run.findings if finding.check == "policy-banned" and finding.verdict == "fail")
    assert banned.where.op == "aten::binary_cross_entropy"
    assert "binary_cross_entropy_with_logits" in banned.hint
    assert banned.where.file.endswith("models.py")
    message = failure(model, "banned")
    assert "[policy-banned]" in message
    assert "[policy-drift]" not in message


def test_a_model_of_which_no_op_reaches_autocast_is_not_locked(model: Path) -> None:
    with pytest.raises(UsageError, match="nothing to lock"):
        lock(model, "idle")


def test_nothing_seen_is_no_pass(model: Path) -> None:
    calls = measure_calls(LockTarget.of(f"{model}:idle").subject)
    nothing = to_locked(calls, model.parent)
    assert [finding.verdict for finding in judge_lock(calls, nothing, nothing)] == [Verdict.FAIL]


MIXED = """
def mixed():
    def run(x):
        if (x @ x).softmax(-1).dtype == torch.float16:
            raise ValueError("float16 all the way")
        return x @ x
    return run, (torch.ones(4, 4),)

"""


def test_every_device_and_dtype_that_raised_is_named_and_what_would_work(model: Path) -> None:
    """The sum is in autocast's dtype, the added row float16: one dtype works, the other raises."""
    with pytest.raises(UsageError) as caught:
        lock(model, "half_broken")
    message = str(caught.value)
    assert "on cpu/bfloat16, cuda/bfloat16 it raised" in message
    assert message.count("it raised") == 1
    assert message.endswith("nothing was locked; these work: --device cpu,cuda --dtype float16")
    assert not (model.parent / NAME).exists()
    options = message.rpartition("these work: ")[2].split()
    assert main(["policy", "lock", f"{model}:half_broken", *options]) == 0


def test_what_would_work_is_told_in_as_many_commands_as_it_takes(model: Path) -> None:
    """On CUDA alone the softmax is in float32."""
    model.write_text(MODEL.replace("def idle():", MIXED + "def idle():"), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        lock(model, "mixed")
    told = str(caught.value).rpartition("these work: ")[2]
    assert told == "--device cpu --dtype bfloat16, then --device cuda --dtype float16,bfloat16"
    for options in told.split(", then "):
        assert main(["policy", "lock", f"{model}:mixed", *options.split()]) == 0
    assert_policy(f"{model}:mixed")


def test_an_update_that_raises_names_the_arguments_that_would_work(model: Path) -> None:
    with pytest.raises(UsageError, match=r"device=\('cpu', 'cuda'\), dtype=\('float16',\)"), updating():
        assert_policy(f"{model}:half_broken")


@pytest.mark.parametrize("factory", ["loop", "call"])
def test_what_is_no_model_with_inputs_is_told_what_a_lock_needs(model: Path, factory: str) -> None:
    with pytest.raises(UsageError, match=r"needs a model with its inputs, \(module, args\)") as caught:
        lock(model, factory)
    assert "@pytest.mark.ampcheck(lock=True)" in str(caught.value)
    assert "kind" not in str(caught.value)


def test_an_entry_that_is_missing_is_told_with_the_ways_to_add_it(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    with pytest.raises(UsageError, match="add it with pytest --ampcheck-update, or ampcheck policy lock TARGET"):
        assert_policy(f"{model}:attention")
    with pytest.raises(UsageError, match=r"add it with pytest --ampcheck-update$"):
        assert_policy(demo.subject(), lock=model.parent)


# The command -----------------------------------------------------------------------------------------------------


def test_the_command_locks_and_checks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "lock", f"{model}:net", "--device", "cuda", "--dtype", "float16"]) == 0
    assert "entry models.py:net" in " ".join(capsys.readouterr().out.split())
    before = text_of(model)
    assert main(["policy", "lock", f"{model}:net", "--check"]) == 0
    model.write_text(MODEL.replace("self.down(x)", "self.down(x).softmax(-1)"), encoding="utf-8")
    assert main(["policy", "lock", f"{model}:net", "--check"]) == 1
    assert "aten::softmax.int" in capsys.readouterr().out
    assert text_of(model) == before


@pytest.mark.needs_torch("2.12", "rms_norm has a rule on CUDA")
def test_the_command_checks_against_another_release(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "lock", f"{model}:net", "--device", "cuda", "--dtype", "float16"]) == 0
    assert main(["policy", "lock", f"{model}:net", "--check", "--torch", "2.12"]) == 0
    assert main(["policy", "lock", f"{model}:net", "--check", "--torch", "2.11"]) == 1
    assert "aten::rms_norm" in capsys.readouterr().out
    assert main(["policy", "lock", f"{model}:net", "--torch", "2.11"]) == 2


def test_the_command_says_what_is_wrong(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "lock", f"{model}:net", "--check"]) == 1
    assert main(["policy", "lock", f"{model}:nothing"]) == 2
    assert main(["policy", "lock", f"{model}:net", "--device", "tpu"]) == 2
    assert "cpu, cuda" in capsys.readouterr().err


@pytest.mark.needs_torch("2.12", "rms_norm has a rule on CUDA")
def test_the_run_of_an_assert_is_emitted(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    with collect() as runs:
        assert_policy(f"{model}:net")
    assert [run.coverage for run in runs] == [Coverage({"ops": 2, "calls": 3})]
