"""Help for the checks of `assert_property`."""

from __future__ import annotations

from ampcheck.core.check import Check

PROPERTY_FINITE = Check(
    "property-finite",
    "property",
    "Finite inputs give finite outputs, over all inputs that a strategy declares. Also fails where the true value "
    "lies beyond the format, which no code mends.",
    "Hypothesis draws inputs at the edges of the format, aims at large values and errors, and makes what fails "
    "small; float64 on the same inputs tells what should come out. What is not finite there is not judged.",
    "An exp without subtracting the largest, squares of large numbers, an eps that is zero in float16, a sum "
    "before the division.",
    "Use the stable form, scale before squaring, take eps from torch.finfo, keep the part in float32; or declare "
    "smaller inputs.",
)

PROPERTY_ACCURACY = Check(
    "property-accuracy",
    "property",
    "Every element of the output lies within what rounding explains of float64, over all inputs that a strategy "
    "declares; integers and bools are the same unless rounding the data turns them.",
    "The bound is derived for each element: the unit roundoff times the number of roundings, times what the output "
    "moves by when its inputs and weights move, and its own rounding. What float32 gets wrong is not asked for.",
    "Differences of large numbers, log(1 + x) and exp(x) - 1 near zero, a variance by E[x^2] - E[x]^2, values that "
    "overflow or flush to zero on the way.",
    "Use log1p, expm1, logsumexp, a variance in two passes, or compute the part in float32.",
)

PROPERTY_COMPILED = Check(
    "property-compiled",
    "property",
    "Compiled code is no worse than eager mode on the inputs that a strategy declares. Skipped where nothing can "
    "be compiled.",
    "The model is compiled once, with dynamic shapes, for at most four kinds of shapes; both are held against "
    "float64, and compiled code fails beyond the bound where eager mode is nearer.",
    "A kernel that is wrong in one dtype or at one value, an approximation that Inductor takes.",
    "Reproduce with torch.compile(model, backend='aot_eager') to tell Inductor from tracing, and report it.",
)

PROPERTY_INVARIANCE = Check(
    "property-invariance",
    "property",
    "A declared invariance holds: batch order, scale, shift, padding, or one of your own.",
    "The run in float64 tells whether the invariance holds at all; low precision is then judged at the changed "
    "inputs as at any others.",
    "A result that depends on its neighbours in a batch, a norm that is not free of scale since its eps or its "
    "squares leave the range, padding that takes part in a mean.",
    "Mask what is padding, scale before squaring, or correct the declaration.",
)
