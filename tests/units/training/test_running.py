"""Code that trains is judged as it stands: nothing is taken apart, and the parts are found by what they do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampcheck
from ampcheck.cli.main import main as command_line
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.training.judge_running import together
from ampcheck.training.loop import LoopShadow
from ampcheck.training.running import RunningLoop, TrainingWatch


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def loader(batches: int = 40) -> torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]:
    data = torch.utils.data.TensorDataset(torch.randn(8 * batches, 8), torch.randint(0, 2, (8 * batches,)))
    return torch.utils.data.DataLoader(data, batch_size=8)


def train(
    after_backward: Callable[[torch.amp.GradScaler, torch.optim.Optimizer, nn.Module], None],
    batches: int = 40,
    growth_interval: int = 2000,
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=growth_interval)
    for x, y in loader(batches):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        after_backward(scaler, optimizer, model)
        scaler.step(optimizer)
        scaler.update()


def clip_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_scaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # before unscale_


def sound() -> None:
    train(clip_unscaled)


def unsound() -> None:
    train(clip_scaled)


def failures(run: Run) -> dict[str, int | None]:
    return {f.check: f.where.line for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)}


def test_a_sound_function_that_trains_has_no_finding() -> None:
    run = ampcheck.audit(sound)
    assert not failures(run)
    assert {"gradient-underflow", "loss-scale", "scaler-protocol", "stagnation"} <= {f.check for f in run.findings}


def test_it_ends_after_the_observed_steps() -> None:
    taken = []

    def trains() -> None:
        train(lambda scaler, optimizer, model: taken.append(clip_unscaled(scaler, optimizer, model)))

    assert ampcheck.audit(trains, steps=5).coverage.seen["steps"] == len(taken) == 5


def _after_reading(limit: Callable[[float], float], clip: str) -> Callable[..., None]:
    def between(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        getattr(nn.utils, clip)(model.parameters(), limit(scaler.get_scale()))

    return between


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize(
    ("limit", "grows"),
    [
        (lambda scale: 1.0 * scale, False),
        (lambda scale: 0.1 * scale, False),
        (lambda scale: 1e-3 * scale, True),
        (lambda scale: float("inf"), False),
    ],
)
def test_scaled_gradients_may_be_clipped_at_a_limit_that_follows_the_scale(
    limit: Callable[[float], float], grows: bool, clip: str
) -> None:
    run = ampcheck.audit(lambda: train(_after_reading(limit, clip), growth_interval=4 if grows else 2000))
    assert "scaler-protocol" not in failures(run)


@pytest.mark.parametrize(
    ("limit", "grows"),
    [
        (lambda scale: 1.0 / scale, False),
        (lambda scale: 1.0 / scale, True),
        (lambda scale: 1.0, False),
        (lambda scale: 1024.0, True),
        (lambda scale: 5.0, True),
    ],
)
def test_a_limit_that_does_not_follow_the_scale_fails(limit: Callable[[float], float], grows: bool) -> None:
    between = _after_reading(limit, "clip_grad_norm_")
    run = ampcheck.audit(lambda: train(between, growth_interval=4 if grows else 2000))
    assert failures(run)["scaler-protocol"] == _after_reading.__code__.co_firstlineno + 2


def _cached(phases: Callable[[int], bool]) -> Callable[[], None]:
    """Training by gradients of the representations, which carry the scale; from a phase on, a loss that has no scale is
    added."""

    def training() -> None:
        encoder = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(encoder.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        torch.manual_seed(0)
        for number in range(24):
            x = torch.randn(8, 8)
            cached = encoder(x).detach().requires_grad_()
            scaler.scale(cached.square().mean()).backward()
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                again = encoder(x)
            (again.float() * cached.grad).sum().backward()
            if phases(number):
                (encoder(x) - 1).square().mean().backward()
            scaler.step(optimizer)
            scaler.update()

    return training


@pytest.mark.parametrize("starts", [0, 12, None])
def test_a_loss_that_carries_the_scale_already_needs_no_other_and_one_without_it_does(starts: int | None) -> None:
    run = ampcheck.audit(_cached(lambda number: starts is not None and number >= starts))
    found = " ".join(f.message for f in run.findings if f.check == "scaler-protocol" and f.verdict is Verdict.FAIL)
    assert ("a loss must be scaled before backward" in found) is (starts is not None)


def _by_flags(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_enabled("cpu", True)
    out: torch.Tensor = model(x)
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()
    return out


def _by_hand(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    region = torch.autocast("cpu", torch.bfloat16)
    region.__enter__()
    out: torch.Tensor = model(x)
    region.__exit__(None, None, None)
    return out


def _left_on(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.autocast("cpu", torch.bfloat16).__enter__()
    out: torch.Tensor = model(x)
    return out


def _passed_on(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    try:
        return _by_hand(model, x)
    except BaseException as error:
        raise RuntimeError("no forward") from error


@pytest.mark.parametrize(
    ("forward", "steps", "state"),
    [
        (_by_flags, 40, Verdict.SKIP),
        (_by_hand, 40, Verdict.SKIP),
        (_passed_on, 40, Verdict.SKIP),
        (_by_flags, 4, Verdict.PASS),
        (_left_on, 4, Verdict.FAIL),
        (_left_on, 40, Verdict.SKIP),
    ],
)
def test_code_that_was_ended_is_not_judged_by_the_state_that_it_left(
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor], steps: int, state: Verdict
) -> None:
    def trains() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for x, y in loader(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(model, x).float(), y)
            loss.backward()
            optimizer.step()

    run = ampcheck.audit(trains)
    assert [f.verdict for f in run.findings if f.check == "autocast-state"] == [state]
    failed = {f.check for f in run.of(Verdict.FAIL)}
    assert failed - {"autocast-state"} == ({"autocast-scope", "autocast-cache"} if forward is _left_on else set())


def test_a_mistake_is_named_at_its_line() -> None:
    line = clip_scaled.__code__.co_firstlineno + 1
    assert failures(ampcheck.audit(unsound)) == {"scaler-protocol": line, "scale-invariance": line}
    with ampcheck.watch(fail_on="never") as watched:
        train(clip_scaled, batches=8)
    assert failures(watched.run) == {"scaler-protocol": line, "scale-invariance": line}


def test_the_training_is_bit_for_bit_as_without_and_its_gradients_of_rounding_alone_are_no_finding() -> None:
    """The gradient of a bias before a normalisation is one; under pytest a watch raises its failures."""

    def weights(watch: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        models = []

        def keep(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
            clip_unscaled(scaler, optimizer, model)
            models[:] = [model]

        if watch:
            with ampcheck.watch():
                train(keep)
        else:
            train(keep)
        return list(models[0].state_dict().values())

    assert all(torch.equal(a, b) for a, b in zip(weights(False), weights(True), strict=True))


class Trainer:
    """Keeps its parts as attributes, as frameworks do."""

    def __init__(self) -> None:
        self.net = net()
        self.optimizers = [torch.optim.SGD(self.net.parameters(), 0.1)]
        self.mean = torch.zeros((), dtype=torch.bfloat16)

    def fit(self) -> None:
        for x, y in loader(8):
            loss = F.cross_entropy(self.net(x), y)
            self.optimizers[0].zero_grad()
            loss.backward()
            self.optimizers[0].step()
            self.mean = self.mean * 0.9 + loss.detach().bfloat16() * 0.1


def test_parts_are_found_where_an_object_keeps_them() -> None:
    watch = TrainingWatch("fit", 24, LoopShadow())
    with watch.watching():
        watch.call(Trainer().fit)
    assert watch.stats is not None
    assert watch.stats.steps == 8
    names = {resident.name for resident in watch.loop.residents()}
    assert {"0.weight", "0.weight.grad", "1.running_mean", "self.mean"} <= names


def test_validation_between_steps_is_no_step() -> None:
    def trains() -> None:
        model, validation = net(), torch.randn(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in loader(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(validation)
            model.train()

    assert ampcheck.audit(trains).coverage.seen["steps"] == 6


def test_optimizers_that_take_turns_make_one_step() -> None:
    def adversarial() -> None:
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        of_generator = torch.optim.SGD(generator.parameters(), 0.01)
        of_critic = torch.optim.SGD(critic.parameters(), 0.01)
        for _ in range(10):
            of_critic.zero_grad()
            (critic(generator(torch.randn(8, 4)).detach()).mean() - critic(torch.randn(8, 4)).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            (-critic(generator(torch.randn(8, 4))).mean()).backward()
            of_generator.step()

    run = ampcheck.audit(adversarial)
    assert run.coverage.seen["steps"] in (10, 11)  # that there are two is known after the first
    assert not failures(run)


def test_a_loop_without_a_module_has_steps_too() -> None:
    def fit() -> None:
        weight = torch.zeros(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(12):
            optimizer.zero_grad()
            (torch.randn(8, 4) @ weight - 1.0).square().mean().backward()
            optimizer.step()

    assert ampcheck.audit(fit).coverage.seen["steps"] == 12


def test_bfloat16_weights_that_do_not_move_are_found_in_a_plain_loop() -> None:
    def fit() -> None:
        model = net().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 1e-5)
        for x, y in loader():
            optimizer.zero_grad()
            F.cross_entropy(model(x.bfloat16()).float(), y).backward()
            optimizer.step()

    assert "stagnation" in failures(ampcheck.audit(fit))


SCRIPT = """
import torch
from torch import nn

