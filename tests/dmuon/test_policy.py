"""Which parameters are matrices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from dmuon.policy import MatrixPolicy, Routing, Slot


class Conv1D(nn.Module):
    """Stands in for transformers' layer of that name, which stores (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.zeros(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(3, 16, 4))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(3, 16))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 128)
        self.c_attn = Conv1D(24, 8)
        self.norm = nn.LayerNorm((4, 8))
        self.gate = nn.Linear(8, 1, bias=False)
        self.experts = Experts()
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.odd = nn.Parameter(torch.zeros(6, 8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.patch = nn.Conv2d(3, 8, 2)
        self.lm_head = nn.Linear(8, 11, bias=False)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def by_name(routings: list[Routing]) -> dict[str, Routing]:
    return {routing.name: routing for routing in routings}


def sizes(routing: Routing) -> list[tuple[int, int, int]]:
    return [(matrix.batch, matrix.rows, matrix.cols) for matrix in routing.matrices]


def test_default_rules() -> None:
    routings = MatrixPolicy().route_model(Model())
    assert [routing.name for routing in routings] == [name for name, _ in Model().named_parameters()]
    matrices = {name: sizes(routing) for name, routing in by_name(routings).items() if routing.matrices}
    assert matrices == {
        "patch.weight": [(1, 8, 12)],
        **{f"blocks.{i}.qkv.weight": [(1, 128, 8)] for i in (0, 1)},
        **{f"blocks.{i}.c_attn.weight": [(1, 24, 8)] for i in (0, 1)},
        **{f"blocks.{i}.experts.gate_up_proj": [(3, 16, 4)] for i in (0, 1)},
        **{f"blocks.{i}.odd": [(1, 6, 8)] for i in (0, 1)},
    }
    reasons = {routing.name: routing.reason for routing in routings if not routing.matrices}
    assert reasons["embed_tokens.weight"] == "embedding"
    assert reasons["lm_head.weight"] == "output head"
    assert reasons["blocks.0.norm.weight"] == "normalisation"
    assert reasons["blocks.0.qkv.bias"] == "bias"
    assert reasons["blocks.0.experts.gate_up_proj_bias"] == "bias"
    assert reasons["blocks.0.gate.weight"].startswith("a vector in shape")
    assert reasons["blocks.0.pos_embed"] == "embedding"
    assert all((routing.algorithm == "muon") == bool(routing.matrices) for routing in routings)


def test_frozen_parameters_stay_frozen_even_when_included() -> None:
    model = Model()
    model.blocks[0].qkv.weight.requires_grad_(False)
    routing = by_name(MatrixPolicy(include=["*.qkv.weight"]).route_model(model))["blocks.0.qkv.weight"]
    assert (routing.algorithm, routing.matrices) == ("frozen", ())


def test_tied_head_counts_once_and_goes_with_the_embedding() -> None:
    model = Model()
    model.lm_head.weight = model.embed_tokens.weight
    routings = MatrixPolicy().route_model(model)
    assert len(routings) == len(list(model.parameters()))
    tied = by_name(routings)["embed_tokens.weight"]
    assert (tied.algorithm, tied.aliases) == ("adamw", ("lm_head.weight",))

    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 11, bias=False)
            self.embed = nn.Embedding(11, 8)
            self.out.weight = self.embed.weight

    [tied] = MatrixPolicy().route_model(HeadFirst())
    assert (tied.name, tied.algorithm, tied.aliases) == ("out.weight", "adamw", ("embed.weight",))


def test_what_is_tied_to_a_head_goes_with_it() -> None:
    model = nn.ModuleDict({"body": nn.Linear(8, 8, bias=False), "lm_head": nn.Linear(8, 8, bias=False)})
    model["lm_head"].weight = model["body"].weight
    [routing] = MatrixPolicy().route_model(model)
    assert (routing.name, routing.reason) == ("body.weight", "output head")


def test_weights_shared_across_depth_are_one_matrix() -> None:
    layer = nn.Linear(8, 8, bias=False)
    [routing] = MatrixPolicy().route_model(nn.Sequential(layer, nn.ReLU(), layer))
    assert (routing.algorithm, routing.aliases) == ("muon", ("2.weight",))


def test_head_by_get_output_embeddings() -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8, bias=False)
            self.to_words = nn.Linear(8, 11, bias=False)

        def get_output_embeddings(self) -> nn.Module:
            return self.to_words

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Unusual()

    for model in (Unusual(), Wrapped()):
        assert [routing.algorithm for routing in MatrixPolicy().route_model(model)] == ["muon", "adamw"]


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("lm_head.weight", True),
        ("model.score.weight", True),
        ("module.lm_head._orig_mod.weight", True),
        ("lm_head.modules_to_save.default.weight", True),
        ("fc.weight", True),
        ("policy.action_head.weight", True),
        ("value_head.2.weight", True),
        ("action_head.blocks.0.attn.qkv.weight", False),
        ("blocks.0.multihead.weight", False),
        ("layers.3.fc.weight", False),
        ("encoder.layer.0.output.dense.weight", False),
        ("vision_model.head.mlp.fc1.weight", False),
    ],
)
def test_heads_by_name(name: str, head: bool) -> None:
    [routing] = MatrixPolicy().route_named([(name, parameter(8, 16))])
    assert (routing.reason == "output head") == head


