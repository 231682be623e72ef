"""Run a script on several ranks of gloo: what torchrun does, with processes that start warm.

test_distributed_audit.py and test_unequal_ranks.py start torchrun itself, as users do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist
from warm_processes import warm

has_gloo = dist.is_available() and dist.is_gloo_available()
needs_gloo = pytest.mark.skipif(not has_gloo, reason="this PyTorch has no gloo")

SECONDS = 240


def run_ranks(script: Path, *arguments: str, ranks: int = 2) -> None:
    """Run a script that calls `init_process_group("gloo")`. It must end with exit code 0 on every rank."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # where the ranks meet
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # that store; without it rank 0 opens one
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    with ExitStack() as stack, warm():
        processes = []
        for rank in map(str, range(ranks)):
            printed = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**environment, "RANK": rank, "LOCAL_RANK": rank},
                stdout=printed,
                stderr=printed,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append((process, printed))
        for process, printed in processes:
            status = process.wait(SECONDS)
            printed.seek(0)
            assert status == 0, printed.read()[-4000:]
