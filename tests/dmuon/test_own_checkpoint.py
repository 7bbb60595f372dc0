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
        tmp_path / "run",
        [
            Session(0, 2, 4),
            Session(2, 3, 4, nodes=2),
            Session(3, 4, 3, own=ZERO2, mirrored=True),
            Session(4, 5, 0),
            Session(5, 6, 2),
        ],
    )
