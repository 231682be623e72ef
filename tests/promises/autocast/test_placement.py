"""Code that was written for CUDA runs on a machine without it, as it stands."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ampcheck import UsageError, Verdict, audit, emulate, watch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, which is used then")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def cuda() -> Iterator[None]:
    with emulate("cuda"):
        yield


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), CUDA], ids=str)
@pytest.mark.usefixtures("cuda")
def test_a_tensor_that_is_placed_reports_cuda_however_the_device_is_named(device: object) -> None:
    host = torch.ones(2, 3)
    placed: list[Tensor] = [
        host.to(device),  # type: ignore[call-overload]
        host.to(device=device),  # type: ignore[call-overload]
        host.to(device, torch.float16, non_blocking=True),  # type: ignore[call-overload]
        torch.zeros(2, device=device),  # type: ignore[call-overload]
        torch.tensor([1.0], device=device),  # type: ignore[arg-type]
        torch.ones_like(host, device=device),  # type: ignore[arg-type]
        host.new_zeros(2, device=device),  # type: ignore[arg-type]
        torch.as_tensor(numpy.ones(2), device=device),  # type: ignore[arg-type]
        nn.Linear(2, 2, device=device).weight,
        nn.Linear(2, 2).to(device).weight,  # type: ignore[arg-type]
        host.cuda(device),  # type: ignore[arg-type]
    ]
    assert [(tensor.device, tensor.is_cuda, tensor.get_device()) for tensor in placed] == [(CUDA, True, 0)] * 11
    assert (host.device.type, host.is_cuda) == ("cpu", False)


@pytest.mark.usefixtures("cuda")
def test_results_are_where_their_arguments_are() -> None:
    host = torch.ones(2, 3)
    placed = host.cuda().requires_grad_()
    for result in (
        placed + 1,
        placed[0],
        placed.sum(),
        torch.cat([placed, placed]),
        placed.double(),
        placed.to(placed),
    ):
        assert result.device == CUDA
    assert all(part.is_cuda for part in placed.split(1))
    (placed * 2).sum().backward()
    assert placed.grad is not None
    assert placed.grad.is_cuda
    assert copy.deepcopy(placed.detach()).is_cuda
    assert not (host + 1).is_cuda
    assert host.to(placed).is_cuda
    assert host.copy_(placed.detach()).device.type == "cpu", "written into, and where it was"


@pytest.mark.usefixtures("cuda")
def test_a_move_between_devices_copies_and_a_move_to_the_same_does_not() -> None:
    host = torch.zeros(2)
    placed = host.cuda()
    back = placed.cpu()
    same = placed.to("cuda")
    placed += 1
    assert host.tolist() == back.tolist() == [0.0, 0.0]
    assert same.tolist() == [1.0, 1.0]
    assert not back.is_cuda
    array = numpy.zeros(2)
    of_array = torch.as_tensor(array, device="cuda")
    array += 1
    assert of_array.tolist() == [0.0, 0.0]


@pytest.mark.usefixtures("cuda")
def test_a_module_keeps_its_parameters_and_moves_them() -> None:
    module = nn.Linear(2, 2)
    before = module.weight
    assert module.cuda().weight is before
    assert before.is_cuda
    module.cpu()
    assert not before.is_cuda
    assert all(p.is_cuda for p in module.to("cuda", torch.float16, non_blocking=True).parameters())
    assert module.weight.type() == "torch.cuda.HalfTensor"


@pytest.mark.usefixtures("cuda")
def test_the_default_device_may_be_cuda() -> None:
    with torch.device("cuda"):
        assert torch.zeros(1).is_cuda
        assert nn.Linear(1, 1).weight.is_cuda
    assert not torch.zeros(1).is_cuda
    torch.set_default_device("cuda")
    assert torch.zeros(1).is_cuda
    assert torch.get_default_device() == CUDA


def test_a_default_device_that_was_left_set_ends_with_the_block() -> None:
    with emulate("cuda"):
        torch.set_default_device("cuda")
    assert torch.zeros(1).device == torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("location", "placed"),
    [
        ("cuda", True),
        (CUDA, True),
        ({"cpu": "cuda:0"}, True),
        (lambda storage, location: storage.cuda(), True),
        (lambda storage, location: storage, False),
        ("cpu", False),
        (None, False),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_a_checkpoint_is_loaded_where_map_location_says(location: object, placed: bool) -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2).cuda()}, file)
    file.seek(0)
    assert torch.load(file, map_location=location)["weight"].is_cuda is placed  # type: ignore[arg-type]


@pytest.mark.usefixtures("cuda")
def test_a_loader_pins_and_its_batches_are_moved() -> None:
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, pin_memory=True)
    for (batch,) in loader:
        assert not batch.is_cuda
        assert batch.cuda(non_blocking=True).is_cuda
    assert torch.ones(1).pin_memory().to("cuda", non_blocking=True).is_cuda


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.usefixtures("cuda")
def test_a_checkpoint_computes_again_in_backward_what_names_cuda(reentrant: bool) -> None:
    layer = nn.Linear(3, 3).cuda()
    seen = []

    def block(x: Tensor) -> Tensor:
        seen.append((x.device, torch.is_autocast_enabled("cuda")))
        y: Tensor = layer(x).relu() + torch.ones(3, device="cuda")
        return nn.functional.dropout(y, 0.1)

    x = torch.ones(2, 3, device="cuda", requires_grad=True)
    with torch.autocast("cuda"):
        y = checkpoint(block, x, use_reentrant=reentrant)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert seen == [(CUDA, True)] * 2


@pytest.mark.usefixtures("cuda")
def test_a_thread_that_is_started_inside_places_too() -> None:
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(1).cuda().is_cuda))
    thread.start()
    thread.join()
    assert seen == [True]


@pytest.mark.usefixtures("cuda")
def test_legacy_types_place_and_tell_what_is_placed() -> None:
    made = torch.cuda.FloatTensor(2, 3).fill_(1.0)
    assert (made.device, made.dtype) == (CUDA, torch.float32)
    assert torch.ones(2).type(torch.cuda.HalfTensor).device == CUDA
    assert isinstance(made, torch.cuda.FloatTensor)
    assert not isinstance(made.cpu(), torch.cuda.FloatTensor)


@pytest.mark.usefixtures("cuda")
def test_packed_sequences_keep_their_batch_sizes_on_the_cpu() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 2, 3, device="cuda"), torch.tensor([2, 1]))
    assert (packed.data.is_cuda, packed.batch_sizes.is_cuda) == (True, False)
    assert nn.LSTM(3, 3).cuda()(packed)[1][0].is_cuda


@pytest.mark.usefixtures("cuda")
def test_transforms_place_and_exports_are_of_the_cpu() -> None:
    x, layer = torch.ones(2, 3, device="cuda"), nn.Linear(3, 3).cuda()
    assert torch.func.vmap(lambda row: row + torch.ones(3, device="cuda"))(x).is_cuda
    assert torch.func.grad(lambda values: (values * torch.ones(3, device="cuda")).sum())(x).is_cuda
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, fused=True),
    "foreach Adam": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "capturable Adam": lambda parameters: torch.optim.Adam(parameters, capturable=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("cuda")
def test_a_scaler_for_cuda_is_enabled_and_steps_every_optimizer(name: str) -> None:
    model = nn.Linear(3, 3).cuda()
    before = model.weight.detach().clone()
    optimizer, scaler = OPTIMIZERS[name](model.parameters()), torch.amp.GradScaler("cuda")
    assert scaler.is_enabled()
    assert torch.amp.GradScaler().is_enabled()
    with torch.autocast("cuda"):
        y = model(torch.ones(2, 3, device="cuda"))
    assert y.dtype is torch.float16
    scaler.scale(y.float().mean()).backward()
    scaler.unscale_(optimizer)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).is_cuda
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0
    assert not torch.equal(model.weight, before)


@pytest.mark.usefixtures("cuda")
def test_custom_functions_cast_what_is_placed() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient

    with torch.autocast("cuda"):
        assert Product.apply(torch.ones(2, device="cuda")).dtype is torch.float16


@pytest.mark.parametrize(
    ("device", "name", "capability"),
    [
        ("cuda", "A100", (8, 0)),
        ("cuda:a100", "A100", (8, 0)),
        ("cuda:h100", "H100", (9, 0)),
        ("cuda:3070", "3070", (8, 6)),
    ],
)
def test_queries_answer_as_the_gpu_that_is_named(device: str, name: str, capability: tuple[int, int]) -> None:
    with emulate(device):
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert name in torch.cuda.get_device_name()
        assert torch.cuda.get_device_capability(0) == capability
        properties = torch.cuda.get_device_properties("cuda")
        assert (properties.major, properties.minor) == capability
        assert torch.cuda.mem_get_info()[1] == properties.total_memory > 8e9
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved(0) == 0
    assert not torch.cuda.is_available()


def test_an_unknown_gpu_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(UsageError, match="a100, h100, 3070"):
        emulate("cuda:a1000")


@pytest.mark.usefixtures("cuda")
def test_streams_and_events_order_and_time_what_ran() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream, x = torch.cuda.Stream(), torch.ones(2, device="cuda")
    start.record()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 2
        y.record_stream(stream)
    torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0.0
    assert y.tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("cuda")
def test_a_graph_computes_again_on_replay_into_the_tensors_of_its_capture() -> None:
    layer, x = nn.Linear(2, 2).cuda(), torch.zeros(1, 2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = layer(x).relu() * 2
    x.copy_(torch.ones(1, 2))
    graph.replay()
    assert torch.equal(y, layer(torch.ones(1, 2, device="cuda")).relu() * 2)


@pytest.mark.usefixtures("cuda")
def test_a_graph_of_a_whole_step_trains_as_the_step_does() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda(), torch.randn(4, 8, device="cuda")
    twin, graph = copy.deepcopy(model), torch.cuda.CUDAGraph()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    with torch.cuda.graph(graph):
        captured = step(model, optimizer, x)
    step(twin, other, x)
    for _ in range(3):
        x.copy_(torch.randn(4, 8))
        graph.replay()
        other.zero_grad()
        assert torch.equal(captured, step(twin, other, x))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.usefixtures("cuda")
def test_random_numbers_repeat_by_the_seed_and_the_state_of_cuda() -> None:
    torch.cuda.manual_seed_all(3)
    first, state = torch.rand(2, device="cuda"), torch.cuda.get_rng_state()
    second = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(2, device="cuda"), second)
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert torch.equal(torch.rand(2, device="cuda", generator=generator), first)


@pytest.mark.usefixtures("cuda")
def test_several_devices_are_one_and_nccl_is_gloo(tmp_path: Path) -> None:
    x = torch.ones(2, 3, device="cuda")
    assert nn.DataParallel(nn.Linear(3, 3)).cuda()(x).is_cuda
    distributed = torch.distributed
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3).cuda(), device_ids=[0], output_device=0)
        model(x).sum().backward()
        distributed.all_reduce(x)
        distributed.barrier(device_ids=[0])
        assert distributed.get_backend() == "gloo"
    finally:
        distributed.destroy_process_group()


def test_all_that_was_replaced_is_restored_also_after_an_exception() -> None:
    owners = [torch, torch.cuda, torch.cuda.memory, torch.cuda.nvtx, torch.autograd, torch.Tensor, torch.distributed]
    owners += [
        torch.nn.parallel.DistributedDataParallel,
        torch.nn.DataParallel,
        torch.backends.cudnn,
        torch.accelerator,
    ]
    with emulate("cuda"):
        torch.ones(1).cuda()  # submodules that are imported late
    before = [dict(vars(owner)) for owner in owners]
    placed = torch.ones(1)

    @emulate("cuda")
    def fail() -> None:
        nonlocal placed
        placed = torch.ones(1).cuda()
        checkpoint(torch.relu, torch.ones(1, requires_grad=True), use_reentrant=False)
        torch.cuda.set_device(1)
        assert torch.cuda.current_device() == 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [dict(vars(owner)) for owner in owners] == before
    assert placed.device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1).cuda()
    with emulate("cuda"):
        assert placed.is_cuda, "what was placed in one block is there in the next"
        assert torch.cuda.current_device() == 0


@pytest.mark.usefixtures("cuda")
def test_compiled_code_is_traced_for_the_cpu_without_a_graph_break() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x = x + torch.arange(8, device=x.device) * torch.ones(8, device="cuda")
            out = self.layer(x)
            return out, nn.functional.mse_loss(out, y.to("cuda", non_blocking=True))

    net = Net().cuda()
    compiled = torch.compile(net, fullgraph=True)
    x, y = torch.randn(4, 8, device="cuda"), torch.randn(4, 8)
    out, loss = compiled(x, y)
    assert (out.device, loss.device) == (CUDA, CUDA)
    torch.testing.assert_close(loss, net(x, y)[1])
    loss.backward()
    assert net.layer.weight.grad is not None


class Branching(nn.Module):
    """Refuses to run on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not (x.is_cuda and self.layer.weight.device == x.device):
            raise RuntimeError("this model runs on CUDA alone")
        y: Tensor = self.layer(x) + torch.zeros(8, device="cuda")
        return y