@pytest.mark.case(row="P6")
@pytest.mark.parametrize(
    "name",
    [
        "q_proj.lora_A.default.weight",
        "q_proj.lora_B.weight",
        "embed.lora_embedding_A.default",
        "layers.0.lora_A",
        "to_q.lora.down.weight",
        "attn1.processor.to_q_lora.up.weight",
    ],
)
def test_lora_factors_are_adamws_unless_named(name: str) -> None:
    pair = [(name, parameter(4, 64))]
    assert MatrixPolicy().route_named(pair)[0].reason == "LoRA factor"
    included = MatrixPolicy(include=["*lora*"]).route_named(pair)[0]
    assert sizes(included) == [(1, 4, 64)]


def test_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv1d(6, 8, 3),
        nn.Conv3d(2, 8, 3),
        nn.Conv2d(8, 12, 3, groups=4),
        nn.Conv1d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 6, 3, groups=2),
    )
    found = [sizes(routing) for routing in MatrixPolicy().route_model(model) if "weight" in routing.name]
    # A depthwise filter is a row per channel: no matrix. A transposed convolution is (out × kernel, in).
    assert found == [[(1, 8, 18)], [(1, 8, 54)], [(4, 3, 18)], [], [(2, 27, 4)]]


@pytest.mark.case(row="P5")
@pytest.mark.parametrize("make", [nn.Linear, lambda fan_in, fan_out: Conv1D(fan_out, fan_in)])
def test_splits_cut_output_features(make: type[nn.Linear]) -> None:
    model = nn.ModuleDict({"qkv": make(32, 128)})
    routing = by_name(MatrixPolicy(splits={"*qkv.weight": (96, 16, 16)}).route_model(model))["qkv.weight"]
    assert sizes(routing) == [(1, 96, 32), (1, 16, 32), (1, 16, 32)]
    assert "96 + 16 + 16" in routing.reason


def test_splits_cut_each_expert() -> None:
    policy = MatrixPolicy(splits={"*.gate_up_proj": (8, 8)})
    routing = by_name(policy.route_model(Model()))["blocks.0.experts.gate_up_proj"]
    assert sizes(routing) == [(3, 8, 4), (3, 8, 4)]


@pytest.mark.case(row="P5")
def test_splits_that_do_not_add_up_raise() -> None:
    with pytest.raises(ValueError, match=r"blocks\.0\.qkv\.weight.*\(96, 16\).*112.*\(128, 8\).*128"):
        MatrixPolicy(splits={"*.qkv.weight": (96, 16)}).route_model(Model())
    with pytest.raises(ValueError, match="4 groups"):
        MatrixPolicy(splits={"0.weight": (2, 1)}).route_model(nn.Sequential(nn.Conv2d(8, 12, 3, groups=4)))


def test_splits_do_not_make_a_matrix_of_what_is_none() -> None:
    routing = by_name(MatrixPolicy(splits={"*.qkv.*": (96, 16, 16)}).route_model(Model()))[
        "blocks.0.qkv.bias"
    ]
    assert routing.algorithm == "adamw"


def test_overrides_by_glob_type_and_predicate() -> None:
    excluded = MatrixPolicy(exclude=["blocks.0.*", Experts, lambda slot: slot.kind == "conv"])
    left = {routing.name for routing in excluded.route_model(Model()) if routing.matrices}
    assert left == {"blocks.1.qkv.weight", "blocks.1.c_attn.weight", "blocks.1.odd"}

    included = by_name(MatrixPolicy(include=[nn.Embedding, "lm_head.*"]).route_model(Model()))
    assert sizes(included["embed_tokens.weight"]) == [(1, 11, 8)]
    assert sizes(included["lm_head.weight"]) == [(1, 11, 8)]

    both = MatrixPolicy(include=["lm_head.*"], exclude=["lm_*", "lm_head.weight"])
    assert by_name(both.route_model(Model()))["lm_head.weight"].reason == "excluded by 'lm_*'"


