"""Models that scripts take from timm, torchvision and transformers, as code that downloads nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampcheck.core.syntax import dotted
from ampcheck.tools.init.arguments import SMALL
from ampcheck.tools.init.options import options_of
from ampcheck.tools.init.sources import Attempt, Source

_OPTIONS = ("--model", "--arch", "--architecture", "--model-name", "--model_name", "--net", "--backbone")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_ARCHITECTURES = {"CausalLM": "gpt2", "Seq2SeqLM": "t5", "ConditionalGeneration": "t5", "ImageClassification": "vit"}
"""The architecture that stands for any checkpoint, by the task of an `AutoModelFor...`; others: bert."""


def library_models(source: Source) -> Iterator[tuple[str, tuple[Attempt, ...]]]:
    """The architectures that a script takes from a library, in the order of its calls, each with its constructions."""
    models = (each for each in options_of(source.tree) if {*each.flags} & {*_OPTIONS} and isinstance(each.default, str))
    default = next((str(each.default) for each in models), "")
    for node in ast.walk(source.tree):
        called = _called(node, source)
        origin = f"as {source.path}:{getattr(node, 'lineno', 0)} builds it"
        literal = _first_text(node)
        if called.startswith("timm.") and called.endswith(".create_model"):
            if name := literal or default:
                code = f'timm.create_model("{name}")'
                yield name, (Attempt(code, ("import timm",), origin=origin),)
        elif called.startswith("torchvision.models"):
            name = called.rpartition(".")[2]
            name = (literal or default) if name in ("get_model", "models", "__dict__") else name
            if name and name.islower() and not name.startswith("_"):
                code = f'torchvision.models.get_model("{name}")'
                yield name, (Attempt(code, ("import torchvision",), origin=origin),)
        elif called.startswith("transformers.") and called.endswith((".from_pretrained", ".from_config")):
            yield from _transformers(called.split(".")[-2], literal or default, origin)


def _called(node: ast.AST, source: Source) -> str:
    """The full name of what is called, or of the table that a name is looked up in (`models.__dict__[args.arch]`)."""
    if not isinstance(node, ast.Call):
        return ""
    first, dot, rest = dotted(node.func.value if isinstance(node.func, ast.Subscript) else node.func).partition(".")
    return f"{source.names[first]}{dot}{rest}" if first in source.names else ""


def _first_text(node: ast.AST) -> str:
    first = node.args[0] if isinstance(node, ast.Call) and node.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _transformers(name: str, checkpoint: str, origin: str) -> Iterator[tuple[str, tuple[Attempt, ...]]]:
    if not (name.startswith("AutoModel") or "For" in name or name.endswith("Model")) or "Tokenizer" in name:
        return
    sizes = ", ".join(f"{size}={SMALL[size]}" for size in _SIZES)
    if not name.startswith("AutoModel"):
        config = f"{re.sub(r'(For[A-Z].*|Model|LMHeadModel)$', '', name)}Config"
        imports = (f"from transformers import {config}", f"from transformers import {name}")
        yield name, (Attempt(f"{name}({config}({sizes}))", imports, origin=origin),)
        return
    known = re.match(r"[a-z]+\d*", checkpoint.rpartition("/")[2].lower())
    default = next((kind for task, kind in _ARCHITECTURES.items() if name.endswith(task)), "bert")
    kinds = dict.fromkeys([*([known[0]] if known else []), default])
    imports = ("from transformers import AutoConfig", f"from transformers import {name}")
    codes = (f'{name}.from_config(AutoConfig.for_model("{kind}", {sizes}))' for kind in kinds)
    attempts = tuple(Attempt(code, imports, origin=origin) for code in codes)
    yield f"{next(iter(kinds))} {name.removeprefix('AutoModel')}".strip(), attempts
