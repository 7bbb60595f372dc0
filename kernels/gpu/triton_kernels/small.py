"""The whole Newton–Schulz iteration of small matrices in one launch: R, P and every Q stay in shared memory.

One thread block per matrix reads X in panels, once for R; each restart reads it once more and makes from it, panel
by panel, what the segments before made; the last reading writes the result. X is read once more than there are
segments, twice more with ``normalize``, and nothing but the result is written.

A configuration has ``panel`` (columns of X at a time, fewer where registers do not allow so many) and ``warps`` (of
a block).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported, i32, i64, pointer
from dmuon.kernels.gpu.calls import Matrices
from dmuon.kernels.gpu.small_calls import Ragged, SmallCall
from dmuon.kernels.gpu.triton_kernels.operands import (
    HALF,
    HIDDEN_ARGS,
    batch_stride,
    contiguous_rows,
    line_stride,
    vectors,
)

LARGEST = 128
"""Rows of the largest matrices: above, the accumulator of R does not fit the registers of a block."""

FIELDS = {"panel": (32, 64), "warps": (1, 2, 4, 8)}
"""What each field of a configuration may be."""

WARPS = {16: (1, 2), 32: (1, 2, 4), 64: (4, 8), 128: (8,)}
"""Warps by padded rows."""


class SmallGramFamily:
    """The kernel in all its configurations; see :class:`~dmuon.kernels.gpu.small_calls.SmallFamily`."""

    sources = tuple(
        f"gpu/triton_kernels/{name}.py" for name in ("small", "small_kernel", "operands", "compile")
    )

    def configs(self, m: int, n: int, dtype: str, arch: Arch) -> list[dict[str, Any]]:
        if m > LARGEST or dtype not in HALF:
            return []
        side = padded(m)
        return [{"panel": panel, "warps": warps} for warps in WARPS[side] for panel in FIELDS["panel"]]

    def check(self, config: Mapping[str, Any]) -> None:
        if set(config) != set(FIELDS):
            raise ValueError(f"a configuration has the fields {', '.join(FIELDS)}, got {dict(config)}")
        for name, values in FIELDS.items():
            if type(config[name]) is not int or config[name] not in values:
                raise ValueError(f"{name} must be one of {values}, got {config[name]!r}")

    def spec(self, call: SmallCall, config: Mapping[str, Any], arch: Arch) -> KernelSpec:
        self.check(config)
        _check_call(call)
        side = padded(call.X.rows)
        if config["warps"] not in WARPS[side]:
            raise Unsupported(f"triton: {side} padded rows take {WARPS[side]} warps, got {config['warps']}")
        panel = min(config["panel"], _widest_panel(call, side, config["warps"]))
        needed = shared_bytes(side, call.segments, panel, config["warps"], call.out.dtype)
        if needed > arch.shared_bytes:
            raise Unsupported(
                f"triton: {len(call.segments)} segments of {side} padded rows keep {needed} bytes in shared "
                f"memory, {arch.name} has {arch.shared_bytes}"
            )
        options = {
            "side": side,
            "panel": panel,
            "warps": config["warps"],
            "dtype": call.dtype,
            "steps": [list(step) for step in call.steps],
            "segments": list(call.segments),
            "normalize": call.normalize,
            "ragged": isinstance(call.X, Ragged),
            "x_dtype": call.X.dtype,
            "x_row_major": _row_major(call.X),
            "x_aligned": _aligned(call.X),
            "out_dtype": call.out.dtype,
            "out_row_major": _row_major(call.out),
            "out_aligned": _aligned(call.out),
        }
        return KernelSpec("triton", "triton_kernels.small_kernel", arch.name, options)

    def launch(self, call: SmallCall, config: Mapping[str, Any], binary: Binary) -> Launch:
        X, out = call.X, call.out
        columns = 0 if isinstance(X, Ragged) else X.columns
        strides = [field for matrices in (X, out) for field in _strides(matrices)]
        args = (pointer(_first(X)), pointer(_first(out)), i32(X.rows), i32(columns), *strides, *HIDDEN_ARGS)
        return Launch((X.batch, 1, 1), args)


SMALL = SmallGramFamily()


def padded(m: int) -> int:
    """Rows that the kernel computes with: the next power of two, 16 at least."""
    return max(16, 1 << (m - 1).bit_length())


def shared_bytes(side: int, segments: tuple[int, ...], panel: int, warps: int, out_dtype: str) -> int:
    """Shared memory that the compiler will need, at most: every Q, either R and P or the panels, and the numbers of
    columns."""
    matrix, strip = 2 * side * side, 2 * side * panel
    panels = 2 * strip + (2 * strip if out_dtype == "fp32" else strip)
    return len(segments) * matrix + max(2 * matrix, panels) + 128 * warps


def _widest_panel(call: SmallCall, side: int, warps: int) -> int:
    """The most columns of X at a time that leave registers enough, by a thread's elements of a panel: single
    elements take an address each, fp32 twice the room of what it is rounded to, and 128 rows much for R."""
    if not (_aligned(call.X) and _aligned(call.out)):
        elements = 16
    else:
        elements = 32 if call.X.dtype == "fp32" or side < 128 else 64
    return elements * 32 * warps // side // (2 if side == 128 else 1)


def _check_call(call: SmallCall) -> None:
    X, out = call.X, call.out
    if call.dtype not in HALF:
        raise Unsupported(f"triton: the working precision must be fp16 or bf16, got {call.dtype}")
    if X.rows > LARGEST:
        raise Unsupported(f"triton: the whole iteration runs on at most {LARGEST} rows, got {X.rows}")
    if X.dtype not in (("fp32", "fp16", "bf16") if call.normalize else (call.dtype,)):
        wanted = "fp32, fp16 or bf16" if call.normalize else f"{call.dtype}, as the iteration is"
        raise Unsupported(f"triton: X must be {wanted}, got {X.dtype}")
    if out.dtype not in ("fp32", "fp16", "bf16"):
        raise Unsupported(f"triton: out must be fp32, fp16 or bf16, got {out.dtype}")
    if isinstance(X, Ragged) != isinstance(out, Ragged):
        raise ValueError("X and out must both be ragged batches, or neither")
    if (X.batch, X.rows) != (out.batch, out.rows):
        raise ValueError(f"out must have X's batch and rows {X.batch, X.rows}, got {out.batch, out.rows}")


def _row_major(matrices: Matrices | Ragged) -> bool:
    return matrices.row_major if isinstance(matrices, Ragged) else contiguous_rows(matrices)


def _aligned(matrices: Matrices | Ragged) -> bool:
    """Whether every line starts at a multiple of 16 bytes and is one long."""
    return matrices.aligned if isinstance(matrices, Ragged) else vectors(matrices)


def _first(matrices: Matrices | Ragged) -> int:
    return matrices.table if isinstance(matrices, Ragged) else matrices.address


def _strides(matrices: Matrices | Ragged) -> tuple[bytes, bytes]:
    """Between matrices and between lines; a ragged batch has them in its table."""
    if isinstance(matrices, Ragged):
        return i64(0), i32(0)
    return i64(batch_stride(matrices)), i32(line_stride(matrices))
