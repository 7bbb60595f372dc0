"""Recording and replaying Newton–Schulz. Without a GPU a stand-in records: it re-runs what a graph would replay."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dmuon
from dmuon.graphs import Replays, replayable

CPU = torch.device("cpu")


class Recorder:
    """Counts recordings and replays, and notes the address that each recording is bound to."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Callable[[], object]) -> Callable[[], object]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def double(batch: Tensor) -> None:
    batch.mul_(2)


def put(replays: Replays, value: float, shape: tuple[int, ...], kind: str = "x") -> Tensor:
    batch = replays.buffer(shape, torch.float32, CPU)
    batch.fill_(value)
    replays.run(kind, batch, double)
    return batch.clone()


def test_the_second_batch_of_a_kind_is_recorded_and_the_third_replayed() -> None:
    recorder = Recorder()
    replays = Replays(recorder)
    for step in range(1, 6):
        assert torch.equal(put(replays, step, (2, 3, 4)), torch.full((2, 3, 4), 2.0 * step))
        assert (recorder.recorded, recorder.replayed) == (min(step - 1, 1), max(step - 2, 0))
    put(replays, 1, (2, 4, 3))
    put(replays, 1, (2, 3, 4), "y")
    assert recorder.recorded == 1


def test_a_larger_batch_moves_the_buffer_and_old_recordings_go_with_it() -> None:
    recorder = Recorder()
    replays = Replays(recorder)
    for step in range(3):
        put(replays, step, (2, 2))
    assert recorder.recorded == 1
    put(replays, 5, (4, 4))
    assert torch.equal(put(replays, 7, (2, 2)), torch.full((2, 2), 14.0))
    assert recorder.recorded == 2 and recorder.replayed == 1


def test_recordings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmuon.graphs.MAX_GRAPHS", 2)
    recorder = Recorder()
    replays = Replays(recorder)
    for _ in range(3):
        for kind in "abcd":
            assert torch.equal(put(replays, 1, (3, 3), kind), torch.full((3, 3), 2.0))
    assert recorder.recorded == 2


def test_the_switch_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not replayable(CPU)
    monkeypatch.setenv("DMUON_GRAPHS", "maybe")
    with pytest.raises(ValueError, match="DMUON_GRAPHS must be on or off, got 'maybe'"):
        replayable(CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_cuda_graph_replays_newton_schulz() -> None:
    from dmuon.kernels import gram_ns

    replays, device = Replays(), torch.device("cuda", torch.cuda.current_device())

    def orthogonalise(batch: Tensor) -> None:
        gram_ns(batch, precision="fp32", out=batch)

    for seed in range(4):
        G = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(seed))
        batch = replays.buffer((4, 64, 128), torch.float32, device)
        batch.copy_(G)
        replays.run("ns", batch, orthogonalise)
        torch.testing.assert_close(batch.cpu(), gram_ns(G, precision="fp32"), rtol=1e-3, atol=1e-4)


class Cuda:
    """Makes the optimizer take CPU tensors for a GPU's, with a stand-in for graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorder = Recorder()
        monkeypatch.setattr("dmuon.matrix_step.replayable", lambda device: True)
        monkeypatch.setattr("dmuon.matrix_step.Replays", lambda: Replays(self.recorder))


def train(steps: int, lr: Callable[[int], float]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights = [torch.nn.Parameter(torch.randn(8, 12, generator=generator)) for _ in range(3)]
    weights.append(torch.nn.Parameter(torch.randn(12, 20, generator=generator)))
    optimizer = dmuon.Muon([{"params": weights, "algorithm": "muon"}], lr=lr(0))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr(step)
        for index, weight in enumerate(weights):
            weight.grad = torch.randn(weight.shape, generator=generator)
            if step == 3 and index == 1:
                weight.grad = None
        optimizer.step()
        if step == 2:
            optimizer = copy.deepcopy(optimizer)
            weights = optimizer.param_groups[0]["params"]
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize(
    "lr", [lambda step: 0.02, lambda step: 0.1 / (1 + step)], ids=["constant", "falling"]
)
def test_an_optimizer_that_replays_equals_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch, lr: Callable[[int], float]
) -> None:
    """T6: what is recorded holds no learning rate. A parameter without a gradient makes another kind of batch."""
    plain = train(7, lr)
    cuda = Cuda(monkeypatch)
    replayed = train(7, lr)
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
    assert cuda.recorder.recorded > 2 and cuda.recorder.replayed > 2
