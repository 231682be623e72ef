from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from narrow_loops import B16, F16, F32, Counting, data, failures, judged, loop, net, sgd

from ampcheck.core.run import Verdict


@pytest.mark.parametrize(("dtype", "last"), [(B16, 256), (F16, 2048)])
@pytest.mark.parametrize("slices", [False, True])
def test_a_counter_in_a_cast_buffer_is_found_with_the_step_at_which_it_stops(dtype, last, slices):
    torch.manual_seed(0)
    model = Counting(F32, slices).to(dtype)
    (found,) = failures(loop(model, sgd(model, 0.0)))
    assert "buffers seen" in found.message
    if not slices:
        assert found.observed == last - 4
        model.seen.fill_(0)
        for _ in range(last + 10):
            model.seen += 1
        assert model.seen == last


def test_an_integer_counter_passes():
    model = Counting(torch.int64).to(B16)
    assert not failures(loop(model, sgd(model, 0.0)))


@pytest.mark.parametrize("graph", [False, True])
def test_a_running_loss_in_bfloat16_is_found(graph):
    model = net()
    x, y = data(B16)
    optimizer = sgd(model)
    total = torch.zeros((), dtype=B16)

    def step(i):
        nonlocal total
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if graph:
            total += loss
        else:
            total = total + loss.detach()
        return loss.item()

    (found,) = failures({"model": model, "optimizer": optimizer, "step": step})
    assert "total" in found.message
    assert "float32" in found.hint


def test_a_running_loss_that_starts_anew_passes():
    model = net()
    x, y = data(B16)
    optimizer = sgd(model)
    total = torch.zeros((), dtype=B16)

    def step(i):
        nonlocal total
        if i % 2 == 0:
            total = torch.zeros((), dtype=B16)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        total = total + loss.detach()
        return loss.item()

    assert not failures({"model": model, "optimizer": optimizer, "step": step})


def test_the_sum_of_adagrad_stops():
    model = net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
    assert any("sum" in one.message for one in failures(loop(model, optimizer)))


def test_gradients_that_are_accumulated_are_no_sum_that_stops():
    model = net()
    x, y = data(B16)
    optimizer = sgd(model)

    def step(i):
        loss = (model(x) - y).float().square().mean() / 8
        loss.backward()
        if i % 8 == 7:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    assert not failures({"model": model, "optimizer": optimizer, "step": step})


@pytest.fixture
def alone():
    """A process group of this process only."""
    if not dist.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.needs_torch("2.9", "FSDP2 runs on the CPU")
@pytest.mark.parametrize("foreach", [False, True])
def test_the_shards_of_a_distributed_model_are_followed(alone, foreach):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no FSDP2")

    def made(rate):
        model = net()
        fsdp.fully_shard(model, mesh=alone)
        return loop(model, sgd(model, rate, momentum=0.9, foreach=foreach))

    (found,) = failures(made(1e-6))
    assert "100 %" in found.message
    (found,) = judged(made(0.3))
    assert found.verdict is Verdict.PASS
    assert "updates of their elements" in found.message


def test_a_subclass_of_tensor_without_ops_of_its_own_is_followed():
    class Named(torch.Tensor):
        pass

    model = net()
    average = torch.ones(4, dtype=B16).as_subclass(Named)
    parts = loop(model, sgd(model), lambda i, loss: average.lerp_(torch.zeros(4, dtype=B16), 1e-3), average=average)
    (found,) = failures(parts)
    assert "average" in found.message
