"""Keep the log lines and warnings of libraries out of what the lab tells. No torch here."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_ASKED = ("TORCH_LOGS", "TORCH_LOGS_OUT", "TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY")
"""By any of these variables somebody asked for log lines."""


@contextmanager
def quiet() -> Iterator[None]:
    """Libraries log errors alone inside, and warn of nothing: what a learner should know the findings tell.

    What somebody asked for is shown: logs by `TORCH_LOGS` and its like, warnings by `-W` or `PYTHONWARNINGS`. For the
    command line alone, since logging is one for the whole process.
    """
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        if not any(os.environ.get(name) for name in _ASKED):
            logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)
