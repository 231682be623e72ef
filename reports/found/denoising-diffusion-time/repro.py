import torch
from denoising_diffusion_pytorch.denoising_diffusion_pytorch import RandomOrLearnedSinusoidalPosEmb

PACKAGE, DTYPE, AUTOCAST, LIMIT = "denoising-diffusion-pytorch", torch.bfloat16, False, 0.2


def inputs(seed):
    torch.manual_seed(seed)
    return torch.randint(0, 1000, (64,)), torch.randn(8).to(DTYPE)  # steps, and the weights of the layer


def f(steps, weights):
    embedding = RandomOrLearnedSinusoidalPosEmb(16).to(weights.dtype)
    embedding.weights.data.copy_(weights)
    return embedding(steps)[:, 1:]  # sine and cosine, without the step itself


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
