"""What runs on each of two ranks: `rank_worker.py CASES FOLDER`; each rank writes what it saw to FOLDER/RANK.json."""

import contextlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ampcheck
from ampcheck.shadow import Shadow, exchange

HERE = Path(__file__).name
FACTOR = 1.1
"""It has no exact product in a format of 16 bits: exact and real values differ."""


def drawn(rank, *shape, seed=0):
    """Data as they come from a loader: the shadow knows nothing of how they were drawn."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.from_numpy(torch.randn(*shape, generator=generator).numpy().copy())


def faults(shadow):
    return [
        (f.kind, f.where.op, f.where.line if f.where.file.endswith(HERE) else f.where.file, dict(f.reaches))
        for f in shadow.faults
    ]


def failures(run):
    return [
        (f.check, f.where.line if f.where.file.endswith(HERE) else f.where.file, f.message)
        for f in run.of(ampcheck.Verdict.FAIL)
    ]


def line_of(text):
    """The number of the line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}"))


def halves(shadow, rank):
    """A float16 tensor of this rank, and the exact companions on both ranks."""
    half = (drawn(rank, 8) * FACTOR).half()
    exact = [drawn(r, 8).double() * FACTOR for r in range(2)]
    assert torch.equal(shadow.exact(half), exact[rank])
    return half, exact


def collectives(rank):
    """How far exact is from the collective in float64, by the name of the op."""
    group, apart = dist.group.WORLD, {}
    with Shadow() as shadow:
        half, (first, second) = halves(shadow, rank)
        total, both = first + second, torch.cat([first, second])
        mine = total.chunk(2)[rank]

        def compare(name, tensor, expected):
            apart[name] = float((shadow.exact(tensor) - expected).abs().max())
            assert (shadow.exact(tensor) - tensor).abs().max() > 0, f"{name} restarted"

        def empty(size):
            return torch.empty(size, dtype=torch.float16)

        dist.all_reduce(result := half.clone())
        compare("all_reduce", result, total)
        dist.all_reduce(result := half.clone(), op=dist.ReduceOp.MAX)
        compare("maximum", result, torch.maximum(first, second))
        work = dist.all_reduce(result := half.clone(), async_op=True)
        work.wait()
        compare("asynchronous all_reduce", result, total)
        dist.all_gather(parts := [empty(8), empty(8)], half)
        compare("all_gather", parts[0], first)
        compare("all_gather of the second", parts[1], second)
        dist.all_gather_into_tensor(result := empty(16), half)
        compare("all_gather_into_tensor", result, both)
        dist.reduce_scatter_tensor(result := empty(4), half)
        compare("reduce_scatter_tensor", result, mine)
        dist.reduce_scatter(result := empty(4), list(half.clone().chunk(2)))
        compare("reduce_scatter", result, mine)
        dist.broadcast(result := half.clone(), 1)
        compare("broadcast", result, second)
        dist.all_to_all_single(result := empty(8), half)
        compare("all_to_all_single", result, torch.cat([first.chunk(2)[rank], second.chunk(2)[rank]]))
        dist.reduce(result := half.clone(), 0)
        if rank == 0:
            compare("reduce", result, total)
        dist.scatter(result := empty(4), list(half.clone().chunk(2)) if rank == 0 else None, 0)
        compare("scatter", result, first.chunk(2)[rank])
        dist.gather(half, parts := [empty(8), empty(8)] if rank == 0 else None, 0)
        if rank == 0:
            compare("gather", parts[1], second)
        compare("functional all_reduce", functional.all_reduce(half, "sum", group) * 1, total)
        compare("functional all_gather", functional.all_gather_tensor(half, 0, group) * 1, both)
        compare("functional reduce_scatter", functional.reduce_scatter_tensor(half, "sum", 0, group) * 1, mine)
        compare("functional broadcast", functional.broadcast(half, 1, group) * 1, second)
        large = (drawn(rank, 600, 1000) * FACTOR).half()  # more than one entry of the store
        dist.all_reduce(large)
        compare("large all_reduce", large, (drawn(0, 600, 1000).double() + drawn(1, 600, 1000).double()) * FACTOR)
    return {"apart": apart, "unruled": dict(shadow.unruled), "faults": faults(shadow)}


def received(rank):
    """What comes from another process without a collective restarts, and is no fault."""
    with Shadow() as shadow:
        half, _exact = halves(shadow, rank)
        if rank == 0:
            dist.send(half, 1)
        else:
            dist.recv(half, 0)
            half = half + 1
    restarted = rank == 1 and bool((shadow.exact(half) - half).abs().max() < 0.01)
    return {"restarted": restarted, "faults": faults(shadow), "unruled": dict(shadow.unruled)}


def lone(rank):
    """A shadow on one rank alone: nothing waits, nothing is reported, restarts are counted."""

    def communicate():
        half = (drawn(rank, 8) * FACTOR).half()
        dist.all_reduce(half)
        dist.broadcast(half, 1)
        part = torch.empty(4, dtype=torch.float16)
        dist.reduce_scatter_tensor(part, half)
        return [half, part, functional.all_reduce(half, "sum", dist.group.WORLD) * 1]

    plain = communicate()
    shadow = Shadow()
    with shadow if rank == 0 else contextlib.nullcontext():
        results = communicate()
    same = all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))
    return {"same": same, "faults": faults(shadow), "unruled": dict(shadow.unruled)}


def too_large(rank):
    """Companions of large tensors do not travel."""
    before, exchange._LARGEST = exchange._LARGEST, 4
    try:
        with Shadow() as shadow:
            half, _ = halves(shadow, rank)
            dist.all_reduce(half)
    finally:
        exchange._LARGEST = before
    return {"faults": faults(shadow), "unruled": dict(shadow.unruled)}


