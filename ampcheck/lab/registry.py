"""The experiments of the lab by name. No torch here: they are imported when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from ampcheck.core.check import Check
from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress
from ampcheck.core.run import Run


class Function(Protocol):
    """What an experiment is: it runs on a device, in full or short, tells how far it is, and returns what it saw."""

    def __call__(self, *, device: str, full: bool, progress: Progress) -> Run:
        """Run it. Raises `UsageError` for what this machine lacks."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment.

    name: on the command line, and the module of `ampcheck.lab` with its function `run`. about: what one sees, in a few
    sentences. emulated: whether it says something of a device that is not there, by its autocast policy.
    """

    name: str
    title: str
    about: str
    emulated: bool = False

    @property
    def check(self) -> Check:
        """The check of its findings, tables and charts."""
        return check_of(self.name)

    @property
    def function(self) -> Function:
        """The experiment itself. Imports torch."""
        found: Function = import_module(f"ampcheck.lab.{self.name}").run
        return found


def check_of(name: str) -> Check:
    """The check of an experiment's findings: `lab-ulp` of `ulp`. It has no page of its own."""
    return Check(f"lab-{name}", "lab", "", "", "", "")


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "anatomy",
        "Anatomy of a number",
        "A floating-point number is a sign, an exponent and a mantissa. More exponent bits reach further, more "
        "mantissa bits lie denser. float16 spends its 16 bits on density and ends at 65,504; bfloat16 spends them on "
        "reach and keeps two to three decimal digits. Below the smallest normal number lie the subnormals, which some "
        "hardware drops.",
    ),
    Experiment(
        "ulp",
        "The spacing of numbers",
        "The distance from a number to the next one, the ULP, doubles with each power of two. What is smaller than "
        "half of it, added to the number, is lost: from 256 on bfloat16 has no odd integers, from 2,048 on float16 has "
        "none.",
    ),
    Experiment(
        "exp",
        "Where exp overflows",
        "exp leaves float16 beyond 11.09 and float32 beyond 88.7. So softplus and softmax written as in the textbook "
        "give infinities, NaN and zeros where the same functions written stably are a few roundings off.",
    ),
    Experiment(
        "confounders",
        "What float32 means here",
        "Before two runs are compared one must know what differs without any change: products that are called float32 "
        "and run in TF32 or bfloat16, sums in another order, another seed. What lies below that spread means nothing.",
    ),
    Experiment(
        "policy",
        "What autocast does to each op",
        "Autocast has a list for each kind of device: ops that run in 16 bits, ops that run in float32, ops that take "
        "the widest dtype. The lists of CPU and CUDA are not the same, so a model that is well on one may overflow on "
        "the other.",
        emulated=True,
    ),
    Experiment(
        "flow",
        "Dtypes on their way through a transformer",
        "Under autocast the parameters stay float32; each op casts what it is given. Linear layers give 16 bits, norms "
        "and losses float32 or what they were given, and a residual sum the wider of its two sides.",
        emulated=True,
    ),
    Experiment(
        "underflow",
        "Gradients that become zero",
        "Gradients of deep nets spread over many powers of ten, and those of at most 2^-25 (3e-8) become zero in "
        "float16. A loss scale of 2^13 moves all of them up by 13 powers of two before they are rounded; bfloat16, "
        "which reaches down to 2^-133, needs none.",
    ),
    Experiment(
        "stagnation",
        "A weight that does not move",
        "An update below half of the spacing of the weight changes nothing, however often it is repeated. That is why "
        "weights are kept in float32, or updated with Kahan summation or stochastic rounding. Kahan summation keeps "
        "what was rounded off in the weight's own format, where the updates may get lost as well: these do in "
        "bfloat16.",
    ),
    Experiment(
        "training",
        "The main event: one model trained in four precisions",
        "A small transformer learns Shakespeare's sonnets in float32, in float16 throughout, under autocast to float16 "
        "with a GradScaler, and under autocast to bfloat16, each eager and compiled, from the same weights and data. "
        "All should learn alike but float16 throughout, in which AdamW's eps of 1e-8 is zero and a division by zero "
        "follows. A run that becomes infinite or NaN is a result: the step and the op that made it are told.",
    ),
    Experiment(
        "compiling",
        "Autocast and torch.compile together",
        "Autocast can stand around the compiled function or inside it. Both give one graph; what differs, and what it "
        "buys, is shown side by side: speed, graph breaks, error against float64, and what a cold and a warm start "
        "cost.",
    ),
)


def experiments_of(names: Sequence[str] = ()) -> tuple[Experiment, ...]:
    """The experiments of these names, in the order of the lab, each once; without names all of them.

    Raises `UsageError` for an unknown name.
    """
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"the lab has no experiment {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(one for one in EXPERIMENTS if not names or one.name in names)
