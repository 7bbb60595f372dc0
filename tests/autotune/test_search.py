from __future__ import annotations

import random
from collections import Counter

from dmuon.autotune.search import SAMPLES, successive_halving


def test_finds_the_fastest_for_a_fraction_of_the_samples():
    speeds = {k: 10.0 + k for k in random.Random(0).sample(range(32), 32)}
    taken: Counter[int] = Counter()
    noise = random.Random(1)

    def measure(k: int) -> float:
        taken[k] += 1
        return speeds[k] * noise.uniform(0.99, 1.01)

    ranking = successive_halving(list(speeds), measure)
    assert ranking[0] == 0
    assert taken[0] >= SAMPLES
    assert taken.total() < 32 * SAMPLES
    assert taken[31] == 1


def test_the_last_two_and_the_yardstick_get_their_samples():
    taken: Counter[int] = Counter()

    def measure(k: int) -> float:
        taken[k] += 1
        return float(k)

    ranking = successive_halving([9, 1, 2, 3, 4, 5], measure, always=(9,))
    assert set(ranking) == {1, 2, 9}
    assert ranking[0] == 1
    assert min(taken[1], taken[2], taken[9]) >= SAMPLES
    assert taken[9] == taken[1]


def test_samples_alternate_so_that_a_slow_phase_hits_all():
    """The machine becomes three times slower in the middle: the order of the candidates must not change."""
    order = []

    def measure(k: int) -> float:
        order.append(k)
        return (10.0 + k) * (3 if len(order) > 20 else 1)

    assert successive_halving([3, 1, 2, 0], measure)[0] == 0
    assert order[:4] == [3, 1, 2, 0]


def test_one_stalled_sample_does_not_decide():
    stalled = iter([500.0])

    def measure(k: int) -> float:
        return next(stalled, 10.0) if k == 0 else 11.0

    assert successive_halving([0, 1, 2], measure, known={0: [10.0], 1: [11.0], 2: [11.0]})[0] == 0


def test_one_lucky_sample_does_not_decide():
    """A clock that stood still once must not make a winner of the slowest."""
    lucky = {0: [0.01, 12.0, 12.0], 1: [10.0] * 3, 2: [11.0] * 3}
    speeds = {0: 12.0, 1: 10.0, 2: 11.0}
    assert successive_halving([0, 1, 2], speeds.__getitem__, known=lucky)[0] == 1


def test_who_is_out_is_not_measured_again():
    taken: Counter[str] = Counter()

    def measure(name: str) -> float | None:
        taken[name] += 1
        return None if name == "bad" else 1.0

    assert "bad" not in successive_halving(["bad", "a", "b"], measure)
    assert taken["bad"] == 1


def test_all_out():
    assert successive_halving(["a", "b"], lambda name: None) == []


def test_stops_at_once_when_time_is_over():
    runs = []

    def measure(k: int) -> float:
        runs.append(k)
        return 5.0 - k

    ranking = successive_halving([0, 1, 2], measure, expired=lambda: len(runs) == 2)
    assert runs == [0, 1]
    assert ranking == [1, 0]
