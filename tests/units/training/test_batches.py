"""Promise: a loop hands over its loader; every run of its steps is judged on the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset, get_worker_info

import ampcheck
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Verdict
from ampcheck.core.subject import Subject
from ampcheck.torchtools.batches import played

COUNT, WIDTH = 64, 4


class Augmented(Dataset[torch.Tensor]):
    """Rows with noise, which each worker draws by its own seed."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(WIDTH)


class Stream(IterableDataset[torch.Tensor]):
    """Rows without end, which each worker draws for itself."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        while True:
            yield torch.rand(WIDTH) + (worker.id if worker is not None else 0)


def reshuffled() -> DataLoader[Any]:
    data = TensorDataset(torch.arange(COUNT * WIDTH).reshape(COUNT, WIDTH).float())
    return DataLoader(data, 16, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5)))


LOADERS = {
    "a list": lambda: list(torch.rand(7, 8, WIDTH)),
    "no workers": lambda: DataLoader(Augmented(), 8, shuffle=True),
    "workers": lambda: DataLoader(Augmented(), 8, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(Augmented(), 8, shuffle=True, num_workers=2, persistent_workers=True),
    "a stream": lambda: DataLoader(Stream(), 8, num_workers=2),
    "a sampler that reshuffles": reshuffled,
}


def rows(batch: Any) -> torch.Tensor:
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def make(data: object, notes: Path | None = None, **more: Any) -> dict[str, Any]:
    """A loop whose step changes its batch. notes: a file, which no audit restores, takes the sum of each batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}

    def step(batch: Any) -> float:
        if notes is not None:
            with notes.open("a", encoding="utf-8") as file:
                file.write(f"{float(rows(batch).double().sum())!r}\n")
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(rows(batch).div_(COUNT)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def save() -> dict[str, Any]:
        return {**{name: part.state_dict() for name, part in parts.items()}, "random": torch.get_rng_state()}

    def load(checkpoint: dict[str, Any]) -> None:
        torch.set_rng_state(checkpoint.pop("random"))
        for name, state in checkpoint.items():
            parts[name].load_state_dict(state)

    return {**parts, "save": save, "load": load, "data": data, "step": step, **more}


def noted(path: Path) -> list[float]:
    return [float(line) for line in path.read_text(encoding="utf-8").split()]


@pytest.mark.parametrize("kind", LOADERS)
def test_all_runs_of_the_steps_see_the_same_batches(kind: str, tmp_path: Path) -> None:
    run = ampcheck.audit(make(LOADERS[kind](), tmp_path / "notes"), steps=6)
    assert not [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN, Verdict.INCOMPLETE)]
    passed = {f.check for f in run.findings if f.verdict is Verdict.PASS}
    assert {"resume", "scale-invariance"} <= passed
    assert run.coverage.seen["batches"] == 6
    sums = noted(tmp_path / "notes")
    assert set(sums) == set(sums[:6])
    assert len(sums) > 12  # the plain steps, and those that are resumed
    follows, begins = dict(zip(sums[:6], [*sums[1:6], sums[0]], strict=True)), (sums[0], sums[3])
    assert all(second in (follows[first], *begins) for first, second in pairwise(sums))


def test_a_checkpoint_that_forgets_is_found_on_the_same_batches() -> None:
    loop = make(reshuffled())
    save = loop["save"]
    run = ampcheck.audit({**loop, "save": lambda: {k: v for k, v in save().items() if k != "optimizer"}}, steps=6)
    assert "resume" in {f.check for f in run.findings if f.verdict is Verdict.FAIL}


def test_a_loader_that_ends_begins_again_and_its_generator_is_restored() -> None:
    loader = reshuffled()
    generator = loader.sampler.generator  # type: ignore[attr-defined]
    subject = Subject(make(loader))
    before, of_all = generator.get_state(), torch.get_rng_state()
    batches = played(subject, 7).shape["step"].batches
    assert len(batches) == 7
    assert not torch.equal(rows(batches[0]), rows(batches[4]))  # four make an epoch
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), of_all)
    assert all(torch.equal(rows(a), rows(b)) for a, b in zip(batches, loader, strict=False))


def test_a_loader_that_fills_the_same_memory_again_is_copied() -> None:
    def same() -> Iterator[torch.Tensor]:
        memory = torch.zeros(2, WIDTH)
        for number in range(3):
            yield memory.fill_(number)

    batches = played(Subject(make(same())), 3).shape["step"].batches
    assert [float(batch[0, 0]) for batch in batches] == [0.0, 1.0, 2.0]


def raises() -> Iterator[torch.Tensor]:
    yield torch.rand(8, WIDTH)
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (list, "is empty"),
        (lambda: (torch.rand(8, WIDTH) for _ in range(3)), "ended after 3 of 24 batches"),
        (raises, "raised OSError: the disk is gone"),
        (lambda: {"x": torch.rand(8, WIDTH)}, "must be an iterable of batches; found dict"),
        (lambda: 24, "must be an iterable of batches; found int"),
        (lambda: [torch.rand(8, WIDTH, requires_grad=True) * 2], "cannot be copied"),
    ],
)
def test_data_that_cannot_be_played_are_refused_in_one_sentence(data: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ampcheck.audit(make(data()))


@pytest.mark.parametrize("step", [lambda: 0.0, lambda x, y: 0.0])
def test_a_step_that_does_not_take_a_batch_is_refused(step: Any) -> None:
    with pytest.raises(UsageError, match=r"called as step\(batch\), with one argument"):
        ampcheck.audit(make(reshuffled(), step=step))
