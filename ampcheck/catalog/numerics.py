"""What is judged of forward and backward in low precision."""

from __future__ import annotations

from ampcheck.catalog.kinds import EVERY, MODELS
from ampcheck.core.check import Check
from ampcheck.core.subject import Kind

LOW_PRECISION_ERROR = Check(
    "low-precision-error",
    "range",
    "What runs in float32 also runs in low precision. Fails when only the low-precision run raises.",
    "The subject runs in float32 and in float64 first; the exception of the low-precision run is reported with "
    "the op, module and line at which it was raised.",
    "Operands whose dtypes no longer match (a float32 table meets a bfloat16 tensor), a constant such as -1e9 "
    "that float16 cannot hold, in-place and out= variants that autocast does not touch, a kernel that the device "
    "lacks.",
    "Cast where the dtypes part (.to(x.dtype)), take mask values from torch.finfo(x.dtype).min or use a boolean "
    "mask, use the out-of-place variant of the op.",
    subjects=MODELS,
)

NONFINITE_REFERENCE = Check(
    "nonfinite-reference",
    "range",
    "Outputs and gradients are numbers in float64. Fails when a NaN in an input, weight or buffer, or an op of the "
    "model itself, makes an output NaN in every precision, and when every output is infinite.",
    "Every op of the float64 run is watched: where a NaN appears although no input of the op holds one, the op and "
    "its line are reported. Inputs, weights and buffers are searched for NaN, weights for infinities too; they "
    "count when the outputs are NaN. Infinities in outputs (padded logits, masks) are no finding: the low "
    "precision must have them in the same places with the same sign. Gradients that are not finite in float64 "
    "fail, and are incomplete where outputs hold infinities and the default loss is used; a loss of your own that "
    "is not finite in float64 fails. The check runs once for "
    "each audit and is always among the verdicts: elements that are NaN in float64 cannot be compared. Of a block "
    "under ampcheck.observe each op that makes a NaN is run in float64 as well; it fails where a NaN is in use at "
    "the end of the block, else it warns.",
    "A logarithm or square root of negative numbers, 0/0, inf - inf, a softmax over a row that is masked whole, a "
    "derivative at its pole (sqrt or norm at zero), missing values in the data, weights saved after a NaN.",
    "Clamp before the op; select with where before it as well as after it; clean the data; load other weights. A "
    "wider format does not help.",
    subjects=MODELS,
)

OVERFLOW = Check(
    "overflow",
    "range",
    "An op with finite inputs gives finite outputs. Fails when an infinity or NaN that low precision made "
    "reaches a module's output, an output, a loss of your own or a gradient; warns when it was absorbed before.",
    "Every op of forward and backward is watched below autocast. Where non-finite values appear, the op is run "
    "again on the same inputs in float64, which tells the format's limit from arithmetic that has no result. The "
    "op where they appear is the producer; ops that carry them on are only counted. A -inf that the model writes "
    "on purpose (a mask) has a non-finite constant or input and is no finding. Inside a compiled graph, each "
    "cast to 16 bits and each product tells what it lost. ampcheck.watch fails when the last loss that it was "
    "told (`seen.step(loss)`) is not finite. In a training loop the losses of the observed steps are looked at: "
    "three at the end that are not finite fail.",
    "Sums and products beyond 65504 in float16 (feed-forward projections, residual streams, variances), "
    "finfo.min added to a negative score, a divisor whose eps is zero in the format.",
    "Keep the op in float32, scale its inputs, use bfloat16, write masks with where or masked_fill instead of adding.",
    subjects=(*MODELS, Kind.TRAINING),
)

NONFINITE_GRADIENT = Check(
    "nonfinite-gradient",
    "range",
    "Every gradient that is finite in float64 is finite in low precision.",
    "float16 is run at the loss scales at which torch.amp.GradScaler starts and to which it backs off, until no "
    "gradient is infinite; bfloat16 at scale 1. ampcheck.watch fails when weights became infinite or NaN, and "
    "warns when a step was made with such a gradient; a step that a GradScaler leaves out is its ordinary work. "
    "In a training loop the weights after the observed steps must be finite.",
    "A forward overflow; a division or square root at zero whose derivative overflows.",
    "Mend the overflow first. Clamp before sqrt, log and division; see overflow for the op.",
    subjects=(*MODELS, Kind.TRAINING),
)

