"""What a watch writes to TensorBoard and to Weights & Biases is what plain PyTorch computes of each step, and what the
run says; read back by their own readers, without network."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from watched_net import Net, data

import ampcheck
from ampcheck import Run, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")


class Kept:
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.steps: dict[int, Mapping[str, float]] = {}
        self.runs: list[Run] = []

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        assert not self.runs, "nothing may follow the run"
        self.steps[step] = values

    def write_run(self, run: Run) -> None:
        self.runs.append(run)


class Loop:
    """A float16 loop with a scaler whose first steps are skipped; `expected` has what plain PyTorch says of each."""

    def __init__(self, init_scale: float = 2.0**24) -> None:
        self.model = Net(half=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=10_000)
        self.batches, self.number = data(), 0
        self.expected: dict[int, dict[str, float]] = {}

    def step(self) -> None:
        batch = self.batches[self.number % len(self.batches)]
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(batch["x"])["loss"]).backward()
        self.scaler.unscale_(self.optimizer)
        before = [p.detach().clone() for p in self.model.parameters()]
        gradients = torch.cat([p.grad.flatten() for p in self.model.parameters()]).double()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if bool(gradients.isfinite().all()):
            after = torch.cat([p.detach().flatten() for p in self.model.parameters()]).double()
            update = after - torch.cat([p.flatten() for p in before]).double()
            self.expected[self.number] = {
                "loss scale": scale,
                "gradient norm": float(gradients.norm()),
                "gradient zeros": float((gradients == 0).double().mean()),
                "update norm": float(update.norm()),
                "update by weight": float(update.norm() / after.norm()),
                "learning rate": 0.1,
            }
        self.number += 1


def watched(writer: Any, *, every: int = 1, steps: int = 30, init_scale: float = 2.0**24) -> Loop:
    loop = Loop(init_scale)
    with ampcheck.watch(loop.model, loop.optimizer, loop.scaler, every=every, fail_on="never") as seen:
        seen.follow(writer)
        for _ in range(steps):
            loop.step()
    return loop


def test_the_figures_of_each_measured_step_are_those_of_plain_pytorch() -> None:
    kept = Kept()
    loop = watched(kept)
    assert 5 < len(loop.expected) < 30  # the first steps were skipped
    assert list(kept.steps) == list(loop.expected)
    for number, expected in loop.expected.items():
        assert kept.steps[number]["skipped steps"] == number - sum(n < number for n in loop.expected)
        for name, value in expected.items():
            assert kept.steps[number][name] == pytest.approx(value, rel=1e-4), (number, name)
    (run,) = kept.runs
    assert "Net" in run.title


def test_every_tenth_step_is_written_where_every_tenth_is_measured() -> None:
    kept = Kept()
    watched(kept, every=10, init_scale=1.0)
    assert list(kept.steps) == [0, 10, 20]


def test_what_was_measured_before_a_writer_follows_is_none_of_its_first_step() -> None:
    kept, loop = Kept(), Loop(init_scale=1.0)
    with ampcheck.watch(loop.model, loop.optimizer, loop.scaler, fail_on="never") as seen:
        for _ in range(4):
            loop.step()
        seen.follow(kept)
        loop.step()
    assert list(kept.steps) == [4]
    assert kept.steps[4]["gradient norm"] == pytest.approx(loop.expected[4]["gradient norm"], rel=1e-4)


class Failing(Kept):
    """A service that is gone from the second step on."""

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        super().write_step(step, values)
        if step:
            raise OSError("no space left")


def test_a_writer_that_fails_stops_neither_the_loop_nor_other_writers_and_hides_no_error() -> None:
    failing, kept, loop = Failing(), Kept(), Loop(init_scale=1.0)

    def train() -> None:
        with ampcheck.watch(loop.model, loop.optimizer, loop.scaler, fail_on="never") as seen:
            seen.follow(failing)
            seen.follow(kept)
            for _ in range(3):
                loop.step()
            raise ZeroDivisionError

    with (
        pytest.warns(UserWarning, match="Failing gets nothing more, since it raised OSError"),
        pytest.raises(ZeroDivisionError),
    ):
        train()
    assert (list(failing.steps), list(kept.steps)) == ([0, 1], [0, 1, 2])
    assert (len(failing.runs), len(kept.runs)) == (0, 1)


def test_a_watch_that_writes_leaves_the_weights_bitwise_as_they_are() -> None:
    plain = Loop()
    for _ in range(30):
        plain.step()
    for ours, theirs in zip(watched(Kept()).model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_block_without_an_optimizer_writes_its_findings_alone() -> None:
    kept = Kept()
    with ampcheck.watch(fail_on="never") as seen:
        seen.follow(kept)
        torch.ones(3).half() * 1e5
    assert not kept.steps
    assert kept.runs[0].failed


def test_a_block_that_raises_writes_what_was_found_until_then() -> None:
    kept, loop = Kept(), Loop(init_scale=1.0)

    def train() -> None:
        with ampcheck.watch(loop.model, loop.optimizer, loop.scaler) as seen:
            seen.follow(kept)
            loop.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert list(kept.steps) == [0]
    assert len(kept.runs) == 1


def test_the_callback_of_the_trainer_writes_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import Trainer, TrainingArguments

    from ampcheck.callbacks.huggingface import AmpcheckCallback

    settings = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    kept = Kept()
    callback = AmpcheckCallback(every=2, writer=kept)
    Trainer(Net(), settings, train_dataset=data(), callbacks=[callback]).train()
    assert list(kept.steps) == [0, 2]
    assert len(kept.runs) == 1


def test_the_callback_of_lightning_writes_too(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from torch.utils.data import DataLoader

    from ampcheck.callbacks.lightning import AmpcheckCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    kept = Kept()
    pl.Trainer(
        max_steps=4,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        logger=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(tmp_path),
        callbacks=[AmpcheckCallback(every=2, writer=kept)],
    ).fit(Module(), DataLoader(data(), batch_size=2))
    assert list(kept.steps) == [0, 2]
    assert len(kept.runs) == 1


def test_tensorboard_reads_the_steps_the_counts_and_the_findings(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from ampcheck.callbacks.tensorboard import TensorBoardWriter

    loop = watched(TensorBoardWriter(tmp_path / "amp"))
    events = EventAccumulator(str(tmp_path / "amp"))
    events.Reload()
    for name in ("gradient norm", "update by weight", "loss scale"):
        read = {event.step: event.value for event in events.Scalars(f"ampcheck/{name}")}
        expected = {number: values[name] for number, values in loop.expected.items()}
        assert read == pytest.approx(expected, rel=1e-4)
    assert any(tag.startswith("ampcheck/findings/") for tag in events.Tags()["scalars"])
    (event,) = events.Tensors("ampcheck/findings/text_summary")
    assert b"looked at" in event.tensor_proto.string_val[0]


def test_a_summary_writer_of_the_users_own_stays_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    from ampcheck.callbacks.tensorboard import TensorBoardWriter

    with SummaryWriter(str(tmp_path)) as own:
        watched(TensorBoardWriter(own), steps=3)
        own.add_scalar("mine", 1.0, 0)
    with pytest.raises(UsageError, match="takes a folder or a SummaryWriter; found int"):
        TensorBoardWriter(3)


def test_wandb_keeps_the_steps_the_table_and_the_counts_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    from ampcheck.callbacks.wandb import WandbWriter

    with pytest.raises(UsageError, match=r"needs a run: call wandb\.init"):
        WandbWriter()
    with wandb.init(project="amp") as session:
        session.log({"loss": 1.0}, step=100)  # the user's own steps are ahead
        loop = watched(WandbWriter())
        summary = dict(session.summary)
    last = max(loop.expected)
    assert summary["ampcheck/step"] == last
    assert summary["ampcheck/gradient norm"] == pytest.approx(loop.expected[last]["gradient norm"], rel=1e-4)
    assert "looked at" in summary["ampcheck/text"]
    assert sum(summary.get(f"ampcheck/{verdict}", 0) for verdict in ("pass", "warn", "fail", "skip")) > 0
    (table,) = tmp_path.rglob("findings*.table.json")
    assert json.loads(table.read_text())["columns"][:2] == ["verdict", "check"]
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb")])
@pytest.mark.usefixtures("warm_processes")
def test_a_missing_package_is_one_sentence_with_the_extra_to_install(name: str, package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import ampcheck.callbacks.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: ampcheck.callbacks.{name} needs {package}: pip install 'ampcheck[{name}]'"


def test_figures_that_do_not_apply_are_left_out() -> None:
    kept, model = Kept(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampcheck.watch(model, optimizer) as seen:
        seen.follow(kept)
        model(data()[0]["x"])["loss"].backward()
        optimizer.step()
    assert not {"loss scale", "skipped steps", "gradient subnormal", "updates unchanged"} & set(kept.steps[0])
    assert all(map(math.isfinite, kept.steps[0].values()))
