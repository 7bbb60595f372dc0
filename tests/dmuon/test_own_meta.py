"""Models that were built on the meta device: values as in one process, memory as if they had always been shared."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_models import HOW, difference, mesh_of, wrap
from own_processes import outcome, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dmuon


class Turn(nn.Module):
    """A rotary table: no parameter, and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(16), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles = torch.arange(16) / 16

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.turn = nn.LayerNorm(16), Turn()
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.turn(self.norm(x)))))


class Net(nn.Module):
    """Tokens (batch, time) to logits; ``tied``: embedding and head are one."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mixer = nn.Linear(16, 16, bias=False)
        self.average = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 21, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mixer(x))

    def init_weights(self) -> None:
        """Comes back to earlier modules, copies from one to another, writes parts, and reads."""
        self.average.reset_parameters()
        nn.init.trunc_normal_(self.embedding.weight, std=0.02)
        for depth, block in enumerate(self.blocks, 1):
            block.turn.reset_parameters()
            block.norm.reset_parameters()
            nn.init.orthogonal_(block.up.weight)
            block.up.bias.data.normal_(std=float(block.up.weight.std()))
            block.down.weight.uniform_(-1, 1)
            block.down.weight[:, 0].zero_()
            if depth > 1:
                block.down.weight.mul_(0.5).add_(self.blocks[depth - 2].down.weight)
        for parameter in self.parameters():
            if parameter.dim() > 1 and parameter.shape[1] == 40:
                parameter.div_(2**0.5)
        self.mixer.weight.copy_(self.blocks[0].up.weight[:16])
        self.embedding.weight.add_(self.mixer.weight.mean())
        if self.head.weight is not self.embedding.weight:
            self.head.weight.copy_(torch.linspace(0, 1, 21 * 16).view(21, 16))


def on_meta(**options: Any) -> Net:
    with torch.device("meta"):
        return Net(**options)


def seeded(work: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return work()


def differing(model: nn.Module, owned: Any, reference: nn.Module) -> list[str]:
    """The names of the parameters and buffers on this rank that are not bit for bit the reference's."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    here = {n: t for n, t in found.items() if n not in owned.parameters} | owned.masters
    expected = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    assert found.keys() == expected.keys()
    return [
        n for n, t in here.items() if not torch.equal(getattr(t, "full_tensor", lambda t=t: t)(), expected[n])
    ]


def as_built(nodes: int) -> dict[str, Any]:
    reference = seeded(Net)
    model = on_meta()
    before = dict(model.named_parameters())
    model.mixer.weight.mark = "kept"
    owned = wrap(model, mesh_of(nodes))
    seeded(lambda: dmuon.materialize(model))
    found = {
        "differing": differing(model, owned, reference),
        "same objects": all(before[name] is parameter for name, parameter in owned.parameters.items()),
        "mark": getattr(model.mixer.weight, "mark", None),
        "random state": torch.equal(torch.get_rng_state(), seeded(lambda: (Net(), torch.get_rng_state())[1])),
    }
    tokens = torch.arange(2 * 3).view(2, 3)
    optimizer = dmuon.Muon(model, **{**HOW, "precision": "fp32"})
    alone = dmuon.Muon(reference, **{**HOW, "precision": "fp32"})
    for _ in range(2):
        for net, optim in ((model, optimizer), (reference, alone)):
            net(tokens).square().mean().backward()
            optim.step()
            optim.zero_grad()
    return {**found, "trained": difference(model, owned, reference)}


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 2)])
def test_has_the_weights_of_a_single_process(ranks: int, nodes: int) -> None:
    for result in run_ranks(ranks, as_built, nodes):
        assert result.pop("trained") < 1e-5
        assert result == {
            "differing": [],
            "same objects": True,
            "mark": "kept",
            "random state": True,
        }


def own_init(tied: bool, shard_first: bool) -> dict[str, Any]:
    reference = Net(tied)
    with torch.no_grad():
        seeded(reference.init_weights)
    model, mesh = on_meta(tied=tied), mesh_of()
    owned = dmuon.own(model, mesh, compute_dtype=torch.bfloat16)

    def shard() -> None:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, ignored_params=owned.params)

    def give_values() -> None:
        seeded(lambda: dmuon.materialize(model, lambda net: net.init_weights()))

    for act in (shard, give_values) if shard_first else (give_values, shard):
        act()
    return {
        "differing": differing(model, owned, reference),
        "tied": model.head.weight is model.embedding.weight,
    }


