"""The folder of a checkpoint: whole or not at all, refused where it does not fit, plain to load."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from own_models import HOW, build, mesh_of, wrap
from own_processes import outcome, run_ranks
from own_sessions import train
from torch import Tensor, nn

import dmuon

pytestmark = [
    # What torch says to its own functions, called here beside ours.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def trained(steps: int, seed: int = 0) -> tuple[nn.Module, dmuon.Muon]:
    model = build(seed=seed)
    optimizer = dmuon.Muon(model, **HOW)
    train(model, optimizer, range(steps))
    return model, optimizer


def same(model: nn.Module, other: nn.Module) -> bool:
    others = other.state_dict()
    return all(torch.equal(value, others[name]) for name, value in model.state_dict().items())


def dying(when: str, original: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """``original``, but the process is killed at the call that ``when`` names, as in "open2"."""

    def call(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if when == f"{original.__name__}{len(calls)}":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    return call


def save_and_die(path: Path, when: str) -> None:
    torch.set_num_threads(1)
    later = trained(3)
    Path.open, Path.rename = dying(when, Path.open, []), dying(when, Path.rename, [])  # type: ignore[method-assign]
    dmuon.save_checkpoint(path, *later, extra={"step": 3})


@pytest.mark.case(row="A7")
@pytest.mark.parametrize("when", ["open1", "open2", "open3", "rename2", "rename3", "never"])
def test_a_crash_while_saving_leaves_a_checkpoint(when: str, tmp_path: Path) -> None:
    """Killed before it writes data, metadata and extra values, moves the old one away and the new one in."""
    path = tmp_path / "run"
    dmuon.save_checkpoint(path, *trained(2), extra={"step": 2})
    process = multiprocessing.get_context("forkserver").Process(target=save_and_die, args=(path, when))
    process.start()
    process.join(60)
    assert process.exitcode == (0 if when == "never" else -signal.SIGKILL)
    assert path.exists() == (when != "rename3")

    steps = 3 if when == "never" else 2
    model, optimizer = trained(0, seed=7)
    assert dmuon.load_checkpoint(path, model, optimizer) == {"step": steps}
    assert same(model, trained(steps)[0])
    # The next one is saved over whatever the crash has left.
    dmuon.save_checkpoint(path, *trained(4), extra={"step": 4})
    assert dmuon.load_checkpoint(path, model, optimizer) == {"step": 4}
    assert same(model, trained(4)[0]) and [entry.name for entry in tmp_path.iterdir()] == ["run"]


def rank_dies(path: str) -> str:
    model = build()
    wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, **HOW)
    dmuon.save_checkpoint(path, model, optimizer, extra={"step": 0})
    if dist.get_rank() == 1:
        Path.open = dying("open1", Path.open, [])  # type: ignore[method-assign]
    failure = outcome(lambda: dmuon.save_checkpoint(path, model, optimizer, extra={"step": 1}))
    Path(path).with_name("failure").write_text(failure)
    return failure


@pytest.mark.case(row="A7")
def test_a_rank_that_dies_while_saving_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1: died"):
        run_ranks(2, rank_dies, str(tmp_path / "run"))
    assert (tmp_path / "failure").read_text() != ""
    model, optimizer = trained(0, seed=7)
    assert dmuon.load_checkpoint(tmp_path / "run", model, optimizer) == {"step": 0}
    assert same(model, build())


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    pair = trained(0)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        dmuon.load_checkpoint(tmp_path / "run", *pair)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds 'notes.txt', which is no part of a checkpoint"):
        dmuon.save_checkpoint(tmp_path, *pair)
    with pytest.raises(FileExistsError, match="is a file"):
        dmuon.save_checkpoint(tmp_path / "notes.txt", *pair)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_extra_values_are_plain_and_come_back(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    extra = {
        "step": 1,
        "schedule": schedule.state_dict(),
        "random": torch.get_rng_state(),
        "best": (1.5, None),
    }
    dmuon.save_checkpoint(tmp_path / "run", model, optimizer, extra=extra)
    loaded = dmuon.load_checkpoint(tmp_path / "run", model, optimizer)
    assert torch.equal(loaded.pop("random"), extra.pop("random"))
    assert loaded == extra
    with pytest.raises(TypeError, match="must be a mapping, got int"):
        dmuon.save_checkpoint(tmp_path / "run", model, optimizer, extra=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="extra must hold numbers, strings, tensors"):
        dmuon.save_checkpoint(tmp_path / "run", model, optimizer, extra={"path": tmp_path})
    with pytest.raises(TypeError, match=r"optimizer must be a dmuon\.Muon, got dict"):
        dmuon.save_checkpoint(tmp_path / "run", model, {"step": 1})  # type: ignore[arg-type]
    assert dmuon.load_checkpoint(tmp_path / "run", model)["step"] == 1
    # What torch saves there later is not what these belong to.
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "run")
    assert dmuon.load_checkpoint(tmp_path / "run", model) == {}


class Trap:
    """Unpickling it leaves a file."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("trap"),))


