import torch
from encodec.quantization.core_vq import EuclideanCodebook

PACKAGE, DTYPE, AUTOCAST, LIMIT = "encodec", torch.bfloat16, True, 0.1


def inputs(seed):
    torch.manual_seed(seed)
    return 3 + torch.randn(1, 200, 128), 3 + torch.randn(1024, 128)  # features, and codes as training gives them


def f(x, codes):
    codebook = EuclideanCodebook(dim=128, codebook_size=1024, kmeans_init=False).to(x.dtype).eval()
    codebook.embed.data.copy_(codes)
    return codebook(x)[0]


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
