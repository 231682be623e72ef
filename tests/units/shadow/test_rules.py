"""Promise: companions follow every op, along the decisions of the run: indices, quotients, masks, branches, draws."""

from __future__ import annotations

import copy
import gc
import pickle
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampcheck.shadow import Shadow

Op = Callable[[torch.Tensor], Any]
Expected = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def shifted(shadow: Shadow, tensor: torch.Tensor, by: float = 0.4) -> torch.Tensor:
    """Companions a little away from the real values, far enough that they would decide otherwise."""
    exact = shadow.exact(tensor)
    exact.add_(data(*tensor.shape, seed=9).double(), alpha=by)
    shadow.moved(tensor).copy_(exact)
    return exact.clone()


def pooled() -> Expected:
    return lambda x, wide, out: wide.flatten().take(out[1]).view(out[0].shape)


def first(x: torch.Tensor, wide: torch.Tensor, out: Any) -> torch.Tensor:
    return torch.stack([wide.reshape(-1)[(x.reshape(-1) == value).nonzero()[0, 0]] for value in out])


# By name: an op, and its companions from the real input, the shifted one and the real result.
FOLLOWED: dict[str, tuple[Op, Expected]] = {
    "topk": (lambda x: x.topk(2, 0), lambda x, w, out: w.gather(0, out[1])),
    "topk, out": (
        lambda x: torch.topk(x, 2, out=(x.new_empty(0), torch.empty(0, dtype=torch.long))),
        lambda x, w, out: w.gather(-1, out[1]),
    ),
    "sort": (lambda x: x.sort(dim=-1, stable=True), lambda x, w, out: w.gather(-1, out[1])),
    "kthvalue": (lambda x: x.kthvalue(2, 1), lambda x, w, out: w.gather(1, out[1][:, None])[:, 0]),
    "median": (lambda x: x.median(0, keepdim=True), lambda x, w, out: w.gather(0, out[1])),
    "mode": (lambda x: x.round().mode(-1), lambda x, w, out: x.round().double().gather(-1, out[1][:, None])[:, 0]),
    "max": (lambda x: x.max(1), lambda x, w, out: w.gather(1, out[1][:, None])[:, 0]),
    "max, out": (
        lambda x: torch.max(x, 1, out=(x.new_empty(6), torch.empty(6, dtype=torch.long))),
        lambda x, w, out: w.gather(1, out[1][:, None])[:, 0],
    ),
    "cummax": (lambda x: x.cummax(1), lambda x, w, out: w.gather(1, out[1])),
    "max_pool2d": (lambda x: F.max_pool2d(x[None, None], 2, return_indices=True), pooled()),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x[None, None], 2, return_indices=True), pooled()),
    "fractional_max_pool2d": (
        lambda x: torch._C._nn.fractional_max_pool2d(x[None, None], (2, 2), (2, 2), torch.full((1, 1, 2), 0.5)),
        pooled(),
    ),
    "max_pool3d": (lambda x: F.max_pool3d(x[None, None], (1, 2, 2), return_indices=True), pooled()),
    "unique": (lambda x: x.round().add(x * 0).unique(), lambda x, w, out: out.double()),
    "unique of what differs": (lambda x: x.repeat(2, 1).unique(), first),
    "unique rows": (
        lambda x: x.unique(dim=0),
        lambda x, w, out: w[[int((x == row).all(1).nonzero()[0, 0]) for row in out]],
    ),
    "unique_consecutive": (lambda x: x.view(-1).unique_consecutive(), first),
    "remainder": (lambda x: x.remainder(0.7), lambda x, w, out: w - ((x - out) / 0.7).round().double() * 0.7),
    "remainder, in place": (
        lambda x: x.clone().remainder_(0.7),
        lambda x, w, out: w - ((x - out) / 0.7).round().double() * 0.7,
    ),
    "fmod, out": (
        lambda x: torch.fmod(x, 0.7, out=torch.empty_like(x)),
        lambda x, w, out: w - ((x - out) / 0.7).round().double() * 0.7,
    ),
    "frac": (lambda x: (x * 3).frac(), lambda x, w, out: w * 3 - (x * 3).trunc()),
    "frac, in place": (lambda x: (x * 3).frac_(), lambda x, w, out: w * 3 - (x * 3).trunc()),
    "frexp": (lambda x: x.frexp(), lambda x, w, out: torch.ldexp(w, -out[1])),
    "floor": (lambda x: x.floor(), lambda x, w, out: out.double()),
    "ceil, in place": (lambda x: x.clone().ceil_(), lambda x, w, out: out.double()),
    "round, out": (lambda x: torch.round(x, out=torch.empty_like(x)), lambda x, w, out: out.double()),
    "floor division": (lambda x: torch.div(x, 0.3, rounding_mode="floor"), lambda x, w, out: out.double()),
    "sign": (lambda x: x.sign(), lambda x, w, out: out.double()),
    "heaviside": (lambda x: x.heaviside(x.new_ones(())), lambda x, w, out: out.double()),
    "histogram": (lambda x: torch.histc(x, 5), lambda x, w, out: out.double()),
    "fake quantization": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7),
        lambda x, w, out: out.double(),
    ),
    "a list rounded": (lambda x: torch._foreach_round([x])[0], lambda x, w, out: out.double()),
    "mask": (lambda x: x[x > 0], lambda x, w, out: w[x > 0]),
    "argmax": (lambda x: x.flatten()[x.argmax()], lambda x, w, out: w.flatten()[x.argmax()]),
    "nearest pixel": (
        # Halved, as what lies a pixel away is no near tie.
        lambda x: F.grid_sample(data(1, 2, 4, 4), x[None, :, :2].view(1, 6, 1, 2) / 2, "nearest", align_corners=True),
        lambda x, w, out: out.double(),
    ),
    "bags": (
        lambda x: torch.embedding_bag(x, torch.tensor([0, 1, 2, 5]), torch.tensor([0, 3]), mode=2),
        lambda x, w, out: w.gather(0, out[3]),
    ),
    "leaky slopes": (
        lambda x: F.rrelu(x, training=True),
        lambda x, w, out: w * torch.where(x > 0, 1.0, out.double() / x.double()).float().double(),
    ),
    "rectified": (lambda x: _derivative(F.relu, x), lambda x, w, out: (x > 0).double()),
    "hard": (lambda x: _derivative(F.hardtanh, x), lambda x, w, out: (x.abs() < 1).double()),
}


