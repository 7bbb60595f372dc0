"""``gram`` and ``symmetric_product`` in TileLang: only tiles on and below the diagonal are computed.

On sm_90a operands travel by TMA and are multiplied by wgmma, with a warp group of its own for copies; on every other
architecture cp.async feeds mma.sync.

A configuration has ``tile`` (the side of a square tile), ``block_k`` (elements of the inner dimension per step),
``stages`` (of the copy pipeline), ``threads`` (that compute) and ``policy`` (how warps divide a tile: ``"FullRow"``
or ``"Square"``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported, f32, i32, i64
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.tilelang_kernels.operands import (
    HALF,
    ITEM_BYTES,
    LINE_BYTES,
    batch_bytes,
    by_lines,
    launch_by_name,
    line_bytes,
)

OPS = ("gram", "symmetric_product")
BAND = 8
"""Tile rows that are walked together: about the root of the number of multiprocessors."""

FIELDS: dict[str, tuple[Any, ...]] = {
    "tile": (32, 64, 128),
    "block_k": (32, 64, 128),
    "stages": (2, 3, 4, 5, 6, 7, 8),
    "threads": (64, 128, 256),
    "policy": ("FullRow", "Square"),
}
"""What each field of a configuration may be."""

_ACCUMULATORS = 128
"""Elements of a tile that one thread may hold in registers; with more, the compiler spills."""


class SymmetricFamily:
    """The kernel in all its configurations; see :class:`~dmuon.kernels.gpu.family.ProductFamily`."""

    sources = tuple(
        f"gpu/tilelang_kernels/{name}.py"
        for name in ("symmetric", "symmetric_kernel", "copies", "operands", "compile")
    )

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch) -> list[dict[str, Any]]:
        if op not in OPS or dtype not in HALF:
            return []
        inner = n if op == "gram" else m
        choices = [
            {"tile": tile, "block_k": block_k, "stages": stages, "threads": threads, "policy": policy}
            for tile, threads, policy in _shapes(arch)
            # A tile beyond the matrix gains nothing over the next smaller one.
            if tile < 2 * max(m, 64)
            for block_k in (32, 64, 128)
            if block_k < 2 * max(inner, 32)
            # With two stages, two blocks fit a multiprocessor: one's epilogue overlaps the other's products.
            for stages in (2, 3, 4, 6)
            if stages <= 3 or stages * block_k <= inner
        ]
        return [choice for choice in choices if shared_bytes(choice, "fp32", arch) <= arch.shared_bytes]

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
        if set(config) != set(FIELDS):
            raise ValueError(f"config must have the fields {sorted(FIELDS)}, got {sorted(config)}")
        for name, values in FIELDS.items():
            if config[name] not in values:
                raise ValueError(f"{name} must be one of {values}, got {config[name]!r}")
        if config["tile"] ** 2 > _ACCUMULATORS * config["threads"]:
            raise ValueError(
                f"threads must be at least {config['tile'] ** 2 // _ACCUMULATORS} for a tile of {config['tile']}, "
                f"got {config['threads']}"
            )

    def spec(self, call: ProductCall, config: Mapping[str, Any], arch: Arch) -> KernelSpec:
        self.check(call.op, config)
        if arch.name == "sm_90a" and (config["threads"] % 128 or config["tile"] < 64):
            raise Unsupported(f"tilelang: wgmma takes tiles from 64 and threads by 128, got {dict(config)}")
        if call.A.dtype not in HALF or call.out.dtype not in ITEM_BYTES:
            raise Unsupported(
                f"tilelang: needs fp16 or bf16 operands, got {call.A.dtype}, out {call.out.dtype}"
            )
        if call.B is not None and call.B.dtype != call.A.dtype:
            raise Unsupported(f"tilelang: A and B must have one dtype, got {call.A.dtype} and {call.B.dtype}")
        if call.C is not None and call.C.dtype != call.out.dtype:
            raise Unsupported(f"tilelang: C must have out's dtype {call.out.dtype}, got {call.C.dtype}")
        by_columns = _operands(call)[1]
        size = shared_bytes(config, call.out.dtype, arch)
        if size > arch.shared_bytes:
            raise Unsupported(
                f"tilelang: {dict(config)} with out in {call.out.dtype} needs {size} bytes of shared memory, "
                f"{arch.name} has {arch.shared_bytes}"
            )
        options = {**config, "dtype": call.A.dtype, "out_dtype": call.out.dtype, "by_columns": by_columns}
        return KernelSpec("tilelang", "tilelang_kernels.symmetric_kernel", arch.name, options)

    def launch(
        self, call: ProductCall, config: Mapping[str, Any], binary: Binary, multiprocessors: int
    ) -> Launch:
        matrices, _ = _operands(call)
        side = -(-call.out.rows // config["tile"])
        blocks = call.out.batch * side * (side + 1) // 2
        if blocks >= 1 << 31:
            raise Unsupported(f"tilelang: {blocks} tiles of {config['tile']} are more than a grid holds")
        sizes = {"rows": call.A.rows, "depth": call.A.columns, "batch": call.A.batch, "side": side}
        scalars = {
            **{name: i32(value) for name, value in (*sizes.items(), ("blocks", blocks))},
            "alpha": f32(call.alpha),
            "beta": f32(call.beta if call.C is not None else 0.0),
            "diag": f32(call.diag),
        }
        for name, operand in matrices.items():
            # The kernel is told strides in units of its copies: so it knows what they are multiples of.
            scalars[f"{name.lower()}_line"] = i64(line_bytes(operand) // LINE_BYTES)
            scalars[f"{name.lower()}_batch"] = i64(batch_bytes(operand) // LINE_BYTES)
        return launch_by_name(binary, blocks, matrices, scalars)


SYMMETRIC = SymmetricFamily()


def shared_bytes(config: Mapping[str, Any], out_dtype: str, arch: Arch) -> int:
    """Shared memory of a block: the pipeline's operands, a staged tile (without TMA only after them), barriers."""
    tile, block_k, stages = (int(config[name]) for name in ("tile", "block_k", "stages"))
    operands, staged = 2 * stages * tile * block_k * 2, tile * tile * ITEM_BYTES[out_dtype]
    return 1024 + (operands + staged if arch.name == "sm_90a" else max(operands, staged))


def _shapes(arch: Arch) -> tuple[tuple[int, int, str], ...]:
    """Tile, threads and policy worth trying."""
    if arch.name == "sm_90a":
        return (64, 128, "FullRow"), (128, 256, "FullRow")
    return (32, 64, "Square"), (64, 128, "Square"), (128, 256, "Square")


def _operands(call: ProductCall) -> tuple[dict[str, Matrices], bool]:
    """The operands by lines, and whether A is given by its columns. An absent B is A, an absent C is out.

    A symmetric matrix with contiguous columns is its own transpose, with contiguous rows.
    """
    A, turned = by_lines("A", call.A)
    B = A if call.B is None else by_lines("B", call.B)[0]
    out = by_lines("out", call.out)[0]
    C = out if call.C is None else by_lines("C", call.C)[0]
    return {"A": A, "B": B, "C": C, "out": out}, turned and call.B is None
