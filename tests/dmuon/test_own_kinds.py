"""Models of many kinds: policy, ownership, training, clipping, saving and resuming equal one process."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from own_models import HOW, difference, mesh_of
from own_processes import outcome, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dmuon

WIDTH, ROWS = 16, 4
TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IMAGES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 12,
}


@dataclass(frozen=True)
class Kind:
    """A model, what to shard beside the root, its loss on some rows, and which weights are matrices."""

    build: Callable[[], nn.Module]
    blocks: Callable[[Any], list[nn.Module]]
    loss: Callable[[Any, torch.Generator, slice], Tensor]
    # The last two parts of their names.
    matrices: set[str]
    policy: dmuon.MatrixPolicy | None = None


def from_config(name: str, **fields: Any) -> nn.Module:
    import transformers

    config = transformers.CONFIG_MAPPING[name].from_dict(fields)
    mappings = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING)
    model_class = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    # Of the ways to run experts, the plain one takes fp64.
    model: nn.Module = model_class._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return model


def language_loss(model: Any, generator: torch.Generator, rows: slice) -> Tensor:
    tokens = torch.randint(TEXT["vocab_size"], (ROWS, 7), generator=generator)[rows]
    return F.cross_entropy(model(input_ids=tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


def image_loss(model: Any, generator: torch.Generator, rows: slice) -> Tensor:
    pixels = torch.randn(ROWS, 3, 12, 12, generator=generator, dtype=torch.float64)[rows]
    wanted = torch.randn(ROWS, 1, WIDTH, generator=generator, dtype=torch.float64)[rows]
    return (model(pixel_values=pixels).last_hidden_state - wanted).square().mean()


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Towers(nn.Module):
    """Deep and narrow sees; wide and flat acts, on seven numbers. Each tower's lists hold its own blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, stride=4)
        self.seeing = nn.ModuleList(Layer(12, 20) for _ in range(5))
        self.bridge = nn.Linear(12, 64, bias=False)
        self.acting = nn.ModuleList([Layer(64, 8)])
        self.state, self.action_head = nn.Linear(7, 64), nn.Linear(64, 7)

    def forward(self, pixels: Tensor, state: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        for layer in self.seeing:
            x = layer(x)
        y = self.bridge(x.mean(1)) + self.state(state)
        for layer in self.acting:
            y = layer(y)
        return self.action_head(F.layer_norm(y, (64,)))


def action_loss(model: Any, generator: torch.Generator, rows: slice) -> Tensor:
    pixels = torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64)[rows]
    state = torch.randn(2, ROWS, 7, generator=generator, dtype=torch.float64)[:, rows]
    return (model(pixels, state[0]) - state[1]).square().mean()