def _derivative(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf).sum(), leaf)
    return gradient


@pytest.mark.parametrize("name", FOLLOWED)
def test_values_follow_what_the_run_decided(name: str) -> None:
    op, expected = FOLLOWED[name]
    x = data(6, 6)
    with Shadow() as shadow:
        wide = shifted(shadow, x)
        out = op(x)
    values = out if isinstance(out, torch.Tensor) else out[0]
    reference = expected(x, wide, out)
    tolerance = 1e-6 if name == "leaky slopes" else 1e-12
    torch.testing.assert_close(shadow.exact(values), reference, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(shadow.moved(values).double(), reference, rtol=2e-3, atol=2e-3)
    assert not shadow.unruled


def test_draws_of_a_distribution_whose_mean_was_computed_are_kept() -> None:
    torch.manual_seed(0)
    mean, deviation = data(50), data(50, seed=1).abs()
    with Shadow() as shadow:
        wide = shifted(shadow, mean)
        out = torch.normal(mean, deviation)
        dropped, mask = torch.native_dropout(mean, 0.3, True)
    draw = (out - mean).double() / deviation
    assert torch.allclose(shadow.exact(out), wide + draw * deviation, atol=1e-12)
    assert torch.equal(shadow.exact(dropped), wide * mask * (1 / 0.7))


def test_pivots_that_exact_would_choose_otherwise_restart_the_factors() -> None:
    matrix, right = data(4, 4), data(4, 1, seed=1)
    with Shadow() as shadow:
        shifted(shadow, matrix, by=3.0)
        factors, pivots = torch.linalg.lu_factor(matrix)
        solution = torch.linalg.lu_solve(factors, pivots, right)
    assert torch.equal(shadow.exact(factors), factors.double())
    assert torch.allclose(shadow.exact(solution), solution.double(), rtol=1e-4)
    assert [name.split(":")[2] for name in shadow.unruled] == ["linalg_lu_factor_ex"]


def followed(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tolerance: float = 1e-13) -> Shadow:
    """Check that a run is untouched, and that exact is what it gives in float64."""
    plain = run(x.clone())
    with Shadow(renews=False) as shadow:
        value = run(x.clone())
    assert torch.equal(value, plain)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        reference = run(x.to(torch.complex128 if x.is_complex() else torch.float64))
    finally:
        torch.set_default_dtype(default)
    torch.testing.assert_close(shadow.exact(value), reference, rtol=tolerance, atol=tolerance)
    return shadow


def _resized(x: torch.Tensor) -> torch.Tensor:
    y = (x * 1.1).flatten()
    y.resize_(4)
    y.resize_(40)
    y[36:] = 1.0
    y[4:36] = 0.5
    return y * 1.1


def _sparse_product(x: torch.Tensor) -> torch.Tensor:
    values = (x[0, :3] * 1.1).requires_grad_()
    pattern = torch.tensor([[0, 1, 1], [2, 0, 2]])
    out = torch.sparse.mm(torch.sparse_coo_tensor(pattern, values, (2, 6), check_invariants=False), x.sin())
    (gradient,) = torch.autograd.grad(out.square().sum(), values)
    return torch.cat([out.detach().flatten(), gradient])


def _embedded(x: torch.Tensor) -> torch.Tensor:
    table = nn.Embedding(6, 6, sparse=True).to(x.dtype)
    table.weight.data.copy_(x * 1.1)
    optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([1, 2, 1])).sin().sum().backward()
        optimizer.step()
    return table.weight.detach()


