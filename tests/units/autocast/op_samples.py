"""Calls of every op that autocast knows on some device.

They come from PyTorch's own sample inputs (OpInfo), told apart by the overload that really reaches autocast, and are
written by hand where PyTorch has none.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from opinfo import op_db
from torch.utils._pytree import tree_leaves, tree_map

from ampcheck.autocast.state import raw_autocast, registered
from ampcheck.torchtools.source import overload

Calls = Mapping[str, Sequence["Call"]]

LARGEST = 20_000
"""Samples of more elements than that are left out: dtypes do not depend on the size."""


@dataclass(frozen=True)
class Call:
    """One call of an overload, with float32 for every floating tensor. source: `OpInfo` or `hand`."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str

    def with_tensors(self, replaced: Callable[[int, torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
        count = iter(range(1000))

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return replaced(next(count) if leaf.is_floating_point() else -1, leaf)

        return tree_map(one, (self.args, self.kwargs))

    @property
    def floats(self) -> int:
        return sum(isinstance(x, torch.Tensor) and x.is_floating_point() for x in tree_leaves((self.args, self.kwargs)))


# ---------------------------------------------------------------------------------------------------------------------
# where the calls come from


def harvest(*, each: int = 2) -> dict[str, list[Call]]:
    """At most `each` distinct calls of every overload with an autocast kernel on any device."""
    wanted = {name for device in ("cpu", "cuda", "xpu", "mps", "mtia") for name in registered(device)}
    found: dict[str, list[Call]] = {}
    seen: set[tuple[Any, ...]] = set()

    def keep(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], source: str = "OpInfo") -> None:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        shape = (name, *(tuple(t.shape) if isinstance(t, torch.Tensor) else str(t) for t in leaves))
        if shape in seen or len(found.setdefault(name, [])) >= each:
            return
        if (
            any(t.dtype is torch.float64 or t.is_complex() for t in tensors)
            or sum(t.numel() for t in tensors) > LARGEST
        ):
            return
        if any(t.numel() == 0 for t in tensors):
            return
        seen.add(shape)
        args, kwargs = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
        found[name].append(Call(name, args, kwargs, source))

    for name, (args, kwargs) in by_hand().items():
        if name in wanted:
            keep(name, args, kwargs, "hand")
    with _recorded(wanted, keep):
        _run_samples(wanted, each)
    return {name: found[name] for name in sorted(found) if found[name]}


def _run_samples(wanted: set[str], each: int) -> None:
    packets = {name.partition("::")[2].partition(".")[0].strip("_") for name in wanted}
    for info in op_db():
        names = {info.name.rpartition(".")[2], info.name.replace(".", "_"), info.aten_name}
        if torch.float32 not in info.dtypes or not any(packet in name for name in names for packet in packets):
            continue
        random.seed(0)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for number, sample in enumerate(info.sample_inputs("cpu", torch.float32, requires_grad=False)):
                    if number > 12 * each:
                        break
                    try:
                        info.op(sample.input, *sample.args, **sample.kwargs)
                    except Exception:  # noqa: BLE001  # a sample that this build cannot run; the call was recorded
                        continue
            except Exception:  # noqa: BLE001  # samples that need what is not installed
                continue


@contextmanager
def _recorded(names: set[str], keep: Callable[..., None]) -> Iterator[None]:
    """Tell `keep` of each call that reaches the CPU's autocast key, and let it through without a cast."""
    key = torch._C.DispatchKey.AutocastCPU
    below = torch._C._dispatch_keyset_full_after(key)
    library = torch.library.Library("aten", "IMPL")
    options = {"allow_override": True} if "allow_override" in inspect.signature(library.impl).parameters else {}

    def recorder(name: str) -> Callable[..., Any]:
        op = overload(name)

        def record(keys: Any, *args: Any, **kwargs: Any) -> Any:
            keep(name, args, kwargs)
            return op.redispatch(keys & below, *args, **kwargs)

        return record

    try:
        with warnings.catch_warnings(), raw_autocast("cpu", torch.bfloat16):
            warnings.simplefilter("ignore")  # that a kernel is overridden is what we want
            for name in sorted(names):
                library.impl(name.removeprefix("aten::"), recorder(name), "AutocastCPU", with_keyset=True, **options)
            yield
    finally:
        library._destroy()


def by_hand() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls that PyTorch's samples do not reach."""
    torch.manual_seed(0)
    a, b, eye = torch.rand(4, 4) + 0.1, torch.rand(4, 4) + 0.1, torch.eye(4)
    row, line, image, solid = torch.rand(4), torch.rand(1, 2, 6), torch.rand(1, 2, 6, 6), torch.rand(1, 2, 4, 4, 4)
    kernel, bias, grid = torch.rand(2, 2, 3, 3), torch.rand(2), torch.rand(1, 3, 3, 2) * 2 - 1
    w4, w12, w16, b4, b12, b16 = (torch.rand(n * 4, *rest) for rest in ((4,), ()) for n in (1, 3, 4))
    words, heads, half = torch.rand(1, 3, 4), torch.rand(1, 2, 16, 8), torch.tensor([0.5])
    plain = ([1, 1], [0, 0], [1, 1])
    calls: dict[str, Any] = {
        "_addmm_activation": (row, a, b),
        "_convolution.deprecated": (image, kernel, bias, *plain, False, [0, 0], 1, False, False, False),
        "_grid_sampler_2d_cpu_fallback": (image, grid, 0, 0, False),
        "_lu_with_info": (a + eye,),
        "_mps_convolution": (image, kernel, bias, [0, 0], [1, 1], [1, 1], 1),
        "_native_multi_head_attention": (words, words, words, 4, 2, w12, b12, w4, b4),
        "_scaled_dot_product_flash_attention": (heads, heads, heads),
        "_thnn_fused_gru_cell": (torch.rand(2, 12), torch.rand(2, 12), torch.rand(2, 4), b12, b12),
        "_thnn_fused_lstm_cell": (torch.rand(2, 16), torch.rand(2, 16), torch.rand(2, 4), b16, b16),
        "_upsample_bicubic2d_aa": (image, [4, 4], False),
        "_upsample_nearest_exact1d": (line, [4]),
        "_upsample_nearest_exact2d": (image, [4, 4]),
        "_upsample_nearest_exact3d": (solid, [3, 3, 3]),
        "chain_matmul": ([a, b, a],),
        "conv_tbc": (torch.rand(6, 1, 2), torch.rand(3, 2, 2), bias),
        "cudnn_convolution": (image, kernel, [0, 0], [1, 1], [1, 1], 1, False, False, False),
        "cudnn_convolution_transpose": (image, kernel, [0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, False),
        "fake_quantize_per_tensor_affine": (a, 0.1, 0, 0, 255),
        "frobenius_norm.dim": (a, [0, 1]),
        "grid_sampler": (image, grid, 0, 0, False),
        "gru_cell": (a, b, w12, w12, b12, b12),
        "inverse": (a + eye,),
        "linalg_cond.p_str": (a + eye, "fro"),
        "linalg_matrix_rank": (a, 0.1),
        "linalg_matrix_rank.tol_tensor": (a, torch.tensor(0.1)),
        "lstm_cell": (a, [b, a], w16, w16, b16, b16),
        "mkldnn_rnn_layer": (
            *(torch.rand(3, 2, 4), w16, w16, b16, b16, torch.rand(2, 4), torch.rand(2, 4)),
            *(False, [], 2, 4, 1, True, False, False, False),
        ),
        "nanquantile": (a, half),
        "nuclear_norm": (a,),
        "nuclear_norm.dim": (a, [0, 1]),
        "orgqr": (a, row),
        "quantile": (a, half),
        "reflection_pad2d": (image, [1, 1, 1, 1]),
        "replication_pad1d": (line, [1, 1]),
        "replication_pad2d": (image, [1, 1, 1, 1]),
        "replication_pad3d": (solid, [1, 1, 1, 1, 1, 1]),
        "rnn_relu_cell": (a, b, w4, w4, b4, b4),
        "rnn_tanh_cell": (a, b, w4, w4, b4, b4),
        "upsample_bicubic2d": (image, [4, 4], False),
        "upsample_linear1d": (line, [4], False),
        "upsample_nearest1d": (line, [4]),
        "upsample_nearest2d": (image, [4, 4]),
        "upsample_nearest3d": (solid, [3, 3, 3]),
        "upsample_trilinear3d": (solid, [3, 3, 3], False),
    }
    return {f"aten::{name}": (args, {}) for name, args in calls.items()}
