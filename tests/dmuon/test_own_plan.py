"""Which modules' matrices travel together."""

from __future__ import annotations

from own_models import GPT
from torch import nn

from dmuon.ownership.buckets import block_of


def test_blocks_are_found() -> None:
    model = GPT(layers=2)
    assert block_of(model, "blocks.1.up.weight") == "blocks.1"
    assert block_of(model, "mixer.weight") == ""
    # A ModuleDict of parts, as in nanoGPT: a ModuleList is an element of it, but nobody can call one.
    parts = nn.ModuleDict({"transformer": nn.ModuleDict({"h": nn.ModuleList([nn.Linear(4, 4)])})})
    assert block_of(parts, "transformer.h.0.weight") == "transformer.h.0"
    assert block_of(model, "blocks.1.up.weight", [model.blocks[1].up]) == "blocks.1.up"
    assert block_of(model, "blocks.0.up.weight", [model.blocks[1].up]) == ""
