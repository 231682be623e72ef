"""Mistakes in what the scripts call: scalers, schedules, autocast, what an optimizer is made of, accumulation."""

from __future__ import annotations

from planted import Plant

SCALER = (
    Plant(
        "no update",
        "nanogpt",
        "float16",
        "scaler-protocol",
        "scaler.step(optimizer)",
        """
-        scaler.update()
""",
        follows=("coverage",),
    ),
    Plant(
        "step past the scaler",
        "nanogpt",
        "float16",
        "scaler-protocol",
        "optimizer.step()",
        """
-        scaler.step(optimizer)
+        optimizer.step()
""",
        warns=True,  # a step may look for infinities itself, which no event shows
    ),
    Plant(
        "clip before unscale",
        "nanogpt",
        "float16",
        "scaler-protocol",
        "torch.nn.utils.clip_grad_norm_(masters, GRAD_CLIP)",
        """
+        torch.nn.utils.clip_grad_norm_(masters, GRAD_CLIP)
         scaler.unscale_(optimizer)
-        torch.nn.utils.clip_grad_norm_(masters, GRAD_CLIP)
""",
    ),
    Plant(
        "clip without unscale",
        "reference",
        "float16",
        "scaler-protocol",
        "nn.utils.clip_grad_norm_(model.parameters(), 5.0)",
        """
-            scaler.unscale_(optimizer)
""",
    ),
    Plant(
        "unscale twice",
        "nanogpt",
        "float16",
        "scaler-protocol",
        "scaler.unscale_(optimizer)  # again",
        """
         scaler.unscale_(optimizer)
+        scaler.unscale_(optimizer)  # again
""",
        follows=("coverage",),
    ),
    Plant(
        "unscale per micro-batch",
        "nanogpt",
        "float16",
        "scaler-protocol",
        "scaler.unscale_(optimizer)",
        """
-            running_loss += loss.item()
+            scaler.unscale_(optimizer)
...
-        scaler.unscale_(optimizer)
""",
        follows=("coverage",),
    ),
    Plant(
        "no scaler in float16",
        "nanogpt",
        "float16",
        "scaler-protocol",
        "scaler.scale(loss).backward()",
        """
-    scaler = torch.amp.GradScaler("cpu", enabled=PRECISION == "float16")
+    scaler = torch.amp.GradScaler("cpu", enabled=False)
...
-                loss = loss / ACCUMULATION
+                loss = 1e-4 * loss / ACCUMULATION
""",
        follows=(
            "gradient-underflow",
            "loss-scale",
            "flush",
            "silent-zero",
        ),
    ),
    Plant(
        "a loss that is not scaled",
        "nanogpt",
        "float16",
        "scaler-protocol",
        "loss.backward()",
        """
-            scaler.scale(loss).backward()
+            loss.backward()
""",
        follows=("coverage",),
    ),
    Plant(
        "a new scaler in each epoch",
        "reference",
        "float16",
        "resume",
        "scaler.scale(loss).backward()",
        """
     for epoch in range(EPOCHS):
+        scaler = torch.amp.GradScaler('cpu', init_scale=2.0**20)
""",
        steps=24,
    ),
    Plant(
        "a checkpoint without the scaler",
        "reference",
        "float16",
        "resume",
        'torch.save(checkpoint, OUTPUT_DIR / "checkpoint.pth")',
        """
-            "scaler": scaler.state_dict() if scaler is not None else None,
""",
        steps=24,
    ),
)

SCHEDULER = (
    Plant(
        "a schedule that goes on over skipped steps",
        "reference",
        "float16",
        "scheduler-skip",
        "lr_scheduler.step()",
        """
-        if not skipped:
-            lr_scheduler.step()
+        lr_scheduler.step()
""",
    ),
    Plant(
        "a schedule that steps first",
        "reference",
        "bfloat16",
        "scheduler-skip",
        "lr_scheduler.step()",
        """

+        lr_scheduler.step()
         optimizer.zero_grad()
...
-        if not skipped:
-            lr_scheduler.step()
""",
        warns=True,
    ),
    Plant(
        "a schedule that steps first, under accelerate",
        "accelerated",
        "bf16",
        "scheduler-skip",
        "lr_scheduler.step()",
        """
+                lr_scheduler.step()
                 optimizer.step()
-                lr_scheduler.step()
""",
        warns=True,
    ),
)

