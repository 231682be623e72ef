"""Checks of forward and backward in low precision."""

from __future__ import annotations

from ampcheck.catalog import declared
from ampcheck.core.subject import EVERY, MODELS

LOW_PRECISION_ERROR = declared(
    "low-precision-error",
    "range",
    "A model that runs in float32 must also run in low precision. Fails when only the low-precision run raises "
    "an exception.",
    "If the low-precision run raises, the subject runs again in float32 and under autocast to the other 16-bit dtype; "
    "the exception is reported with its op, module and line, or the cast that lets the model run under one dtype "
    "alone. A subject that raises in all of them is not judged; where its forward refuses gradients, its values are.",
    "Operands with different dtypes (a float32 table and a bfloat16 tensor), a constant such as -1e9 beyond the range "
    "of float16, in-place and out= variants that autocast does not cast, a missing kernel.",
    "Cast the operands to one dtype (.to(x.dtype)), take mask values from torch.finfo(x.dtype).min or use a boolean "
    "mask, use the out-of-place variant of the op.",
    subjects=MODELS,
)

NONFINITE_REFERENCE = declared(
    "nonfinite-reference",
    "range",
    "Outputs and gradients are numbers in float64. Fails when an output is NaN in every precision, because of a NaN "
    "in an input, weight or buffer or because of an op of the model, and when every output is infinite.",
    "Float64 is followed beside the low-precision run, with all casts lifted: an op that gives a NaN from inputs "
    "without NaN there is reported with its line. Inputs, weights and buffers are searched for NaN, weights for "
    "infinities too; they count when the outputs are NaN. Infinities in outputs (padded logits, masks) are no "
    "finding, but low precision must have them at the same positions with the same sign. Gradients that are not "
    "finite in float64 fail; the check is incomplete if outputs contain infinities and the default loss is used. A "
    "declared loss that is not finite in float64 fails. The check runs once for each audit and always has a verdict, "
    "since elements that are NaN in float64 cannot be compared. In a block under ampcheck.watch it fails if a NaN is "
    "in use at the end of the block, and warns otherwise.",
    "A logarithm or square root of negative numbers, 0/0, inf - inf, a softmax over a fully masked row, a derivative "
    "at its pole (sqrt or norm at zero), missing values in the data, weights saved after a NaN.",
    "Clamp before the op; select with where before it as well as after it; clean the data; load other weights. A "
    "wider format does not help.",
    subjects=EVERY,
)

OVERFLOW = declared(
    "overflow",
    "range",
    "An op gives finite results where float64 does. Fails when an infinity or NaN of low precision reaches an output, "
    "a declared loss, a gradient, a weight or a buffer; warns when it disappears before. Gradients that are discarded "
    "and finite later, at a lower loss scale, and a result that code tests and computes again, are no failure.",
    "Every op of forward and backward is compared with its float64 value, below autocast. The first op that gives a "
    "non-finite element where float64 is finite is reported; ops that propagate it are not. A -inf that the model "
    "writes on purpose, and an additive mask that becomes -inf and that softmax absorbs, are no findings. Inside a "
    "compiled graph, each cast to 16 bits and each product records its losses. ampcheck.watch fails when the last "
    "loss passed to `seen.step(loss)` is not finite. In a training loop the check fails when the losses of the last "
    "three observed steps are not finite.",
    "Sums and products beyond 65504 in float16 (feed-forward projections, residual streams, variances), finfo.min "
    "added to a negative score, a divisor whose eps is zero in the format.",
    "Keep the op in float32, scale its inputs, use bfloat16, write masks with where or masked_fill instead of adding.",
    subjects=EVERY,
)

NONFINITE_GRADIENT = declared(
    "nonfinite-gradient",
    "range",
    "Every gradient that is finite in float64 is finite in low precision.",
    "float16 runs at the initial loss scale of torch.amp.GradScaler and those to which it backs off, until no "
    "gradient is infinite; bfloat16 at scale 1. ampcheck.watch fails when weights became infinite or NaN, and warns "
    "when an optimizer stepped with such a gradient; a step that a GradScaler skips is no finding. In a training loop "
    "the weights after the observed steps must be finite.",
    "A forward overflow; a division or square root at zero whose derivative overflows.",
    "Mend the overflow first. Clamp before sqrt, log and division; see overflow for the op.",
    subjects=EVERY,
)

