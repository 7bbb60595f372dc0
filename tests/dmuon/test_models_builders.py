"""The builders against transformers' own modules on the meta device, and presets against published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmuon.models import load_shapes, preset_names, shape_spec
from dmuon.models.builders import BUILDERS
from dmuon.models.configs import slots_of_config
from dmuon.models.presets import preset_config
from dmuon.policy import MatrixPolicy, Routing

# From the model cards: exact where they are given exactly, as counted in the published checkpoints.
PUBLISHED = {
    "gpt2": 124_439_808,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen3-30b-a3b": 30_532_122_624,
}

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 5, "moe_intermediate_size": 24, "mlp_only_layers": [2], "decoder_sparse_step": 1}
SIGLIP = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {**SIGLIP, "patch_size": 7, "image_size": 28}
GEMMA = {**SMALL, "model_type": "gemma", "head_dim": 16}
PALIGEMMA = {
    "projection_dim": 48,
    "text_config": GEMMA,
    "vision_config": {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 48}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"vocab_size": 97, "n_positions": 33, "n_embd": 24, "n_layer": 2, "n_head": 3}),
    ("gpt2", {"vocab_size": 97, "n_positions": 33, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 50}),
    ("llama", SMALL),
    (
        "llama",
        {**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True},
    ),
    ("mistral", SMALL),
    ("mixtral", {**SMALL, "num_local_experts": 5}),
    ("phi3", {**SMALL, "pad_token_id": 0}),
    ("qwen2", {**SMALL, "tie_word_embeddings": True}),
    ("qwen2_moe", {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 40}),
    ("qwen2_moe", {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 40, "qkv_bias": False}),
    ("qwen3", SMALL),
    ("qwen3_moe", {**SMALL, **EXPERTS, "decoder_sparse_step": 2, "head_dim": 16}),
    ("gemma", SMALL),
    ("gemma2", {**SMALL, "attention_bias": True}),
    ("gemma3_text", SMALL),
    ("siglip", {"text_config": {**SIGLIP, "projection_size": 20}, "vision_config": VISION}),
    ("siglip", {"text_config": {}, "vision_config": {}}),
    ("siglip_vision_model", VISION),
    ("siglip_vision_model", {**VISION, "vision_use_head": False}),
    ("paligemma", PALIGEMMA),
    ("paligemma", {**PALIGEMMA, "text_config": {**GEMMA, "model_type": "gemma2"}}),
    (
        "pi0",
        {"vlm_config": {"model_type": "paligemma", **PALIGEMMA}, "dit_config": {**GEMMA, "hidden_size": 24}},
    ),
    ("qwen2_5_vl", {**SMALL, "tie_word_embeddings": True, "vision_config": QWEN_VISION}),
    ("qwen2_5_vl", {"text_config": SMALL, "vision_config": {"hidden_size": 32, "num_heads": 4}}),
]


def real_model(config: dict[str, Any]) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    hf_config = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    autos = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        transformers.MODEL_MAPPING,
    )
    if config["model_type"] == "pi0":
        model_class = transformers.PI0ForConditionalGeneration
    else:
        model_class = next(auto[type(hf_config)] for auto in autos if type(hf_config) in auto)
    with torch.device("meta"):
        model: nn.Module = model_class._from_config(hf_config)
    return model


def by_name(routings: list[Routing]) -> dict[str, Routing]:
    return {routing.name: routing for routing in routings}


def assert_as_transformers(config: dict[str, Any]) -> None:
    policy = MatrixPolicy()
    built = by_name(policy.route_slots(slots_of_config(config, "test")))
    real = by_name(policy.route_model(real_model(config)))
    assert {name: routing.shape for name, routing in built.items()} == {
        name: routing.shape for name, routing in real.items()
    }
    assert built == real


@pytest.mark.parametrize(
    ("model_type", "fields"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_builder_lists_what_transformers_builds(model_type: str, fields: dict[str, Any]) -> None:
    assert_as_transformers({"model_type": model_type, **fields})


def test_every_builder_is_compared() -> None:
    assert {model_type for model_type, _ in CASES} == set(BUILDERS)


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_what_transformers_builds(name: str) -> None:
    assert_as_transformers(preset_config(name)[1])


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_preset_has_the_published_size(name: str) -> None:
    assert load_shapes(name).numel == PUBLISHED[name]


def test_pi0_has_the_published_sizes() -> None:
    """openpi: an action expert of 311M beside a PaliGemma of 2.92B; the unused embedding is transformers'."""
    sizes = {"model.vlm.": 0, "model.dit.layers.": 0, "model.dit.embed_tokens.": 0}
    for routing in load_shapes("pi0").parameters:
        for prefix in sizes:
            sizes[prefix] += routing.numel if routing.name.startswith(prefix) else 0
    assert round(sizes["model.dit.layers."] / 1e6) == 311
    assert round(sizes["model.vlm."] / 1e9, 2) == 2.92
    assert sizes["model.dit.embed_tokens."] == 257_152 * 1024


def test_all_presets_are_checked_and_say_their_source() -> None:
    assert set(preset_names()) == {*PUBLISHED, "pi0"}
    assert all(load_shapes(name).source for name in preset_names())
    assert load_shapes("GPT2") == load_shapes("gpt2")


def test_matrices_of_a_preset_by_hand() -> None:
    """Qwen2.5-7B: 28 layers of width 3584 with 4 key/value heads of 128 and an MLP of 18944."""
    found = {(shape.m, shape.n): (shape.count, shape.names) for shape in load_shapes("qwen2.5-7b").matrices()}
    assert found == {
        (3584, 18944): (28 * 3, ("model.layers.*.mlp.{gate,up,down}_proj.weight",)),
        (3584, 3584): (28 * 2, ("model.layers.*.self_attn.{q,o}_proj.weight",)),
        (512, 3584): (28 * 2, ("model.layers.*.self_attn.{k,v}_proj.weight",)),
    }


def test_experts_count_one_by_one() -> None:
    found = {(shape.m, shape.n): shape.count for shape in load_shapes("qwen3-30b-a3b").matrices()}
    assert found[1536, 2048] == found[768, 2048] == 48 * 128


def test_most_work_first() -> None:
    work = [shape.operations for shape in load_shapes("pi0").matrices()]
    assert work == sorted(work, reverse=True)
    [shape] = shape_spec("3x2", count=5).matrices()
    assert shape.operations == 5 * (6 * 2 * 2 * 3 + 14 * 2 * 2 * 2)
