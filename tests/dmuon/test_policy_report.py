"""``describe`` and the short forms of names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dmuon
from dmuon.names import merge_patterns, name_pattern


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(3)
        )
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)


def test_describe_reads_well_and_counts_right() -> None:
    with torch.device("meta"):
        description = dmuon.describe(Tiny())
    text = str(description)
    assert text == repr(description)
    lines = text.splitlines()
    assert lines[0] == "Muon: 6 parameters, 6 matrices, 768 elements"
    assert lines[1].split() == ["count", "shape", "as", "reason", "names"]
    assert lines[2].split()[-1] == "layers.*.up.weight"
    assert [word for word in lines[2].split() if word.isdigit()] == ["3"]
    assert "AdamW: 7 parameters, 8,072 elements" in lines
    assert "Frozen: 1 parameter, 64 elements" in lines
    assert lines[-1] == f"Total: 14 parameters, {768 + 8072 + 64:,} elements"
    assert all(line == line.rstrip() for line in lines)


def test_describe_iterates_over_every_parameter_in_order() -> None:
    model = Tiny()
    assert [routing.name for routing in dmuon.describe(model)] == [
        name for name, _ in model.named_parameters()
    ]
    assert len(dmuon.describe(model)) == 14


def test_describe_follows_the_policy() -> None:
    policy = dmuon.MatrixPolicy(exclude=["*.down.weight"], splits={"*.up.weight": (8, 8)})
    text = str(dmuon.describe(Tiny(), policy))
    assert "Muon: 3 parameters, 6 matrices" in text
    assert "8×8 + 8×8" in text
    assert "excluded by '*.down.weight'" in text


def test_describe_of_nothing() -> None:
    assert str(dmuon.describe(nn.ReLU())) == "Total: 0 parameters, 0 elements"


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        dmuon.describe(3)  # type: ignore[arg-type]


def test_only_whole_parts_are_numbers() -> None:
    assert name_pattern("h.10.mlp.fc1.weight") == "h.*.mlp.fc1.weight"


def test_merging() -> None:
    assert merge_patterns([]) == []
    assert merge_patterns(["h.0.x", "h.1.x"]) == ["h.*.x"]
    assert merge_patterns(["h.0.q_proj.w", "h.0.o_proj.w"]) == ["h.*.{q,o}_proj.w"]
    assert merge_patterns(["c_attn.w", "c_proj.w"]) == ["c_{attn,proj}.w"]
    assert merge_patterns(["a_b_c", "a_c"]) == ["a_{b_c,c}"]
    # Two parts differ, or the lengths do: braces would name parameters that do not exist.
    assert merge_patterns(["a.q.w", "b.k.w"]) == ["a.q.w", "b.k.w"]
    assert merge_patterns(["a.w", "a.b.w"]) == ["a.w", "a.b.w"]
    assert merge_patterns(["a.q.w", "a.k.w", "b.q.w"]) == ["a.{q,k}.w", "b.q.w"]
