"""Roles of the fields of a configuration: the quantity that a number counts, by the name of its field."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Any


class Role(str, Enum):
    """Quantity that the number of a field counts."""

    DEPTH = "layers"
    PERIOD = "periods of layers"
    HEADS = "heads"
    HEAD_DIM = "sizes of heads"
    WIDTH = "widths"
    GROUPS = "groups"
    SECTION = "sections of a head"
    VOCABULARY = "vocabulary"
    TOKEN = "token ids"
    EXPERTS = "experts"
    CHOSEN = "chosen experts"
    WINDOW = "windows"
    POSITIONS = "positions of frames"
    IMAGE = "images"
    PATCHES = "numbers of patches"
    QUERIES = "queries"


_NAMES: tuple[tuple[Role | None, str], ...] = (
    (None, r"ignore|projection_input_dim|input_feat|version|_ratio|_scale$|loss|coefficient"),
    (Role.TOKEN, r"(^|_)(tok|token|bos|eos|pad|boi|eoi|boa|eoa|unk|mask|sep|cls)_(id|ids|index|idx)$"),
    (Role.CHOSEN, r"experts?_per_tok|(moe|experts?)_?(top_?)?k$|top_k_experts|^topk_group$"),
    (Role.EXPERTS, r"experts$|^n_group$|expert_groups?$"),
    (Role.HEAD_DIM, r"(head_?dim|dim_head|d_head|d_kv|head_size|kv_channels|rotary_dim)$"),
    (Role.HEADS, r"(^|_)heads$|(^|_)n_head(_kv)?$|kv_n_heads$"),
    (
        Role.PERIOD,
        r"(period|interval|frequency|sparse_step|layer_step|every_n_layers|layer_offset|layer_id|layer_idx)$",
    ),
    (Role.PERIOD, r"(first_k_dense_replace|dense_layers|shared_layers|predict_layers)$"),
    (None, r"^(max|min)_.*(layers|depth)$|window_layers|_layers?_type|index_.*blocks|divisor"),
    (Role.DEPTH, r"(^|_)(layers?|depths?|blocks|repeats)$|layers_per_block$|layers_decoder$|^depth_|numb_of_layers$"),
    (Role.VOCABULARY, r"vocab(?!.*offset)|num_embeddings$|codebook_size$|num_embeds$"),
    (Role.WINDOW, r"window|chunk_?(size|length)|^local_attention$|chunk_length$"),
    (Role.GROUPS, r"groups$"),
    (Role.SECTION, r"section"),
    (Role.POSITIONS, r"max_source_positions$"),
    (Role.IMAGE, r"(image|img|sample|crop|spec)_size$|pinpoints$"),
    (Role.PATCHES, r"(image_tokens|tokens_per_image|image_seq_length|num_patches|num_position_embeddings|seq_len)$"),
    (Role.PATCHES, r"image_embedding_size$"),
    (Role.QUERIES, r"^num_(object_)?queries$"),
    (
        None,
        r"^(max|min)_|^num_(?!filters|pos_feats)|kernel|stride|position|mel|per_group|feature_size|_in_|^in_c|^out_c|^input_dim",
    ),
    (
        Role.WIDTH,
        r"hidden|(^|_)dims?($|_)|d_model|d_ff|d_inner|d_ssm|d_latents|width|channels|embd|embed|emb_dim|inner",
    ),
    (Role.WIDTH, r"intermediate|ffn|feedforward|units|rank$|filters|planes|proj.*size|pos_feats|output_size$"),
)
"""The first pattern that a name matches decides; None: not reduced."""

_ROLES = tuple((role, re.compile(pattern)) for role, pattern in _NAMES)


def role_of(name: str) -> Role | None:
    """The role of a field by its name; None of one that is not reduced."""
    return next((role for role, pattern in _ROLES if pattern.search(name.lower())), None)


def numbers(value: Any) -> list[int]:
    """The whole number that a value is, or those of a list of nothing else; of any other value none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if isinstance(value, (list, tuple)) and value:
        nested = [numbers(item) for item in value]
        return [n for inner in nested for n in inner] if all(nested) else []
    return []


def mapped(value: Any, change: Callable[[int], int]) -> Any:
    """The value with each whole number in it changed."""
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value
