"""Arguments for constructors, by the names that the field gives them, and smaller ones where defaults are large."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ampcheck.tools.init.repository import Class, Repository, parameters_of
from ampcheck.tools.init.scripts import Parameter
from ampcheck.tools.init.sources import Attempt

_SIZES = {
    2: "n_layer n_layers num_layers num_hidden_layers depth nlayers n_blocks num_blocks",
    4: "n_head n_heads num_heads heads nhead num_attention_heads num_key_value_heads n_kv_heads",
    128: "n_embd d_model dim hidden_size embed_dim hidden_dim emb_dim model_dim ninp width",
    256: "intermediate_size d_ff dim_feedforward mlp_dim ffn_dim n_inner",
    512: "vocab_size num_tokens n_vocab ntoken ntokens num_embeddings vocab",
}
_CONTEXT = (
    "block_size max_seq_len seq_len context_length max_len max_position_embeddings n_positions n_ctx max_seq_length "
    "sequence_length"
)

SMALL: Mapping[str, int] = {
    **{name: size for size, names in _SIZES.items() for name in names.split()},
    **dict.fromkeys(_CONTEXT.split(), 128),
}
"""Sizes of a small model by the names of arguments: for required ones, and in place of larger defaults."""

_VALUES = {
    "3": "in_channels in_chans in_ch n_channels input_channels kernel_size",
    "10": "num_classes n_classes nclasses n_class num_labels",
    "16": "in_features input_size input_dim in_dim n_features dim_in",
    "8": "out_features output_size output_dim out_dim dim_out out_channels patch_size",
    "64": "image_size img_size",
    "0.0": "dropout drop drop_rate p_dropout dropout_rate dropout_p",
}

_REQUIRED: Mapping[str, str] = {
    **{name: str(value) for name, value in SMALL.items()},
    **{name: value for value, names in _VALUES.items() for name in names.split()},
}
"""Value of a required argument, by its name."""

_PRESETS = ("model_type", "model_name", "preset", "variant", "arch", "name")
"""Fields of a configuration that stand for its sizes."""

_CONFIGS = ("config", "cfg", "conf", "args", "hparams", "params", "model_args", "configuration")


def guessed(model: Class, repository: Repository, *, small: bool) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """A construction by the signature: its code, the imports, and the required arguments that only the user knows.

    small: also replace large defaults by those of `SMALL`.
    """
    arguments: list[str] = []
    imports, missing = [model.line], []
    for parameter in parameters_of(model, repository.classes):
        if (config := _config(parameter, model, repository)) is not None:
            fields = parameters_of(config, repository.classes)
            values, lacking = _values(fields, small=small)
            missing += [f"{config.name}.{name}" for name in lacking]
            imports.append(config.line)
            arguments.append(f"{parameter.name}={config.name}({', '.join(values)})")
            continue
        values, lacking = _values([parameter], small=small)
        arguments += values
        missing += lacking
    return f"{model.name}({', '.join(arguments)})", tuple(dict.fromkeys(imports)), tuple(missing)


def of_default_config(model: Class) -> Iterator[Attempt]:
    """Constructions with the documented configuration of a class, `Model(Model.get_default_config())`.

    Fields that are None are given sizes by their names; once also without the name of a preset, which excludes sizes.
    """
    if not model.default_config or not model.parameters or not model.parameters[0].required:
        return
    make = f"config = {model.name}.{model.default_config}()"
    unset = [each.name for each in model.config_fields if each.default == "None" and each.name in _REQUIRED]
    sizes = [f"config.{name} = {_REQUIRED[name]}" for name in unset]
    presets = [each.name for each in model.config_fields if each.name in _PRESETS and each.default != "None"]
    large = [each.name for each in model.config_fields if _is_larger(each.default, SMALL.get(each.name))]
    sizes += [f"config.{name} = {SMALL[name]}" for name in large]
    origin = f"with the configuration of {model.name}.{model.default_config}, in small sizes"
    for dropped in ([f"config.{name} = None" for name in presets], []) if presets else ([],):
        yield Attempt(f"{model.name}(config)", (model.line,), "", origin, (make, *dropped, *sizes))


def _values(parameters: Sequence[Parameter], *, small: bool) -> tuple[list[str], list[str]]:
    """`name=value` of the parameters that are given one, and the names of the required ones without."""
    values, missing = [], []
    for parameter in parameters:
        if parameter.required and parameter.name in _REQUIRED:
            values.append(f"{parameter.name}={_REQUIRED[parameter.name]}")
        elif parameter.required:
            missing.append(parameter.name)
        elif small and _is_larger(parameter.default, SMALL.get(parameter.name)):
            values.append(f"{parameter.name}={SMALL[parameter.name]}")
    return values, missing


def _is_larger(text: str | None, small: int | None) -> bool:
    try:
        value = ast.literal_eval(text or "")
    except (ValueError, SyntaxError):
        return False
    return small is not None and type(value) is int and value > small


def _config(parameter: Parameter, model: Class, repository: Repository) -> Class | None:
    """The class of a required configuration: that of the annotation, else the only `...Config` of the module."""
    if not parameter.required:
        return None
    annotated = repository.classes.get((parameter.annotation or "").strip("'\"").rpartition(".")[2], ())
    same = [each for each in annotated if each.source.root == model.source.root]
    if same and any(word in same[0].name for word in ("Config", "Args", "Params")):
        return same[0]
    if parameter.name not in _CONFIGS or annotated:
        return None
    beside = [
        each
        for found in repository.classes.values()
        for each in found
        if each.name.endswith(("Config", "Args", "Configuration"))
        and (each.source is model.source or each.name in model.source.names)
    ]
    named = [each for each in beside if each.name.startswith(model.name)]
    return (named or beside)[0] if len(named or beside) == 1 else None


def smaller(use: Attempt) -> Attempt:
    """A construction with every large size, of keywords and of a configuration's fields, replaced by that of `SMALL`.

    Its inputs, which may be of the sizes, are proposed anew.
    """
    lines = tuple(map(_smaller_field, use.setup))
    return replace(use, code=shrunken(use.code), inputs="", origin=f"{use.origin}, in a smaller size", setup=lines)


def _smaller_field(line: str) -> str:
    target, _, value = line.partition(" = ")
    small = SMALL.get(target.rpartition(".")[2]) if "." in target else None
    return f"{target} = {small}" if _is_larger(value, small) else line


def shrunken(code: str) -> str:
    """The construction with every large size that is a keyword's number replaced by that of `SMALL`."""
    tree = ast.parse(code, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and _is_larger(ast.unparse(node.value), SMALL.get(node.arg or "")):
            node.value = ast.Constant(SMALL[node.arg or ""])
    return ast.unparse(tree)
