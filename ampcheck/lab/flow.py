"""Dtypes on their way through a transformer: what each module is given, computes in and gives back."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ampcheck import demo
from ampcheck.autocast.device import place
from ampcheck.core.errors import brief
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Scalar, Table
from ampcheck.core.subject import Call
from ampcheck.lab.expectations import Expectations, lacks
from ampcheck.lab.registry import check_of
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.source import hookable
from ampcheck.torchtools.trace import Trace

CHECK = check_of("flow")

ARMS = ("", "float16", "bfloat16")
"""What autocast casts to; the first runs without it."""

LARGEST = 400 * 2**20
"""Bytes of a pretrained model in the cache that is looked at without `--full`."""


@dataclass(frozen=True, slots=True)
class ModuleFlow:
    """One module in one arm. given, gave: floating dtypes of its tensors. widened: ops of its own, modules below left
    out, that took 16 bits to float32."""

    module: str
    kind: str
    given: tuple[str, ...]
    gave: tuple[str, ...]
    widened: int


@dataclass(frozen=True, slots=True)
class Flow:
    """A model in each arm: by arm its modules, in the order in which they were first called.

    known: whether it is a model of which we know that each linear layer runs under autocast. Any other may keep some in
    float32 on purpose (a router, a head), or have none (quantised): of it facts are told and nothing is judged.
    """

    model: str
    device: str
    arms: dict[str, tuple[ModuleFlow, ...]]
    lacking: dict[str, str]
    known: bool = True


def measure_flow(
    model: nn.Module, call: Call, *, name: str, device: str = "cpu", known: bool = True, progress: Progress = silent
) -> Flow:
    """Run forward without autocast and under autocast to each dtype, on the device or under its policy on the CPU."""
    placement = place(device)
    kind = torch.device(device).type
    model = model.to(placement.device)
    args, kwargs = map_tensors(lambda t: t.to(placement.device), (call.args, dict(call.kwargs)))
    arms, lacking = {}, {}
    for number, arm in enumerate(ARMS):
        progress(f"{name}, {arm or 'without autocast'}", number, len(ARMS))
        if arm and (why := lacks(arm, placement.device)):
            lacking[arm] = why
            continue
        with torch.no_grad(), warnings.catch_warnings(), placement.entered():
            warnings.simplefilter("ignore")  # a model's own deprecations
            with _noted(model) as notes, Trace(model) as trace:
                # Made inside: without the device PyTorch would switch it off.
                autocast: Any = torch.autocast(kind, getattr(torch, arm)) if arm else nullcontext()
                with autocast:
                    model(*args, **kwargs)
        widened = Counter(
            event.module
            for event in trace.events
            if event.op.startswith(("aten::_to_copy", "aten::to."))
            and torch.float32 in event.outputs
            and any(dtype in (torch.float16, torch.bfloat16) for dtype in event.inputs)
        )
        arms[arm] = tuple(ModuleFlow(*told_of, widened[told_of[0]]) for told_of in notes())
    return Flow(name, str(placement), arms, lacking, known)


@contextmanager
def _noted(model: nn.Module) -> Iterator[Callable[[], list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]]]:
    """Note what each module is given and gives, all its calls together."""
    kinds: dict[str, str] = {}
    given: dict[str, dict[str, None]] = {}
    gave: dict[str, dict[str, None]] = {}

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            kinds.setdefault(path, type(module).__name__)
            given.setdefault(path, {}).update(_floating((args, kwargs)))

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            gave.setdefault(path, {}).update(_floating(output))

        return hook

    with ExitStack() as hooks:
        for path, module in hookable(model):
            hooks.callback(module.register_forward_pre_hook(before(path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after(path), with_kwargs=True).remove)
        yield lambda: [(path, kind, tuple(given[path]), tuple(gave.get(path, ()))) for path, kind in kinds.items()]


def _floating(value: Any) -> dict[str, None]:
    found = (t.dtype for _, t in tensors(value) if t.is_floating_point())
    return dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in found)


def check_flow(flow: Flow) -> list[Finding]:
    """Without autocast all is float32; under it each linear layer gives 16 bits. A model that is not known is judged
    not at all."""
    lab = Expectations(CHECK, flow.device)
    where = f"{flow.model} on {flow.device}"
    for arm, modules in flow.arms.items() if flow.known else ():
        if not arm:
            others = [one for one in modules if {*one.given, *one.gave} - {"float32"}]
            expected = f"without autocast every module of {where} takes and gives float32"
            found = f"{len(modules) - len(others)} of {len(modules)} modules do"
            lab.expect(expected, found, bool(modules) and not others, seen=len(modules))
            continue
        given, there, widened = _linear(arm, modules)
        expected = f"under autocast to {arm} every linear layer of {where} gives {arm}"
        found = f"{given} of {there} do; {_often(widened)} {arm} is widened to float32"
        lab.expect(expected, found, given == there > 0, seen=there)
    for why in flow.lacking.values():
        lab.skip(f"{where}: {why}")
    return lab.findings


def _linear(arm: str, modules: Sequence[ModuleFlow]) -> tuple[int, int, int]:
    """How many linear layers give the arm's dtype alone, how many there are, and how often 16 bits are widened."""
    linear = [one for one in modules if one.kind in ("Linear", "Conv1D")]
    return sum(one.gave == (arm,) for one in linear), len(linear), sum(one.widened for one in modules)


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of the demo on the device and under CUDA's policy, and of a causal LM, by class and by module."""
    lab = Expectations(CHECK, device)
    flows = []
    subject = demo.subject()
    kinds = dict.fromkeys((device, "cuda")) if torch.device(device).type == "cpu" else [device]
    flows += [
        measure_flow(subject.model, subject.calls[0], name="the demo", device=kind, progress=progress) for kind in kinds
    ]
    for known, found in ((True, random_lm()), (False, pretrained_lm(full))):
        if isinstance(found, str):
            lab.skip(found)
            continue
        name, model, call = found
        try:
            flows.append(measure_flow(model, call, name=name, device=device, known=known, progress=progress))
        except Exception as error:
            if known:
                raise
            lab.skip(f"{name}, from the local cache, could not be run: {brief(error)}")
    for flow in flows:
        lab.findings += check_flow(flow)
    modules = sum(len(held) for flow in flows for held in flow.arms.values())
    tables = [classes_table(flow) for flow in flows]
    # What another device's policy changes shows in the classes.
    tables += [modules_table(flow) for flow in flows if flow.device == str(place(device))]
    reasons = [one.message for one in lab.findings if one.verdict.value == "skip"]
    return Run(
        findings=tuple(lab.findings),
        coverage=Coverage({"modules": modules, "models": len(flows)}, dict.fromkeys(reasons, 1)),
        tables=tuple(tables),
    )


