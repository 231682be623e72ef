"""Loops on two ranks whose replicas part, and sound ones: `replica_loops.py CASES RESULT` writes where they part."""

import contextlib
import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ampcheck.core.run import Run
from ampcheck.core.subject import Subject
from ampcheck.training.distributed.replicas import compare_ranks, judge_replicas
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.observed import observe

STEPS = 5


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def batches():
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    return [torch.randn(8, 8, generator=generator) for _ in range(4 * STEPS)]


def mapping(model, step, *optimizers, **more):
    return {"model": model, "optimizer": list(optimizers), "step": step, **more}


def averaged(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def loop(model, optimizer=None, *, before=None, after=None, call=None, micro=1, quiet=None, rate=None):
    """A loop of gradient accumulation. before, after: of the step of the optimizer, with its number. quiet: whether a
    micro-batch runs under no_sync. rate: the learning rate of each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches()

    def step(i):
        optimizer.zero_grad()
        for k in range(micro):
            with model.no_sync() if quiet is not None and quiet(k) else contextlib.nullcontext():
                loss = (call or model)(data[micro * i + k]).square().mean()
                loss.backward()
            if before is not None:
                before(i, k)
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate(i)
        optimizer.step()
        if after is not None:
            after(i)
        return loss.item()

    return mapping(model, step, optimizer)


def ddp():
    return loop(DistributedDataParallel(net()))


def accumulates():
    return loop(DistributedDataParallel(net()), micro=2, quiet=lambda k: k == 0)


def syncs_first_micro_batch():
    return loop(DistributedDataParallel(net()), micro=2, quiet=lambda k: k == 1)


def averages_by_hand():
    model = net()
    return loop(model, before=lambda i, k: averaged(model.parameters()), micro=2)


def averages_first_micro_batch_by_hand():
    model = net()
    return loop(model, before=lambda i, k: averaged(model.parameters()) if k == 0 else None, micro=2)


def calls_the_module_inside():
    model = DistributedDataParallel(net())
    return loop(model, call=model.module)


def rate_by_rank():
    return loop(DistributedDataParallel(net()), rate=lambda i: 0.1 / (1 + i * dist.get_rank()))


def noise_by_rank():
    model, generator = DistributedDataParallel(net()), torch.Generator().manual_seed(dist.get_rank())

    def noisy(i, k):
        if i == 2:
            for parameter in model.parameters():
                parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)

    return loop(model, before=noisy)


def momentum_by_rank():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 0:
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    return loop(model, optimizer)


def scaled(everywhere=True, skips=False, shard=False):
    model = net()
    if shard:
        fully_shard(model)
    elif not skips:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0 if everywhere or dist.get_rank() else 4096.0)
    data = batches()

    def step(i):
        optimizer.zero_grad()
        loss = model(data[i]).square().mean()
        if skips and i == 3 and dist.get_rank():
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if skips:
            scaler.unscale_(optimizer)
            bad = torch.stack([(~p.grad.isfinite()).any() for p in model.parameters()]).any()
            for parameter in model.parameters():  # a rank without a gradient gives zeros, and skips alone
                part = parameter.grad.nan_to_num(0, 0, 0)
                dist.all_reduce(part)
                parameter.grad = parameter.grad if bad else part
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return mapping(model, step, optimizer, scaler=scaler)


def shares_the_update():
    """ZeRO by hand: gradients stay apart, each rank steps its part of the parameters and sends it to the other."""
    model, rank = net(), dist.get_rank()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[rank::2], lr=1e-2 * (1 + rank))

    def reduce(i, k):
        for number, parameter in enumerate(parameters):
            dist.reduce(parameter.grad, number % 2)

    def send(i):
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.detach(), number % 2)

    return loop(model, optimizer, before=reduce, after=send)


def local_sgd(every=2):
    model = net()

    def average(i):
        for parameter in model.parameters() if i % every == every - 1 else ():
            dist.all_reduce(parameter.data)
            parameter.data /= 2

    return loop(model, after=average)


def pipeline():
    """Two stages of one shape that begin alike."""
    model, rank, data = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), dist.get_rank(), batches()
    for layer in model:
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if rank else 1e-3)

    def step(i):
        optimizer.zero_grad()
        if rank == 0:
            out = model(data[i])
            dist.send(out.detach(), 1)
            grad = torch.empty(8, 8)
            dist.recv(grad, 1)
            out.backward(grad)
            optimizer.step()
            return 0.0
        hidden = torch.empty(8, 8)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        loss = model(hidden).square().mean()
        loss.backward()
        dist.send(hidden.grad, 0)
        optimizer.step()
        return loss.item()

    return mapping(model, step, optimizer)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def tensor_parallel():
    """Columns and rows by hand: their weights differ from the start, the biases of columns are zero on both ranks."""
    columns, rows = net(seed=dist.get_rank())[0], nn.Linear(16, 2, bias=False)
    nn.init.zeros_(columns.bias)
    model, data = nn.ModuleList([columns, rows]), torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(i):
        optimizer.zero_grad()
        loss = _SumOverRanks.apply(rows(columns(data).relu())).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return mapping(model, step, optimizer)


def experts():
    """Experts of one seed take the tokens of both ranks; the router is averaged."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"router": nn.Linear(8, 8), "expert": nn.Linear(8, 8)})
    data = batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(i):
        optimizer.zero_grad()
        hidden = model["router"](data[i]).relu()
        parts = [torch.empty_like(hidden) for _ in range(2)]
        dist.all_gather(parts, hidden.detach())
        own = torch.cat(parts)[dist.get_rank() :: 2]
        loss = model["expert"](own).square().mean() + hidden.square().mean()
        loss.backward()
        averaged(model["router"].parameters())
        optimizer.step()
        return loss.item()

    return mapping(model, step, optimizer)


def random_masks():
    model = DistributedDataParallel(nn.Sequential(nn.Dropout(0.5), *net()))
    torch.manual_seed(dist.get_rank())
    return loop(model)


def gan():
    generator, critic = DistributedDataParallel(net()), DistributedDataParallel(net(seed=1)[:1])
    first, second = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, critic))
    head, data = nn.Linear(2, 8), batches()

    def step(i):
        second.zero_grad()
        critic(head(generator(data[i])).detach()).square().mean().backward()
        second.step()
        first.zero_grad()
        loss = -critic(head(generator(data[i]))).square().mean()
        loss.backward()
        first.step()
        return loss.item()

    return mapping(nn.ModuleList([generator, critic]), step, first, second)