def main():
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()

def forgets_to_return():
    model = nn.Linear(8, 2)
    model(torch.randn(4, 8))
"""


def test_the_command_line_takes_a_training_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script_that_trains.py").write_text(SCRIPT, encoding="utf-8")
    assert command_line(["audit", f"{tmp_path / 'script_that_trains.py'}:main", "--steps", "6"]) == 0
    assert "6 steps" in " ".join(capsys.readouterr().out.split())


def test_a_function_that_forgets_to_return_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script_that_forgets.py").write_text(SCRIPT, encoding="utf-8")
    assert command_line(["audit", f"{tmp_path / 'script_that_forgets.py'}:forgets_to_return"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "script_that_forgets.py:forgets_to_return returned nothing, stepped no optimizer, and computed nothing" in said
    )
    assert "factory" not in said


def test_a_script_that_generates_in_16_bits_is_judged_by_what_it_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
import torch

def generate(scale=8.0):
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        scores = torch.full((4, 4), 50.0) @ torch.full((4, 4), 50.0) * scale
    print(scores.amax())

def sample():
    generate(0.5)
"""
    script = tmp_path / "script_that_generates.py"
    script.write_text(code, encoding="utf-8")
    assert command_line(["audit", f"{script}:generate"]) == 1
    assert "FAIL overflow" in capsys.readouterr().out
    assert command_line(["audit", f"{script}:sample"]) == 0


