"""Tensors of every kind get a right answer, or a reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.health import TensorHealth, Unmeasured, health_of, measure_health


def health(tensor: torch.Tensor, **options: object) -> TensorHealth:
    measured = health_of(tensor, **options)  # type: ignore[arg-type]
    assert isinstance(measured, TensorHealth), measured
    return measured


def reason(tensor: torch.Tensor) -> str:
    measured = health_of(tensor)
    assert isinstance(measured, Unmeasured), measured
    assert measured.read() is measured
    return measured.reason


@pytest.mark.parametrize("view", ["plain", "conj", "physical"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_is_its_real_view(view, dtype):
    tensor = torch.tensor([3 - 4j, 0 + 1e-40j, complex(math.inf, math.nan)], dtype=dtype)
    tensor = {"plain": tensor, "conj": tensor.conj(), "physical": tensor.conj_physical()}[view]
    measured = health(tensor)
    assert measured.dtype == str(dtype).removeprefix("torch.")
    assert (measured.numel, measured.zeros, measured.infs, measured.nans) == (6, 1, 1, 1)
    assert measured.amax == 4.0
    assert measured.subnormals == (1 if dtype is torch.complex64 else 0)


def test_a_lazily_negated_tensor():
    tensor = torch.tensor([1 + 2j, 3 - 5j]).conj().imag
    assert tensor.is_neg()
    assert (health(tensor).amax, health(tensor).amin) == (5.0, 2.0)


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    info = torch.iinfo(getattr(torch, name))
    measured = health(torch.tensor([0, 1, info.max], dtype=getattr(torch, name)))
    assert (measured.dtype, measured.zeros, measured.subnormals) == (name, 1, 0)
    assert (measured.amax, measured.amin) == (float(info.max), 1.0)


def test_booleans_and_the_smallest_integer():
    measured = health(torch.tensor([True, False, True]))
    assert (measured.numel, measured.zeros, measured.amax, measured.sumsq) == (3, 1, 1.0, 2.0)
    assert health(torch.tensor([-(2**63)])).amax == 2.0**63


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_sparse_tensors_count_what_they_do_not_store_as_zeros():
    dense = torch.tensor([[0.0, 2.0], [math.nan, 0.0], [0.0, 1e-40]])
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        sparse = dense.to_sparse(layout=layout)
        assert repr(health(sparse, histogram=True)) == repr(health(dense, histogram=True))
    blocks = torch.eye(4).to_sparse_bsr((2, 2))
    assert repr(health(blocks)) == repr(health(torch.eye(4)))
    waves = torch.tensor([0j, 3 + 4j]).to_sparse()
    assert (health(waves).numel, health(waves).zeros, health(waves).sumsq) == (4, 2, 25.0)
    twice = torch.sparse_coo_tensor([[1, 1]], [2.0, -2.0], (3,), check_invariants=True)
    assert "coalesce()" in reason(twice)


def test_a_parameter_and_a_tensor_with_gradient():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 0.0]))
    assert health(parameter).zeros == 1
    assert health(parameter.mul(2)).amax == 2.0
    assert health(parameter[::2].expand(3)).numel == 3
    with torch.inference_mode():
        assert health(torch.ones(3)[::2]).numel == 2


class Named(torch.Tensor):
    """A subclass that only adds a name, and refuses to be computed with."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "__get__" in repr(func):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise AssertionError(f"called {func}")


class Wrapper(torch.Tensor):
    """A subclass whose values live elsewhere."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"called {func}")


def test_subclasses():
    assert health(torch.ones(3).as_subclass(Named)).numel == 3
    assert "a Wrapper keeps its values" in reason(Wrapper(torch.ones(3)))


def test_nested_tensors():
    parts = [torch.tensor([1.0, 0.0]), torch.tensor([5.0])]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert (health(jagged).numel, health(jagged).zeros, health(jagged).amax) == (3, 1, 5.0)
    holes = torch.nested.nested_tensor_from_jagged(torch.ones(6), torch.tensor([0, 3, 6]), lengths=torch.tensor([1, 2]))
    assert "gaps" in reason(holes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_strided_layout_is_not_measured():
    assert "unbind()" in reason(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided))


def test_tensors_without_data():
    assert "meta" in reason(torch.empty(2, device="meta"))
    with FakeTensorMode() as mode:
        fake = torch.ones(3)
        parameter = torch.nn.Parameter(torch.ones(3))
    assert "fake" in reason(fake)
    assert "fake" in reason(parameter)
    assert "fake" in reason(mode.from_tensor(torch.ones(2)))
    lazy = torch.nn.LazyLinear(3).weight
    assert "lazy" in reason(lazy)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert "freed" in reason(freed)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore:.*quantiz.*")
def test_quantised_and_opaque_tensors():
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    assert "dequantize()" in reason(quantised)
    if torch.backends.mkldnn.is_available():
        assert "to_dense()" in reason(torch.ones(4, 4).to_mkldnn())
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert "float4" in reason(torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))


def test_function_transforms():
    seen = []

    def look(x):
        seen.append(health_of(x))
        return x * 2

    torch.vmap(look)(torch.ones(2, 3))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(3))
    assert len(seen) == 2
    assert all("transform" in one.reason for one in seen)


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # PyTorch 2.6, of a mesh of CPUs
def test_a_dtensor_is_measured_by_its_shard(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch.distributed has no gloo here")
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.tensor([1.0, 0.0, 3.0]), mesh, [Shard(0)])
        assert (health(tensor).numel, health(tensor).zeros, health(tensor).amax) == (3, 1, 3.0)
        assert health(torch.nn.Parameter(tensor)).numel == 3
    finally:
        distributed.destroy_process_group()


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_fast_path_is_invisible_to_a_dispatch_mode():
    tensor = torch.randn(100, requires_grad=True)
    with Counting() as mode:
        measure_health(tensor)
        measure_health(tensor.detach().view(10, 10).t())
    assert [
        call for call in mode.calls if "detach" not in call and "view" not in call and "t.default" not in call
    ] == []


def test_the_tensor_is_left_as_it_was():
    tensor = torch.randn(64).requires_grad_()
    before, version = tensor.detach().clone(), tensor._version
    health(tensor, histogram=True)
    assert tensor._version == version
    assert torch.equal(tensor, before)
    assert tensor.grad_fn is None
