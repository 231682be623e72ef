"""A model's lock: what it holds, that it is stable, what fails against it and what the failure says."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from locked_model import MODEL, edit, failure, line_of, lock, model, text_of
from torch import nn

from ampcheck import UsageError, Verdict, assert_policy, demo
from ampcheck.autocast.calls import measure_calls
from ampcheck.autocast.locks import file
from ampcheck.autocast.locks.file import NAME, LockFile, update
from ampcheck.autocast.locks.lock import LockTarget, compare_lock, judge_lock, to_locked, write_lock
from ampcheck.core.updating import updating
from ampcheck.records.policy import Locked, LockedOp

TRANSFORMERS = Path(__file__).parents[2] / "transformers_models.py"
__all__ = ["model"]  # the fixture


# What is written -------------------------------------------------------------------------------------------------


def test_a_lock_lies_beside_the_code_and_a_model_is_as_locked(model: Path) -> None:
    lock(model)
    assert set(LockFile.load(model.parent / NAME).entries("models.py:net")) == {
        "cpu/float16", "cpu/bfloat16", "cuda/float16", "cuda/bfloat16"
    }  # fmt: skip
    run = assert_policy(f"{model}:net")
    assert [f.verdict for f in run.findings if f.check == "policy-drift"] == [Verdict.PASS] * 4
    assert run.coverage.seen["ops"] > 0


@pytest.mark.needs_torch("2.12", "rms_norm has a rule on CUDA")
def test_each_op_is_locked_with_its_rule_dtypes_module_and_line(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    ops = LockFile.load(model.parent / NAME).entries("models.py:net")["cuda/float16"].ops
    assert ops["aten::rms_norm"] == LockedOp(
        "fp32", {"float16 float32 -> float32 float32": (("norm", f"models.py:{line_of('self.norm(self.up')}"),)}
    )
    assert ops["aten::linear"].rule == "lower_precision"
    assert {module for _, module in ops["aten::linear"].used} == {"up", "down"}


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


def test_a_module_and_its_file_name_the_same_entry(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = model.parent / "a_locked_package"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(model, package / "parts.py")
    monkeypatch.syspath_prepend(model.parent)
    by_module, by_file = LockTarget.of("a_locked_package.parts:net"), LockTarget.of(f"{package / 'parts.py'}:net")
    assert (by_module.entry, by_module.file) == (by_file.entry, by_file.file) == ("parts.py:net", package / NAME)
    write_lock(by_module, device="cuda")
    assert not compare_lock(by_file).failed


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


def test_what_a_writer_that_was_killed_left_behind_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "PATIENCE", 0.0)
    (tmp_path / f".{NAME}.writing").touch()
    update(tmp_path / NAME, "model", {})
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize(
    "kept", [b"{", b'{"schema": 1, "targets": {"a": {}, "a": {}}}', b"<<<<<<< HEAD\n{}\n", b"\xff"]
)
def test_a_damaged_lock_stays_as_it_is_when_a_model_is_locked(tmp_path: Path, kept: bytes) -> None:
    (tmp_path / NAME).write_bytes(kept)
    with pytest.raises(UsageError, match=NAME):
        update(tmp_path / NAME, "model", {})
    assert (tmp_path / NAME).read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_lock_behind_a_symlink_is_written_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "all.json").write_text(LockFile({}).to_text())
    (tmp_path / NAME).symlink_to("shared/all.json")
    update(tmp_path / NAME, "model", {})
    assert (tmp_path / NAME).is_symlink()
    assert set(LockFile.load(tmp_path / "shared" / "all.json").targets) == {"model"}
    assert {path.name for path in tmp_path.rglob("*")} == {NAME, "all.json", "shared"}


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
        assert_policy(demo.subject(), lock=tmp_path / "my.json", device="cuda", dtype="float16")
    assert written == [(str(tmp_path / "my.json"), "demo")]
    assert_policy(demo.subject(), lock=tmp_path / "my.json")


def test_a_shape_needs_a_name() -> None:
    with pytest.raises(UsageError, match="needs a name"):
        assert_policy((nn.Linear(1, 1), (torch.ones(1, 1),)))


# What fails, and what does not -------------------------------------------------------------------------------------


def test_a_line_that_moved_is_no_drift_and_is_refreshed(model: Path) -> None:
    lock(model)
    model.write_text("# a new line\n" + MODEL, encoding="utf-8")
    assert_policy(f"{model}:net")
    with updating():
        assert_policy(f"{model}:net")
    assert f"models.py:{line_of('self.norm(self.up') + 1}" in text_of(model)


def rule_changed(data: dict[str, Any]) -> None:
    """As PyTorch 2.11 was: rms_norm had no rule on CUDA."""
    for entry in data["targets"]["models.py:net"].values():
        entry["torch"] = "2.11.0"
        entry["ops"].pop("aten::rms_norm", None)


@pytest.mark.needs_torch("2.12", "rms_norm has a rule on CUDA")
def test_a_rule_that_pytorch_changed_is_told_with_the_op_the_rules_the_release_and_the_modules(model: Path) -> None:
    lock(model, device="cuda", dtype="float16")
    edit(model, rule_changed)
    message = failure(model)
    for part in ("aten::rms_norm", "2.11.0: left alone", "fp32", "since 2.12", "1 module: norm", "models.py:"):
        assert part in message
    assert message.count("[policy-drift]") == 1


@pytest.mark.needs_torch("2.12", "rms_norm has a rule on CUDA")
def test_a_lock_of_another_release_tells_the_cause_and_what_follows_from_it(model: Path) -> None:
    """Recorded under the policy of 2.11 itself: the norm is taken apart there, and hands on another dtype."""
    subject = LockTarget.of(f"{model}:net").subject
    then, now = (measure_calls(subject, device="cuda", release=release) for release in ("2.11", None))
    findings = judge_lock(now, to_locked(then, model.parent), to_locked(now, model.parent))
    said = {finding.where.op: finding.message for finding in findings}
    assert set(said) == {"aten::rms_norm", "aten::pow.Tensor_Scalar", "aten::rsqrt", "aten::linear"}
    assert "since 2.12" in said["aten::rms_norm"]
    assert "is in the modules of aten::rms_norm" in said["aten::rsqrt"]
    assert "aten::rms_norm, whose rule did, may pass it other dtypes" in said["aten::linear"]
    assert all(finding.verdict is Verdict.FAIL for finding in findings)


@pytest.mark.needs_torch("2.12", "rms_norm has a rule on CUDA")
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
    (finding,) = judge_lock(now, Locked("2.15.0", "cpu", gained), held)
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


@pytest.mark.needs_torch("2.12", "rms_norm has a rule on CUDA")
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
        assert_policy(f"{model}:net")
    assert [name for _, name in written] == ["models.py:net"]
    assert_policy(f"{model}:net")
    assert set(LockFile.load(model.parent / NAME).entries("models.py:net")) == {"cuda/float16"}


def test_a_custom_op_that_is_registered_otherwise_is_told(model: Path) -> None:
    now = measure_calls(LockTarget.of(f"{model}:net").subject, device="cuda")
    held = to_locked(now, model.parent)
    calls = {**held.ops, "mine::op": LockedOp("fixed:float16", {"float32 -> float16": (("up", ""),)})}
    (finding,) = judge_lock(now, Locked(held.torch, held.build, calls), held)
    assert "a custom op: what is registered for it has changed" in finding.message


# Where ----------------------------------------------------------------------------------------------------------


def where_of(model: Path, factory: str = "products") -> list[tuple[str, str, int | None]]:
    target = LockTarget.of(f"{model}:{factory}")
    drift = [f for f in compare_lock(target).findings if f.check == "policy-drift"]
    return [(f.message, f.where.file, f.where.line) for f in drift]


def test_of_two_calls_in_one_module_the_changed_one_is_named(model: Path) -> None:
    lock(model, "products", device="cuda", dtype="float16")
    model.write_text(MODEL.replace("c = a @ a.t()", "c = a.double() @ a.double()"), encoding="utf-8")
    ((message, file, line),) = where_of(model)
    assert file.endswith("models.py")
    assert line == line_of("c = a @ a.t()")
    assert f"new: float64 float64 -> float64 float64 in 1 module: 0, at models.py:{line}" in message


def test_a_call_that_is_gone_is_told_with_its_line_in_the_lock_and_no_other_is_blamed(model: Path) -> None:
    model.write_text(MODEL.replace("c = a @ a.t()", "c = a.double() @ a.double()"), encoding="utf-8")
    lock(model, "products", device="cuda", dtype="float16")
    model.write_text(MODEL, encoding="utf-8")
    ((message, file, line),) = where_of(model)
    assert (file, line) == ("", None)
    gone = line_of("c = a @ a.t()")
    assert f"no longer: float64 float64 -> float64 float64 in 1 module: 0, when locked at models.py:{gone}" in message


# Where the target is searched -------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a model beside its pyproject.toml, one beside the test, and a working directory elsewhere."""
    (tmp_path / "outside.py").write_text(MODEL, encoding="utf-8")
    top = tmp_path / "project"
    (top / "tests" / "deep").mkdir(parents=True)
    (top / "pyproject.toml").touch()
    (top / "on_top.py").write_text(MODEL, encoding="utf-8")
    (top / "tests" / "deep" / "beside.py").write_text(MODEL, encoding="utf-8")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return top


