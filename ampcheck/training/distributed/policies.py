"""The `MixedPrecisionPolicy` of each module of FSDP2, compared with the dtypes in which its parameters compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ampcheck.checks.training.reduce_precision import CHECK as REDUCE_PRECISION
from ampcheck.core.formats import format_of
from ampcheck.core.run import Finding
from ampcheck.training.distributed.collectives import CollectiveWatch

_HINT = (
    "pass the policy to fully_shard of every module that owns parameters; a policy has no effect on parameters of a "
    "child that was sharded before"
)


class FollowedPolicies(ExitStack):
    """Records, inside, the dtypes of parameters in each forward. sums: of gradients, recorded around it."""

    def __init__(self, model: nn.Module, sums: CollectiveWatch) -> None:
        super().__init__()
        self._modules = dict(model.named_modules())
        policies = {name: _policy(part) for name, part in self._modules.items()}
        self._policies: dict[str, Any] = {name: policy for name, policy in policies.items() if policy is not None}
        self._computed: dict[str, set[torch.dtype]] = {}
        self._sums = sums

    def __enter__(self) -> FollowedPolicies:
        for name, module in self._modules.items() if self._policies else ():
            self.callback(module.register_forward_pre_hook(self._recorder(name)).remove)
        return self

    def findings(self, subject: str) -> tuple[Finding, ...]:
        """A failure for each policy that was accepted and had no effect."""
        return tuple(f for name in self._policies for f in self._judged(name, subject))

    def _judged(self, name: str, subject: str) -> list[Finding]:
        policy, shown = self._policies[name], name or "the root"
        below = [path for path in self._computed if _inside(path, name)]
        own = [path for path in below if self._owner(path) == name]
        texts = []
        if policy.param_dtype is not None:
            judged = own or [p for p in below if self._policies[self._owner(p)].param_dtype is not policy.param_dtype]
            other = [(p, d) for p in judged for d in self._computed[p] if d is not policy.param_dtype]
            if other:
                whose = "" if own else ", a parameter of a child that was sharded before"
                path, dtype = other[0]
                texts.append(f"param_dtype={policy.param_dtype}, but {path} computes in {dtype}{whose}")
        if own and policy.reduce_dtype is not None:
            formats = {call.format for call in self._sums.calls if call.where.phase == "backward"}
            wanted = format_of(policy.reduce_dtype).name
            if formats and wanted not in formats:
                sums = ", ".join(sorted(formats))
                texts.append(f"reduce_dtype={policy.reduce_dtype}, but gradients are summed over ranks in {sums}")
        required = "a MixedPrecisionPolicy must have the effect that it declares"
        message = f"{required}; that of {shown} has {{}}"
        return [REDUCE_PRECISION.fail(subject, message.format(text), hint=_HINT) for text in texts]

    def _owner(self, path: str) -> str:
        """The nearest module with a policy around a path."""
        return max((name for name in self._policies if _inside(path, name)), key=len)

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: object) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.is_floating_point():
                    self._computed.setdefault(f"{name}.{key}".lstrip("."), set()).add(parameter.dtype)

        return record


def _inside(path: str, name: str) -> bool:
    return not name or path.startswith(f"{name}.")


def _policy(module: nn.Module) -> Any:
    """The policy of a module that `fully_shard` has sharded, None of others."""
    state = getattr(module, "_get_fsdp_state", None)
    return getattr(state(), "_mp_policy", None) if state is not None else None  # no public name up to torch 2.13
