"""The experiments of the lab by name. No torch here: an experiment is imported when it runs."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

from ampcheck.core.check import Check
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run

_LOG_VARIABLES = ("TORCH_LOGS", "TORCH_LOGS_OUT", "TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY")


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment.

    name: on the command line, and the module of this package with its function `run`. about: what it shows, in a few
    sentences. emulated: whether it judges an absent device by its autocast policy.
    """

    name: str
    title: str
    about: str
    emulated: bool = False

    @property
    def check(self) -> Check:
        """The check of its findings, tables and charts: `lab-ulp` of `ulp`. It has no page of its own."""
        return Check(f"lab-{self.name}", "lab", "")

    @property
    def function(self) -> Callable[..., Run]:
        """Runs the experiment with the keywords device, full and progress. Imports torch."""
        run: Callable[..., Run] = import_module(f"ampcheck.tools.lab.{self.name}").run
        return run


_TEXTS: Mapping[str, tuple[str, str]] = {
    "anatomy": (
        "Anatomy of a number",
        "A floating-point number has a sign, an exponent for range and a mantissa for precision. float16 prefers "
        "precision and ends at 65,504; bfloat16 prefers range and keeps two to three decimal digits. Below the "
        "smallest normal number are the subnormals, which some hardware flushes to zero.",
    ),
    "ulp": (
        "The spacing of numbers",
        "The distance from a number to the next one, the ULP, doubles with each power of two. An addend below half of "
        "it is lost: from 256 on bfloat16 has no odd integers, from 2,048 on float16 has none.",
    ),
    "exp": (
        "Where exp overflows",
        "exp overflows in float16 above 11.09 and in float32 above 88.7. So softplus and softmax written as in the "
        "textbook give infinities, NaN and zeros where their stable forms are a few roundings off.",
    ),
    "confounders": (
        "What float32 means here",
        "Before two runs are compared, measure what differs without any change: float32 products that run in TF32 or "
        "bfloat16, sums in another order, another seed. Differences below that spread mean nothing.",
    ),
    "policy": (
        "What autocast does to each op",
        "Autocast has a list for each kind of device: ops that run in 16 bits, in float32, or in the widest dtype. The "
        "lists of CPU and CUDA differ, so a model that is sound on one may overflow on the other.",
    ),
    "flow": (
        "Dtypes on their way through a transformer",
        "Under autocast the parameters stay float32; each op casts its inputs. Linear layers return 16 bits, norms and "
        "losses float32 or the dtype of their input, and a residual sum the wider of its two terms.",
    ),
    "underflow": (
        "Gradients that become zero",
        "Gradients of deep nets spread over many powers of ten, and those of at most 2^-25 (3e-8) become zero in "
        "float16. A loss scale of 2^13 moves all of them up by 13 powers of two before they are rounded; bfloat16, "
        "which reaches down to 2^-133, needs none.",
    ),
    "stagnation": (
        "A weight that does not move",
        "An update below half of the spacing of the weight changes nothing, however often it is repeated. Therefore "
        "weights are kept in float32, or updated with Kahan summation or stochastic rounding. Kahan summation stores "
        "the rounding error in the weight's own format, where updates may be lost as well: in bfloat16 these are.",
    ),
    "training": (
        "The main event: one model trained in four precisions",
        "A small transformer learns Shakespeare's sonnets in float32, in float16 throughout, under autocast to float16 "
        "with a GradScaler, and under autocast to bfloat16, each eager and compiled, from the same weights and data. "
        "All should learn alike except float16 throughout, where AdamW divides by an eps of 1e-8 that is zero: the "
        "step and the op that break it are reported.",
    ),
    "compiling": (
        "Autocast and torch.compile together",
        "Autocast can be entered around the compiled function or inside it. Both give one graph; speed, graph breaks, "
        "error against float64, and the cost of a cold and a warm start are compared.",
    ),
}
"""By name the title and what the experiment shows."""

EXPERIMENTS = tuple(Experiment(name, *texts, emulated=name in ("policy", "flow")) for name, texts in _TEXTS.items())


def experiments_of(names: Sequence[str] = ()) -> tuple[Experiment, ...]:
    """The experiments of these names, in the order of the lab, each once; without names all of them.

    Raises `UsageError` for an unknown name.
    """
    known = [experiment.name for experiment in EXPERIMENTS]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"the lab has no experiment {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(experiment for experiment in EXPERIMENTS if not names or experiment.name in names)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and log records below errors, unless requested by `-W`, `PYTHONWARNINGS`, `TORCH_LOGS` etc.

    For the command line only: the state of `logging` belongs to the whole process.
    """
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        if not any(os.environ.get(name) for name in _LOG_VARIABLES):
            logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)
