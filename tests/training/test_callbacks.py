"""The callbacks, with the real libraries on models built small; nothing is downloaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict, collect

# What the libraries warn of among themselves is theirs; this project's own warnings stay errors elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """Two layers whose forward runs in float16, if asked to. In batch `bad` the input is NaN."""

    def __init__(self, *, half: bool = False, bad: int | None = None, raises: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.half_precision, self.bad, self.raises, self.calls = half, bad, raises, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.calls == self.raises:
            raise ZeroDivisionError
        if self.bad is not None and self.calls >= self.bad:
            x = x * math.nan
        self.calls += 1
        with torch.autocast("cpu", torch.float16, enabled=self.half_precision):
            out = self.second(torch.tanh(self.first(x)))
        return {"loss": out.float().square().mean(), "logits": out.detach()}


def data(count: int = 16) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.zeros(1)} for _ in range(count)]


def hooks(optimizer: Any) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


class TestHuggingFace:
    @pytest.fixture(autouse=True)
    def _libraries(self) -> None:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")

    def trainer(self, tmp_path: Path, model: nn.Module, callback: Any, **settings: Any) -> Any:
        from transformers import Trainer, TrainingArguments

        given = {
            "output_dir": str(tmp_path), "max_steps": 8, "per_device_train_batch_size": 2, "logging_steps": 1,
            "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "seed": 0,
            "logging_nan_inf_filter": False, "dataloader_pin_memory": False, "max_grad_norm": 1.0,
        }  # fmt: skip
        callbacks = [] if callback is None else [callback]
        return Trainer(model, TrainingArguments(**{**given, **settings}), train_dataset=data(), callbacks=callbacks)

    def callback(self, **settings: Any) -> Any:
        from ampcheck.callbacks.huggingface import AmpcheckCallback

        return AmpcheckCallback(**settings)

    def test_a_gpt2_under_bfloat16_autocast_is_watched(self, tmp_path: Path) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        torch.manual_seed(0)
        config = GPT2Config(
            n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=32, bos_token_id=0, eos_token_id=0
        )
        ids = torch.randint(0, 32, (16, 8))
        callback = self.callback(every=2, json=tmp_path / "run.json", html=tmp_path / "run.html")
        arguments = TrainingArguments(
            str(tmp_path), max_steps=6, bf16=True, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
            disable_tqdm=True, dataloader_pin_memory=False, per_device_train_batch_size=4,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in ids]
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, callbacks=[callback])
        with collect() as runs:
            trainer.train()

        (run,) = runs
        assert run is callback.run
        assert not run.failed, str(run)
        assert (run.coverage.seen["optimizer steps"], run.coverage.seen["measured steps"]) == (6, 3)
        assert {table.title for table in run.tables} == {
            "Gradients and updates: GPT2LMHeadModel", "Optimizer steps: GPT2LMHeadModel",
        }  # fmt: skip
        assert any("transformer.h.0.attn.c_attn.weight" in row for row in run.tables[0].rows)
        assert Run.load(tmp_path / "run.json") == run
        assert "GPT2LMHeadModel" in (tmp_path / "run.html").read_text()
        assert hooks(trainer.optimizer.optimizer) == 0
        (logged,) = (entry for entry in trainer.state.log_history if "ampcheck/pass" in entry)
        assert logged["ampcheck/pass"] == len(run.of(Verdict.PASS))

    @pytest.mark.slow
    def test_the_weights_are_those_of_a_training_without_it(self, tmp_path: Path) -> None:
        one, other = Net(), Net()
        self.trainer(tmp_path, one, None, bf16=True).train()
        self.trainer(tmp_path, other, self.callback(every=1), bf16=True).train()

        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    @pytest.mark.parametrize("bad", [None, 2])
    def test_the_scaler_of_accelerate_is_followed(self, tmp_path: Path, bad: int | None) -> None:
        callback = self.callback(every=1)
        trainer = self.trainer(tmp_path, Net(half=True, bad=bad), callback, max_steps=20)
        # Accelerate makes a scaler for accelerators only; on a CPU float16 is otherwise the same.
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        trainer.train()

        (finding,) = (one for one in callback.run.findings if one.check == "loss-scale")
        assert finding.verdict is (Verdict.PASS if bad is None else Verdict.FAIL)
        assert callback.run.coverage.seen["loss scales"] == 21

    def test_a_failure_raises_at_the_end_where_asked_for(self, tmp_path: Path) -> None:
        callback = self.callback(every=1, raises=True)
        trainer = self.trainer(tmp_path, Net(bad=3), callback, max_grad_norm=0.0)
        with collect() as runs, pytest.raises(AssertionError, match="nonfinite-gradient"):
            trainer.train()

        assert len(runs) == 1
        assert hooks(trainer.optimizer.optimizer) == 0

    def test_after_an_exception_the_block_ends_the_watch(self, tmp_path: Path) -> None:
        callback = self.callback(every=1)
        trainer = self.trainer(tmp_path, Net(raises=3), callback)
        with collect() as runs:
            with pytest.raises(ZeroDivisionError), callback:
                trainer.train()
            assert hooks(trainer.optimizer.optimizer) == 0

        (run,) = runs
        assert run.coverage.seen["optimizer steps"] == 3

    @pytest.mark.slow
    def test_after_an_exception_the_next_training_ends_the_watch(self, tmp_path: Path) -> None:
        callback = self.callback(every=1)
        broken = self.trainer(tmp_path, Net(raises=3), callback)
        with pytest.raises(ZeroDivisionError):
            broken.train()
        self.trainer(tmp_path, Net(), callback).train()

        assert hooks(broken.optimizer.optimizer) == 0
        assert callback.run.coverage.seen["optimizer steps"] == 8

    def test_bad_settings_are_told_at_once(self) -> None:
        with pytest.raises(UsageError, match="1 or more"):
            self.callback(every=0)
        with pytest.raises(UsageError, match="casts, ops, all"):
            self.callback(level="bits")


class TestLightning:
    @pytest.fixture(autouse=True)
    def _libraries(self) -> None:
        pytest.importorskip("lightning.pytorch")

    def module(self, net: nn.Module) -> Any:
        import lightning.pytorch as pl

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return self.net(**batch)["loss"]

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        return Module()

    def fit(self, tmp_path: Path, module: Any, callback: Any = None, **settings: Any) -> Any:
        import lightning.pytorch as pl
        from torch.utils.data import DataLoader

        given = {
            "max_steps": 8, "max_epochs": -1, "accelerator": "cpu", "devices": 1, "enable_progress_bar": False,
            "enable_model_summary": False, "enable_checkpointing": False, "logger": False, "precision": "bf16-mixed",
            "default_root_dir": tmp_path, "log_every_n_steps": 1,
        }  # fmt: skip
        callbacks = [] if callback is None else [callback]
        trainer = pl.Trainer(**{**given, **settings}, callbacks=callbacks)
        trainer.fit(module, DataLoader(data(), batch_size=2))
        return trainer

    def callback(self, **settings: Any) -> Any:
        from ampcheck.callbacks.lightning import AmpcheckCallback

        return AmpcheckCallback(**settings)

    def test_bfloat16_mixed_is_watched_and_its_logger_counts_the_verdicts(self, tmp_path: Path) -> None:
        from lightning.pytorch.loggers import CSVLogger

        callback = self.callback(every=2, json=tmp_path / "run.json")
        module = self.module(Net())
        with collect() as runs:
            trainer = self.fit(tmp_path, module, callback, logger=CSVLogger(tmp_path))

        (run,) = runs
        assert run is callback.run
        assert not run.failed, str(run)
        assert (run.coverage.seen["optimizer steps"], run.coverage.seen["measured steps"]) == (8, 4)
        assert run.coverage.seen["gradients"] == 16
        assert Run.load(tmp_path / "run.json") == run
        assert hooks(trainer.optimizers[0]) == 0
        trainer.logger.save()
        assert "ampcheck/pass" in (Path(trainer.logger.log_dir) / "metrics.csv").read_text()

    def test_the_weights_are_those_of_a_training_without_it(self, tmp_path: Path) -> None:
        one, other = self.module(Net()), self.module(Net())
        self.fit(tmp_path, one)
        self.fit(tmp_path, other, self.callback(every=1))

        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    @pytest.mark.parametrize("bad", [None, 2])
    def test_the_scaler_of_16_mixed_is_followed(self, tmp_path: Path, bad: int | None) -> None:
        from lightning.pytorch.plugins.precision import MixedPrecision

        callback = self.callback(every=1)
        # By precision="16-mixed" alone Lightning takes bfloat16 on a CPU.
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        self.fit(tmp_path, self.module(Net(bad=bad)), callback, precision=None, plugins=[plugin], max_steps=20)

        (finding,) = (one for one in callback.run.findings if one.check == "loss-scale")
        assert finding.verdict is (Verdict.PASS if bad is None else Verdict.FAIL)

    def test_a_failure_raises_at_the_end_where_asked_for(self, tmp_path: Path) -> None:
        callback = self.callback(every=1, raises=True)
        with collect() as runs, pytest.raises(AssertionError, match="nonfinite-gradient"):
            self.fit(tmp_path, self.module(Net(bad=3)), callback)

        assert len(runs) == 1

    def test_an_exception_ends_the_watch(self, tmp_path: Path) -> None:
        callback = self.callback(every=1)
        module = self.module(Net(raises=3))
        with collect() as runs, pytest.raises(ZeroDivisionError):
            self.fit(tmp_path, module, callback)

        (run,) = runs
        assert run.coverage.seen["optimizer steps"] == 3
        assert hooks(module.trainer.optimizers[0]) == 0
