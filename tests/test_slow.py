"""Slow tests are listed by name; a list of tests that are gone would leave nothing out."""

from __future__ import annotations

from pathlib import Path

LIST = Path(__file__).parent / "slow.txt"


def test_every_test_that_is_called_slow_is_there() -> None:
    named = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert named == sorted(set(named))
    for name in named:
        path, _, rest = name.partition("::")
        function = rest.partition("[")[0].split("::")[-1]
        assert f"def {function}(" in (LIST.parents[1] / path).read_text(encoding="utf-8"), name
