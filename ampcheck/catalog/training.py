"""The checks of training loops."""

from __future__ import annotations

from ampcheck.catalog import declared
from ampcheck.core.subject import Kind

GRADIENT_UNDERFLOW = declared(
    "gradient-underflow",
    "training",
    "What is nonzero in float64 stays nonzero: no parameter loses more than `underflow` of the elements of its "
    "gradient to zero.",
    "Float64 is carried along with every tensor of the step, and each gradient of the first step that the scaler "
    "does not skip is compared element by element; those of the later steps too, of which the last two are judged. "
    "Only elements that the data determine are counted: moving the "
    "data by one rounding must leave half of them. Elements that are zero in float64 but not in low precision "
    "estimate the noise, which is subtracted. ampcheck.watch has no reference: it warns where a gradient has many "
    "zeros and the rest ends abruptly at the smallest number of float16 at the loss scale in use, and where a gradient "
    "is zero in every measured step.",
    "float16 autocast without a GradScaler, a scale that is too small, a loss that is divided by much or has a "
    "small weight, one part of the model with much smaller gradients than the rest.",
    "Scale the loss (torch.amp.GradScaler), keep the part in float32 or bfloat16; see loss-scale for the scales "
    "that work.",
    unit="share of the elements",
    subjects=(Kind.TRAINING, Kind.CALL),
)

LOSS_SCALE = declared(
    "loss-scale",
    "training",
    "At the loss scale in use, no parameter's float16 gradient loses more than `underflow` of its nonzero "
    "elements to zero. Fails when no scale works (one tensor needs a larger scale than another can tolerate), "
    "when the scale in use is too small, and when the scaler collapsed: the last 8 steps or more were all "
    "skipped at scales that should do, or the scale fell below 1. Backing off after an overflow and temporarily "
    "exceeding the window are normal for a GradScaler and are not reported. So they are for a loss scale that the code "
    "has of its own.",
    "The unscaled gradients are counted by binade in float64. Scaling by a power of two moves all of them by whole "
    "binades and rounding is monotone, so the counts give for each scale what rounds to zero (up to half of the "
    "smallest subnormal) and what overflows (from 65520 on), the largest value of the whole backward pass included. "
    "The window is the interval of scales that do neither. Every call of scaler.step and scaler.update is followed: "
    "scale, growth, back-off, skipped steps, the parameters that were not finite and the op where it began. "
    "ampcheck.watch follows the scale and the skipped steps: it fails when the scale falls below 1 or when the last "
    "ten steps or more were all skipped after one that was made, and warns when more are skipped than growth explains.",
    "float16 without a scaler; a loss divided by much, or one small part of it next to a large one; a scale that "
    "is fixed or starts low; a NaN or an overflow in the forward pass, which no scale fixes and which makes the "
    "scaler back off for ever; a summed loss.",
    "Use torch.amp.GradScaler, with an init_scale inside the window; scale the parts of a loss separately; keep "
    "the module that binds an end in float32, or use bfloat16. After a collapse, average or divide a loss that "
    "needs a scale below 1; where no scale works, fix the op that the finding names.",
    subjects=(Kind.TRAINING, Kind.CALL),
)

SCALER_PROTOCOL = declared(
    "scaler-protocol",
    "training",
    "Scaler, optimizers and clipping are called in an order that keeps the scale of the gradients well defined: "
    "scale, backward, unscale_ once if gradients are read, step of each optimizer through the scaler, one "
    "update, gradients cleared. Fails for a clip before unscale_, unscale_ twice or for each micro-batch, an "
    "update that is missing or between two optimizers, an optimizer stepped directly, a loss that was not "
    "scaled, a loss scale or a skipped step by which ranks part, gradients that no step clears, float16 parameters "
    "under a scaler, and float16 gradients without a loss scale where they vanish. "
    "Warns for float16 autocast or float16 parameters without a scaler where nothing vanished yet, also where a "
    "scaler is enabled and no step uses it. In bfloat16 and float32 no scaler is needed.",
    "The methods of torch.amp.GradScaler, optimizer steps, clipping and backward passes are recorded while the "
    "steps run; the state of each optimizer's gradients (scaled by which scale, divided out or not) is followed "
    "from call to call. Gradients that are cleared before they are used do not count. Where an optimizer is "
    "stepped directly, one gradient is made infinite in a run of its own.",
    "Gradient clipping added later, gradient accumulation, several losses or optimizers, model.half().",
    "Follow the order above, see PyTorch's Automatic Mixed Precision examples; call update once in each step.",
    subjects=(Kind.TRAINING, Kind.CALL),
)

