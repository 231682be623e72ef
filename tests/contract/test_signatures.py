"""The public API is small, and a keyword means the same in every call."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import ampcheck

FUNCTIONS = sorted(name for name in ampcheck.__all__ if inspect.isfunction(getattr(ampcheck, name)))
ORDER = ("device", "dtype", "autocast", "compile", "options", "checks", "every", "fail_on", "level", "limits", "name")
"""Shared keywords in the order in which every signature has them."""

DEFAULTS: dict[str, Any] = {
    "device": None,
    "dtype": None,
    "autocast": None,
    "compile": True,
    "checks": None,
    "limits": None,
    "name": "",
    "fail_on": None,
}
OTHER = {("emulate", "device"), ("assert_policy", "device")}
"""Where the device is not the one that runs the subject: `emulate` is about it, and a lock has one or several."""

DTYPES = {"DType | None", "DType | Sequence[DType] | None"}
"""One dtype, or one or several: what runs once takes one."""


def parameters(name: str) -> list[inspect.Parameter]:
    return list(inspect.signature(getattr(ampcheck, name)).parameters.values())


def test_there_are_at_most_24_public_names() -> None:
    assert len({*ampcheck.__all__} - {"__version__"}) <= 24


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_at_most_ten_parameters_and_takes_no_unnamed_settings(name: str) -> None:
    assert len(parameters(name)) <= 10
    assert not [p for p in parameters(name) if p.kind is p.VAR_KEYWORD]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_parameter_is_annotated(name: str) -> None:
    function = getattr(ampcheck, name)
    missing = [p.name for p in parameters(name) if p.annotation is p.empty]
    assert not missing
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_shared_keyword_has_the_same_default_everywhere(name: str) -> None:
    for parameter in parameters(name):
        if parameter.name in DEFAULTS and (name, parameter.name) not in OTHER:
            assert parameter.default == DEFAULTS[parameter.name], parameter.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_shared_keywords_come_in_the_same_order(name: str) -> None:
    shared = [p.name for p in parameters(name) if p.name in ORDER]
    assert shared == sorted(shared, key=ORDER.index)


@pytest.mark.parametrize("keyword", [*DEFAULTS])
def test_a_shared_keyword_has_the_same_type_everywhere(keyword: str) -> None:
    annotations = {
        parameter.annotation.replace('"', "")
        for name in FUNCTIONS
        for parameter in parameters(name)
        if parameter.name == keyword and (name, keyword) not in OTHER
    }
    assert annotations <= DTYPES if keyword == "dtype" else len(annotations) == 1, annotations