def fsdp(by_rank=False):
    model = net()
    fully_shard(model)
    return loop(model, rate=(lambda i: 0.1 / (1 + dist.get_rank())) if by_rank else None)


def hybrid():
    """Replicas of shards: each rank has the whole, in a mesh of two replicas and one shard."""
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return loop(model)


CASES = {
    **{
        make.__name__: make
        for make in (ddp, accumulates, averages_by_hand, shares_the_update, local_sgd, pipeline, tensor_parallel)
    },
    **{make.__name__: make for make in (experts, random_masks, gan, fsdp, hybrid, scaled)},
    **{make.__name__: make for make in (syncs_first_micro_batch, averages_first_micro_batch_by_hand, rate_by_rank)},
    **{make.__name__: make for make in (calls_the_module_inside, noise_by_rank, momentum_by_rank)},
    "local_sgd_that_averages_later": lambda: local_sgd(every=50),
    "scale_by_rank": lambda: scaled(everywhere=False),
    "skips_on_one_rank": lambda: scaled(skips=True),
    "shards_with_a_scale_by_rank": lambda: scaled(everywhere=False, shard=True),
    "shards_with_a_rate_by_rank": lambda: fsdp(by_rank=True),
}


def parted(name):
    subject = CASES[name]()
    seen = observe(TrainingLoop(Subject(subject, name=name)), STEPS, follow=False)
    assert seen.stopped is None, (name, seen.stopped)
    drift, coverage = compare_ranks(seen.replicas)
    findings = Run(findings=tuple(judge_replicas(name, drift, seen.events))).to_json()
    return {"findings": findings, "coverage": dict(coverage.seen), "alone": drift is not None and not drift.proven}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {name: parted(name) for name in sys.argv[1].split(",")}
    if dist.get_rank() == 0:
        with open(sys.argv[2], "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
