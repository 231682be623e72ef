"""A minimised failure as a test file that runs by itself: it fails until the model is mended."""

from __future__ import annotations

import inspect
import numbers
import os
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from ampcheck import parity
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.files import write_atomically
from ampcheck.core.formats import format_of
from ampcheck.parity.example import Example
from ampcheck.records.property import COMPILED, INVARIANCE, Breaking
from ampcheck.search.evaluate import Evaluator
from ampcheck.strategies import as_code
from ampcheck.torchtools.pytree import tensors

LITERAL = 256
"""Elements up to which an example stands in the test itself; a larger one is saved beside it."""

_KNOWN = {
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "math": "import math",
    "nn": "from torch import nn",
}


class _Unwritable(Exception):  # noqa: N818  # a reason, which the finding gives
    """Why the model or an invariance cannot be named in a file."""


def write_test(
    folder: str | os.PathLike[str],
    model: Callable[..., Any],
    evaluator: Evaluator,
    breaking: Breaking,
    seed: int,
) -> Breaking:
    """Write `test_<name>_<format>_<kind>.py` into `folder`, which is made.

    A module, with its weights, and a large example are saved beside it. Gives the breaking with the path of the test,
    or with the reason why there is none.
    """
    target, problem = Path(folder), breaking.problem
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"reproduce must be a folder that can be written to; {folder} gives {brief(error)}") from error
    name = re.sub(r"\W+", "_", evaluator.runner.subject.name).strip("_").lower() or "model"
    fmt = format_of(evaluator.runner.dtype).name
    path = target / f"test_{name}_{fmt}_{problem.kind}.py"
    try:
        lines, expression = _model(model, path)
        options = [f'dtype="{fmt}"', f"compile={problem.kind == COMPILED}", "options=SearchOptions(examples=1)"]
        if evaluator.runner.device != "cpu":
            options.append(f"device={evaluator.runner.device!r}")
        if problem.kind == INVARIANCE:
            names = sorted({type(one).__name__ for one in evaluator.invariances})
            lines.append(f"from ampcheck.parity import {', '.join(names)}")
            options.append(f"invariances=({', '.join(map(_declared, evaluator.invariances))},)")
        value, setup = _example(breaking.example, path)
        text = _TEMPLATE.format(
            what=f"{problem.kind} of {evaluator.runner.subject.name} in {fmt}",
            seed=seed,
            found=breaking.found_after,
            imports="\n".join(dict.fromkeys(lines)),
            name=f"{name}_{fmt}_{problem.kind}",
            setup=setup,
            value=value,
            model=expression,
            options=", ".join(options),
        )
    except _Unwritable as reason:
        return replace(breaking, unwritten=str(reason))
    write_atomically(path, text)
    return replace(breaking, file=os.path.relpath(path))


_TEMPLATE = '''"""Found by ampcheck: {what} (seed {seed}, after {found} examples). Fails until it is mended."""

{imports}


def test_{name}():
{setup}    example = {value}
    assert_property({model}, st.just(example), {options})
'''


def _model(model: Callable[..., Any], path: Path) -> tuple[list[str], str]:
    """Import lines, or code, and the expression that gives the model."""
    lines = [
        "import torch",
        "from hypothesis import strategies as st",
        "from ampcheck import assert_property",
        "from ampcheck.search import SearchOptions",
    ]
    if isinstance(model, torch.nn.Module):
        kind = type(model)
        home = _importable(kind)
        if not home:
            raise _Unwritable(f"{kind.__qualname__} cannot be imported by name")
        beside = path.with_suffix(".model.pt")
        try:
            torch.save(model, beside)
        except BaseException as error:  # whatever a part refuses pickling with
            raise _Unwritable(f"the model cannot be saved: {brief(as_result(error))}") from error
        load = f'torch.load(Path(__file__).with_name("{beside.name}"), weights_only=False)'
        return ["from pathlib import Path", *_reaching(kind, path), *lines], load
    if home := _importable(model):
        found, _, attribute = home.rpartition(".")
        top = attribute
        return [*_reaching(model, path), *lines, f"from {found} import {top}"], attribute
    return [*lines, *_source(model)], getattr(model, "__name__", "model")


def _importable(value: object) -> str:
    """`module.name` under which an import finds the same object; "" where there is none."""
    name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
    for module in (getattr(value, "__module__", None), "torch", "torch.nn.functional"):
        if module and module != "__main__" and getattr(sys.modules.get(module), name, None) is value:
            return f"{module}.{name}"
    return ""


def _reaching(value: object, path: Path) -> list[str]:
    """Lines that let the test import the user's module from the folder that it stands in, relative to the test."""
    module = sys.modules.get(getattr(value, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return []
    root = Path(file).resolve().parent
    for _ in range(module.__name__.count(".") + (Path(file).name == "__init__.py")):
        root = root.parent
    installed = [Path(place).resolve() for place in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))]
    if any(root == place or place in root.parents for place in installed):
        return []
    relative = os.path.relpath(root, path.resolve().parent)
    return ["import sys", "from pathlib import Path", f'sys.path.insert(0, str(Path(__file__).parent / "{relative}"))']


def _source(model: Callable[..., Any]) -> list[str]:
    """The code of a function that no import finds, if it needs nothing but torch."""
    if not inspect.isfunction(model):
        kind = type(model).__name__
        raise _Unwritable(f"a {kind} cannot be imported by name; give a function at the top of a module")
    code = model.__code__
    if code is None or code.co_freevars or code.co_name == "<lambda>":
        raise _Unwritable("the function cannot be imported by name; define it at the top of a module")
    used = {name: model.__globals__[name] for name in _names(code) if name in getattr(model, "__globals__", {})}
    if unknown := sorted(set(used) - set(_KNOWN)):
        raise _Unwritable(f"the function cannot be imported by name, and its source needs {', '.join(unknown)}")
    try:
        source = textwrap.dedent(inspect.getsource(model))
    except (OSError, TypeError) as error:
        raise _Unwritable("the function cannot be imported by name, and its source is not known") from error
    lines = [*(_KNOWN[name] for name in used), "\n", source.rstrip()]
    try:  # a decorator, a default or an annotation may need what the body does not
        exec(compile("\n".join(["import torch", *lines]), "<reproduced>", "exec"), {"__name__": "reproduced"})
    except BaseException as error:
        raise _Unwritable(
            f"the function cannot be imported by name, and its source raises {brief(as_result(error))}"
        ) from error
    return lines


def _names(code: CodeType) -> set[str]:
    """Names that a function and the functions inside it look up."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def _declared(one: Any) -> str:
    values = {field.name: _number(getattr(one, field.name)) for field in fields(one)} if is_dataclass(one) else {}
    if getattr(parity, type(one).__name__, None) is not type(one) or any(map(callable, values.values())):
        raise _Unwritable(f"the invariance {one.name!r} is the user's own")
    return f"{type(one).__name__}({', '.join(f'{name}={as_code(value)}' for name, value in values.items())})"


def _number(value: object) -> Any:
    """Python's own number in the place of numpy's, which brings a name that the test does not import."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _example(example: Example, path: Path) -> tuple[str, str]:
    """The expression for the example, and the lines before it."""
    held = (example.args, dict(example.kwargs))
    if sum(tensor.numel() for _, tensor in tensors(held)) <= LITERAL:
        return as_code(held if example.kwargs else example.args), ""
    beside = path.with_suffix(".example.pt")
    torch.save(held, beside)
    return (
        f'torch.load(Path(__file__).with_name("{beside.name}"), weights_only=False)',
        "    from pathlib import Path\n\n",
    )
