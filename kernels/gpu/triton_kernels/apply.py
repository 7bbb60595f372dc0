"""``apply`` in Triton: alpha·Q X + beta·C, whose result may be a weight in another dtype, updated in place.

A configuration has ``block_m`` and ``block_n`` (rows and columns of a result's tile), ``block_k`` (elements of the
inner dimension per step), ``warps``, ``stages`` (of the copy pipeline) and ``group`` (tile rows of a band that is
walked column by column, for the L2 cache). With ``lower`` too, Q is symmetric and read from its lower half alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported, f32, i32, i64, pointer
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.triton_kernels.operands import (
    HALF,
    HIDDEN_ARGS,
    batch_stride,
    check_config,
    check_elementwise,
    check_lower,
    check_operands,
    check_shared,
    contiguous_rows,
    elementwise,
    line_stride,
    shared_bytes,
    vectors,
)

FIELDS = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (16, 32, 64, 128),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4, 5, 6),
    "group": (1, 2, 4, 8, 16, 32),
}
"""What each field of a configuration may be."""

_TILES = (
    (32, 64, 4),
    (64, 64, 4),
    (64, 128, 4),
    (128, 64, 4),
    (128, 128, 4),
    (128, 128, 8),
    (128, 256, 8),
    (256, 128, 8),
)
"""block_m, block_n and warps that are offered."""


class ApplyFamily:
    """The kernel in all its configurations; see :class:`~dmuon.kernels.gpu.family.ProductFamily`."""

    sources = tuple(
        f"gpu/triton_kernels/{name}.py"
        for name in ("apply", "apply_kernel", "tile_kernel", "elementwise_kernel", "operands", "compile")
    )

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch) -> list[dict[str, Any]]:
        if op != "apply" or dtype not in HALF:
            return []
        choices = [
            dict(zip(FIELDS, (block_m, block_n, block_k, warps, stages, 8), strict=True))
            for block_m, block_n, warps in _TILES
            # A tile beyond the matrix gains nothing over the next smaller one.
            if block_m < 2 * max(m, 32) and block_n < 2 * max(n, 64)
            for block_k in (32, 64, 128)
            if block_k < 2 * max(m, 32)
            for stages in (3, 4, 5)
            if stages == 3 or stages * block_k <= m
        ]
        ragged = m % 8 or n % 8
        return [
            choice
            for choice in choices
            if _shared_bytes(choice, arch, 4) <= arch.shared_bytes
            and (_elementwise(choice) or not ragged)
            and not _spills(choice, arch)
        ]

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        check_config("apply", ("apply",), FIELDS, {"lower": (False, True)}, op, config)
        if config.get("lower", False) and config["block_k"] > config["block_m"]:
            raise ValueError(f"block_k must be at most block_m with lower, got {config['block_k']}")

    def spec(
        self, call: ProductCall, config: Mapping[str, Any], arch: Arch, *, update: bool = False
    ) -> KernelSpec:
        """As for any product; with ``update`` for launches with a table, whose C is of the operands' dtype."""
        self.check(call.op, config)
        check_operands(replace(call, C=None) if update else call)
        check_shared(_shared_bytes(config, arch, call.out.item_bytes), config, arch)
        operands = dict(zip(("a", "b", "c", "out"), _operands(call), strict=True))
        check_elementwise(operands.values(), _elementwise(config), config)
        block_m, block_n = _blocks(call, config)
        options = {
            **{name: value for name, value in config.items() if name not in ("group", "lower")},
            "lower": _lower_operand(call, config),
            "block_m": block_m,
            "block_n": block_n,
            "update": update,
            "dtype": call.A.dtype,
            "c_dtype": operands["c"].dtype,
            "out_dtype": call.out.dtype,
            **{f"{name}_rows": contiguous_rows(operands[name]) for name in "abc"},
            **{f"vector_{name}": vectors(operand) for name, operand in operands.items()},
        }
        return KernelSpec("triton", "triton_kernels.apply_kernel", arch.name, options)

    def launch(
        self,
        call: ProductCall,
        config: Mapping[str, Any],
        binary: Binary,
        multiprocessors: int,
        *,
        table: int = 0,
    ) -> Launch:
        """The launch that performs ``call``.

        Of a binary for updates, ``table`` is the address of a table of weights
        (:data:`~dmuon.kernels.gpu.triton_kernels.elementwise.FIELDS`). Each takes the place of a matrix of ``out``,
        whose address is not used, and becomes βW + α(alpha·Q X + beta·C) with the α and β of the table.
        """
        operands = A, _, _, out = _operands(call)
        block_m, block_n = _blocks(call, config)
        blocks = out.batch * -(-out.rows // block_m) * -(-out.columns // block_n)
        if blocks >= 1 << 31:
            raise Unsupported(f"triton: {blocks} tiles of {block_m}×{block_n} are more than a grid holds")
        args = (
            *(pointer(operand.address) for operand in operands),
            i32(out.rows),
            i32(out.columns),
            i32(A.columns),
            *(i64(line_stride(operand)) for operand in operands),
            *(i64(batch_stride(operand)) for operand in operands),
            f32(call.alpha),
            f32(call.beta if call.C is not None else 0.0),
            pointer(table),
            i32(config["group"]),
            *HIDDEN_ARGS,
        )
        return Launch((blocks, 1, 1), args)


APPLY = ApplyFamily()


def _spills(config: Mapping[str, Any], arch: Arch) -> bool:
    """Whether registers do not hold what mma.sync takes in one step beside 128 sums a thread, as a sweep has found."""
    elements = config["block_m"] * config["block_n"]
    return arch.capability[0] == 8 and config["block_k"] == 128 and elements == 128 * 32 * config["warps"]


def _shared_bytes(config: Mapping[str, Any], arch: Arch, out_bytes: int) -> int:
    block_m, block_n = config["block_m"], config["block_n"]
    stage = (block_m + block_n) * config["block_k"] * 2
    return shared_bytes(arch, config["stages"], stage, block_m * block_n * out_bytes)


def _elementwise(config: Mapping[str, Any]) -> bool:
    return elementwise(config["block_m"], config["block_n"], config["block_k"], config["warps"])


def _operands(call: ProductCall) -> tuple[Matrices, Matrices, Matrices, Matrices]:
    """A, B, C and out of out = alpha·A B + beta·C, where rows of out are contiguous: Q, X, C and out, or, if
    columns of out are, the transposes of X, Q, C and out. An absent C is out."""
    assert call.B is not None
    C = call.C or call.out
    if contiguous_rows(call.out):
        return call.A, call.B, C, call.out
    return call.B.transposed, call.A.transposed, C.transposed, call.out.transposed


def _lower_operand(call: ProductCall, config: Mapping[str, Any]) -> str:
    """Which operand of the kernel is Q, if its lower half is to be read alone."""
    if not config.get("lower", False):
        return ""
    check_lower([call.A])
    return "A" if contiguous_rows(call.out) else "B"


def _blocks(call: ProductCall, config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a tile of what the kernel computes."""
    block_m, block_n = config["block_m"], config["block_n"]
    return (block_m, block_n) if contiguous_rows(call.out) else (block_n, block_m)