def test_an_override_never_makes_a_matrix_of_a_vector() -> None:
    routing = by_name(MatrixPolicy(include=["*.qkv.*"]).route_model(Model()))["blocks.0.qkv.bias"]
    assert (routing.algorithm, routing.matrices) == ("adamw", ())


@pytest.mark.parametrize("field", ["include", "exclude"])
def test_an_override_that_matches_nothing_is_warned_about(field: str) -> None:
    with pytest.warns(UserWarning, match=f"{field}: '.*typo.*' matches no parameter"):
        MatrixPolicy(**{field: ["*.typo.weight"]}).route_model(Model())


def test_bad_overrides_are_refused() -> None:
    with pytest.raises(TypeError, match=r"write \['\*'\]"):
        MatrixPolicy(include="*")
    with pytest.raises(TypeError, match="got 3"):
        MatrixPolicy(exclude=[3])
    for sizes_ in ((), (1, 0), (1.5,), (True,)):
        with pytest.raises(ValueError, match="positive integers"):
            MatrixPolicy(splits={"*": sizes_})


@pytest.mark.case(row="P2")
def test_meta_and_placeholders_route_as_the_real_model() -> None:
    with torch.device("meta"):
        on_meta = Model()
    policy = MatrixPolicy(splits={"*.qkv.weight": (96, 16, 16)})
    assert policy.route_model(on_meta) == policy.route_model(Model())

    class Placeholder:
        shape = torch.Size([128, 8])

    [routing] = MatrixPolicy(splits={"*.qkv.weight": (96, 32)}).route_named([("a.qkv.weight", Placeholder())])
    assert sizes(routing) == [(1, 96, 8), (1, 32, 8)]


def test_named_tensors_go_by_name_and_shape() -> None:
    def route(name: str, *shape: int) -> str:
        [routing] = MatrixPolicy().route_named([(name, parameter(*shape))])
        return routing.algorithm

    assert route("", 4, 4) == route("0", 3, 4, 4) == route("w", 8, 3, 2, 2) == "muon"
    assert route("layers.0.mlp.up_proj.weight", 8, 4) == "muon"
    assert route("model.embedding_projection.weight", 8, 4) == "muon"
    assert route("visual.patch_embed.weight", 8, 3, 2, 2) == "muon"
    for name in (
        "model.embed_tokens.weight",
        "wpe.weight",
        "attn.relative_attention_bias.weight",
        "pos_embed",
    ):
        assert route(name, 16, 8) == "adamw"
    assert route("mixer.conv1d.weight", 8, 1, 4) == "adamw"
    assert route("mixer.A_log", 8, 4) == "adamw"


def test_the_same_tensor_under_two_names_is_one() -> None:
    weight = parameter(4, 4)
    [routing] = MatrixPolicy().route_named([("a.weight", weight), ("b.weight", weight)])
    assert routing.aliases == ("b.weight",)


@pytest.mark.case(row="P2")
def test_sharded_parameters_route_by_their_logical_shape() -> None:
    """R5: on 4 ranks each sees a quarter of the rows, and the split rule must not."""
    script = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from dmuon.policy import MatrixPolicy
torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (4,))
model = nn.ModuleDict({"qkv": nn.Linear(32, 128, bias=False)})
policy = MatrixPolicy(splits={"qkv.weight": (96, 16, 16)})
whole = policy.route_model(model)
model["qkv"].weight = nn.Parameter(distribute_tensor(model["qkv"].weight.detach(), mesh, [Shard(0)]))
assert model["qkv"].weight.to_local().shape == (32, 32)
assert policy.route_model(model) == whole
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_route_is_a_function_of_the_slot_alone() -> None:
    routing = MatrixPolicy().route(Slot("h.0.attn.c_attn.weight", (768, 2304), "linear_transposed"))
    assert sizes(routing) == [(1, 2304, 768)]
    assert MatrixPolicy().route(Slot("x", (0, 4))).algorithm == "adamw"
    assert MatrixPolicy().route(Slot("x", ())).algorithm == "adamw"
