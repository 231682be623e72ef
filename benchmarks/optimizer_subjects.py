"""The optimizers of `optimizers.py`: what builds each of them, and what each of them needs.

Options are those of the package, unless a name shows others. An import happens when an optimizer is built, so that a
package that is not installed is a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

_DISTRIBUTIONS = {
    "torch": "torch",
    "pytorch_optimizer": "pytorch-optimizer",
    "schedulefree": "schedulefree",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "transformers": "transformers",
    "lion_pytorch": "lion-pytorch",
    "optimi": "torch-optimi",
    "prodigyopt": "prodigyopt",
}


@dataclass(frozen=True)
class OptimizerSubject:
    """An optimizer. path: of the class; options: what it is built with.

    closure: `step` takes a closure that computes the loss and its gradients. sparse: gradients must be sparse.
    matrices: takes matrices alone; AdamW steps the other parameters. trains: `train()` must be called first. hidden:
    width of the network; low-bit states begin at 4,096 elements.
    """

    name: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    closure: bool = False
    sparse: bool = False
    matrices: bool = False
    trains: bool = False
    hidden: int = 32

    @property
    def package(self) -> str:
        """The distribution that has the class."""
        return _DISTRIBUTIONS[self.path.partition(".")[0]]

    @property
    def version(self) -> str:
        """The version of the distribution; empty where it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
        """The optimizers that step these parameters. Raises whatever the package raises."""
        module, _, kind = self.path.rpartition(".")
        made = getattr(import_module(module), kind)
        parameters = list(parameters)
        rest = [p for p in parameters if p.dim() != 2] if self.matrices else []
        stepped = [p for p in parameters if p.dim() == 2] if self.matrices else parameters
        optimizers = [made(stepped, **self.options)]
        if rest:
            optimizers.append(torch.optim.AdamW(rest))
        if self.trains:
            optimizers[0].train()
        return optimizers


_KERNELS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        "for-loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }
)

_TORCH: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
    "Rprop": {},
    "SGD": {},
}

_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Those of which PyTorch has a fused kernel for the CPU."""


def _of_torch() -> Iterable[OptimizerSubject]:
    for kind, options in _TORCH.items():
        for kernel, choice in _KERNELS.items():
            if kernel != "fused" or kind in _FUSED:
                yield OptimizerSubject(f"{kind}, {kernel}", f"torch.optim.{kind}", {**options, **choice})
    for kernel, choice in _KERNELS.items():
        options = {"lr": 0.1, "momentum": 0.9}
        yield OptimizerSubject(f"SGD(lr=0.1, momentum=0.9), {kernel}", "torch.optim.SGD", {**options, **choice})
        options = {"betas": (0.9, 0.95), "eps": 1e-4}
        yield OptimizerSubject(f"AdamW(beta2=0.95, eps=1e-4), {kernel}", "torch.optim.AdamW", {**options, **choice})
    yield OptimizerSubject("Adam(amsgrad=True), for-loop", "torch.optim.Adam", {"amsgrad": True, "foreach": False})
    yield OptimizerSubject("Adam(amsgrad=True), foreach", "torch.optim.Adam", {"amsgrad": True, "foreach": True})
    yield OptimizerSubject("RMSprop(centered=True), foreach", "torch.optim.RMSprop", {"centered": True})
    for kernel in ("for-loop", "foreach"):
        yield OptimizerSubject(f"Adafactor, {kernel}", "torch.optim.Adafactor", _KERNELS[kernel])
    yield OptimizerSubject("LBFGS", "torch.optim.LBFGS", {"max_iter": 4, "history_size": 8}, closure=True)
    yield OptimizerSubject("SparseAdam", "torch.optim.SparseAdam", sparse=True)
    yield OptimizerSubject("Muon", "torch.optim.Muon", matrices=True)


_PYTORCH_OPTIMIZER = (
    "ADOPT AdaBelief AdaBound AdEMAMix Adai AdamP Adan CAME DAdaptAdam FlashAdamW Grams LARS Lamb LaProp MADGRAD MARS "
    "NovoGrad QHAdam SM3 SOAP ScalableShampoo StableAdamW Tiger Yogi"
).split()

_WIDE = 256

_PACKAGES: tuple[OptimizerSubject, ...] = (
    OptimizerSubject("Ranger21(num_iterations=1000)", "pytorch_optimizer.Ranger21", {"num_iterations": 1000}),
    OptimizerSubject("AdamWScheduleFree", "schedulefree.AdamWScheduleFree", trains=True),
    OptimizerSubject("RAdamScheduleFree", "schedulefree.RAdamScheduleFree", trains=True),
    OptimizerSubject("SGDScheduleFree(lr=1)", "schedulefree.SGDScheduleFree", {"lr": 1.0}, trains=True),
    OptimizerSubject("AdamW8bit", "torchao.optim.AdamW8bit", hidden=_WIDE),
    OptimizerSubject("AdamW4bit", "torchao.optim.AdamW4bit", hidden=_WIDE),
    OptimizerSubject("AdamWFp8", "torchao.optim.AdamWFp8", hidden=_WIDE),
    OptimizerSubject(
        "AdamW8bit(bf16_stochastic_round=True)",
        "torchao.optim.AdamW8bit",
        {"bf16_stochastic_round": True},
        hidden=_WIDE,
    ),
    OptimizerSubject(
        "_AdamW(bf16_stochastic_round=True)", "torchao.optim.adam._AdamW", {"bf16_stochastic_round": True}
    ),
    OptimizerSubject("AdamW", "bitsandbytes.optim.AdamW"),
    OptimizerSubject("AdamW8bit(min_8bit_size=1)", "bitsandbytes.optim.AdamW8bit", {"min_8bit_size": 1}),
    OptimizerSubject("Lion", "bitsandbytes.optim.Lion"),
    OptimizerSubject("Adafactor", "transformers.Adafactor"),
    OptimizerSubject(
        "Adafactor(lr=1e-3)",
        "transformers.Adafactor",
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False},
    ),
    OptimizerSubject("Lion", "lion_pytorch.Lion"),
    OptimizerSubject("AdamW(lr=1e-3)", "optimi.AdamW", {"lr": 1e-3}),
    OptimizerSubject("Lion(lr=1e-4)", "optimi.Lion", {"lr": 1e-4}),
    OptimizerSubject("SGD(lr=1e-2)", "optimi.SGD", {"lr": 1e-2}),
    OptimizerSubject("Prodigy", "prodigyopt.Prodigy"),
)

SUBJECTS: Mapping[tuple[str, str], OptimizerSubject] = MappingProxyType(
    {
        (subject.package, subject.name): subject
        for subject in chain(
            _of_torch(),
            (OptimizerSubject(kind, f"pytorch_optimizer.{kind}") for kind in _PYTORCH_OPTIMIZER),
            _PACKAGES,
        )
    }
)
"""By package and name."""
