"""Checks of properties over all inputs of a strategy."""

from __future__ import annotations

from ampcheck.core.check import Check

PROPERTY_FINITE = Check(
    "property-finite",
    "property",
    "Finite inputs give finite outputs, over all inputs of a strategy. Also fails where the true value is beyond "
    "the format, which no implementation can avoid.",
    "Hypothesis draws inputs at the edges of the format, searches for large values and errors, and minimises a "
    "failure; float64 on the same inputs is the reference. Elements that are not finite there are not judged.",
    "An exp without subtracting the largest, squares of large numbers, an eps that is zero in float16, a sum before "
    "the division.",
    "Use the stable form, scale before squaring, take eps from torch.finfo, keep the part in float32; or declare "
    "smaller inputs.",
)

PROPERTY_ACCURACY = Check(
    "property-accuracy",
    "property",
    "Every row of the output differs from float64 by no more than rounding explains, and decisions (comparisons, "
    "indices) are those of float64 unless they are near ties, over all inputs of a strategy.",
    "Every tensor of the run carries its float64 value, and a second one for inputs and weights moved by a unit "
    "roundoff. What the move changes, and a few roundings, is the bound. An op whose result leaves it while its inputs "
    "keep it is at fault; it fails where the error is left in an output.",
    "Differences of large numbers, log(1 + x) and exp(x) - 1 near zero, a variance by E[x^2] - E[x]^2, intermediate "
    "values that overflow or flush to zero.",
    "Use log1p, expm1, logsumexp, a variance in two passes, or compute the part in float32.",
)

PROPERTY_COMPILED = Check(
    "property-compiled",
    "property",
    "Compiled code keeps the bounds that eager mode keeps on the inputs of a strategy. Skipped if nothing can be "
    "compiled.",
    "The model is compiled once, with dynamic shapes, for at most four kinds of shapes. Its outputs are compared with "
    "the float64 values of the eager run; integers and dtypes must be those of eager mode, near ties aside.",
    "A kernel that is wrong in one dtype or at one value, an approximation in Inductor.",
    "Reproduce with torch.compile(model, backend='aot_eager') to separate Inductor from tracing, and report it.",
)

PROPERTY_INVARIANCE = Check(
    "property-invariance",
    "property",
    "A declared invariance holds: batch order, scale, shift, padding, or one of your own.",
    "Low precision is judged at the changed inputs as at any others; float64 shows whether the invariance holds at "
    "all.",
    "A result that depends on its neighbours in a batch, a norm whose eps or squares leave the range when the scale "
    "changes, padding that enters a mean.",
    "Mask padding, scale before squaring, or correct the declaration.",
)
