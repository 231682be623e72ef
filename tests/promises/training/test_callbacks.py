"""The callbacks, with the real libraries on models built small; nothing is downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import collect
from torch import nn
from watched_net import Net, data

from ampcheck import Run, UsageError, Verdict

# What the libraries warn of among themselves is theirs; this project's own warnings stay errors elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")


def hooks(optimizer: Any) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


SCRIPTS = {
    "watch": "with ampcheck.watch(model, optimizer{fail_on}):\n    for _ in range(8):\n        step()",
    "huggingface": """
from transformers import Trainer, TrainingArguments
from ampcheck.callbacks.huggingface import AmpcheckCallback
settings = TrainingArguments({folder!r}, max_steps=8, per_device_train_batch_size=2, report_to=[], use_cpu=True,
    save_strategy="no", disable_tqdm=True, max_grad_norm=0.0, logging_steps=1, logging_nan_inf_filter=False)
Trainer(model, settings, train_dataset=data(), callbacks=[AmpcheckCallback(every=1{fail_on})]).train()
""",
    "lightning": """
import lightning.pytorch as pl
from torch.utils.data import DataLoader
from ampcheck.callbacks.lightning import AmpcheckCallback
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]
    def configure_optimizers(self):
        return optimizer
pl.Trainer(max_steps=8, max_epochs=-1, accelerator="cpu", devices=1, enable_progress_bar=False, logger=False,
    enable_model_summary=False, enable_checkpointing=False, default_root_dir={folder!r},
    callbacks=[AmpcheckCallback(every=1{fail_on})]).fit(Module(), DataLoader(data(), batch_size=2))
""",
}
"""Ends of scripts that train `model` eight times, watched."""

_HEAD = """
import torch
import ampcheck
from watched_net import Net, data
model = Net(bad=3)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4))["loss"].backward()
    optimizer.step()
"""


@pytest.mark.parametrize("fail_on", ["", ', fail_on="fail"'], ids=["by default", "fail_on=fail"])
@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.usefixtures("warm_processes")
def test_a_script_prints_its_findings_and_raises_only_where_asked_for(kind: str, fail_on: str, tmp_path: Path) -> None:
    needs = {"huggingface": "transformers", "lightning": "lightning"}
    if kind in needs:
        pytest.importorskip(needs[kind])
    script = tmp_path / "train.py"
    script.write_text(_HEAD + SCRIPTS[kind].format(fail_on=fail_on, folder=str(tmp_path)) + "\nprint('trained')\n")
    folders = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, cwd=tmp_path)
    lines = [line for line in run.stdout.splitlines() if line.startswith("ampcheck: ")]
    assert lines == ["ampcheck: 8 steps, 8 measured, 1 finding"], run.stderr
    assert (run.returncode != 0) == bool(fail_on), run.stderr
    assert ("trained" in run.stdout) == (not fail_on)
    shown = run.stderr if fail_on else run.stdout
    assert "nonfinite-gradient" in shown


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

    def test_a_gpt2_under_bfloat16_autocast_is_watched(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
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
        assert "ampcheck: 6 steps, 3 measured, nothing found\n" in capsys.readouterr().out
        assert (run.coverage.seen["optimizer steps"], run.coverage.seen["measured steps"]) == (6, 3)
        titles = {table.title for table in run.tables}
        assert {title.partition(": ")[0] for title in titles} == {"Gradients and updates", "Optimizer steps"}
        assert all(title.endswith(" [GPT2LMHeadModel]") for title in titles), "the test and its model"
        assert any("transformer.h.0.attn.c_attn.weight" in row for row in run.tables[0].rows)
        assert Run.load(tmp_path / "run.json") == run
        assert "GPT2LMHeadModel" in (tmp_path / "run.html").read_text()
        assert hooks(trainer.optimizer.optimizer) == 0
        (logged,) = (entry for entry in trainer.state.log_history if "ampcheck/pass" in entry)
        assert logged["ampcheck/pass"] == len(run.of(Verdict.PASS))

    def test_the_weights_are_those_of_a_training_without_it(self, tmp_path: Path) -> None:
        one, other = Net(), Net()
        self.trainer(tmp_path, one, None, bf16=True).train()
        self.trainer(tmp_path, other, self.callback(every=1), bf16=True).train()

        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    @pytest.mark.parametrize("bad", [None, 2])
    def test_the_scaler_of_accelerate_is_followed(self, tmp_path: Path, bad: int | None) -> None:
        callback = self.callback(every=1, fail_on="never")
        trainer = self.trainer(tmp_path, Net(half=True, bad=bad), callback, max_steps=20)
        # Accelerate makes a scaler for accelerators only; on a CPU float16 is otherwise the same.
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        trainer.train()

        (finding,) = (one for one in callback.run.findings if one.check == "loss-scale")
        assert finding.verdict is (Verdict.PASS if bad is None else Verdict.FAIL)
        assert callback.run.coverage.seen["loss scales"] == 21

    def test_a_failure_raises_at_the_end_of_a_test_by_default(self, tmp_path: Path) -> None:
        callback = self.callback(every=1)
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
        with pytest.raises(UsageError, match="fail_on must be one of fail, warn, incomplete, never; found 'raise'"):
            self.callback(fail_on="raise")


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

    def test_bfloat16_mixed_is_watched_and_its_logger_counts_the_verdicts(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from lightning.pytorch.loggers import CSVLogger

        callback = self.callback(every=2, json=tmp_path / "run.json")
        module = self.module(Net())
        with collect() as runs:
            trainer = self.fit(tmp_path, module, callback, logger=CSVLogger(tmp_path))

        (run,) = runs
        assert run is callback.run
        assert not run.failed, str(run)
        assert "ampcheck: 8 steps, 4 measured, nothing found\n" in capsys.readouterr().out
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

        callback = self.callback(every=1, fail_on="never")
        # By precision="16-mixed" alone Lightning takes bfloat16 on a CPU.
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        self.fit(tmp_path, self.module(Net(bad=bad)), callback, precision=None, plugins=[plugin], max_steps=20)

        (finding,) = (one for one in callback.run.findings if one.check == "loss-scale")
        assert finding.verdict is (Verdict.PASS if bad is None else Verdict.FAIL)

    @pytest.mark.parametrize("clears", [True, False])
    def test_the_order_of_calls_in_a_loop_of_ones_own_is_judged(self, tmp_path: Path, clears: bool) -> None:
        callback, module = self.callback(fail_on="never"), self.module(Net())
        module.automatic_optimization = False

        def training_step(batch: Any, batch_idx: int) -> None:
            optimizer = module.optimizers()
            if clears:
                optimizer.zero_grad()
            module.manual_backward(module.net(**batch)["loss"])
            optimizer.step()

        module.training_step = training_step
        self.fit(tmp_path, module, callback)

        messages = [f.message for f in callback.run.of(Verdict.FAIL) if f.check == "scaler-protocol"]
        assert [("cleared after the step" in message) for message in messages] == ([] if clears else [True])

    def test_a_failure_raises_at_the_end_of_a_test_by_default(self, tmp_path: Path) -> None:
        callback = self.callback(every=1)
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
