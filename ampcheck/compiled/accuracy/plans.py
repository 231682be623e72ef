"""Plans of the runs of a comparison: once as the user runs it, and with gradients where nothing asks for any."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ampcheck.core.subject import Subject
from ampcheck.numerics.measure import LOSS_SCALES
from ampcheck.numerics.run import RunPlan, input_names, run_subject
from ampcheck.torchtools.copying import prepare, trains
from ampcheck.torchtools.dynamo import in_eager_mode
from ampcheck.torchtools.pytree import tensors

STRIDE = 2.0**-7
"""Distance by which the plain gradient descent in place of an optimizer moves the weights in a step, relative to their
norm: one step of bfloat16, the least that 16-bit weights can keep."""


def plans(subject: Subject, plan: RunPlan, narrow: torch.dtype) -> list[RunPlan]:
    """Return how the subject is run: as the user runs it, and once more with gradients where nothing asks for any.

    plan: device, autocast, steps, optimizer and grad mode of the runs. narrow: the narrowest format they compute in.
    """
    leaves, asked = _leaves(subject, every=False), "" if plan.grad else "gradients are not judged"
    plan = replace(plan, loss=subject.loss, inputs=leaves, no_backward=asked)
    floating = any(t.is_floating_point() for c in subject.calls for _, t in tensors((c.args, dict(c.kwargs))))
    if not plan.grad or leaves or trains(subject) or not floating:
        return [_probed(subject, plan, narrow)]
    every = replace(plan, inputs=_leaves(subject, every=True), optimizer=None)
    return [replace(plan, no_backward="nothing requires a gradient"), _probed(subject, every, narrow)]


def _probed(subject: Subject, plan: RunPlan, narrow: torch.dtype) -> RunPlan:
    """The plan, completed by a plain eager run: the loss scale without overflow, the rate, whether all is finite."""
    for scale in LOSS_SCALES if narrow is torch.float16 else (1.0,):
        probe = replace(plan, steps=min(plan.steps, 2), optimizer=None, scale=scale)
        prepared = prepare(subject, device=plan.device)
        seen = run_subject(prepared, probe, keep=True, around=[in_eager_mode()])
        gradients = [t.double() / scale for key, t in seen.values.items() if key[0] == "gradient" and key[2] == 0]
        if seen.error is not None or all(bool(g.isfinite().all()) for g in gradients):
            break
    if seen.error is not None and seen.phase == "backward" and plan.loss is None:
        # The default loss is ours: a model for inference need not have a gradient, of which AOTAutograd makes a graph.
        forward = replace(plan, no_backward="backward raises in eager mode")
        without = replace(forward, grad=False)
        alone = run_subject(prepare(subject, device=plan.device), without, around=[in_eager_mode()])
        return without if alone.error is None else forward
    outputs = [t for key, t in seen.values.items() if key[0] == "output" and t.is_floating_point()]
    if plan.loss is None and outputs and not any(bool(t.isfinite().any()) for t in outputs):
        return replace(plan, no_backward="no output has a finite value to be differentiated")
    rate = 0.0
    if plan.steps * len(subject.calls) > 1 and prepared.root is not None:
        weights = [p.detach().double() for p in prepared.root.parameters() if p.requires_grad and p.numel()]
        steepness = math.hypot(*(float(g.norm()) for g in gradients if bool(g.isfinite().all())))
        rate = STRIDE * math.hypot(*(float(w.norm()) for w in weights)) / steepness if steepness else 0.0
    return replace(plan, scale=scale, finite_loss=not all(bool(t.isfinite().all()) for t in outputs), rate=rate)


def _leaves(subject: Subject, *, every: bool) -> frozenset[str]:
    """The floating inputs that the user wants gradients of; `every`: all of them."""
    named = {n: t for number, c in enumerate(subject.calls) for n, t in input_names(c, number).items()}
    return frozenset(n for n, t in named.items() if every or t.requires_grad)
