"""Plans: deterministic, balanced by what the owner's step takes, and told how far from the best possible."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.autotune import Cost
from dmuon.batching import batch_sizes
from dmuon.planner import Item, Plan, items_of, lower_bound, make_plan, plan_of_owners
from dmuon.policy import MatrixPolicy


@dataclass(frozen=True)
class Affine:
    """A launch for each batch and a time for each matrix, by the number of its rows."""

    launch: float = 0.0

    def cost(self, rows: int, cols: int, batch: int) -> Cost:
        return Cost(self.launch + rows * batch, "measured")


def items(*rows: int, bucket: str = "") -> list[Item]:
    """A matrix for each number of rows, which is what it costs."""
    return [Item(f"w{k}", ((1, size, 8),), bucket) for k, size in enumerate(rows)]


def time_of(owned: list[Item], costs: Affine) -> float:
    """By the definition: the matrices of a rank by shape, in the optimizer's batches."""
    shapes: dict[tuple[int, int], int] = {}
    for item in owned:
        for count, rows, cols in item.stacks:
            shapes[rows, cols] = shapes.get((rows, cols), 0) + count
    return sum(
        costs.cost(*shape, size).ms for shape, count in shapes.items() for size in batch_sizes(count, *shape)
    )


def optimum(given: list[Item], ranks: int, costs: Affine) -> float:
    """By trying every assignment."""
    return min(
        max(
            time_of([i for i, owner in zip(given, owners, strict=True) if owner == rank], costs)
            for rank in range(ranks)
        )
        for owners in product(range(ranks), repeat=len(given))
    )


def test_the_costliest_goes_first_to_the_rank_with_the_least_to_do() -> None:
    plan = make_plan(items(30, 50, 40, 30), 2, Affine(), method="greedy")
    assert plan.owners == {"w0": (1,), "w1": (0,), "w2": (1,), "w3": (0,)}
    assert (plan.loads, plan.makespan, plan.bound) == ((80.0, 70.0), 80.0, 75.0)
    assert plan.gap == pytest.approx(8 / 7.5 - 1)


def test_small_ones_fill_what_large_ones_leave() -> None:
    assert make_plan(items(10, 10, 20), 2, Affine(), method="greedy").loads == (20.0, 20.0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    ranks=st.integers(1, 3),
    launch=st.sampled_from([0.0, 1.0, 5.0]),
)
def test_no_plan_undercuts_the_bound_and_none_is_needlessly_bad(
    rows: list[int], ranks: int, launch: float
) -> None:
    given, costs = items(*rows), Affine(launch)
    best = optimum(given, ranks, costs)
    plan = make_plan(given, ranks, costs)
    for rank, load in enumerate(plan.loads):
        assert load == pytest.approx(time_of([i for i in given if plan.owners[i.name] == (rank,)], costs))
    assert lower_bound(given, ranks, costs).ms <= best * (1 + 1e-9)
    assert best <= plan.makespan * (1 + 1e-9)
    assert plan.makespan <= 4 / 3 * best * (1 + 1e-9)


def test_equal_costs_go_round() -> None:
    plan = make_plan(items(8, 8, 8, 8), 2, Affine())
    assert sorted(owner for (owner,) in plan.owners.values()) == [0, 0, 1, 1]


def test_the_hash_is_of_the_owners() -> None:
    plan = make_plan(items(1, 2), 2, Affine())
    assert plan.hash == make_plan(items(10, 20), 2, Affine()).hash
    assert plan.hash != plan_of_owners({"w0": 0, "w1": 0}, items(1, 2), 2, Affine()).hash
    assert plan.hash != make_plan(items(1, 2), 3, Affine()).hash


def test_given_owners_are_checked() -> None:
    two = items(1, 2)
    assert plan_of_owners({"w0": 1, "w1": (0,)}, two, 2, Affine()).owners == {"w0": (1,), "w1": (0,)}
    for owners, needle in (
        ({"w0": 0, "c": 1}, "it lacks \\['w1'\\] and has \\['c'\\]"),
        ({"w0": 0, "w1": 2}, "a rank below 2, got 2"),
        ({"w0": 0, "w1": (0, 1)}, "one owner"),
        (make_plan(two, 3, Affine()), "for 3 ranks, but there are 2"),
    ):
        with pytest.raises(ValueError, match=needle):
            plan_of_owners(owners, two, 2, Affine())
    with pytest.raises(ValueError, match="distinct names, got 'w0'"):
        make_plan([*two, *two], 2, Affine())
    for ranks in (0, 1.5):
        with pytest.raises(ValueError, match=f"ranks must be a whole number of at least 1, got {ranks}"):
            make_plan(two, ranks, Affine())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_bytes must be positive, or None for no limit, got -1"):
        make_plan(two, 2, Affine(), memory_bytes=-1)
    with pytest.raises(ValueError, match="time_limit_s must be a number of seconds, got nan"):
        make_plan(two, 2, Affine(), time_limit_s=float("nan"))
    with pytest.raises(ValueError, match="ranks_per_node must divide the 4 ranks, got 3"):
        make_plan(two, 4, Affine(), ranks_per_node=3)


