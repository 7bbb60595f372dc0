"""The CuTe DSL kernel on TMA and wgmma, run from its PTX by the interpreter."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cute_products import ExactCase, compiled, symmetric
from ptx import Memory, run

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary, Launch, TensorMap, Unsupported
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.cute_kernels.symmetric_sm90 import SYMMETRIC_SM90, Plan
from dmuon.kernels.gpu.toolchain import tool

pytest.importorskip("cutlass")

SM_90A = ARCHS["sm_90a"]


def config(
    arrangement: str, tile: int, rows: int, stages: int, cluster: int = 1, bk: int = 64
) -> dict[str, Any]:
    fields = {"bk": bk, "stages": stages, "cluster": cluster}
    return {"arrangement": arrangement, "tile": tile, "rows": rows, **fields}


COOPERATIVE = config("cooperative", 128, 128, 4)
PING_PONG = config("ping-pong", 64, 64, 3)


class Case(ExactCase):
    """For sm_90a, on a GPU of so many multiprocessors."""

    family = SYMMETRIC_SM90
    result_by_columns = True

    def __init__(self, *args: Any, multiprocessors: int = 2, **others: Any) -> None:
        super().__init__(*args, arch="sm_90a", multiprocessors=multiprocessors, **others)

    @property
    def work(self) -> int:
        """Of whole tiles."""
        plan = Plan(**self.binary.spec.options)
        tiles = -(-self.out.shape[-1] // plan.tile)
        depth = -(-self.A.shape[-1] // plan.bk) * plan.bk
        lower = len(self.out) * tiles * (tiles + 1) // 2
        return lower * 2 * plan.tile**2 * depth


@pytest.mark.parametrize(("m", "n", "c"), [(1, 1, "none"), (72, 200, "out"), (136, 8, "other")])
def test_ping_pong(m, n, c):
    Case(PING_PONG, m, n, batch=2, c=c).check(None, 1)


@pytest.mark.parametrize(("m", "n", "c"), [(24, 72, "other"), (200, 136, "out")])
def test_cooperative(m, n, c):
    Case(COOPERATIVE, m, n, c=c).check(None, 1)


def test_three_warpgroups():
    Case(config("cooperative", 192, 192, 3), 200, 72, dtype="fp16", out_dtype="fp16").check(2)


def test_tiles_in_turns():
    Case(config("ping-pong", 192, 64, 2), 200, 200, c="out").check(1)


def test_products_of_two_operands_in_both_orientations():
    Case(PING_PONG, 136, 136, "symmetric_product", by_columns=True).check(1)


@pytest.mark.parametrize("configuration", [PING_PONG, COOPERATIVE], ids=["ping-pong", "cooperative"])
def test_columns_are_read_as_they_lie(configuration):
    Case(configuration, 136, 72, "gram", "fp16", by_columns=True).check(1)


def test_what_is_not_added_is_not_read():
    case = Case(PING_PONG, 72, 72)
    case.c.fill_(float("nan"))
    case.call = replace(case.call, beta=0.0)
    case.expected = (0.5 * case.A.double() @ case.A.double().mT + 3.0 * torch.eye(72).double()).bfloat16()
    report = case.run(1)
    assert case.exact() and report.loaded[1] == 0


def test_results_in_fp32():
    Case(PING_PONG, 136, 72, out_dtype="fp32").check(1)


@pytest.mark.parametrize(("arrangement", "m", "n"), [("cooperative", 264, 72), ("ping-pong", 136, 330)])
def test_clusters(arrangement, m, n):
    # 6 tiles fill their clusters; 3 tiles leave one CTA of the last cluster without any.
    Case(config(arrangement, 128, 128, 4, cluster=2), m, n, c="out", multiprocessors=4).check(1)


SHIPPED = {
    "-".join(str(value) for value in each.values()): each
    for each in SYMMETRIC_SM90.configs("gram", 2048, 4096, "bf16", SM_90A)
}


@pytest.mark.slow
@pytest.mark.parametrize("configuration", SHIPPED.values(), ids=SHIPPED.keys())
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "by_columns"),
    [("bf16", "bf16", False), ("fp16", "fp16", True), ("bf16", "fp32", False), ("fp16", "fp32", True)],
)
def test_every_configuration(configuration, dtype, out_dtype, by_columns):
    m, options = configuration["tile"] + 8, (dtype, out_dtype)
    try:
        Case(configuration, m, 136, "gram", *options, 2, by_columns, "out", multiprocessors=2).check(None, 1)
    except Unsupported as error:
        pytest.skip(str(error))
    Case(configuration, m, m, "symmetric_product", *options, 1, by_columns, multiprocessors=4).check(2)
    Case(configuration, m - 16, 8, "gram", *options, 1, by_columns, "none").check(3)


@pytest.mark.slow
def test_rounding_is_that_of_the_output_alone():
    generator = torch.Generator().manual_seed(0)
    for configuration in (COOPERATIVE, PING_PONG):
        case = Case(configuration, 328, 328, "symmetric_product")
        values = symmetric(torch.randn(1, 328, 328, generator=generator).double()) / 18
        case.A.copy_(values)
        case.B.copy_(0.5 * values - 2 * values @ values)
        case.c.copy_(symmetric(torch.randn(1, 328, 328, generator=generator)))
        case.run(1)
        alpha, beta, diag = case.scalars
        exact = (
            alpha * case.A.double() @ case.B.double()
            + beta * case.c.double()
            + diag * torch.eye(328).double()
        )
        lower = (case.out.double() - exact).tril()
        assert torch.equal(case.out, case.out.mT)
        assert (lower.abs() <= 2**-8 * exact.abs() + 1e-5).all()


def sass_of(binary: Binary, folder: Path) -> tuple[str, str]:
    """The machine code as text, and its use of resources."""
    file = folder / "kernel.cubin"
    file.write_bytes(binary.cubin)
    commands = [tool("nvdisasm"), file], [tool("cuobjdump"), "--dump-resource-usage", file]
    code, usage = (
        subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in commands
    )
    return code, usage


def check_machine_code(binary: Binary, folder: Path) -> None:
    code, usage = sass_of(binary, folder)
    plan = Plan(**binary.spec.options)
    assert f"HGMMA.64x{plan.tile}x16" in code and "UTMALDG.3D" in code and "UTMASTG.3D" in code
    assert ("UTMALDG.3D.MULTICAST" in code) == (plan.cluster > 1)
    assert "STACK:0" in usage and "LOCAL:0" in usage
    assert not re.search(r"\b(STL|LDL)\b", code)
    assert (
        128 * sum(registers * n for registers, n in zip(plan.registers, (1, plan.consumers), strict=True))
        <= 65536
    )
    producer, consumer = code.index("USETMAXREG.DEALLOC"), code.index("USETMAXREG.TRY_ALLOC")
    assert producer < consumer
    for text, limit in zip((code[producer:consumer], code[consumer:]), plan.registers, strict=True):
        assert max(int(name) for name in re.findall(r"\bR(\d+)\b", text)) < limit


@pytest.mark.parametrize("configuration", [COOPERATIVE, PING_PONG], ids=["cooperative", "ping-pong"])
def test_machine_code(configuration, tmp_path):
    check_machine_code(Case(configuration, 8, 8).binary, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", SHIPPED.values(), ids=SHIPPED.keys())
def test_machine_code_of_every_configuration(configuration, tmp_path):
    for by_columns in (False, True):
        for out_dtype in ("bf16", "fp32"):
            try:
                binary = Case(configuration, 8, 8, out_dtype=out_dtype, by_columns=by_columns).binary
            except Unsupported:
                continue
            check_machine_code(binary, tmp_path)


def test_configurations_fit_and_are_understood():
    for m in (8, 64, 65, 300, 1024, 5000):
        for op in ("gram", "symmetric_product"):
            found = SYMMETRIC_SM90.configs(op, m, m, "fp16", SM_90A)
            assert found
            for each in found:
                SYMMETRIC_SM90.check(op, each)
                assert Plan("fp16", "fp16", False, **each).shared_bytes <= SM_90A.shared_bytes
    assert {each["tile"] for each in SYMMETRIC_SM90.configs("gram", 4096, 64, "bf16", SM_90A)} == {
        64,
        128,
        192,
        256,
    }
    assert all(each["tile"] == 64 for each in SYMMETRIC_SM90.configs("gram", 64, 64, "bf16", SM_90A))
    assert not SYMMETRIC_SM90.configs("gram", 64, 64, "bf16", ARCHS["sm_80"])
    assert not SYMMETRIC_SM90.configs("gram", 64, 64, "fp32", SM_90A)
    assert not SYMMETRIC_SM90.configs("apply", 64, 64, "bf16", SM_90A)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile": 96}, r"tile and rows of ping-pong must be one of \(\(64, 64\).*, got \(96, 64\)"),
        ({"arrangement": "solo"}, "arrangement must be one of cooperative, ping-pong, got 'solo'"),
        ({"stages": 1}, "stages must be one of .*, got 1"),
        ({"cluster": 4}, r"cluster must be one of \[1, 2\], got 4"),
        ({"warps": 4}, "config must have the fields .*, got .*warps"),
    ],
)
def test_wrong_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SYMMETRIC_SM90.check("gram", {**PING_PONG, **changes})


def test_unsupported_calls_say_why():
    def message(configuration=PING_PONG, arch="sm_90a", **changes) -> str:
        call = replace(Case(PING_PONG, 24, 40, batch=2).call, **changes)
        with pytest.raises(Unsupported) as error:
            SYMMETRIC_SM90.spec(call, configuration, ARCHS[arch])
        return str(error.value)

    case = Case(PING_PONG, 24, 40, batch=2)
    A, C = case.call.A, case.call.C
    assert message(arch="sm_80") == "needs sm_90a, got sm_80"
    assert "got fp32" in message(A=replace(A, dtype="fp32"))
    assert "one dtype, got bf16 and fp16" in message(B=replace(A, dtype="fp16"))
    assert "one dtype, got fp32 and bf16" in message(C=replace(C, dtype="fp32"))
    assert message(A=replace(A, row_stride=41)).endswith(
        "A must have its row stride at a multiple of 16 bytes, got 82"
    )
    assert "batch stride" in message(A=replace(A, batch_stride=A.batch_stride + 1))
    assert "batch stride" in message(A=replace(A, batch_stride=0))
    assert "first element" in message(A=replace(A, address=A.address + 2))
    assert "strides 96, 2" in message(A=replace(A, row_stride=96, column_stride=2))
    assert "shared memory, sm_90a has 232448" in message(config("cooperative", 192, 192, 5))
    columns = replace(A, row_stride=1, column_stride=48)
    assert "halve" in message(config("cooperative", 192, 192, 3, 2), A=columns)


@pytest.mark.parametrize(("m", "n"), [(1, 5), (5, 1)])
def test_the_stride_of_a_lone_line_does_not_matter(m, n):
    X = torch.ones(m, n, dtype=torch.bfloat16)
    out = torch.zeros(m, 8, dtype=torch.bfloat16)[:, :m]
    call = ProductCall("gram", Matrices.of(X), None, None, Matrices.of(out))
    binary = compiled(SYMMETRIC_SM90.spec(call, PING_PONG, SM_90A))
    run(binary, SYMMETRIC_SM90.launch(call, PING_PONG, binary, 1), Memory.of(X, out))
    assert (out == n).all()


def test_clusters_load_a_shared_column_once():
    """Of 6 tiles, walked down the columns, only the first two are a pair of one column."""
    rows = 128 * 64 * 2
    for cluster, saved in ((1, 0), (2, 1)):
        case = Case(config("cooperative", 128, 128, 4, cluster), 384, 64, c="none", multiprocessors=4)
        assert case.run(None).loaded[0] == (6 * 2 - saved) * rows


WAIT = r"\{\s*\.reg \.pred\s+P1;.*?DONE:\s*\}"
"""A wait for an mbarrier."""

MUTATIONS = {
    "producer's wait for an empty stage": (WAIT, 0),
    "consumers' wait for a full stage": (WAIT, -2),
    "consumers' wait for a block of C": (WAIT, -1),
    "bytes that a stage expects": (r"mbarrier\.arrive\.expect_tx[^;]*;", 0),
    "release of a stage": (r"mbarrier\.arrive\.shared[^;]*;", 0),
    "release of the last stage": (r"mbarrier\.arrive\.shared[^;]*;", 1),
    "release of a block of C": (r"mbarrier\.arrive\.shared[^;]*;", 2),
    "end of a group of products": (r"wgmma\.commit_group[^;]*;", 0),
    "wait for the products of a stage": (r"wgmma\.wait_group[^;]*;", 0),
    "wait for the last products": (r"wgmma\.wait_group[^;]*;", 1),
    "setup of all barriers before their use": (r"bar\.sync[^;]*;", 0),
    "turn on the tensor cores": (r"bar\.sync[^;]*;", 1),
    "first turn": (r"bar\.arrive[^;]*;", 0),
    "next turn": (r"bar\.arrive[^;]*;", 1),
    "barrier before staging": (r"bar\.sync[^;]*;", 2),
    "barrier after staging": (r"bar\.sync[^;]*;", 3),
    "fence between proxies": (r"fence\.proxy\.async[^;]*;", 0),
    "end of a group of stores": (r"cp\.async\.bulk\.commit_group[^;]*;", 0),
    "wait for staged blocks to be read": (r"cp\.async\.bulk\.wait_group[^;]*;", 0),
}
"""Statements of the ping-pong kernel that it cannot do without: what matches, and which of the matches."""


def without(binary: Binary, pattern: str, place: int) -> Binary:
    begin, end = [match.span() for match in re.finditer(pattern, binary.ptx, re.DOTALL)][place]
    return replace(binary, ptx=binary.ptx[:begin] + binary.ptx[end:])


def survives(case: Case, binary: Binary, launch: Launch | None = None) -> bool:
    """Whether the interpreter finds nothing wrong, whatever the schedule."""
    for seed in (None, 1, 2, 3):
        try:
            case.run(seed, binary, launch)
        except (IndexError, RuntimeError):
            return False
        if not case.exact():
            return False
    return True


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_no_synchronisation_can_be_dropped(mutation):
    # More steps than stages, and one step where nothing but C is waited for.
    cases = [Case(config("ping-pong", 64, 64, 2), 136, n, c="out", multiprocessors=1) for n in (264, 8)]
    assert not all(survives(case, without(case.binary, *mutation)) for case in cases)


@pytest.mark.slow
@pytest.mark.parametrize("m", [136, 264])
@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize(
    "statement", [r"barrier\.cluster\.arrive[^;]*;", r"mbarrier\.arrive\.shared::cluster[^;]*;"]
)
def test_no_synchronisation_of_clusters_can_be_dropped(statement, place, m):
    case = Case(config("cooperative", 128, 128, 2, cluster=2), m, 264, c="out")
    assert not survives(case, without(case.binary, statement, place))


@pytest.mark.parametrize("operand", range(4))
@pytest.mark.parametrize("changes", ["swizzle", "box", "stride", "batch", "address"])
def test_wrong_descriptors_show(operand, changes):
    case = Case(PING_PONG, 72, 72, "symmetric_product", batch=2)
    launch = case.launch(case.binary)
    right = launch.args[operand]
    assert isinstance(right, TensorMap)
    wrong = {
        "swizzle": replace(right, swizzle=0),
        "box": replace(right, box=(right.box[0], right.box[1] // 2, 1)),
        "stride": replace(right, strides=(right.strides[0] + 16, right.strides[1])),
        "batch": replace(right, strides=(right.strides[0], right.strides[1] + 16)),
        "address": replace(right, address=right.address + right.strides[0]),
    }[changes]
    args = tuple(wrong if index == operand else arg for index, arg in enumerate(launch.args))
    assert not survives(case, case.binary, replace(launch, args=args))
