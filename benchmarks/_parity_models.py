"""Pairs of whole models: twins of transformers, timm and torch, caches, batches, padding, experts, losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import timm.layers
import timm.models.vision_transformer
import torch
import transformers as T
from _parity_pair import draw, enliven, honest, planted
from torch import nn

from ampcheck.parity import Batch, Chunks, Microbatches

Dtype = torch.dtype
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.15}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 24}
CHOSEN = {"num_experts_per_tok": 2}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", SMALL),
    "mistral": ("Mistral", SMALL | {"sliding_window": 6}),
    "gemma2": ("Gemma2", SMALL | {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", SMALL),
    "olmo2": ("Olmo2", SMALL),
    "gpt2": ("GPT2", GPT2),
    "neox": ("GPTNeoX", PLAIN),
    "opt": ("OPT", PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.15}),
    "mixtral": ("Mixtral", SMALL | {"num_local_experts": 4}),
    "qwen2 moe": (
        "Qwen2Moe",
        SMALL | EXPERTS | {"shared_expert_intermediate_size": 24, "norm_topk_prob": True, **CHOSEN},
    ),
    "olmoe": ("Olmoe", SMALL | EXPERTS | CHOSEN),
}
"""Causal language models, small."""
TOKENS = torch.randint(3, 64, (4, 10), generator=torch.Generator().manual_seed(1))


def language_model(name: str, dtype: Dtype, attention: str = "eager", **changes: Any) -> Any:
    """A small causal language model with random weights, which `changes` of its configuration leave as they are."""
    family, options = ARCHITECTURES[name]
    config = getattr(T, f"{family}Config")(**options)
    config._attn_implementation = attention
    model_type = T.GPT2LMHeadModel if family == "GPT2" else getattr(T, f"{family}ForCausalLM")
    torch.manual_seed(0)
    model = enliven(model_type(config), dtype)
    if not changes:
        return model
    other = copy.deepcopy(config)
    other._attn_implementation = attention
    for key, value in changes.items():
        setattr(other, key, value)
    changed = model_type(other).to(dtype).eval()
    changed.load_state_dict(model.state_dict())
    return changed


class Logits(nn.Module):
    """A model of transformers as a function from its first argument to its logits or states."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Logits, or the last states."""
        out = self.model(*args, **self.options, **kwargs)
        return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state


def logits(name: str, dtype: Dtype, attention: str = "eager", **changes: Any) -> Logits:
    return Logits(language_model(name, dtype, attention, **changes), use_cache=False)


# Attention implementations, caches, batches ---------------------------------------------------------------------------

BOTH = ("bfloat16", "float32")
ALL = ("bfloat16", "float16", "float32")

for _name in ("llama", "gpt2", "opt", "neox", "mixtral", "qwen3"):

    @honest("back end", *(ALL if _name in ("llama", "gpt2") else BOTH), name=f"{_name} with eager attention and sdpa")
    def _eager_and_sdpa(dtype: Dtype, name: str = _name) -> Any:
        return logits(name, dtype), logits(name, dtype, "sdpa"), (TOKENS[:2],)


for _name in ("llama", "qwen2", "mistral", "gemma2", "phi3", "gpt2", "neox", "opt", "olmo2"):

    @honest("cache", *(ALL if _name == "llama" else ("bfloat16",)), name=f"{_name} decoding with its cache")
    def _decoded(dtype: Dtype, name: str = _name) -> Any:
        return language_model(name, dtype), Chunks(1), (TOKENS[:2, :8],)

    @honest("cache", *(ALL if _name == "llama" else ("bfloat16",)), name=f"{_name} prefilled in chunks of 4")
    def _in_chunks(dtype: Dtype, name: str = _name) -> Any:
        return language_model(name, dtype), Chunks(4), (TOKENS[:2],)


for _name in ("llama", "gpt2", "qwen2 moe"):

    @honest("batch", *BOTH, name=f"{_name}, rows of a batch alone")
    def _alone(dtype: Dtype, name: str = _name) -> Any:
        return logits(name, dtype), Batch(), (TOKENS,)


