"""Checks of forward and backward in low precision."""

from __future__ import annotations

from ampcheck.catalog import declared
from ampcheck.core.subject import EVERY, MODELS

LOSS_DTYPE = declared(
    "loss-dtype",
    "dtype",
    "The loss is computed in float32 and is finite. Warns when the loss, or a reduction inside it, is computed "
    "in 16 bits; fails when a declared policy of the training loop requires float32, or when the loss is not "
    "finite while the float64 loss is.",
    "The dtype of the loss, when the subject declares one or its output is 0-d; in a training loop the dtype of "
    "each tensor on which backward is called, and of the sums and means that lead to it.",
    "A loss computed from 16-bit outputs outside autocast, or under an autocast policy without a rule for it; a "
    "mean or sum over many elements in 16 bits.",
    "Compute the loss in float32: output.float() before it, or the loss function under autocast.",
    subjects=EVERY,
)

DTYPE = declared(
    "dtype",
    "dtype",
    "Modules give the dtype that was declared for them. A pattern that matches nothing fails.",
    "Floating outputs of every module are followed through tuples, dicts, dataclasses and model outputs.",
    "A float32 parameter or constant that promotes a 16-bit stream; a missing cast back.",
    "Cast the result, or the parameter at the point of use.",
    subjects=MODELS,
)
