"""The built-in subject: `ampcheck audit ampcheck.demo:subject`."""

from __future__ import annotations

from ampcheck.demo.model import Block as Block
from ampcheck.demo.model import CharTransformer as CharTransformer
from ampcheck.demo.model import batch as batch
from ampcheck.demo.model import corpus as corpus
from ampcheck.demo.model import subject as subject
