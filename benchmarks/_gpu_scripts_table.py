"""The public scripts of `gpu_scripts.py`, and the mistakes that are planted in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mistake:
    """One change of a script. kind: in words. checks: one of them must find it. line: a part of the line at which it
    counts as found, the planted lines by default. path: the file, relative to the script's folder; the script by
    default."""

    kind: str
    right: str
    wrong: str
    checks: tuple[str, ...]
    line: str = ""
    path: str = ""


@dataclass(frozen=True)
class Script:
    """A script of a public repository. name: of its driver. folder, path: where it is. needs: packages that it imports
    beside torch. older: it needs releases that are no longer current, from `--older`/NAME. judged: of the
    checks that fail on the healthy script, whether they are right and why."""

    name: str
    kind: str
    repository: str
    commit: str
    path: str
    folder: str = ""
    needs: str = ""
    older: bool = False
    steps: int = 4
    environment: Mapping[str, str] = field(default_factory=dict)
    mistakes: tuple[Mistake, ...] = ()
    judged: Mapping[str, str] = field(default_factory=dict)


PROTOCOL = ("scaler-protocol",)
SCOPE = ("autocast-scope",)
LOSS = ("loss-dtype", "low-precision-error", "precision-loss")
WEIGHTS = ("master-weights", "scaler-protocol")

CLIPPED_BEFORE = "clipped before unscale_"
NOT_UNSCALED = "clipped, never unscaled"
INSIDE = "backward inside autocast"
PLAIN_STEP = "optimizer.step for scaler.step"
NO_UPDATE = "no scaler.update"
NO_ZERO = "no zero_grad"
HALF_LOSS = "loss in half"
HALF_MODEL = "model in half"

SCRIPTS = (
    Script(
        "amp_recipe",
        "a plain CUDA AMP tutorial",
        "PyTorch-China/tutorials",
        "40db1c688927f23b949c16fb1b4531d5ac918180",
        "amp_recipe.py",
        "recipes_source/recipes",
        steps=8,
        mistakes=(
            Mistake(
                INSIDE,
                "target)\n        scaler.scale(loss).backward()",
                "target)\n            scaler.scale(loss).backward()",
                SCOPE,
                "            scaler.scale(loss).backward()",
            ),
            Mistake(
                PLAIN_STEP,
                "        scaler.scale(loss).backward()\n        scaler.step(opt)",
                "        scaler.scale(loss).backward()\n        opt.step()",
                PROTOCOL,
                "opt.step()",
            ),
            Mistake(
                NO_UPDATE,
                "        scaler.step(opt)\n        scaler.update()\n        opt.zero",
                "        scaler.step(opt)\n        opt.zero",
                PROTOCOL,
                "scaler.step(opt)",
            ),
        ),
        judged={"autocast-state": "wrong: the default device of a script that ends is its own"},
    ),
    Script(
        "llama2_c",
        "nanoGPT",
        "karpathy/llama2.c",
        "350e04fe35433e6d2941dce5a1f53308f87058eb",
        "train.py",
        needs="sentencepiece",
        mistakes=(
            Mistake(
                CLIPPED_BEFORE,
                "        scaler.unscale_(optimizer)\n"
                "        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)",
                "        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)\n"
                "        scaler.unscale_(optimizer)",
                PROTOCOL,
            ),
            Mistake(
                NO_ZERO,
                "    optimizer.zero_grad(set_to_none=True)\n",
                "",
                PROTOCOL,
                "scaler.scale(loss).backward()",
            ),
            Mistake(HALF_MODEL, "model.to(device)\n", "model.to(device).half()\n", WEIGHTS, "model.to(device).half()"),
        ),
    ),
    Script(
        "carvana_unet",
        "segmentation with GradScaler",
        "milesial/Pytorch-UNet",
        "21d7850f2af30a9695bbeea75f3136aa538cfc4a",
        "train.py",
        needs="torchvision, wandb, tqdm",
        mistakes=(
            Mistake(NOT_UNSCALED, "                grad_scaler.unscale_(optimizer)\n", "", PROTOCOL, "clip_grad_norm_"),
            Mistake(PLAIN_STEP, "grad_scaler.step(optimizer)", "optimizer.step()", PROTOCOL),
            Mistake(
                INSIDE,
                "                optimizer.zero_grad(set_to_none=True)\n"
                "                grad_scaler.scale(loss).backward()",
                "                    optimizer.zero_grad(set_to_none=True)\n"
                "                    grad_scaler.scale(loss).backward()",
                SCOPE,
            ),
        ),
    ),
    Script(
        "dino_vit",
        "DDP",
        "facebookresearch/dino",
        "7c446df5b9f45747937fb0d72314eb9f7b66930a",
        "main_dino.py",
        needs="torchvision",
        steps=8,
        mistakes=(
            Mistake(
                NOT_UNSCALED,
                "                fp16_scaler.unscale_(optimizer)"
                "  # unscale the gradients of optimizer's assigned params in-place\n",
                "",
                (*PROTOCOL, "scale-invariance"),
                "utils.clip_gradients(student, args.clip_grad)",
            ),
            Mistake(PLAIN_STEP, "fp16_scaler.step(optimizer)", "optimizer.step()", PROTOCOL),
            Mistake(NO_UPDATE, "            fp16_scaler.update()\n", "", PROTOCOL, "fp16_scaler.step(optimizer)"),
        ),
    ),
    Script(
        "reference_segmentation",
        "torchvision references",
        "growlix/pytorch-i1k-baseline",
        "ab8c06bf2cea3dac83b095a9bf2031f5f3aa0ed3",
        "train.py",
        "references/segmentation",
        needs="torchvision, pycocotools",
        mistakes=(
            Mistake(PLAIN_STEP, "scaler.step(optimizer)", "optimizer.step()", PROTOCOL),
            Mistake(NO_ZERO, "        optimizer.zero_grad()\n", "", PROTOCOL, "scaler.scale(loss).backward()"),
            Mistake(
                "checkpoint without the scaler",
                '        if args.amp:\n            checkpoint["scaler"] = scaler.state_dict()\n',
                "",
                ("resume",),
                "utils.save_on_master",
            ),
        ),
    ),
    Script(
        "lightning_imagenet",
        'Lightning, precision="16-mixed"',
        "Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        "imagenet.py",
        "examples/pytorch/domain_templates",
        needs="lightning, torchvision, jsonargparse",
        mistakes=(
            Mistake(
                HALF_LOSS,
                "loss_train = F.cross_entropy(output, target)",
                "loss_train = F.cross_entropy(output, target).half()",
                LOSS,
            ),
            Mistake(HALF_MODEL, "weights=self.weights)", "weights=self.weights).half()", WEIGHTS),
            Mistake(
                CLIPPED_BEFORE,
                "    def configure_optimizers(self):\n",
                "    def on_after_backward(self):\n"
                "        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)\n\n"
                "    def configure_optimizers(self):\n",
                PROTOCOL,
                "clip_grad_norm_",
            ),
        ),
    ),
    Script(
        "simclr_resnet",
        "contrastive learning",
        "sthalles/SimCLR",
        "1848fc934ad844ae630e6c452300433fe99acfd9",
        "run.py",
        needs="torchvision, tensorboard",
        mistakes=(
            Mistake(PLAIN_STEP, "scaler.step(self.optimizer)", "self.optimizer.step()", PROTOCOL, path="simclr.py"),
            Mistake(
                "logits that overflow in float16",
                "logits = logits / self.args.temperature",
                "logits = logits * 1e5",
                ("overflow",),
                path="simclr.py",
            ),
            Mistake(
                NO_ZERO,
                "                self.optimizer.zero_grad()\n",
                "",
                PROTOCOL,
                "scaler.scale(loss).backward()",
                "simclr.py",
            ),
        ),
    ),
    Script(
        "srgan",
        "a GAN with AMP",
        "Lornatang/SRGAN-PyTorch",
        "8842030eb433f8578a77328060121fa5a9a3cb43",
        "train_gan.py",
        needs="torchvision, opencv-python-headless, scipy, natsort, tensorboard",
        mistakes=(
            Mistake(
                INSIDE, "        scaler.scale(g_loss).backward()", "            scaler.scale(g_loss).backward()", SCOPE
            ),
            Mistake(PLAIN_STEP, "scaler.step(g_optimizer)", "g_optimizer.step()", PROTOCOL),
            Mistake(
                "one loss of two not scaled", "scaler.scale(d_loss_sr).backward()", "d_loss_sr.backward()", PROTOCOL
            ),
        ),
    ),
    Script(
        "yolo",
        "a YOLO loop",
        "WongKinYiu/yolov7",
        "a207844b1ce82d204ab36d87d496728d3d2348e7",
        "train.py",
        needs="torchvision, opencv-python-headless, seaborn, tensorboard",
        mistakes=(
            Mistake(
                INSIDE,
                "            scaler.scale(loss).backward()",
                "                scaler.scale(loss).backward()",
                SCOPE,
            ),
            Mistake(
                NO_ZERO,
                "                scaler.update()\n                optimizer.zero_grad()\n",
                "                scaler.update()\n",
                PROTOCOL,
                "scaler.scale(loss).backward()",
            ),
            Mistake(HALF_MODEL, "model.half().float()", "model.half()", WEIGHTS),
        ),
        judged={"resume": "right: the checkpoint holds the optimizer and not the scaler"},
    ),
    Script(
        "poolformer_timm",
        "timm's train.py",
        "sail-sg/poolformer",
        "a075575b8b3dc3c76ecc5c49985d156167372bfa",
        "train.py",
        needs="timm==0.6.13, torchvision",
        older=True,
        mistakes=(
            Mistake(
                HALF_LOSS,
                "            loss = loss_fn(output, target)\n\n        if not args.distributed",
                "            loss = loss_fn(output, target).half()\n\n        if not args.distributed",
                LOSS,
            ),
            Mistake(NO_ZERO, "        optimizer.zero_grad()\n", "", PROTOCOL, "            loss_scaler("),
            Mistake(
                CLIPPED_BEFORE,
                "            loss_scaler(\n                loss, optimizer,\n"
                "                clip_grad=args.clip_grad, clip_mode=args.clip_mode,\n"
                "                parameters=model_parameters(model, exclude_head='agc' in args.clip_mode),\n"
                "                create_graph=second_order)\n",
                "            loss_scaler._scaler.scale(loss).backward()\n"
                "            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)\n"
                "            loss_scaler._scaler.step(optimizer)\n            loss_scaler._scaler.update()\n",
                PROTOCOL,
                "clip_grad_norm_",
            ),
        ),
    ),
    Script(
        "text_to_image",
        "diffusers' text-to-image",
        "huggingface/diffusers",
        "58eb52c0803ea9af3abec60841c2a093bdf1f951",
        "train_text_to_image.py",
        "examples/text_to_image",
        needs="diffusers, accelerate, transformers, datasets, torchvision",
        mistakes=(
            Mistake(
                CLIPPED_BEFORE,
                "accelerator.clip_grad_norm_(unet.parameters()",
                "torch.nn.utils.clip_grad_norm_(unet.parameters()",
                PROTOCOL,
            ),
            Mistake(
                HALF_LOSS,
                'F.mse_loss(model_pred.float(), target.float(), reduction="mean")',
                'F.mse_loss(model_pred.half(), target.half(), reduction="mean")',
                LOSS,
            ),
            Mistake(
                HALF_MODEL,
                'subfolder="unet", revision=args.non_ema_revision\n',
                'subfolder="unet", revision=args.non_ema_revision, torch_dtype=torch.float16\n',
                WEIGHTS,
            ),
        ),
    ),
    Script(
        "unconditional_diffusion",
        "accelerate",
        "huggingface/diffusers",
        "58eb52c0803ea9af3abec60841c2a093bdf1f951",
        "train_unconditional.py",
        "examples/unconditional_image_generation",
        needs="diffusers, accelerate, datasets, torchvision",
        mistakes=(
            Mistake(
                CLIPPED_BEFORE,
                "accelerator.clip_grad_norm_(model.parameters()",
                "torch.nn.utils.clip_grad_norm_(model.parameters()",
                PROTOCOL,
            ),
            Mistake(
                HALF_LOSS,
                "F.mse_loss(model_output.float(), noise.float())",
                "F.mse_loss(model_output.half(), noise.half())",
                LOSS,
            ),
            Mistake(NO_ZERO, "                optimizer.zero_grad()\n", "", PROTOCOL, "accelerator.backward(loss)"),
        ),
    ),
    Script(
        "causal_lm",
        "transformers' run_clm_no_trainer.py",
        "chase06harmon/6.7960_GPT2",
        "3f6056b21ddb534653d9cbe2d1e546d56a401f9a",
        "run_clm_no_trainer.py",
        needs="transformers==4.53.3, tokenizers==0.21.4, huggingface_hub==0.36.0, datasets==4.4.1, accelerate==0.27.2",
        older=True,
        environment={"ACCELERATE_MIXED_PRECISION": "fp16"},
        mistakes=(
            Mistake(NO_ZERO, "                optimizer.zero_grad()\n", "", PROTOCOL, "accelerator.backward(loss)"),
            Mistake(
                HALF_LOSS,
                "                loss = outputs.loss\n                #",
                "                loss = outputs.loss.half()\n                #",
                LOSS,
                "outputs.loss.half()",
            ),
            Mistake(
                CLIPPED_BEFORE,
                "                accelerator.backward(loss)\n",
                "                accelerator.backward(loss)\n"
                "                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
                PROTOCOL,
                "clip_grad_norm_",
            ),
        ),
    ),
)
