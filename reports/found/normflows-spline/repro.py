import sys

import torch
from normflows.utils.splines import unconstrained_rational_quadratic_spline as spline

torch.manual_seed(0)
x, widths, heights, slopes = torch.randn(20000) / 2, *(torch.randn(20000, size) for size in (8, 8, 7))
low = [tensor.bfloat16() for tensor in (x, widths, heights, slopes)]  # the data and the output of a layer in bfloat16
wide, _ = spline(*(tensor.double() for tensor in low))
print(f"{int((low[0].abs() == 1).sum())} of 20000 inputs are at the edge of the spline")
try:
    narrow, _ = spline(*low)
except (RuntimeError, IndexError) as error:
    print("bfloat16 weights give", error)
    print("float64 gives", wide[:4].tolist())
    sys.exit(1)
error = ((narrow.double() - wide).norm() / wide.norm()).item()
print("bfloat16 weights give", narrow[:4].tolist(), "float64 gives", wide[:4].tolist(), "error", error)
sys.exit(int(not error < 0.1))
