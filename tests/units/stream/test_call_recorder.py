"""Subscribers to calls of PyTorch are called in their order, and nothing outlives the block."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as hooks_of_all
from torch.optim.lr_scheduler import LRScheduler, StepLR

from ampcheck.stream import calls
from ampcheck.stream.calls import steps_of, subscribed
from ampcheck.torchtools.patching import Observer

REGION, SCALER = torch.amp.autocast_mode.autocast, torch.amp.GradScaler


def hooked() -> list[object]:
    """What a subscription may change."""
    names = ("get_scale", "scale", "unscale_", "step", "update", "state_dict", "load_state_dict")
    functions = [
        *(vars(REGION)[name] for name in ("__init__", "__enter__", "__exit__")),
        *(vars(SCALER)[name] for name in names),
        *(torch.autograd._engine_run_backward, torch.save, torch.nn.utils.clip_grad_norm_, LRScheduler.step),  # type: ignore[attr-defined]
        *(StepLR.step, torch.optim.Optimizer.load_state_dict, torch.autograd.graph.saved_tensors_hooks.__enter__),
    ]
    tables = hooks_of_all._global_optimizer_pre_hooks, hooks_of_all._global_optimizer_post_hooks
    return [*functions, *(dict(table) for table in tables)]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = hooked()
    yield
    assert hooked() == before
    assert not any(kind._subscribers or kind._running or kind._wrappers for kind in calls._KINDS.values())


def around(seen: list[str], name: str) -> Observer:
    def subscriber(*_: object, **__: object) -> Iterator[None]:
        seen.append(f"{name} before")
        ended = False
        try:
            yield
            ended = True
        finally:
            seen.append(f"{name} after" if ended else f"{name} closed")

    return subscriber


def make(lr: float = 0.1) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return weight, torch.optim.SGD([weight], lr=lr)


def run_backward() -> None:
    torch.ones(2, requires_grad=True).sum().backward()


def run_step() -> None:
    make()[1].step()


RUN: dict[str, Callable[[], object]] = {"backward": run_backward, "optimizer_step": run_step}


@pytest.mark.parametrize("kind", RUN)
def test_subscribers_run_in_their_order_before_and_after(kind: str) -> None:
    seen: list[str] = []
    with subscribed(**{kind: around(seen, "first")}), subscribed(**{kind: around(seen, "second")}):
        RUN[kind]()
    assert seen == ["first before", "second before", "first after", "second after"]


@pytest.mark.parametrize("kind", RUN)
def test_a_subscriber_that_raises_ends_the_call_and_closes_the_others(kind: str) -> None:
    seen: list[str] = []

    def raising(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with subscribed(**{kind: around(seen, "first")}), subscribed(**{kind: raising}), pytest.raises(ZeroDivisionError):
        RUN[kind]()
    assert seen == ["first before", "first closed"]


def test_a_call_that_raises_closes_its_subscribers_with_its_own_traceback() -> None:
    seen: list[str] = []
    with subscribed(backward=around(seen, "first")), pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(2).sum().backward()
    assert seen == ["first before", "first closed"]
    with subscribed(clip=around(seen, "clip")), pytest.raises(AttributeError) as error:
        torch.nn.utils.clip_grad_norm_([1], 1.0)  # type: ignore[list-item]
    assert seen[-2:] == ["clip before", "clip closed"]
    assert error.traceback[-1].path.name == "clip_grad.py"


def test_a_step_that_raises_is_closed_before_the_next_one() -> None:
    seen: list[str] = []
    _weight, optimizer = make()

    def closure() -> float:
        raise ZeroDivisionError

    with subscribed(optimizer_step=around(seen, "step")):
        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
        assert seen == ["step before"]
        optimizer.step()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
    assert seen == ["step before", "step closed", "step before", "step after", "step before", "step closed"]


def test_steps_inside_a_closure_and_its_backward_passes_are_calls_of_their_own() -> None:
    weight, other = make()
    outer, seen = torch.optim.LBFGS([weight], max_iter=2), list[str]()

    def closure() -> torch.Tensor:
        other.step()
        outer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    def step(optimizer: torch.optim.Optimizer, *_: object, **__: object) -> Iterator[None]:
        seen.append(f"({type(optimizer).__name__}")
        yield
        seen.append(f"{type(optimizer).__name__})")

    with subscribed(optimizer_step=step, backward=lambda *_, **__: seen.append("backward")):
        outer.step(closure)  # type: ignore[arg-type]
    inner = [name for name in seen[1:-1] if name != "backward"]
    assert (seen[0], seen[-1]) == ("(LBFGS", "LBFGS)")
    assert inner == ["(SGD", "SGD)"] * (len(inner) // 2)
    assert len(inner) > 2
    assert seen.count("backward") == len(inner) // 2


def test_a_class_that_overrides_step_is_one_call_for_a_scaler_and_a_step_for_an_optimizer() -> None:
    class Own(SCALER):  # type: ignore[misc, valid-type]
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return super().step(optimizer, *args, **kwargs)

    class Whole(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.zero_()

    seen: list[str] = []
    weight, _ = make()
    optimizer, scaler = Whole([weight]), Own("cpu", init_scale=1.0)
    with subscribed(scaler_step=around(seen, "scaler"), optimizer_step=around(seen, "step")):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
    assert seen == ["scaler before", "step before", "step after", "scaler after"]


def test_a_class_that_is_new_is_hooked_by_the_next_subscription() -> None:
    seen: list[str] = []
    with subscribed(scheduler_step=around(seen, "first")):

        class Own(LRScheduler):
            def step(self, epoch: Any = None) -> None:
                pass

        schedule = Own(make()[1])
        assert not seen
        with subscribed(scheduler_step=around(seen, "second")):
            schedule.step()
            assert seen == ["first before", "second before", "first after", "second after"]


def test_the_result_of_a_call_is_sent() -> None:
    seen = []

    def scale(scaler: object, outputs: torch.Tensor) -> Any:
        seen.append((yield))

    with subscribed(scaler_scale=scale):
        loss = SCALER("cpu", init_scale=4.0).scale(torch.ones(()))
    assert seen == [loss]
    assert loss == 4


def test_an_iterator_of_parameters_is_read_once_for_all() -> None:
    model, seen = nn.Linear(2, 2), []
    model(torch.ones(1, 2)).sum().backward()

    def clip(parameters: Any, *_: object, **__: object) -> None:
        seen.append([id(parameter) for parameter in parameters])

    with subscribed(clip=clip), subscribed(clip=clip):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        torch.nn.utils.clip_grad_value_(parameters=model.parameters(), clip_value=1.0)
    assert seen == [[id(p) for p in model.parameters()]] * 4
    assert model.weight.grad is not None
    assert model.weight.grad.norm() < 1e-3


def test_a_function_that_was_imported_inside_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    with subscribed(clip=around(seen, "first")):
        monkeypatch.setattr(sys.modules[__name__], "clip_grad_norm_", nn.utils.clip_grad_norm_, raising=False)
        with subscribed(clip=around(seen, "second")):
            globals()["clip_grad_norm_"]([make()[0]], 1.0)
    assert seen == ["first before", "second before", "first after", "second after"]


@pytest.mark.parametrize("kind", RUN)
def test_subscribing_and_leaving_inside_a_call_counts_from_the_next_one_on(kind: str) -> None:
    seen: list[str] = []
    inside, leaving = ExitStack(), ExitStack()

    def change(*_: object, **__: object) -> None:
        leaving.close()
        inside.enter_context(subscribed(**{kind: around(seen, "inner")}))

    with subscribed(**{kind: around(seen, "outer")}):
        with subscribed(**{kind: change}), leaving:
            leaving.enter_context(subscribed(**{kind: around(seen, "left")}))
            RUN[kind]()
            assert seen == ["outer before", "left before", "outer after", "left after"]
        with inside:
            RUN[kind]()
            assert seen[4:] == ["outer before", "inner before", "outer after", "inner after"]


def test_calls_of_every_thread_are_reported_and_threads_do_not_mix() -> None:
    weights = [make() for _ in range(2)]
    barrier, seen = threading.Barrier(2, timeout=20), dict[int, list[str]]()

    def step(optimizer: torch.optim.Optimizer, *_: object, **__: object) -> Iterator[None]:
        mine = seen.setdefault(threading.get_ident(), [])
        mine.append(f"{id(optimizer)} before")
        barrier.wait()
        yield
        barrier.wait()
        mine.append(f"{id(optimizer)} after")

    with subscribed(optimizer_step=step):
        threads = [threading.Thread(target=optimizer.step) for _, optimizer in weights]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = [[f"{id(optimizer)} {when}" for when in ("before", "after")] for _, optimizer in weights]
    assert sorted(seen.values()) == sorted(expected)


def test_steps_of_one_optimizer_come_after_the_hooks_that_it_has() -> None:
    (_weight, optimizer), seen = make(), list[str]()
    optimizer.register_step_pre_hook(lambda *_: seen.append("own"))
    with steps_of(optimizer, around(seen, "step")):
        optimizer.step()
        run_step()
    optimizer.step()
    assert seen == ["own", "step before", "step after", "own"]


def test_a_step_that_is_compiled_is_not_reported() -> None:
    (weight, optimizer), seen = make(), list[str]()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    with subscribed(optimizer_step=around(seen, "step")):
        step()
    torch._dynamo.reset()
    assert not seen
    assert bool((weight == 0.9).all())


def test_subscriptions_may_end_in_any_order() -> None:
    seen: list[str] = []
    first, second = (subscribed(backward=around(seen, name)) for name in ("first", "second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    run_backward()
    second.__exit__(None, None, None)
    run_backward()
    assert seen == ["second before", "second after"]


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(KeyError, match="backwards"), subscribed(backwards=lambda: None):
        pass


HOOKS = ("register_optimizer_step_p", "register_step_p", "_engine_run_backward", "profile_hook_step")
WRAPPED = re.compile(
    r"(replaced|observed)\(\s*(torch\.(amp|autocast|optim|save|autograd|nn\.utils)|module\.autocast|kind\b|\w*optim|"
    r"GradScaler|LRScheduler)"
)
ELSEWHERE = {
    "autocast/asked.py": "raises where the user's code asks for CUDA",
    "autocast/redirect.py": "regions act on another device",
    "autocast/placement.py": "backward passes run in the mode that places tensors",
    "autocast/guards/call_sites.py": "knows the engine's frame by its name",
    "torchtools/contract.py": "lists private names",
    "torchtools/origin.py": "knows the engine's frame by its code",
    "torchtools/private.py": "runs the engine itself",
    "torchtools/regions.py": "changes what the exit of a region does, below the stream",
}


def test_only_the_stream_hooks_these_calls() -> None:
    package = Path(calls.__file__).parents[1]
    sources = {path.relative_to(package).as_posix(): path.read_text("utf-8") for path in package.rglob("*.py")}
    hooking = {p for p, text in sources.items() if any(name in text for name in HOOKS) or WRAPPED.search(text)}
    assert hooking == {"stream/calls.py", *ELSEWHERE}
