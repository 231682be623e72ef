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
    beside torch. judged: of the checks that fail on the healthy script, whether they are right and why."""

    name: str
    kind: str
    repository: str
    commit: str
    path: str
    folder: str = ""
    needs: str = ""
    steps: int = 4
    environment: Mapping[str, str] = field(default_factory=dict)
    mistakes: tuple[Mistake, ...] = ()
    judged: Mapping[str, str] = field(default_factory=dict)


SCRIPTS = (
    Script(
        "amp_recipe",
        "a plain CUDA AMP tutorial",
        "PyTorch-China/tutorials",
        "40db1c688927f23b949c16fb1b4531d5ac918180",
        "amp_recipe.py",
        "recipes_source/recipes",
        steps=8,
    ),
    Script("llama2_c", "nanoGPT", "karpathy/llama2.c", "350e04fe35433e6d2941dce5a1f53308f87058eb", "train.py", needs="sentencepiece"),
    Script("carvana_unet", "segmentation with GradScaler", "milesial/Pytorch-UNet", "21d7850f2af30a9695bbeea75f3136aa538cfc4a", "train.py", needs="torchvision, wandb, tqdm"),
    Script("dino_vit", "DDP", "facebookresearch/dino", "7c446df5b9f45747937fb0d72314eb9f7b66930a", "main_dino.py", needs="torchvision"),
    Script("reference_segmentation", "torchvision references", "growlix/pytorch-i1k-baseline", "ab8c06bf2cea3dac83b095a9bf2031f5f3aa0ed3", "train.py", "references/segmentation", needs="torchvision, pycocotools"),
    Script("lightning_imagenet", 'Lightning, precision="16-mixed"', "Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414", "imagenet.py", "examples/pytorch/domain_templates", needs="lightning, torchvision, jsonargparse"),
    Script("simclr_resnet", "contrastive learning", "sthalles/SimCLR", "1848fc934ad844ae630e6c452300433fe99acfd9", "run.py", needs="torchvision, tensorboard"),
    Script("srgan", "a GAN with AMP", "Lornatang/SRGAN-PyTorch", "8842030eb433f8578a77328060121fa5a9a3cb43", "train_gan.py", needs="torchvision, opencv-python-headless, scipy, tensorboard"),
    Script("yolo", "a YOLO loop", "WongKinYiu/yolov7", "a207844b1ce82d204ab36d87d496728d3d2348e7", "train.py", needs="torchvision, opencv-python-headless, seaborn, tensorboard"),
    Script("poolformer_timm", "timm's train.py", "sail-sg/poolformer", "a075575b8b3dc3c76ecc5c49985d156167372bfa", "train.py", needs="timm, torchvision"),
    Script("text_to_image", "diffusers' text-to-image", "huggingface/diffusers", "58eb52c0803ea9af3abec60841c2a093bdf1f951", "train_text_to_image.py", "examples/text_to_image", needs="diffusers, accelerate, transformers, datasets, torchvision"),
    Script("unconditional_diffusion", "accelerate", "huggingface/diffusers", "58eb52c0803ea9af3abec60841c2a093bdf1f951", "train_unconditional.py", "examples/unconditional_image_generation", needs="diffusers, accelerate, datasets, torchvision"),
    Script("causal_lm", "transformers' run_clm_no_trainer.py", "chase06harmon/6.7960_GPT2", "3f6056b21ddb534653d9cbe2d1e546d56a401f9a", "run_clm_no_trainer.py", needs="transformers, accelerate, datasets", environment={"ACCELERATE_MIXED_PRECISION": "fp16"}),
)