@pytest.mark.parametrize(("tied", "shard_first"), [(False, True), (True, True), (True, False)])
def test_any_init_runs_as_in_a_single_process(tied: bool, shard_first: bool) -> None:
    for result in run_ranks(3, own_init, tied, shard_first):
        assert result == {"differing": [], "tied": tied}


def guide() -> bool:
    text = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    code = next(each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "meta" in each)
    names = {"torch": torch, "nn": nn, "dmuon": dmuon, "fully_shard": fully_shard, "mesh": mesh_of()}
    exec(code, names)
    return bool(names["model"](torch.ones(2, 64)).isfinite().all())


def test_the_guide_runs() -> None:
    assert all(run_ranks(2, guide))


def from_checkpoints(folder: str) -> dict[str, Any]:
    """A whole plain state dict, and a checkpoint of a run on as many ranks, into models on the meta device."""
    torch.manual_seed(1)
    reference = Net(tied=True)
    tokens = torch.arange(2 * 3).view(2, 3)
    found = {}

    def resumed(load: Callable[[Any, Any], object]) -> list[str]:
        model = on_meta(tied=True)
        owned = wrap(model, mesh_of())
        model.to_empty(device="cpu")
        for block in model.blocks:
            block.turn.reset_parameters()
        optimizer = dmuon.Muon(model, **{**HOW, "precision": "fp32"})
        load(model, optimizer)
        assert model(tokens).isfinite().all()
        if not Path(folder, "saved").exists():
            dmuon.save_checkpoint(f"{folder}/saved", model, optimizer)
        return differing(model, owned, reference)

    whole = {name: value.clone() for name, value in reference.state_dict().items()}
    found["whole"] = resumed(lambda model, _: model.load_state_dict(whole))
    found["checkpoint"] = resumed(lambda *to: dmuon.load_checkpoint(f"{folder}/saved", *to))
    return found


def test_loads_a_checkpoint(tmp_path: Path) -> None:
    for result in run_ranks(2, from_checkpoints, str(tmp_path)):
        assert result == {"whole": [], "checkpoint": []}