def test_pickled_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = trained(1)
    optimizer.param_groups[0]["momentum"] = Trap()
    state = {
        "model": model.state_dict(),
        "optimizer": dcp.state_dict.get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=tmp_path / "run")
    fresh = trained(0, seed=7)
    with pytest.raises(RuntimeError, match=r"load_checkpoint failed on rank 0: .*Weights only load failed"):
        dmuon.load_checkpoint(tmp_path / "run", *fresh)
    assert not (tmp_path / "trap").exists() and same(fresh[0], build(seed=7))


@pytest.mark.parametrize("damage", ["trap", "eval", "empty", "garbage", "cut"])
def test_an_index_that_is_none_is_refused(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dmuon.save_checkpoint(tmp_path / "run", *trained(0))
    index = tmp_path / "run" / ".metadata"
    whole = index.read_bytes()
    content = {
        "trap": pickle.dumps(Trap()),
        "eval": b'cbuiltins\neval\n(S\'open("trap", "w")\'\ntR.',
        "empty": b"",
        "garbage": bytes(range(256)),
        "cut": whole[: len(whole) // 2],
    }
    index.write_bytes(content[damage])
    fresh = trained(0, seed=7)
    with pytest.raises(RuntimeError, match=r"run/\.metadata is damaged, or not the index of a checkpoint"):
        dmuon.load_checkpoint(tmp_path / "run", *fresh)
    assert not (tmp_path / "trap").exists() and same(fresh[0], build(seed=7))


@pytest.mark.case(row="A5")
def test_names_and_shapes_are_compared_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model, optimizer = trained(2)
    dmuon.save_checkpoint(path, model, optimizer)

    def refused(message: str, change: Callable[[nn.Module], None]) -> tuple[nn.Module, dmuon.Muon]:
        other = build(seed=7)
        change(other)
        resumed = dmuon.Muon(other, **HOW)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            dmuon.load_checkpoint(path, other, resumed)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
        return other, resumed

    def grow(other: nn.Module) -> None:
        other.late = nn.Linear(16, 16).double()

    def shrink(other: nn.Module) -> None:
        del other.mixer

    def widen(other: nn.Module) -> None:
        other.mixer = nn.Linear(16, 8, bias=False).double()

    def freeze(other: nn.Module) -> None:
        other.embedding.requires_grad_(False)

    larger, resumed = refused(r"it lacks 'model.late.bias', 'model.late.weight'", grow)
    refused(
        r"lacks none and has 'model.mixer.weight', 'optimizer.state.mixer.weight.momentum_buffer' too", shrink
    )
    refused(r"mixer.weight.* is \(16, 16\) in the checkpoint, but \(8, 16\) here", widen)
    refused(r"has 'optimizer.state.embedding.weight.exp_avg'", freeze)

    kept = larger.late.weight.detach().clone()
    dmuon.load_checkpoint(path, larger, resumed, strict=False)
    assert torch.equal(larger.late.weight, kept)
    state = larger.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    momentum = optimizer.state[model.mixer.weight]["momentum_buffer"]
    assert torch.equal(resumed.state[larger.mixer.weight]["momentum_buffer"], momentum)
    assert not resumed.state[larger.late.weight]["momentum_buffer"].any()
    # Its own groups stay, with the larger model's names.
    assert "late.weight" in resumed.param_groups[0]["param_names"]
    assert larger.late.weight in set(resumed.param_groups[0]["params"])


@pytest.mark.case(row="A5")
def test_a_checkpoint_from_before_the_variants_loads(tmp_path: Path) -> None:
    model, optimizer = trained(2)
    state = dcp.state_dict.get_optimizer_state_dict(model, optimizer)
    for group in state["param_groups"]:
        for key in ("normuon_beta2", "cautious_decay", "stochastic_rounding"):
            group.pop(key, None)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=tmp_path / "run")
    other = build(seed=7)
    resumed = dmuon.Muon(other, **{**HOW, "lr": 0.7}, cautious_decay=True)
    dmuon.load_checkpoint(tmp_path / "run", other, resumed)
    # What it did then, as load_state_dict has it.
    assert [group["lr"] for group in resumed.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert resumed.param_groups[0]["cautious_decay"] is False
    for each in (model, optimizer), (other, resumed):
        train(*each, range(2, 3))
    assert same(model, other)
    with pytest.raises(ValueError, match="the optimizer has NorMuon's second moment, the checkpoint has not"):
        dmuon.load_checkpoint(tmp_path / "run", other, dmuon.Muon(other, **HOW, normuon_beta2=0.9))


@pytest.mark.case(row="A5")
def test_options_and_schedulers_that_one_side_has(tmp_path: Path) -> None:
    def schedule(optimizer: dmuon.Muon) -> dmuon.Muon:
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.1], total_steps=9)
        return optimizer

    def refused(path: Path, optimizer: dmuon.Muon, *messages: str) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        with pytest.raises(ValueError) as found:
            dmuon.load_checkpoint(path, model, optimizer)
        assert all(message in str(found.value) for message in messages), str(found.value)
        assert ("another model" in str(found.value)) == ("another model" in messages)
        assert ("scheduler" in str(found.value)) == (before in messages or after in messages)
        assert [group["lr"] for group in optimizer.param_groups] == rates
        dmuon.load_checkpoint(path, model, optimizer, strict=False)

    model = build()
    plain, normuon = dmuon.Muon(model, **HOW), dmuon.Muon(model, **HOW, normuon_beta2=0.9)
    scheduled = schedule(dmuon.Muon(model, **HOW, normuon_beta2=0.9))
    paths = {name: tmp_path / name for name in ("plain", "normuon", "scheduled")}
    for name, optimizer in (("plain", plain), ("normuon", normuon), ("scheduled", scheduled)):
        dmuon.save_checkpoint(paths[name], model, optimizer)
    second = "has NorMuon's second moment, the"
    before, after = (f"build the learning-rate scheduler {when} loading" for when in ("before", "after"))
    refused(
        paths["normuon"], plain, f"the checkpoint {second} optimizer has not", "normuon_beta2=as it was saved"
    )
    refused(paths["plain"], normuon, f"the optimizer {second} checkpoint has not", "normuon_beta2=None")
    refused(paths["scheduled"], normuon, "the optimizer's groups lack 'base_momentum', 'initial_lr'", before)
    refused(paths["normuon"], scheduled, "the checkpoint's groups lack 'base_momentum', 'initial_lr'", after)
    refused(paths["scheduled"], plain, f"the checkpoint {second} optimizer has not", before)
    dmuon.load_checkpoint(paths["scheduled"], model, schedule(dmuon.Muon(model, **HOW, normuon_beta2=0.9)))
    one = dmuon.Muon([p for p in model.named_parameters() if p[1].ndim == 2], **HOW)
    refused(paths["plain"], one, "another model")


