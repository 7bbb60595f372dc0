"""From a configuration's ``model_type`` to the list of the model's parameters, without transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dmuon.models.decoders import FAMILIES, causal_lm, decoder, linear, norm, with_head
from dmuon.models.fields import Fields
from dmuon.slots import Slot


def gpt2(config: Fields) -> list[Slot]:
    """GPT-2: fused query, key and value; weights stored (in, out)."""
    width, inner = config.size("n_embd"), config.size("n_inner", default=4 * config.size("n_embd"))
    if config.flag("add_cross_attention"):
        raise ValueError(f"{config.where}: a gpt2 with add_cross_attention is not described")

    def conv1d(name: str, cols: int, rows: int) -> list[Slot]:
        return [Slot(f"{name}.weight", (cols, rows), "linear_transposed"), Slot(f"{name}.bias", (rows,))]

    slots = [
        Slot("transformer.wte.weight", (config.size("vocab_size"), width), "embedding"),
        Slot("transformer.wpe.weight", (config.size("n_positions"), width), "embedding"),
    ]
    for layer in range(config.layers("n_layer")):
        block = f"transformer.h.{layer}"
        slots += [*layer_norm(f"{block}.ln_1", width), *conv1d(f"{block}.attn.c_attn", width, 3 * width)]
        slots += [*conv1d(f"{block}.attn.c_proj", width, width), *layer_norm(f"{block}.ln_2", width)]
        slots += [*conv1d(f"{block}.mlp.c_fc", width, inner), *conv1d(f"{block}.mlp.c_proj", inner, width)]
    slots += layer_norm("transformer.ln_f", width)
    return with_head(slots, "transformer.wte.weight", config.flag("tie_word_embeddings", default=True))


def siglip(config: Fields) -> list[Slot]:
    """SigLIP: a text and a vision tower."""
    text, vision = config.object("text_config"), config.object("vision_config")
    width = text.size("hidden_size", default=768)
    embeddings = "text_model.embeddings"
    return [
        Slot("logit_scale", (1,)),
        Slot("logit_bias", (1,)),
        Slot(
            f"{embeddings}.token_embedding.weight",
            (text.size("vocab_size", default=32000), width),
            "embedding",
        ),
        Slot(
            f"{embeddings}.position_embedding.weight",
            (text.size("max_position_embeddings", default=64), width),
            "embedding",
        ),
        *siglip_encoder(text, "text_model.encoder"),
        *layer_norm("text_model.final_layer_norm", width),
        Slot("text_model.head.weight", (text.size("projection_size", default=width), width), "head"),
        Slot("text_model.head.bias", (text.size("projection_size", default=width),)),
        *siglip_vision(vision, "vision_model."),
    ]


def siglip_vision(config: Fields, prefix: str = "") -> list[Slot]:
    """SigLIP's vision tower; defaults are those of transformers' SiglipVisionConfig."""
    width = config.size("hidden_size", default=768)
    patch, channels = config.size("patch_size", default=16), config.size("num_channels", default=3)
    patches = (config.size("image_size", default=224) // patch) ** 2
    slots = [
        Slot(f"{prefix}embeddings.patch_embedding.weight", (width, channels, patch, patch), "conv"),
        Slot(f"{prefix}embeddings.patch_embedding.bias", (width,)),
        Slot(f"{prefix}embeddings.position_embedding.weight", (patches, width), "embedding"),
        *siglip_encoder(config, f"{prefix}encoder"),
        *layer_norm(f"{prefix}post_layernorm", width),
    ]
    if not config.flag("vision_use_head", default=True):
        return slots
    head, inner = f"{prefix}head", config.size("intermediate_size", default=3072)
    return [
        *slots,
        Slot(f"{head}.probe", (1, 1, width), "head"),
        Slot(f"{head}.attention.in_proj_weight", (3 * width, width)),
        Slot(f"{head}.attention.in_proj_bias", (3 * width,)),
        *linear(f"{head}.attention.out_proj", width, width, bias=True),
        *layer_norm(f"{head}.layernorm", width),
        *linear(f"{head}.mlp.fc1", inner, width, bias=True),
        *linear(f"{head}.mlp.fc2", width, inner, bias=True),
    ]


def siglip_encoder(config: Fields, prefix: str) -> list[Slot]:
    """The transformer blocks of either tower."""
    width = config.size("hidden_size", default=768)
    inner = config.size("intermediate_size", default=3072)
    slots: list[Slot] = []
    for layer in range(config.layers("num_hidden_layers", default=12)):
        block = f"{prefix}.layers.{layer}"
        slots += layer_norm(f"{block}.layer_norm1", width)
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            slots += linear(f"{block}.self_attn.{name}", width, width, bias=True)
        slots += layer_norm(f"{block}.layer_norm2", width)
        slots += linear(f"{block}.mlp.fc1", inner, width, bias=True)
        slots += linear(f"{block}.mlp.fc2", width, inner, bias=True)
    return slots


def paligemma(config: Fields, prefix: str = "model") -> list[Slot]:
    """PaliGemma: SigLIP, a projector and Gemma; with its head when ``prefix`` is the top level's."""
    text, vision = config.object("text_config"), config.object("vision_config")
    projected = config.size("projection_dim", default=2048)
    language = f"{prefix}.language_model"
    family = FAMILIES[_model_type(text, ("gemma", "gemma2"))]
    slots = [
        *siglip_vision(vision, f"{prefix}.vision_tower."),
        *linear(
            f"{prefix}.multi_modal_projector.linear",
            projected,
            vision.size("hidden_size", default=768),
            bias=True,
        ),
        *decoder(text, family, language),
    ]
    if prefix != "model":
        return slots
    tied = config.flag("tie_word_embeddings", default=True)
    return with_head(slots, f"{language}.embed_tokens.weight", tied)


