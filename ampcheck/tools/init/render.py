"""The text of the files that `ampcheck init` writes."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ampcheck.core.errors import UsageError
from ampcheck.tools.init.candidates import Candidate
from ampcheck.tools.init.sandbox import Tried
from ampcheck.tools.init.scripts import TrainingScript

_WIDTH = 100
_SINGLE_QUOTED = re.compile(r"'([^'\"\\]*)'")
_DOUBLE = r'"\1"'


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of `tests/test_amp.py`.

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


class _Factory(NamedTuple):
    """A factory of the file. about: its docstring. missing: what the user is to fill in, "" for nothing."""

    name: str
    about: str
    missing: str
    imports: Sequence[str]
    lines: Sequence[str]


_NO_MODEL = _Factory(
    "model",
    "A model of this repository; `ampcheck init` found no class that derives from nn.Module",
    "a model and its inputs",
    ["from ... import Model"],
    ["return Model(...), (...,)"],
)


def _render(template: str, **values: object) -> str:
    """A template has `<< value >>` and `<% statement %>`, as braces mean something in workflows and in Python."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ampcheck.tools.init"),
        undefined=StrictUndefined,
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(quoted=_quoted, **values)


def render_tests(tests: Contents) -> str:
    """The text of `tests/test_amp.py`."""
    text = _render("test_amp.py.jinja", tests=tests, factories=list(_factories(tests)))
    try:
        ast.parse(text)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise UsageError(f"ampcheck init drafted tests that are no Python, at `{line}`; nothing was written") from error
    return text


def _factories(tests: Contents) -> Iterable[_Factory]:
    """The factories of the models; none where a training script is all that there is."""
    found = {each.candidate.name: _factory(each) for each in tests.models}
    if tests.unfinished is not None:
        candidate = tests.unfinished.candidate
        found[candidate.name] = _unfinished(candidate, tests.unfinished.error)
    return found.values() or ([_NO_MODEL] if tests.script is None else [])


def _factory(tried: Tried) -> _Factory:
    assert tried.attempt is not None
    about = f"{tried.candidate.title}, {tried.attempt.origin}: {tried.parameters:,} parameters"
    inputs = _folded(tried.inputs, len("return model, "))
    lines = [*_built(tried.attempt.setup, tried.attempt.code), f"return model, {inputs}"]
    return _Factory(tried.candidate.name, about, "", _merged(tried.attempt.imports), lines)


def _unfinished(candidate: Candidate, error: str) -> _Factory:
    """A factory with dots: of the first construction that was tried, or else of the arguments that are missing."""
    if candidate.attempts:
        code, imports, setup = candidate.attempts[0].code, candidate.attempts[0].imports, candidate.attempts[0].setup
        wanted = f"the arguments and inputs of {candidate.title}, as those drafted do not run: {error}"
    else:
        arguments = ", ".join(f"{name.rpartition('.')[2]}=..." for name in candidate.missing)
        code, imports, setup = f"{candidate.signature.partition('(')[0]}({arguments})", candidate.imports, ()
        wanted = f"{', '.join(candidate.missing)} of {candidate.signature}, and the inputs of the model"
    missing = wanted.replace("\\", "/").replace('"', "'")
    lines = [*_built(setup, code), "return model, (...,)  # the arguments of model(...)"]
    return _Factory(candidate.name, candidate.title, missing, _merged(imports), lines)


def _built(setup: Sequence[str], code: str) -> list[str]:
    return [*(_SINGLE_QUOTED.sub(_DOUBLE, line) for line in setup), f"model = {_folded(code, len('model = '))}"]


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
    if indent + len(text) <= _WIDTH or not isinstance(node, (ast.Call, ast.Tuple, ast.Dict)):
        return text
    if isinstance(node, ast.Call):
        start, end = f"{ast.unparse(node.func)}(", ")"
        parts = [("", each) for each in node.args] + [(f"{each.arg}=", each.value) for each in node.keywords]
    elif isinstance(node, ast.Tuple):
        start, end, parts = "(", ")", [("", each) for each in node.elts]
    else:
        start, end = "{", "}"
        items = zip(node.keys, node.values, strict=True)
        parts = [(f"{ast.unparse(key)}: ", value) for key, value in items if key is not None]
    lines = (f"{' ' * (indent + 4)}{name}{_fold(value, indent + 4)},\n" for name, value in parts)
    return f"{start}\n{''.join(lines)}{' ' * indent}{end}"


def render_workflow(*, folder: str, install: Sequence[str], torch: str, target: str) -> str:
    """The text of `.github/workflows/ampcheck.yml`.

    folder: of the project below the repository, "" for its top. install: lines of shell. torch: the release that the
    lock was written with, as `2.13`. target: of the speed gate, "" for none.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    values = {"folder": folder, "prefix": f"{folder}/" if folder else "", "install": install, "python_version": python}
    return _render("ampcheck.yml.jinja", torch=torch, target=target, **values)
