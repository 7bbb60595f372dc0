"""The three products by whole and by blocks: exact on integers, right with every epilogue, checked arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmuon.kernels import apply, gram, symmetric_product
from dmuon.kernels.backends import BACKENDS, source_hash

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WAYS = [("torch", {})] + [
    ("blocked", {"block": block, "split": split})
    for block in (1, 16, 24, 64)
    for split in ("panel", "halves")
]
SIZES = [(1, 1), (7, 5), (16, 33), (50, 20), (65, 130)]


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Small integers: every product of two such matrices is exact in every dtype used here."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).double()


@pytest.mark.parametrize(("backend", "config"), WAYS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gram_is_exact_on_integers(
    size: tuple[int, int], dtype: torch.dtype, backend: str, config: dict[str, object]
) -> None:
    X = whole(*size)
    result = gram(X.to(dtype), backend=backend, config=config)
    assert torch.equal(result.double(), X @ X.mT)
    tall = whole(size[1], size[0]).mT  # column-major, and not contiguous
    assert torch.equal(gram(tall.to(dtype), backend=backend, config=config).double(), tall @ tall.mT)


@pytest.mark.parametrize(("backend", "config"), WAYS, ids=str)
def test_every_epilogue_and_a_batch_of_any_stride(backend: str, config: dict[str, object]) -> None:
    S = whole(4, 50, 50)[::2]
    S = S + S.mT
    C = whole(2, 50, 50, seed=1)
    C = C + C.mT
    expected = 2 * S @ S + 3 * C + 5 * torch.eye(50)
    common = {"alpha": 2.0, "beta": 3.0, "diag": 5.0, "backend": backend, "config": config}
    assert torch.equal(symmetric_product(S, S, C=C, **common), expected)  # type: ignore[arg-type]
    out = C.clone()
    assert symmetric_product(S, S, C=out, out=out, **common) is out  # type: ignore[arg-type]
    assert torch.equal(out, expected)
    apart = torch.full((2, 50, 100), torch.nan, dtype=torch.float64)[..., ::2]
    symmetric_product(S, S, C=C, out=apart, **common)  # type: ignore[arg-type]
    assert torch.equal(apart, expected)
    assert torch.equal(gram(S, alpha=-1.0, backend=backend, config=config), -S @ S.mT)


@pytest.mark.parametrize("split", ["panel", "halves"])
def test_the_second_factor_is_not_transposed(split: str) -> None:
    """P·(R·P) with R·P off symmetric by rounding: (P·P)·R in its place would ruin small eigenvalues."""
    P, T = whole(48, 48), whole(48, 48, seed=2)
    result = symmetric_product(P, T, backend="blocked", config={"block": 16, "split": split})
    lower = torch.tril(torch.ones(48, 48)).bool()
    assert torch.equal(result[lower], (P @ T)[lower])


def test_apply_is_the_weight_update() -> None:
    W, Q, X = whole(6, 9), whole(6, 6, seed=1), whole(6, 9, seed=2)
    expected = 0.75 * W - 0.5 * Q @ X
    assert torch.equal(apply(Q, X, alpha=-0.5, beta=0.75, C=W, out=W), expected)
    assert torch.equal(W, expected)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: gram(torch.ones(3)), "operands"),
        (lambda: gram(torch.ones(3, 4), backend="cublas"), "backend"),
        (lambda: gram(torch.ones(3, 4), backend="blocked", config={"block": 0, "split": "panel"}), "block"),
        (lambda: gram(torch.ones(3, 4), backend="torch", config={"block": 1}), "configuration"),
        (lambda: gram(torch.ones(3, 4), C=torch.ones(4, 4), beta=1.0), "C must"),
        (lambda: gram(torch.ones(3, 4), beta=1.0), "beta"),
        (lambda: gram(torch.ones(3, 4), out=torch.empty(3, 3).double()), "dtype"),
        (lambda: symmetric_product(torch.ones(3, 3), torch.ones(3, 4)), "square"),
        (lambda: apply(torch.ones(3, 4), torch.ones(4, 5)), "square"),
        (lambda: apply(torch.ones(3, 3), torch.ones(4, 5)), "rows"),
        (lambda: apply(torch.ones(3, 3), torch.ones(3, 5), backend="blocked"), "apply"),
    ],
)
def test_bad_arguments(call: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()  # type: ignore[operator]
    with pytest.raises(TypeError):
        gram(torch.ones(3, 4, dtype=torch.int32))


@pytest.mark.parametrize(("backend", "config"), WAYS[:3], ids=str)
def test_writing_over_what_is_read_is_refused(backend: str, config: dict[str, object]) -> None:
    ways = {"backend": backend, "config": config}
    A, B = torch.ones(3, 3), torch.eye(3)
    room = torch.zeros(7, 3)
    for call in (
        lambda: symmetric_product(A, B, out=A, **ways),  # type: ignore[arg-type]
        lambda: symmetric_product(A, B, out=B, **ways),  # type: ignore[arg-type]
        lambda: symmetric_product(A, A, C=B, beta=1.0, out=B.mT, **ways),  # type: ignore[arg-type]
        lambda: gram(room[:3], out=room[2:5], **ways),  # type: ignore[arg-type]
        lambda: gram(A, C=room[:3], beta=1.0, out=room[1:4], **ways),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="overlap"):
            call()
    assert torch.equal(A, torch.ones(3, 3)) and torch.equal(B, torch.eye(3)) and not room.any()
    gram(room[:3], out=room[3:6], **ways)  # type: ignore[arg-type]


def test_operands_are_tensors() -> None:
    for call in (
        lambda: gram([[1.0]]),  # type: ignore[arg-type]
        lambda: apply(torch.eye(2), 3.0),  # type: ignore[arg-type]
        lambda: gram(torch.eye(2), C=1.0, beta=1.0),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="tensors"):
            call()


def test_blocks_offered_are_few_and_can_win() -> None:
    blocked = BACKENDS["blocked"]
    assert blocked.configs("gram", 100, 400, "fp32") == []
    assert {config["block"] for config in blocked.configs("gram", 1024, 4096, "fp32")} == {128, 192, 256, 512}
    assert blocked.configs("apply", 1024, 4096, "fp32") == []
    for config in blocked.configs("symmetric_product", 1024, 1024, "bf16"):
        blocked.check("symmetric_product", config)


def test_a_backend_hash_depends_on_its_own_sources() -> None:
    assert source_hash(["torch"]) != source_hash(["blocked"])
    assert source_hash(["torch", "blocked"]) == source_hash(["blocked", "torch"])
    with pytest.raises(KeyError):
        source_hash(["cublas"])
