"""The generated test file is Python as a formatter and a linter want it, whatever it is about."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tools.init.repositories import NANOGPT, TRAINING, TRANSFORMERS, UNGUESSABLE, write

from ampcheck.core.errors import UsageError
from ampcheck.tools.init.candidates import candidates
from ampcheck.tools.init.render import Contents, render_tests
from ampcheck.tools.init.repository import read_repository
from ampcheck.tools.init.sandbox import Tried


def as_if_run(folder: Path, *, script_runs: bool = False) -> Contents:
    """The contents as if the first attempt of each candidate had run."""
    repository = read_repository(folder)
    found = candidates(repository)
    models = [Tried(each, each.attempts[0], "(torch.randn(2, 3),)", 12) for each in found if each.attempts]
    unfinished = next((Tried(each) for each in found if not each.attempts), None)
    script = next((each for each in repository.scripts if each.function), None)
    return Contents(models, unfinished, script, script_runs, ["", "src"], [each.candidate.name for each in models])


SHAPES = {
    "model": (NANOGPT, False),
    "arguments missing": (UNGUESSABLE, False),
    "training": (TRAINING, True),
    "training, to be filled in": (TRAINING, False),
    "transformers": (TRANSFORMERS, False),
    "nothing": ({}, False),
}


@pytest.mark.parametrize(("files", "script_runs"), SHAPES.values(), ids=SHAPES)
def test_the_file_is_formatted_and_lints(tmp_path: Path, files: dict[str, str], script_runs: bool) -> None:
    text = render_tests(as_if_run(write(tmp_path / "repository", files), script_runs=script_runs))
    path = tmp_path / "test_amp.py"
    path.write_text(text, encoding="utf-8")
    compile(text, "test_amp.py", "exec")
    pytest.importorskip("ruff", reason="the linter is in the extra dev")
    options = ["--isolated", "--line-length=100", "--no-cache"]
    for command in (["format", "--diff"], ["check", "--select=E,F,W", "--ignore=E501"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options, str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + text


def test_a_heavy_model_keeps_bfloat16_and_its_lock(tmp_path: Path) -> None:
    tests = as_if_run(write(tmp_path, NANOGPT))
    text = render_tests(replace(tests, models=[replace(each, heavy=True) for each in tests.models]))
    assert "in float16 and bfloat16 keep" in text
    assert 'dtype="float16"' not in text
    assert "assert_policy" in text
    assert "assert_compiled" not in text


@pytest.mark.parametrize("cuda", [False, True])
def test_models_that_are_trained_on_cuda_are_judged_and_compiled_there(tmp_path: Path, cuda: bool) -> None:
    tests = as_if_run(write(tmp_path, NANOGPT))
    text = render_tests(replace(tests, script=None, cuda=cuda))
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    judged = [
        each for each in calls if ast.unparse(each.func) in ("ampcheck.assert_numerics", "ampcheck.assert_compiled")
    ]
    assert [any(keyword.arg == "device" for keyword in each.keywords) for each in judged] == [cuda, cuda]


def test_long_constructions_get_a_line_for_each_argument(tmp_path: Path) -> None:
    text = render_tests(as_if_run(write(tmp_path, TRANSFORMERS)))
    assert "            intermediate_size=256,\n" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", ["Model", "Inputs", "Compiled", "Factory"])
def test_no_test_hides_the_factory_that_it_calls(tmp_path: Path, name: str) -> None:
    text = f"from torch import nn\nclass {name}(nn.Module):\n    def forward(self, x): return x\n"
    rendered = render_tests(as_if_run(write(tmp_path / "repository", {"net.py": text})))
    assert f"MODELS = [{name.lower()}]" in rendered
    for function in (node for node in ast.parse(rendered).body if isinstance(node, ast.FunctionDef)):
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        built = {node.args[0].id for node in calls if node.func.id == "build" and isinstance(node.args[0], ast.Name)}
        assert not built & assigned, function.name


NAMES_OF_THE_FILE = [
    "Build",
    "Training",
    "Torch",
    "Sys",
    "Pytest",
    "Ampcheck",
    "TestNet",
    "Tests",
    "SetupModule",
    "Str",
]


@pytest.mark.parametrize("name", NAMES_OF_THE_FILE)
def test_a_factory_hides_no_name_of_the_file_and_is_no_test(tmp_path: Path, name: str) -> None:
    text = f"from torch import nn\nclass {name}(nn.Module):\n    def forward(self, x): return x\n"
    files = {"net.py": text, **TRAINING}
    tree = ast.parse(render_tests(as_if_run(write(tmp_path / "repository", files), script_runs=True)))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = [function.name for function in functions]
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert len(names) == len({*names})
    assert not {*names} & {*imported, *dir(builtins)}
    models = next(node for node in tree.body if isinstance(node, ast.Assign))
    (factory,) = (node.id for node in ast.walk(models.value) if isinstance(node, ast.Name))
    assert factory in names
    assert not factory.startswith(("test", "setup"))


def test_a_folder_with_quotes_in_its_name_stays_python(tmp_path: Path) -> None:
    contents = as_if_run(write(tmp_path / "repository", {'the "best" net/train.py': TRAINING["train.py"]}))
    tree = ast.parse(render_tests(replace(contents, paths=['the "best" net'])))
    assert 'the "best" net' in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_tests_that_would_be_no_python_are_refused_with_the_line(tmp_path: Path) -> None:
    contents = as_if_run(write(tmp_path / "repository", NANOGPT))
    (model, *_) = contents.models
    broken = replace(model, attempt=replace(model.attempt, imports=("from my-model import GPT",)))
    with pytest.raises(UsageError, match="no Python, at `from my-model import GPT`; nothing was written"):
        render_tests(replace(contents, models=[broken]))