def _nested(x: torch.Tensor) -> torch.Tensor:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).to(x.dtype)
    for parameter in layer.parameters():
        parameter.data.copy_(data(*parameter.shape, seed=parameter.numel()) / 4)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    padding = torch.tensor([[False] * 4 + [True] * 2])
    with torch.no_grad():
        return encoder(x.sin()[None], src_key_padding_mask=padding)


def _recurrent(x: torch.Tensor) -> torch.Tensor:
    model = nn.LSTM(6, 4, 2, bidirectional=True).to(x.dtype)
    for parameter in model.parameters():
        parameter.data.copy_(data(*parameter.shape, seed=parameter.numel()) / 4)
    leaf = x[:, None].requires_grad_()
    out, (h, c) = model(leaf)
    (out.sum() + h.square().sum() - c.sum()).backward()
    gradients = [leaf.grad, *(p.grad for p in model.parameters())]
    return torch.cat([t.detach().flatten() for t in (out, h, c, *gradients)])


def _efficient_zero(x: torch.Tensor) -> torch.Tensor:
    return x * 1.1 + torch._efficientzerotensor(x.shape, dtype=x.dtype)


def _copied(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.1
    clone = copy.deepcopy(y)
    y.zero_()
    return clone * 1.1


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugate": lambda x: (lambda z: (z.conj() * z).real + z.conj().imag * 1.1)(torch.complex(x, x.t() * 1.1)),
    "spectrum": lambda x: torch.fft.irfft2(torch.fft.rfft2(x).conj() * 1.1),
    "modulus": lambda x: _derivative(lambda y: torch.complex(y, y.sin()).abs(), x),
    "imaginary parts written": lambda x: (lambda z: (z.imag.mul_(1.1), z.abs())[1])(torch.complex(x * 1.1, x)),
    "an odd view of pairs": lambda x: torch.view_as_complex((x.flatten()[:35] * 1.1)[:34].view(-1, 2)).abs(),
    "resized": _resized,
    "sparse": _sparse_product,
    "sparse gradients": _embedded,
    "compressed": lambda x: (x * 1.1).to_sparse_csr() @ x.sin(),
    "to sparse and back": lambda x: (x * 1.1).to_sparse().mul(1.1).to_dense(),
    "nested": _nested,
    "recurrent": _recurrent,
    "zeros without memory": _efficient_zero,
    "inverse, out": lambda x: torch.linalg.inv(x, out=torch.empty_like(x)),
    "copied": _copied,
    "squeezed in place": lambda x: (x * 1.1)[None, None].squeeze_((0, 1)).t_().mul(1.1),
    "grown by a product": lambda x: (x[:1] * 1.1).clone().expand(1, 6).addbmm(x[None], x[None]),
    "branches": lambda x: torch.ops.higher_order.cond(
        torch.tensor(True), lambda y: y.sin() * 1.1, lambda y: y.cos(), (x,)
    ),
    "a loop": lambda x: torch.ops.higher_order.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, y.sin() * 1.1), (torch.tensor(0), x), ()
    )[1],
    "per sample": lambda x: torch.func.vmap(torch.func.grad(lambda y: y.sin().prod()))(x),
    "second derivatives": lambda x: torch.func.hessian(lambda y: (y.sin() * y.exp()).sum())(x[0]),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_followed_in_every_layout(name: str) -> None:
    shadow = followed(PROGRAMS[name], data(6, 6), 1e-11)
    assert not shadow.unruled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flexible_attention_is_followed_op_by_op(dtype: torch.dtype) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = (data(1, 2, 16, 8, seed=i).to(dtype) for i in range(3))

    def near(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score + (i - j)

    with Shadow(renews=False) as shadow:
        out = flex_attention(query, key, value, score_mod=near)
    wide = query.double() @ key.double().transpose(-2, -1) / 8**0.5 + (torch.arange(16)[:, None] - torch.arange(16))
    torch.testing.assert_close(shadow.exact(out), wide.softmax(-1) @ value.double(), rtol=1e-12, atol=1e-12)


def test_memory_that_is_read_in_another_format_keeps_its_companions() -> None:
    x = data(8)
    with Shadow() as shadow:
        y = x * 1.1
        exact = shadow.exact(y).clone()
        read = y.view(torch.bfloat16) * 1
        again = y * 1
        y.view(torch.int32)[2:4].bitwise_and_(-(1 << 13))
        cut = y * 1
        y.view(torch.bfloat16)[14:] = 1.0
        halves = y * 1
    assert torch.equal(shadow.exact(read), read.double())
    assert torch.equal(shadow.exact(again), exact)
    assert torch.equal(shadow.exact(cut), torch.cat([exact[:2], cut[2:4].double(), exact[4:]]))
    assert torch.equal(
        shadow.exact(halves), torch.cat([exact[:2], halves[2:4].double(), exact[4:7], halves[7:].double()])
    )


def test_an_op_without_a_double_kernel_restarts_and_is_counted() -> None:
    x = data(4, 4)
    with Shadow() as shadow:
        out = (x * 1.1).to_mkldnn().to_dense()
    assert torch.equal(shadow.exact(out), out.double())
    assert list(shadow.unruled) == [
        "aten::_to_dense: NotImplementedError: a tensor of layout torch._mkldnn has no companions"
    ]


def test_packed_products_are_unpacked() -> None:
    x, scales = data(3, 32), data(16, seed=1)
    weight = torch.randint(-8, 8, (16, 32), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    with Shadow() as shadow:
        eight = torch._weight_int8pack_mm(x.bfloat16(), weight, scales.bfloat16())
    reference = x.double() @ weight.double().t() * scales.double()
    assert torch.allclose(shadow.exact(eight), reference, rtol=1e-12)
    assert not shadow.unruled


@pytest.mark.needs_torch("2.8", "torch._scaled_mm runs on the CPU")
def test_scaled_products_are_unpacked() -> None:
    a, b = (data(16, 32, seed=i).to(torch.float8_e4m3fn) for i in (2, 3))
    with Shadow() as shadow:
        scaled = torch._scaled_mm(a, b.t(), torch.tensor(0.5), torch.tensor(0.25), out_dtype=torch.bfloat16)
    assert torch.allclose(shadow.exact(scaled), a.double() @ b.double().t() * 0.125, rtol=1e-12)
    assert not shadow.unruled


def test_numbers_that_leave_are_counted_by_line_and_come_back_as_data() -> None:
    numpy = pytest.importorskip("numpy")
    x = data(4)
    original = torch.Tensor.numpy
    with Shadow() as shadow:
        y = x * 1.1
        y.tolist()
        numpy.asarray(y)
        pickle.dumps(y)
        y[0].item()
        array = y.numpy()
        array[1] = 7.0
        z = y * 2
        y.mul_(1.1)
        unchanged = y * 1
        shared = torch.from_numpy(numpy.ones(4, dtype=numpy.float32))
        before = shared * 1.1
        shared.numpy()[:] = 3.0
        after = shared * 1
    assert len(shadow.escapes) == 6
    assert set(shadow.escapes.values()) == {1}
    assert all(place.startswith("tests/units/shadow/test_rules.py:") for place in shadow.escapes)
    wide = x.double() * 1.1
    wide[1] = 7.0
    assert torch.equal(shadow.exact(z), wide * 2)
    assert torch.equal(shadow.exact(unchanged), wide * 1.1)
    assert torch.equal(shadow.exact(before), torch.full((4,), 1.1, dtype=torch.float64))
    assert torch.equal(shadow.exact(after), torch.full((4,), 3.0, dtype=torch.float64))
    assert torch.Tensor.numpy is original


def test_companions_die_with_their_tensors() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)), data(8, 32)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, fused=True)
    counts, sizes, memory = [], [], []
    with Shadow(model, judge=False) as shadow:
        for _ in range(200):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            counts.append(len(list(shadow.store)))
            sizes.append(shadow.store.nbytes())
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert counts[5] == counts[-1]
    assert sizes[5] == sizes[-1]
    assert memory[-1] - memory[50] < 4_000  # kilobytes
    assert counts[-1] <= 30
    model.zero_grad()
    del loss
    kept = len(list(shadow.store))
    del optimizer, model
    gc.collect()
    assert len(list(shadow.store)) < kept


def test_what_inference_mode_makes_is_followed_outside_of_it() -> None:
    x = data(4)
    with Shadow() as shadow:
        with torch.inference_mode():
            y = x * 1.1
        x.mul_(1.1)
        z = y.clone().add_(x)
    wide = data(4).double()
    assert torch.allclose(shadow.exact(z), wide * 1.1 + wide * 1.1, rtol=1e-15)


def test_inference_mode_is_followed_as_gradients_are() -> None:
    def variance(x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float16).t().reshape(-1)  # a cast and a reshape that copy
        return ((x * x).mean() - x.mean() ** 2).float() + torch.softmax(x, 0).double().max()

    x = data(4, 6) + 3
    with Shadow() as shadow:
        with torch.inference_mode():
            y = variance(x)
        z = variance(x)
    assert shadow.exact(y) == shadow.exact(z) != y


def test_what_cannot_be_followed_inside_is_counted() -> None:
    x = data(4)
    with Shadow() as shadow:
        out = torch.ops.higher_order.strict_mode(lambda y: (y * 1.1,), (x,))
    assert torch.equal(shadow.exact(out[0]), out[0].double())
    assert list(shadow.unruled) == ["what runs inside strict_mode"]
