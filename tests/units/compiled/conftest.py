"""What all tests of compiled models have in common."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _silence_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo warns of its limits and of errors that it swallows: that is what is planted here."""
    monkeypatch.setattr(logging.getLogger("torch._dynamo"), "level", logging.CRITICAL)
