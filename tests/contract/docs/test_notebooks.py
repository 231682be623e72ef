"""The notebooks run from the first cell to the last."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[3] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore")  # of the kernel's own packages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs ampcheck[docs]")
    nbclient = pytest.importorskip("nbclient", reason="needs ampcheck[docs]")
    pytest.importorskip("ipykernel", reason="needs ampcheck[docs]")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    assert all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code")


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
