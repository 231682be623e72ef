"""What runs on each rank: `distributed_worker.py CASE RESULT`; rank 0 writes what was found to RESULT as JSON."""

import contextlib
import json
import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ampcheck.checks import findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Table, Verdict, Where
from ampcheck.core.subject import Subject
from ampcheck.torchtools.saving import same_bits
from ampcheck.training.distributed.measure import measure_distributed
from ampcheck.training.distributed.ranks import gather_runs
from ampcheck.training.loop import TrainingLoop

ROWS = 8
"""Of the whole batch: each of 2 or 4 ranks takes its part."""

TINY = [2, 4]


def net(dtype=torch.float32):
    """Weights and data are small integers: every product and sum is exact, in any order and on any number of ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
        model[0].weight[:, TINY] = 0  # tiny data reach the gradients alone
    return model.to(dtype)


def batch():
    """Two features are so small that their gradients are subnormal, or close to it; one is zero."""
    torch.manual_seed(1)
    return torch.randint(-3, 4, (ROWS, 6)).float() * torch.tensor([1, 1, 2.0**-135, 1, 2.0**-60, 0])


def shard(model, policy=None, mesh=None):
    policy = policy or MixedPrecisionPolicy()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mp_policy=policy, mesh=mesh)
    return fully_shard(model, mp_policy=policy, mesh=mesh)


def square():
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def loop_of(model, *, autocast=None, clip=False, dtype=torch.float32, scale=1.0, mean=False, lr=0.125, reduce=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    world, rank = dist.get_world_size(), dist.get_rank()
    part = batch().to(dtype).chunk(world)[rank]
    if mean:
        torch.manual_seed(rank)
        part = torch.rand(16, 6).to(dtype) + 1

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            out = model(part)
        # The mean over ranks of what each sums up, times the world: the sum over the batch.
        loss = out.float().sum() * world * scale
        loss.backward()
        if reduce is not None:
            reduce(model)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return TrainingLoop(Subject({"model": model, "optimizer": optimizer, "step": step}, name="loop"))


def bf16_hook(state, bucket):
    cast = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(cast, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def hooked(hook):
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, hook)
    return model


def by_hand(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def tensor_parallel():
    """A 16-bit sum over ranks in a forward: those ranks hold parts of a layer, and do not grow with the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, line, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def raise_on_rank_1(model):
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 has had enough")


BF16 = torch.bfloat16

CASES = {
    "ddp": lambda: loop_of(DistributedDataParallel(net()), lr=0.0),
    "fsdp": lambda: loop_of(shard(net()), lr=0.0),
    "hybrid": lambda: loop_of(shard(net(), mesh=square()), lr=0.0),
    "ddp_clips": lambda: loop_of(DistributedDataParallel(net()), clip=True, mean=True),
    "fsdp_clips": lambda: loop_of(shard(net()), clip=True, mean=True),
    "ddp_bf16_hook": lambda: loop_of(hooked(bf16_hook), mean=True),
    "ddp_fp16_hook_flushes": lambda: loop_of(hooked(fp16_compress_hook), mean=True, scale=2.0**-30),
    "ddp_fp16_hook_overflows": lambda: loop_of(hooked(fp16_compress_hook), mean=True, scale=2.0**12),
    "fsdp_bf16_reduce": lambda: loop_of(shard(net(), MixedPrecisionPolicy(BF16, BF16)), mean=True),
    "fsdp_float32_reduce": lambda: loop_of(shard(net(), MixedPrecisionPolicy(BF16, torch.float32)), mean=True),
    "fsdp_bf16_norm": lambda: loop_of(shard(net(BF16)), mean=True, clip=True, dtype=BF16),
    "by_hand_bf16": lambda: loop_of(net(BF16), mean=True, dtype=BF16, reduce=by_hand),
    "tensor_parallel": lambda: loop_of(tensor_parallel(), autocast=True, clip=True, mean=True),
    "rank_autocast": lambda: loop_of(DistributedDataParallel(net()), autocast=dist.get_rank() == 1),
    "raises": lambda: loop_of(net(), reduce=raise_on_rank_1),
}


def watched(name, target):
    loop = CASES[name]()
    before = [r.tensor for r in loop.residents()]
    copies = [t.detach().clone() for t in before]
    stats = measure_distributed(loop, 2, world_size=target)
    return {
        "findings": Run(findings=tuple(findings(stats, Limits()))).to_json(),
        "restored": all(map(same_bits, before, copies)),
        "collectives": [
            {k: getattr(c, k) for k in ("format", "world", "calls", "cast", "divided", "ratio")}
            | {k: getattr(c.where, k) for k in ("op", "phase", "file")}
            for c in stats.collectives
        ],
        "norms": [[n.value, n.exact, n.grouped, n.sharded] for n in stats.norms],
        "coverage": dict(stats.coverage.seen),
    }


def runs():
    """What `gather_runs` makes of a finding of all ranks, of one rank, and of one that differs in its numbers."""
    rank = dist.get_rank()
    findings = [
        Finding("coverage", Verdict.PASS, "s", "the same everywhere"),
        Finding("flush", Verdict.FAIL, "s", f"flushes {rank + 1} of 10", Where("backward"), observed=float(rank + 1)),
    ]
    if rank == 1:
        findings.append(Finding("overflow", Verdict.FAIL, "s", "only here", Where("forward")))
    table = Table("shared", ("a",), ((1,),))
    run = Run({"torch": "x", "device": f"cpu {rank}"}, tuple(findings), Coverage({"ops": 3}), (table,), title="audit")
    whole = gather_runs(run)
    assert (whole is None) == (rank != 0)
    return whole.to_json() if whole is not None else {}


def main():
    cases, result = sys.argv[1].split(","), sys.argv[2]
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    found = {}
    if "ungrouped_runs" in cases:  # no process group was set up
        run = gather_runs(Run(findings=(Finding("coverage", Verdict.PASS, "s", "m"),)))
        found["ungrouped_runs"] = None if run is None else run.to_json()
        assert not dist.is_initialized()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in cases:
        if case == "runs":
            found[case] = runs()
        elif case != "ungrouped_runs":
            name, _, target = case.partition("@")
            found[case] = watched(name, int(target) if target else None)
    if dist.get_rank() == 0:
        with open(result, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
