import torch
from vector_quantize_pytorch import VectorQuantize

PACKAGE, DTYPE, AUTOCAST, LIMIT = "vector-quantize-pytorch", torch.bfloat16, True, 0.08


def inputs(seed):
    torch.manual_seed(seed)
    return 2 + 0.3 * torch.randn(2, 256, 32), 2 + 0.3 * torch.randn(1, 512, 32)  # features and codes


def f(x, codes):
    quantizer = VectorQuantize(dim=32, codebook_size=512).to(x.dtype).eval()
    quantizer._codebook.embed.data.copy_(codes)
    return quantizer(x)[0]


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
