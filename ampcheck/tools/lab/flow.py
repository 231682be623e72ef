"""Dtypes on their way through a transformer: the inputs and outputs of each module, and the dtype it computes in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from ampcheck import demo
from ampcheck.autocast.device import place
from ampcheck.core.environment import quiet
from ampcheck.core.errors import brief
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Finding, Run, Scalar, Table
from ampcheck.core.subject import Call
from ampcheck.stream.trace import Trace
from ampcheck.tools.lab.lab import Expectations, lacks, run_of
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.source import hookable

ARMS = ("", "float16", "bfloat16")
"""Dtypes of autocast; the first runs without it."""

LARGEST = 400 * 2**20
"""Bytes of a pretrained model in the cache that is loaded without `--full`."""

LanguageModel: TypeAlias = tuple[str, nn.Module, Call]
_Dtypes: TypeAlias = tuple[dict[str, None], dict[str, None]]


@dataclass(frozen=True, slots=True)
class ModuleFlow:
    """One module in one arm. inputs, outputs: floating dtypes of its tensors. widened: ops of its own, without those of
    submodules, that cast 16 bits to float32."""

    module: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    widened: int

    def __str__(self) -> str:
        widened = f" ({self.widened}× float32)" if self.widened else ""
        return f"{'+'.join(self.inputs) or '–'} → {'+'.join(self.outputs) or '–'}{widened}"


@dataclass(frozen=True, slots=True)
class Flow:
    """A model in each arm: by arm its modules, in the order of their first calls.

    known: whether every linear layer of the model must run under autocast. Any other model may keep some in float32 on
    purpose (a router, a head), or have none (quantised): its facts are shown and not judged.
    """

    model: str
    device: str
    arms: Mapping[str, tuple[ModuleFlow, ...]]
    lacking: Mapping[str, str]
    known: bool = True


def measure_flow(
    model: nn.Module, call: Call, *, name: str, device: str = "cpu", known: bool = True, progress: Progress = silent
) -> Flow:
    """Run forward without autocast and under autocast to each dtype, on the device or under its policy on the CPU."""
    placement = place(device)
    kind = torch.device(device).type
    model = model.to(placement.device)
    args, kwargs = map_tensors(lambda t: t.to(placement.device), (call.args, dict(call.kwargs)))
    names = {path: type(module).__name__ for path, module in hookable(model)}
    arms, lacking = {}, {}
    for number, arm in enumerate(ARMS):
        progress(f"{name}, {arm or 'without autocast'}", number, len(ARMS))
        if arm and (reason := lacks(arm, placement.device)):
            lacking[arm] = reason
            continue
        with torch.no_grad(), quiet(), placement.entered(), _recorded(model) as dtypes, Trace(model) as trace:
            # Built inside: without the device PyTorch would disable it.
            autocast: Any = torch.autocast(kind, getattr(torch, arm)) if arm else nullcontext()
            with autocast:
                model(*args, **kwargs)
        widened = Counter(
            event.where.module
            for event in trace.events
            if event.where.op.startswith(("aten::_to_copy", "aten::to."))
            and torch.float32 in event.outputs
            and any(dtype in (torch.float16, torch.bfloat16) for dtype in event.inputs)
        )
        arms[arm] = tuple(
            ModuleFlow(path, names[path], tuple(inputs), tuple(outputs), widened[path])
            for path, (inputs, outputs) in dtypes.items()
        )
    return Flow(name, str(placement), arms, lacking, known)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, _Dtypes]]:
    """By module the dtypes of its floating inputs and outputs, all its calls together, in the order of first calls."""
    dtypes: dict[str, _Dtypes] = {}

    def record(path: str, module: nn.Module, *values: object) -> None:
        """values: args and kwargs before the call; args, kwargs and output after it."""
        inputs, outputs = dtypes.setdefault(path, ({}, {}))
        floating = (t for _, t in tensors(values[2:] or values) if t.is_floating_point())
        (outputs if values[2:] else inputs).update((str(t.dtype).removeprefix("torch."), None) for t in floating)

    with ExitStack() as hooks:
        for path, module in hookable(model):
            hooks.callback(module.register_forward_pre_hook(partial(record, path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(partial(record, path), with_kwargs=True).remove)
        yield dtypes


def check_flow(flow: Flow) -> list[Finding]:
    """Without autocast all is float32; under it each linear layer returns 16 bits. Only a known model is judged."""
    lab = Expectations("flow", flow.device)
    where = f"{flow.model} on {flow.device}"
    for arm, modules in flow.arms.items() if flow.known else ():
        if arm:
            right, total, widened = _linear(arm, modules)
            expected = f"under autocast to {arm} every linear layer of {where} returns {arm}"
            outcome = f"{right} of {total} do; {widened} {arm} is widened to float32"
        else:
            total = len(modules)
            right = sum({*module.inputs, *module.outputs} <= {"float32"} for module in modules)
            expected = f"without autocast every module of {where} takes and returns float32"
            outcome = f"{right} of {total} modules do"
        lab.expect(expected, outcome, right == total > 0, seen=total)
    lab.skip(*(f"{where}: {reason}" for reason in flow.lacking.values()))
    return lab.findings


def _linear(arm: str, modules: Sequence[ModuleFlow]) -> tuple[int, int, str]:
    """Return how many linear layers return the arm's dtype alone, how many there are, and how often 16 bits are
    widened."""
    linear = [module for module in modules if module.kind in ("Linear", "Conv1D")]
    widened = sum(module.widened for module in modules)
    often = {0: "never", 1: "once"}.get(widened, f"{widened} times")
    return sum(module.outputs == (arm,) for module in linear), len(linear), often


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of the demo on the device and under CUDA's policy, and of a causal LM, by class and by module."""
    lab, subject = Expectations("flow", device), demo.subject()
    kinds = dict.fromkeys((device, "cuda")) if torch.device(device).type == "cpu" else [device]
    measure = partial(measure_flow, progress=progress)
    flows = [measure(subject.model, subject.calls[0], name="the demo", device=kind) for kind in kinds]
    for known, loaded in ((True, random_lm()), (False, pretrained_lm(full))):
        if isinstance(loaded, str):
            lab.skip(loaded)
            continue
        name, model, call = loaded
        try:
            flows.append(measure(model, call, name=name, device=device, known=known))
        except Exception as error:
            if known:
                raise
            lab.skip(f"{name}, from the local cache, could not be run: {brief(error)}")
    tables = [classes_table(flow) for flow in flows]
    # Another device's policy changes only the table of classes.
    tables += [modules_table(flow) for flow in flows if flow.device == str(place(device))]
    findings = [*lab.findings, *(finding for flow in flows for finding in check_flow(flow))]
    seen = {"modules": sum(len(modules) for flow in flows for modules in flow.arms.values()), "models": len(flows)}
    return run_of(findings, seen, tables=tables)