@pytest.mark.parametrize(("name", "folder"), [("beside.py", "tests/deep"), ("on_top.py", "."), ("deep/beside.py", "")])
def test_a_relative_target_is_found_from_every_working_directory(project: Path, name: str, folder: str) -> None:
    target = LockTarget.of(f"{name}:net", near=project / "tests" / "deep")
    assert target.file == project / (folder or "tests/deep") / NAME
    assert (target.entry, target.subject.name) == (f"{Path(name).name}:net", f"{name}:net")


def test_the_working_directory_comes_first(project: Path) -> None:
    (Path.cwd() / "beside.py").write_text(MODEL, encoding="utf-8")
    assert LockTarget.of("beside.py:net", near=project / "tests" / "deep").file == Path.cwd() / NAME


def test_a_missing_target_is_told_with_the_folders_that_were_searched(project: Path) -> None:
    folders = [Path.cwd(), project / "tests" / "deep", project / "tests", project]
    with pytest.raises(UsageError) as caught:
        LockTarget.of("outside.py:net", near=project / "tests" / "deep")
    assert str(caught.value) == f"there is no file outside.py; searched in {', '.join(map(str, folders))}"


def test_without_a_project_nothing_above_the_test_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any((folder / "pyproject.toml").exists() or (folder / ".git").exists() for folder in tmp_path.parents):
        pytest.skip("the temporary folder lies in a project")
    (tmp_path / "above.py").write_text(MODEL, encoding="utf-8")
    for name in ("tests", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="no file above"):
        LockTarget.of("above.py:net", near=tmp_path / "tests")


def test_a_model_whose_weights_decide_what_is_called_is_locked_to_the_same_ops(tmp_path: Path) -> None:
    (tmp_path / "routed.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Routed(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.router, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])\n\n"
        "    def forward(self, x):\n"
        "        return self.experts[int(self.router(x.float()).sum(0).argmax())](x)\n\n\n"
        "def subject():\n    return Routed(), (torch.randn(2, 4),)\n"
    )
    target = f"{tmp_path / 'routed.py'}:subject"
    write_lock(LockTarget.of(target), "cpu", "bfloat16")
    for seed in range(6):
        torch.manual_seed(seed)
        assert not compare_lock(LockTarget.of(target)).failed