def test_a_script_that_raises_before_it_trains_is_refused_at_its_line_in_the_words_of_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script_without_data.py"
    script.write_text("def main():\n    open('no_such_data.bin')\n", encoding="utf-8")
    for target in (f"{script}:main", str(script)):
        assert command_line(["audit", target]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "factory" not in said
        assert "main" in said
        wanted = (
            "script_without_data.py:2, before any step of an optimizer" if ":main" in target else "name what to judge"
        )
        assert wanted in said


def verdicts(*pairs: tuple[str, Verdict]) -> list[Finding]:
    return [Finding(check, verdict, "loop", verdict.value) for check, verdict in pairs]


def test_a_failure_of_the_steps_is_not_hidden_by_a_warning_about_values() -> None:
    warned, failed = verdicts(("overflow", Verdict.WARN)), verdicts(("overflow", Verdict.FAIL))
    assert together(warned, failed) == [*warned, *failed]
    assert together(failed, warned) == failed
    assert together(failed, failed) == failed
    passed, skipped = verdicts(("overflow", Verdict.PASS)), verdicts(("overflow", Verdict.SKIP))
    assert together(passed, failed) == failed
    assert passed[0] in together(passed, skipped)


def test_a_loss_that_is_nan_is_found_beside_steps_that_have_no_loss() -> None:
    def fit() -> None:
        weight = torch.zeros(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        for number in range(12):
            optimizer.zero_grad()
            if number % 2:
                weight.grad = torch.ones(4)  # no backward pass
            else:
                ((weight.sum() - 1.0) * torch.tensor(torch.nan)).backward()
            optimizer.step()

    assert {"overflow", "nonfinite-gradient"} & set(failures(ampcheck.audit(fit)))


def test_what_comes_after_the_observed_steps_is_told() -> None:
    def trains() -> None:
        train(clip_unscaled, batches=8)

    assert ampcheck.audit(trains, steps=5).coverage.unseen["what comes after the first 5 steps"]
    assert not any("what comes after" in reason for reason in ampcheck.audit(trains, steps=9).coverage.unseen)


def test_a_check_of_training_that_is_selected_in_a_block_without_training_says_so() -> None:
    with pytest.raises(AssertionError, match="no optimizer was stepped"), ampcheck.watch(checks=["stagnation"]):
        torch.ones(3).half() * 2
    with ampcheck.watch(checks=["stagnation"], fail_on="never") as watched:
        torch.ones(3).half() * 2
    (unjudged,) = [finding for finding in watched.run.findings if finding.check == "stagnation"]
    assert unjudged.verdict is Verdict.INCOMPLETE


def test_what_was_wrong_before_the_block_raised_is_found() -> None:
    model = nn.Linear(8, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    watch = ampcheck.watch(fail_on="never")

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(4, 8)).float().square().mean()
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), watch as seen:
        train()
    assert {f.check for f in seen.run.of(Verdict.FAIL)} == {"scaler-protocol", "scale-invariance"}


def static_scale() -> None:
    """A scale far too large, and no look at the gradients before they are applied."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)  # its backward overflows
        (loss * 2.0**22).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2.0**22
        optimizer.step()


def test_what_follows_weights_that_are_nan_is_traced_to_the_step_that_made_them_so() -> None:
    """Later steps have other first ops, such as the division: these only pass on what the weights hold."""
    found = [f for f in ampcheck.audit(static_scale).findings if f.verdict is Verdict.FAIL]
    (loss,) = [f for f in found if f.check == "loss-dtype"]
    assert "its backward overflows" in loss.code
    assert not [f.check for f in found if "/=" in f.code]


def test_a_module_that_the_step_builds_under_the_name_of_the_model_replaces_nothing() -> None:
    def regularizer() -> torch.Tensor:
        model = torch.nn.Linear(4, 1)  # the name of the model of the loop, in another function
        return model(torch.ones(1, 4)).square().mean()

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with ampcheck.watch(fail_on="never") as seen:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            regularizer()
    assert not seen.run.of(ampcheck.Verdict.FAIL)


@pytest.mark.filterwarnings("ignore")
def test_lightnings_own_paths_to_a_model_name_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning")

    class Classifies(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-6)

    def fit() -> None:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_epochs=1, precision="bf16-true", accelerator="cpu", **quiet)
        trainer.fit(Classifies(), loader(6))

    looks: list[set[str]] = []
    look = RunningLoop.look

    def noted(loop: RunningLoop, *arguments: Any) -> None:
        look(loop, *arguments)
        looks.append({*loop.reached.modules, *loop.reached.optimizers})

    monkeypatch.setattr(RunningLoop, "look", noted)
    run = ampcheck.audit(fit, steps=4)
    (stagnation, *_) = [finding for finding in run.findings if finding.check == "stagnation"]
    assert "parameters net." in stagnation.message
    assert set().union(*looks) <= {"self", "Classifies", "AdamW", "LightningAdamW"}
