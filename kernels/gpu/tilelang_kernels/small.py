"""The whole Newton–Schulz iteration of small matrices in TileLang, in one launch.

One thread block per matrix: R, P and each segment's Q stay in shared memory. X is read once more than there are
segments, twice more with ``normalize``, and nothing but the result is written.

A configuration has ``panel`` (columns of X at a time), ``stages`` (of the copy pipeline) and ``threads``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported, f32, i32, i64
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.small_calls import Ragged, SmallCall
from dmuon.kernels.gpu.tilelang_kernels.operands import (
    HALF,
    ITEM_BYTES,
    LINE_BYTES,
    batch_bytes,
    by_lines,
    launch_by_name,
    line_bytes,
)

FIELDS: dict[str, tuple[int, ...]] = {"panel": (32, 64), "stages": (2, 3, 4), "threads": (64, 128, 256)}
"""What each field of a configuration may be."""

MOST_STEPS = 8
"""Steps that the kernel has parameters for."""

_THREADS = {32: (64, 128), 64: (128, 256), 128: (256,)}
"""Threads that a block may have, by padded rows."""

_ACCUMULATORS = 80
"""Elements of R and of a panel that one thread may hold in registers: with 96, the compiler spills."""


class SmallGramFamily:
    """The kernel in all its configurations; see :class:`~dmuon.kernels.gpu.small_calls.SmallFamily`."""

    sources = tuple(
        f"gpu/tilelang_kernels/{name}.py"
        for name in ("small", "small_kernel", "copies", "operands", "compile")
    )

    def configs(self, m: int, n: int, dtype: str, arch: Arch) -> list[dict[str, Any]]:
        if m > max(_THREADS) or dtype not in HALF:
            return []
        side = padded(m)
        choices = [
            {"panel": panel, "stages": stages, "threads": threads}
            for threads in _THREADS[side]
            for panel in FIELDS["panel"]
            for stages in (2, 3)
            if stages == 2 or stages * panel <= n
        ]
        return [
            choice
            for choice in choices
            if _suits(side, choice, "fp16")
            and shared_bytes(side, (3,), choice, "fp32", dtype) <= arch.shared_bytes
        ]

    def check(self, config: Mapping[str, Any]) -> None:
        if set(config) != set(FIELDS):
            raise ValueError(f"config must have the fields {sorted(FIELDS)}, got {sorted(config)}")
        for name, values in FIELDS.items():
            if config[name] not in values:
                raise ValueError(f"{name} must be one of {values}, got {config[name]!r}")

    def spec(self, call: SmallCall, config: Mapping[str, Any], arch: Arch) -> KernelSpec:
        self.check(config)
        (X, x_by_columns), (out, out_by_columns) = _operands(call)
        side = padded(call.X.rows)
        if config["threads"] not in _THREADS[side] or not _suits(side, config, X.dtype, out.dtype):
            raise Unsupported(f"tilelang: {dict(config)} does not suit matrices of {call.X.rows} rows")
        size = shared_bytes(side, call.segments, config, X.dtype, out.dtype)
        if size > arch.shared_bytes:
            raise Unsupported(
                f"tilelang: {len(call.segments)} segments of {side} padded rows under {dict(config)} need {size} "
                f"bytes of shared memory, {arch.name} has {arch.shared_bytes}"
            )
        options = {
            **config,
            "side": side,
            "segments": list(call.segments),
            "dtype": call.dtype,
            "x_dtype": X.dtype,
            "x_by_columns": x_by_columns,
            "out_dtype": out.dtype,
            "out_by_columns": out_by_columns,
            "normalize": call.normalize,
        }
        return KernelSpec("tilelang", "tilelang_kernels.small_kernel", arch.name, options)

    def launch(self, call: SmallCall, config: Mapping[str, Any], binary: Binary) -> Launch:
        (X, _), (out, _) = _operands(call)
        assert isinstance(call.X, Matrices)
        scalars = {
            "rows": i32(call.X.rows),
            "columns": i32(call.X.columns),
            "batch": i32(call.X.batch),
            **{
                f"{x}{k}": f32(value)
                for k, step in enumerate(call.steps)
                for x, value in zip("abc", step, strict=True)
            },
        }
        for name, operand in {"x": X, "out": out}.items():
            scalars[f"{name}_line"] = i64(line_bytes(operand) // LINE_BYTES)
            scalars[f"{name}_batch"] = i64(batch_bytes(operand) // LINE_BYTES)
        return launch_by_name(binary, X.batch, {"X": X, "out": out}, scalars)


SMALL = SmallGramFamily()


def padded(m: int) -> int:
    """Rows that the kernel computes with."""
    return next(side for side in _THREADS if side >= m)


def shared_bytes(
    side: int, segments: tuple[int, ...], config: Mapping[str, Any], x_dtype: str, out_dtype: str
) -> int:
    """Shared memory of a block, at most: every segment's Q, and its R and P, or panels.

    Panels are those in flight as given, one in the working precision, one made of it, and one of the result.
    """
    panel, stages = int(config["panel"]), int(config["stages"])
    matrix, strip = 2 * side * side, side * panel
    panels = strip * (stages * ITEM_BYTES[x_dtype] + 2 + 2 + ITEM_BYTES[out_dtype])
    return len(segments) * matrix + max(2 * matrix, panels) + 1024


def _suits(side: int, config: Mapping[str, Any], *dtypes: str) -> bool:
    """Whether accumulators fit registers, and threads divide panels evenly into 16-byte pieces."""
    if side * (side + config["panel"]) > _ACCUMULATORS * config["threads"]:
        return False
    return all(
        side * config["panel"] % (config["threads"] * LINE_BYTES // ITEM_BYTES[dtype]) == 0
        for dtype in dtypes
    )


def _operands(call: SmallCall) -> tuple[tuple[Matrices, bool], tuple[Matrices, bool]]:
    """X and out by lines, and whether those are columns."""
    X, out = call.X, call.out
    if isinstance(X, Ragged) or isinstance(out, Ragged):
        raise Unsupported("tilelang: the whole iteration takes no ragged batches")
    if call.dtype not in HALF:
        raise Unsupported(f"tilelang: the working precision must be fp16 or bf16, got {call.dtype}")
    if X.rows > max(_THREADS):
        raise Unsupported(f"tilelang: the whole iteration runs on at most {max(_THREADS)} rows, got {X.rows}")
    if len(call.steps) > MOST_STEPS:
        raise Unsupported(
            f"tilelang: the whole iteration runs at most {MOST_STEPS} steps, got {len(call.steps)}"
        )
    allowed = tuple(ITEM_BYTES) if call.normalize else (call.dtype,)
    if X.dtype not in allowed or out.dtype not in ITEM_BYTES:
        raise Unsupported(
            f"tilelang: X must be in {allowed} and out in {tuple(ITEM_BYTES)}, got {X.dtype}, {out.dtype}"
        )
    return by_lines("X", X), by_lines("out", out)