def pi0(config: Fields) -> list[Slot]:
    """π0: PaliGemma, a small Gemma as action expert, and the projections of states and actions."""
    vlm, expert = config.object("vlm_config"), config.object("dit_config")
    width = expert.size("hidden_size")
    vocabulary = vlm.object("text_config").size("vocab_size")
    expert = Fields({**expert.data, "vocab_size": vocabulary}, expert.where)
    action = config.size("max_action_dim", default=32)
    embed = "embed_action_time"
    return [
        *decoder(expert, FAMILIES["gemma"], "model.dit"),
        *paligemma(vlm, "model.vlm"),
        *linear(f"{embed}.action_in_proj", width, action, bias=True),
        *linear(f"{embed}.state_proj", width, config.size("max_state_dim", default=32), bias=True),
        *linear(f"{embed}.action_time_mlp_in", width, 2 * width, bias=True),
        *linear(f"{embed}.action_time_mlp_out", width, width, bias=True),
        *linear("action_out_proj", action, width, bias=True),
    ]


def qwen2_5_vl(config: Fields) -> list[Slot]:
    """Qwen2.5-VL: a vision transformer with fused query, key and value, a merger, and Qwen2."""
    # The published files have the language model's fields at the top level; newer ones nest them.
    text = config.object("text_config") if config.has("text_config") else config
    vision = config.object("vision_config")
    width, inner = vision.size("hidden_size"), vision.size("intermediate_size", default=3420)
    channels = vision.size("in_channels", default=vision.size("in_chans", default=3))
    patch, frames = vision.size("patch_size", default=14), vision.size("temporal_patch_size", default=2)
    merged = width * vision.size("spatial_merge_size", default=2) ** 2
    slots = [Slot("model.visual.patch_embed.proj.weight", (width, channels, frames, patch, patch), "conv")]
    for layer in range(vision.layers("depth", default=32)):
        block = f"model.visual.blocks.{layer}"
        slots += [norm(f"{block}.norm1", width), norm(f"{block}.norm2", width)]
        slots += linear(f"{block}.attn.qkv", 3 * width, width, bias=True)
        slots += linear(f"{block}.attn.proj", width, width, bias=True)
        for name in ("gate_proj", "up_proj"):
            slots += linear(f"{block}.mlp.{name}", inner, width, bias=True)
        slots += linear(f"{block}.mlp.down_proj", width, inner, bias=True)
    slots += [norm("model.visual.merger.ln_q", width)]
    slots += linear("model.visual.merger.mlp.0", merged, merged, bias=True)
    slots += linear(
        "model.visual.merger.mlp.2", vision.size("out_hidden_size", default=3584), merged, bias=True
    )
    slots += decoder(text, FAMILIES["qwen2"], "model.language_model")
    tied = config.flag("tie_word_embeddings") or text.flag("tie_word_embeddings")
    return with_head(slots, "model.language_model.embed_tokens.weight", tied)


def layer_norm(name: str, width: int) -> list[Slot]:
    """Weight and bias of a layer norm."""
    return [norm(name, width), Slot(f"{name}.bias", (width,))]


def _model_type(config: Fields, known: tuple[str, ...]) -> str:
    model_type = config.data.get("model_type", known[0])
    if model_type not in known:
        raise ValueError(f"{config.where}: model_type must be one of {', '.join(known)}, got {model_type!r}")
    return str(model_type)


BUILDERS: dict[str, Callable[[Fields], list[Slot]]] = {
    **{name: partial(causal_lm, family=family) for name, family in FAMILIES.items()},
    "gpt2": gpt2,
    "paligemma": paligemma,
    "pi0": pi0,
    "qwen2_5_vl": qwen2_5_vl,
    "siglip": siglip,
    "siglip_vision_model": siglip_vision,
}
