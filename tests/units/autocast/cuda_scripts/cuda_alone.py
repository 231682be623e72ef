"""Loops that need CUDA itself: a package, a Triton kernel, an extension, an op that has a kernel on CUDA alone."""

import torch
from torch import nn

try:
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
except ImportError:
    double = None

library = torch.library.Library("ampcheck_kernels", "FRAGMENT")
if not hasattr(torch.ops.ampcheck_kernels, "twice"):
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CUDA")


def package():
    from flash_attn import flash_attn_func  # it fails here

    train(lambda x: flash_attn_func(x, x, x))


def kernel():
    def launch(x):
        double[(1,)](x, x.numel(), BLOCK=8)  # it fails here
        return x

    train(launch)


def extension():
    from torch.utils.cpp_extension import load_inline

    train(load_inline("x", cpp_sources="void f();", cuda_sources="__global__ void g() {}").f)  # it fails here


def op():
    train(lambda x: torch.ops.ampcheck_kernels.twice(x))  # it fails here


def later():
    train(lambda x: x, steps=3)
    op()


def train(function, steps=3):
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = function(model(torch.randn(2, 4, device="cuda"))).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
