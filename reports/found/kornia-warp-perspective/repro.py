import torch
import torch.nn.functional as F
from kornia.geometry import transform_points, warp_perspective

PACKAGE, DTYPE, AUTOCAST, LIMIT = "kornia", torch.bfloat16, True, 0.1
HOMOGRAPHY = torch.tensor([[[1.02, 0.03, -20.0], [0.01, 0.98, 15.0], [1e-5, 2e-5, 1.0]]])


def inputs(seed):
    torch.manual_seed(seed)
    return (F.interpolate(torch.rand(1, 1, 64, 64), size=(512, 512), mode="bicubic").clamp(0, 1),)


def f(image):
    return warp_perspective(image, HOMOGRAPHY.to(image.dtype), (512, 512))


def shifts(image):
    points = 512 * torch.rand(1, 200, 2, dtype=image.dtype, generator=torch.Generator().manual_seed(0))
    return transform_points(HOMOGRAPHY.to(image.dtype), points) - points


FORMS = {"kornia.geometry.transform_points": shifts}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
