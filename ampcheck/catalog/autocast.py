"""Checks of autocast: its policy, and how code uses it."""

from __future__ import annotations

from ampcheck.catalog import declared
from ampcheck.core.subject import EVERY, MODELS, Kind

POLICY_DRIFT = declared(
    "policy-drift",
    "policy",
    "Autocast of the installed PyTorch treats each op as the shipped snapshot of its release says. Fails for each "
    "overload whose rule, facts or replacement differ, that appeared, or that is gone. With a lock: the model "
    "sends the same ops through autocast, in the same modules and dtypes; fails for each op that differs.",
    "Each overload with an autocast kernel is called with small stand-ins, and the dtypes that it passes on are "
    "compared. No device is needed. Where the release has no snapshot the nearest one is used.",
    "A library that registers kernels of PyTorch's own ops, a patched or nightly PyTorch, a release newer than "
    "this ampcheck.",
    "Look at ampcheck policy explain OP and ampcheck policy diff X.Y installed, and find who registers the "
    "kernel; cast by hand where the model needs the former rule. A lock is refreshed by pytest --ampcheck-update.",
    unit="ops",
)

POLICY_GAP = declared(
    "policy-gap",
    "policy",
    "A CPU test represents the target device. A lock of both warns where the CPU computes an op of the model wider "
    "than the device does, or the device bans it; an audit under the device's policy passes, as it sees what happens "
    "there. The table lists every op whose autocast rule differs.",
    "Forward and backward run on the CPU twice, under the CPU's autocast policy and under the device's, and the "
    "dtypes that each op gets after autocast are compared by op and module.",
    "The CPU keeps in float32 what CUDA computes in float16 (PyTorch has a list of ops for each device), so that "
    "an overflow there cannot be seen here; CUDA and XPU ban binary_cross_entropy, the CPU does not.",
    "Test under the device's policy (ampcheck audit --device cuda, ampcheck.emulate), or cast in the model.",
    subjects=MODELS,
)

POLICY_UNREGISTERED = declared(
    "policy-unregistered",
    "policy",
    "A custom op that gets floating tensors under autocast has an autocast kernel. Warns where it has "
    "none on the device; fails where it then raised on mixed dtypes.",
    "Every op outside of PyTorch's own namespaces that autocast would have acted on is recorded with the dtypes "
    "that it got. Ops that are made of others are left out: those reach autocast themselves. Under a guard, every "
    "op without a rule that raised on mixed dtypes counts, once it is shown to run when all inputs have one dtype.",
    "An op of torch.library.custom_op or TORCH_LIBRARY without an autocast kernel: the op sees float16 from a "
    "linear together with its own float32 parameter.",
    "Register one, torch.library.register_autocast(op, device, dtype), or cast inside the op.",
    unit="calls",
    subjects=EVERY,
)

POLICY_BANNED = declared(
    "policy-banned",
    "policy",
    "No op is called that autocast bans on the device. Fails where its exception ended the run; warns where the "
    "model caught it.",
    "The model runs under the device's policy, which raises PyTorch's own message. A loop or a callable under the "
    "CPU's autocast fails where it calls an op that CUDA bans, by the policy snapshot of the release.",
    "A sigmoid followed by binary_cross_entropy or BCELoss: CUDA and XPU ban it, the CPU computes it in float32.",
    "Use binary_cross_entropy_with_logits (BCEWithLogitsLoss); else leave autocast around it, with float32 inputs.",
    subjects=EVERY,
)

AUTOCAST_STATE = declared(
    "autocast-state",
    "autocast",
    "A block leaves autocast and the precision switches as it found them; in a training loop over several ranks each "
    "module runs under the same autocast on all. A model must also restore grad mode. Fails with each switch and "
    "module that differs.",
    "Autocast on or off, its dtype, cache and nesting depth for every device, float32 matmul precision, TF32, "
    "reduced-precision reductions, fp32_precision, default dtype, default device and determinism are read before "
    "and after: around a block, and around each forward, loss and backward of a model. Changed settings are "
    "restored. Nothing is hooked for that: it costs a fraction of a millisecond.",
    "A torch.set_autocast_enabled or a precision flag that is never restored, autocast entered by hand, an exception "
    "inside a region of a torch.compile'd function, which leaves the region open.",
    "Use `with torch.autocast(...)`; restore flags in a finally block or a fixture.",
    unit="switches",
    subjects=EVERY,
)

