"""The text of the files that `ampcheck init` writes."""

from __future__ import annotations

import ast
import json
import re
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ampcheck.core.errors import UsageError
from ampcheck.tools.init.candidates import Candidate
from ampcheck.tools.init.sandbox import Tried
from ampcheck.tools.init.scripts import TrainingScript

_WIDTH = 100
_SINGLE_QUOTED = re.compile(r"'([^'\"\\]*)'")
_DOUBLE = r'"\1"'


class _Template(string.Template):
    """`%%{name}`, as `$` and `@` mean something in workflows and in Python."""

    delimiter = "%%"


@cache
def _template(name: str) -> _Template:
    return _Template((files("ampcheck.tools.init") / "templates" / f"{name}.txt").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Contents:
    """What `tests/test_amp.py` is about.

    models: that ran. unfinished: a model whose arguments are missing. script: the training loop, and whether it ran.
    paths: folders for `sys.path`, relative. locked: names of factories with an entry in the lock. cuda: the models are
    trained on CUDA.
    """

    models: Sequence[Tried] = ()
    unfinished: Tried | None = None
    script: TrainingScript | None = None
    script_runs: bool = False
    paths: Sequence[str] = ()
    locked: Sequence[str] = ()
    cuda: bool = False


def render_tests(tests: Contents) -> str:
    """The text of `tests/test_amp.py`."""
    models = _models(tests)
    training = _training(tests.script, runs=tests.script_runs) if tests.script is not None else ""
    standard = ["import sys"] if tests.paths or "sys." in training else []
    standard += ["from pathlib import Path"] if tests.paths else []
    sections = [models]
    if models and (compiled := _compiled(tests)):
        sections.append(_template("compiled.py").substitute(models=compiled, device=_device(tests.cuda)))
    if tests.locked:
        sections.append(_template("policy.py").substitute(locked=", ".join(tests.locked)))
    if tests.models and not tests.models[0].heavy:
        star = "**" if tests.models[0].inputs.startswith("{") else "*"
        sections.append(_template("speed.py").substitute(star=star))
    text = _template("test_amp.py").substitute(
        standard_imports="".join(f"{line}\n" for line in standard) + ("\n" if standard else ""),
        torch="import torch\n" if models else "",
        paths="".join(f"\n{_path_line(path)}" for path in tests.paths) + ("\n" if tests.paths else ""),
        sections="".join("\n\n" + each.strip("\n") + "\n" for each in (*sections, training) if each),
    )
    text = text.rstrip("\n") + "\n"
    try:
        ast.parse(text)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise UsageError(f"ampcheck init drafted tests that are no Python, at `{line}`; nothing was written") from error
    return text


def _models(tests: Contents) -> str:
    """The factories and their tests; "" where a training script is all that there is."""
    factories = {each.candidate.name: _factory(each) for each in tests.models}
    if tests.unfinished is not None:
        candidate = tests.unfinished.candidate
        factories[candidate.name] = _unfinished(candidate, tests.unfinished.error)
    if not factories and tests.script is not None:
        return ""
    factories = factories or {"model": _template("no_model.py").template}
    return _template("models.py").substitute(
        factories="".join(factories.values()),
        names=", ".join(factories),
        device=_device(tests.cuda),
    )


def _device(cuda: bool) -> str:
    return ', device="cuda"' if cuda else ""


def _compiled(tests: Contents) -> str:
    """The factories whose compiled code has a test, as code; "" for none."""
    light = [each.candidate.name for each in tests.models if not each.heavy]
    if len(light) == len(tests.models):
        return "MODELS"
    return f"[{', '.join(light)}]" if light else ""


def _path_line(path: str) -> str:
    folder = "Path(__file__).parents[1]" + (f" / {_quoted(path)}" if path else "")
    return f"sys.path.insert(0, str({folder}))  # it is not installed"


def _factory(tried: Tried) -> str:
    assert tried.attempt is not None
    return _template("factory.py").substitute(
        name=tried.candidate.name,
        title=tried.candidate.title,
        origin=tried.attempt.origin,
        parameters=f"{tried.parameters:,}",
        imports="\n    ".join(_merged(tried.attempt.imports)),
        setup=_setup(tried.attempt.setup),
        code=_folded(tried.attempt.code, len("model = ")),
        inputs=_folded(tried.inputs, len("return model, ")),
    )


def _unfinished(candidate: Candidate, error: str) -> str:
    """A factory with dots: of the first construction that was tried, or else of the arguments that are missing."""
    if candidate.attempts:
        code, imports, setup = candidate.attempts[0].code, candidate.attempts[0].imports, candidate.attempts[0].setup
        wanted = f"the arguments and inputs of {candidate.title}, as those drafted do not run: {error}"
    else:
        arguments = ", ".join(f"{name.rpartition('.')[2]}=..." for name in candidate.missing)
        code, imports, setup = f"{candidate.signature.partition('(')[0]}({arguments})", candidate.imports, ()
        wanted = f"{', '.join(candidate.missing)} of {candidate.signature}, and the inputs of the model"
    return _template("unfinished.py").substitute(
        name=candidate.name,
        title=candidate.title,
        missing=wanted.replace("\\", "/").replace('"', "'"),
        imports="\n    ".join(_merged(imports)),
        setup=_setup(setup),
        code=_folded(code, len("model = ")),
    )


def _setup(lines: Sequence[str]) -> str:
    return "".join(f"    {_SINGLE_QUOTED.sub(_DOUBLE, line)}\n" for line in lines)


def _training(script: TrainingScript, *, runs: bool) -> str:
    body = "".join(f"    {line}\n" if line else "\n" for line in (_runs if runs else _fill_in)(script))
    return _template("training.py").substitute(
        path=script.title.replace('"', "'"),
        data=", on random images in the shapes of its datasets" if runs and script.datasets else "",
        name=_quoted(script.title),
        body=body,
        device=_device(script.cuda),
    )


def _runs(script: TrainingScript) -> list[str]:
    """The lines of a factory of which nothing is missing."""
    imports = [] if script.function else ["import runpy"]
    if script.datasets:
        imports += [*([""] if imports else []), "from ampcheck.setup.datasets import random_datasets"]
    if script.function:
        imports.append(f"from {script.source.module} import {script.function}")
        call = f"{script.function}()"
    else:
        call = f'runpy.run_path({_quoted(script.source.path)}, run_name="__main__")'
    argv = f"sys.argv = [{', '.join(map(_quoted, (script.source.path, *script.arguments)))}]"
    if script.is_target:
        own = [f"{argv}  # its options keep their defaults"] if script.has_options else []
        return [*own, *imports, "", f"return {script.function}"]
    lines = [f"    {argv}"] if script.has_options or not script.function else []
    lines += ["    with random_datasets():", f"        {call}"] if script.datasets else [f"    {call}"]
    return [*imports, "", "def run():", *lines, "", "return run"]


def _fill_in(script: TrainingScript) -> list[str]:
    """The lines of a factory in which something is missing."""
    name, own_line = script.function, f"sys.argv = [{_quoted(script.source.path)}]"
    missing = script.signature.partition("(")[2].rstrip(")")
    call = ", ".join(f"{each}=..." for each in missing.split(", ")) if missing else ""
    needs = (script.needs or "its data and settings").replace("\\", "/")
    lines = [
        "# FILL IN what is missing below, then delete this line and the next one.",
        f"raise FillIn({_quoted(f'{needs}, for {script.source.path}')})",
    ]
    if name is None:
        run = f'runpy.run_path({_quoted(script.source.path)}, run_name="__main__")'
        return [*lines, "import runpy", "", f"{own_line}  # and its options", f"return lambda: {run} and None"]
    ending = f"return lambda: {name}({call})" if call else f"return {name}"
    options = [] if call else [f"{own_line}  # and its options"]
    return [*lines, f"from {script.source.module} import {name}", "", *options, ending]


def _quoted(text: str) -> str:
    """A literal with double quotes, in Python and in YAML."""
    return json.dumps(text, ensure_ascii=False)


def _merged(imports: Sequence[str]) -> list[str]:
    """Import lines with the names of one module together."""
    names: dict[str, list[str]] = {}
    plain = [line for line in imports if line.startswith("import ")]
    for line in imports:
        if line.startswith("from "):
            module, _, name = line.removeprefix("from ").partition(" import ")
            names.setdefault(module, []).append(name)
    return [*plain, *(f"from {module} import {', '.join(sorted(each))}" for module, each in sorted(names.items()))]


def _folded(code: str, taken: int) -> str:
    """Code for a line of a function of which `taken` columns are used; too long, it gets a line for each argument."""
    text = code
    if 4 + taken + len(code) > _WIDTH:
        text = _fold(ast.parse(code, mode="eval").body, 4)
    return _SINGLE_QUOTED.sub(_DOUBLE, text)


def _fold(node: ast.expr, indent: int) -> str:
    text = ast.unparse(node)
    if indent + len(text) <= _WIDTH:
        return text
    inner, close = " " * (indent + 4), " " * indent
    if isinstance(node, ast.Call):
        parts = [_fold(each, indent + 4) for each in node.args]
        parts += [f"{each.arg}={_fold(each.value, indent + 4)}" for each in node.keywords]
        return f"{ast.unparse(node.func)}(\n" + "".join(f"{inner}{part},\n" for part in parts) + f"{close})"
    if isinstance(node, ast.Tuple):
        return "(\n" + "".join(f"{inner}{_fold(each, indent + 4)},\n" for each in node.elts) + f"{close})"
    if isinstance(node, ast.Dict):
        items = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        pairs = [f"{inner}{ast.unparse(key)}: {_fold(value, indent + 4)},\n" for key, value in items]
        return "{\n" + "".join(pairs) + f"{close}}}"
    return text


def render_workflow(*, folder: str, install: Sequence[str], torch: str, target: str) -> str:
    """The text of `.github/workflows/ampcheck.yml`.

    folder: of the project below the repository, "" for its top. install: lines of shell. torch: the release that the
    lock was written with, as `2.13`. target: of the speed gate, "" for none.
    """
    prefix = f"{folder}/" if folder else ""
    python = (
        _template("python.yml")
        .substitute(
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            dependencies=_quoted(f"{prefix}pyproject.toml"),
        )
        .rstrip("\n")
    )
    common = {
        "torch": torch,
        "python": python,
        "install": "\n".join(f"          {line}" for line in install),
        "reports": _quoted(f"{prefix}ampcheck-*"),
        "history": _quoted(f"{prefix}.ampcheck-history"),
    }
    defaults = f"\ndefaults:\n  run:\n    working-directory: {_quoted(folder)}\n" if folder else ""
    speed = _template("speed_jobs.yml").substitute(target=target, **common) if target else ""
    text = _template("ampcheck.yml").substitute(defaults=defaults, speed=speed.rstrip("\n"), **common)
    return text.rstrip("\n") + "\n"
