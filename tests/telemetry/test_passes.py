"""Where the compiler's inner interfaces are not known, its documented pass hook still shows what is in the graphs."""

from __future__ import annotations

import pytest
import torch
from telemetry_models import Block, batch, in_phase, modules, seen_in, step
from torch import nn

from ampcheck.telemetry import telemetry
from ampcheck.telemetry.stats import TelemetryStats
from ampcheck.torchtools import dynamo

SITES = ("where", "format", "cast", "numel", "amax", "smallest", "zeros", "flushed", "subnormals", "bad")


def values(stats: TelemetryStats) -> list[tuple[object, ...]]:
    return sorted((tuple(getattr(site, name) for name in SITES) for site in stats.sites), key=repr)


@pytest.fixture(scope="module")
def both() -> tuple[TelemetryStats, TelemetryStats, list[torch.Tensor], list[torch.Tensor]]:
    """The same steps, seen by interception and by the hook; and their losses and gradients."""
    torch.manual_seed(0)
    model = Block()
    found: list[TelemetryStats] = []
    results: list[list[torch.Tensor]] = [[], []]
    for number in range(2):
        with pytest.MonkeyPatch.context() as patch:
            if number:
                patch.setattr(telemetry, "unsupported", lambda: "PyTorch 9.9 is new")
            compiled = torch.compile(model)

            def run(kept: list[torch.Tensor] = results[number], compiled: nn.Module = compiled) -> None:
                for _ in range(3):
                    model.zero_grad()
                    kept.append(step(compiled, batch(4, 8), dtype=torch.float16))
                    kept.extend(p.grad.clone() for p in model.parameters())

            found.append(seen_in(run, model, every=2))
    return found[0], found[1], results[0], results[1]


@pytest.mark.slow
def test_the_hook_sees_the_same_values_as_interception(
    both: tuple[TelemetryStats, TelemetryStats, list[torch.Tensor], list[torch.Tensor]],
) -> None:
    intercepted, hooked, *_ = both

    assert not hooked.skipped
    assert modules(hooked, "forward") == modules(hooked, "backward") == {"", "up", "down"}
    assert {site.calls for site in hooked.sites} == {2}
    assert values(hooked) == values(intercepted)
    assert len(in_phase(hooked, "backward")) >= 4
    assert any("documented hook" in reason for reason in hooked.unseen)


@pytest.mark.slow
def test_the_hook_leaves_loss_and_gradients_bit_identical(
    both: tuple[TelemetryStats, TelemetryStats, list[torch.Tensor], list[torch.Tensor]],
) -> None:
    *_, plain, hooked = both

    assert all(torch.equal(one, other) for one, other in zip(plain, hooked, strict=True))


def test_a_pass_that_the_user_has_there_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "unsupported", lambda: "PyTorch 9.9 is new")
    ran: list[object] = []
    compiled = torch.compile(lambda x: (x * 3).to(torch.float16))

    with dynamo.configured({"torch._inductor.config.post_grad_custom_pre_pass": ran.append}):
        stats = seen_in(lambda: compiled(torch.tensor([1e5, 1.0])))

    assert ran
    (site,) = stats.sites
    assert (site.overflowed, site.amax) == (1, 3e5)


def test_without_the_hook_too_nothing_is_seen_and_the_users_run_is_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "unsupported", lambda: "PyTorch 9.9 is new")
    monkeypatch.setattr(telemetry, "available", lambda: False)
    compiled = torch.compile(lambda x: (x * 5).to(torch.float16))
    results: list[torch.Tensor] = []

    stats = seen_in(lambda: results.append(compiled(torch.tensor([2.0]))))

    assert results[0].tolist() == [10.0]
    assert stats.skipped == "PyTorch 9.9 is new"
    assert not stats.sites
