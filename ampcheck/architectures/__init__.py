"""Targets without code: the architecture of a library by its name, built small from its own configuration.

`transformers:LlamaForCausalLM`, `transformers:qwen3` (a model type), `diffusers:UNet2DConditionModel`, `timm:resnet50`,
`torchvision:resnet18`, and `hf:ORG/NAME` or `hf:FOLDER` where a `config.json` is in the local cache or the folder.
Depth, width, heads and vocabulary are reduced, see `law`; ratios and options stay. Weights are random; nothing is
downloaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ampcheck.core.environment import quiet, variables
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.subject import Subject

if TYPE_CHECKING:
    from ampcheck.architectures.build import Architecture, Built

_ROOMS = {
    "transformers": "ampcheck.architectures.huggingface",
    "diffusers": "ampcheck.architectures.diffusion",
    "timm": "ampcheck.architectures.vision",
    "torchvision": "ampcheck.architectures.vision",
    "hf": "ampcheck.architectures.checkpoint",
}
_OFFLINE = "HF_HUB_OFFLINE"
_NAMED = 6
"""Fields that a line about what was reduced names."""


def subject_of_architecture(target: str) -> Subject:
    """The subject of a target without code; standard error says how small it is.

    Raises `UsageError` for an unknown name, a missing library, and an architecture that does not run small, with what
    was tried.
    """
    built = build_target(target)
    print(f"ampcheck: {described(target, built)}", file=sys.stderr, flush=True)
    inputs = built.inputs
    return Subject(
        (built.model, inputs.args, dict(inputs.kwargs)), name=target, loss=_own_loss if inputs.loss else None
    )


def build_target(target: str) -> Built:
    """The small model of a target, with its inputs."""
    from ampcheck.architectures.build import build

    with _offline():
        try:
            with quiet():
                architecture = _architecture(target)
        except UsageError:
            raise
        except BaseException as error:  # an import runs the library's code, which may raise anything
            raise UsageError(f"{target} cannot be loaded: {brief(as_result(error))}") from error
        return build(architecture)


@contextmanager
def _offline() -> Iterator[None]:
    """Inside, `huggingface_hub` downloads nothing; it reads the variable when it is imported, so before it is set."""
    constants: Any = None
    with suppress(ImportError):
        constants = importlib.import_module("huggingface_hub.constants")
    with ExitStack() as stack:
        stack.enter_context(variables({_OFFLINE: "1"}))
        if constants is not None:
            stack.callback(setattr, constants, _OFFLINE, getattr(constants, _OFFLINE))
            setattr(constants, _OFFLINE, True)
        yield


def described(target: str, built: Built) -> str:
    """Return what was made small, with how many weights, and what it is called with."""
    weights = sum(weight.numel() for weight in built.model.parameters())
    numbers = [(path, c) for path, c in built.changes.items() if isinstance(c.before, int) and path[-1] in _SAID]
    said = [f"{'.'.join(path)} {change.before} -> {change.after}" for path, change in numbers[:_NAMED]]
    reduced = f" ({', '.join(said)})" if said else ""
    return f"{target} is built small, with {weights:,} random weights{reduced}; inputs: {built.inputs.words()}"


_SAID = frozenset(
    {
        "num_hidden_layers", "num_layers", "n_layer", "hidden_size", "d_model", "n_embd", "num_attention_heads",
        "n_head", "num_heads", "num_key_value_heads", "vocab_size", "encoder_layers", "decoder_layers", "depth",
        "embed_dim", "image_size", "img_size", "sample_size", "hidden_dim",
    }
)  # fmt: skip


def _own_loss(output: Any) -> Any:
    return output.loss


def _architecture(target: str) -> Architecture:
    library, _, name = target.partition(":")
    package = "huggingface_hub" if library == "hf" else library
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{target} needs the package {package}, which is not installed: pip install {package}")
    of_name: Callable[[str, str], Architecture] = importlib.import_module(_ROOMS[library]).of_name
    return of_name(name, target)
