"""Where the CPU has no 16-bit kernel, an emulated device is not said to lack it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcheck import Verdict, audit, emulate
from ampcheck.autocast.missing import MissingKernels, lacks_kernel

VOLUME = torch.linspace(-2, 2, 64, dtype=torch.float16).reshape(1, 1, 4, 4, 4)


def lacking() -> bool:
    """Whether the installed PyTorch has no float16 kernel for this pooling on the CPU."""
    try:
        F.avg_pool3d(VOLUME, 2)
    except RuntimeError as error:
        return lacks_kernel(error)
    return False


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool3d(self.conv(x), 2)


def test_an_op_without_a_float16_kernel_runs_in_float32_and_is_rounded() -> None:
    if not lacking():
        pytest.skip("this PyTorch pools volumes in float16 on the CPU")
    with MissingKernels() as missing:
        pooled = F.avg_pool3d(VOLUME, 2)
    assert pooled.dtype is torch.float16
    assert torch.equal(pooled, F.avg_pool3d(VOLUME.float(), 2).half())
    assert missing.ran == {"aten::avg_pool3d": 1}


def test_other_errors_pass_through() -> None:
    with MissingKernels(), pytest.raises(RuntimeError, match="Low precision dtypes not supported"):
        torch.linalg.inv(torch.eye(3).half())


def test_what_no_device_has_in_16_bits_raises_as_it_does_there() -> None:
    with MissingKernels(), pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        torch.linalg.qr(torch.eye(3).half())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, which is used then")
def test_what_only_the_cpu_lacks_is_no_finding_about_cuda_and_is_told() -> None:
    if not lacking():
        pytest.skip("this PyTorch pools volumes in float16 on the CPU")
    run = audit((Pool(), VOLUME.float()), device="cuda", dtype="float16", compile=False)
    assert not run.of(Verdict.FAIL)
    assert any("avg_pool3d" in reason and "rounded" in reason for reason in run.coverage.unseen)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_recurrent_layers_run_in_16_bits_as_cudnn_runs_them(layer: type[nn.RNNBase], dtype: torch.dtype) -> None:
    """The CPU's own autocast has other rules for them, and no float16 kernel."""
    torch.manual_seed(0)
    made, x = layer(8, 8), torch.randn(5, 2, 8)
    with emulate("cuda", release="2.13"), torch.autocast("cuda", dtype):
        out, _ = made(x)
        out.float().sum().backward()
    assert out.dtype is dtype
    assert (out.float() - made(x)[0]).norm() < 0.02 * out.float().norm()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in made.parameters())