SCHEDULER_SKIP = declared(
    "scheduler-skip",
    "training",
    "A learning rate scheduler steps only where its optimizer stepped. Fails when it steps after scaler.step has "
    "skipped the optimizer; warns when a new one steps before its optimizer did for the first time.",
    "Optimizer steps, skipped ones and scheduler steps are compared. If the scaler skips none by itself, one "
    "gradient is made infinite in a run of its own.",
    "A call of scheduler.step() after scaler.step(optimizer), whose return value does not show whether it stepped.",
    "Compare scaler.get_scale() before and after scaler.update(), and step the scheduler only if it did not fall.",
    subjects=(Kind.TRAINING, Kind.CALL),
)

SCALE_INVARIANCE = declared(
    "scale-invariance",
    "training",
    "The gradients that an optimizer sees, and what the step returns, do not depend on the loss scale.",
    "Each value of the run has a degree in the scale: a scaled loss and its gradients 1, a gradient over its norm 0, a "
    "sum of both none. The scale after an update is another one than before. What an optimizer steps, what a step "
    "returns and what the code itself writes into a weight must have the degree 0. Code may read the scale, multiply "
    "by it, and compare it with that of before. Where it reads another number or takes a decision that depends on the "
    "scale, the check is incomplete and names the line: what the code does at another scale was not seen.",
    "Clipping before unscale_, a gradient penalty on scaled gradients, one of several losses not scaled, an update "
    "between two optimizers, a logged loss that is divided by the scale after the update.",
    "Unscale gradients before they are read; scale every loss; return the loss from before it was scaled.",
    subjects=(Kind.TRAINING, Kind.CALL),
)

RESUME = declared(
    "resume",
    "training",
    "A run that is interrupted, saved and loaded ends in the same weights, optimizer state and loss scale as one "
    "that is not, bit by bit. Warns when only random numbers, accumulating gradients or the reported losses differ.",
    "A run of 2 N steps; then N steps, save(), torch.save and torch.load in memory, back to the state at the "
    "start as a new process has it, load(checkpoint), N more. Scalers start from a scale that a new one does not "
    "have. What differs right after loading is named. A loop that is not deterministic is skipped. In the events "
    "of a loop, a scaler that takes over from another without its state, and a checkpoint of the optimizer "
    "without the scaler, fail as well.",
    "The scaler's or the scheduler's state_dict() is not in the checkpoint, the EMA is not, a GradScaler is "
    "created again, weights are saved in 16 bits.",
    "Save and load the state_dict() of model, optimizer, scaler, scheduler and EMA; create the scaler once.",
    subjects=(Kind.TRAINING, Kind.CALL),
)

STAGNATION = declared(
    "stagnation",
    "training",
    "The updates of a tensor change it, now and in the steps that are planned. Fails where 90 % (the limit "
    "stagnation) of the updates of a tensor narrower than float32 change nothing; "
    "where an average (a second moment, running statistics, an EMA) will stand still further than 20 % of its size "
    "from what it follows, or does so already further than 10 %; where a weight decay leaves the values as they are, "
    "where a sum or counter will stop, and where an optimizer's eps is zero in the format. Warns where more than half "
    "of the updates are lost, and where an average will stand still between 10 % and 20 % of its size away.",
    "Float64 is carried along with every tensor of the steps. For each tensor narrower than float32 that lives across "
    "steps (parameters, optimizer state, copies, buffers) it says what the first updates should have been, in "
    "whichever steps they come. An element whose update is not zero there, and which holds the same value afterwards, "
    "has lost it. What another tensor holds instead (a float32 copy, a compensation) is not lost; what is rounded at "
    "random is no update. A weight decay is judged by its own multiplication. What is added to an average or a sum in "
    "the observed steps, and the part of itself that it keeps, say where it stops: an average at a distance of half of "
    "the spacing divided by 1 - decay, between u / 2 and u (the unit roundoff) of its size by 1 - decay, less what its "
    "values vary by; a sum where its increment is half of the spacing. The observed addends are replayed up to there, "
    "for the planned steps: 'horizon' in the mapping, else 10,000. Updates of a warm-up are judged at the largest "
    "learning rate that PyTorch's schedulers wrote beside it. Compiled code is not measured. "
    "ampcheck.watch compares 16-bit weights before and after each measured step, and "
    "with their values at the first of them; a float32 copy in the optimizer's state is no stagnation.",
    "Weights in bfloat16 with a small learning rate: an element moves from about 1/256 of its value on. beta2 = "
    "0.999 and averages of decay 0.999 in bfloat16; batch norm with momentum 0.01. self.step += 1 in a buffer that "
    "model.bfloat16() casts: it stops at 256 (2048 in float16). Running losses in 16 bits. eps=1e-8 in float16.",
    "Keep it exact: float32 master weights or state, Kahan summation, stochastic rounding. Keep counters as integers, "
    "averages and sums in float32, and use an eps that the format holds (1e-4 in float16).",
    subjects=(Kind.TRAINING, Kind.CALL),
)


