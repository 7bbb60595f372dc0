"""Owned training equals training in one process: losses, weights, state and gradient norms, in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
from own_models import Training, train_each
from own_processes import run_ranks

from dmuon.policy import MatrixPolicy

ZERO2 = {"reshard_after_forward": False}
SPLIT = {"policy": MatrixPolicy(splits={"*.up.weight": (16, 32)})}
SCENARIOS = {
    "zero3": Training(steps=3),
    "zero2": Training(steps=3, own=ZERO2),
    "accumulation-sync": Training(micro_batches=2),
    "accumulation-no-sync": Training(micro_batches=3, sync_all=False),
    "accumulation-no-sync-zero2": Training(micro_batches=2, sync_all=False, own=ZERO2),
    "forwards-first-sum": Training(micro_batches=2, forwards_first="sum"),
    "forwards-first-each": Training(micro_batches=2, forwards_first="each"),
    "checkpointing": Training(checkpointing="nonreentrant"),
    "checkpointing-zero2": Training(checkpointing="nonreentrant", own=ZERO2),
    "checkpointing-reentrant": Training(checkpointing="reentrant"),
    "unused-on-one": Training(unused={1: {1}}),
    "unused-on-some-zero2": Training(unused={1: {2}, 0: {0}}, own=ZERO2),
    "unused-on-all": Training(unused={rank: {1} for rank in range(8)}),
    "unused-checkpointing": Training(unused={1: {1}}, checkpointing="nonreentrant"),
    "unused-reentrant": Training(unused={1: {1}}, checkpointing="reentrant", micro_batches=2),
    "block-twice": Training(order=[0, 1, 0, 1, 2]),
    "block-twice-in-a-row": Training(order=[0, 0, 1, 2], own=ZERO2),
    "another-order": Training(order=[2, 0, 1]),
    "evaluation-between": Training(evaluate=True, micro_batches=2),
    "evaluation-between-zero2": Training(evaluate=True, micro_batches=2, own=ZERO2),
    "clipping": Training(clip=0.1, unused={1: {1}}),
    "fused-weight": Training(own=SPLIT),
    "zero-before-backward": Training(zero_late=True, steps=3),
    "zero-before-backward-accumulation": Training(zero_late=True, micro_batches=2, order=[0, 1, 0, 2]),
}


def check(ranks: int, names: list[str], nodes: int = 1, timeout: float = 60.0) -> None:
    trainings = [replace(SCENARIOS[name], nodes=nodes) for name in names]
    results = run_ranks(ranks, train_each, trainings, timeout=timeout)
    worst = {
        name: {key: max(result[k][key] for result in results) for key in results[0][k]}
        for k, name in enumerate(names)
    }
    assert not {name: found for name, found in worst.items() if not max(found.values()) < 1e-12}


@pytest.mark.case(row="R1")
@pytest.mark.case(row="R2")
@pytest.mark.case(row="R3")
@pytest.mark.case(row="R5")
@pytest.mark.case(row="R10")
@pytest.mark.case(row="A1")
@pytest.mark.case(row="A2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process(ranks: int) -> None:
    names = list(SCENARIOS)
    check(ranks, [*names[:2], *names[2 + ranks // 4 :: 2]])


SOME = ["zero3", "zero2", "accumulation-no-sync", "unused-on-some-zero2", "block-twice", "clipping"]
"""Each scenario has process groups and their threads of its own: on many ranks, all of them crowd two cores."""


@pytest.mark.case(row="R11")
def test_two_nodes_equal_one_process() -> None:
    check(4, SOME, nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (4, 4), (8, 2)])
def test_any_nodes_equal_one_process(ranks: int, nodes: int) -> None:
    check(ranks, list(SCENARIOS) if ranks <= 4 else SOME, nodes, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_any_number_of_ranks_equals_one_process(ranks: int) -> None:
    check(ranks, list(SCENARIOS) if ranks <= 4 else SOME, timeout=400)


@pytest.mark.slow
def test_compiled_equals_one_process() -> None:
    compiled = [Training(compiled="block", micro_batches=2), Training(compiled="model", own=ZERO2)]
    for result in run_ranks(2, train_each, compiled, timeout=250):
        assert all(max(found.values()) < 1e-12 for found in result), result