class Wide(nn.Module):
    """24 matrices of 4 MiB."""

    def __init__(self, side: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(side, side) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def memory(give_values: bool) -> tuple[int, int]:
    """How much further this rank's resident memory rises, and the bytes of what it keeps."""

    def run(side: int) -> int:
        with torch.device("meta"):
            model = Wide(side)
        Path("/proc/self/clear_refs").write_text("5")
        before = high_water()
        owned = wrap(model, mesh_of())
        if give_values:
            dmuon.materialize(model)
        else:
            model.to_empty(device="cpu")
        assert [*owned.parameters.values()] == [block.weight for block in model.blocks]
        return high_water() - before, sum(master.nbytes for master in owned.masters.values())

    run(8)  # what a first call loads is not counted
    return run(1024)


def high_water() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("give_values", [True, False])
def test_no_rank_ever_holds_a_whole_model(give_values: bool) -> None:
    matrix = 4 * 2**20
    for peak, kept in run_ranks(3, memory, give_values):
        assert kept == 8 * matrix
        # Beside masters, what is whole for a moment, and what the allocator does not return.
        assert kept <= peak < kept + 6 * matrix


class Kept(nn.Module):
    """Something that is real in a model on the meta device, and something that has no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 5), nn.Linear(5, 5, device="cpu")
        self.register_buffer("table", torch.arange(5.0, device="cpu"))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.layer(x)) * self.scale + self.table


def refusals() -> dict[str, Any]:
    rank = dist.get_rank()

    def fresh(kind: Callable[[], nn.Module] = on_meta) -> tuple[Any, Any]:
        with torch.device("meta"):
            model = kind()
        model.blocks = getattr(model, "blocks", ())
        return model, wrap(model, mesh_of())

    tokens = torch.zeros(1, 3, dtype=torch.long)
    found = {"plain": outcome(lambda: dmuon.materialize(Net()))}
    found["forward"] = outcome(lambda: fresh()[0](tokens))
    model, owned = fresh()
    found["optimizer"] = outcome(lambda: dmuon.Muon(model))
    torch.manual_seed(rank)
    found["seeds"] = outcome(lambda: dmuon.materialize(model))
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    found["plain init"] = outcome(model.mixer.reset_parameters)
    for norm in (*(block.norm for block in model.blocks), model.average):
        norm.reset_parameters()
    found["emptied"] = outcome(lambda: model(tokens))
    for master in [*owned.masters.values()][rank:]:  # on the second rank, one is left
        master.data.fill_(0.5)
    found["one left"] = outcome(lambda: model(tokens))
    for master in owned.masters.values():
        master.data.fill_(0.5)
    found["given"] = outcome(lambda: model(tokens))
    model, _ = fresh()

    def fail(net: nn.Module) -> None:
        if rank == 1:
            raise KeyError("nothing")
        net.apply(reset)

    found["fails"] = outcome(lambda: dmuon.materialize(model, fail))
    torch.manual_seed(0)
    found["leaves"] = outcome(lambda: dmuon.materialize(model, lambda net: net.blocks.apply(reset)))

    def replace(net: nn.Module) -> None:
        net.init_weights()
        net.mixer.weight = nn.Parameter(torch.zeros(16, 16))

    found["replaces"] = outcome(lambda: dmuon.materialize(fresh()[0], replace))
    model, owned = fresh(Kept)
    found["no method"] = outcome(lambda: dmuon.materialize(model))
    model, owned = fresh(Kept)
    kept = torch.equal(model.table, torch.arange(5.0))

    def init(net: nn.Module) -> None:
        net.layer.reset_parameters()
        net.scale.copy_(net.other.weight[:, 0] + net.other.bias)

    given = owned.masters["other.weight"].clone() if "other.weight" in owned.masters else None
    bias = model.other.bias.full_tensor()
    dmuon.materialize(model, init)
    kept = kept and torch.equal(model.other.bias.full_tensor(), bias)
    kept = kept and not model.scale.full_tensor().isnan().any()
    found["kept"] = str(kept and torch.equal(model.table, torch.arange(5.0)))
    if given is not None:
        found["kept"] += str(torch.equal(owned.masters["other.weight"], given))
    found["again"] = outcome(lambda: dmuon.materialize(model, init))
    return found


def reset(module: nn.Module) -> None:
    getattr(module, "reset_parameters", lambda: None)()


def test_what_has_no_values_is_named() -> None:
    first, second = run_ranks(2, refusals)
    for name in first.keys() - {"fails", "kept"}:
        assert first[name] == second[name]
    assert first["plain"].startswith("ValueError: the model is not owned")
    assert "meta" in first["forward"] and "to_empty" in first["forward"]
    assert first["optimizer"].startswith("ValueError: parameter 'embedding.weight' is on the meta device")
    assert first["seeds"].startswith("ValueError: the ranks' random states differ")
    assert "from the meta device by dmuon.materialize" in first["plain init"]
    never = "came from the meta device and never got values: call dmuon.materialize(model)"
    names = [f"blocks.{k}.{layer}.weight" for k in range(3) for layer in ("up", "down")]
    assert f"{', '.join(map(repr, names[:5]))} and 2 more {never}" in first["emptied"]
    assert never in first["one left"] and "," not in first["one left"].partition(never)[0]
    assert first["given"] == ""
    assert first["fails"] == "RuntimeError: init failed on rank 1: KeyError: 'nothing'"
    assert second["fails"] == "KeyError: 'nothing'"
    assert first["leaves"].startswith("ValueError: init did not write 'embedding.weight', 'mixer.weight', ")
    assert (
        first["replaces"] == "ValueError: init must write parameters in place, but it replaced 'mixer.weight'"
    )
    assert first["no method"].startswith("ValueError: init did not write 'scale': ")
    assert {first["kept"], second["kept"]} == {"True", "TrueTrue"}
    assert first["again"].startswith("ValueError: nothing of the model is on the meta device")