def test_a_model_that_was_placed_is_audited_where_it_was() -> None:
    with emulate("cuda"):
        subject = Branching().cuda(), (torch.randn(4, 8, device="cuda"),)
    run = audit(subject, device="cuda", compile=False)
    assert not run.failed
    assert not run.of(Verdict.INCOMPLETE)


def test_a_loop_that_was_placed_is_audited_and_watched() -> None:
    with emulate("cuda"):
        model = Branching().cuda()
        optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda")

    def step(number: int) -> float:
        x = torch.randn(4, 8, device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(x).float().pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    run = audit({"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}, device="cuda", steps=3)
    assert not run.failed
    assert run.coverage.seen["16-bit ops"]
    assert str(run.environment["device"]).startswith("cpu"), "a GPU that is not there is no fact about the machine"
    with emulate("cuda"), watch(model, optimizer, scaler, fail_on="never") as seen:
        for number in range(3):
            seen.step(step(number))
    assert not seen.run.failed


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_code_for_another_accelerator_runs_as_it_stands(kind: str) -> None:
    backend = torch.backends.mps if kind == "mps" else torch.xpu
    if backend.is_available():
        pytest.skip(f"this machine has {kind}")
    with emulate(kind):
        layer, x = torch.nn.Linear(4, 4).to(kind), torch.randn(2, 4, device=kind)
        getattr(torch, kind).manual_seed(0)
        getattr(torch, kind).synchronize()
        with torch.autocast(kind, torch.float16):
            y = layer(x)
        compiled = torch.compile(lambda t: t.to(kind) * 2, backend="eager")
        assert backend.is_available()
        assert y.dtype is torch.float16
        assert {y.device.type, layer.weight.device.type} == {kind}
        assert getattr(y, f"is_{kind}")
        assert not y.is_cuda
        assert y.cpu().device.type == "cpu"
        assert torch.equal(compiled(x.cpu()), 2 * x.cpu())
        assert torch.accelerator.current_accelerator() == torch.device(kind)
    assert not backend.is_available()
    assert layer.weight.device.type == "cpu"
