import torch
from rff.layers import GaussianEncoding

PACKAGE, DTYPE, AUTOCAST, LIMIT = "random-fourier-features-pytorch", torch.bfloat16, True, 0.4


def inputs(seed):
    torch.manual_seed(seed)
    return (torch.rand(1000, 3),)  # points in a cube, float32


def f(points):
    torch.manual_seed(0)
    return GaussianEncoding(sigma=30.0, input_size=3, encoded_size=256).to(points.dtype)(points)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