def random_lm() -> LanguageModel | str:
    """A small GPT-2 of transformers with random weights, or why there is none."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return "transformers is not installed: no causal LM of it was measured"
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    ids = torch.arange(64).reshape(2, 32)
    return "GPT-2 with random weights", model, Call((), {"input_ids": ids, "labels": ids, "use_cache": False})


def pretrained_lm(full: bool = False) -> LanguageModel | str:
    """The smallest causal LM in the local cache of the Hugging Face hub, or why there is none. Nothing is downloaded,
    and no code of a model repository is run."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        name = (error.name or "transformers").partition(".")[0]
        return f"{name} is not installed: no pretrained causal LM was searched"
    try:
        repositories = sorted(scan_cache_dir().repos, key=lambda repository: repository.size_on_disk)
    except CacheNotFound:
        return "there is no local cache of the Hugging Face hub, and nothing is downloaded: no pretrained causal LM"
    broken = ""
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    for repository in repositories:
        if repository.repo_type != "model" or (repository.size_on_disk > LARGEST and not full):
            continue
        name = repository.repo_id
        try:
            config = AutoConfig.from_pretrained(name, **local)
            if not any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in config.architectures or ()):
                continue
            model: Any = AutoModelForCausalLM.from_pretrained(name, **local)
            ids = torch.arange(16).reshape(1, 16) % int(config.vocab_size)
            return name, model.float().eval(), Call((), {"input_ids": ids, "use_cache": False})
        except Exception as error:  # noqa: BLE001  # a cache may be incomplete in any way
            broken += f"; {name} could not be loaded: {brief(error)}"
    limit = "" if full else f" of at most {LARGEST // 2**20} MiB"
    return f"no causal LM{limit} is complete in the local cache, and nothing is downloaded{broken}"


def classes_table(flow: Flow) -> Table:
    """By class of module: the dtypes of inputs and outputs in each arm."""
    rows: list[tuple[Scalar, ...]] = []
    for kind in dict.fromkeys(module.kind for modules in flow.arms.values() for module in modules):
        arms = [[str(module) for module in modules if module.kind == kind] for modules in flow.arms.values()]
        rows.append((kind, max(map(len, arms)), *("; ".join(dict.fromkeys(flows)) for flows in arms)))
    note = (
        "Dtypes of the inputs → dtypes of the outputs; –: no floating tensor. N× float32: so many ops of the module "
        "itself widen 16 bits to float32."
    )
    if not flow.known:
        linear = {arm: _linear(arm, modules) for arm, modules in flow.arms.items() if arm}
        facts = (
            f"to {arm} {n} of {of} linear layers return it and {w} it is widened" for arm, (n, of, w) in linear.items()
        )
        note += f" Under autocast {'; '.join(facts)}." if linear else ""
        note += " Not judged: a model may keep layers in float32 on purpose."
    columns = ("class", "modules", *(arm or "no autocast" for arm in flow.arms))
    return Table(f"{flow.model} on {flow.device}, by class of module", columns, rows, note=note)


def modules_table(flow: Flow) -> Table:
    """By module, in the order of the calls."""
    arms = [{module.module: str(module) for module in modules} for modules in flow.arms.values()]
    first = next(iter(flow.arms.values()))
    rows = [(module.module or "(root)", module.kind, *(arm.get(module.module) for arm in arms)) for module in first]
    columns = ("module", "class", *(arm or "no autocast" for arm in flow.arms))
    return Table(f"{flow.model} on {flow.device}, by module", columns, rows)
