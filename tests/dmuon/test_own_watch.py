"""Weights that are elsewhere raise when they are read; ranks that see different weights, and stale views, are found."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_models import HOW, batch, build, loss_of, mesh_of, wrap
from own_processes import outcome, run_ranks
from torch import Tensor, nn

import dmuon
from dmuon.ownership.absent import AbsentParameter, AbsentTensor, hide, placeholder, reveal, same_place

WHY = "the weight of the layer is elsewhere: call the layer"


@pytest.fixture
def absent() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    hide(parameter, placeholder((2, 3), torch.float64, "cpu"), WHY)
    return parameter


READS: dict[str, Callable[[Tensor], object]] = {
    "linear": lambda p: F.linear(torch.ones(1, 3, dtype=torch.float64), p),
    "einsum": lambda p: torch.einsum("ij->i", p),
    "add": lambda p: 1 + p,
    "in place on another": lambda p: torch.ones(2, 3).copy_(p),
    "out": lambda p: torch.add(torch.ones(2, 3), 1, out=p),
    "index": lambda p: p[0],
    "list": list,
    "stack": lambda p: torch.stack([torch.ones(2, 3), p]),
    "foreach": lambda p: torch._foreach_add([p], 1),
    "item": lambda p: p.sum().item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "clone": lambda p: p.clone(),
    "detached": lambda p: p.detach().sum(),
    "data": lambda p: p.data.sum(),
    "transposed": lambda p: p.T @ p.mT,
    "viewed": lambda p: p.view(3, 2).sum(),
    "half": lambda p: p.half(),
    "write": lambda p: nn.init.zeros_(p),
    "write through data": lambda p: p.data.fill_(0),
    "storage": lambda p: p.untyped_storage(),
    "equal": lambda p: torch.equal(p, torch.ones(2, 3)),
    "operator": lambda p: torch.ops.aten.add.Tensor(p, p),
}


@pytest.mark.parametrize("name", READS)
def test_reading_an_absent_parameter_raises(name: str, absent: nn.Parameter) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match=WHY):
        READS[name](absent)
    with pytest.raises(RuntimeError, match=WHY):
        READS[name](absent)


def test_an_absent_parameter_tells_what_it_is(absent: nn.Parameter) -> None:
    assert isinstance(absent, nn.Parameter) and isinstance(absent, AbsentParameter)
    assert not isinstance(absent.detach(), nn.Parameter) and isinstance(absent.detach(), AbsentTensor)
    assert (absent.shape, absent.dtype, absent.device) == ((2, 3), torch.float64, torch.device("cpu"))
    assert (absent.numel(), absent.size(1), absent.dim(), len(absent)) == (6, 3, 2, 2)
    assert absent.requires_grad and absent.is_leaf and absent.grad is None and absent in {absent}
    assert absent.to("cpu", torch.float64) is absent
    for shown in (repr(absent), str(absent), f"{absent}"):
        assert "AbsentParameter (2, 3) torch.float64" in shown and WHY in shown


def test_new_tensors_like_an_absent_one_are_ordinary(absent: nn.Parameter) -> None:
    for new in (torch.zeros_like(absent), absent.new_zeros(2, 3)):
        assert type(new) is Tensor and new.is_contiguous() and torch.equal(new, torch.zeros(2, 3).double())


def test_to_empty_needs_no_memory(absent: nn.Parameter) -> None:
    module = nn.Linear(3, 2)
    module.weight = absent
    module.to_empty(device="cpu")
    assert module.weight is absent and isinstance(absent, AbsentParameter)
    assert same_place(absent, torch.ones(2, 3).double())  # a placeholder still


def test_gradients_and_hooks_work_while_absent(absent: nn.Parameter) -> None:
    seen: list[Tensor] = []
    absent.register_post_accumulate_grad_hook(seen.append)
    absent.grad = torch.ones(2, 3).double()
    assert type(absent.grad) is Tensor
    node = absent.view_as(absent).grad_fn
    assert node is not None and type(node.next_functions[0][0]).__name__ == "AccumulateGrad"
    values = torch.full((2, 3), 2.0, dtype=torch.float64)
    reveal(absent, values)
    assert type(absent) is nn.Parameter and torch.equal(absent, values)
    absent.square().sum().backward()
    assert seen == [absent] and torch.equal(absent.grad, torch.full((2, 3), 5.0).double())


def test_copies_and_pickles_are_refused(absent: nn.Parameter) -> None:
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=WHY):
            copying(absent)


def reads_at_the_wrong_time() -> dict[str, str]:
    model = build()
    owned = wrap(model, mesh_of())
    block = model.blocks[1]
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    found = {
        "child": outcome(lambda: block.up(x)),
        "model's own": outcome(lambda: model.mixer(x)),
        "value": outcome(lambda: block.up.weight.norm()),
    }
    tokens, targets = batch(0, 2)
    loss_of(model(tokens), targets).backward()
    found["after the backward"] = outcome(lambda: block.up.weight.sum())
    owned.refresh()
    found["after the step"] = outcome(lambda: model.blocks[0].up.weight.sum())
    shown: list[bool] = []
    block.register_forward_pre_hook(lambda *_: shown.append(bool(block.up.weight.isfinite().all())))
    with torch.inference_mode():
        model(tokens)
    found["inside"] = "" if shown == [True] else "absent"
    return found


def test_blocks_must_be_called() -> None:
    for found in run_ranks(2, reads_at_the_wrong_time):
        assert found.pop("inside") == ""
        own = found.pop("model's own")
        assert (
            "'mixer.weight' are not here: they come while the model runs. Call the model, not its parts"
            in own
        )
        for text in found.values():
            assert "up.weight' are not here: they come while module 'blocks." in text
            assert "or read owned.masters['blocks." in text


def recompilations(what: str) -> dict[str, Any]:
    """How often torch.compile compiles frames in each of four steps."""
    from torch._dynamo.utils import counters

    model = build()
    wrap(model, mesh_of(), reshard_after_forward=what == "model")
    run = torch.compile(model, backend="aot_eager") if what == "model" else model
    for block in model.blocks if what == "block" else ():
        block.compile(backend="aot_eager")
    optimizer = dmuon.Muon(run, **HOW)
    tokens, targets = batch(0, 2)
    frames = []
    for _ in range(4):
        loss_of(run(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        frames.append(sum(counters["frames"].values()))
    return {"frames": frames, "absent": sum(isinstance(p, AbsentParameter) for p in model.parameters())}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "block"])
def test_compiled_once(what: str) -> None:
    for found in run_ranks(2, recompilations, what, timeout=250):
        assert found["absent"] and found["frames"][0]
        assert found["frames"][1] == found["frames"][3]


class Keeping(nn.Module):
    """Returns something, and keeps what the loss depends on, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1.0
        self.kept = self.second(F.gelu(self.first(x)))
        return y