AUTOCAST_SCOPE = declared(
    "autocast-scope",
    "autocast",
    "Backward passes and optimizer steps run outside autocast regions. Fails for each line where one does not; warns "
    "where the gradient is differentiable itself (create_graph) and so belongs to a forward; incomplete where this "
    "machine lacks the device of all regions.",
    "Each entry into the autograd engine and each optimizer step is hooked, and autocast's state is read there. A "
    "backward that runs inside another one, as checkpoints do, does not count.",
    "A region around the whole step or the whole loop. Then weights keep their first cast: no training. A device that "
    "is written out, such as autocast('cuda') on the CPU, which PyTorch switches off with a warning.",
    "Put the forward and the loss in the region, and nothing else.",
    unit="times",
    subjects=(Kind.TRAINING, Kind.CALL),
)

AUTOCAST_CACHE = declared(
    "autocast-cache",
    "autocast",
    "A cast of a weight that autocast caches is used only while the weight is unchanged and the region has the "
    "dtype of the cast; one that was made while gradients were off serves no forward that backward starts from.",
    "Casts of float32 leaves inside a region are followed. When one is used in a forward after its weight was "
    "written to, also through .data, it is compared with the present weight. What a forward with gradients computes "
    "from a cast without history is followed to the tensors at which backward starts.",
    "An optimizer step, load_state_dict or weight averaging inside a region, or after autocast was switched by "
    "torch.set_autocast_enabled; a float16 region inside a bfloat16 one that share a weight. Before PyTorch 2.11, a "
    "pass under no_grad and one with gradients in one region: a target, a validation, samples, recycling.",
    "Use `with torch.autocast(...)`, which drops the casts at its end, and change weights outside; or call "
    "torch.clear_autocast_cache() after the change or the pass under no_grad, or pass cache_enabled=False.",
    unit="uses",
    subjects=(Kind.TRAINING, Kind.CALL),
)

AUTOCAST_BYPASS = declared(
    "autocast-bypass",
    "autocast",
    "No in-place or out= variant is called where autocast would have cast for the plain op. Fails when it raises or "
    "writes another dtype than the rule gives; warns when it ran in float32 where it could have run in 16 bits.",
    "Mutating overloads that run with autocast on are matched by their schema to the plain overload, whose rule on "
    "that device says what would have been cast. Those of optimizers and of PyTorch's own library do not count.",
    "Calls of addmm_, baddbmm_, exp_, torch.mm(..., out=...): autocast has kernels for plain ops only.",
    "Call the plain op and assign its result.",
    unit="calls",
    subjects=(Kind.TRAINING, Kind.CALL),
)

AUTOCAST_THREAD = declared(
    "autocast-thread",
    "autocast",
    "A thread that was started inside a region computes in the region's dtype, unless it chose another one itself.",
    "Instances of threading.Thread and tasks of ThreadPoolExecutor are followed. An op counts when autocast of "
    "the starting thread would have cast its inputs. A torch.autocast without dtype chooses no dtype. Threads of "
    "other pools are followed only where they are started inside.",
    "Autocast's state belongs to one thread: a new one starts with it off, and torch.nn.parallel.parallel_apply "
    "passes it on without the dtype.",
    "Enter torch.autocast(device, dtype=...) inside the thread's function.",
    unit="places",
    subjects=(Kind.TRAINING, Kind.CALL),
)

AUTOCAST_CHECKPOINT = declared(
    "autocast-checkpoint",
    "autocast",
    "Recomputed forwards (activation checkpointing) run under the autocast state of the original forward.",
    "Ops of Python code that the autograd engine calls are matched to the forward by op and source line, or by the "
    "module of PyTorch that ran them. Fails where both the state and the dtypes of the inputs differ, and where "
    "torch.utils.checkpoint refused the recomputation after the state had changed.",
    "A checkpoint written by hand that does not restore autocast; a flag that chooses the dtype and changes before "
    "backward.",
    "Use torch.utils.checkpoint, or keep the state in forward and enter torch.autocast with it in backward.",
    unit="ops",
    subjects=(Kind.TRAINING, Kind.CALL),
)

AUTOCAST_FUNCTION = declared(
    "autocast-function",
    "autocast",
    "The Python backward of a torch.autograd.Function runs under the autocast state of its forward. Fails where an "
    "op had mixed dtypes or 16 bits where its rule is float32; warns where it ran in float32 instead of 16 bits, "
    "unless the backward casts by itself.",
    "The states of a Function's forward are recorded with its context, with setup_context by its code. Ops that its "
    "backward runs with autocast off are looked up in the policy: they count where the rule would have changed a "
    "dtype. A Function that switched autocast off for a part of its forward does not count.",
    "Backward runs outside the region. A plain Function does not restore autocast.",
    "Decorate with torch.amp.custom_fwd and torch.amp.custom_bwd, or enter torch.autocast in backward.",
    subjects=(Kind.TRAINING, Kind.CALL),
)
