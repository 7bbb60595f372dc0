"""What the tuner gets to time: legal, right, without repetition, the default among it."""

from __future__ import annotations

import json

import pytest
import torch
from spectra import DTYPES, expected

from dmuon.kernels import polar_express
from dmuon.kernels.backends import BACKENDS, blocked
from dmuon.kernels.backends.compiled import TRITON
from dmuon.kernels.candidates import ns_candidates, plain_choice
from dmuon.kernels.choose import NEAR_SQUARE, TINY, NSChoice, Problem, heuristic_choice
from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.reference import relative_error
from dmuon.kernels.run import run_ns

PROBLEMS = [
    Problem("gram_ns", batch, m, n, dtype, device, "polar_express:5")
    for batch in (1, 8)
    for m, n in ((64, 64), (768, 768), (768, 1000), (768, 3072), (2048, 2048), (1024, 8192))
    for dtype in ("fp32", "bf16")
    for device in ("cpu:x:2", "cuda:X")
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_default_comes_first_and_nothing_twice(problem: Problem) -> None:
    found = ns_candidates(problem, polar_express())
    assert found[0] == heuristic_choice(problem)
    configs = [json.dumps(choice.to_config(), sort_keys=True) for choice in found]
    assert len(set(configs)) == len(configs) <= 80
    for choice in found:
        assert NSChoice.from_config(choice.to_config()) == choice
        for op in ("gram", "symmetric_product", "apply"):
            product = getattr(choice, op)
            BACKENDS[product.backend].check(op, product.config)
        assert problem.batch > 1 or not choice.loop


@pytest.mark.parametrize(("m", "n"), [(800, int(800 * NEAR_SQUARE) - 1), (TINY - 1, 1000)])
def test_near_square_and_tiny_matrices_are_offered_the_standard_form_alone_in_half_precision(
    m: int, n: int
) -> None:
    for dtype, forms in (("fp16", {"standard"}), ("bf16", {"standard"}), ("fp32", {"gram", "standard"})):
        problem = Problem("gram_ns", 1, m, n, dtype, "cuda:X", "polar_express:5")
        found = ns_candidates(problem, polar_express())
        assert {choice.method for choice in found} == forms
        assert found[0] == heuristic_choice(problem)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", [(1, 48, 60), (1, 48, 96), (3, 48, 120)], ids=str)
def test_every_candidate_computes_the_polynomial(
    shape: tuple[int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks small enough for matrices that a test can afford."""
    monkeypatch.setattr(blocked, "BLOCKS", (8, 16, 24))
    problem = Problem("gram_ns", *shape, dtype, "cpu:x:2", "polar_express:5")
    found = ns_candidates(problem, polar_express())
    backends = {choice.gram.backend for choice in found}
    assert (
        backends == {"torch", "blocked"} and len({choice.gram.config.get("block") for choice in found}) == 4
    )
    G = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    exact = expected(G, polar_express().steps)
    limit = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}[dtype]
    for choice in [*found, plain_choice(problem)]:
        result = run_ns(G, choice, polar_express(), DTYPES[dtype])
        assert relative_error(result, exact).max() < limit, choice


@pytest.mark.parametrize(("m", "n"), [(1024, 4096), (2048, 8192), (256, 1024)])
def test_products_that_hand_each_other_halves_or_divide_their_tiles(
    m: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Triton offers them to an H200."""
    monkeypatch.setattr("dmuon.kernels.candidates.arch_of", lambda device: ARCHS["sm_90a"])
    monkeypatch.setattr(TRITON, "unavailable", lambda device: None)
    problem = Problem("gram_ns", 1, m, n, "fp16", "cuda:X", "polar_express:5")
    found = ns_candidates(problem, polar_express(), ["torch", "triton"])
    halves = [choice for choice in found if "lower" in choice.gram.config]
    divided = [choice for choice in found if "splits" in choice.gram.config]
    assert halves and divided
    for choice in (*halves, *divided):
        for op in ("gram", "symmetric_product"):
            product = getattr(choice, op)
            if product.backend == "triton":
                # So that a neighbouring shape may use it, and that it is compiled ahead.
                assert dict(product.config) in TRITON.configs(op, m, n, "fp16", ARCHS["sm_90a"])
    for choice in halves:
        assert {**choice.gram.config, "lower": "both"} == choice.symmetric_product.config
    if m == 2048:
        # 136 tiles of 128 on 132 multiprocessors: both products have four left over, the shorter in fewer parts.
        assert {(c.gram.config["splits"], c.symmetric_product.config["splits"]) for c in divided} == {(16, 8)}
    for choice in divided:
        tiles = {name: value for name, value in choice.gram.config.items() if name != "splits"}
        assert (
            choice.symmetric_product.backend == "torch"
            or tiles.items() <= choice.symmetric_product.config.items()
        )


class Absent:
    """A backend that is installed but has no device to run on."""

    name, requires, sources = "absent", ("torch",), ()

    def unavailable(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "it needs a GPU"

    def configs(self, op: str, m: int, n: int, dtype: str, arch: object = None) -> list[dict[str, object]]:
        return [] if op == "gram_ns" else [{"tile": 128}]


@pytest.mark.case(row="T3")
def test_a_backend_that_cannot_run_here_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is used."""
    monkeypatch.setitem(BACKENDS, "absent", Absent())  # type: ignore[misc]

    def offered(device: str, backends: list[str] | None = None) -> set[str]:
        problem = Problem("gram_ns", 1, 768, 3072, "fp32", device, "polar_express:5")
        found = ns_candidates(problem, polar_express(), backends)
        return {name for choice in found for name in choice.backends}

    assert offered("cpu:x:2") == {"torch", "blocked"}
    assert offered("cuda:X") == {"torch", "blocked", "absent"}
    assert offered("cpu:x:2", ["absent", "torch"]) == {"torch"}
    assert offered("cuda:X", ["absent"]) == {"absent", "torch"}  # mixed with whole products for small m
    assert offered("cpu:x:2", ["absent"]) == set()
    with pytest.raises(KeyError):
        offered("cpu:x:2", ["cublas"])


def test_plain_is_what_a_library_without_tuning_runs() -> None:
    plain = plain_choice(PROBLEMS[0])
    assert plain.method == "standard" and plain.backends == ("torch",) and not plain.loop