def test_a_saved_plan_is_the_plan(tmp_path: Path) -> None:
    plan = make_plan(items(3, 3, 5, 7), 2, Affine(1.0))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("old", "new", "needle"),
    [
        ('"ranks": 2', '"ranks": 4', "an entry for each of 4 ranks"),
        ('"w0": [1]', '"w0": [0]', "batches of rank 0 are not those of what it owns"),
        ('"hash": "', '"hash": "0', "the file says"),
        ('"format": 1', '"format": 9', "format 9"),
        ('"owners"', '"owner"', "not a plan"),
        ('"bound": 5.0', '"bound": "x"', "not a plan"),
        ('"ms": 5.0', '"ms": null', "not a plan"),
        ('"memory": [1200', '"memory": ["x"', "not a plan"),
        ("{", "[", "not a plan"),
    ],
)
def test_a_file_that_was_changed_is_refused(old: str, new: str, needle: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = make_plan(items(1, 5, 3), 2, Affine()).to_json()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=needle) as raised:
        Plan.load(path)
    assert str(path) in str(raised.value)


def test_a_write_that_fails_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    plan = make_plan(items(1, 2), 2, Affine())
    plan.save(path)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        make_plan(items(1, 2, 3), 2, Affine()).save(path)
    assert Plan.load(path) == plan
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_memory_is_kept_to() -> None:
    # One rank would take the large ones for balance: it has no room for both.
    given = [Item("a", ((1, 10, 100),)), Item("b", ((1, 10, 100),)), *items(*[20] * 1)]
    limit = 2 * given[0].kept_bytes
    plan = make_plan(given, 2, Affine(), memory_bytes=limit)
    assert max(plan.memory) <= limit
    assert plan.owners["a"] != plan.owners["b"]
    with pytest.raises(ValueError, match="memory_bytes: 'a' fits on no rank"):
        make_plan(given, 2, Affine(), memory_bytes=given[0].kept_bytes)
    # All of them together.
    with pytest.raises(ValueError, match=r"memory_bytes: 'w0' fits on no rank.*2 ranks have 0.0 MiB each"):
        make_plan(items(*[8] * 9), 2, Affine(), memory_bytes=4 * items(8)[0].kept_bytes)


def test_buckets_come_from_many_ranks_and_nodes() -> None:
    layers = [
        replace(item, name=f"{layer}.{item.name}", bucket=str(layer))
        for layer in range(8)
        for item in items(8, 8, 8, 8)
    ]
    plan = make_plan(layers, 8, Affine(), ranks_per_node=4)
    assert plan.gap == 0
    for layer in range(8):
        owners = [owner for name, (owner,) in plan.owners.items() if name.startswith(f"{layer}.")]
        assert len(set(owners)) == 4
        assert sum(owner < 4 for owner in owners) == 2


def test_nodes_keep_about_the_same() -> None:
    plan = make_plan(items(*[64] * 2, *[1] * 30), 4, Affine(), ranks_per_node=2)
    assert plan.owners["w0"][0] // 2 != plan.owners["w1"][0] // 2


def test_batches_are_those_of_the_optimizer_in_the_order_of_the_forward() -> None:
    given = [Item(f"{k}", ((count, rows, 8),)) for k, (count, rows) in enumerate([(1, 4), (2, 6), (3, 4)])]
    plan = plan_of_owners(dict.fromkeys("012", 0), given, 1, Affine())
    (batches,) = plan.batches
    assert [(batch.pieces, batch.rows) for batch in batches] == [((("0", 1), ("2", 3)), 4), ((("1", 2),), 6)]
    assert [batch.ms for batch in batches] == [16.0, 12.0]


def test_batches_of_several_shapes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix of 4 rows fills a batch, so that the second comes after those of the layer in between."""
    monkeypatch.setattr("dmuon.batching.BATCH_ELEMENTS", 4 * 8)
    plan = plan_of_owners(dict.fromkeys(("w0", "w1", "w2"), 0), items(4, 3, 4), 1, Affine())
    assert [batch.pieces for batch in plan.batches[0]] == [(("w0", 1),), (("w1", 1),), (("w2", 1),)]


def test_planned_by_cost_not_by_elements() -> None:
    """Of equal size, and one costs sixteen times as much."""
    wide, square = Item("wide", ((1, 16, 256),)), [Item(f"s{k}", ((1, 64, 64),)) for k in range(3)]

    class ByShape:
        def cost(self, rows: int, cols: int, batch: int) -> Cost:
            return Cost(batch * min(rows, cols) ** 2, "measured")

    plan = make_plan([wide, *square], 2, ByShape())
    assert plan.makespan == 2 * 64**2
    assert math.isclose(plan.bound, 2 * 64**2)


def test_items_are_what_muon_updates() -> None:
    class Shaped:
        def __init__(self, *shape: int) -> None:
            self.shape = shape

    named = [
        ("embed.weight", Shaped(9, 4)),
        ("layers.3.up.weight", Shaped(8, 4)),
        ("layers.3.experts", Shaped(3, 4, 8)),
    ]
    found = items_of(MatrixPolicy().route_named(named), itemsize=2)
    assert found == [
        Item("layers.3.up.weight", ((1, 8, 4),), "layers.3", 2),
        Item("layers.3.experts", ((3, 4, 8),), "layers.3", 2),
    ]
    assert found[1].kept_bytes == 3 * 96 * 2
