"""Promise: the GitHub Action and the pre-commit hook of this repository do what they say, with options that exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.cli.main import _parser
from ampcheck.core.run import SCHEMA, Run
from ampcheck.report.markdown import comment_of

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "ampcheck"
HOOKS = ROOT / ".pre-commit-hooks.yaml"

pytestmark = pytest.mark.skipif(
    not HOOKS.exists(), reason="the files of the repository are not in this copy of the tests"
)

GH = """#!{python}
# The program gh, of which the script uses `gh api`: it keeps comments in a file, and filters them with the real jq.
import json, pathlib, subprocess, sys

words, store = sys.argv[2:], pathlib.Path({store!r})
comments = json.loads(store.read_text())
if "--jq" in words:
    assert words[:2] == ["--paginate", "repos/me/model/issues/7/comments"], words
    sys.exit(subprocess.run(["jq", "-r", words[-1]], input=json.dumps(comments), text=True).returncode)
method, url, body = words[2], words[3], pathlib.Path(words[5].removeprefix("body=@")).read_text()
assert words[:2] + words[4:5] == ["--silent", "--method", "--field"], words
if {refused!r}:
    sys.exit("gh: Resource not accessible by integration (HTTP 403)")
if method == "POST":
    assert url == "repos/me/model/issues/7/comments"
    comments.append({{"id": len(comments) + 1, "user": {{"type": "Bot"}}, "body": body}})
else:
    (comment,) = (c for c in comments if url == f"repos/me/model/issues/comments/{{c['id']}}")
    comment["body"] = body
store.write_text(json.dumps(comments))
"""
AMPCHECK = """#!{python}
# The program ampcheck: the real parser reads the arguments, and each file that they name is written.
import pathlib, sys
from ampcheck.cli.main import _parser
options = _parser().parse_args()
for name in ("html", "json", "sarif", "markdown") if {code!r} < 2 else ():
    pathlib.Path(getattr(options, name)).write_text(name)
