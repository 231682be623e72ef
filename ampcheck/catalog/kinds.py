"""Kinds of subjects that several checks share."""

from __future__ import annotations

from ampcheck.core.subject import Kind

MODELS = (Kind.FORWARD, Kind.COMPILE, Kind.REGIONAL)
EVERY = (*MODELS, Kind.TRAINING, Kind.CALL)