def kept_elsewhere() -> str:
    os.environ["DMUON_DEBUG"] = "1"
    torch.manual_seed(0)
    model = nn.Sequential(*(Keeping() for _ in range(3))).double()
    dmuon.own(model, mesh_of())
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    loss = model(x).sum()
    kept: Any = model[0]
    return outcome(lambda: (loss + kept.kept.sum()).backward())


def test_a_backward_that_finds_freed_weights_names_the_bucket() -> None:
    for found in run_ranks(2, kept_elsewhere):
        assert "RuntimeError: the backward used '0." in found and "bucket '0' was not published" in found


def changes() -> dict[str, str]:
    """What is done to an owned model between steps, and what the next forward and step say to it."""

    def tried(change: Callable[[Any], object], step: bool, reshard: bool = False) -> str:
        model = build()
        wrap(model, mesh_of(), reshard_after_forward=reshard)
        optimizer = dmuon.Muon(model, **HOW)
        tokens, targets = batch(0, 2)
        loss_of(model(tokens), targets).backward()
        if not step:
            optimizer.step()
            with torch.no_grad():
                model(tokens)
        with torch.no_grad():
            change(model)
        return outcome(optimizer.step if step else lambda: model(tokens))

    def replace(model: Any) -> None:
        model.blocks[0].up.weight = nn.Parameter(torch.ones(48, 16).double())

    def resize(model: Any) -> None:
        model.blocks[0].up.weight.data = torch.ones(50, 16).double()

    def write(model: Any) -> None:
        nn.init.ones_(model.blocks[0].up.weight)

    found = {"half": tried(lambda model: model.blocks[0].q.half(), step=False)}
    for name, change in {
        "replace": replace,
        "resize": resize,
        "write": write,
        "data": lambda m: m.blocks[0].q.float(),
    }.items():
        for step in (False, True):
            found[f"{name} {step}"] = tried(change, step)
    found["absent"] = tried(resize, step=False, reshard=True)
    return found


def test_changed_parameters_are_named() -> None:
    for found in run_ranks(2, changes):
        for key, needle in {
            "half": "torch.float64 on cpu, is (16, 16) torch.float16 on cpu. Convert, move and resize the model before",
            "replace False": "'blocks.0.up.weight' has been replaced by a Parameter since dmuon.own",
            "replace True": "'blocks.0.up.weight' has been replaced by a Parameter since dmuon.own",
            "resize False": "was given other data since dmuon.own: it was (48, 16) torch.float64 on cpu, is (50, 16)",
            "resize True": "was given other data since dmuon.own: it was (48, 16) torch.float64 on cpu, is (50, 16)",
            "absent": "was given other data since dmuon.own: it was (48, 16) torch.float64 on cpu, is (50, 16)",
            "write False": "'blocks.0.up.weight' was written to, but holds a copy",
            "write True": "write to owned.masters['blocks.0.up.weight'] on rank",
            "data False": "'blocks.0.q.weight' was given other data since dmuon.own: it was (16, 16) torch.float64",
            "data True": "'blocks.0.q.weight' was given other data since dmuon.own: it was (16, 16) torch.float64",
        }.items():
            assert needle in found[key], (key, found[key])
