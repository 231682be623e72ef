"""Mistakes in what the scripts compute: dtypes, averages that live across steps, running sums, metrics."""

from __future__ import annotations

from planted import Plant

DTYPE = (
    Plant(
        "half after the optimizer was built",
        "reference",
        "float16",
        "scaler-protocol",
        "scaler.unscale_(optimizer)",
        """
     model = ConvNet()
+    model.half()
""",
        follows=(
            "coverage",
            "master-weights",
            "overflow",
        ),
    ),
    Plant(
        "pure bfloat16 without master weights",
        "nanogpt",
        "pure bfloat16",
        "stagnation",
        "scaler.step(optimizer)",
        """
-LEARNING_RATE, MIN_LR, WARMUP_ITERS = 3e-3, 3e-4, 4
+LEARNING_RATE, MIN_LR, WARMUP_ITERS = 1e-4, 1e-5, 4
...
-    masters = [weight.detach().float().requires_grad_() for weight in weights] if pure else weights
+    masters = weights
...
-        if pure:
-            for master, weight in zip(masters, weights, strict=True):
-                master.grad, weight.grad = weight.grad.float(), None
...
-        if pure:
-            with torch.no_grad():
-                for master, weight in zip(masters, weights, strict=True):
-                    weight.copy_(master)
""",
        follows=("precision-loss",),
        beside=("precision-loss",),  # clipping rounds gradients that two micro-batches rounded
    ),
    Plant(
        "eps too small for float16",
        "nanogpt",
        "pure bfloat16",
        "stagnation",
        "scaler.step(optimizer)",
        """
-        return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
+        return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
...
-        model.to(torch.bfloat16)
+        model.half()
     weights = list(model.parameters())
-    masters = [weight.detach().float().requires_grad_() for weight in weights] if pure else weights
+    masters = weights
...
-        if pure:
-            for master, weight in zip(masters, weights, strict=True):
-                master.grad, weight.grad = weight.grad.float(), None
...
-        if pure:
-            with torch.no_grad():
-                for master, weight in zip(masters, weights, strict=True):
-                    weight.copy_(master)
""",
        follows=(
            "overflow",
            "nonfinite-gradient",
            "loss-dtype",
            "flush",
            "precision-loss",
            "optimizer-state",
        ),
    ),
    Plant(
        "a bfloat16 model under a Trainer",
        "llama_trainer",
        "bfloat16",
        "stagnation",
        "result = trainer.train()",
        """
-    model = LlamaForCausalLM(config)
+    model = LlamaForCausalLM(config).to(torch.bfloat16)
...
-        learning_rate=3e-3,
+        learning_rate=2e-5,
""",
    ),
    Plant(
        "a bfloat16 model under accelerate",
        "accelerated",
        "no",
        "stagnation",
        "optimizer.step()",
        """
-LEARNING_RATE = 5e-3
+LEARNING_RATE = 5e-5
...
-    model = Classifier()
+    model = Classifier().bfloat16()
""",
    ),
    Plant(
        "beta2 of 0.999 in bfloat16",
        "accelerated",
        "no",
        "stagnation",
        "optimizer.step()",
        """
-LEARNING_RATE = 5e-3
+LEARNING_RATE = 5e-2
...
-    model = Classifier()
+    model = Classifier().bfloat16()
""",
    ),
    Plant(
        "a counter in a buffer that the cast reaches",
        "nanogpt",
        "pure bfloat16",
        "stagnation",
        "self.tokens_seen += idx.numel()",
        """
         self.apply(self._init_weights)
+        self.register_buffer('tokens_seen', torch.zeros(()))
...
     def forward(self, idx, targets):
+        self.tokens_seen += idx.numel()
""",
        follows=("precision-loss",),
    ),
)

