"""Promise of the shadows, over a zoo of models: *exact* is what a separate float64 run gives, and the run is untouched.

    python benchmarks/shadow_identity.py ../shared/zoo --json shadow_identity.json [--all] [--only TEXT]

Each model runs forward and backward plainly, under the shadow, and once more in float64 with all casts lifted (the
model's own `.float()` too), in float32 and under bfloat16 autocast. Outputs, gradients and random state of the first
two are compared bit by bit; *exact* with the third, relative to the norm of the tensor, of a gradient at least 1e-6 of
the norm of all gradients. Companions follow the decisions of the run (`decisions`: those that float64 takes otherwise,
from which on the two differ by right); numbers that leave the run (`item`, `tolist`) come back as data. `repeats`: the
plain run gives the same bits again, with other values in the memory that it allocates.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ampcheck.core.subject import load_collection
from ampcheck.shadow import Shadow, judge, mode
from ampcheck.shadow.decisions import _MARGINS
from ampcheck.tools.sweep.listing import ZOO
from ampcheck.torchtools.pytree import tensors

BOUND = 1e-12
KINKS = frozenset(
    "threshold_backward leaky_relu_backward hardtanh_backward hardsigmoid_backward softshrink_backward "
    "hardshrink_backward hardswish_backward _prelu_kernel_backward".split()
)
MODELS = """
hf/BertForMaskedLM hf/DistilBertForMaskedLM hf/RobertaForMaskedLM hf/OlmoForCausalLM hf/Gemma2ForCausalLM
hf/MistralForCausalLM hf/GPTJForCausalLM hf/FalconForCausalLM hf/T5ForConditionalGeneration hf/GlmForCausalLM
hf/MBartForConditionalGeneration hf/M2M100ForConditionalGeneration hf/Mamba2ForCausalLM hf/BeitForImageClassification
hf/ConvNextV2ForImageClassification hf/RegNetForImageClassification hf/PvtV2ForImageClassification hf/CLIPSegModel
hf/DetrForObjectDetection hf/NomicBertForMaskedLM hf/ModernBertForMaskedLM hf/PerceiverForMaskedLM hf/PatchTSMixerModel
hf/ASTForAudioClassification hf/RecurrentGemmaForCausalLM hf/NystromformerForMaskedLM hf/ArceeForCausalLM
diffusers/UNet2DModel diffusers/DiTTransformer2DModel diffusers/SD3Transformer2DModel diffusers/AutoencoderKL
diffusers/ControlNetModel diffusers/WanTransformer3DModel vit-pytorch/SimpleViT vit-pytorch/CrossViT vit-pytorch/XCiT
vit-pytorch/SimpleViT-FFT x-transformers/Decoder-softclamp-flash lucidrains/gMLP lucidrains/Conformer
lucidrains/MEGABYTE
lucidrains/minGRU-LM lucidrains/iTransformer lucidrains/PaLM mambapy/Mamba ncps/CfC rtdl/FTTransformer fair-esm/ESM2
fair-esm/MSATransformer segment-anything/MaskDecoder monai/BasicUNet monai/UNETR monai/VNet monai/ResNet3D
kornia/RRDBNet kornia/DexiNed pyg/GCN pyg/GAT pyg/GraphSAGE pyg/SGFormer denoising-diffusion/Unet1D
torch/nn.Transformer
""".split()
"""Models of every family, chosen before the first run."""


class Lifted(TorchFunctionMode):
    """Every cast of the model's own to a floating or complex format gives float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        if func is torch.set_default_dtype:
            return None
        args, kwargs = pytree.tree_map(_lifted_dtype, (args, kwargs or {}))
        if func is torch.nn.functional.rms_norm and (*args[3:], kwargs.get("eps"))[0] is None:
            args, kwargs = args[:3], {**kwargs, "eps": torch.finfo(torch.float32).eps}  # the default of the run
        return func(*args, **kwargs)


