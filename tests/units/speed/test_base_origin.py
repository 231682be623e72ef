"""Whose code a side runs: copies that are installed, coincidences of names, and a Python in /usr."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from ampcheck.core.worker import Worker
from ampcheck.speed.base.checkout import Sources, describe_idle, describe_strays, is_inside, is_installed, own_files

ROOT = Path("/work/tree")
SITE = "/opt/env/lib/python3.11/site-packages"
FILES = (
    "check_model.py",
    "packages/foo/src/foo/__init__.py",
    "packages/foo/src/foo/model.py",
    "third_party/yaml/__init__.py",
    "tools/six.py",
    "research/datasets/__init__.py",
    "README.md",
)


def strays(loaded, changed=(), files=FILES):
    return Sources.of(files).strays(loaded, ROOT, changed)


def test_a_package_that_is_installed_as_a_copy_is_found_with_its_source():
    loaded = {"foo": f"{SITE}/foo/__init__.py", "foo.model": f"{SITE}/foo/model.py", "check_model": f"{ROOT}/c.py"}
    found = strays(loaded)
    assert found == {"foo": "packages/foo/src/foo/__init__.py", "foo.model": "packages/foo/src/foo/model.py"}
    told = describe_strays(found, loaded)
    assert told.startswith("foo and 1 more of the repository's modules must be imported from the checkout that is")
    assert f"came from {SITE}/foo/__init__.py" in told
    assert told.endswith("put its folder (packages/foo/src) on PYTHONPATH")
    assert "(packages/foo/src) on" in describe_strays({"foo.model": found["foo.model"]}, loaded)


def test_what_comes_from_the_checkout_is_no_stray():
    loaded = {"foo": f"{ROOT}/packages/foo/src/foo/__init__.py", "check_model": f"{ROOT}/check_model.py"}
    assert strays(loaded) == {}
    assert own_files(loaded, ROOT) == {"packages/foo/src/foo/__init__.py", "check_model.py"}


@pytest.mark.parametrize(
    "loaded",
    [
        {"yaml": f"{SITE}/yaml/__init__.py"},
        {"six": f"{SITE}/six.py"},
        {f"datasets{one}": f"{SITE}/datasets/{one[1:] or '__init__'}.py" for one in ("", ".table", ".arrow")},
        {"foo.model": f"{SITE}/foo/model.cpython-311.so"},
        {"ampcheck": f"{SITE}/ampcheck/__init__.py"},
        {"model": f"{SITE}/model.py"},
    ],
    ids=["somebody else's", "a lone module", "another of the name", "built", "ours", "inside a package"],
)
def test_a_name_that_both_have_is_no_proof(loaded):
    assert strays(loaded, files=(*FILES, "ampcheck/__init__.py")) == {}


def test_what_changed_counts_wherever_it_lies():
    assert strays({"six": f"{SITE}/six.py"}, changed=("tools/six.py",)) == {"six": "tools/six.py"}
    changed = ("third_party/yaml/__init__.py",)
    assert strays({"yaml": f"{SITE}/yaml/__init__.py"}, changed) == {"yaml": changed[0]}


def test_names_are_those_that_an_import_may_have():
    assert set(Sources.of(FILES).names) >= {"check_model", "foo", "yaml", "six", "datasets"}
    assert not {"model", "__init__", "README", "ampcheck"} & set(Sources.of((*FILES, "ampcheck/a.py")).names)


def test_a_change_that_nobody_imported_is_named():
    assert describe_idle({"a.py", "b.md"}, {"a.py"}) == ""
    assert describe_idle((), {"a.py"}) == ""
    assert describe_idle({"b.md"}, {"a.py"}) == "neither side imported the file that differs (b.md)"
    many = describe_idle({f"{one}.md" for one in "abcde"}, ())
    assert many == "neither side imported the 5 files that differ (a.md, b.md, c.md and 2 more)"


def test_a_repository_below_the_prefix_of_python_is_not_installed(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/usr/lib/python3.11")
    app = Path("/usr/src/app")
    assert not is_installed(app / "src", app)
    assert is_inside("/usr/src/app/src/model.py", app)
    assert not is_inside("/usr/lib/python3.11/json/__init__.py", Path("/usr"))
    for place in ("lib/python3/dist-packages/foo.py", ".venv/lib/python3.11/site-packages/foo.py"):
        assert is_installed(app / place, app)


def test_a_process_that_imports_a_copy_tells_so(tmp_path):
    """As `pip install .` leaves it: the package lies in site-packages, the target beside its source."""
    source = "from torch import nn\nimport torch\n\ndef make(): return nn.Linear(4, 4).eval(), torch.ones(1, 4)\n"
    root = tmp_path / "tree"
    for folder in (root / "packages" / "foo" / "src" / "foo", tmp_path / "site-packages" / "foo"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "model.py").write_text(source)
    (root / "check_model.py").write_text("from foo.model import make\n")
    files = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    sources, env = Sources.of(files), {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "site-packages")}
    with Worker(
        "ampcheck.speed.base.child_process:Launch", name="head", cwd=root, env=env, pythonpath=[root]
    ) as worker:
        given = {"target": "check_model.py:make", "root": str(root), "repository": str(root), "device": "cpu"}
        worker.ask("load", **given, mode=None, precision=None)
        loaded = worker.ask("modules", root=str(root), names=sources.names)
        assert not worker.ask("modules", root="/no", names=["sympy", "scipy"]), "they take longer than PyTorch"
        worker.kill()
    assert sources.strays(loaded, root, ()).keys() == {"foo", "foo.model"}
    assert own_files(loaded, root) == {"check_model.py"}
    assert "torch" not in loaded