for _name in ("mixtral", "qwen2 moe", "olmoe"):
    for _how in ("batched_mm", "grouped_mm"):

        @honest("experts", *BOTH, name=f"experts of {_name} in a loop and by {_how}")
        def _experts(dtype: Dtype, name: str = _name, how: str = _how) -> Any:
            ours, theirs = logits(name, dtype), logits(name, dtype)
            ours.model.set_experts_implementation("eager")
            theirs.model.set_experts_implementation(how)
            return ours, theirs, (TOKENS[:2],)


def step(positions: Callable[[int, int], Any] | None = None, mask: Callable[[int], Any] | None = None) -> Any:
    """A step of `Chunks` with positions or a mask of its own."""

    def decode(model: Any, chunk: torch.Tensor, state: Any) -> tuple[Any, Any]:
        seen = 0 if state is None else state.get_seq_length()
        options: dict[str, Any] = {}
        if positions is not None:
            options["position_ids"] = torch.tensor([positions(seen, i) for i in range(chunk.shape[1])])[None]
        if mask is not None and state is not None:
            options["attention_mask"] = mask(seen + chunk.shape[1]).expand(len(chunk), -1)
        out = model(chunk, past_key_values=state, use_cache=True, **options)
        return out.logits, out.past_key_values

    return decode


@planted("cache", "positions stay at 5", r"rotary|mul|outer|bmm|matmul|_to_copy|cos|embedding", *BOTH)
def llama_decoding_at_stuck_positions(dtype: Dtype) -> Any:
    return (
        language_model("llama", dtype),
        Chunks(1, step=step(lambda seen, i: min(seen + i, 5) if seen else i)),
        (TOKENS[:2, :8],),
    )


@planted("cache", "positions one too far after the first chunk", r"wpe|embedding|add", *BOTH)
def gpt2_chunks_one_position_off(dtype: Dtype) -> Any:
    off = step(lambda seen, i: seen + i + (seen > 0))
    return language_model("gpt2", dtype), Chunks(4, step=off), (TOKENS[:2],)


@planted("cache", "the first token is masked in later chunks", r"aten::(_softmax|add|where)", *BOTH)
def qwen2_chunks_that_mask_the_first_token(dtype: Dtype) -> Any:
    hide = step(mask=lambda length: (torch.arange(length) > 0).long()[None])
    return language_model("qwen2", dtype), Chunks(4, step=hide), (TOKENS[:2],)


@planted("cache", "a window of 5 for 6", r"softmax|add|mask|where|lt|le", *BOTH)
def mistral_with_another_window(dtype: Dtype) -> Any:
    return logits("mistral", dtype), logits("mistral", dtype, sliding_window=5), (TOKENS[:2],)


