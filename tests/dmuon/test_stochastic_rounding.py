"""Stochastic rounding of bf16 matrices: which values occur, how often, and by which random numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from muon_helpers import gradient_like, parameter, relative
from torch import Tensor, nn

import dmuon
from dmuon.kernels.gram_ns import gram_ns
from dmuon.rounding import StochasticRounding


def rounded(source: Tensor) -> Tensor:
    rounding, target = StochasticRounding(), torch.empty_like(source, dtype=torch.bfloat16)
    rounding.reseed()
    rounding.write(source, target)
    return target


def neighbours(source: Tensor) -> tuple[Tensor, Tensor]:
    """Of fp32 values, the nearest in bf16 towards zero and away from it, by cutting the last 16 bits off."""
    low = source.view(torch.int32) & -65536
    high = torch.where(low == source.view(torch.int32), low, low + 65536)
    return low.view(torch.float32), high.view(torch.float32)


@pytest.mark.parametrize("value", [1.003, -1.003, 1.0078, 3e-5, -2.7e38, 1e-39, 0.1, -1 / 3])
def test_rounds_to_both_neighbours_and_to_the_value_on_average(value: float) -> None:
    torch.manual_seed(0)
    count = 200_000
    source = torch.full((count,), value)
    low, high = (each[0].item() for each in neighbours(source))
    found = rounded(source).double()
    assert set(found.tolist()) == {low, high}
    odds = (source[0].item() - low) / (high - low)
    assert abs((found == high).double().mean().item() - odds) < 4 * (odds * (1 - odds) / count) ** 0.5


def test_what_needs_no_rounding_stays() -> None:
    exact = torch.randn(10_000).bfloat16().float()
    assert torch.equal(rounded(exact).float(), exact)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(rounded(special).float().view(torch.int32), special.view(torch.int32))
    # The NaN of processors, and that of NVIDIA's.
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    for _ in range(20):
        assert rounded(nan).isnan().all()


def bf16(*shape: int, seed: int = 0) -> nn.Parameter:
    return parameter(*shape, seed=seed, dtype=torch.bfloat16)


def muon(*params: nn.Parameter, stochastic_rounding: bool = True, **options: object) -> dmuon.Muon:
    how = {"precision": "fp32", "stochastic_rounding": stochastic_rounding, **options}
    return dmuon.Muon([{"params": list(params), "algorithm": "muon"}], **how)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cautious_decay", [False, True])
def test_a_step_is_made_in_fp32_and_rounded_to_a_neighbour(transposed: bool, cautious_decay: bool) -> None:
    weight = bf16(64, 48)
    if transposed:
        weight = nn.Parameter(weight.detach().mT)
    weight.grad = gradient_like(weight)
    before = weight.detach().float()
    muon(weight, lr=0.1, weight_decay=0.3, momentum=0.0, nesterov=False, cautious_decay=cautious_decay).step()
    direction = gram_ns(weight.grad, precision="fp32").float()
    decay = before * (direction * before >= 0) if cautious_decay else before
    factor = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
    exact = before - 0.1 * (0.3 * decay + factor * direction)
    low, high = neighbours(exact)
    # fp32 rounds in another order here: what is next to a bf16 number may be on its other side.
    beside = (weight.float() - exact).abs() <= 1e-6
    up, down = (weight.float() == high) | beside, (weight.float() == low) | beside
    assert (up | down).all()
    assert 0.4 < (up & ~beside).sum() / (~beside).sum() < 0.6


def test_small_steps_add_up() -> None:
    """Steps of a tenth of what bf16 resolves at 1."""
    torch.manual_seed(0)
    weights = [
        nn.Parameter(torch.ones(64, 64, dtype=dtype)) for dtype in (torch.float32, *[torch.bfloat16] * 2)
    ]
    gradient = gradient_like(weights[0])
    optimizers = [
        muon(w, lr=0.004, weight_decay=0.0, stochastic_rounding=k < 2) for k, w in enumerate(weights)
    ]
    for _ in range(30):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.to(weight.dtype)
            optimizer.step()
    moved, by_chance, to_nearest = (weight.detach().double() - 1 for weight in weights)
    direction = moved / moved.norm()
    assert abs((by_chance * direction).sum() / moved.norm() - 1) < 0.03
    assert (to_nearest * direction).sum() / moved.norm() < 0.3


def test_the_momentum_is_rounded_too() -> None:
    """A momentum of 1 that averages gradients of 1.01: bf16 has nothing between 1 and 1.0078."""
    weights = [bf16(128, 128) for _ in range(2)]
    momenta = []
    for weight, stochastic in zip(weights, (True, False), strict=True):
        optimizer = muon(weight, stochastic_rounding=stochastic)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.state[weight]["momentum_buffer"].fill_(1.0)
        weight.grad.fill_(1.0078125 * 1.0078125)
        target = weight.grad[0, 0].item()
        for _ in range(5):
            optimizer.step()
        momenta.append(optimizer.state[weight]["momentum_buffer"].double().mean().item())
    assert momenta[1] == 1.0
    assert abs(momenta[0] - (target - (target - 1) * 0.95**5)) < 2e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_are_not_concerned(dtype: torch.dtype) -> None:
    weights = [parameter(6, 8, dtype=dtype) for _ in range(2)]
    for weight, stochastic in zip(weights, (True, False), strict=True):
        weight.grad = gradient_like(weight)
        muon(weight, stochastic_rounding=stochastic).step()
    assert torch.equal(*weights)


def test_seeds_decide() -> None:
    def trained(seed: int) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(seed)
        weights = [bf16(3, 20, 30), bf16(20, 30, seed=1)]
        optimizer = muon(*weights, normuon_beta2=0.9)
        for step in range(3):
            for weight in weights:
                weight.grad = gradient_like(weight, seed=step)
            optimizer.step()
        return [weight.detach() for weight in weights], torch.rand(())

    first, again, other = trained(0), trained(0), trained(1)
    assert all(map(torch.equal, first[0], again[0])) and first[1] == again[1]
    assert not any(map(torch.equal, first[0], other[0]))


def test_takes_one_number_a_step_from_torchs_generator() -> None:
    states = []
    for sizes in ([(4, 6)], [(30, 20), (5, 8, 8)]):
        weights = [bf16(*size) for size in sizes]
        for weight in weights:
            weight.grad = gradient_like(weight)
        torch.manual_seed(0)
        muon(*weights).step()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    for weight in weights:
        muon(weight, stochastic_rounding=False).step()
    assert torch.equal(torch.get_rng_state(), states[0])


def test_a_cuda_graph_must_not_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="at every replay: set stochastic_rounding=False"):
        StochasticRounding().reseed()


def test_large_momenta_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bounded size, like batches, and each by random numbers of its own."""
    monkeypatch.setattr("dmuon.matrix_step.BATCH_ELEMENTS", 64)
    stack = nn.Parameter(torch.zeros(8, 8, 8, dtype=torch.bfloat16))
    stack.grad = torch.full_like(stack, 1.0078125)
    optimizer = muon(stack)
    optimizer.step()
    momentum = optimizer.state[stack]["momentum_buffer"]
    assert relative(momentum, torch.full_like(stack, 1.0078125 * 0.05)) < 4e-3
    assert len({tuple(part.flatten().tolist()) for part in momentum}) == 8


def test_an_optimizer_is_copied_and_resumed_with_it() -> None:
    torch.manual_seed(0)
    weight = bf16(12, 16)
    optimizer = muon(weight)
    weight.grad = gradient_like(weight)
    optimizer.step()
    pair = copy.deepcopy((weight, optimizer))
    resumed = weight.detach().clone().requires_grad_()
    restored = muon(resumed)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    random = torch.get_rng_state()
    found = []
    for w, o in ((weight, optimizer), pair, (resumed, restored)):
        torch.set_rng_state(random)
        w.grad = gradient_like(weight, seed=7)
        o.step()
        found.append(w.detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