print(options.command.__module__, options.targets)
sys.exit({code!r})
"""


def program(folder: Path, name: str, text: str) -> None:
    """An executable in `folder`/bin."""
    (folder / "bin").mkdir(exist_ok=True)
    path = folder / "bin" / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def run(script: Path, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def action() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
    return loaded


# The action ----------------------------------------------------------------------------------------------------------


def test_every_script_is_bash(action, tmp_path):
    scripts = [step["run"] for step in action["runs"]["steps"] if "run" in step]
    scripts += [path.read_text(encoding="utf-8") for path in ACTION.glob("*.sh")]
    assert len(scripts) > 5
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script
        assert "${{" not in script  # text of a workflow's caller never becomes code


def test_every_input_is_used_and_every_step_that_is_named_exists(action):
    text = (ACTION / "action.yml").read_text(encoding="utf-8")
    ids = {step["id"] for step in action["runs"]["steps"] if "id" in step}
    assert all(text.count(f"inputs.{name}") for name in action["inputs"])
    assert {part.partition(".")[0] for part in text.split("steps.")[1:]} == ids


@pytest.mark.parametrize(("code", "written"), [(0, "true"), (1, "true"), (2, "false")])
def test_the_command_writes_every_report_and_its_exit_code_is_an_output(tmp_path, code, written):
    program(tmp_path, "ampcheck", AMPCHECK.format(python=sys.executable, code=code))
    output = tmp_path / "output"
    environment = {"RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(output)}
    command = "audit check_model.py:subject --fast"
    done = run(ACTION / "run.sh", folder=tmp_path, COMMAND=command, PYTHONPATH=str(ROOT), **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ampcheck.cli.audit ['check_model.py:subject']\n"
    outputs = dict(line.split("=", 1) for line in output.read_text(encoding="utf-8").splitlines())
    assert outputs == {"code": str(code), "reports": str(tmp_path / "ampcheck" / "reports"), "written": written}
    files = {path.name for path in Path(outputs["reports"]).iterdir()}
    assert files == ({"run.html", "run.json", "run.sarif", "run.md"} if code < 2 else set())


def test_reports_of_an_earlier_command_do_not_stay(tmp_path):
    environment = {"RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(tmp_path / "output"), "PYTHONPATH": str(ROOT)}
    for code in (0, 2):
        program(tmp_path, "ampcheck", AMPCHECK.format(python=sys.executable, code=code))
        run(ACTION / "run.sh", folder=tmp_path, COMMAND="audit", **environment)
    assert "written=false" in (tmp_path / "output").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command", ["audit", "policy lock m.py:f --check", "speed m.py:f --base main", "report a.json"]
)
def test_each_command_of_the_description_takes_every_report(command):
    reports = "--html a --json b --sarif c --markdown d".split()
    assert _parser().parse_args([*command.split(), *reports]).markdown == "d"


# The workflows -------------------------------------------------------------------------------------------------------


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PIN = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
OWN_ACTION = "ampcheck/ampcheck/.github/actions/ampcheck@"
"""In a workflow for users; no release of ampcheck has a digest yet."""


def test_every_action_is_pinned_by_its_digest_and_its_tag_and_everywhere_by_the_same():
    """Those of this repository, of the workflow that `ampcheck init` writes, and of the documentation."""
    template = ROOT / "ampcheck/tools/init/templates/ampcheck.yml.jinja"
    files = [*WORKFLOWS, ACTION / "action.yml", template, *(ROOT / "docs").rglob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    uses = {use for text in texts for use in re.findall(r"^ *(?:- )?uses: (.+)$", text, re.MULTILINE)}
    foreign = {use for use in uses if not use.startswith(OWN_ACTION)}
    assert len(foreign) > 5
    assert [use for use in foreign if not PIN.fullmatch(use)] == []
    assert len(foreign) == len({use.partition("@")[0] for use in foreign})


def test_the_version_is_the_same_in_the_citation():
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert project is not None
    assert citation["version"] == project[1]


def test_the_policy_of_releases_names_what_is_tested_and_written():
    page = (ROOT / "docs/guides/stability.md").read_text(encoding="utf-8")
    jobs = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["versions"]["strategy"]["matrix"]["include"]
    listed = re.findall(r"^\| (3\.\d+) \| (2\.\d+) \| each night \|$", page, re.MULTILINE)
    assert listed == [(one["python"], one["torch"]) for one in matrix]
    assert f"| {', '.join(jobs['wheels']['strategy']['matrix']['torch'])} |" in page
    assert f"| Run JSON (`--json`) | {SCHEMA};" in page


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
SCHEMAS = {
    **dict.fromkeys(WORKFLOWS, "github-workflows"),
    **dict.fromkeys(FORMS, "github-issue-forms"),
    ROOT / ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    ROOT / ".github/dependabot.yml": "dependabot",
    ROOT / "CITATION.cff": "citation-file-format",
    ACTION / "action.yml": "github-actions",
}


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_a_file_is_valid_by_its_schema(path):
    pytest.importorskip("check_jsonschema", reason="check-jsonschema, which ships the schemas, needs Python 3.11")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{SCHEMAS[path]}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_forms_of_issues_ask_for_the_doctor_and_the_run():
    forms = [path.read_text(encoding="utf-8") for path in FORMS if path.name != "config.yml"]
    assert len(forms) == 3
    assert all("`ampcheck doctor`" in form and "`--json run.json`" in form for form in forms)


# The comment ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def comments(tmp_path: Path) -> Path:
    """The comments on the pull request, which `gh` reads and writes."""
    if shutil.which("jq") is None:
        pytest.skip("the stand-in for gh filters with jq, which is not installed")
    store = tmp_path / "comments.json"
    store.write_text("[]", encoding="utf-8")
    program(tmp_path, "gh", GH.format(python=sys.executable, store=str(store), refused=False))
    return store


def post(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.md").write_text(body, encoding="utf-8")
    environment = {"GITHUB_REPOSITORY": "me/model", "PULL_REQUEST": "7"}
    return run(ACTION / "comment.sh", "run.md", folder=folder, **environment)


def bodies(comments: Path) -> list[str]:
    return [comment["body"] for comment in json.loads(comments.read_text(encoding="utf-8"))]


def test_a_second_comment_replaces_the_first_of_its_kind_alone(comments, tmp_path):
    failed = Run(findings=(OVERFLOW.fail("m", "`$(touch x)` too large"),), title="m")
    for body in (
        first := comment_of(failed),
        of_speed := comment_of(failed, "speed"),
        again := comment_of(Run(title="m")),
    ):
        done = post(tmp_path, body)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert first != again
    assert bodies(comments) == [again, of_speed]


def test_a_comment_of_a_person_is_never_replaced(comments, tmp_path):
    body = comment_of(Run(title="m"))
    comments.write_text(json.dumps([{"id": 1, "user": {"type": "User"}, "body": body}]), encoding="utf-8")
    post(tmp_path, body)
    assert bodies(comments) == [body, body]


def test_a_token_that_may_not_comment_is_a_warning(comments, tmp_path):
    program(tmp_path, "gh", GH.format(python=sys.executable, store=str(comments), refused=True))
    done = post(tmp_path, comment_of(Run(title="m")))
    assert done.returncode == 0
    assert done.stdout.startswith("::warning title=ampcheck::the comment could not be posted")


# The hook ------------------------------------------------------------------------------------------------------------


def test_the_hooks_run_commands_that_exist():
    audit, lint = yaml.safe_load(HOOKS.read_text(encoding="utf-8"))
    for hook in (audit, lint):
        program, *words = shlex.split(hook["entry"])
        assert program == "ampcheck"
        assert callable(_parser().parse_args(words).command)
    assert "--quiet" in audit["entry"]
    assert lint["types"] == ["python"]  # whose paths pre-commit adds


MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x @ torch.full((2, 2), {factor})

def subject():
    return Model(), (torch.ones(2, 2),)
"""
PYPROJECT = '[tool.ampcheck]\ntargets = [{ target = "model.py:subject", dtype = "float16" }]\n'