def grouped(frozen: bool) -> tuple[nn.Module, dmuon.Muon]:
    model = build()
    blocks = [list(block.named_parameters(prefix=f"blocks.{k}")) for k, block in enumerate(model.blocks)]
    optimizer = dmuon.Muon(
        [{"params": named, "lr": 0.1 / (k + 1), "weight_decay": 0.2 * k} for k, named in enumerate(blocks)],
        precision="fp64",
    )
    model.blocks[1].requires_grad_(not frozen)
    return model, optimizer


@pytest.mark.case(row="A6")
@pytest.mark.parametrize("trained_before", [False, True])
def test_all_groups_are_restored_and_frozen_ones_too(trained_before: bool, tmp_path: Path) -> None:
    model, optimizer = grouped(frozen=not trained_before)
    train(model, optimizer, range(2))
    model.blocks[1].requires_grad_(False)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    dmuon.save_checkpoint(tmp_path / "run", model, optimizer)
    other, resumed = grouped(frozen=True)
    dmuon.load_checkpoint(tmp_path / "run", other, resumed)
    rates = [(group["algorithm"], group["lr"], group["weight_decay"]) for group in resumed.param_groups]
    assert rates == [(g["algorithm"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert len(rates) == 6
    # Thawed, both go on alike: nothing of the frozen ones was lost.
    for each in (model, other):
        each.blocks[1].requires_grad_(True)
    train(model, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert same(model, other)


class Bare(nn.Module):
    """One owned matrix and nothing else: the second rank has no state at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def bare(path: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Bare()
    dmuon.own(model, mesh_of())
    optimizer = dmuon.Muon(model, lr=0.1)
    dmuon.save_checkpoint(path, model, optimizer)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    moved = dmuon.full_state_dict(model)
    dmuon.load_checkpoint(path, model, optimizer)
    back = dmuon.full_state_dict(model)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    again = dmuon.full_state_dict(model)
    return {
        key: {n: v.tolist() for n, v in s.items()}
        for key, s in [("moved", moved), ("back", back), ("again", again)]
    }


def test_a_rank_that_has_nothing_takes_part(tmp_path: Path) -> None:
    first, second = run_ranks(2, bare, str(tmp_path / "run"))
    torch.manual_seed(0)
    assert first["back"] == {"layer.weight": Bare().layer.weight.tolist()}
    assert first["again"] == first["moved"] != first["back"]
    assert second == {"moved": {}, "back": {}, "again": {}}


def refusals(path: str) -> dict[str, str]:
    rank = dist.get_rank()
    model = build(seed=7)
    owned = wrap(model, mesh_of())
    optimizer = dmuon.Muon(model, **HOW)
    before = {name: master.detach().clone() for name, master in owned.masters.items()}
    save, load = partial(dmuon.save_checkpoint, path), partial(dmuon.load_checkpoint, path)
    found = {
        "missing": outcome(lambda: dmuon.load_checkpoint(f"{path}.none", model, optimizer)),
        "other model": outcome(lambda: load(model, optimizer)),
        "other optimizer": outcome(lambda: save(model, optimizer if rank else dmuon.Muon(build(), **HOW))),
        "extra": outcome(lambda: save(model, optimizer, extra={"bad": object()} if rank else {})),
    }
    found["changed"] = str(any(not torch.equal(before[name], m) for name, m in owned.masters.items()))
    return found


def test_ranks_refuse_together(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16).double())
    optimizer = dmuon.Muon(model)
    dmuon.save_checkpoint(tmp_path / "run", model, optimizer)
    kept = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for rank, found in enumerate(run_ranks(2, refusals, str(tmp_path / "run"))):
        assert found["changed"] == "False"
        assert found["missing"].startswith("FileNotFoundError: there is no checkpoint at")
        assert found["other model"].startswith(
            "ValueError: the checkpoint is of another model or optimizer: it lacks"
        )
        assert "and has 'model.0.bias'" in found["other model"] and "more" in found["other model"]
        own, other = ("ValueError", "RuntimeError")[rank != 0], ("TypeError", "RuntimeError")[rank != 1]
        assert (
            found["other optimizer"].startswith(own)
            and "parameters that the model does not" in found["other optimizer"]
        )
        assert found["extra"].startswith(other) and "extra must hold numbers" in found["extra"]
    assert {p.name: p.read_bytes() for p in kept.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()
    }
