"""A test that was written down says again what was found."""

from __future__ import annotations

import importlib
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ampcheck import assert_property
from ampcheck.search import BatchOrder, Padding, Scale, SearchOptions, Shift
from ampcheck.search.reproduce import _declared
from ampcheck.strategies import tensors

SOFTMAX = "def plain_softmax(x):\n    e = x.exp()\n    return e / e.sum(-1, keepdim=True)\n"


def test_a_padding_by_minus_infinity_is_written_so_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "softmaxes.py").write_text(SOFTMAX)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("softmaxes").plain_softmax
    declared = Padding(value=-math.inf), Shift(12.0)
    inputs = tensors("float16", shape=3, min_value=-4, max_value=4)
    try:
        with pytest.raises(AssertionError, match="shift by 12"):
            assert_property(
                model,
                inputs=inputs,
                invariances=declared,
                compile=False,
                options=SearchOptions(examples=5, reproduce=tmp_path / "found"),
            )
        (written,) = (tmp_path / "found").glob("test_*.py")
        assert "Padding(" in written.read_text()
        (test,) = (value for name, value in runpy.run_path(str(written)).items() if name.startswith("test_"))
        with pytest.raises(AssertionError, match="shift by 12"):
            test()
    finally:
        del sys.modules["softmaxes"]


@pytest.mark.parametrize(
    "one",
    [
        BatchOrder(dim=1, inputs=(0, "mask")),
        Scale(factor=0.1, degree=-1.0, inputs=["x"]),
        Shift(amount=-1e-300, result=2.0),
        Padding(dim=0, count=3, value=math.inf),
        Padding(value=-math.inf),
        Padding(count=np.int64(2), value=np.float64(1.5)),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_an_invariance_comes_back_from_its_code(one: BatchOrder | Scale | Shift | Padding) -> None:
    names = {"torch": torch, "BatchOrder": BatchOrder, "Padding": Padding, "Scale": Scale, "Shift": Shift}
    assert eval(_declared(one), names) == one
