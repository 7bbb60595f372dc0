"""The TileLang kernel of ``gram`` and ``symmetric_product``, run from its PTX by the interpreter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ptx import Memory, run
from ptx.mutate import KINDS, SYNCHRONISATION, survivors
from ptx.report import Report
from triton_products import CANARY, beyond, call_of, compiled, fill, matrices

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary, TensorMap, Unsupported
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.resources import resources_of
from dmuon.kernels.gpu.tilelang_kernels.symmetric import SYMMETRIC, shared_bytes

pytest.importorskip("tilelang")

MIDDLE = {"tile": 64, "block_k": 64, "stages": 3, "threads": 128, "policy": "FullRow"}
LARGE = {"tile": 128, "block_k": 64, "stages": 3, "threads": 256, "policy": "FullRow"}
ARCH_NAMES = ("sm_80", "sm_90a")
OTHERS = tuple(kind for kind in KINDS if kind not in SYNCHRONISATION)


def check(
    op: str,
    arch: str,
    config: dict[str, Any],
    batch: int,
    m: int,
    n: int,
    *,
    dtype: str = "bf16",
    out_dtype: str = "bf16",
    by_columns: bool = False,
    added: str = "",
    seed: int | None = None,
    binary: Binary | None = None,
) -> Report:
    """Run on integers and demand the exact result, symmetric, and nothing beyond it written."""
    A = fill(matrices(batch, m, n, dtype, by_columns=by_columns), m + n, symmetric=op != "gram")
    B = None
    if op == "symmetric_product":
        # A and -A commute, and unlike A A the product of -A and A would show which operand was read.
        B = matrices(batch, m, m, dtype, by_columns=not by_columns).copy_(-A)
    out = matrices(batch, m, m, out_dtype).fill_(float("nan"))
    C = {"": None, "other": matrices(batch, m, m, out_dtype, by_columns=True), "out": out}[added]
    alpha, beta, diag = 0.5, -2.0, 3.0
    expected = alpha * (A.double() @ (A.mT if B is None else B).double()) + diag * torch.eye(m).double()
    if C is not None:
        expected += beta * fill(C, m, symmetric=True).double()
    call = call_of(op, A, B, C, out, alpha, beta if added else 0.0, diag)
    binary = binary or compiled(SYMMETRIC.spec(call, config, ARCHS[arch]))
    tensors = [t for t in (A, B, C, out) if t is not None]
    report = run(binary, SYMMETRIC.launch(call, config, binary, 132), Memory.of(*tensors), seed=seed)
    assert torch.equal(out, expected.to(out.dtype))
    assert torch.equal(out, out.mT)
    assert (beyond(out) == CANARY).all()
    return report


@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_gram(arch: str, seed: int | None) -> None:
    for batch, m, n in ((1, 1, 1), (2, 33, 40), (1, 136, 72), (1, 200, 300)):
        check("gram", arch, MIDDLE, batch, m, n, seed=seed)


@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("added", ["", "other", "out"])
def test_symmetric_product(arch: str, added: str) -> None:
    for batch, m in ((2, 72), (1, 131)):
        check("symmetric_product", arch, MIDDLE, batch, m, m, added=added, seed=m)


@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_half_of_the_work(arch: str) -> None:
    """256 rows in tiles of 64: 10 of the 16 tiles, each operand element read once per tile, all written once."""
    report = check("gram", arch, MIDDLE, 1, 256, 128)
    assert report.flops == 2 * 10 * 64 * 64 * 128
    assert report.stored[-1] == 256 * 256 * 2
    assert report.loaded[0] == 10 * 2 * 64 * 128 * 2
    if arch == "sm_90a":
        assert report.count("wgmma.mma_async") and not report.count("mma.sync")
        assert (
            sum(report.tma_bytes.values() if isinstance(report.tma_bytes, dict) else [report.tma_bytes]) > 0
        )


def test_rounding_keeps_products_symmetric() -> None:
    """Rounded operands do not commute: the two triangles of a diagonal tile would differ."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(80, 80, generator=generator)
    A = ((A + A.mT) / 2).to(torch.bfloat16)
    B = (A.double() @ A.double() / 80).to(torch.bfloat16)
    B = B.tril() + B.tril(-1).mT
    for arch in ARCH_NAMES:
        out = torch.empty(80, 80, dtype=torch.bfloat16)
        call = call_of("symmetric_product", A, B, None, out, 1.0, 0.0, 0.0)
        binary = compiled(SYMMETRIC.spec(call, MIDDLE, ARCHS[arch]))
        run(binary, SYMMETRIC.launch(call, MIDDLE, binary, 132), Memory.of(A, B, out))
        exact = A.double() @ B.double()
        assert torch.equal(out, out.mT)
        assert torch.allclose(out.tril().double(), exact.tril(), rtol=2**-8, atol=1e-3)


