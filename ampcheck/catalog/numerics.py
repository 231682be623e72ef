"""Checks of forward and backward in low precision."""

from __future__ import annotations

from ampcheck.catalog.kinds import EVERY, MODELS
from ampcheck.core.check import Check
from ampcheck.core.subject import Kind

LOW_PRECISION_ERROR = Check(
    "low-precision-error",
    "range",
    "A model that runs in float32 must also run in low precision. Fails when only the low-precision run raises "
    "an exception.",
    "The subject runs in float32 and in float64 first; the exception of the low-precision run is reported with its "
    "op, module and line.",
    "Operands with different dtypes (a float32 table and a bfloat16 tensor), a constant such as -1e9 beyond the range "
    "of float16, in-place and out= variants that autocast does not cast, a missing kernel.",
    "Cast the operands to one dtype (.to(x.dtype)), take mask values from torch.finfo(x.dtype).min or use a boolean "
    "mask, use the out-of-place variant of the op.",
    subjects=MODELS,
)

NONFINITE_REFERENCE = Check(
    "nonfinite-reference",
    "range",
    "Outputs and gradients are numbers in float64. Fails when an output is NaN in every precision, because of a NaN "
    "in an input, weight or buffer or because of an op of the model, and when every output is infinite.",
    "Every op of the float64 run is observed: an op that gives a NaN from inputs without NaN is reported with its "
    "line. Inputs, weights and buffers are searched for NaN, weights for infinities too; they count when the outputs "
    "are NaN. Infinities in outputs (padded logits, masks) are no finding, but low precision must have them at the "
    "same positions with the same sign. Gradients that are not finite in float64 fail; the check is incomplete if "
    "outputs contain infinities and the default loss is used. A declared loss that is not finite in float64 fails. "
    "The check runs once for each audit and always has a verdict, since elements that are NaN in float64 cannot be "
    "compared. In a block under ampcheck.watch, each op that gives a NaN also runs in float64; the check fails if a "
    "NaN is in use at the end of the block, and warns otherwise.",
    "A logarithm or square root of negative numbers, 0/0, inf - inf, a softmax over a fully masked row, a derivative "
    "at its pole (sqrt or norm at zero), missing values in the data, weights saved after a NaN.",
    "Clamp before the op; select with where before it as well as after it; clean the data; load other weights. A "
    "wider format does not help.",
    subjects=MODELS,
)

OVERFLOW = Check(
    "overflow",
    "range",
    "An op with finite inputs gives finite outputs. Fails when an infinity or NaN of low precision reaches a module's "
    "output, an output, a declared loss or a gradient; warns when it disappears before.",
    "Every op of forward and backward is observed below autocast. An op that gives non-finite values runs again on "
    "the same inputs in float64, which separates the format's limit from arithmetic without a result. The first such "
    "op is reported; ops that propagate the values are only counted. A -inf that the model writes on purpose (a mask) "
    "has a non-finite constant or input and is no finding. Inside a compiled graph, each cast to 16 bits and each "
    "product records its losses. ampcheck.watch fails when the last loss passed to `seen.step(loss)` is not finite. "
    "In a training loop the check fails when the losses of the last three observed steps are not finite.",
    "Sums and products beyond 65504 in float16 (feed-forward projections, residual streams, variances), finfo.min "
    "added to a negative score, a divisor whose eps is zero in the format.",
    "Keep the op in float32, scale its inputs, use bfloat16, write masks with where or masked_fill instead of adding.",
    subjects=(*MODELS, Kind.TRAINING),
)

NONFINITE_GRADIENT = Check(
    "nonfinite-gradient",
    "range",
    "Every gradient that is finite in float64 is finite in low precision.",
    "float16 runs at the initial loss scale of torch.amp.GradScaler and those to which it backs off, until no "
    "gradient is infinite; bfloat16 at scale 1. ampcheck.watch fails when weights became infinite or NaN, and warns "
    "when an optimizer stepped with such a gradient; a step that a GradScaler skips is no finding. In a training loop "
    "the weights after the observed steps must be finite.",
    "A forward overflow; a division or square root at zero whose derivative overflows.",
    "Mend the overflow first. Clamp before sqrt, log and division; see overflow for the op.",
    subjects=(*MODELS, Kind.TRAINING),
)