AVERAGES = (
    Plant(
        "weights averaged in bfloat16",
        "reference",
        "float32",
        "stagnation",
        "model_ema.update_parameters(model)",
        """
-    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY), use_buffers=True)
+    model_ema = AveragedModel(
+        model,
+        avg_fn=lambda ema, weight, _: ema + (1 - EMA_DECAY) * (weight.to(ema.dtype) - ema),
+        use_buffers=True,
+    ).bfloat16()
""",
    ),
    Plant(
        "weights averaged by hand in bfloat16",
        "nanogpt",
        "bfloat16",
        "stagnation",
        "average.lerp_(weight.detach().bfloat16(), 0.001)",
        """

+    ema = [weight.detach().bfloat16() for weight in weights]
     best_val_loss = float("inf")
...
         optimizer.zero_grad(set_to_none=True)
+        for average, weight in zip(ema, weights, strict=True):
+            average.lerp_(weight.detach().bfloat16(), 0.001)
""",
    ),
    Plant(
        "weights averaged by hand in float16",
        "accelerated",
        "no",
        "stagnation",
        "ema[name].mul_(0.9995).add_(weight.detach().half(), alpha=0.0005)",
        """

+    ema = {name: weight.detach().half() for name, weight in model.named_parameters()}
     for epoch in range(EPOCHS):
...
                 optimizer.zero_grad()
+                for name, weight in model.named_parameters():
+                    ema[name].mul_(0.9995).add_(weight.detach().half(), alpha=0.0005)
""",
        follows=("precision-loss",),
    ),
    Plant(
        "batch norm in bfloat16",
        "lightning_module",
        "bf16-mixed",
        "stagnation",
        "return self.net(image)",
        """
-            nn.BatchNorm2d(width),
+            nn.BatchNorm2d(width, momentum=0.003).bfloat16(),
""",
        beside=("stagnation",),  # the weights of the batch norm, which the optimizer updates
    ),
    Plant(
        "a moving average of the loss in a bfloat16 buffer",
        "lightning_module",
        "bf16-mixed",
        "stagnation",
        "self.mean_loss.lerp_(loss.bfloat16(), 0.002)",
        """
-        self.register_buffer("mean_loss", torch.zeros(()))
+        self.register_buffer("mean_loss", torch.zeros((), dtype=torch.bfloat16))
...
-            self.mean_loss.lerp_(loss.float(), 0.01)
+            self.mean_loss.lerp_(loss.bfloat16(), 0.002)
""",
    ),
    Plant(
        "a running loss in a bfloat16 local",
        "nanogpt",
        "bfloat16",
        "stagnation",
        "running_loss += loss.detach().bfloat16()",
        """
-    running_loss = 0.0
+    running_loss = torch.zeros((), dtype=torch.bfloat16)
...
-            running_loss += loss.item()
+            running_loss += loss.detach().bfloat16()
""",
        follows=(
            "precision-loss",
            "reduce-precision",
        ),
        steps=24,
    ),
    Plant(
        "a running loss rebound in bfloat16",
        "accelerated",
        "bf16",
        "stagnation",
        "total_loss = total_loss + loss.detach().bfloat16()",
        """
-                total_loss += loss.detach().float()
+                total_loss = total_loss + loss.detach().bfloat16()
""",
        steps=24,
    ),
    Plant(
        "a running norm in a bfloat16 callback",
        "llama_trainer",
        "bfloat16",
        "stagnation",
        "self.total += squares.sqrt().bfloat16()",
        """
-        self.total = 0.0
+        self.total = torch.zeros((), dtype=torch.bfloat16)
...
-        self.total += squares.sqrt().item()
+        self.total += squares.sqrt().bfloat16()
""",
        follows=(
            "precision-loss",
            "reduce-precision",
        ),
        steps=24,
    ),
)

METRICS = (
    Plant(
        "a meter that overflows",
        "reference",
        "bfloat16",
        "overflow",
        "self.total += torch.tensor(value, dtype=torch.float16) * n * 16",
        """
-        self.total = 0.0
+        self.total = torch.zeros((), dtype=torch.float16)
...
-        self.total += value * n
+        self.total += torch.tensor(value, dtype=torch.float16) * n * 16
""",
        follows=("stagnation", "reduce-precision"),
    ),
    Plant(
        "a count of correct answers in float16",
        "lightning_module",
        "32-true",
        "stagnation",
        "self.correct += (logits.argmax(1) == target).half().sum()",
        """
-        self.correct = 0
+        self.correct = torch.zeros((), dtype=torch.float16)
...
-        self.correct += (logits.argmax(1) == target).sum().item()
+        self.correct += (logits.argmax(1) == target).half().sum()
""",
        steps=24,
    ),
    Plant(
        "the norm of scaled gradients in float16",
        "nanogpt",
        "float16",
        "overflow",
        "squares = [weight.grad.half().pow(2).sum() for weight in weights]",
        """
                 master.grad, weight.grad = weight.grad.float(), None
+        squares = [weight.grad.half().pow(2).sum() for weight in weights]
+        grad_norm = torch.stack(squares).sum().sqrt().item() / scaler.get_scale()
+        lr = lr if grad_norm < 1e6 else 0.5 * lr
""",
        follows=("reduce-precision",),
    ),
    Plant(
        "a sum of squares in float16",
        "reference",
        "bfloat16",
        "overflow",
        "energy = (16 * image).half().pow(2).sum() / image.numel()",
        """
-        acc1 = accuracy(output, target)
+        energy = (16 * image).half().pow(2).sum() / image.numel()
+        acc1 = accuracy(output, target) + 0.0 * energy.item()
""",
        follows=("reduce-precision",),
    ),
)
