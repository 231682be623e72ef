"""Mistakes planted into the training scripts: which text is replaced, and the check and the line that must name it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

PRECISIONS = MappingProxyType(
    {
        "nanogpt": ("float32", "bfloat16", "float16", "pure bfloat16"),
        "reference": ("float32", "bfloat16", "float16"),
        "accelerated": ("no", "bf16"),
        "llama_trainer": ("float32", "bfloat16"),
        "lightning_module": ("32-true", "bf16-mixed"),
    }
)
"""The precisions that each script supports, by its name."""


@dataclass(frozen=True)
class Plant:
    """A mistake in a script.

    edits: texts and their replacements. check: the check that fails. line: the source line that it names. follows:
    checks that may fail because of it. steps: how many training steps show it.
    """

    name: str
    script: str
    precision: str
    edits: tuple[tuple[str, str], ...]
    check: str
    line: str
    follows: tuple[str, ...] = ()
    steps: int = 8


_UPDATE = "        scaler.update()\n"
_UNSCALE = "        scaler.unscale_(optimizer)\n"
_GPT_CLIP = "        torch.nn.utils.clip_grad_norm_(masters, GRAD_CLIP)\n"
_GPT_ZERO = "        optimizer.zero_grad(set_to_none=True)\n"
_GPT_LOSS = "F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))"
_TO_MASTERS = """        if pure:
            for master, weight in zip(masters, weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
"""
_FROM_MASTERS = """        if pure:
            with torch.no_grad():
                for master, weight in zip(masters, weights, strict=True):
                    weight.copy_(master)
"""
_WITHOUT_MASTERS = (
    (
        "masters = [weight.detach().float().requires_grad_() for weight in weights] if pure else weights",
        "masters = weights",
    ),
    (_TO_MASTERS, ""),
    (_FROM_MASTERS, ""),
)

SCALER = (
    Plant("no update", "nanogpt", "float16", ((_UPDATE, ""),), "scaler-protocol", "scaler.step(optimizer)"),
    Plant(
        "step past the scaler",
        "nanogpt",
        "float16",
        (("scaler.step(optimizer)", "optimizer.step()"),),
        "scaler-protocol",
        "optimizer.step()",
    ),
    Plant(
        "clip before unscale",
        "nanogpt",
        "float16",
        ((_UNSCALE + _GPT_CLIP, _GPT_CLIP + _UNSCALE),),
        "scaler-protocol",
        _GPT_CLIP.strip(),
    ),
    Plant(
        "clip without unscale",
        "reference",
        "float16",
        (("    " + _UNSCALE, ""),),
        "scaler-protocol",
        "nn.utils.clip_grad_norm_(model.parameters(), 5.0)",
    ),
    Plant(
        "unscale twice",
        "nanogpt",
        "float16",
        ((_UNSCALE, _UNSCALE + _UNSCALE.replace("(", "(  ")),),
        "scaler-protocol",
        "scaler.unscale_(  optimizer)",
    ),
    Plant(
        "unscale per micro-batch",
        "nanogpt",
        "float16",
        ((_UNSCALE, ""), ("            running_loss += loss.item()\n", "    " + _UNSCALE)),
        "scaler-protocol",
        "scaler.unscale_(optimizer)",
    ),
    Plant(
        "no scaler in float16",
        "nanogpt",
        "float16",
        (('enabled=PRECISION == "float16"', "enabled=False"), ("loss / ACCUMULATION", "1e-4 * loss / ACCUMULATION")),
        "scaler-protocol",
        "scaler.scale(loss).backward()",
        ("gradient-underflow", "loss-scale", "flush", "silent-zero"),
    ),
    Plant(
        "a loss that is not scaled",
        "nanogpt",
        "float16",
        (("scaler.scale(loss).backward()", "loss.backward()"),),
        "scaler-protocol",
        "loss.backward()",
        ("gradient-underflow", "loss-scale", "flush"),
    ),
    Plant(
        "a new scaler in each epoch",
        "reference",
        "float16",
        (
            (
                "    for epoch in range(EPOCHS):\n",
                "    for epoch in range(EPOCHS):\n        scaler = torch.amp.GradScaler('cpu', init_scale=2.0**20)\n",
            ),
        ),
        "resume",
        "scale = scaler.get_scale()",
        steps=24,
    ),
    Plant(
        "a checkpoint without the scaler",
        "reference",
        "float16",
        (('            "scaler": scaler.state_dict() if scaler is not None else None,\n', ""),),
        "resume",
        'torch.save(checkpoint, OUTPUT_DIR / "checkpoint.pth")',
        steps=24,
    ),
)

SCHEDULER = (
    Plant(
        "a schedule that goes on over skipped steps",
        "reference",
        "float16",
        (("        if not skipped:\n            lr_scheduler.step()\n", "        lr_scheduler.step()\n"),),
        "scheduler-skip",
        "lr_scheduler.step()",
    ),
    Plant(
        "a schedule that steps first",
        "reference",
        "bfloat16",
        (
            ("        if not skipped:\n            lr_scheduler.step()\n", ""),
            ("        optimizer.zero_grad()\n", "        lr_scheduler.step()\n        optimizer.zero_grad()\n"),
        ),
        "scheduler-skip",
        "lr_scheduler.step()",
    ),
    Plant(
        "a schedule that steps first, under accelerate",
        "accelerated",
        "bf16",
        (
            (
                "                optimizer.step()\n                lr_scheduler.step()\n",
                "                lr_scheduler.step()\n                optimizer.step()\n",
            ),
        ),
        "scheduler-skip",
        "lr_scheduler.step()",
    ),
)

SCOPE = (
    Plant(
        "backward inside autocast",
        "nanogpt",
        "bfloat16",
        (("            scaler.scale(loss).backward()\n", "                scaler.scale(loss).backward()\n"),),
        "autocast-scope",
        "scaler.scale(loss).backward()",
    ),
    Plant(
        "the whole epoch inside autocast",
        "reference",
        "bfloat16",
        (
            (
                "        trained = train_one_epoch(",
                "        with torch.autocast('cpu', torch.bfloat16):\n         trained = train_one_epoch(",
            ),
        ),
        "autocast-scope",
        "loss.backward()",
        ("autocast-cache",),
    ),
    Plant(
        "the loss by hand in bfloat16",
        "nanogpt",
        "pure bfloat16",
        ((_GPT_LOSS, "-logits.log_softmax(-1).gather(-1, targets[..., None]).mean()"),),
        "loss-dtype",
        "scaler.scale(loss).backward()",
    ),
    Plant(
        "the loss by hand in float16",
        "nanogpt",
        "float16",
        (
            ("        logits = self.lm_head(self.ln_f(x))\n", "        logits = 16 * self.lm_head(self.ln_f(x))\n"),
            (_GPT_LOSS, "-(logits.softmax(-1).half() + 1e-8).log().gather(-1, targets[..., None]).float().mean()"),
        ),
        "silent-zero",
        "return -(logits.softmax(-1).half() + 1e-8).log().gather(-1, targets[..., None]).float().mean()",
        ("overflow", "precision-loss", "flush", "loss-dtype"),
    ),
    Plant(
        "the loss by hand in float16, under a Trainer",
        "llama_trainer",
        "bfloat16",
        (
            ("outputs.logits[:, :-1].float()", "400 * outputs.logits[:, :-1]"),
            (
                '        loss = F.cross_entropy(logits.reshape(-1, 64), targets, label_smoothing=0.05, reduction="sum")\n',
                "        chosen = logits.softmax(-1).half().reshape(-1, 64).gather(1, targets[:, None])\n"
                "        loss = -(chosen + 1e-8).log().sum()\n",
            ),
        ),
        "silent-zero",
        "chosen = logits.softmax(-1).half().reshape(-1, 64).gather(1, targets[:, None])",
        ("overflow", "precision-loss", "flush", "loss-dtype"),
    ),
)

DTYPE = (
    Plant(
        "half after the optimizer was built",
        "reference",
        "float16",
        (("    criterion = nn.CrossEntropyLoss(", "    model.half()\n    criterion = nn.CrossEntropyLoss("),),
        "scaler-protocol",
        "scaler.unscale_(optimizer)",
        ("master-weights", "overflow"),
    ),
    Plant(
        "pure bfloat16 without master weights",
        "nanogpt",
        "pure bfloat16",
        (
            *_WITHOUT_MASTERS,
            (
                "LEARNING_RATE, MIN_LR, WARMUP_ITERS = 3e-3, 3e-4, 4",
                "LEARNING_RATE, MIN_LR, WARMUP_ITERS = 1e-4, 1e-5, 4",
            ),
        ),
        "stagnation",
        "scaler.step(optimizer)",
    ),
    Plant(
        "eps too small for float16",
        "nanogpt",
        "pure bfloat16",
        (*_WITHOUT_MASTERS, ("model.to(torch.bfloat16)", "model.half()"), (", fused=True", "")),
        "stagnation",
        "scaler.step(optimizer)",
        ("overflow", "scaler-protocol", "silent-zero", "flush", "precision-loss", "gradient-underflow"),
    ),
    Plant(
        "a bfloat16 model under a Trainer",
        "llama_trainer",
        "bfloat16",
        (
            ("model = LlamaForCausalLM(config)", "model = LlamaForCausalLM(config).to(torch.bfloat16)"),
            ("learning_rate=3e-3", "learning_rate=2e-5"),
        ),
        "stagnation",
        "result = trainer.train()",
    ),
    Plant(
        "a bfloat16 model under accelerate",
        "accelerated",
        "no",
        (("model = Classifier()", "model = Classifier().bfloat16()"), ("LEARNING_RATE = 5e-3", "LEARNING_RATE = 5e-5")),
        "stagnation",
        "optimizer.step()",
    ),
    Plant(
        "beta2 of 0.999 in bfloat16",
        "accelerated",
        "no",
        (("model = Classifier()", "model = Classifier().bfloat16()"), ("LEARNING_RATE = 5e-3", "LEARNING_RATE = 5e-2")),
        "stagnation",
        "optimizer.step()",
    ),
    Plant(
        "a counter in a buffer that the cast reaches",
        "nanogpt",
        "pure bfloat16",
        (
            (
                "        self.apply(self._init_weights)\n",
                "        self.apply(self._init_weights)\n        self.register_buffer('tokens_seen', torch.zeros(()))\n",
            ),
            ("        x = self.wte(idx) +", "        self.tokens_seen += idx.numel()\n        x = self.wte(idx) +"),
        ),
        "stagnation",
        "self.tokens_seen += idx.numel()",
        ("precision-loss",),
    ),
)

CONSTRUCTION = (
    Plant(
        "an optimizer of another model",
        "accelerated",
        "bf16",
        (("    steps = EPOCHS", "    model = Classifier()\n    steps = EPOCHS"),),
        "coverage",
        "optimizer.step()",
    ),
    Plant(
        "an optimizer of the model before its cast copy",
        "nanogpt",
        "bfloat16",
        (
            (
                '    scaler = torch.amp.GradScaler("cpu", enabled',
                '    import copy\n    model = copy.deepcopy(model).bfloat16()\n    scaler = torch.amp.GradScaler("cpu", enabled',
            ),
        ),
        "coverage",
        "scaler.step(optimizer)",
    ),
)

ACCUMULATION = (
    Plant(
        "no division by the number of micro-batches",
        "nanogpt",
        "bfloat16",
        (("                loss = loss / ACCUMULATION\n", ""),),
        "?",
        "scaler.scale(loss).backward()",
    ),
    Plant(
        "a loss that takes no count of the micro-batches, under a Trainer",
        "llama_trainer",
        "bfloat16",
        ((', reduction="sum")\n        loss = loss / num_items_in_batch', ")"),),
        "?",
        "result = trainer.train()",
    ),
    Plant(
        "gradients are never cleared",
        "nanogpt",
        "float16",
        ((_GPT_ZERO, ""),),
        "scaler-protocol",
        "scaler.scale(loss).backward()",
    ),
    Plant(
        "gradients are never cleared, in bfloat16",
        "reference",
        "bfloat16",
        (("        optimizer.zero_grad()\n", ""),),
        "scaler-protocol",
        "loss.backward()",
    ),
    Plant(
        "gradients are cleared before the step",
        "reference",
        "bfloat16",
        (
            ("        optimizer.zero_grad()\n", ""),
            ("            optimizer.step()\n", "            optimizer.zero_grad()\n            optimizer.step()\n"),
        ),
        "coverage",
        "optimizer.step()",
    ),
    Plant(
        "gradients are cleared before each micro-batch",
        "nanogpt",
        "float16",
        (
            (_GPT_ZERO, ""),
            (
                "            x, y = get_batch(data)\n            with ctx:\n                loss = model(x, y)\n                loss",
                "            optimizer.zero_grad()\n            x, y = get_batch(data)\n            with ctx:\n                loss = model(x, y)\n                loss",
            ),
        ),
        "?",
        "optimizer.zero_grad()",
    ),
    Plant(
        "many micro-batches accumulate in bfloat16",
        "accelerated",
        "no",
        (
            ("EPOCHS, BATCH_SIZE, ACCUMULATION = 2, 8, 2", "EPOCHS, BATCH_SIZE, ACCUMULATION = 2, 4, 52"),
            ("model = Classifier()", "model = Classifier().bfloat16()"),
            ("torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)", "torch.optim.SGD(model.parameters(), lr=0.5)"),
        ),
        "reduce-precision",
        "accelerator.backward(loss)",
        steps=2,
    ),
)

AVERAGES = (
    Plant(
        "weights averaged in bfloat16",
        "reference",
        "float32",
        (
            (
                "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY), use_buffers=True)",
                "AveragedModel(\n"
                "        model,\n"
                "        avg_fn=lambda ema, weight, _: ema + (1 - EMA_DECAY) * (weight.to(ema.dtype) - ema),\n"
                "        use_buffers=True,\n"
                "    ).bfloat16()",
            ),
        ),
        "stagnation",
        "model_ema.update_parameters(model)",
    ),
    Plant(
        "weights averaged by hand in bfloat16",
        "nanogpt",
        "bfloat16",
        (
            (
                "    best_val_loss = float",
                "    ema = [weight.detach().bfloat16() for weight in weights]\n    best_val_loss = float",
            ),
            (
                _GPT_ZERO,
                _GPT_ZERO
                + "        for average, weight in zip(ema, weights, strict=True):\n            average.lerp_(weight.detach().bfloat16(), 0.001)\n",
            ),
        ),
        "stagnation",
        "average.lerp_(weight.detach().bfloat16(), 0.001)",
    ),
    Plant(
        "weights averaged by hand in float16",
        "accelerated",
        "no",
        (
            (
                "    for epoch in range(EPOCHS):\n",
                "    ema = {name: weight.detach().half() for name, weight in model.named_parameters()}\n    for epoch in range(EPOCHS):\n",
            ),
            (
                "                optimizer.zero_grad()\n",
                "                optimizer.zero_grad()\n                for name, weight in model.named_parameters():\n                    ema[name].mul_(0.9995).add_(weight.detach().half(), alpha=0.0005)\n",
            ),
        ),
        "stagnation",
        "ema[name].mul_(0.9995).add_(weight.detach().half(), alpha=0.0005)",
    ),
    Plant(
        "batch norm in bfloat16",
        "lightning_module",
        "bf16-mixed",
        (("nn.BatchNorm2d(width)", "nn.BatchNorm2d(width, momentum=0.003).bfloat16()"),),
        "stagnation",
        "return self.net(image)",
    ),
    Plant(
        "a moving average of the loss in a bfloat16 buffer",
        "lightning_module",
        "bf16-mixed",
        (
            ('"mean_loss", torch.zeros(())', '"mean_loss", torch.zeros((), dtype=torch.bfloat16)'),
            ("self.mean_loss.lerp_(loss.float(), 0.01)", "self.mean_loss.lerp_(loss.bfloat16(), 0.002)"),
        ),
        "stagnation",
        "self.mean_loss.lerp_(loss.bfloat16(), 0.002)",
    ),
    Plant(
        "a running loss in a bfloat16 local",
        "nanogpt",
        "bfloat16",
        (
            ("    running_loss = 0.0\n", "    running_loss = torch.zeros((), dtype=torch.bfloat16)\n"),
            ("running_loss += loss.item()", "running_loss += loss.detach().bfloat16()"),
        ),
        "stagnation",
        "running_loss += loss.detach().bfloat16()",
        ("precision-loss", "reduce-precision"),
        steps=24,
    ),
    Plant(
        "a running loss rebound in bfloat16",
        "accelerated",
        "bf16",
        (("total_loss += loss.detach().float()", "total_loss = total_loss + loss.detach().bfloat16()"),),
        "precision-loss",
        "total_loss = total_loss + loss.detach().bfloat16()",
        ("reduce-precision", "stagnation"),
        steps=24,
    ),
    Plant(
        "a running norm in a bfloat16 callback",
        "llama_trainer",
        "bfloat16",
        (
            ("        self.total = 0.0\n", "        self.total = torch.zeros((), dtype=torch.bfloat16)\n"),
            ("self.total += squares.sqrt().item()", "self.total += squares.sqrt().bfloat16()"),
        ),
        "stagnation",
        "self.total += squares.sqrt().bfloat16()",
        ("precision-loss", "reduce-precision"),
        steps=24,
    ),
)

METRICS = (
    Plant(
        "a meter that overflows",
        "reference",
        "bfloat16",
        (
            ("        self.total = 0.0\n", "        self.total = torch.zeros((), dtype=torch.float16)\n"),
            ("self.total += value * n", "self.total += torch.tensor(value, dtype=torch.float16) * n * 16"),
        ),
        "overflow",
        "self.total += torch.tensor(value, dtype=torch.float16) * n * 16",
        ("stagnation",),
    ),
    Plant(
        "a count of correct answers in float16",
        "lightning_module",
        "32-true",
        (
            ("        self.correct = 0\n", "        self.correct = torch.zeros((), dtype=torch.float16)\n"),
            (
                "self.correct += (logits.argmax(1) == target).sum().item()",
                "self.correct += (logits.argmax(1) == target).half().sum()",
            ),
        ),
        "stagnation",
        "self.correct += (logits.argmax(1) == target).half().sum()",
        steps=24,
    ),
    Plant(
        "the norm of scaled gradients in float16",
        "nanogpt",
        "float16",
        (
            (
                _UNSCALE,
                "        squares = [weight.grad.half().pow(2).sum() for weight in weights]\n"
                "        grad_norm = torch.stack(squares).sum().sqrt().item() / scaler.get_scale()\n"
                "        lr = lr if grad_norm < 1e6 else 0.5 * lr\n" + _UNSCALE,
            ),
        ),
        "overflow",
        "squares = [weight.grad.half().pow(2).sum() for weight in weights]",
        ("reduce-precision",),
    ),
    Plant(
        "a sum of squares in float16",
        "reference",
        "bfloat16",
        (
            (
                "        acc1 = accuracy(output, target)\n",
                "        energy = (16 * image).half().pow(2).sum() / image.numel()\n"
                "        acc1 = accuracy(output, target) + 0.0 * energy.item()\n",
            ),
        ),
        "overflow",
        "energy = (16 * image).half().pow(2).sum() / image.numel()",
    ),
)

PLANTS = (*SCALER, *SCHEDULER, *SCOPE, *DTYPE, *CONSTRUCTION, *ACCUMULATION, *AVERAGES, *METRICS)