def overflows(rank):
    """The sum of two ranks is beyond float16."""
    with ampcheck.watch(fail_on="never") as seen:
        total = drawn(rank, 8).abs().add(40_000).half()
        dist.all_reduce(total)  # overflows here
    return {"line": line_of("overflows here"), "failures": failures(seen.run), "value": float(total[0])}


def overflows_elsewhere(rank):
    """One rank overflows before the collective: the other one does not accuse the collective."""
    with Shadow() as shadow:
        total = drawn(rank, 8).abs().add(70_000 if rank else 7)
        total = total.half()  # rank 1 overflows here
        dist.all_reduce(total)
    return {"line": line_of("rank 1 overflows here"), "faults": faults(shadow)}


def flushes(rank):
    """Gradients become zero where they are cast for the sum over ranks."""
    with ampcheck.watch(fail_on="never") as seen:
        gradient = drawn(rank, 8).mul(1e-8)
        sent = gradient.half()  # flushes here
        dist.all_reduce(sent)
        gradient.copy_(sent)
    return {"line": line_of("flushes here"), "failures": failures(seen.run), "value": float(gradient.abs().max())}


def loses_digits(rank):
    """The addends of two ranks cancel: 16 bits keep few digits of what is left of them."""
    with ampcheck.watch(fail_on="never") as seen:
        base = drawn(7, 64) + 1000  # the same on both ranks
        addend = ((base if rank == 0 else -base) + drawn(rank, 64)).half()
        dist.all_reduce(addend)  # digits are lost here
        total = addend.float().square().sum()
    return {"line": line_of("digits are lost here"), "failures": failures(seen.run), "value": float(total)}


def net(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def take_steps(models, rank=None):
    """Three steps of SGD; of two models in one process with the mean of their gradients."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(3):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            data = drawn(number if rank is None else rank, 6, 4, seed=step + 1)
            model(
                data.to(next(model.parameters()).dtype if rank is None else data.dtype)
            ).double().square().mean().backward()
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(parameter.grad for parameter in parameters) / len(parameters)
            for parameter in parameters if rank is None else ():
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return models[0]


def in_float64(norm=False):
    return take_steps([net(norm).double(), net(norm).double()])


def trained(rank, context, make):
    with context:
        return take_steps([make()], rank)


def part_of(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def against_float64(rank, make, norm=False, sharded=False):
    """The loop with and without a shadow, and its exact weights against one process in float64."""
    plain, shadow = trained(rank, contextlib.nullcontext(), make), Shadow(renews=False)
    model = trained(rank, shadow, make)
    apart = []
    for parameter, expected in zip(model.parameters(), in_float64(norm).parameters(), strict=True):
        part = expected.detach().chunk(2)[rank] if sharded else expected.detach()
        apart.append(float((shadow.exact(part_of(parameter).detach()) - part).abs().max()))
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    same = all(torch.equal(part_of(a), part_of(b)) for a, b in pairs)
    return {"same": same, "apart": max(apart), "faults": faults(shadow), "unruled": dict(shadow.unruled)}


def ddp(rank):
    return against_float64(rank, lambda: DistributedDataParallel(net(norm=True)), norm=True)


def ddp_compressed(rank):
    def make():
        model = DistributedDataParallel(net(norm=True))
        model.register_comm_hook(None, fp16_compress_hook)
        return model

    return against_float64(rank, make, norm=True)


def ddp_compressed_overflows(rank):
    """A loss scale of 1e6 takes the gradients beyond float16, in the hook alone."""
    with ampcheck.watch(fail_on="never") as seen:
        model = DistributedDataParallel(net())
        model.register_comm_hook(None, fp16_compress_hook)
        loss = model(drawn(rank, 6, 4)).square().mean() * 1e7
        loss.backward()  # compresses here
    return {"line": line_of("compresses here"), "failures": failures(seen.run)}


def shard(model, dtype, reduce_dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp(rank):
    return against_float64(rank, lambda: shard(net(), torch.float16, torch.float16), sharded=True)


def fsdp_bfloat16(rank):
    return against_float64(rank, lambda: shard(net(), torch.bfloat16, torch.float32), sharded=True)


class RMSNorm(nn.Module):
    """The mean of squares overflows in float16."""

    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        hidden = 300 * self.linear(x)
        return self.weight * hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()  # the norm overflows here


def fsdp_overflows(rank):
    with ampcheck.watch(fail_on="never") as seen:
        torch.manual_seed(0)
        model = shard(RMSNorm(), torch.float16, torch.float32)
        take_steps([model], rank)
    return {"line": line_of("the norm overflows here"), "failures": failures(seen.run)}


def dtensor(rank):
    """Ops on shards and replicas, and redistribution."""
    mesh = init_device_mesh("cpu", (2,))
    x, weight = drawn(0, 8, 4), drawn(1, 4, 4)
    with Shadow() as shadow:
        left, right = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Replicate()])
        product = (left.half() @ right.half()).redistribute(mesh, [Replicate()])
        total = (left.half() @ right.half()).sum().full_tensor()
        over = (1000 * left).half().square().sum().full_tensor()  # the square overflows here
        exact = (shadow.exact(part_of(product)), shadow.exact(total))
    expected = x.double() @ weight.double()
    apart = [float((a - b).abs().max()) for a, b in zip(exact, (expected, expected.sum()), strict=True)]
    line = line_of("the square overflows here")
    return {
        "apart": apart,
        "over": float(over),
        "line": line,
        "faults": faults(shadow),
        "unruled": dict(shadow.unruled),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    number = int(os.environ["RANK"])
    seen = {name: globals()[name](number) for name in sys.argv[1].split(",")}
    (Path(sys.argv[2]) / f"{number}.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()
