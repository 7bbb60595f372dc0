"""What update hooks are told, against what can be seen from outside; and what a profiler shows of a step."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from muon_helpers import FP64, gradient_like, parameter
from own_models import HOW, batch, build, loss_of, mesh_of, wrap
from own_processes import run_ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import dmuon
from dmuon.batching import Update, batches
from dmuon.fused_step import FusedSteps

FACTORS: dict[str, Any] = {
    "original": lambda rows, cols: max(1.0, rows / cols) ** 0.5,
    "match_rms_adamw": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,
}


class Mixed(nn.Module):
    """Wide, tall and fused weights, a convolution, a stack of experts; an embedding and biases for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.wide, self.tall = nn.Linear(12, 6), nn.Linear(6, 12, bias=False)
        self.qkv = nn.Linear(6, 10, bias=False)
        self.conv = nn.Conv2d(2, 6, 3)
        self.experts = nn.Parameter(torch.empty(3, 6, 12))


def mixed(**options: Any) -> tuple[Mixed, dmuon.Muon]:
    model = Mixed().double()
    with torch.no_grad():
        for k, weight in enumerate(model.parameters()):
            weight.copy_(gradient_like(weight, seed=k))
            weight.grad = 3 * gradient_like(weight, seed=100 + k)
    policy = dmuon.MatrixPolicy(splits={"qkv.weight": (6, 4)})
    return model, dmuon.Muon(model, policy=policy, **{**FP64, **options})


def matrices_of(name: str, weight: Tensor) -> list[Tensor]:
    """The matrices of a parameter of :class:`Mixed`."""
    if name == "qkv.weight":
        return [weight[:6], weight[6:]]
    return list(weight) if weight.ndim == 3 else [weight.flatten(1)]


def check(updates: list[dmuon.MatrixUpdate], before: Mixed, after: Mixed, lr: float, decay: float) -> None:
    found = {(update.name, update.index): update for update in updates}
    names = [name for name, _ in before.named_parameters() if "embed" not in name and "bias" not in name]
    weights, now = dict(before.named_parameters()), dict(after.named_parameters())
    expected = [(name, k) for name in names for k in range(len(matrices_of(name, weights[name])))]
    assert [(update.name, update.index) for update in updates] == expected
    for name in names:
        gradients, old, new = (
            matrices_of(name, each) for each in (now[name].grad, weights[name].detach(), now[name].detach())
        )
        for k, (gradient, was, is_) in enumerate(zip(gradients, old, new, strict=True)):
            update = found[name, k]
            rows, cols = was.shape
            moved = is_ - was * (1 - lr * decay)
            orthogonal = moved / (lr * FACTORS["match_rms_adamw"](rows, cols))
            gram = orthogonal @ orthogonal.T if rows <= cols else orthogonal.T @ orthogonal
            error = (gram - torch.eye(len(gram)).double()).norm() / math.sqrt(len(gram))
            assert (update.rows, update.cols) == (rows, cols)
            for value, right in (
                (update.gradient_norm, gradient.norm()),
                (update.update_norm, moved.norm()),
                (update.update_rms, moved.square().mean().sqrt()),
                (update.weight_norm, was.norm()),
                (update.orthogonality_error, error),
            ):
                assert isinstance(value, Tensor) and value.ndim == 0
                torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("elements", [1 << 25, 80], ids=["one batch", "a matrix at a time"])
@pytest.mark.parametrize("tensor_rate", [False, True])
def test_every_matrix_is_told_of_once(
    elements: int, tensor_rate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmuon.batching.BATCH_ELEMENTS", elements)
    lr: Any = torch.tensor(0.3, dtype=torch.float64) if tensor_rate else 0.3
    model, optimizer = mixed(lr=lr, weight_decay=0.5, adjust_lr="match_rms_adamw")
    updates: list[dmuon.MatrixUpdate] = []
    optimizer.register_update_hook(updates.append, orthogonality=True)
    for _ in range(2):
        before = copy.deepcopy(model)
        updates.clear()
        optimizer.step()
        check(updates, before, model, 0.3, 0.5)


def test_variants_are_measured_as_they_move() -> None:
    """Of NorMuon with cautious decay: the update as it is added, and how orthogonal it was before that."""
    model, optimizer = mixed(lr=0.3, weight_decay=0.5, normuon_beta2=0.9, cautious_decay=True)
    _, plain = mixed(lr=0.3)
    told: list[list[dmuon.MatrixUpdate]] = [[], []]
    for each, seen in zip((optimizer, plain), told, strict=True):
        each.register_update_hook(seen.append, orthogonality=True)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer.step()
    plain.step()
    for ours, theirs in zip(*told, strict=True):
        assert ours.orthogonality_error is not None and theirs.orthogonality_error is not None
        torch.testing.assert_close(ours.orthogonality_error, theirs.orthogonality_error, rtol=1e-12, atol=0)
        was = matrices_of(ours.name, before[ours.name])[ours.index]
        moved = matrices_of(ours.name, model.get_parameter(ours.name).detach())[ours.index] - was
        # What the decay adds has the signs of the update.
        assert moved.norm() > ours.update_norm
    undecayed, watched = mixed(lr=0.3, weight_decay=0.0, normuon_beta2=0.9, adjust_lr=lambda rows, cols: -2.0)
    watched.register_update_hook(
        lambda update: torch.testing.assert_close(
            update.update_norm,
            (
                matrices_of(update.name, undecayed.get_parameter(update.name).detach())[update.index]
                - matrices_of(update.name, before[update.name])[update.index]
            ).norm(),
        )
    )
    watched.step()


def test_hooks_change_no_bit_of_a_step() -> None:
    """A hook is registered before the first step, another for the second step alone, none is left for the third."""
    (model, optimizer), (other, plain) = mixed(), mixed()
    first: list[dmuon.MatrixUpdate] = []
    second: list[dmuon.MatrixUpdate] = []
    handle = optimizer.register_update_hook(first.append)
    optimizer.step()
    assert len(first) == 8 and all(update.orthogonality_error is None for update in first)
    with optimizer.register_update_hook(second.append, orthogonality=True):
        optimizer.step()
    handle.remove()
    optimizer.step()
    assert (len(first), len(second)) == (16, 8)
    assert all(update.orthogonality_error is not None for update in second)
    for _ in range(3):
        plain.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_kernels_make_no_steps_that_a_hook_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Update] = []
    monkeypatch.setattr(FusedSteps, "step_of", lambda self, update: asked.append(update))
    _, optimizer = mixed()
    handle = optimizer.register_update_hook(lambda update: None)
    optimizer.step()
    assert not asked
    handle.remove()
    optimizer.step()
    assert asked


