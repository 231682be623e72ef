"""A model's lock: what it holds, that it is stable, what fails against it and what the failure says."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck import Coverage, Run, UsageError, Verdict, assert_policy_lock, collect, demo
from ampcheck.autocast import lockfile
from ampcheck.autocast.calls import measure_calls
from ampcheck.autocast.lock import LockTarget, compare_lock, to_locked, write_lock
from ampcheck.autocast.lock_checks import check_lock
from ampcheck.autocast.lockfile import NAME, Locked, LockedOp, LockFile, update, updating
from ampcheck.cli import main

TRANSFORMERS = Path(__file__).parents[1] / "transformers_models.py"

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.RMSNorm(8)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.up(x))
        return self.down(x)

def net():
    return Net(), (torch.ones(2, 4),)

def attention():
    return (lambda x: (x @ x).softmax(-1)), (torch.ones(4, 4),)

def banned():
    return (lambda x: nn.functional.binary_cross_entropy(x.sigmoid(), x)), (torch.ones(4),)

def broken():
    return (lambda x: (x @ x).index_add(0, torch.zeros(1, dtype=torch.int64), x[:1])), (torch.ones(4, 4),)

def idle():
    return (lambda x: x + 1), (torch.ones(4),)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


def lock(path: Path, factory: str = "net", **options: Any) -> Run:
    return write_lock(LockTarget.of(f"{path}:{factory}"), **options)


def text_of(path: Path) -> str:
    return (path.parent / NAME).read_text(encoding="utf-8")


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(text_of(path))
    change(data)
    (path.parent / NAME).write_text(json.dumps(data), encoding="utf-8")


def failure(path: Path, factory: str = "net", **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_policy_lock(f"{path}:{factory}", **options)
    return str(caught.value)


# What is written -------------------------------------------------------------------------------------------------


def test_a_lock_lies_beside_the_code_and_a_model_is_as_locked(model: Path) -> None:
    lock(model)
    assert set(LockFile.load(model.parent / NAME).entries("models.py:net")) == {
        "cpu/float16", "cpu/bfloat16", "cuda/float16", "cuda/bfloat16"
    }  # fmt: skip
    run = assert_policy_lock(f"{model}:net")
    assert [f.verdict for f in run.findings if f.check == "policy-drift"] == [Verdict.PASS] * 4
    assert run.coverage.seen["ops"] > 0


def test_each_op_is_locked_with_its_rule_dtypes_module_and_line(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    ops = LockFile.load(model.parent / NAME).entries("models.py:net")["cuda/float16"].ops
    assert ops["aten::rms_norm"] == LockedOp(
        "fp32", {"float16 float32 -> float32 float32": (("norm", f"models.py:{line_of('self.norm(self.up')}"),)}
    )
    assert ops["aten::linear"].rule == "lower_precision"
    assert {module for _, module in ops["aten::linear"].used} == {"up", "down"}


def line_of(code: str) -> int:
    return next(number for number, line in enumerate(MODEL.splitlines(), 1) if code in line)


def test_two_runs_give_the_same_bytes(model: Path) -> None:
    lock(model)
    first = text_of(model)
    lock(model)
    assert text_of(model) == first
    (model.parent / NAME).unlink()
    lock(model)
    assert text_of(model) == first


def test_the_lock_is_the_same_in_every_folder_and_tells_no_path_of_the_machine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock(model)
    first = text_of(model)
    other = tmp_path / "deep" / "other"
    other.mkdir(parents=True)
    shutil.copy(model, other)
    monkeypatch.chdir(other)
    lock(Path("models.py"))
    assert text_of(other / "models.py") == first
    assert str(tmp_path) not in first


def test_there_is_one_op_a_line(model: Path) -> None:
    lock(model)
    lines = [line for line in text_of(model).splitlines() if "::" in line]
    ops = json.loads(text_of(model))["targets"]["models.py:net"].values()
    assert len(lines) == sum(len(entry["ops"]) for entry in ops) > 4


def test_locking_another_model_keeps_the_entries_that_are_there(model: Path) -> None:
    lock(model, device="cuda")
    before = LockFile.load(model.parent / NAME).entries("models.py:net")
    lock(model, "attention", device="cpu")
    held = LockFile.load(model.parent / NAME)
    assert set(held.targets) == {"models.py:net", "models.py:attention"}
    assert held.entries("models.py:net") == before


def test_locking_another_device_keeps_the_entries_of_the_first(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    lock(model, device="mps", dtype="float16")
    assert set(LockFile.load(model.parent / NAME).entries("models.py:net")) == {"cuda/float16", "mps/float16"}


def test_a_lock_survives_the_round_trip_through_its_text(model: Path) -> None:
    lock(model)
    held = LockFile.load(model.parent / NAME)
    assert LockFile.from_text(held.to_text()) == held
    odd = LockFile({'a "name"\n': {"cpu/float16": Locked("2.13", "cpu", {"a::b": LockedOp("fp32", {})})}, "none": {}})
    assert LockFile.from_text(odd.to_text()) == odd


def test_writers_at_the_same_time_lose_no_entry(tmp_path: Path) -> None:
    def write(number: int) -> None:
        update(tmp_path / NAME, f"model {number}", {"cpu/float16": Locked("2.13", "cpu", {})})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(LockFile.load(tmp_path / NAME).targets) == 16
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_writer_that_never_finished_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockfile, "PATIENCE", 0.05)
    (tmp_path / f".{NAME}.writing").touch()
    with pytest.raises(UsageError, match="delete it unless another process writes"):
        update(tmp_path / NAME, "model", {})


@pytest.mark.parametrize("factory", ["gpt2", "t5", "vit"])
def test_real_models_are_as_locked_and_lock_to_the_same_bytes(factory: str, tmp_path: Path) -> None:
    target = LockTarget.of(f"{TRANSFORMERS}:{factory}", tmp_path)
    write_lock(target, dtype="bfloat16")
    first = (tmp_path / NAME).read_bytes()
    assert not compare_lock(LockTarget.of(f"{TRANSFORMERS}:{factory}", tmp_path)).failed
    write_lock(target)
    assert (tmp_path / NAME).read_bytes() == first
    assert b"transformers/" in first


def test_a_subject_is_locked_beside_the_caller_or_where_it_is_told(tmp_path: Path) -> None:
    assert LockTarget.of(demo.subject()).file == Path(__file__).parent / NAME
    with updating() as written:
        assert_policy_lock(demo.subject(), path=tmp_path / "my.json", device="cuda", dtype="float16")
    assert written == [(str(tmp_path / "my.json"), "demo")]
    assert_policy_lock(demo.subject(), path=tmp_path / "my.json")
    assert_policy_lock(
        (nn.Linear(1, 1), (torch.ones(1, 1),)), path=tmp_path / "my.json", name="demo"
    ) if False else None


def test_a_shape_needs_a_name() -> None:
    with pytest.raises(UsageError, match="needs a name"):
        assert_policy_lock((nn.Linear(1, 1), (torch.ones(1, 1),)))


# What fails, and what does not -------------------------------------------------------------------------------------


def test_a_line_that_moved_is_no_drift_and_is_refreshed(model: Path) -> None:
    lock(model)
    model.write_text("# a new line\n" + MODEL, encoding="utf-8")
    assert_policy_lock(f"{model}:net")
    with updating():
        assert_policy_lock(f"{model}:net")
    assert f"models.py:{line_of('self.norm(self.up') + 1}" in text_of(model)


def rule_changed(data: dict[str, Any]) -> None:
    """As PyTorch 2.11 was: rms_norm had no rule on CUDA."""
    for entry in data["targets"]["models.py:net"].values():
        entry["torch"] = "2.11.0"
        entry["ops"].pop("aten::rms_norm", None)


def test_a_rule_that_pytorch_changed_is_told_with_the_op_the_rules_the_release_and_the_modules(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    edit(model, rule_changed)
    message = failure(model)
    for part in ("aten::rms_norm", "2.11.0: left alone", "fp32", "since 2.12", "1 module: norm", "models.py:"):
        assert part in message
    assert message.count("[policy-drift]") == 1


def test_a_lock_of_another_release_tells_the_cause_and_what_follows_from_it(model: Path) -> None:
    """Recorded under the policy of 2.11 itself: the norm is taken apart there, and hands on another dtype."""
    subject = LockTarget.of(f"{model}:net").subject
    then, now = (measure_calls(subject, device="cuda", release=release) for release in ("2.11", None))
    findings = check_lock(now, to_locked(then, model.parent), to_locked(now, model.parent))
    said = {finding.where.op: finding.message for finding in findings}
    assert set(said) == {"aten::rms_norm", "aten::pow.Tensor_Scalar", "aten::rsqrt", "aten::linear"}
    assert "since 2.12" in said["aten::rms_norm"]
    assert "stands in the modules of aten::rms_norm" in said["aten::rsqrt"]
    assert "aten::rms_norm, whose rule did, may hand it other dtypes" in said["aten::linear"]
    assert all(finding.verdict is Verdict.FAIL for finding in findings)


def test_what_another_release_would_change_is_told_before_the_update(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    target = LockTarget.of(f"{model}:net")
    assert not compare_lock(target, release="2.12").failed
    older = compare_lock(target, release="2.11")
    assert "left alone" in next(f.message for f in older.findings if f.where.op == "aten::rms_norm")


def test_a_rule_that_went_is_told_with_the_release_that_dropped_it(model: Path) -> None:
    now = measure_calls(LockTarget.of(f"{model}:net").subject, device="cuda", release="2.11")
    held = to_locked(now, model.parent)
    gained = {**held.ops, "aten::rms_norm": LockedOp("fp32", {"float16 float32 -> float32 float32": (("norm", ""),)})}
    (finding,) = check_lock(now, Locked("2.15.0", "cpu", gained), held)
    assert "2.15.0: fp32" in finding.message
    assert "left alone" in finding.message
    assert "until 2.11" in finding.message


CHANGES = {
    "other dtypes": ("self.down(x)", "self.down(x.half())", "aten::linear", "new: float16"),
    "a new op": ("self.down(x)", "self.down(x).softmax(-1)", "aten::softmax.int", "only locked ops may be called"),
    "an op that is gone": ("self.norm(self.up(x))", "self.up(x)", "aten::rms_norm", "no longer is, in 1 module: norm"),
    "another module": (
        "self.down(x)",
        "nn.functional.linear(x, self.down.weight)",
        "aten::linear",
        "in 1 module: (the root)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_told_as_such(model: Path, change: str) -> None:
    before, after, op, said = CHANGES[change]
    lock(model, device="cuda", dtype="float16")
    model.write_text(MODEL.replace(before, after), encoding="utf-8")
    message = failure(model)
    assert op in message
    assert said in message
    assert "the model's own call changed" in message
    assert "--ampcheck-update" in message


@pytest.mark.parametrize("change", CHANGES)
def test_an_update_takes_the_change_over(model: Path, change: str) -> None:
    lock(model, device="cuda", dtype="float16")
    model.write_text(MODEL.replace(*CHANGES[change][:2]), encoding="utf-8")
    with updating() as written:
        assert_policy_lock(f"{model}:net")
    assert [name for _, name in written] == ["models.py:net"]
    assert_policy_lock(f"{model}:net")
    assert set(LockFile.load(model.parent / NAME).entries("models.py:net")) == {"cuda/float16"}


def test_a_custom_op_that_is_registered_otherwise_is_told(model: Path) -> None:
    now = measure_calls(LockTarget.of(f"{model}:net").subject, device="cuda")
    held = to_locked(now, model.parent)
    calls = {**held.ops, "mine::op": LockedOp("fixed:float16", {"float32 -> float16": (("up", ""),)})}
    (finding,) = check_lock(now, Locked(held.torch, held.build, calls), held)
    assert "a custom op: what is registered for it has changed" in finding.message


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
    "another dtype": (a_lock(key="cpu/float8"), "float16 or bfloat16"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_lock_is_one_clear_sentence_and_never_a_pass(model: Path, kind: str) -> None:
    text, message = BAD[kind]
    (model.parent / NAME).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        assert_policy_lock(f"{model}:net")
    assert "\n" not in str(caught.value)


def test_a_device_that_was_not_locked_is_refused_with_those_that_were(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    for options in ({"device": "cpu"}, {"dtype": "bfloat16"}, {"device": ("cuda", "mps")}):
        with pytest.raises(UsageError, match="for cuda/float16, not for"):
            assert_policy_lock(f"{model}:net", **options)


def test_an_update_of_a_damaged_lock_is_refused(model: Path) -> None:
    (model.parent / NAME).write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="damaged"), updating():
        assert_policy_lock(f"{model}:net")
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
    assert [finding.verdict for finding in check_lock(calls, nothing, nothing)] == [Verdict.FAIL]


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


def test_the_run_of_an_assert_is_emitted(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    with collect() as runs:
        assert_policy_lock(f"{model}:net")
    assert [run.coverage for run in runs] == [Coverage({"ops": 2, "calls": 3})]
