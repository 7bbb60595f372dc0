"""A training that is interrupted, and goes on elsewhere, equals one that was not, in fp64."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_sessions import Session, reference, run, worst

ZERO2 = {"reshard_after_forward": False}


def check(path: Path, sessions: list[Session]) -> None:
    for session in sessions:
        found = run(path, session)
        assert worst(found, reference(session.stop)) < 1e-12, session


@pytest.mark.case(row="A3")
@pytest.mark.case(row="A4")
def test_resumes_on_other_ranks_meshes_and_plans(tmp_path: Path) -> None:
    check(
        tmp_path,
        [
            Session(0, 2, 4),
            Session(2, 3, 4, nodes=2),
            Session(3, 4, 3, own=ZERO2, mirrored=True),
            Session(4, 5, 0),
            Session(5, 6, 2),
        ],
    )


def test_torchs_own_functions_save_and_load_the_same(tmp_path: Path) -> None:
    check(
        tmp_path,
        [
            Session(0, 2, 0),
            Session(2, 3, 4, nodes=2, by="async"),
            Session(3, 4, 3, by="dcp", mirrored=True),
            Session(4, 5, 2),
        ],
    )


def test_flat_optimizer_states(tmp_path: Path) -> None:
    check(tmp_path, [Session(0, 2, 3, by="dcp", flat=True), Session(2, 3, 2, by="async", flat=True)])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("by", ["helpers", "dcp", "async"])
def test_resumes_everywhere(ranks: int, by: str, tmp_path: Path) -> None:
    check(tmp_path, [Session(0, 2, ranks, nodes=2 if ranks > 2 else 1, by=by)])
    for resumed in (
        Session(2, 3, 0, by=by),
        Session(3, 4, 6, nodes=3, by=by),
        Session(4, 5, 1, own=ZERO2, by=by),
    ):
        check(tmp_path, [resumed])