PRECISION_LOSS = declared(
    "precision-loss",
    "range",
    "Values differ from float64 by no more than rounding explains. Fails at the op that loses the digits, when the "
    "damage reaches an output, a gradient, a weight, a buffer or a number that leaves the run, or a term vanishes from "
    "its sum; when a decision (topk, comparison, index) differs from that of float64 by more than rounding explains, "
    "or most of those that are the exception do; for a bound that was meant to guard (a floor under a divisor, the "
    "end of a format) and decides most values; for a sum that a 16-bit weight cannot take up; for an output or "
    "gradient beyond "
    "its limit; and for an output that is 25 % off although float32 would keep it. Warns where a CPU kernel of "
    "backward sums in 16 bits.",
    "Every floating tensor of the run has two companions: exact, the same program in float64 with all casts "
    "lifted, and moved, the same with the data moved by one unit roundoff of the format. The distance of the two "
    "is the error that the data explain. A value may be off by 8 times that distance and some roundings of its "
    "own, in Euclidean norms by rows, and by tensors for gradients and what is averaged of them; precision / 2 "
    "scales this limit. An op is at fault when its inputs were within their limits and its result is not; digits "
    "that a later sum makes good again are no finding, nor are gradients whose error is within rounding of the "
    "whole gradient, or whose value the data do not determine. Decisions and random numbers are those of the run."
    " Compiled code is compared with the exact values of the eager run; if two eager runs with equal seeds "
    "differ, the check is incomplete.",
    "Cancellation (differences of cumulative sums, variance by E[x^2] - E[x]^2), position tables in 16 bits, "
    "accumulation in the low format.",
    "Compute the inputs of the reported op in float32; subtract before rounding; set precision in "
    "[tool.ampcheck.limits] to accept a larger error.",
    subjects=EVERY,
)

SILENT_ZERO = declared(
    "silent-zero",
    "range",
    "No tensor becomes zero as a whole, and no element that a later division, logarithm or root needs. Fails at the op "
    "at which the values become zero, when the damage reaches an output, a gradient, a weight or an update of it, or a "
    "buffer.",
    "Elements that are zero here and not in float64, and that are too small for the format; a later op that gives inf "
    "or NaN for their sake is named too.",
    "eps=1e-8 in float16, squares of small numbers, a model whose weights are zero or tiny at initialisation.",
    "Use an eps within the range of the format, scale before squaring, compute the guard in float32.",
    subjects=EVERY,
)

FLUSH = declared(
    "flush",
    "range",
    "No value loses more than rounding explains to zero and to subnormal numbers. Fails at the op where it happens, "
    "when the damage reaches an output, a gradient, a weight or a buffer.",
    "The error against float64, as for precision-loss, where most of it is in elements below the normal numbers of the "
    "format. Errors below flush * u of the norm are accepted, where u is the unit roundoff.",
    "float16 below 6e-8: gradients of a loss that is not scaled, probabilities, variances of small activations.",
    "Scale the loss (torch.amp.GradScaler), scale the values, use bfloat16, keep the op in float32.",
    subjects=EVERY,
)

INTEGER_CAST = declared(
    "integer-cast",
    "range",
    "Different integers stay different in floating tensors. Fails when something is computed from integers that became "
    "equal; warns otherwise.",
    "Floating tensors of whole numbers that came from integers are followed through casts (autocast's too), cumsum, "
    "sums, products and copies, beside their float64 values; different values are counted in both. float16 represents "
    "every integer up to 2048, bfloat16 up to 256, float32 up to 16,777,216.",
    "torch.arange(n).to(x.dtype) or type_as, position ids and time steps cast with the model, counters in buffers.",
    "Compute with positions in float32 and cast the result.",
    subjects=EVERY,
)

HEADROOM = declared(
    "headroom",
    "range",
    "No value comes within a factor (4 by default) of the maximum of its format: a warning.",
    "The largest magnitude that each op computes in 16 bits, in forward, and in backward if the loss is not scaled. "
    "An op is reported where values grow beyond the limit; constants that pass through unchanged do not count.",
    "Growth along the residual stream, unnormalised scores, a large loss scale.",
    "Normalise or scale, or set headroom in [tool.ampcheck.limits].",
    subjects=EVERY,
)

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

COVERAGE = declared(
    "coverage",
    "always",
    "The audit examined something. Fails when it examined nothing, and for a compiled run without a graph, unless "
    "Dynamo gives a reason (a skip), and where an optimizer steps parameters that were replaced in the model since. "
    "Warns if no op computed in 16 bits.",
    "Counts of ops, tensors, modules, outputs, gradients and graphs, and of items that could not be measured, with "
    "the reason.",
    "Inputs with which nothing is computed, a model that torch._dynamo.disable excludes.",
    "Use inputs with which the model does its work.",
    subjects=EVERY,
)
