"""The fixture `golden`: results that are compared with a file, by their exact values."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict
from ampcheck.outcome.raising import verify
from ampcheck.parity.golden import judge_golden

FOLDER = "goldens"
"""The folder of the files, beside the test files."""


class GoldenChecks:
    """Compares results with `goldens/test_file.json` beside the test file; `--ampcheck-update` writes them."""

    def __init__(self, item: pytest.Item) -> None:
        self._path = item.path.parent / FOLDER / f"{Path(item.path).stem}.json"
        self._test = item.nodeid.partition("::")[2].replace("::", ".")

    def check(self, name: str, function: Any, *args: Any, **kwargs: Any) -> Run:
        """Run `function(*args, **kwargs)` and compare what it returns, and its gradients, with the golden `name`.

            def test_logits(golden):
                golden.check("logits", model, tokens)

        function: a module or function of tensors. Raises `AssertionError` where exact values are not those that were
        recorded, or the run is further from them than its roundings explain, and `UsageError` for what returns no
        tensor.
        """
        __tracebackhide__ = True

        if not callable(function):
            raise UsageError(
                f"golden.check takes what computes the result, as golden.check({name!r}, model, inputs), and runs it "
                f"in float64 too; found {type(function).__name__}"
            )
        run = verify(judge_golden(self._path, f"{self._test}: {name}", function, args, kwargs))
        for finding in run.of(Verdict.UNDECIDED):  # which fails nothing, and must not look like a pass
            warnings.warn(
                f"golden {finding.subject} is undecided: {finding.message}", pytest.PytestWarning, stacklevel=2
            )
        return run
