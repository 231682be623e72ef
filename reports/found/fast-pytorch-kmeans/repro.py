import torch
from fast_pytorch_kmeans import KMeans

PACKAGE, DTYPE, AUTOCAST, LIMIT = "fast-pytorch-kmeans", torch.bfloat16, True, 0.1


def inputs(seed):
    torch.manual_seed(seed)
    centres = 5 + 0.3 * torch.randn(16, 32)
    return centres.repeat_interleave(64, 0) + 0.1 * torch.randn(1024, 32), centres  # 16 clusters, and their centres


def f(x, centres):
    kmeans = KMeans(n_clusters=16, mode="euclidean", max_iter=20)
    labels = kmeans.fit_predict(x.detach(), centroids=centres.detach().clone())
    return (x.detach() - kmeans.centroids[labels]).square().sum(1).mean()


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
