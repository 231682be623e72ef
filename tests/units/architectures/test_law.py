"""A configuration is made small by division: the relations of its numbers hold afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.architectures.law import VOCABULARY, applied, reductions


def small(fields: dict[str, Any], **options: bool) -> dict[str, Any]:
    return applied(fields, reductions(fields, **options))


@st.composite
def transformers(draw: st.DrawFn) -> dict[str, Any]:
    """Configurations as language models have them: several queries for each key, and state space layers."""
    keys, queries, size = draw(st.integers(1, 16)), draw(st.integers(1, 8)), 8 * draw(st.integers(2, 24))
    heads = keys * queries
    return {
        "hidden_size": heads * size, "num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": size,
        "intermediate_size": heads * size * draw(st.integers(1, 8)), "vocab_size": draw(st.integers(300, 200_000)),
        "num_hidden_layers": draw(st.integers(1, 96)), "tie_word_embeddings": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["gelu", "silu"])), "rms_norm_eps": 1e-6, "rope_scaling": None,
        "mamba_expand": 2, "mamba_n_heads": heads * 2, "mamba_d_head": size,
    }  # fmt: skip


@given(transformers(), st.booleans(), st.booleans())
def test_relations_of_heads_and_widths_hold_afterwards(fields: dict[str, Any], alike: bool, whole: bool) -> None:
    after = small(fields, alike=alike, whole_heads=whole)
    heads, keys, size = after["num_attention_heads"], after["num_key_value_heads"], after["head_dim"]
    if fields["num_key_value_heads"] > 1:
        assert heads * fields["num_key_value_heads"] == keys * fields["num_attention_heads"]
    else:  # one head of keys for all queries stays that
        assert (keys, heads > 1) == (1, fields["num_attention_heads"] > 1)
    assert after["hidden_size"] == heads * size
    assert after["intermediate_size"] * fields["hidden_size"] == after["hidden_size"] * fields["intermediate_size"]
    assert after["mamba_n_heads"] * after["mamba_d_head"] == after["mamba_expand"] * after["hidden_size"]
    assert size % 2 == 0
    assert size >= 8


@given(transformers())
def test_nothing_grows_and_options_stay(fields: dict[str, Any]) -> None:
    after = small(fields)
    assert list(after) == list(fields)
    for name, before in fields.items():
        if isinstance(before, int) and not isinstance(before, bool):
            assert 0 < after[name] <= before
        else:
            assert after[name] == before
    assert after["num_hidden_layers"] <= 2
    assert after["vocab_size"] <= VOCABULARY


@given(transformers(), st.integers(2, 6), st.integers(1, 4))
def test_what_two_parts_have_in_common_they_have_afterwards(text: dict[str, Any], heads: int, factor: int) -> None:
    vision = {"hidden_size": 64 * heads, "num_heads": heads, "intermediate_size": 128 * heads, "depth": 24}
    vision["out_hidden_size"] = text["hidden_size"] * factor
    after = small({"text_config": text, "vision_config": vision})
    assert after["vision_config"]["out_hidden_size"] == after["text_config"]["hidden_size"] * factor
    assert after["vision_config"]["hidden_size"] % after["vision_config"]["num_heads"] == 0


@given(st.lists(st.sampled_from(["full", "sliding", "linear"]), min_size=3, max_size=60))
def test_a_layer_of_each_kind_remains(kinds: list[str]) -> None:
    experts = ["sparse" if number % 2 else "dense" for number in range(len(kinds))]
    after = small({"num_hidden_layers": len(kinds), "layer_types": kinds, "mlp_layer_types": experts})
    pairs = list(zip(after["layer_types"], after["mlp_layer_types"], strict=True))
    assert after["num_hidden_layers"] == len(pairs) >= 2
    assert set(pairs) == set(zip(kinds, experts, strict=True))


def test_layers_that_are_pointed_at_remain() -> None:
    after = small({"num_hidden_layers": 12, "out_indices": [2, 5, 8, 11], "global_attn_indexes": [2]})
    assert after["out_indices"] == [0, 1, 2, 3]
    assert after["global_attn_indexes"] == [0]
    assert after["num_hidden_layers"] == 4


@given(st.lists(st.integers(300, 100_000), min_size=1, max_size=8, unique=True))
def test_token_ids_stay_different_and_within_the_vocabulary(ids: list[int]) -> None:
    fields = {f"t{number}_token_id": value for number, value in enumerate(ids)} | {"pad_token_id": 0}
    after = small({**fields, "text_config": {"vocab_size": 200_000, "eos_token_id": [ids[0], 1]}})
    new = [after[name] for name in fields]
    assert len(set(new)) == len(new)
    assert all(0 <= value < after["text_config"]["vocab_size"] for value in new)
    assert after["text_config"]["eos_token_id"] == [new[0], 1]


def test_stages_of_convolutions_keep_their_ratio_and_groups_divide_them() -> None:
    after = small({"block_out_channels": (320, 640, 1280, 1280), "norm_num_groups": 32, "layers_per_block": 2})
    first, *rest = after["block_out_channels"]
    assert first < 320
    assert rest == [2 * first, 4 * first, 4 * first]
    assert all(width % after["norm_num_groups"] == 0 for width in (first, *rest))


def test_the_tokens_of_an_image_follow_its_size() -> None:
    vision = {"image_size": 896, "patch_size": 14, "hidden_size": 1152, "num_attention_heads": 16}
    after = small({"mm_tokens_per_image": 256, "vision_config": vision})  # squares of four by four of 64 x 64 patches
    assert after["vision_config"]["image_size"] == 56
    assert after["vision_config"]["patch_size"] == 14
    assert after["mm_tokens_per_image"] == 1


def test_windows_of_stages_divide_the_image() -> None:
    after = small({"image_size": 224, "patch_size": 4, "window_size": 7, "embed_dim": 96, "num_heads": [3, 6, 12, 24]})
    assert after["image_size"] // 4 % after["window_size"] == 0
    assert after["num_heads"] == [1, 2, 4, 8]
    assert after["embed_dim"] % after["num_heads"][0] == 0


@pytest.mark.parametrize(
    "name", ["max_position_embeddings", "num_mel_bins", "kernel_size", "num_channels", "sampling_rate"]
)
def test_what_says_no_size_of_the_model_stays(name: str) -> None:
    assert small({"hidden_size": 768, "num_attention_heads": 12, name: 1024})[name] == 1024
