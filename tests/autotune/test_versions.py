"""What was measured with another GPU, driver, library version or kernel source is not used."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
from simulated import PLAIN, blocked, trial

from dmuon.autotune import valid, versions
from dmuon.autotune.answers import choice_of
from dmuon.kernels.backends import BACKENDS


def test_a_trial_made_now_is_valid():
    made = trial(blocked(128), 3.0)
    assert made.versions == {"torch": version("torch")}
    assert valid(made)
    assert choice_of(made) == blocked(128)


@pytest.mark.case(row="T2")
@pytest.mark.parametrize(
    "changes",
    [
        {"versions": {"torch": "2.0.0"}},
        {"versions": {}},
        {"versions": {"torch": version("torch"), "triton": "3.0.0"}},
        {"source_hash": "0123456789abcdef"},
        {"backend": "torch+warp9"},
        {"backend": "warp9"},
    ],
    ids=str,
)
def test_other_software_makes_it_invalid(changes):
    made = replace(trial(blocked(128), 3.0), **changes)
    assert not valid(made)
    assert choice_of(made) is None


@pytest.mark.case(row="T2")
def test_a_changed_kernel_source_makes_it_invalid(monkeypatch):
    made = trial(blocked(128), 3.0)
    monkeypatch.setattr(versions, "source_hash", lambda backends: "another")
    assert not valid(made)


def test_a_backend_depends_on_its_own_sources_alone():
    """Touching one backend must not throw away what is known of the others."""
    torch_alone, both = trial(PLAIN, 3.0), trial(blocked(128), 3.0)
    assert torch_alone.source_hash != both.source_hash


@pytest.mark.case(row="T2")
def test_another_driver_makes_a_cuda_trial_invalid(monkeypatch):
    monkeypatch.setattr(versions, "_cuda_driver", lambda: "580.65.06")
    made = replace(
        trial(PLAIN, 3.0),
        device="cuda:NVIDIA H200",
        versions={"torch": version("torch"), "cuda_driver": "580.65.06"},
    )
    assert valid(made)
    monkeypatch.setattr(versions, "_cuda_driver", lambda: "570.10")
    assert not valid(made)


def test_a_cpu_trial_does_not_ask_for_a_driver():
    assert "cuda_driver" not in versions.versions_now(["torch"], "cpu:some:2")


def test_asking_for_versions_imports_nothing(monkeypatch):
    monkeypatch.setattr(type(BACKENDS["blocked"]), "requires", ("torch", "tilelang", "surely-not-there"))
    before = set(sys.modules)
    found = versions.versions_now(["blocked"], "cpu:x:1")
    assert found["surely-not-there"] == "not installed"
    assert "tilelang" in found
    assert not any(name.startswith("tilelang") for name in set(sys.modules) - before)