def test_without_names_and_without_gradients() -> None:
    first, second, third = parameter(4, 6), parameter(4, 6, seed=1), parameter(3, 6)
    optimizer = dmuon.Muon([{"params": [first, second]}, {"params": [third]}], **FP64)
    names: list[str] = []
    optimizer.register_update_hook(lambda update: names.append(update.name))
    optimizer.step()
    assert not names
    second.grad, third.grad = gradient_like(second), torch.zeros_like(third)
    errors: dict[str, float] = {}
    optimizer.register_update_hook(
        lambda update: errors.update({update.name: float(update.orthogonality_error)}),  # type: ignore[arg-type]
        orthogonality=True,
    )
    optimizer.step()
    assert names == ["group0.param1", "group1.param0"] == list(errors)
    assert errors["group1.param0"] == 1.0


def test_copies_have_no_hooks() -> None:
    _, optimizer = mixed()
    called: list[str] = []
    optimizer.register_update_hook(lambda update: called.append(update.name))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for group in other.param_groups:
            for weight in group["params"]:
                weight.grad = gradient_like(weight)
        other.step()
    assert not called


def test_a_hook_that_raises_does_so_after_the_step() -> None:
    (model, optimizer), (other, plain) = mixed(), mixed()

    def fail(update: dmuon.MatrixUpdate) -> None:
        raise KeyError(update.name)

    optimizer.register_update_hook(fail)
    with pytest.raises(KeyError, match="experts"):
        optimizer.step()
    plain.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def watch_owned() -> tuple[list[str], dict[str, list[float]], dict[str, list[float]]]:
    """What is told of an owned model here, and of the whole in one process."""
    model = build()
    reference = copy.deepcopy(model)
    owned = wrap(model, mesh_of())
    told: list[dict[str, list[float]]] = []
    for trained, rows in ((model, slice(2 * mesh_of().get_rank(), None)), (reference, slice(None))):
        optimizer, seen = dmuon.Muon(trained, **HOW), {}

        def hook(update: dmuon.MatrixUpdate, seen: dict[str, list[float]] = seen) -> None:
            values = update.gradient_norm, update.update_norm, update.weight_norm, update.orthogonality_error
            seen[f"{update.name}/{update.index}"] = [float(value) for value in values if value is not None]

        optimizer.register_update_hook(hook, orthogonality=True)
        tokens, targets = batch(0, 4)
        size = 2 if trained is model else 4
        loss_of(trained(tokens[rows][:size]), targets[rows][:size]).backward()
        optimizer.step()
        told.append(seen)
    return list(owned.masters), told[0], told[1]


def test_each_rank_tells_of_what_it_owns() -> None:
    ranks = run_ranks(2, watch_owned)
    together: dict[str, list[float]] = {}
    for names, told, _ in ranks:
        assert told and {key.rpartition("/")[0] for key in told} == set(names)
        together |= told
    alone = ranks[0][2]
    assert sum(len(told) for _, told, _ in ranks) == len(together) and together.keys() == alone.keys()
    for key, values in together.items():
        assert values == pytest.approx(alone[key], rel=1e-9)


def test_batches_are_of_the_stack_that_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack of experts is divided, or the second test parameter would show nothing."""
    monkeypatch.setattr("dmuon.batching.BATCH_ELEMENTS", 80)
    model, optimizer = mixed()
    optimizer.step()
    updates = optimizer._updates_of(optimizer.param_groups[0])
    assert len([b for b in batches(updates) if b[0].update.parameter is model.experts]) > 1


def test_a_step_shows_in_the_profiler() -> None:
    _, optimizer = mixed()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizer.step()
    ranges = {event.name: event.time_range for event in profiled.events()}
    step = ranges["Optimizer.step#Muon.step"]
    for name in ("dmuon::update", "dmuon::adamw"):
        assert step.start <= ranges[name].start <= ranges[name].end <= step.end