@pytest.mark.parametrize(("factor", "code"), [(2.0, 0), (6e4, 1)])
def test_pre_commit_stops_a_commit_that_overflows(tmp_path, factor, code):
    """With the real pre-commit, from a git repository that has the hook."""

    def git(folder: Path, *words: str) -> None:
        names = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
        subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)

    hooks, repository = tmp_path / "hooks", tmp_path / "repository"
    for folder in (hooks, repository):
        folder.mkdir()
        git(folder, "init", "-q")
    shutil.copy(HOOKS, hooks)
    git(hooks, "add", "-A")
    git(hooks, "commit", "-qm", "hooks")
    (repository / "model.py").write_text(MODEL.format(factor=factor), encoding="utf-8")
    (repository / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    git(repository, "add", "-A")
    program(tmp_path, "ampcheck", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ampcheck "$@"\n')
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "try-repo", str(hooks), "ampcheck", "--all-files"],
        cwd=repository,
        env={
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PRE_COMMIT_HOME": str(tmp_path / "home"),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("FAIL overflow: model.py:subject" in done.stdout) is bool(code)


def test_the_manifest_is_valid_by_pre_commit():
    command = [sys.executable, "-m", "pre_commit", "validate-manifest", str(HOOKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_conda_recipe_requires_what_the_project_does() -> None:
    recipe = yaml.safe_load((ROOT / ".ci" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [Requirement(text) for text in project["dependencies"]]
    names = {"torch": "pytorch"}
    expected = [f"python {project['requires-python']}"]
    expected += [f"{names.get(one.name, one.name)} {one.specifier}" for one in required]
    assert recipe["requirements"]["run"] == expected
    assert recipe["context"]["version"] == project["version"]
    assert recipe["about"]["summary"] == project["description"]
    (name, target), *_ = project["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {target}"]
