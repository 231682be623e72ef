"""Steps on several ranks, healthy and with planted defects; spawned processes import them by name."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed_functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ampcheck.sharded import ShardedStep

BF16 = torch.bfloat16
FLOAT_INPUTS = MixedPrecisionPolicy(BF16, torch.float32, cast_forward_inputs=False)
MIXED = MixedPrecisionPolicy(BF16, torch.float32)
ROWS = 16


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 16, generator=generator), torch.randn(ROWS, 4, generator=generator)


def chunks(rank, ranks):
    return tuple(part.chunk(ranks)[rank] for part in data())


def unequal(rank, ranks):
    """The last rank has 2 rows."""
    if ranks == 1:
        return data()
    size = (ROWS - 2) // (ranks - 1)
    sizes = [size] * (ranks - 2)
    return tuple(part.split([*sizes, ROWS - 2 - sum(sizes), 2])[rank] for part in data())


def everything(rank, ranks):
    return data()


def opposite(rank, ranks):
    """Gradients of the two halves of the ranks that cancel but for a part in a thousand."""
    inputs, targets = data()
    half = ROWS // 2
    inputs = torch.cat([inputs[:half], inputs[:half]])
    targets = torch.cat([targets[:half] + 1e3, targets[:half] - 1e3])
    return tuple(part.chunk(ranks)[rank] for part in (inputs, targets))


def backward(model, batch, scale=1.0):
    inputs, targets = batch
    (nn.functional.mse_loss(model(inputs).float(), targets) * scale).backward()


def by_hand(model, batch, dtype=None, divide=True, scale=1.0):
    backward(model, batch, scale)
    for parameter in model.parameters():
        total = parameter.grad.to(dtype or parameter.grad.dtype)
        dist.all_reduce(total)
        parameter.grad.copy_(total)
        if divide:
            parameter.grad.div_(dist.get_world_size())


def weighted(model, batch):
    """A mean over all rows of all ranks, by the number of each."""
    inputs, targets = batch
    rows = torch.tensor(float(len(inputs)))
    dist.all_reduce(rows)
    (nn.functional.mse_loss(model(inputs), targets, reduction="sum") / (rows * 4)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def ddp(model, hook=None):
    wrapped = DistributedDataParallel(model)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def bf16_hook(state, bucket):
    """DDP takes the hook itself with NCCL only."""
    return bf16_compress_hook(None, bucket)


def fsdp(model, policy=None, layers=True, root=None):
    """The policy of the layers, and of the root, by default the same."""
    for layer in model if layers else ():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mp_policy=policy or MixedPrecisionPolicy())
    return fully_shard(model, mp_policy=root or policy or MixedPrecisionPolicy())


def fsdp_ignoring(model, declared, **applied):
    """A policy that FSDP2 accepts and ignores, as with a defect of PyTorch: its parameters get another."""
    sharded = fsdp(model, declared)
    for layer in sharded:
        for state in parameters_of(layer) if isinstance(layer, nn.Linear) else ():
            policy = replace(declared, **applied)
            state.init_dtype_attrs = partial(lambda init, other, _policy: init(other), state.init_dtype_attrs, policy)
    return sharded


def parameters_of(layer):
    """What FSDP2 keeps of each parameter of a layer."""
    state = layer._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def tensor_parallel(model):
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, line, {"0": ColwiseParallel(), "2": RowwiseParallel()})


class Rowwise(nn.Module):
    """Two halves of a product are large and cancel: a row-wise layer adds them up over ranks in its own dtype."""

    def __init__(self):
        super().__init__()
        self.row = nn.Linear(32, 8, bias=False)

    def forward(self, x):
        wide = torch.cat([x, x], 1) * 100
        return self.row(wide.to(self.row.weight.dtype)).float()


def cancelling(dtype=torch.float32):
    model = Rowwise()
    with torch.no_grad():
        model.row.weight[:, 16:] = -model.row.weight[:, :16] * (1 + 1e-3)
    return model.to(dtype)


def summed_squares(model, batch):
    model(batch[0]).square().sum().backward()


def rowwise(model):
    from torch.distributed.tensor import Replicate

    line = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, line, {"row": RowwiseParallel(input_layouts=Replicate())})


def rowwise_by_hand(model, batch, dtype=BF16):
    """Each rank has a part of the columns; the partial products are cast before they are added up."""
    wide, weight = torch.cat([batch[0], batch[0]], 1) * 100, model.row.weight
    rank, ranks = dist.get_rank(), dist.get_world_size()
    columns = slice(32 * rank // ranks, 32 * (rank + 1) // ranks)
    partial_product = nn.functional.linear(wide[:, columns], weight[:, columns])
    total = distributed_functional.all_reduce(partial_product.to(dtype) if ranks > 1 else partial_product).float()
    (total.square().sum() / ranks).backward()  # the backward of this sum adds up over ranks, too
    dist.all_reduce(weight.grad)


LOST = "ranks in bfloat16 loses"
HEALTHY = {
    "by_hand": ShardedStep(net, chunks, by_hand),
    "by_hand_bf16": ShardedStep(net, chunks, partial(by_hand, dtype=BF16)),
    "weighted": ShardedStep(net, unequal, weighted),
    "ddp": ShardedStep(net, chunks, backward, ddp),
    "fsdp": ShardedStep(net, chunks, backward, fsdp),
    "fsdp_mixed": ShardedStep(net, chunks, backward, partial(fsdp, policy=MIXED)),
    "fsdp_bf16_sums": ShardedStep(net, chunks, backward, partial(fsdp, policy=MixedPrecisionPolicy(None, BF16))),
    "ddp_fp16_hook": ShardedStep(net, chunks, backward, partial(ddp, hook=fp16_compress_hook)),
    "ddp_bf16_hook": ShardedStep(net, chunks, backward, partial(ddp, hook=bf16_hook)),
    "cancelling": ShardedStep(net, opposite, by_hand),
    "ddp_cancelling": ShardedStep(net, opposite, backward, ddp),
    "fsdp_cancelling_fp32": ShardedStep(net, opposite, backward, fsdp),
    "tensor_parallel": ShardedStep(net, everything, backward, tensor_parallel),
    "rowwise": ShardedStep(cancelling, everything, summed_squares, rowwise),
    "rowwise_by_hand": ShardedStep(cancelling, everything, partial(rowwise_by_hand, dtype=torch.float32)),
}
PLANTED = {
    "undivided": (ShardedStep(net, chunks, partial(by_hand, divide=False)), "all together they are {ranks} times"),
    "unequal": (ShardedStep(net, unequal, by_hand), "one process on the whole batch"),
    "unequal_ddp": (ShardedStep(net, unequal, backward, ddp), "one process on the whole batch"),
    "bf16": (ShardedStep(net, opposite, partial(by_hand, dtype=BF16)), LOST),
    "fsdp_bf16": (
        ShardedStep(net, opposite, backward, partial(fsdp, policy=MixedPrecisionPolicy(None, BF16))),
        LOST,
    ),
    "ddp_bf16_hook_cancels": (ShardedStep(net, opposite, backward, partial(ddp, hook=bf16_hook)), LOST),
    "ddp_fp16_hook_cancels": (
        ShardedStep(net, opposite, backward, partial(ddp, hook=fp16_compress_hook)),
        "ranks in float16 loses",
    ),
    "fp16_overflow": (
        ShardedStep(net, everything, partial(by_hand, dtype=torch.float16, scale=1.9e5)),
        "elements of c10d::allreduce_",
    ),
    "rowwise_bf16": (ShardedStep(cancelling, everything, rowwise_by_hand), LOST),
    "root_policy": (
        ShardedStep(net, chunks, backward, partial(fsdp, policy=MixedPrecisionPolicy(), root=FLOAT_INPUTS)),
        "child that was sharded before",
    ),
    "param_ignored": (
        ShardedStep(net, chunks, backward, partial(fsdp_ignoring, declared=FLOAT_INPUTS, param_dtype=None)),
        "computes in torch.float32",
    ),
    "reduce_ignored": (
        ShardedStep(net, chunks, backward, partial(fsdp_ignoring, declared=MIXED, reduce_dtype=BF16)),
        "gradients are summed over ranks in bfloat16",
    ),
}
