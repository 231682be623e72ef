"""A function compiled under emulation follows the device's policy, and no compiled code outlives its emulation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ampcheck.autocast.emulate import Emulation, emulate, emulated_policy

FUSED = """
import torch
from ampcheck import emulate

def fused(x):  # the CPU casts it since 2.6
    return torch.ops.aten._addmm_activation(x[0], x, x)

def compiled():
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.float16):
        print(torch.compile(fused, fullgraph=True)(torch.ones(2, 2)).dtype)

"""


def product_and_exp(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return (x @ w).exp()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_function_compiled_before_inside_and_after_follows_the_policy_of_the_moment(backend: str) -> None:
    function = torch.compile(product_and_exp, backend=backend, fullgraph=True)

    def call() -> tuple[torch.dtype, Tensor]:
        x, w = torch.ones(2, 2) / 4, torch.ones(2, 2, requires_grad=True)
        out = function(x, w)
        out.float().sum().backward()
        assert w.grad is not None
        return out.dtype, w.grad

    before, (inside, gradient), after = call()[0], (torch.float32, torch.empty(0)), None
    with emulate("cuda"):
        inside, gradient = call()
    after, _ = call()
    assert (before, inside, after) == (torch.float16, torch.float32, torch.float16)
    w = torch.ones(2, 2, requires_grad=True)
    with emulate("cuda"):
        product_and_exp(torch.ones(2, 2) / 4, w).sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(gradient, w.grad, rtol=2e-3, atol=0)


def test_a_region_around_the_compiled_call_and_one_for_the_device_work_alike() -> None:
    function = torch.compile(lambda x: (x @ x).exp(), backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 2)
    with emulate("cuda"):
        for region in (torch.autocast("cpu", torch.float16), torch.autocast("cuda", torch.float16)):
            with region:
                assert function(x).dtype is torch.float32
                assert (x @ x).dtype is torch.float16
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.compile(torch.mm, backend="aot_eager")(x, x).dtype is torch.bfloat16


def test_a_region_for_the_device_inside_the_compiled_function_is_no_graph_break() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return x @ x

    with emulate("cuda"):
        assert torch.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(2, 2)).dtype is torch.float16


def test_every_op_by_python_kernels_compiles_to_the_same_bits_as_by_pytorchs() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.layer_norm(torch.cat([x @ w, x]), (4,)).softmax(-1)

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
        out = torch.compile(function, backend="aot_eager", fullgraph=True)(x, w)
        out.square().sum().backward()
        assert w.grad is not None
        return [out.detach(), w.grad]

    native = run()
    with Emulation(emulated_policy("cpu"), observe=lambda *call: None):
        ours = run()
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(native, ours, strict=True))


def test_processes_that_share_inductors_cache_do_not_share_an_emulated_graph(tmp_path: Path) -> None:
    # Without `enable_autograd_cache=False` all four are float32: AOTAutograd's key does not know of our kernels.
    emulated = "with emulate('cpu', release='2.4'): compiled()\n"
    assert printed(tmp_path, emulated + "compiled()\n") == ["torch.float32", "torch.float16"]
    assert printed(tmp_path, "compiled()\n" + emulated) == ["torch.float16", "torch.float32"]


def printed(cache: Path, steps: str) -> list[str]:
    """What a fresh process prints that compiles into this cache."""
    (cache / "steps.py").write_text(FUSED + steps, encoding="utf-8")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, str(cache / "steps.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