PRECISION_LOSS = Check(
    "precision-loss",
    "range",
    "Outputs and gradients lie within what rounding explains of the same model in float64. Fails beyond that, "
    "and where an output is 25 % off, whatever explains it; warns where a module alone is beyond its limit, "
    "where a CPU kernel sums in 16 bits, and where a decision (topk, comparison) fell otherwise near a tie and "
    "float64 could not follow it.",
    "The relative error in the Euclidean norm, per output, module output and gradient. The limit is precision * "
    "(sqrt(chain) * (u + s) + f) + sqrt(n) * u32: u is the unit roundoff of the format, chain the longest series "
    "of roundings between two weights, s how far the float64 model moves when its weights and rounded inputs are "
    "moved by u, f the same for float32, n the longest sum and u32 the unit roundoff of float32, in which sums "
    "are kept. Where the run decided otherwise near a tie, float64 runs again and takes the same decisions. Left "
    "out are gradients that not even float32 knows to the digits of the format, and those whose error is within "
    "rounding of the whole gradient. Where float64 gives something else when it runs again with equal seeds, the "
    "check is incomplete.",
    "Cancellation (differences of cumulative sums, variance by E[x^2] - E[x]^2), position tables in 16 bits, "
    "accumulation in the low format.",
    "Compute what leads to the named place in float32; subtract before rounding; set precision in "
    "[tool.ampcheck.limits] if a larger error is accepted.",
    subjects=MODELS,
)

SILENT_ZERO = Check(
    "silent-zero",
    "range",
    "No tensor becomes zero as a whole, and no constant vanishes where it guards. Fails when outputs or "
    "gradients suffer; warns for a constant otherwise, and for a tensor where a gradient (in forward also a "
    "module's output) is off by more than rounding explains, though within the rounding of the whole.",
    "The op is run again on the same inputs in float64. A constant vanishes when it is a nonzero Python number "
    "below half of the format's smallest subnormal and results that needed it are exactly zero.",
    "eps=1e-8 in float16, squares of small numbers, a model whose weights are zero or tiny at initialisation.",
    "Use an eps that the format holds, scale before squaring, compute the guard in float32.",
    subjects=MODELS,
)

FLUSH = Check(
    "flush",
    "range",
    "No tensor loses more of its Euclidean norm to zero than one rounding changes anyway. Fails when outputs or "
    "gradients suffer; warns when more than half of a tensor's nonzero elements vanish and a gradient (in forward "
    "also a module's output) is off by more than rounding explains, though within the rounding of the whole.",
    "Element by element against the same op on the same inputs in float64: nonzero there, zero here, and too "
    "small for the format. The limit is flush * u, u being the unit roundoff.",
    "float16 below 6e-8: gradients of a loss that is not scaled, probabilities, variances of small activations.",
    "Scale the loss (torch.amp.GradScaler), scale the values, use bfloat16, keep the op in float32.",
    subjects=MODELS,
)

INTEGER_CAST = Check(
    "integer-cast",
    "range",
    "Integers survive in floating tensors. Fails when two different integers become equal on their way to an "
    "output or buffer, and when outputs or gradients suffer; warns otherwise.",
    "Floating tensors that hold integers are followed from the cast or range that makes them through further casts "
    "(autocast's too), cumsum, sums, products and copies, and compared with the same op in float64, element by "
    "element; different values are counted before and after. float16 holds every integer up to 2048, bfloat16 up "
    "to 256, float32 up to 16,777,216.",
    "torch.arange(n).to(x.dtype) or type_as, position ids and time steps cast with the model, counters kept as "
    "buffers.",
    "Compute with positions in float32 and cast the result.",
    subjects=MODELS,
)

HEADROOM = Check(
    "headroom",
    "range",
    "No value comes within a factor (4 by default) of the maximum of its format: a warning.",
    "The largest magnitude that each op makes, in forward, and in backward where the loss is not scaled. "
    "Constants that go in as they come out do not count.",
    "Growth along the residual stream, unnormalised scores, a large loss scale.",
    "Normalise or scale, or set headroom in [tool.ampcheck.limits].",
    subjects=MODELS,
)

LOSS_DTYPE = Check(
    "loss-dtype",
    "dtype",
    "A loss is float32. 16 bits are a warning, and a failure where a declared policy of the training loop asks "
    "for float32.",
    "The dtype of the loss, when the subject declares one or its output is 0-d; in a training loop the dtype of "
    "each tensor on which backward was called. A loss that is infinite or NaN here and finite in float64 fails "
    "in a training loop.",
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
    "Something was looked at. Nothing looked at is a failure, and so is a compiled run without a graph, unless "
    "Dynamo says why (a skip). Warns where no op computed in 16 bits.",
    "Counts of ops, tensors, modules, outputs, gradients and graphs, and what could not be measured with the reason.",
    "Inputs with which nothing is computed, a model that torch._dynamo.disable excludes.",
    "Give inputs with which the model does its work.",
    subjects=EVERY,
)
