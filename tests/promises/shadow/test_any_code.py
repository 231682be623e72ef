"""Promise: `watch` and `audit` take any code, and results, gradients and random state are bit for bit as without."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import ampcheck

PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


@program
def gradients_per_sample() -> Any:
    model = network()

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        return vmap(grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), torch.randn(5, 8))


@torch.library.custom_op("ampcheck_tests::first_column", mutates_args=())
def first_column(x: Tensor) -> Tensor:
    return torch.from_numpy(np.tanh(x[:, :1].numpy())).expand(*x.shape)


@program
def a_kernel_whose_result_shares_memory() -> Any:
    x = torch.randn(3, 4)
    return first_column(x), (first_column(x).half() * 3).sum(), first_column(x.T).T + 1


@program
def derivatives_of_a_module() -> Any:
    model, x = network(), torch.randn(8)
    return jvp(model, (x,), (torch.ones_like(x),)), hessian(lambda x: model(x).sum())(x), jacrev(model)(x)


@program
def gradient_of_a_gradient() -> Any:
    model, x = network(), torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x).float().sum()
    torch.autograd.grad(y, x, create_graph=True)[0].square().sum().backward()
    return gradients(model)


@program
def copies_and_checkpoints_on_disk() -> Any:
    model, x, file = network(torch.float16), torch.randn(3, 8).half(), io.BytesIO()
    model(x).sum().backward()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = network(torch.float16)
    loaded.load_state_dict(torch.load(file))
    twin = copy.deepcopy(model)
    return twin(x), gradients(twin), loaded(x), pickle.loads(pickle.dumps(model))(x)


@program
def memory_that_changes_hands() -> Any:
    a, b, c = torch.randn(4).half(), torch.empty(0).half(), torch.empty(0).half()
    b.resize_(4).copy_(a)
    c.set_(b).add_(1)
    rows = torch.randn(10).half()
    windows = rows.as_strided((4, 4), (2, 1)) * 2
    rows[3:6] += 1
    bits = torch.zeros(6).half()
    bits.view(torch.int16).add_(1)
    shared = torch.tensor([], dtype=torch.float16).set_(bits.untyped_storage())
    weights = network()
    weights[0].weight.data = weights[0].weight.data.half().float()
    return a, b, c, windows, rows.unfold(0, 3, 1).sum(-1), bits, shared, weights(torch.randn(2, 8))


@program
def other_kinds_of_tensors() -> Any:
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1, 2, 1])).sum().backward()
    spectrum = torch.stft(torch.randn(400), 64, return_complex=True, window=torch.hann_window(64))
    jagged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    bytes_of_8_bits = torch.randn(4).to(torch.float8_e4m3fn).float()
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8).dequantize()
    return table.weight.grad.to_dense(), spectrum.abs(), nn.Linear(4, 4)(jagged).values(), bytes_of_8_bits, quantized


@program
def numbers_through_numpy() -> Any:
    a = torch.randn(5).half()
    values = a.numpy()
    values *= 2
    return a, torch.from_numpy(values.astype(np.float32)), torch.tensor(values.tolist()), float(a.sum())


@program
def recomputation_and_inference() -> Any:
    model, x = network(), torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        losses = [checkpoint(model, x, use_reentrant=reentrant).float().sum() for reentrant in (True, False)]
    torch.stack(losses).sum().backward()
    with torch.inference_mode():
        y = model(x)
        y += 1
    return x.grad, gradients(model), y


@program
def threads_and_workers() -> Any:
    model, results = network(torch.bfloat16), []
    thread = threading.Thread(target=lambda: results.append(model(torch.ones(2, 8).bfloat16())))
    thread.start()
    thread.join()
    batches = DataLoader(TensorDataset(torch.randn(8, 8)), 4, num_workers=2)
    return results, [model(x.bfloat16()) for (x,) in batches]


@program
def recurrent_layers() -> Any:
    layer, x = nn.LSTM(4, 6, 2, bidirectional=True), torch.randn(5, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    packed, _ = layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3]))
    (y.float().sum() + packed.data.sum()).backward()
    return y, packed.data, gradients(layer)


@program
def parametrized_layers_and_hooks() -> Any:
    x, model = torch.randn(2, 4), network()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model[0].weight.register_hook(lambda gradient: gradient * 3)
    model(torch.randn(2, 8)).sum().backward()
    kinds = (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
    return [kind(nn.Linear(4, 4))(x) for kind in kinds], gradients(model)


@program
def graphs_that_are_traced() -> Any:
    model, x = network(), torch.randn(2, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = model(torch.randn(3, 8)).shape
    traced = make_fx(lambda x: model(x).half().exp())(x)
    exported = torch.export.export(model, (x,)).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(model, x)
    with FlopCounterMode(display=False) as flops:
        y = model(x)
    return torch.tensor(shape), traced(x), exported(x), scripted(x), y, flops.get_total_flops()


class Either(nn.Module):
    """Branches, and a number written in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return self.linear(y) * torch.tensor(0.1, dtype=torch.float16)


@program
def exported_programs() -> Any:
    model, x = Either(), torch.randn(2, 8)
    return [torch.export.export(model, (x,), strict=strict).module()(x) for strict in (True, False)]


@program
def compiled_code() -> Any:
    return torch.compile(lambda x: F.softmax(x.half().exp().float(), -1), backend="eager")(torch.randn(4, 4))


@program
def averages_of_weights() -> Any:
    model = network()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for _ in range(3):
        model[0].weight.data.add_(0.1)
        average.update_parameters(model)
    return list(average.parameters())


@program
def random_numbers() -> Any:
    own = torch.Generator().manual_seed(3)
    normal = torch.distributions.Normal(0.0, 1.0).rsample((3,))
    noise = torch.rand(4).half(), torch.distributions.Gamma(2.0, 1.0).sample((2,)), torch.multinomial(torch.ones(5), 2)
    return torch.randn(3, generator=own), torch.randperm(5), F.dropout(torch.ones(10).half()), normal, noise


@program
def an_error_that_is_caught() -> Any:
    with pytest.raises(RuntimeError, match="shapes"):
        torch.randn(2, 3) @ torch.randn(2, 3)
    return torch.randn(3).half() * 2


def executed(function: Callable[[], Any]) -> list[Any]:
    torch.manual_seed(7)
    return [*pytree.tree_leaves(function()), torch.get_rng_state()]


def under_watch(function: Callable[[], Any]) -> list[Any]:
    with ampcheck.watch(fail_on="never"):
        return executed(function)


def audited(function: Callable[[], Any]) -> list[Any]:
    calls: list[list[Any]] = []
    ampcheck.audit(lambda: calls.append(executed(function)), compile=False)
    return calls[-1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [under_watch, audited])
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_code_runs_as_it_does_without(name: str, way: Callable[..., list[Any]]) -> None:
    alone, followed = executed(PROGRAMS[name]), way(PROGRAMS[name])
    assert len(alone) == len(followed)
    for ours, theirs in zip(followed, alone, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == theirs