class Rolled(nn.Module):
    """A model that mixes the rows of a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.norm = model, nn.BatchNorm1d(64)

    def forward(self, x: Any) -> Any:
        """Logits that are normalised over the batch."""
        out = self.model(x)
        return self.norm(out.transpose(1, 2).float()).transpose(1, 2)


@planted("batch", "a batch norm in training mode", r"batch_norm|norm", *BOTH)
def llama_whose_rows_are_mixed(dtype: Dtype) -> Any:
    return Rolled(logits("llama", dtype)).train(), Batch(2), (TOKENS,)


# Padding and losses ---------------------------------------------------------------------------------------------------


def padded(model: Any, *, mask: bool = True, positions: bool = True) -> Callable[..., Any]:
    """A model on its tokens behind three of padding."""

    def on_padded(tokens: torch.Tensor) -> Any:
        front = torch.zeros(len(tokens), 3, dtype=torch.long)
        seen = torch.cat([front, torch.ones_like(tokens)], 1)
        options: dict[str, Any] = {"attention_mask": seen} if mask else {}
        if positions:
            options["position_ids"] = (seen.cumsum(-1) - 1).clamp_min(0)
        return model(torch.cat([front, tokens], 1), **options)[:, 3:]

    return on_padded


for _name in ("llama", "gpt2", "opt"):

    @honest("padding", *BOTH, name=f"{_name} behind padding with mask and positions")
    def _behind_padding(dtype: Dtype, name: str = _name) -> Any:
        model = logits(name, dtype)
        return model, padded(model, positions=name != "opt"), (TOKENS[:2],)


@planted("padding", "no mask, and positions that count the padding", r"aten::(_softmax|add|where)", *BOTH)
def llama_behind_padding_without_a_mask(dtype: Dtype) -> Any:
    model = logits("llama", dtype)
    return model, padded(model, mask=False, positions=False), (TOKENS[:2],)


@planted("padding", "positions that count the padding", r"wpe|embedding|add", *BOTH)
def gpt2_behind_padding_without_positions(dtype: Dtype) -> Any:
    model, places = logits("gpt2", dtype), torch.arange(13)[None]

    def counted(tokens: torch.Tensor, attention_mask: Any, position_ids: Any) -> Any:
        return model(tokens, position_ids=places, attention_mask=attention_mask)

    return model, padded(counted), (TOKENS[:2],)


LABELS = TOKENS.clone()
UNEVEN = torch.where(torch.arange(10) < torch.tensor([[10], [10], [4], [3]]), TOKENS, -100)


def loss_of(model: Any) -> Callable[..., Any]:
    """The loss of a batch, as a function of embeddings, which gradients are taken of."""

    def loss(embedded: Any, labels: Any) -> Any:
        return model(inputs_embeds=embedded, labels=labels, use_cache=False).loss

    return loss


for _name in ("llama", "gpt2"):

    @honest("loss", *ALL, name=f"loss of {_name} in micro-batches")
    def _micro(dtype: Dtype, name: str = _name) -> Any:
        return loss_of(language_model(name, dtype)), Microbatches(2), (draw(4, 10, 32, dtype=dtype), LABELS)


@planted("loss", "means over other numbers of tokens", r"div|mul|add|nll|loss", *BOTH)
def loss_of_llama_in_uneven_micro_batches(dtype: Dtype) -> Any:
    return loss_of(language_model("llama", dtype)), Microbatches(2), (draw(4, 10, 32, dtype=dtype), UNEVEN)


@planted("loss", "no division by the number of micro-batches", r"mul|add|nll|loss", *BOTH)
def loss_of_gpt2_without_the_division(dtype: Dtype) -> Any:
    loss = loss_of(language_model("gpt2", dtype))

    def summed(x: Any, labels: Any) -> Any:
        return sum(loss(x[i : i + 2], labels[i : i + 2]) for i in (0, 2))

    return loss, summed, (draw(4, 10, 32, dtype=dtype), LABELS)


# Changes of one number ------------------------------------------------------------------------------------------------


@planted("change", "eps of 1e-5 for 1e-6 in every norm", r"layernorm.*aten::add", *ALL)
def llama_with_another_eps(dtype: Dtype) -> Any:
    return logits("llama", dtype), logits("llama", dtype, rms_norm_eps=1e-5), (TOKENS[:2],)


@planted("change", "scale of attention in layer 1 times 1.01", r"layers\.1\.self_attn.*aten::mul", *BOTH)
def mistral_with_a_scale_in_one_layer(dtype: Dtype) -> Any:
    other = logits("mistral", dtype)
    other.model.model.layers[1].self_attn.scaling *= 1.01
    return logits("mistral", dtype), other, (TOKENS[:2],)


@planted("change", "gelu by the error function for tanh", r"mlp\.act.*(mul|gelu|pow)", *BOTH)
def gpt2_with_another_gelu(dtype: Dtype) -> Any:
    return logits("gpt2", dtype), logits("gpt2", dtype, activation_function="gelu"), (TOKENS[:2],)


@planted("change", "soft cap of 29 for 30", r"aten::div", *BOTH)
def gemma2_with_another_soft_cap(dtype: Dtype) -> Any:
    return logits("gemma2", dtype), logits("gemma2", dtype, final_logit_softcapping=29.0), (TOKENS[:2],)


@planted("change", "a base of 10,050 for 10,000", r"rotary|mul|self_attn", *BOTH)
def qwen2_with_another_base(dtype: Dtype) -> Any:
    other = logits("qwen2", dtype)
    other.model.model.rotary_emb.inv_freq = 10050.0 ** -(torch.arange(0, 8, 2).float() / 8)
    return logits("qwen2", dtype), other, (TOKENS[:2],)


@planted("change", "one expert for two", r"router|gate|topk|experts", *BOTH)
def mixtral_with_one_expert(dtype: Dtype) -> Any:
    other = logits("mixtral", dtype)
    for module in other.model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 1
    return logits("mixtral", dtype), other, (TOKENS[:2],)


@planted("change", "weights of the experts not normal", r"gate|router|div|mul|experts", *BOTH)
def qwen2_moe_without_normal_weights(dtype: Dtype) -> Any:
    other = logits("qwen2 moe", dtype)
    for module in other.model.modules():
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = False
    return logits("qwen2 moe", dtype), other, (TOKENS[:2],)


@planted("change", "the weight of one projection not copied", r"layers\.1\.mlp\.up_proj", *BOTH)
def llama_with_a_weight_that_is_not_copied(dtype: Dtype) -> Any:
    other = logits("llama", dtype)
    with torch.no_grad():
        other.model.model.layers[1].mlp.up_proj.weight.copy_(draw(48, 32, seed=5, dtype=dtype, scale=0.15))
    return logits("llama", dtype), other, (TOKENS[:2],)


@planted("change", "one weight of 1,536 off by a sixteenth of itself", r"layers\.0\.mlp\.down_proj", *BOTH)
def llama_with_one_wrong_weight(dtype: Dtype) -> Any:
    other = logits("llama", dtype)
    with torch.no_grad():
        other.model.model.layers[0].mlp.down_proj.weight[3, 7] *= 1.0625
    return logits("llama", dtype), other, (TOKENS[:2],)


@planted("change", "layers exchanged", r"layers\.[01]|embed|norm|mul", *BOTH)
def llama_with_its_layers_exchanged(dtype: Dtype) -> Any:
    other = logits("llama", dtype)
    layers = other.model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    return logits("llama", dtype), other, (TOKENS[:2],)


@planted("change", "the residual of one layer left out", r"layers\.1|add", *BOTH)
def llama_without_a_residual(dtype: Dtype) -> Any:
    other = logits("llama", dtype)
    mlp = other.model.model.layers[1].mlp
    forward = mlp.forward
    norm = other.model.model.layers[1].post_attention_layernorm
    kept: list[Any] = []
    norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    mlp.forward = lambda x: forward(x) - kept[-1]
    return logits("llama", dtype), other, (TOKENS[:2],)


# Twins ----------------------------------------------------------------------------------------------------------------


def vision(dtype: Dtype, **changes: Any) -> tuple[Any, Any]:
    """A ViT of transformers and one of timm with its weights."""
    config = T.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        initializer_range=0.15, layer_norm_eps=1e-6,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    ours = enliven(T.ViTModel(config, add_pooling_layer=False), dtype)
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, mlp_ratio=1.5, num_classes=0, **changes
    )
    theirs.load_state_dict(as_timm(ours.state_dict()))
    return Logits(ours), Features(theirs.to(dtype).eval())


def as_timm(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a ViT under timm's names."""
    names = {
        "embeddings.cls_token": "cls_token",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
        "layernorm": "norm",
    }
    inside = {"layernorm_before": "norm1", "layernorm_after": "norm2", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    inside |= {"attention.o_proj": "attn.proj"}
    result, parts = {}, {}
    for key, value in state.items():
        module, kind = key.rsplit(".", 1)
        if key in names or module in names:
            result[names.get(key) or f"{names[module]}.{kind}"] = value
            continue
        _, number, path = module.split(".", 2)
        if path[-6:] in ("q_proj", "k_proj", "v_proj"):
            parts[number, kind, path[-6]] = value
        else:
            result[f"blocks.{number}.{inside[path]}.{kind}"] = value
    for number, kind in {key[:2] for key in parts}:
        result[f"blocks.{number}.attn.qkv.{kind}"] = torch.cat([parts[number, kind, part] for part in "qkv"])
    return result


class Features(nn.Module):
    """A model of timm as a function to its last states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        """The last states."""
        return self.model.forward_features(x)


def image(dtype: Dtype) -> tuple[torch.Tensor]:
    return (draw(2, 3, 16, 16, dtype=dtype),)


@honest("twin", *ALL)
def vit_of_transformers_and_timm(dtype: Dtype) -> Any:
    return *vision(dtype), image(dtype)


@honest("twin", *BOTH)
def vit_of_transformers_and_timm_module_by_module(dtype: Dtype) -> Any:
    names = {"model.layernorm": "model.norm"}
    return *vision(dtype), image(dtype), {"modules": names}


@planted("twin", "eps of 1e-5 for 1e-6", r"norm", *BOTH)
def vit_of_timm_with_another_eps(dtype: Dtype) -> Any:
    return *vision(dtype, norm_layer=partial(nn.LayerNorm, eps=1e-5)), image(dtype)


@planted("twin", "gelu by tanh", r"gelu|act", *BOTH)
def vit_of_timm_with_another_gelu(dtype: Dtype) -> Any:
    return *vision(dtype, act_layer=timm.layers.GELUTanh), image(dtype)


@planted("twin", "embeddings of positions not copied", r"add|pos_embed|cat|embeddings", *BOTH)
def vit_of_timm_without_positions(dtype: Dtype) -> Any:
    ours, theirs = vision(dtype)
    with torch.no_grad():
        theirs.model.pos_embed.zero_()
    return ours, theirs, image(dtype)


@planted("twin", "queries and keys exchanged in one layer", r"blocks\.1\.attn|attention", *BOTH)
def vit_of_timm_with_queries_for_keys(dtype: Dtype) -> Any:
    ours, theirs = vision(dtype)
    qkv = theirs.model.blocks[1].attn.qkv
    with torch.no_grad():
        for parameter in (qkv.weight, qkv.bias):
            q, k, v = (part.clone() for part in parameter.chunk(3))
            parameter.copy_(torch.cat([k, q, v]))
    return ours, theirs, image(dtype)


HEADS = ("query", "key", "value")


def bert_and_torch(dtype: Dtype, **changes: Any) -> tuple[Any, Any]:
    """The layers of a BERT of transformers and those of torch's encoder with its weights."""
    config = T.BertConfig(**PLAIN, layer_norm_eps=1e-12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    ours = enliven(T.models.bert.modeling_bert.BertEncoder(config), dtype)
    options: dict[str, Any] = {"activation": "gelu", "layer_norm_eps": 1e-12} | changes
    layers = [nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True, **options) for _ in range(2)]
    for mine, its in zip(ours.layer, layers, strict=True):
        heads = mine.attention.self
        state = {
            f"self_attn.in_proj_{kind}": torch.cat([getattr(getattr(heads, part), kind) for part in HEADS])
            for kind in ("weight", "bias")
        }
        parts = {"self_attn.out_proj": mine.attention.output.dense, "norm1": mine.attention.output.LayerNorm}
        parts |= {"linear1": mine.intermediate.dense, "linear2": mine.output.dense, "norm2": mine.output.LayerNorm}
        state |= {f"{path}.{name}": value for path, part in parts.items() for name, value in part.state_dict().items()}
        its.load_state_dict(state)
    return Logits(ours), nn.Sequential(*layers).to(dtype).eval()


def states(dtype: Dtype) -> tuple[torch.Tensor]:
    return (draw(2, 10, 32, dtype=dtype),)


@honest("twin", *ALL)
def bert_of_transformers_and_encoder_of_torch(dtype: Dtype) -> Any:
    return *bert_and_torch(dtype), states(dtype)


@planted("twin", "eps of 1e-5 for 1e-12", r"norm", *BOTH)
def encoder_of_torch_with_another_eps(dtype: Dtype) -> Any:
    return *bert_and_torch(dtype, layer_norm_eps=1e-5), states(dtype)


@planted("twin", "the norm before the layer", r"norm|attention|self_attn|linear|addmm", *BOTH)
def encoder_of_torch_with_the_norm_first(dtype: Dtype) -> Any:
    return *bert_and_torch(dtype, norm_first=True), states(dtype)


@planted("twin", "relu for gelu", r"relu|gelu", *BOTH)
def encoder_of_torch_with_relu(dtype: Dtype) -> Any:
    return *bert_and_torch(dtype, activation="relu"), states(dtype)


def clip(dtype: Dtype, **changes: Any) -> tuple[Any, Any]:
    """The vision tower of CLIP and timm's ViT with its weights."""
    config = T.CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        initializer_range=0.15, initializer_factor=5.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    ours = enliven(T.CLIPVisionModel(config), dtype)
    options: dict[str, Any] = {"act_layer": timm.layers.QuickGELU, "norm_layer": partial(nn.LayerNorm, eps=1e-5)}
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, mlp_ratio=1.5, num_classes=0,
        pre_norm=True, **options | changes,
    )  # fmt: skip
    renamed = {"pre_layrnorm": "norm_pre", "post_layernorm": "norm", "embeddings.patch_embedding": "patch_embed.proj"}
    inside = {"layer_norm1": "norm1", "layer_norm2": "norm2", "self_attn.out_proj": "attn.proj"}
    state, parts = {}, {}
    for key, value in ours.state_dict().items():
        key = key.removeprefix("vision_model.")
        module, kind = key.rsplit(".", 1)
        if key == "embeddings.class_embedding":
            state["cls_token"] = value[None, None]
        elif module == "embeddings.position_embedding":
            state["pos_embed"] = value[None]
        elif module in renamed:
            state[f"{renamed[module]}.{kind}"] = value
        elif module.startswith("encoder.layers"):
            _, _, number, path = module.split(".", 3)
            if path[-6:] in ("q_proj", "k_proj", "v_proj"):
                parts[number, kind, path[-6]] = value
            else:
                state[f"blocks.{number}.{inside.get(path, path)}.{kind}"] = value
    for number, kind in {key[:2] for key in parts}:
        state[f"blocks.{number}.attn.qkv.{kind}"] = torch.cat([parts[number, kind, part] for part in "qkv"])
    theirs.load_state_dict(state, strict=False)
    theirs.norm = nn.Identity()  # transformers gives the states before the last norm
    return Logits(ours), Features(theirs.to(dtype).eval())


