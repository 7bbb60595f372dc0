"""The CuTe DSL kernel on warp-level matrix instructions, run from its PTX by the interpreter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cute_products import DTYPES, ExactCase, compiled, symmetric
from ptx import Memory, run
from ptx.mutate import survivors

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Unsupported
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.cute_kernels.symmetric_sm80 import SYMMETRIC_SM80, Plan
from dmuon.kernels.gpu.resources import resources_of
from dmuon.kernels.gpu.toolchain import tool

FIELDS = ("tile", "bk", "stages", "warps_m", "warps_n")


def config(*values: int) -> dict[str, Any]:
    return dict(zip(FIELDS, values, strict=True))


SMALL = config(32, 32, 3, 2, 1)
MIDDLE = config(64, 64, 2, 2, 2)
LARGE = config(128, 32, 4, 2, 4)


class Case(ExactCase):
    """For sm_80, or another architecture."""

    family = SYMMETRIC_SM80

    def __init__(self, *args: Any, arch: str = "sm_80", **others: Any) -> None:
        super().__init__(*args, arch=arch, multiprocessors=108, **others)

    @property
    def work(self) -> float:
        """Of tiles, and within those on the diagonal of parts of tiles."""
        plan = Plan(**self.binary.spec.options)
        side, parts = -(-self.out.shape[-1] // plan.tile), plan.tile // (16 * plan.warps_m)
        depth = -(-self.A.shape[-1] // plan.bk) * plan.bk
        tiles = side * (side - 1) / 2 + side * (parts + 1) / (2 * parts)
        return len(self.out) * tiles * 2 * plan.tile**2 * depth


@pytest.mark.parametrize(
    ("m", "n", "batch", "c"),
    [(1, 1, 1, "none"), (8, 24, 2, "out"), (33, 40, 1, "other"), (71, 200, 2, "out"), (96, 7, 1, "none")],
)
def test_ragged_edges(m, n, batch, c):
    Case(SMALL, m, n, batch=batch, c=c).check(None, 1)


def test_every_number_of_elements_beyond_the_last_whole_vector():
    for m in range(33, 41):
        Case(SMALL, m, m - 32, c="none").check(None)


@pytest.mark.parametrize(("m", "n"), [(1, 3), (40, 33), (77, 130)])
def test_columns_are_read_as_they_lie(m, n):
    Case(SMALL, m, n, dtype="fp16", out_dtype="fp16", by_columns=True, batch=2).check(1)


@pytest.mark.parametrize("same", [False, True])
def test_products_of_symmetric_operands_in_any_orientation(same):
    Case(SMALL, 75, 75, "symmetric_product", by_columns=True, same=same, c="out").check(2)


def test_results_in_fp32():
    Case(SMALL, 75, 40, out_dtype="fp32", batch=2).check(3)


@pytest.mark.parametrize(("choice", "by_columns"), [(MIDDLE, False), (LARGE, True)], ids=["64", "128"])
def test_larger_tiles(choice, by_columns):
    Case(choice, choice["tile"] + 5, 72, by_columns=by_columns, c="out").check(4)


def test_bands_of_tile_rows():
    """More tile rows than are walked together."""
    Case(SMALL, 32 * 11 - 5, 16, c="none").check(None)


def test_a_tile_on_the_diagonal_of_one_operand_reads_it_once():
    case = Case(SMALL, 64, 64, c="none")
    report = case.run()
    assert case.exact()
    # Two tiles on the diagonal and one below, each of 32 rows by 64, but that one of two operands.
    assert report.loaded[0] == 4 * 32 * 64 * 2
    assert report.stored[1] == 64 * 64 * 2


def test_the_result_is_symmetric_though_operands_do_not_commute():
    case = Case(SMALL, 72, 72, "symmetric_product", c="none")
    for tensor in (case.A, case.B):
        tensor.copy_(symmetric(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))))
    case.run(1)
    assert torch.equal(case.out, case.out.mT)
    product = 0.5 * case.A.double() @ case.B.double() + 3 * torch.eye(72).double()
    lower = torch.ones(72, 72).tril().bool()
    assert torch.allclose(case.out.double()[:, lower], product[:, lower], rtol=2**-8, atol=1e-4)


def test_matrices_of_a_batch_may_lie_anywhere():
    """Batch strides beyond 32 bits and below zero: between tensors far apart in memory."""
    far = torch.empty(1 << 20, dtype=torch.bfloat16)[:1024].view(32, 32)
    near = torch.empty(32, 32, dtype=torch.bfloat16)
    for first, second in ((near, far), (far, near)):
        for tensor in (near, far):
            tensor.copy_(torch.randint(-2, 3, tensor.shape))
        stride = (second.data_ptr() - first.data_ptr()) // 2
        A = replace(Matrices.of(first), batch=2, batch_stride=stride)
        out = torch.empty(2, 32, 32, dtype=torch.bfloat16)
        call = ProductCall("gram", A, None, None, Matrices.of(out))
        binary = compiled(SYMMETRIC_SM80.spec(call, SMALL, ARCHS["sm_80"]))
        run(binary, SYMMETRIC_SM80.launch(call, SMALL, binary, 108), Memory.of(first, second, out))
        assert torch.equal(out, torch.stack([first @ first.mT, second @ second.mT]))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_one_source_serves_every_arch(arch):
    case = Case(SMALL, 40, 40, c="out", arch=arch)
    assert f".target {arch}" in case.binary.ptx
    case.check(1)


def test_parameters_are_plain_scalars():
    params = [(param.offset, param.size) for param in Case(SMALL, 32, 32).binary.params]
    assert params == [(8 * k, 8) for k in range(8)] + [(64 + 4 * k, 4) for k in range(13)]


CALL = Case(SMALL, 64, 64).call


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"A": replace(CALL.A, dtype="fp32")}, "needs fp16 or bf16 operands, got fp32"),
        ({"out": replace(CALL.out, dtype="fp64")}, "with a result in fp64"),
        ({"C": replace(CALL.C, dtype="fp32")}, "C and the result must have one dtype, got fp32 and bf16"),
        ({"A": replace(CALL.A, row_stride=2 * CALL.A.row_stride, column_stride=2)}, "A must be contiguous"),
        (
            {"A": replace(CALL.A, address=CALL.A.address + 2)},
            "A must have its first element at a multiple of 16",
        ),
        (
            {"out": replace(CALL.out, row_stride=68)},
            "out must have its row stride at a multiple of 16 bytes, got 136",
        ),
        ({"C": replace(CALL.C, batch=2, batch_stride=4100)}, "C must have its batch stride"),
        ({"out": replace(CALL.out, row_stride=1 << 31)}, "out must have a row stride below"),
    ],
)
def test_what_it_cannot_serve(changes, message):
    with pytest.raises(Unsupported, match=re.escape(message)):
        SYMMETRIC_SM80.spec(replace(CALL, **changes), SMALL, ARCHS["sm_80"])


def test_too_much_shared_memory_is_refused_by_name():
    large = config(128, 64, 4, 2, 2)
    assert SYMMETRIC_SM80.spec(CALL, large, ARCHS["sm_80"])
    with pytest.raises(Unsupported, match="needs 131072 bytes of shared memory, sm_86 has 101376"):
        SYMMETRIC_SM80.spec(CALL, large, ARCHS["sm_86"])


@pytest.mark.parametrize(
    ("op", "wrong", "message"),
    [
        ("apply", SMALL, "op must be one of gram, symmetric_product, got 'apply'"),
        ("gram", {"tile": 32}, "config must have the fields"),
        ("gram", {**SMALL, "tile": 48}, "tile must be one of (32, 64, 128), got 48"),
        ("gram", config(32, 32, 3, 4, 1), "must divide a tile of 32"),
        ("gram", config(128, 32, 3, 2, 1), "64 threads cannot load 128 by 32"),
    ],
)
def test_wrong_configurations(op, wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SYMMETRIC_SM80.check(op, wrong)


@pytest.mark.parametrize("arch", list(ARCHS))
def test_configurations_on_offer_are_valid_and_fit(arch):
    found = SYMMETRIC_SM80.configs("gram", 4096, 16384, "bf16", ARCHS[arch])
    assert {choice["tile"] for choice in found} == {32, 64, 128}
    for choice in found:
        for out_dtype in DTYPES:
            call = replace(CALL, C=None, out=replace(CALL.out, dtype=out_dtype))
            SYMMETRIC_SM80.spec(call, choice, ARCHS[arch])
    assert {c["tile"] for c in SYMMETRIC_SM80.configs("gram", 48, 4096, "bf16", ARCHS[arch])} == {32, 64}
    assert not SYMMETRIC_SM80.configs("apply", 4096, 4096, "bf16", ARCHS[arch])
    assert not SYMMETRIC_SM80.configs("gram", 4096, 4096, "fp32", ARCHS[arch])


def plans(arch: str) -> Iterator[Plan]:
    for choice in SYMMETRIC_SM80.configs("gram", 4096, 16384, "bf16", ARCHS[arch]):
        for column_major in (False, True):
            yield Plan("bf16", "bf16", column_major, **choice)
            if arch == "sm_80":
                yield Plan("fp16", "fp32", column_major, **choice)


def spills(plan: Plan, arch: str) -> int:
    tool("cuobjdump")
    spec = KernelSpec("cute", "cute_kernels.symmetric_sm80_kernel", arch, vars(plan))
    return resources_of(compiled(spec)).local_bytes


def test_no_spills():
    assert not spills(Plan("bf16", "bf16", True, **LARGE), "sm_80")


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", list(ARCHS))
def test_no_configuration_on_offer_spills(arch):
    assert [plan for plan in plans(arch) if spills(plan, arch)] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("choice", SYMMETRIC_SM80.configs("gram", 4096, 16384, "bf16", ARCHS["sm_80"]))
def test_every_configuration_on_offer(choice):
    m = choice["tile"] + 13
    Case(choice, m, 5 * choice["bk"] + 3, c="out").check(None, 1, 2)
    Case(choice, m, choice["bk"] * choice["stages"], dtype="fp16", out_dtype="fp32", by_columns=True).check(3)
    Case(choice, m, m, "symmetric_product", dtype="fp16", out_dtype="fp16", batch=2).check(4)


def check_all(binary: Binary) -> None:
    # On diagonal tiles a second operand is loaded for symmetric_product alone.
    product = Case(SMALL, 44, 44, "symmetric_product")
    assert product.binary.spec == binary.spec
    for case in (Case(SMALL, 75, 140, c="out"), Case(SMALL, 40, 5, c="none"), product):
        for seed in (None, 1, 2):
            case.run(seed, binary)
            assert case.exact()


@pytest.mark.parametrize(
    "kind",
    ["barrier", "copy wait", "copy commit"]
    + [pytest.param(kind, marks=pytest.mark.slow) for kind in ("zero fill", "ldmatrix address")],
)
def test_every_dropped_wait_barrier_and_bound_is_noticed(kind):
    assert [str(mutant) for mutant in survivors(Case(SMALL, 75, 140).binary, check_all, kind)] == []
