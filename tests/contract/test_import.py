"""What `import ampcheck` gives, and what it must not cost."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

import ampcheck

PACKAGE = Path(ampcheck.__file__).parent
HEAVY = ("torch", "numpy", "scipy", "matplotlib", "jinja2", "rich", "hypothesis", "triton")
COMPILER = ("torch._dynamo", "torch._inductor", "sympy", "triton")
LIGHT = (
    "ampcheck",
    "ampcheck.core.errors",
    "ampcheck.core.run",
    "ampcheck.autocast.locks.file",
    "ampcheck.plugin.plugin",
    "ampcheck.plugin.marker",
    "ampcheck.plugin.speed_fixture",
    "ampcheck.plugin.summary",
)
FILES = [
    *(path.relative_to(PACKAGE) for folder in ("core", "plugin") for path in (PACKAGE / folder).glob("*.py")),
    *map(Path, ("__init__.py", "autocast/__init__.py", "autocast/policy.py")),
    *map(Path, ("autocast/locks/__init__.py", "autocast/locks/file.py", "records/__init__.py", "records/policy.py")),
]


def heavy_imports(statement: str, folder: Path | None = None, heavy: Collection[str] = HEAVY) -> set[str]:
    """The heavy packages that a fresh interpreter, started in `folder`, has imported after `statement`."""
    program = f"{statement}\nimport sys; print(*set({heavy}).intersection(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the light modules and an empty torch: started there, Python imports these."""
    for name in FILES:
        (tmp_path / "ampcheck" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, tmp_path / "ampcheck" / name)
    (tmp_path / "torch.py").touch()
    return tmp_path


def test_importing_the_package_and_its_plugin_imports_nothing_heavy() -> None:
    assert heavy_imports(f"import {', '.join(LIGHT)}") == set()


def test_using_the_record_imports_nothing_heavy() -> None:
    assert heavy_imports("import ampcheck; ampcheck.Run().to_json(); ampcheck.__version__; dir(ampcheck)") == set()


def test_an_eager_audit_imports_no_part_of_the_compiler() -> None:
    """Dynamo takes a second to import, SymPy half of one."""
    subject = "from torch import nn, ones; subject = (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (ones(2, 4),))"
    run = "import ampcheck; run = ampcheck.audit(subject, compile=False); assert run.coverage.seen['gradients']"
    # Of these PyTorch 2.6 imports parts of the compiler itself, and later releases nothing.
    own = heavy_imports("import torch.utils.checkpoint, torch._functorch.config", heavy=COMPILER)
    assert heavy_imports(f"{subject}\n{run}", heavy=COMPILER) <= own
    assert not own & {"torch._dynamo", "triton"}


def test_a_copy_of_the_package_is_as_light(copied: Path) -> None:
    statement = f"import {', '.join(LIGHT)}; assert ampcheck.__file__.startswith({str(copied)!r})"
    assert heavy_imports(statement, copied) == set()


@pytest.mark.parametrize("name", ["__init__.py", "core/errors.py", "plugin/plugin.py", "plugin/marker.py"])
def test_a_planted_import_of_torch_is_seen(copied: Path, name: str) -> None:
    module = copied / "ampcheck" / name
    module.write_text(module.read_text(encoding="utf-8") + "\nimport torch\n", encoding="utf-8")
    assert heavy_imports(f"import {', '.join(LIGHT)}", copied) == {"torch"}


# Public names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ampcheck.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(ampcheck, name)
    if name != "__version__":
        assert value is getattr(importlib.import_module(f"ampcheck.{ampcheck._MODULES[name]}"), name)


@pytest.mark.parametrize("name", ampcheck._MODULES)
def test_a_public_name_is_defined_where_the_table_says(name: str) -> None:
    assert getattr(ampcheck, name).__module__ == f"ampcheck.{ampcheck._MODULES[name]}"


def test_the_three_lists_of_public_names_are_the_same() -> None:
    assert declared() == {name: f"ampcheck.{module}" for name, module in ampcheck._MODULES.items()}
    assert set(ampcheck.__all__) == {*ampcheck._MODULES, "__version__"}


def declared() -> dict[str, str]:
    """Name to module, as `if TYPE_CHECKING` of the package imports them."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    names = [(alias, str(node.module)) for node in imports for alias in node.names]
    assert all(alias.asname == alias.name for alias, _ in names)  # or mypy takes them for private
    return {alias.name: module for alias, module in names}


def test_nothing_public_is_missing() -> None:
    """The asserts are the main API: each one, wherever it is defined, is a public name of the package."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    functions = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for name in functions if name.startswith("assert_")} <= set(ampcheck.__all__)


def test_a_module_does_not_hide_the_public_name_it_shares() -> None:
    """Importing `ampcheck.x` sets the attribute `x` of the package to the module, in any package but this."""
    names = sorted({module.name for module in pkgutil.iter_modules([str(PACKAGE)])} & set(ampcheck.__all__))
    assert {"audit", "watch"} <= set(names)
    lines = (f"import ampcheck.{n}; assert ampcheck.{n} is sys.modules['ampcheck.{n}'].{n}, {n!r}" for n in names)
    subprocess.run([sys.executable, "-c", "\n".join(["import sys", *lines])], check=True, timeout=120)


def test_a_module_that_shares_no_name_is_an_attribute_as_ever() -> None:
    assert ampcheck.core.run is importlib.import_module("ampcheck.core.run")


def test_dir_lists_every_public_name() -> None:
    assert set(ampcheck.__all__) <= set(dir(ampcheck))


def test_a_star_import_gives_every_public_name() -> None:
    names: dict[str, object] = {}
    exec("from ampcheck import *", names)
    assert set(ampcheck.__all__) <= names.keys()


@pytest.mark.parametrize("name", ["Runn", "assert_dtype", "torch", "_missing"])
def test_a_misspelt_name_is_an_attribute_error_with_the_modules_name(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'ampcheck' has no attribute '{name}'"):
        getattr(ampcheck, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'ampcheck'"):
        exec(f"from ampcheck import {name}")


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert ampcheck.__version__ == version("ampcheck")
