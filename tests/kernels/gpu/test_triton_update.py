"""Weight updates, in the last product and after a written result: their PTX run by the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_matrices import Strewn, execute, strewn
from triton_products import check_resources, compiled, fill, in_interpreter, matrices

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.resources import resources_of
from dmuon.kernels.gpu.triton_kernels.elementwise import CONFIG
from dmuon.kernels.gpu.triton_kernels.move import MOVE, MoveCall
from dmuon.kernels.gpu.triton_kernels.update import UPDATE, UpdateCall

pytest.importorskip("triton")

SCALARS = ((0.5, 0.5, -0.25, 0.5), (0.5, 0.5, 0.0, 1.0), (0.5, 0.5, 1.0, -2.0))
"""1 − μ, μ, α and β; the second moves nothing."""


def weights_of(dtype: str, rows: int, cols: int, shift: int = 8) -> Strewn:
    """Integers, so that updates are exact."""
    batch = Strewn(*(strewn(3, rows, cols, dtype, k, shift=shift) for k in range(3)))
    for k, weight in enumerate(batch.weights):
        fill(weight, k)
    return batch


def check_product(
    arch: str,
    dtype: str,
    weight_dtype: str,
    rows: int,
    cols: int,
    *,
    shift: float = 0.0,
    shifted: int = 8,
    padding: int = 8,
    seeds: tuple[int | None, ...] = (None, 1),
) -> None:
    m, n, tall = min(rows, cols), max(rows, cols), rows > cols
    Q = fill(matrices(3, m, m, dtype, padding=padding), 1, symmetric=True)
    X = fill(matrices(3, m, n, dtype, by_columns=tall, padding=padding), 2)
    direction = Q.double() @ X.double() + shift * X.double()
    for seed in seeds:
        batch = weights_of(weight_dtype, rows, cols, shifted)
        table = batch.table(SCALARS)
        wanted = [
            (beta * weight.double() + alpha * (part.mT if tall else part)).to(weight.dtype)
            for weight, part, (_, _, alpha, beta) in zip(batch.weights, direction, SCALARS, strict=True)
        ]
        before = [tensor.clone() for tensor in batch.tensors[:6]]
        aligned = all(weight.data_ptr() % 16 == 0 for weight in batch.weights)
        assert aligned == (shifted == 8)
        call = UpdateCall(table.data_ptr(), Matrices.of(Q), Matrices.of(X), shift, weight_dtype, aligned)
        (report,) = execute(UPDATE, call, UPDATE.config(call), arch, [*batch.tensors, Q, X, table], seed)
        assert all(map(torch.equal, batch.weights, wanted))
        assert all(map(torch.equal, batch.tensors[:6], before)) and batch.nothing_beside_was_touched()
        size = rows * cols * batch.weights[0].itemsize
        assert report.loaded[6:9] == report.stored[6:9] == [size] * 3


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "rows", "cols", "options"),
    [
        ("fp16", "fp32", 72, 136, {"shift": 2.0}),
        ("bf16", "bf16", 136, 72, {}),
        ("fp16", "fp32", 136, 40, {"shift": -1.0}),
        ("fp16", "fp32", 24, 40, {"shifted": 3}),
        ("bf16", "fp16", 51, 37, {"shift": 1.0, "shifted": 5, "padding": 0}),
        ("fp16", "fp32", 1, 5, {"shift": 1.0, "shifted": 1}),
        ("fp16", "fp32", 5, 1, {"shift": 1.0, "shifted": 1}),
    ],
)
def test_the_update_rides_in_the_last_product(
    arch: str, dtype: str, weight_dtype: str, rows: int, cols: int, options: dict[str, Any]
) -> None:
    """Exactly on integers; each weight is read and written once, and nothing but weights is written."""
    check_product(arch, dtype, weight_dtype, rows, cols, **options)


def test_what_is_not_finite_shows_in_its_own_weight() -> None:
    """N2; and N7: a weight whose α is zero is as it was."""
    batch = weights_of("fp32", 40, 72)
    table, before = batch.table(SCALARS), [weight.clone() for weight in batch.weights]
    Q, X = fill(matrices(3, 40, 40, "fp16"), 1), fill(matrices(3, 40, 72, "fp16"), 2)
    Q[0], X[0] = torch.nan, torch.nan
    call = UpdateCall(table.data_ptr(), Matrices.of(Q), Matrices.of(X), 0.0, "fp32", True)
    execute(UPDATE, call, UPDATE.config(call), "sm_80", [*batch.tensors, Q, X, table], 1)
    assert batch.weights[0].isnan().all()
    assert torch.equal(batch.weights[1], before[1])
    wanted = Q[2].double() @ X[2].double() - 2 * before[2].double()
    assert torch.equal(batch.weights[2].double(), wanted)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "rows", "cols", "shifted", "padding"),
    [
        ("fp16", "fp32", 24, 136, 8, 0),
        ("bf16", "bf16", 40, 72, 8, 8),
        ("fp16", "fp16", 9, 33, 3, 5),
        ("bf16", "fp32", 1, 1, 1, 8),
    ],
)
def test_an_update_by_a_written_result(
    arch: str, dtype: str, weight_dtype: str, rows: int, cols: int, shifted: int, padding: int
) -> None:
    direction = fill(matrices(3, rows, cols, dtype, padding=padding), 5)
    for seed in (None, 1):
        batch = weights_of(weight_dtype, rows, cols, shifted)
        table = batch.table(SCALARS)
        wanted = [
            (beta * weight.double() + alpha * part.double()).to(weight.dtype)
            for weight, part, (_, _, alpha, beta) in zip(batch.weights, direction, SCALARS, strict=True)
        ]
        call = MoveCall(table.data_ptr(), Matrices.of(direction), weight_dtype, shifted == 8)
        config = CONFIG | {"elements": 128}
        (report,) = execute(MOVE, call, config, arch, [*batch.tensors, direction, table], seed)
        assert all(map(torch.equal, batch.weights, wanted)) and batch.nothing_beside_was_touched()
        size = rows * cols * batch.weights[0].itemsize
        assert report.loaded[:9] == [0] * 6 + [size] * 3 and report.stored[:9] == [0] * 6 + [size] * 3


def check_mathematics() -> None:
    """To be run where Triton interprets kernels."""
    import triton.language as tl

    from dmuon.kernels.gpu.triton_kernels.move_kernel import move

    batch = weights_of("fp32", 9, 33)
    direction = torch.randn(3, 9, 33)
    table = batch.table(SCALARS)
    wanted = [
        beta * weight + alpha * part
        for weight, part, (_, _, alpha, beta) in zip(batch.weights, direction, SCALARS, strict=True)
    ]
    move[(6,)](table, direction, 1, 297, 0, 297, 2, WEIGHT=tl.float32, ALIGNED=False, BLOCK=64)
    for weight, value in zip(batch.weights, wanted, strict=True):
        torch.testing.assert_close(weight, value)
    assert batch.nothing_beside_was_touched()


def test_under_the_triton_interpreter() -> None:
    in_interpreter("import test_triton_update\ntest_triton_update.check_mathematics()\n")


def test_what_is_refused() -> None:
    Q, X = torch.empty(1, 16, 16), torch.empty(1, 16, 32)
    call = UpdateCall(0, Matrices.of(Q), Matrices.of(X), 0.0, "fp32", True)
    with pytest.raises(Unsupported, match="operands must all be fp16 or all bf16, got fp32"):
        UPDATE.specs(call, UPDATE.config(call), ARCHS["sm_80"])
    with pytest.raises(Unsupported, match="weight_dtype must be one of fp32, bf16, fp16, got fp64"):
        MOVE.specs(MoveCall(0, Matrices.of(X), "fp64", True), CONFIG, ARCHS["sm_80"])


@pytest.mark.parametrize(
    "arch",
    [arch if arch in ("sm_80", "sm_90a") else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS],
)
def test_nothing_is_spilled(arch: str) -> None:
    """Whatever shape and layout decide: tiles, vectors, the side that is longer."""
    for rows, cols, weight_dtype in (
        (4096, 11008, "fp32"),
        (11008, 4096, "bf16"),
        (64, 512, "fp32"),
        (511, 63, "fp32"),
    ):
        m, n, tall = min(rows, cols), max(rows, cols), rows > cols
        line = -(-cols // 8) * 8
        X = Matrices(16, "fp16", 4, m, n, line * rows, *((1, line) if tall else (line, 1)))
        side = -(-m // 8) * 8
        Q = Matrices(16, "fp16", 4, m, m, side * m, side, 1)
        call = UpdateCall(0, Q, X, 0.0, weight_dtype, True)
        config = UPDATE.config(call)
        (spec,) = UPDATE.specs(call, config, ARCHS[arch])
        check_resources(spec, config)


def test_accesses_are_wide() -> None:
    for arch in ("sm_80", "sm_90a"):
        direction = Matrices(0, "fp16", 4, 128, 512, 1 << 16, 512, 1)
        (spec,) = MOVE.specs(MoveCall(0, direction, "fp32", True), CONFIG, ARCHS[arch])
        used = resources_of(compiled(spec))
        assert used.local_bytes == 0 and used.occupancy >= 0.5, used
        assert any("128" in name for name in used.instructions if name.startswith("STG"))
