"""Requires: Parameters that are trained, and their gradients, have the dtypes that the declared policy allows. Without
a policy only float16 parameters under an enabled GradScaler fail, which cannot unscale their gradients, and a weight
that was tied to another and that no step changes.

Measured: Everything that an optimizer steps is listed with its dtype, bytes and device, after steps were run. Under
'master-weights-fp32' each 16-bit weight must be the rounded value of a float32 tensor that an optimizer steps or keeps.
A policy is declared by 'policy' in the mapping of the training loop: 'amp', 'pure-bf16', 'fsdp2',
'master-weights-fp32', or dtypes by role with exceptions by glob pattern.

Causes: A call of model.half() or model.bfloat16() before the optimizer was made, a checkpoint loaded in its own dtype
(torch_dtype=...), 16-bit weights that are not copied back from their masters.

Fix: Keep the parameters in float32 and run forward under torch.autocast; or let the optimizer step float32 copies, and
copy them back after each step.
"""

from __future__ import annotations

from ampcheck.checks.dtype import count_of, evidence_of, list_of, misfits, of_roles
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Kind
from ampcheck.records.state import DtypePolicy, Role, StateDtypeStats, StateTensor

CHECK = Check(
    "master-weights",
    "dtype",
    __doc__,
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("StateDtypeStats",),
    order=220,
    evidence=("tests/corpus/training/head_untied_by_cast", "reference: half after the optimizer was built"),
)


def check(stats: StateDtypeStats, limits: Limits) -> list[Finding]:
    """Weights that are trained have the dtypes of the policy, or those that a GradScaler needs."""
    if untied := [tensor for tensor in stats.tensors if tensor.twin]:
        others = _judged_weights(stats)
        return [_untied(stats, untied), *(finding for finding in others if finding.verdict is Verdict.FAIL)]
    return _judged_weights(stats)


def _judged_weights(stats: StateDtypeStats) -> list[Finding]:
    weights = [tensor for tensor in of_roles(stats, Role.PARAMETER) if tensor.trained]
    if not weights:
        return [CHECK.absent(stats.subject, "no optimizer steps a floating-point parameter here")]
    policy = stats.policy
    if policy is None:
        return [_undeclared_weights(stats, weights)]
    gradients = of_roles(stats, Role.GRADIENT)
    findings = [
        *misfits(stats, policy, CHECK, "parameter", weights),
        *misfits(stats, policy, CHECK, "gradient", gradients),
        *(_without_master(stats, policy) if policy.masters and stats.after_step else ()),
    ]
    text = f"all {len(weights)} parameters and {len(gradients)} gradients have the dtypes of {policy}"
    tensors = [*weights, *gradients]
    return findings or [CHECK.passed(stats.subject, f"{text}: {count_of(tensors)}", len(tensors))]


def _undeclared_weights(stats: StateDtypeStats, weights: list[StateTensor]) -> Finding:
    low = [tensor for tensor in weights if tensor.low and not tensor.master]
    if not low:
        dtypes = "kept in float32 by an optimizer" if any(tensor.low for tensor in weights) else "float32 or wider"
        return CHECK.passed(stats.subject, f"all {len(weights)} trained parameters are {dtypes}", len(weights))
    half = [tensor for tensor in low if tensor.dtype == "float16"]
    if stats.scaled and half:
        message = (
            "a GradScaler unscales gradients of float32 parameters only, and updates need float32 weights; "
            f"{list_of(half, len(weights), 'trained parameters')}"
        )
        hint = "remove model.half(): keep the parameters in float32 and run forward under torch.autocast"
        return CHECK.fail(stats.subject, message, **evidence_of(half, hint, "half"))
    text = (
        f"no policy is declared to judge this by; {list_of(low, len(weights), 'trained parameters')}. Declare "
        "policy='pure-bf16' (or 'amp', 'master-weights-fp32') in the mapping"
    )
    return CHECK.skip(stats.subject, text)


def _untied(stats: StateDtypeStats, untied: list[StateTensor]) -> Finding:
    dtypes = {tensor.name: tensor.dtype for tensor in stats.tensors}
    first = untied[0]
    message = (
        f"a weight that collects gradients must be stepped, but the steps change {first.twin} ({dtypes[first.twin]}) "
        f"alone, and not {first.name} ({first.dtype}), which began with its values"
    )
    hint = (
        "a cast made it a parameter of its own: take that cast out and cast in forward (weight.float()), or cast the "
        "whole model, tie the weights after that, and give the optimizer the parameters that the model has then"
    )
    return CHECK.fail(stats.subject, message, **evidence_of(untied, hint))


def _without_master(stats: StateDtypeStats, policy: DtypePolicy) -> list[Finding]:
    """Weights of 16 bits that are trained: the optimizer's own, and those of a module that steps change."""
    weights = [*of_roles(stats, Role.PARAMETER, Role.COPY)]
    low = [tensor for tensor in weights if tensor.low and tensor.trained and tensor.changed is not False]
    bare = [tensor for tensor in low if not tensor.master and not policy.excepts(tensor.name, tensor.dtype)]
    if not bare:
        return []
    message = (
        "each weight of 16 bits must be the rounded value of a float32 tensor that an optimizer steps or keeps; "
        f"{list_of(bare, len(low), 'such weights', 'have no such tensor')}"
    )
    hint = "step float32 copies of the parameters, and copy them into the 16-bit weights after each step"
    return [CHECK.fail(stats.subject, message, **evidence_of(bare, hint))]