def _lifted_dtype(value: Any) -> Any:
    if not isinstance(value, torch.dtype):
        return value
    return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Run in float64, whatever the code says."""
    torch.set_default_dtype(torch.float64)
    try:
        with Lifted():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class CountingJudge(judge.Judge):
    """Counts the decisions that exact takes otherwise, near ties included."""

    def __init__(self, store: Any, **how: Any) -> None:
        super().__init__(store, **how)
        self.otherwise = 0

    def judge(self, call: Any, *how: Any) -> None:
        """Judge an op, and count."""
        if call.traits.decides in _MARGINS:
            margins = _MARGINS[call.traits.decides](call, self._store)
            self.otherwise += 0 if margins is None else int((margins.margin > 0).sum())
        elif call.name in KINKS:
            value = call.args[1]
            sides = [_slopes(call, v) for v in (value.double(), self._store.exact(value))]
            self.otherwise += int((sides[0] != sides[1]).sum())
        elif "max_pool" in call.name and "with_indices" in call.name and "backward" not in call.name:
            own = call.op(self._store.exact(call.args[0]), *call.args[1:], **call.kwargs)
            self.otherwise += int((own[1] != call.out[1]).sum())
        super().judge(call, *how)


def _slopes(call: Any, value: torch.Tensor) -> torch.Tensor:
    """On which side of the kinks values are."""
    if call.name == "hardswish_backward":
        return (value <= -3).int() + (value < 3)
    if call.name == "_prelu_kernel_backward":
        return value > 0
    slopes: torch.Tensor = call.op(torch.ones_like(value), value, *call.args[2:], **call.kwargs)
    return slopes


def step(model: torch.nn.Module, args: Any, kwargs: Any, low: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one step."""
    torch.manual_seed(1)
    with torch.autocast("cpu", low) if low else contextlib.nullcontext():
        out = model(*args, **kwargs)
    outputs = {f"output {path}": t for path, t in tensors(out) if t.is_floating_point()}
    usable = [t for t in outputs.values() if t.grad_fn is not None and bool(t.isfinite().all())]
    wide = torch.float64 if low is None and usable and usable[0].dtype is torch.float64 else torch.float32
    if usable:
        sum(t.to(wide).pow(2).mean() for t in usable).backward()
    return {**outputs, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def distances(exact: dict[str, torch.Tensor], wide: dict[str, torch.Tensor]) -> dict[str, float]:
    """By name: the distance of exact from float64, relative."""
    total = sum(float(t.norm()) ** 2 for n, t in wide.items() if not n.startswith("output")) ** 0.5
    result = {}
    for name, value in wide.items():
        known = value.isfinite() & exact[name].isfinite() & (value.abs() < 1e30) & (exact[name].abs() < 1e30)
        value, other = torch.where(known, value, 0), torch.where(known, exact[name], 0)
        least = 0.0 if name.startswith("output") else 1e-6 * total
        result[name] = float((value - other).norm() / max(float(value.norm()), least, 1e-300))
    return result


def soil_memory() -> None:
    """Leave other values in memory that is free: a kernel that reads what nobody wrote gives something else."""
    junk = [torch.full((1 << size,), 7.0) for size in range(4, 20) for _ in range(20)]
    del junk


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two runs gave the same; NaN equals NaN."""
    return left.keys() == right.keys() and all(
        torch.equal(t.nan_to_num(), right[n].nan_to_num()) for n, t in left.items()
    )


def run_model(build: Any, low: torch.dtype | None) -> dict[str, Any]:
    """The three runs of one model."""
    model, args, kwargs = build()
    plain = step(model, args, kwargs, low)
    state = torch.get_rng_state()
    model, args, kwargs = build()
    with Shadow(model) as shadow:
        ours = step(model, args, kwargs, low)
    untouched = torch.equal(state, torch.get_rng_state()) and same_bits(plain, ours)
    model, args, kwargs = build()
    soil_memory()
    repeats = untouched or same_bits(plain, step(model, args, kwargs, low))
    model, args, kwargs = build()
    args, kwargs = pytree.tree_map(
        lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, (args, kwargs)
    )
    model.double()
    with lifted():
        wide = step(model, args, kwargs, None)
    apart = distances({n: shadow.exact(t) for n, t in ours.items()}, wide)
    worst = max(apart, key=lambda name: apart[name])
    return {
        "untouched": untouched,
        "repeats": repeats,
        "outputs": max(v for n, v in apart.items() if n.startswith("output")),
        "gradients": max((v for n, v in apart.items() if not n.startswith("output")), default=0.0),
        "tensors": len(apart),
        "worst": worst,
        "decisions": shadow.judge.otherwise,
        "escapes": sum(shadow.escapes.values()),
        "unruled": dict(shadow.unruled),
    }


def main() -> None:
    """Run the models, print each, and write every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the evidence has already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mode.Judge = CountingJudge
    warnings.simplefilter("ignore")
    models = load_collection(str(options.zoo / ZOO))
    kept = options.resume and options.json.is_file()
    rows: list[dict[str, Any]] = json.loads(options.json.read_text())["rows"] if kept else []
    done = {(row["model"], row["dtype"]) for row in rows}
    for name in [n for n in (models if options.all else MODELS) if options.only in n]:
        for low in (None, torch.bfloat16):
            row: dict[str, Any] = {"model": name, "dtype": str(low or torch.float32).removeprefix("torch.")}
            if (row["model"], row["dtype"]) in done:
                continue
            try:
                row |= run_model(models[name], low)
                row["identical"] = max(row["outputs"], row["gradients"]) <= BOUND
            except Exception as error:  # noqa: BLE001  # a model that raises in float64 has no reference
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            torch.set_default_dtype(torch.float32)
            rows.append(row)
            print(json.dumps(row), flush=True)
            gc.collect()
    ran = [row for row in rows if "error" not in row]
    summary = {
        "command": "python benchmarks/shadow_identity.py ZOO --json FILE",
        "torch": torch.__version__,
        "bound": BOUND,
        "models": len({row["model"] for row in ran}),
        "untouched": sum(row["untouched"] for row in ran),
        "changed by themselves": sum(not row.get("repeats", True) for row in ran),
        "runs": len(ran),
        "runs without other decisions": sum(not row["decisions"] for row in ran),
        "of which identical": sum(row["identical"] for row in ran if not row["decisions"]),
    }
    print(json.dumps(summary, indent=1))
    options.json.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
