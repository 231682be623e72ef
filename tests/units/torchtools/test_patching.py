"""A function that is replaced runs through the wrapper inside, and afterwards everything is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ampcheck.torchtools.patching import replaced


class Base:
    def inherited(self) -> str:
        return "inherited"


class Owner(Base):
    def method(self) -> str:
        return "method"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return "of_class"


NAMES = ("method", "static", "of_class", "inherited")


def marked(original: Callable[..., str]) -> Callable[..., str]:
    return lambda *args, **kwargs: f"<{original(*args, **kwargs)}>"


@pytest.mark.parametrize("name", NAMES)
def test_a_call_runs_through_every_wrapper_and_what_the_class_stores_is_restored(name: str) -> None:
    stored = dict(vars(Owner))
    with replaced(Owner, name, marked):
        assert getattr(Owner(), name)() == f"<{name}>"
        with replaced(Owner, name, marked):
            assert getattr(Owner(), name)() == f"<<{name}>>"
    assert dict(vars(Owner)) == stored
    assert getattr(Owner(), name)() == name


@pytest.mark.parametrize("name", ["static", "of_class"])
def test_a_function_without_an_instance_is_called_through_the_class_too(name: str) -> None:
    with replaced(Owner, name, marked):
        assert getattr(Owner, name)() == f"<{name}>"


@pytest.mark.parametrize("name", NAMES)
def test_a_function_that_took_the_place_meanwhile_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any = None) -> str:
        return "other"

    with replaced(Owner, name, marked):
        monkeypatch.setattr(Owner, name, other)
    assert vars(Owner)[name] is other
