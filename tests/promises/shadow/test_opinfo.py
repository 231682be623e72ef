"""Promise: exact is what a float64 run of the same call gives, for the operators of OpInfo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FORMATS = ("float32", "bfloat16", "float16", "?")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from opinfo_shadows import STATUS, entries, row  # noqa: E402

WRONG = set(STATUS[: STATUS.index("left the run (counted)")])
"""What a row must not say."""

SHORT = (
    "addbmm aminmax bernoulli clone cummax frac frexp index_put kthvalue masked_select median mode mul "
    "native_batch_norm nn.functional.adaptive_max_pool2d nn.functional.dropout nn.functional.embedding_bag "
    "nn.functional.hardswish nn.functional.layer_norm nn.functional.max_pool1d nn.functional.prelu "
    "nn.functional.rrelu nn.functional.scaled_dot_product_attention remainder resize_ sort topk unique where "
    "_foreach_sign"
).split()
WIDE = "fft.ifft linalg.eig linalg.inv linalg.lu_factor linalg.solve polar sgn view_as_complex".split()
"""Operators of every family of rules, and the commonest ones without; those of `WIDE` have no kernel in 16 bits."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHORT + WIDE)
def test_exact_is_what_float64_gives(name: str) -> None:
    rows = [
        row(op, torch.float32 if name in WIDE else torch.bfloat16, form, limit=2, seconds=0)
        for op in entries([name])
        for form in ("function", "inplace", "out")
    ]
    assert rows
    assert [r for r in rows if r["status"] in WRONG] == []


def test_every_operator_is_followed_or_counted(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [sys.executable, str(BENCHMARKS / "opinfo_shadows.py"), f"--json={table}", "--samples=3"]
    subprocess.run(command, check=True)
    operators = json.loads(table.read_text())["operators"]
    assert len(operators) > 700
    wrong = [o for o in operators if any(str(o.get(key)).rpartition(" ")[0] in WRONG for key in FORMATS)]
    assert wrong == []
