"""DDP loops on two ranks that do not do the same: `unequal_ranks.py CASE FOLDER`; each rank writes its run there."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ampcheck.core.plan import Plan
from ampcheck.core.subject import as_subject
from ampcheck.training.judge import judge_training


def parts():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))
    model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(number):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(data).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return plain, optimizer, scaler, {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


def subject(case):
    plain, optimizer, scaler, shape = parts()
    second, step = dist.get_rank() == 1, shape["step"]
    checkpointed = (plain, optimizer) if case == "forgets_the_scaler" else (plain, optimizer, scaler)

    def save():
        return None if second else [one.state_dict() for one in checkpointed]

    def load(checkpoint):
        if second and case == "load_raises":
            raise KeyError("rank 1 cannot load")
        for one, state in zip(checkpointed, checkpoint, strict=True):
            one.load_state_dict(state)

    def save_raises():
        if second:
            raise OSError("rank 1 cannot write")
        return save()

    def raises_after(number):
        value = step(number)
        if second and number == 2:
            raise ValueError("rank 1 cannot log")
        return value

    def raises_before(number):
        if second and number == 2:
            raise ValueError("rank 1 has no data")
        return step(number)

    def value_on_first(number):
        value = step(number)
        return None if second else value

    def dies(number):
        if second and number == 2:
            os._exit(0)
        return step(number)

    steps = {"raises_after": raises_after, "raises_before": raises_before, "value_on_first": value_on_first}
    if case == "nan_on_second":
        shape["step"] = lambda number: step(number) * (float("nan") if second and number == 1 else 1.0)
    elif case in ("raises_after", "raises_before", "value_on_first", "dies"):
        shape["step"] = {**steps, "dies": dies}[case]
    else:
        shape |= {"save": save_raises if case == "save_raises" else save, "load": load}
    return as_subject(shape)


def main():
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    given = subject(case)
    run = judge_training(Plan.of(given, checks=("resume",) if "save" in given.shape else None, steps=4))
    run.save(folder / f"{dist.get_rank()}.json")


if __name__ == "__main__":
    main()
