"""`ampcheck init`: from a repository to tests that run, without a file of the user's being touched."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.init.repositories import NANOGPT, SRC, TRAINING, TRANSFORMERS, UNGUESSABLE, write
from warm_processes import warm

from ampcheck.cli import init
from ampcheck.cli import main as command_line
from ampcheck.cli.main import main
from ampcheck.core.errors import UsageError
from ampcheck.core.settings import load_settings
from ampcheck.tools.init import files, plan, sandbox
from ampcheck.tools.init.render import render_workflow

pytestmark = pytest.mark.usefixtures("warm_processes")

WRITTEN = (".github/workflows/ampcheck.yml", "pyproject.toml", "tests/ampcheck.lock.json", "tests/test_amp.py")


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder with this ampcheck."""
    root = str(Path(init.__file__).parents[2])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file outside of .git, with its content."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] != ".git"
    }


def targets_of(folder: Path) -> list[str]:
    return [target.target for target in load_settings(folder).targets]


@pytest.fixture(scope="module")
def nanogpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(tmp_path_factory.mktemp("nanogpt"), NANOGPT)
    with warm():
        assert main(["init", str(folder), "--yes"]) == 0
    return folder


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the repository runs: no model is tried."""
    monkeypatch.setattr(plan, "candidates", lambda repository: [])


# What is written ------------------------------------------------------------------------------------------------------


def test_it_writes_tests_targets_lock_and_workflow_and_nothing_else(nanogpt: Path) -> None:
    assert set(files_of(nanogpt)) == {*NANOGPT, *WRITTEN}
    assert targets_of(nanogpt) == ["tests/test_amp.py:gpt"]


def test_the_factory_is_explicit_code_that_the_user_owns(nanogpt: Path) -> None:
    text = (nanogpt / "tests/test_amp.py").read_text(encoding="utf-8")
    assert "from model import GPT, GPTConfig\n" in text
    assert "GPT(config=GPTConfig(block_size=128, vocab_size=512, n_layer=2, n_head=4, n_embd=128))" in text
    assert "torch.randint(0, 512, (2, 16)), torch.randint(0, 512, (2, 16))" in text


def test_the_generated_tests_judge_the_model(nanogpt: Path) -> None:
    done = python(nanogpt, "-m", "pytest", "-q", "-k", "values or policy", "--ampcheck", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    assert "low-precision-error" in done.stdout
    assert "policy-drift" in done.stdout


def test_the_generated_tests_judge_compiled_code_and_measure_speed(nanogpt: Path, tmp_path: Path) -> None:
    done = python(
        nanogpt, "-m", "pytest", "-q", "-k", "compiled", f"--ampcheck-history={tmp_path}", "-p", "no:cacheprovider"
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    done = python(
        nanogpt, "-m", "pytest", "-q", "-m", "speed", f"--ampcheck-history={tmp_path}", "-p", "no:cacheprovider"
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert list(tmp_path.iterdir())


def test_the_lock_names_files_of_the_repository(nanogpt: Path) -> None:
    text = (nanogpt / "tests/ampcheck.lock.json").read_text(encoding="utf-8")
    assert '"model.py:' in text
    assert "ampcheck-init" not in text


def test_the_target_is_audited_by_its_name_in_pyproject(nanogpt: Path) -> None:
    done = python(nanogpt, "-m", "ampcheck", "audit", "--fast", "--dtype=bfloat16", "-q")
    assert done.returncode == 0, done.stderr
    assert "tests/test_amp.py:gpt" in done.stdout


def test_it_says_what_it_did_and_what_to_run_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_trial: None
) -> None:
    assert main(["init", str(write(tmp_path, {})), "--yes"]) == 0
    out = capsys.readouterr().out
    assert all(f"writes {name}" in out for name in WRITTEN if "lock" not in name)
    assert "next: python -m pytest tests/test_amp.py --ampcheck" in out


# Nothing of the user's is touched -------------------------------------------------------------------------------------


def test_a_second_run_overwrites_nothing_and_names_what_it_leaves(
    nanogpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(nanogpt)
    assert main(["init", str(nanogpt), "--yes"]) == 0
    out = capsys.readouterr().out
    assert files_of(nanogpt) == before
    assert all(f"leaves {name}" in out for name in WRITTEN if "lock" not in name)
    assert "nothing to write" in out


@pytest.mark.parametrize("name", ["tests/test_amp.py", ".github/workflows/ampcheck.yml"])
def test_a_file_that_exists_stays(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], no_trial: None
) -> None:
    write(tmp_path, {name: "mine\n"})
    assert main(["init", str(tmp_path), "--yes"]) == 0
    assert (tmp_path / name).read_text(encoding="utf-8") == "mine\n"
    assert f"leaves {name}: it exists" in capsys.readouterr().out


def test_targets_that_exist_stay(tmp_path: Path, no_trial: None) -> None:
    text = "[tool.ampcheck]\ntargets = ['mine.py:model']\n"
    assert main(["init", str(write(tmp_path, {"pyproject.toml": text})), "--yes"]) == 0
    assert (tmp_path / "pyproject.toml").read_text(encoding="utf-8") == text


def test_code_runs_in_a_copy_and_leaves_nothing_in_the_repository(tmp_path: Path) -> None:
    text = "from torch import nn\nopen('log.txt', 'w')\nclass Net(nn.Linear):\n    def __init__(self):\n"
    text += "        super().__init__(4, 4)\n    def forward(self, x):\n        return super().forward(x)\n"
    write(tmp_path, {"net.py": text.replace("nn.Linear", "nn.Module", 0)})
    (tmp_path / "net.py").write_text(
        text.replace("class Net(nn.Linear)", "class Net(nn.Sequential)").replace(
            "super().__init__(4, 4)", "super().__init__(nn.Linear(4, 4))"
        )
    )
    assert main(["init", str(tmp_path), "--yes"]) == 0
    assert targets_of(tmp_path) == ["tests/test_amp.py:net"]
    assert not (tmp_path / "log.txt").exists()


# Asking ---------------------------------------------------------------------------------------------------------------


def test_without_a_terminal_it_says_to_pass_yes(tmp_path: Path) -> None:
    done = python(write(tmp_path, {}), "-m", "ampcheck", "init")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ampcheck: ampcheck init asks before it writes, and stdin is no terminal: pass --yes\n"
    assert files_of(tmp_path) == {}


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 2), ("n", 2)])
def test_on_a_terminal_it_shows_the_plan_and_asks_once(
    tmp_path: Path,
    answer: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_trial: None,
) -> None:
    questions: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or answer)
    assert main(["init", str(write(tmp_path, {}))]) == code
    assert "would write tests/test_amp.py" in capsys.readouterr().out
    assert len(questions) == 1
    assert bool(files_of(tmp_path)) is (code == 0)


# Other shapes ---------------------------------------------------------------------------------------------------------


def test_a_package_below_src_is_imported_from_there(tmp_path: Path) -> None:
    assert main(["init", str(write(tmp_path, SRC)), "--yes"]) == 0
    text = (tmp_path / "tests/test_amp.py").read_text(encoding="utf-8")
    assert 'sys.path.insert(0, str(Path(__file__).parents[1] / "src"))' in text
    assert "from shapes.net import Net" in text
    assert "Net(in_channels=3, num_classes=10)" in text
    assert (tmp_path / "pyproject.toml").read_text(encoding="utf-8").startswith(SRC["pyproject.toml"])
    done = python(tmp_path, "-m", "pytest", "-q", "tests/test_amp.py", "-k", "values", "-p", "no:cacheprovider")
    assert "1 passed" in done.stdout, done.stdout


def test_arguments_that_nobody_can_guess_are_asked_for_and_never_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(write(tmp_path, UNGUESSABLE)), "--yes"]) == 0
    out = capsys.readouterr().out
    assert "next: fill in the arguments in tests/test_amp.py, at the line FILL IN" in out
    said = "; ".join(line for line in out.splitlines() if line.startswith("note: "))
    assert "no policy lock was written, as no model ran: `ampcheck policy lock tests/test_amp.py:net` writes it" in said
    missing = "wavelengths, grid of Net(wavelengths, grid), and the inputs of the model"
    tests = python(tmp_path, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    assert "2 skipped" in tests.stdout
    assert " passed" not in tests.stdout
    assert f"tests/test_amp.py, net: fill in {missing}" in " ".join(tests.stdout.split())
    audit = python(tmp_path, "-m", "ampcheck", "audit")
    assert audit.returncode == 2
    assert audit.stderr.splitlines()[-1] == f"ampcheck: tests/test_amp.py:net raised FillIn: {missing}"


def test_filling_in_what_is_asked_for_is_all_that_is_left_to_do(tmp_path: Path) -> None:
    assert main(["init", str(write(tmp_path, UNGUESSABLE)), "--yes"]) == 0
    path = tmp_path / "tests/test_amp.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    fill = next(number for number, line in enumerate(lines) if "FILL IN" in line)
    text = "\n".join(lines[:fill] + lines[fill + 2 :])
    text = text.replace("wavelengths=..., grid=...", "[1, 2], torch.ones(3).numpy()")
    path.write_text(text.replace("(...,)  # the arguments of model(...)", "(torch.randn(4, 2),)"), encoding="utf-8")
    done = python(tmp_path, "-m", "pytest", "-q", "-k", "values", "-p", "no:cacheprovider")
    assert "1 passed" in done.stdout, done.stdout


def test_an_empty_folder_gets_a_place_for_a_model(tmp_path: Path) -> None:
    assert main(["init", str(write(tmp_path, {})), "--yes"]) == 0
    assert targets_of(tmp_path) == ["tests/test_amp.py:model"]
    done = python(tmp_path, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    assert "2 skipped" in done.stdout, done.stdout
    assert "fill in a model and its inputs" in " ".join(done.stdout.split())


def test_a_training_function_that_runs_becomes_a_target(tmp_path: Path) -> None:
    assert main(["init", str(write(tmp_path, TRAINING)), "--yes"]) == 0
    assert targets_of(tmp_path) == ["train.py:main"]
    assert not (tmp_path / "checkpoint.pt").exists()
    done = python(tmp_path, "-m", "pytest", "-q", "-k", "training", "--ampcheck", "-p", "no:cacheprovider")
    assert "1 passed" in done.stdout, done.stdout
    assert "steps" in done.stdout


def with_options(options: str) -> dict[str, str]:
    text = TRAINING["train.py"].replace("def main():", f"def main():\n    {options}")
    return {"train.py": "import argparse\n" + text}


def test_a_script_with_a_required_option_is_asked_for_it(tmp_path: Path) -> None:
    files = with_options("p = argparse.ArgumentParser(); p.add_argument('data'); p.parse_args()")
    assert main(["init", str(write(tmp_path, files)), "--yes"]) == 0
    assert targets_of(tmp_path) == ["tests/test_amp.py:training"]
    done = python(tmp_path, "-m", "pytest", "-q", "-rs", "-k", "training", "-p", "no:cacheprovider")
    assert "fill in the options data of its command line, for train.py" in " ".join(done.stdout.split())


def test_a_script_whose_options_all_have_defaults_runs_without_a_line_to_fill_in(tmp_path: Path) -> None:
    files = with_options("p = argparse.ArgumentParser(); p.add_argument('--lr', default=0.1); p.parse_args()")
    assert main(["init", str(write(tmp_path, files)), "--yes"]) == 0
    assert targets_of(tmp_path) == ["train.py:main"]
    done = python(tmp_path, "-m", "pytest", "-q", "-k", "training", "--ampcheck", "-p", "no:cacheprovider")
    assert "1 passed" in done.stdout, done.stdout


def test_a_checkpoint_of_transformers_is_tried_small_and_without_network(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert main(["init", str(write(tmp_path, TRANSFORMERS)), "--yes"]) == 0
    assert targets_of(tmp_path) == ["tests/test_amp.py:bert_for_sequence_classification"]
    text = (tmp_path / "tests/test_amp.py").read_text(encoding="utf-8")
    assert '"labels": torch.randint(0, 2, (2,))' in text


def test_a_file_that_no_import_statement_can_name_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x): return x\n"
    files = {"my-model.py": text, "01_train.py": TRAINING["train.py"]}
    assert main(["init", str(write(tmp_path, files)), "--yes"]) == 0
    assert "note: no import statement can name 01_train.py, my-model.py: rename to" in capsys.readouterr().out
    compile((tmp_path / "tests/test_amp.py").read_text(encoding="utf-8"), "test_amp.py", "exec")
    assert targets_of(tmp_path) == ["tests/test_amp.py:model"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("import os; os._exit(3)", "its process ended"),
        ("import sys; sys.exit()", "its module exits when it is imported"),
        ("while True: pass", "it took longer than 4 s"),
        ("raise RuntimeError('no data here')", "RuntimeError: no data here"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_reason(
    tmp_path: Path, line: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 4.0)
    text = f"from torch import nn\n{line}\nclass Net(nn.Module):\n    def forward(self, x): return x\n"
    assert main(["init", str(write(tmp_path, {"net.py": text})), "--yes"]) == 0
    assert targets_of(tmp_path) == ["tests/test_amp.py:net"]
    assert f'raise FillIn("the arguments and inputs of net.Net, as those drafted do not run: {reason}' in (
        tmp_path / "tests/test_amp.py"
    ).read_text(encoding="utf-8")


# Folders and settings that are wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[tool.ampcheck]\ntarget = 'a.py:b'\n", "has an unknown key 'target'"),
        ("[tool.ampcheck\n", "pyproject.toml cannot be read"),
        ("tool.ampcheck = {fail-on = 'warn'}\n", "inline"),
    ],
)
def test_a_wrong_pyproject_is_named_and_nothing_is_written(
    tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str], no_trial: None
) -> None:
    write(tmp_path, {"pyproject.toml": text})
    assert main(["init", str(tmp_path), "--yes"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("ampcheck: ")
    assert reason in error
    assert set(files_of(tmp_path)) == {"pyproject.toml"}


def test_a_missing_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "none"), "--yes"]) == 2
    assert capsys.readouterr().err == f"ampcheck: ampcheck init needs a folder; {tmp_path / 'none'} is none\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o555)
    assert main(["init", str(tmp_path), "--yes"]) == 2
    assert "nothing was written" in capsys.readouterr().err


def test_a_file_where_a_folder_belongs_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {".github": "no folder\n"})
    assert main(["init", str(tmp_path), "--yes"]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert set(files_of(tmp_path)) == {".github"}


def test_a_failure_in_the_middle_leaves_nothing_half_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_trial: None
) -> None:
    before = {"pyproject.toml": "[project]\nname = 'a'\n"}
    write(tmp_path, before)
    real, written = files.write_atomically, list[str]()

    def fails_at_the_workflow(path: Path, text: str) -> None:
        if path.name == "ampcheck.yml":
            raise UsageError(f"cannot write {path}: the disk is full")
        written.append(path.name)
        real(path, text)

    monkeypatch.setattr(files, "write_atomically", fails_at_the_workflow)
    assert main(["init", str(tmp_path), "--yes"]) == 2
    assert "the disk is full; nothing was written" in capsys.readouterr().err
    assert {"test_amp.py", "pyproject.toml"} <= set(written)
    assert files_of(tmp_path) == {name: text.encode() for name, text in before.items()}
    assert not (tmp_path / "tests").exists()


@pytest.mark.parametrize("name", ["ampcheck.yml", "pyproject.toml"])
@pytest.mark.parametrize("after", [False, True], ids=["before the file", "after the file"])
def test_an_interrupt_in_the_middle_leaves_nothing_half_written(
    tmp_path: Path, name: str, after: bool, monkeypatch: pytest.MonkeyPatch, no_trial: None
) -> None:
    before = {"pyproject.toml": "[project]\nname = 'a'\n"}
    write(tmp_path, before)
    real, interrupts = files.write_atomically, [KeyboardInterrupt()]

    def interrupted(path: Path, text: str) -> None:
        ends = path.name == name and interrupts
        if after or not ends:
            real(path, text)
        if ends:
            raise interrupts.pop()

    monkeypatch.setattr(files, "write_atomically", interrupted)
    plan_of = plan.make_draft(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        files.write(plan_of.files)
    assert files_of(tmp_path) == {name: text.encode() for name, text in before.items()}
    assert not (tmp_path / "tests").exists()


# The workflow ---------------------------------------------------------------------------------------------------------


def workflow_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((folder / ".github/workflows/ampcheck.yml").read_text(encoding="utf-8"))
    return data


def commands_of(workflow: Mapping[str, Any]) -> list[list[str]]:
    """Every command of its `run` steps, as words, without pipes."""
    lines = [
        line.strip()
        for job in workflow["jobs"].values()
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
    ]
    return [
        shlex.split(line.partition("|")[0]) for line in lines if line not in ("{", "}") and not line.startswith("}")
    ]


def test_the_workflow_names_only_commands_and_options_that_exist(nanogpt: Path) -> None:
    ours = [words[1:] for words in commands_of(workflow_of(nanogpt)) if words[0] == "ampcheck"]
    assert {words[0] for words in ours} == {"audit", "speed", "history"}
    for words in ours:
        command_line._parser().parse_args(words)
    known = python(nanogpt, "-m", "pytest", "--help").stdout
    tests = [words for words in commands_of(workflow_of(nanogpt)) if words[:3] == ["python", "-m", "pytest"]]
    flags = {word.partition("=")[0] for words in tests for word in words if word.startswith("--")}
    assert {"--ampcheck", "--ampcheck-history", "--benchmark-only"} <= flags
    assert {flag for flag in flags if f"  {flag}" not in known} == set()


def test_the_workflow_has_a_matrix_caches_a_summary_a_speed_gate_and_a_history(nanogpt: Path) -> None:
    workflow = workflow_of(nanogpt)
    judge, speed, history = (workflow["jobs"][name] for name in ("judge", "speed", "history"))
    assert len(judge["strategy"]["matrix"]["torch"]) == 2
    assert any(step.get("uses", "").startswith("actions/cache@") for step in judge["steps"])
    assert any(step.get("run", "").startswith("ampcheck audit ") for step in judge["steps"])  # writes the summary
    assert speed["if"] == "github.event_name == 'pull_request'"
    assert any(step.get("with", {}).get("fetch-depth") == 0 for step in speed["steps"])
    assert any(step.get("with", {}).get("path") == ".ampcheck-history" for step in history["steps"])


def test_without_git_the_workflow_is_in_the_folder(tmp_path: Path, no_trial: None) -> None:
    assert main(["init", str(write(tmp_path, {}, git=False)), "--yes"]) == 0
    assert "jobs" in workflow_of(tmp_path)


FOLDERS = ["examples/mnist", "my proj #1", ".research/m", "a: b", "'a' \"b\"", "*", "größe", "true"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_of_a_repository_gets_its_workflow_at_the_top(tmp_path: Path, folder: str, no_trial: None) -> None:
    write(tmp_path, {f"{folder}/readme.txt": ""})
    assert main(["init", str(tmp_path / folder), "--yes"]) == 0
    workflow = workflow_of(tmp_path)
    assert workflow["defaults"]["run"]["working-directory"] == folder
    options = [step.get("with", {}) for step in workflow["jobs"]["judge"]["steps"]]
    assert {each.get("cache-dependency-path") for each in options} == {None, f"{folder}/pyproject.toml"}
    assert {each.get("path") for each in options} == {None, ".inductor", f"{folder}/ampcheck-*"}
    assert (tmp_path / folder / "tests/test_amp.py").exists()


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_history_of_a_folder_is_cached_there(folder: str) -> None:
    text = render_workflow(folder=folder, install=["pip install ampcheck"], torch="2.13", target="tests/test_amp.py:m")
    steps = yaml.safe_load(text)["jobs"]["history"]["steps"]
    assert f"{folder}/.ampcheck-history" in {step.get("with", {}).get("path") for step in steps}


def test_with_another_ci_the_commands_are_named_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_trial: None
) -> None:
    write(tmp_path, {".gitlab-ci.yml": ""})
    assert main(["init", str(tmp_path), "--yes"]) == 0
    assert not (tmp_path / ".github").exists()
    assert "the repository has .gitlab-ci.yml: run `ampcheck audit`" in capsys.readouterr().out


def test_the_workflow_installs_what_the_repository_declares(tmp_path: Path, no_trial: None) -> None:
    write(tmp_path, {"requirements.txt": "einops\n", "pyproject.toml": "[project]\nname = 'a'\nversion = '1'\n"})
    assert main(["init", str(tmp_path), "--yes"]) == 0
    words = commands_of(workflow_of(tmp_path))
    assert ["pip", "install", "-e", "."] in words
    assert ["pip", "install", "-r", "requirements.txt"] in words