@honest("twin", *ALL)
def clip_of_transformers_and_vit_of_timm(dtype: Dtype) -> Any:
    return *clip(dtype), image(dtype)


@planted("twin", "gelu for x * sigmoid(1.702 x)", r"act|gelu|sigmoid|mul", *BOTH)
def clip_in_timm_with_gelu(dtype: Dtype) -> Any:
    return *clip(dtype, act_layer=nn.GELU), image(dtype)


@planted("twin", "no norm before the layers", r"norm", *BOTH)
def clip_in_timm_without_its_first_norm(dtype: Dtype) -> Any:
    ours, theirs = clip(dtype)
    theirs.model.norm_pre = nn.Identity()
    return ours, theirs, image(dtype)


@honest("twin", *BOTH)
def t5_of_transformers_eager_and_sdpa(dtype: Dtype) -> Any:
    def encoder(attention: str) -> Any:
        config = T.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
        config._attn_implementation = attention
        torch.manual_seed(0)
        return Logits(enliven(T.T5EncoderModel(config), dtype))

    return encoder("eager"), encoder("sdpa"), (TOKENS[:2],)


@planted("twin", "the largest distance is 12 for 128", r"bias|embedding|add|log|where|mul|div", *BOTH)
def t5_with_other_buckets(dtype: Dtype) -> Any:
    def encoder(buckets: int) -> Any:
        config = T.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        model = enliven(T.T5EncoderModel(config), dtype)
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_max_distance = buckets
        return Logits(model)

    return encoder(128), encoder(12), (torch.cat([TOKENS[:2]] * 2, 1),)
