"""model.half() casts the noise schedule too; its last value becomes zero and sigma infinite.

Mechanism: the schedule is a buffer like any other; alphas_cumprod ends at 4.9e-9, below float16's smallest subnormal.
Source: https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/14071
Expected: overflow at `schedule`, in the division.
"""

import torch
from torch import nn

ID = "noise_schedule_half"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "schedule", "op": "aten::div.Tensor"}


class Schedule(nn.Module):
    def __init__(self, keep_float32):
        super().__init__()
        self.keep_float32 = keep_float32
        kept = torch.linspace(0.9991**0.5, 0.0683**0.5, 100).square()
        kept[-1] = 4.9e-9
        self.register_buffer("alphas_cumprod", kept)

    def _apply(self, fn, recurse=True):
        exact = self.alphas_cumprod
        super()._apply(fn, recurse)
        if self.keep_float32:
            self.alphas_cumprod = exact.to(self.alphas_cumprod.device)
        return self

    def forward(self, step):
        kept = self.alphas_cumprod[step]
        return ((1 - kept) / kept).sqrt()


class Denoiser(nn.Module):
    def __init__(self, keep_float32=False):
        super().__init__()
        torch.manual_seed(0)
        self.schedule, self.net = Schedule(keep_float32), nn.Linear(8, 8)

    def forward(self, latent, step):
        sigma = self.schedule(step)[:, None].float()
        return (latent - sigma * self.net(latent).float()) / (1 + sigma.square()).sqrt()


def inputs():
    return torch.ones(3, 8).half(), torch.tensor([0, 50, 99])


def buggy():
    return Denoiser().half(), inputs()


def fixed():
    return Denoiser(keep_float32=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args)[2].isfinite().any()
    assert fixed()[0](*args).isfinite().all()