def test_tensor_maps_are_what_tilelang_would_encode() -> None:
    """The host code's shapes and strides against the expressions in TileLang's own host code."""
    X, out = matrices(3, 40, 72, "bf16"), matrices(3, 40, 40, "bf16")
    call = call_of("gram", X, None, out, out, 1.0, 1.0, 0.0)
    binary = compiled(SYMMETRIC.spec(call, MIDDLE, ARCHS["sm_90a"]))
    launch = SYMMETRIC.launch(call, MIDDLE, binary, 132)
    units = {"a": X, "b": X, "c": out, "out": out}
    values = {"rows": 40, "depth": 72, "batch": 3}
    values |= {f"{name}_line": tensor.stride(1) // 8 for name, tensor in units.items()}
    values |= {f"{name}_batch": tensor.stride(0) // 8 for name, tensor in units.items()}
    seen = 0
    for name, arg in zip(binary.extra["params"], launch.args, strict=True):
        if isinstance(arg, TensorMap):
            encoded = binary.extra["maps"][name]
            assert arg.dtype == encoded["dtype"]
            assert list(arg.shape) == [eval(text, {}, values) for text in encoded["shape"]]
            assert list(arg.strides) == [eval(text, {}, values) for text in encoded["strides"]]
            assert (list(arg.box), arg.swizzle) == (encoded["box"], encoded["swizzle"])
            seen += 1
    assert seen == 4


def test_triangular_index() -> None:
    """The device's formula, in its arithmetic, around every row's first entry up to 2^31 entries."""
    row = np.arange(1, 65536, dtype=np.int64)
    for index in (row * (row + 1) // 2, row * (row + 1) // 2 - 1):
        guess = np.floor((np.sqrt((8 * index + 1).astype(np.float32)) - np.float32(1)) * np.float32(0.5))
        guess = guess.astype(np.int64)
        guess = np.where(
            guess * (guess + 1) // 2 > index,
            guess - 1,
            np.where((guess + 1) * (guess + 2) // 2 <= index, guess + 1, guess),
        )
        assert (guess * (guess + 1) // 2 <= index).all() and (index < (guess + 1) * (guess + 2) // 2).all()


def test_refusals() -> None:
    X, out = matrices(2, 40, 72, "bf16"), matrices(2, 40, 40, "bf16")
    call = call_of("gram", X, None, None, out, 1.0, 0.0, 0.0)

    def refused(pattern: str, call: ProductCall = call, arch: str = "sm_80", **changes: Any) -> None:
        with pytest.raises(Unsupported, match=pattern):
            SYMMETRIC.spec(call, MIDDLE | changes, ARCHS[arch])

    refused("needs .* bytes of shared memory, sm_86 has", arch="sm_86", tile=128, threads=256, stages=8)
    refused("fp16 or bf16", replace(call, A=Matrices.of(X.float())))
    refused("A must have contiguous rows", replace(call, A=Matrices.of(X[:, :, ::2])))
    refused(
        "A must have its row stride in bytes", replace(call, A=Matrices.of(torch.ones(2, 40, 71).bfloat16()))
    )
    refused("out must have its address", replace(call, out=Matrices.of(out[:, :39, 1:])))
    refused("C must have out's dtype", replace(call, C=Matrices.of(out.half())))
    refused("wgmma takes tiles from 64", arch="sm_90a", tile=32, threads=64)
    with pytest.raises(ValueError, match="threads must be at least 128 for a tile of 128, got 64"):
        SYMMETRIC.check("gram", MIDDLE | {"tile": 128, "threads": 64})
    with pytest.raises(ValueError, match="op must be one of"):
        SYMMETRIC.check("apply", MIDDLE)
    with pytest.raises(ValueError, match=r"stages must be one of .* got 1"):
        SYMMETRIC.check("gram", MIDDLE | {"stages": 1})


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_configurations_can_be_built(arch: Any) -> None:
    """Every configuration offered passes the checks, whatever the result's dtype."""
    for op in ("gram", "symmetric_product"):
        for m, n in ((1, 1), (100, 300), (4096, 4096)):
            configs = SYMMETRIC.configs(op, m, n, "bf16", arch)
            assert configs
            for config in configs:
                X, out = torch.empty(1, 1, 8).bfloat16(), torch.empty(1, 1, 1)
                SYMMETRIC.spec(call_of("gram", X, None, None, out, 1.0, 0.0, 0.0), config, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize(
    ("config", "dtype", "out_dtype", "by_columns"),
    [
        (LARGE, "bf16", "bf16", False),
        (LARGE, "fp16", "fp32", True),
        (MIDDLE, "fp16", "fp16", True),
        (MIDDLE | {"block_k": 32, "stages": 2}, "bf16", "fp32", False),
        (MIDDLE | {"block_k": 128, "stages": 4}, "bf16", "bf16", True),
        (LARGE | {"threads": 128, "stages": 2}, "fp16", "fp16", False),
    ],
)
def test_variants(arch: str, config: dict[str, Any], dtype: str, out_dtype: str, by_columns: bool) -> None:
    more = {"dtype": dtype, "out_dtype": out_dtype}
    for seed in (None, 1, 2):
        for batch, m, n in ((2, 1, 1), (1, 264, 130), (2, 100, 333)):
            check("gram", arch, config, batch, m, n, by_columns=by_columns, seed=seed, **more)
        if not by_columns:
            check(
                "symmetric_product",
                arch,
                config,
                1,
                200,
                200,
                by_columns=True,
                added="out",
                seed=seed,
                **more,
            )


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_resources(arch: Any) -> None:
    """No spills, and shared memory as computed, for one configuration of each tile; stages change neither."""
    X, out = torch.empty(1, 1, 8).bfloat16(), torch.empty(1, 1, 8).bfloat16()
    call = call_of("gram", X, None, None, out[..., :1], 1.0, 0.0, 0.0)
    for tile in (32, 64, 128):
        configs = [
            config for config in SYMMETRIC.configs("gram", 4096, 4096, "bf16", arch) if config["tile"] == tile
        ]
        for config in configs[-1:]:
            binary = compiled(SYMMETRIC.spec(call, config, arch))
            used = resources_of(binary)
            assert used.local_bytes == 0 and used.blocks_per_sm, (config, used)
            assert used.static_shared_bytes + binary.shared_bytes <= shared_bytes(config, "bf16", arch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize(
    ("kinds", "every"), [(SYNCHRONISATION, 1), (OTHERS, 7)], ids=["synchronisation", "others"]
)
def test_mutants_are_noticed(arch: str, kinds: tuple[str, ...], every: int) -> None:
    """What is dropped or changed in the PTX shows as a wrong result, a race or a hang."""

    def passes(binary: Binary) -> None:
        for seed in (None, 1, 2):
            # Slots are reused, the last step's lies where C will be staged, and an odd number of steps also runs what
            # the compiler's unrolling leaves over; a last step that is full uses all of its descriptors. After two
            # steps, copies of nothing are still under way to where C will be staged. The last two end within what the
            # last of a thread's copies serve, one element into 16 bytes, and one before their end.
            for m, n in ((72, 776), (72, 200), (72, 128), (121, 64), (127, 64)):
                check("gram", arch, MIDDLE, 1, m, n, added="other", seed=seed, binary=binary)

    X, out = matrices(1, 100, 264, "bf16"), matrices(1, 100, 100, "bf16")
    spec = SYMMETRIC.spec(call_of("gram", X, None, out, out, 1.0, 1.0, 0.0), MIDDLE, ARCHS[arch])
    lived = survivors(compiled(spec), passes, *kinds, every=every)
    # Without effect: the commit of C's copies, for which TileLang waits with wait_all; fences of all but the first
    # wgmma; and in the unrolled loop's remainder, the giving back of a slot that nobody fills any more. Among each
    # seventh of the others: which half of a diagonal tile of X Xᵀ an element is read from, since both are equal to the
    # bit (guard, three of boundary, three comparisons); 32-bit division in place of an equal 64-bit one; the first tile
    # of a band's triangle, which the formula for what is beside it gives as well (boundary, met on sm_80); and which
    # threads ask for a prefetch or store the same tile (the other comparisons).
    harmless = Counter({"copy commit": 1, "wgmma fence": 2, "wgmma wait": 1, "mbarrier arrive": 1})
    harmless += Counter({"comparison": 5, "boundary": 4 if arch == "sm_80" else 3, "guard": 5})
    assert Counter(mutant.kind for mutant in lived) <= harmless, "\n".join(map(str, lived))