PRECISION_LOSS = Check(
    "precision-loss",
    "range",
    "Outputs and gradients differ from those of the same model in float64 by no more than rounding explains. Fails "
    "beyond that, and for an output that is 25 % off, whatever explains it; warns where only a module is beyond its "
    "limit, where a CPU kernel sums in 16 bits, and where a decision (topk, comparison) differs near a tie and "
    "float64 could not take the same one.",
    "The relative error in the Euclidean norm, per output, module output and gradient. The limit is precision * "
    "(sqrt(chain) * (u + s) + f) + sqrt(n) * u32: u is the unit roundoff of the format, chain the longest series "
    "of roundings between two weights, s the change of the float64 model when its weights and rounded inputs are "
    "moved by u, f the same for float32, n the longest sum and u32 the unit roundoff of float32, in which sums "
    "are computed. If a near tie was decided differently, float64 runs again with the decisions of the "
    "low-precision run. Gradients that float32 itself cannot compute to the precision of the format are not "
    "judged, nor those whose error is within rounding of the whole gradient. If two float64 runs with equal "
    "seeds differ, the check is incomplete.",
    "Cancellation (differences of cumulative sums, variance by E[x^2] - E[x]^2), position tables in 16 bits, "
    "accumulation in the low format.",
    "Compute the inputs of the reported op in float32; subtract before rounding; set precision in "
    "[tool.ampcheck.limits] to accept a larger error.",
    subjects=MODELS,
)

SILENT_ZERO = Check(
    "silent-zero",
    "range",
    "No tensor becomes zero as a whole, and no guarding constant (such as an eps) becomes zero. Fails when "
    "outputs or gradients are off by more than rounding explains; warns for another constant, and for a tensor "
    "where a gradient (in forward also a module's output) is off by more than rounding explains, though within "
    "the rounding of the whole.",
    "The op runs again on the same inputs in float64. A constant becomes zero when it is a nonzero Python number "
    "below half of the format's smallest subnormal and results that needed it are exactly zero.",
    "eps=1e-8 in float16, squares of small numbers, a model whose weights are zero or tiny at initialisation.",
    "Use an eps within the range of the format, scale before squaring, compute the guard in float32.",
    subjects=MODELS,
)

FLUSH = Check(
    "flush",
    "range",
    "No tensor loses more of its Euclidean norm to zero than one rounding changes. Fails when outputs or gradients "
    "are off by more than rounding explains; warns when more than half of a tensor's nonzero elements become zero and "
    "a gradient (in forward also a module's output) is off by more than rounding explains, though within the rounding "
    "of the whole.",
    "Element by element against the same op on the same inputs in float64: nonzero there, zero here, and too small "
    "for the format. The limit is flush * u, where u is the unit roundoff.",
    "float16 below 6e-8: gradients of a loss that is not scaled, probabilities, variances of small activations.",
    "Scale the loss (torch.amp.GradScaler), scale the values, use bfloat16, keep the op in float32.",
    subjects=MODELS,
)

INTEGER_CAST = Check(
    "integer-cast",
    "range",
    "Integers survive in floating tensors. Fails when two different integers become equal on their way to an output "
    "or buffer, or when outputs or gradients are off by more than rounding explains; warns otherwise.",
    "Floating tensors of integers are tracked from the cast or range that creates them through further casts "
    "(autocast's too), cumsum, sums, products and copies, and compared element by element with the same op in "
    "float64; different values are counted before and after. float16 represents every integer up to 2048, bfloat16 up "
    "to 256, float32 up to 16,777,216.",
    "torch.arange(n).to(x.dtype) or type_as, position ids and time steps cast with the model, counters in buffers.",
    "Compute with positions in float32 and cast the result.",
    subjects=MODELS,
)

HEADROOM = Check(
    "headroom",
    "range",
    "No value comes within a factor (4 by default) of the maximum of its format: a warning.",
    "The largest magnitude that each op computes, in forward, and in backward if the loss is not scaled. Constants "
    "that pass through unchanged do not count.",
    "Growth along the residual stream, unnormalised scores, a large loss scale.",
    "Normalise or scale, or set headroom in [tool.ampcheck.limits].",
    subjects=MODELS,
)

LOSS_DTYPE = Check(
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
    subjects=(*MODELS, Kind.TRAINING),
)

DTYPE = Check(
    "dtype",
    "dtype",
    "Modules give the dtype that was declared for them. A pattern that matches nothing fails.",
    "Floating outputs of every module are followed through tuples, dicts, dataclasses and model outputs.",
    "A float32 parameter or constant that promotes a 16-bit stream; a missing cast back.",
    "Cast the result, or the parameter at the point of use.",
    subjects=MODELS,
)

COVERAGE = Check(
    "coverage",
    "always",
    "The audit examined something. Fails when it examined nothing, and for a compiled run without a graph, unless "
    "Dynamo gives a reason (a skip). Warns if no op computed in 16 bits.",
    "Counts of ops, tensors, modules, outputs, gradients and graphs, and of items that could not be measured, with "
    "the reason.",
    "Inputs with which nothing is computed, a model that torch._dynamo.disable excludes.",
    "Use inputs with which the model does its work.",
    subjects=EVERY,
)