SCOPE = (
    Plant(
        "backward inside autocast",
        "nanogpt",
        "bfloat16",
        "autocast-scope",
        "scaler.scale(loss).backward()",
        """
-            scaler.scale(loss).backward()
+                scaler.scale(loss).backward()
""",
    ),
    Plant(
        "the whole epoch inside autocast",
        "reference",
        "bfloat16",
        "autocast-scope",
        "loss.backward()",
        """
-        trained = train_one_epoch(model, criterion, optimizer, data_loader, model_ema, scaler, lr_scheduler)
+        with torch.autocast('cpu', torch.bfloat16):
+         trained = train_one_epoch(model, criterion, optimizer, data_loader, model_ema, scaler, lr_scheduler)
""",
        follows=("autocast-cache",),
    ),
    Plant(
        "the loss by hand in bfloat16",
        "nanogpt",
        "pure bfloat16",
        "loss-dtype",
        "scaler.scale(loss).backward()",
        """
-        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))
+        return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
""",
        warns=True,
    ),
    Plant(
        "the loss by hand in float16",
        "nanogpt",
        "float16",
        "silent-zero",
        "return -(logits.softmax(-1).half() + 1e-8).log().gather(-1, targets[..., None]).float().mean()",
        """
-        logits = self.lm_head(self.ln_f(x))
-        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))
+        logits = 16 * self.lm_head(self.ln_f(x))
+        return -(logits.softmax(-1).half() + 1e-8).log().gather(-1, targets[..., None]).float().mean()
""",
        follows=(
            "loss-dtype",
            "loss-scale",
            "overflow",
        ),
    ),
    Plant(
        "the loss by hand in float16, under a Trainer",
        "llama_trainer",
        "bfloat16",
        "silent-zero",
        "loss = -(chosen + 1e-8).log().sum()",
        """
-        logits = outputs.logits[:, :-1].float()
+        logits = 400 * outputs.logits[:, :-1]
         targets = labels[:, 1:].reshape(-1)
-        loss = F.cross_entropy(logits.reshape(-1, 64), targets, label_smoothing=0.05, reduction="sum")
+        chosen = logits.softmax(-1).half().reshape(-1, 64).gather(1, targets[:, None])
+        loss = -(chosen + 1e-8).log().sum()
""",
        follows=(
            "loss-dtype",
            "overflow",
            "nonfinite-gradient",
        ),
    ),
)

CONSTRUCTION = (
    Plant(
        "an optimizer of another model",
        "accelerated",
        "bf16",
        "coverage",
        "optimizer.step()",
        """
     optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
+    model = Classifier()
""",
    ),
    Plant(
        "an optimizer of the model before its cast copy",
        "nanogpt",
        "bfloat16",
        "coverage",
        "scaler.step(optimizer)",
        """
     optimizer = model.configure_optimizer(masters)
+    import copy
+    model = copy.deepcopy(model).bfloat16()
""",
    ),
)

ACCUMULATION = (
    Plant(
        "gradients are never cleared",
        "nanogpt",
        "float16",
        "scaler-protocol",
        "scaler.scale(loss).backward()",
        """
-        optimizer.zero_grad(set_to_none=True)
""",
    ),
    Plant(
        "gradients are never cleared, in bfloat16",
        "reference",
        "bfloat16",
        "scaler-protocol",
        "loss.backward()",
        """
-        optimizer.zero_grad()
""",
    ),
    Plant(
        "gradients are cleared before the step",
        "reference",
        "bfloat16",
        "coverage",
        "optimizer.step()",
        """
-        optimizer.zero_grad()
...
             nn.utils.clip_grad_norm_(model.parameters(), 5.0)
+            optimizer.zero_grad()
             optimizer.step()
""",
    ),
    Plant(
        "many micro-batches accumulate in bfloat16",
        "accelerated",
        "no",
        "reduce-precision",
        "accelerator.backward(loss)",
        """
-EPOCHS, BATCH_SIZE, ACCUMULATION = 2, 8, 2
+EPOCHS, BATCH_SIZE, ACCUMULATION = 2, 4, 52
...
-    model = Classifier()
-    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
+    model = Classifier().bfloat16()
+    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
""",
        steps=2,
        beside=("stagnation",),  # the learning rate ends where weights in bfloat16 stand still
    ),
)