def random_lm() -> tuple[str, nn.Module, Call] | str:
    """A small GPT-2 of transformers with random weights, or why there is none."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return "transformers is not installed: a causal LM of it was not looked at"
    config = GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        vocab_size=128,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    ids = torch.arange(64).reshape(2, 32)
    return "GPT-2 with random weights", model, Call((), {"input_ids": ids, "labels": ids, "use_cache": False})


def pretrained_lm(full: bool = False) -> tuple[str, nn.Module, Call] | str:
    """The smallest causal LM in the local cache of the Hugging Face hub, or why there is none. Nothing is downloaded,
    and no code that lies beside a model is run."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return "huggingface_hub is not installed: no pretrained causal LM was looked for"
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        return "transformers is not installed: no pretrained causal LM was looked for"
    try:
        held = sorted(scan_cache_dir().repos, key=lambda repo: repo.size_on_disk)
    except CacheNotFound:
        return "there is no local cache of the Hugging Face hub, and nothing is downloaded: no pretrained causal LM"
    broken = ""
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    for repo in held:
        if repo.repo_type != "model" or (repo.size_on_disk > LARGEST and not full):
            continue
        try:
            config = AutoConfig.from_pretrained(repo.repo_id, **local)
            if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or ()):
                continue
            model: Any = AutoModelForCausalLM.from_pretrained(repo.repo_id, **local)
            model = model.float().eval()
            ids = torch.arange(16).reshape(1, 16) % int(config.vocab_size)
        except Exception as error:  # noqa: BLE001  # a cache may be incomplete in any way
            broken += f"; {repo.repo_id} could not be loaded: {brief(error)}"
            continue
        return repo.repo_id, model, Call((), {"input_ids": ids, "use_cache": False})
    limit = "" if full else f" of at most {LARGEST // 2**20} MiB"
    return f"no causal LM{limit} lies whole in the local cache, and nothing is downloaded{broken}"


def classes_table(flow: Flow) -> Table:
    """By class of module: what goes in and comes out in each arm."""
    kinds = dict.fromkeys(one.kind for held in flow.arms.values() for one in held)
    rows: list[tuple[Scalar, ...]] = []
    for kind in kinds:
        row: list[Scalar] = [kind, max(sum(one.kind == kind for one in held) for held in flow.arms.values())]
        for held in flow.arms.values():
            ways = dict.fromkeys(_way(one) for one in held if one.kind == kind)
            row.append("; ".join(ways))
        rows.append(tuple(row))
    return Table(
        f"{flow.model} on {flow.device}, by class of module",
        ("class", "modules", *(_heading(arm) for arm in flow.arms)),
        rows,
        check=CHECK.slug,
        note="What goes in → what comes out; no dtype: no floating tensor. N× float32: so many ops of the module "
        "itself widen 16 bits to float32." + ("" if flow.known else f" {_facts(flow)}"),
    )


def _facts(flow: Flow) -> str:
    """Of a model that is not judged: how many of its linear layers run in 16 bits."""
    told_of = []
    for arm, modules in flow.arms.items():
        if arm:
            given, there, widened = _linear(arm, modules)
            told_of.append(f"to {arm} {given} of {there} linear layers give it and {_often(widened)} it is widened")
    seen = f"Under autocast {'; '.join(told_of)}. " if told_of else ""
    return f"{seen}Not judged: a model may keep layers in float32 on purpose."


def modules_table(flow: Flow) -> Table:
    """By module, in the order of the calls."""
    first = next(iter(flow.arms.values()))
    held = {arm: {one.module: one for one in modules} for arm, modules in flow.arms.items()}
    rows: list[tuple[Scalar, ...]] = [
        (
            one.module or "(root)",
            one.kind,
            *(_way(found[one.module]) if one.module in found else None for found in held.values()),
        )
        for one in first
    ]
    columns = ("module", "class", *(_heading(arm) for arm in flow.arms))
    return Table(f"{flow.model} on {flow.device}, by module", columns, rows, check=CHECK.slug)


def _way(one: ModuleFlow) -> str:
    forced = f" ({one.widened}× float32)" if one.widened else ""
    return f"{'+'.join(one.given) or '–'} → {'+'.join(one.gave) or '–'}{forced}"


def _often(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def _heading(arm: str) -> str:
    return arm or "no autocast"
