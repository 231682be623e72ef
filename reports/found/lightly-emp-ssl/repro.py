import torch
from lightly.loss import EMPSSLLoss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "lightly", torch.bfloat16, True, 0.2


def inputs(seed):
    torch.manual_seed(seed)
    z = torch.randn(64, 128)
    return z.to(DTYPE), (z + 0.1 * torch.randn(64, 128)).to(DTYPE)  # embeddings of a projection head


def f(a, b):
    return EMPSSLLoss()([a, b])


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
