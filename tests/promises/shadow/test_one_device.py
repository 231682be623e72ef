"""Promise: FSDP2 on a single device is followed, and its run is bit for bit as without a shadow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import needs_gloo

pytestmark = needs_gloo

WORKER = """
import contextlib, json, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from ampcheck.shadow import Shadow

device, store = sys.argv[1:]
backend = "nccl" if device == "cuda" else "gloo"
dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
mesh = init_device_mesh(device, (1,))

def trained(around):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).to(device)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = torch.randn(8, 16, device=device)
    with around:
        for _ in range(3):
            optimizer.zero_grad()
            model(data).float().square().mean().backward()
            optimizer.step()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]

plain = trained(contextlib.nullcontext())
followed = trained(shadow := Shadow())
print(json.dumps({
    "same": all(map(torch.equal, plain, followed)),
    "faults": [fault.kind for fault in shadow.faults],
    "unruled": dict(shadow.unruled),
}))
dist.destroy_process_group()
"""


@pytest.mark.needs_torch("2.9", "FSDP2 runs on the CPU")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.usefixtures("warm_processes")
def test_three_steps_of_fsdp_on_one_device(device: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", WORKER, device, str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"same": True, "faults": [], "unruled": {}}
