"""The check compiled-dtype, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.core.run import Verdict
from checks.compile.records import error, stats, verdicts


def test_other_dtypes_shapes_or_containers_fail() -> None:
    eager = {"step 0": "tuple", "step 0, 0": "float32 [2]"}
    same = stats(error(), eager_shapes=eager, compiled_shapes=dict(eager))
    assert verdicts(same, "compiled-dtype") == [Verdict.PASS]
    for other in ({"step 0, 0": "bfloat16 [2]"}, {"step 0": "list"}, {"step 0, 1": "float32 [2]"}):
        differs = replace(same, compiled_shapes={**eager, **other})
        assert verdicts(differs, "compiled-dtype") == [Verdict.FAIL], other
