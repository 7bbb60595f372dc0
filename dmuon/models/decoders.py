"""Parameters of decoder-only language models, from the fields of their configurations.

Names and shapes are those of the classes of the same name in transformers 5, as listed on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass

from dmuon.models.fields import Fields
from dmuon.slots import Slot


@dataclass(frozen=True)
class Family:
    """What tells one Llama-like architecture from another.

    ``biases`` are those of q/k/v, o and the MLP: true, false, or the name of the field that says.
    ``head_dim`` is the default where the configuration has none; None: hidden size / heads.
    ``heads_default``: key/value heads default to the query heads instead of being required.
    ``experts`` names the field with the number of experts, for those that have any.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    head_dim: int | None = None
    heads_default: bool = False
    qk_norm: bool = False
    sandwich_norm: bool = False
    fused: bool = False
    tied: bool = False
    experts: str = ""
    expert_size: str = "moe_intermediate_size"
    shared_expert: bool = False


FAMILIES = {
    "llama": Family("attention_bias", "attention_bias", "mlp_bias", heads_default=True),
    "mistral": Family(),
    "mixtral": Family(experts="num_local_experts", expert_size="intermediate_size"),
    "phi3": Family(heads_default=True, fused=True),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias="qkv_bias", experts="num_experts", shared_expert=True),
    "qwen3": Family("attention_bias", "attention_bias", head_dim=128, qk_norm=True),
    "qwen3_moe": Family("attention_bias", "attention_bias", qk_norm=True, experts="num_experts"),
    "gemma": Family("attention_bias", "attention_bias", head_dim=256, tied=True),
    "gemma2": Family("attention_bias", "attention_bias", head_dim=256, sandwich_norm=True, tied=True),
    "gemma3_text": Family(
        "attention_bias", "attention_bias", head_dim=256, qk_norm=True, sandwich_norm=True, tied=True
    ),
}


def causal_lm(config: Fields, family: Family) -> list[Slot]:
    """A language model with its head: ``model.…`` and ``lm_head``."""
    tied = config.flag("tie_word_embeddings", family.tied)
    return with_head(decoder(config, family, "model"), "model.embed_tokens.weight", tied)


def with_head(slots: list[Slot], embedding: str, tied: bool) -> list[Slot]:
    """Add the output head: an alias of the embedding if ``tied``, else a weight of the same shape."""
    shared = next(slot for slot in slots if slot.name == embedding)
    if not tied:
        return [*slots, Slot("lm_head.weight", shared.shape, "head")]
    alias = Slot(shared.name, shared.shape, shared.kind, aliases=("lm_head.weight",))
    return [alias if slot is shared else slot for slot in slots]


def decoder(config: Fields, family: Family, prefix: str) -> list[Slot]:
    """Embedding, blocks and final norm, without a head."""
    width = config.size("hidden_size")
    slots = [Slot(f"{prefix}.embed_tokens.weight", (config.size("vocab_size"), width), "embedding")]
    dense_only = config.integers("mlp_only_layers")
    every = config.size("decoder_sparse_step", default=1)
    for layer in range(config.layers()):
        block = f"{prefix}.layers.{layer}"
        sparse = bool(family.experts) and layer not in dense_only and (layer + 1) % every == 0
        slots += attention(config, family, f"{block}.self_attn")
        slots += experts(config, family, f"{block}.mlp") if sparse else mlp(config, family, f"{block}.mlp")
        names = ["input_layernorm", "post_attention_layernorm"]
        if family.sandwich_norm:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        slots += [norm(f"{block}.{name}", width) for name in names]
    return [*slots, norm(f"{prefix}.norm", width)]


def attention(config: Fields, family: Family, prefix: str) -> list[Slot]:
    """Query, key, value and output projections (one fused matrix for the first three in Phi-3)."""
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=heads if family.heads_default else None)
    head = config.size("head_dim", default=family.head_dim or width // heads)
    q, kv = heads * head, kv_heads * head
    output = linear(f"{prefix}.o_proj", width, q, _flag(config, family.o_bias))
    if family.fused:
        return [*linear(f"{prefix}.qkv_proj", q + 2 * kv, width), *output]
    bias = _flag(config, family.qkv_bias)
    slots = [
        slot
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        for slot in linear(f"{prefix}.{name}", rows, width, bias)
    ]
    norms = [norm(f"{prefix}.{name}", head) for name in ("q_norm", "k_norm")] if family.qk_norm else []
    return [*slots, *output, *norms]


def mlp(config: Fields, family: Family, prefix: str, size: str = "intermediate_size") -> list[Slot]:
    """A gated MLP; ``size`` is the field with its inner width."""
    width, inner, bias = config.size("hidden_size"), config.size(size), _flag(config, family.mlp_bias)
    down = linear(f"{prefix}.down_proj", width, inner, bias)
    if family.fused:
        return [*linear(f"{prefix}.gate_up_proj", 2 * inner, width), *down]
    gate = linear(f"{prefix}.gate_proj", inner, width, bias)
    return [*gate, *linear(f"{prefix}.up_proj", inner, width, bias), *down]


def experts(config: Fields, family: Family, prefix: str) -> list[Slot]:
    """A router and stacked experts, gate and up projections fused, with Qwen2's shared expert."""
    width, inner = config.size("hidden_size"), config.size(family.expert_size)
    count = config.size(family.experts)
    slots = [
        Slot(f"{prefix}.gate.weight", (count, width)),
        Slot(f"{prefix}.experts.gate_up_proj", (count, 2 * inner, width)),
        Slot(f"{prefix}.experts.down_proj", (count, width, inner)),
    ]
    if family.shared_expert:
        slots += mlp(config, family, f"{prefix}.shared_expert", "shared_expert_intermediate_size")
        slots += linear(f"{prefix}.shared_expert_gate", 1, width)
    return slots


def linear(name: str, rows: int, cols: int, bias: bool = False) -> list[Slot]:
    """A linear layer's weight of (fan-out, fan-in) and, if it has one, its bias."""
    return [
        Slot(f"{name}.weight", (rows, cols), "linear"),
        *([Slot(f"{name}.bias", (rows,))] if bias else []),
    ]


def norm(name: str, width: int) -> Slot:
    """The weight of an RMS norm."""
    return Slot(f"{name}.weight", (width,), "norm")


def _flag(config: Fields, bias: bool | str) -> bool:
    if isinstance(bias, bool):
        return bias
    return config.flag(bias, default=bias == "qkv_bias")
