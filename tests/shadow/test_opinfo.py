"""Promise: exact is what a float64 run of the same call gives, for the operators of OpInfo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from opinfo_shadows import STATUS, entries, row  # noqa: E402

WRONG = set(STATUS[: STATUS.index("unverified")])
"""What a row must not say."""

NAMES = (
    "add addbmm addmm aminmax angle bernoulli cat clamp clone cummax cumsum div dropout exp expand fft.ifft fft.rfft2 "
    "floor_divide fmod frac frexp gather index_put index_select kthvalue linalg.eig linalg.inv linalg.lu_factor "
    "linalg.solve log_softmax logsumexp masked_fill masked_select matmul max median mode msort mul native_batch_norm "
    "nn.functional.adaptive_max_pool2d nn.functional.batch_norm nn.functional.conv2d nn.functional.embedding_bag "
    "nn.functional.gelu nn.functional.grid_sample nn.functional.group_norm nn.functional.hardswish "
    "nn.functional.layer_norm nn.functional.max_pool2d nn.functional.prelu nn.functional.rrelu "
    "nn.functional.scaled_dot_product_attention normal polar pow remainder resize_ round scatter_reduce sgn sort stft "
    "sum take_along_dim to topk unique var view_as_complex where _foreach_addcmul _foreach_norm _foreach_sign"
).split()
"""A rule of every family, and the commonest ops without one."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_exact_is_what_float64_gives(name: str) -> None:
    rows = [
        row(op, low, form, limit=1, seconds=0)
        for op in entries([name])
        for low in (torch.float32, torch.bfloat16)
        for form in ("function", "inplace", "out")
    ]
    assert rows
    assert [r for r in rows if r["status"] in WRONG] == []


@pytest.mark.slow
def test_every_operator_is_followed_or_counted(tmp_path: Path) -> None:
    table = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "opinfo_shadows.py"), f"--json={table}", "--samples=3"]
    subprocess.run(command, check=True)
    rows = json.loads(table.read_text())["rows"]
    assert len(rows) > 700
    wrong = {r["op"] for r in rows for cell in r["forms"].values() if cell.split(",")[0] in WRONG}
    assert wrong == set()