REDUCE_PRECISION = declared(
    "reduce-precision",
    "training",
    "A sum of many gradients, over micro-batches or over ranks, is as exact as one rounding of the exact sum "
    "within a factor (4 by default), and keeps its range; a total gradient norm is computed in float32. Fails when "
    "a 16-bit running sum or reduction is further off, flushes more than a tenth of its nonzero elements to zero, "
    "or overflows though the exact sum does not (a warning where a GradScaler backs off), and when total norms "
    "that were rounded to 16 bits are combined. Fails where replicas of a parameter that begin equal on several ranks "
    "part and do not meet again, and where ranks step the shards of a model at different rates. Warns for a single "
    "16-bit total norm, for long 16-bit sums inside a graph, and for a reduction over ranks that would fail at up to "
    "1024 processes.",
    "A running sum is a chain of additions, casts between them included, whose addends were not computed from the "
    "partial sum; from 8 addends on it is compared with the float64 sum carried along. Norms are followed through "
    "stack, powers and sums, and over shards. Under DDP and FSDP2 every reduction that adds up is seen, those of DDP's "
    "reducer and of communication hooks too: a sample of each rank's addends is added in float64 and compared with the "
    "result. The bits of trained parameters are compared over ranks when the backward pass of each step begins; "
    "they are replicas where DDP averages their gradients, where gradients were equal, or values after an update. "
    "Averages of weights every few steps (local SGD) make them equal again. For more processes a ring is emulated with "
    "addends like those measured; set world_size to predict a specific number of processes.",
    "A policy with reduce_dtype=torch.bfloat16, a compressing communication hook, 16-bit gradients that are reduced or "
    "accumulated as they are, clip_grad_norm_ on 16-bit gradients, norms of groups combined in bfloat16; a last "
    "micro-batch under no_sync(), a learning rate or an optimizer state of one rank alone.",
    "Reduce and accumulate in float32: MixedPrecisionPolicy(reduce_dtype=torch.float32), no compressing hook, "
    "float32 gradients; round once at the end. Cast gradients or their norms to float32 before they are put "
    "together.",
    subjects=(Kind.TRAINING, Kind.CALL),
)

TF32 = declared(
    "tf32",
    "training",
    "A product in float32 is off by no more than its roundings. Warns when the device computes it in TF32 or "
    "bfloat16; fails when the program multiplies float32 tensors whose last mantissa bits it has cut off itself.",
    "A matmul, a convolution and a linear layer's gradient are computed in float32 on the device and compared with "
    "float64: the relative error in the Euclidean norm may be 2 * precision * sqrt(terms) unit roundoffs of "
    "float32. The flags (allow_tf32, fp32_precision, float32_matmul_precision, reduced-precision reductions, "
    "deterministic algorithms) are listed; their effect on another device is reported. In a function, float32 "
    "tensors are followed through integer views of their bits.",
    "PyTorch sets torch.backends.cudnn.allow_tf32 by default; torch.set_float32_matmul_precision('high') or 'medium' "
    "in the program or a library; an emulation of TF32 by bit tricks that was left in.",
    "Set torch.set_float32_matmul_precision('highest') and torch.backends.cudnn.allow_tf32 = False for a "
    "baseline; torch.backends.cudnn.conv.fp32_precision = 'ieee' in newer versions.",
    unit="unit roundoffs of float32",
    subjects=(Kind.TRAINING, Kind.CALL),
)
