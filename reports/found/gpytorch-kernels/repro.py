import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel

PACKAGE, DTYPE, AUTOCAST, LIMIT = "gpytorch", torch.bfloat16, True, 0.2


def inputs(seed):
    torch.manual_seed(seed)
    return (100 * torch.rand(200, 1),)  # times of a series, float32, of 100 length scales


def f(x, kernel=RBFKernel):
    covariance = kernel().to(x.dtype)
    covariance.lengthscale = 1.0
    return covariance(x).to_dense()


FORMS = {
    "gpytorch.kernels.MaternKernel": lambda x: f(x, MaternKernel),
    "gpytorch.kernels.RQKernel": lambda x: f(x, RQKernel),
}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
