"""A context around a module starts where the module is imported, inside the block or before it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ampcheck.shadow import Shadow
from ampcheck.torchtools.patching import once_imported

NAME = "imported_late"


@pytest.fixture(autouse=True)
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported, and that has not been."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"{NAME}.py"
    file.write_text("import torch\nvalue = torch.ones(2) + 1\n")
    yield file
    sys.modules.pop(NAME, None)


def recorded(log: list[str], label: str = "") -> Callable[[ModuleType], object]:
    @contextmanager
    def enter(module: ModuleType) -> Iterator[None]:
        log.append(f"enter {label}{module.value.tolist()}")
        yield
        log.append(f"exit {label}")

    return enter


def test_it_is_entered_when_the_module_is_imported_and_left_with_the_block() -> None:
    log: list[str] = []
    with once_imported(NAME, recorded(log)):
        assert log == []
        importlib.import_module(NAME)
        assert log == ["enter [2.0, 2.0]"]
    assert log == ["enter [2.0, 2.0]", "exit "]


def test_it_is_entered_at_once_where_the_module_is_imported() -> None:
    log: list[str] = []
    importlib.import_module(NAME)
    with once_imported(NAME, recorded(log)):
        assert log == ["enter [2.0, 2.0]"]


def test_several_blocks_wait_for_one_module() -> None:
    log: list[str] = []
    with once_imported(NAME, recorded(log, "a ")), once_imported(NAME, recorded(log, "b ")):
        importlib.import_module(NAME)
    assert log == ["enter a [2.0, 2.0]", "enter b [2.0, 2.0]", "exit b ", "exit a "]


@pytest.mark.parametrize("imports", [False, True])
def test_nothing_is_left_of_it(imports: bool) -> None:
    before = list(sys.meta_path)
    log: list[str] = []
    with once_imported(NAME, recorded(log)):
        if imports:
            importlib.import_module(NAME)
    assert sys.meta_path == before
    importlib.import_module(NAME)
    assert len(log) == 2 * imports


def test_a_module_that_raises_is_not_entered(module_file: Path) -> None:
    module_file.write_text("raise ValueError('broken')")
    log: list[str] = []
    with once_imported(NAME, recorded(log)):
        with pytest.raises(ValueError, match="broken"):
            importlib.import_module(NAME)
        assert log == []
        module_file.write_text("import torch\nvalue = torch.zeros(1)\n")
        importlib.invalidate_caches()
        importlib.import_module(NAME)
    assert log == ["enter [0.0]", "exit "]


def test_the_ops_of_the_module_itself_are_none_of_the_block() -> None:
    with Shadow() as shadow, ExitStack() as stack:
        stack.enter_context(once_imported(NAME, recorded([])))
        importlib.import_module(NAME)
        assert shadow.ops == 0
        torch.ones(2)
        assert shadow.ops == 1