class Adapted(nn.Module):
    """A frozen linear layer and its trainable correction, which LoRA begins with a zero factor."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def adapted_towers() -> nn.Module:
    model = Towers().requires_grad_(False)
    for layer in (*model.seeing, *model.acting):
        layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
    return model


def tower_blocks(model: Any) -> list[nn.Module]:
    return [*model.seeing, *model.acting]


def layers_of(model: Any) -> list[nn.Module]:
    return list(model.model.layers)


ATTENTION = {f"self_attn.{part}_proj" for part in "qkvo"}
MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
KINDS = {
    "llama": Kind(lambda: from_config("llama", **TEXT), layers_of, language_loss, ATTENTION | MLP),
    "qwen, tied": Kind(
        lambda: from_config("qwen2", **TEXT, tie_word_embeddings=True),
        layers_of,
        language_loss,
        ATTENTION | MLP,
    ),
    "stacked experts": Kind(
        lambda: from_config(
            "qwen3_moe", **TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=4
        ),
        layers_of,
        language_loss,
        ATTENTION | {"mlp.gate", "experts.gate_up_proj", "experts.down_proj"},
    ),
    "vision": Kind(
        lambda: from_config("siglip_vision_model", **IMAGES, vision_use_head=False),
        lambda model: [module for module in model.modules() if type(module).__name__ == "SiglipEncoderLayer"],
        image_loss,
        {f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")}
        | {"mlp.fc1", "mlp.fc2", "embeddings.patch_embedding"},
    ),
    "towers": Kind(
        Towers,
        tower_blocks,
        action_loss,
        {"patches", "seeing.up", "seeing.down", "bridge", "acting.up", "acting.down", "state"},
    ),
    "LoRA": Kind(
        adapted_towers,
        tower_blocks,
        action_loss,
        {"up.lora_A", "up.lora_B", "down.lora_A", "down.lora_B"},
        dmuon.MatrixPolicy(include=["*.lora_?.weight"]),
    ),
}
NEEDS_TRANSFORMERS = {"llama", "qwen, tied", "stacked experts", "vision"}


def short(name: str) -> str:
    return ".".join(re.sub(r"\.\d+|\.weight$", "", name).split(".")[-2:])


def owned_copy(kind: Kind, seed: int, reshard: bool) -> tuple[nn.Module, Any, dmuon.Muon]:
    torch.manual_seed(seed)
    model = kind.build().double()
    owned = dmuon.own(model, mesh_of(), policy=kind.policy, reshard_after_forward=reshard)
    for module in (*kind.blocks(model), model):
        fully_shard(module, mesh=mesh_of(), reshard_after_forward=reshard, ignored_params=owned.params)
    return model, owned, dmuon.Muon(model, **HOW)


def train(name: str, folder: str) -> dict[str, Any]:
    """Two steps, a checkpoint, and a third step of another model that loads it; beside one process."""
    kind = KINDS[name]
    torch.manual_seed(0)
    reference = kind.build().double()
    frozen = {name: p.clone() for name, p in reference.named_parameters() if not p.requires_grad}
    alone = dmuon.Muon(reference, policy=kind.policy, **HOW)
    described = {each.name for each in dmuon.describe(reference, kind.policy).routings if each.matrices}
    model, owned, optimizer = owned_copy(kind, 0, reshard=True)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each_rows = [slice(k * ROWS // ranks, (k + 1) * ROWS // ranks) for k in range(ranks)]
    loss_error = norm_error = 0.0
    for step in range(3):
        if step == 2:
            dmuon.save_checkpoint(folder, model, optimizer, extra={"step": step})
            model, owned, optimizer = owned_copy(kind, 1, reshard=False)
            assert dmuon.load_checkpoint(folder, model, optimizer) == {"step": step}

        def loss_on(model: nn.Module, rows: slice, step: int = step) -> Tensor:
            return kind.loss(model, torch.Generator().manual_seed(step), rows)

        loss = loss_on(model, each_rows[rank])
        loss.backward()
        expected = torch.stack([loss_on(reference, rows) for rows in each_rows]).mean()
        expected.backward()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        loss_error = max(loss_error, (mean - expected).abs().item())
        norm = dmuon.clip_grad_norm_(model, 0.1)
        norm_error = max(
            norm_error, (norm - nn.utils.clip_grad_norm_(reference.parameters(), 0.1)).abs().item()
        )
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    return {
        "described": described,
        "owned": set(owned.parameters),
        "loss": loss_error,
        "norm": norm_error,
        "weights": difference(model, owned, reference),
        "frozen": all(torch.equal(dict(reference.named_parameters())[key], p) for key, p in frozen.items()),
    }


def train_all(names: list[str], folder: str) -> dict[str, dict[str, Any]]:
    return {name: train(name, f"{folder}/{name}") for name in names}


def check(name: str, result: dict[str, Any]) -> None:
    assert result["owned"] == result["described"]
    assert {short(each) for each in result["owned"]} == KINDS[name].matrices
    assert max(result[key] for key in ("loss", "norm", "weights")) < 1e-10, result


@pytest.mark.parametrize("names", [["towers", "LoRA"], ["vision", "qwen, tied"]], ids=" and ".join)
def test_equals_one_process(names: list[str], tmp_path: Path) -> None:
    _compare(names, tmp_path)


@pytest.mark.slow
def test_more_kinds_equal_one_process(tmp_path: Path) -> None:
    _compare(["llama", "stacked experts"], tmp_path)


def _compare(names: list[str], folder: Path) -> None:
    if NEEDS_TRANSFORMERS & set(names) and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    for results in run_ranks(2, train_all, names, str(folder)):
        for name, result in results.items():
            check(name, result)


def own_adapted() -> str:
    return outcome(lambda: dmuon.own(adapted_towers(), mesh_of()))


def test_with_lora_alone_there_is_nothing_to_own() -> None:
    for message in run_ranks(2, own_adapted):
        assert message == (
            "ValueError: the policy finds no trainable matrix in the model: there is nothing to own; "
            "it has 43 x takes no gradient, 24 x LoRA factor"
        )
