"""``gram`` and ``symmetric_product`` for every arch from sm_80: warp-level matrix instructions (CuTe DSL).

Device code and its parameters: :mod:`dmuon.kernels.gpu.cute_kernels.symmetric_sm80_kernel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported, f32, i32, i64, pointer
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.cute_kernels.operands import (
    BAND,
    HALF,
    ITEM_BYTES,
    OPS,
    check_operands,
    check_shared,
    complaint,
    move_by_columns,
)


@dataclass(frozen=True)
class Plan:
    """What is fixed at compile time, and what follows from it.

    Args:
        dtype: of the operands, ``"bf16"`` or ``"fp16"``.
        out_dtype: of C and the result, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        column_major: whether the operands' columns are contiguous rather than their rows.
        tile: rows and columns of a tile.
        bk: depth of one stage.
        stages: of operands in shared memory.
        warps_m, warps_n: how a block's warps divide a tile.
    """

    dtype: str
    out_dtype: str
    column_major: bool
    tile: int
    bk: int
    stages: int
    warps_m: int
    warps_n: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def ahead(self) -> bool:
        """Whether operands for the next 16 columns are fetched from shared memory while these are multiplied: not for
        a large tile, whose sums leave too few registers."""
        return self.tile < 128

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor's registers shall hold at least. Two of eight warps leave too few to finish
        a large tile in fp32."""
        return 1 if self.out_dtype == "fp32" else 2

    @property
    def stage_elements(self) -> int:
        """Of one operand."""
        return self.tile * self.bk

    @property
    def vector(self) -> int:
        """Elements of C or the result in 16 bytes."""
        return 16 // ITEM_BYTES[self.out_dtype]

    @property
    def pitch(self) -> int:
        """Elements from one row of the staged tile to the next: at least 128 bytes, all banks."""
        return max(self.tile, 8 * self.vector)

    @property
    def shared_bytes(self) -> int:
        """The stages; then, in their place, the finished tile."""
        stages = 2 * self.stages * self.stage_elements * ITEM_BYTES[self.dtype]
        return max(stages, self.tile * self.pitch * ITEM_BYTES[self.out_dtype])


class SymmetricSm80:
    """The :class:`~dmuon.kernels.gpu.family.ProductFamily` of this kernel.

    A config has ``tile``, ``bk``, ``stages``, ``warps_m`` and ``warps_n``, as :class:`Plan` explains them.
    """

    sources = tuple(
        f"gpu/cute_kernels/{name}.py"
        for name in (
            "compile",
            "operands",
            "symmetric_sm80",
            "symmetric_sm80_kernel",
            "symmetric_sm80_epilogue",
            "symmetric_sm90_tiles",
        )
    )

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch) -> list[dict[str, Any]]:
        if op not in OPS or dtype not in HALF:
            return []
        depth = n if op == "gram" else m
        found = []
        for values in _CONFIGS:
            config = dict(zip(_FIELDS, values, strict=True))
            # A tile beyond the matrix gains nothing over the next smaller one, nor do stages beyond its depth.
            useful = config["tile"] < 2 * max(m, 32) and config["bk"] * (config["stages"] - 1) < 2 * max(
                depth, 32
            )
            plan = Plan(dtype, "fp32", False, **config)
            # For Blackwell, sums are kept in pairs of registers, and two blocks of this size spill.
            spills = arch.capability >= (10, 0) and plan.tile == 128 and plan.threads == 256
            if useful and not spills and plan.shared_bytes <= arch.shared_bytes:
                found.append(config)
        return found

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
        if set(config) != set(_FIELDS):
            raise ValueError(f"config must have the fields {sorted(_FIELDS)}, got {sorted(config)}")
        for name, values in _FIELDS.items():
            if config[name] not in values:
                raise ValueError(f"{name} must be one of {values}, got {config[name]!r}")
        tile, threads = config["tile"], 32 * config["warps_m"] * config["warps_n"]
        if tile % (16 * config["warps_m"]) or tile % (16 * config["warps_n"]):
            raise ValueError(
                f"warps_m and warps_n must divide a tile of {tile} in multiples of 16, got {config}"
            )
        if not max(64, tile) <= threads <= 256 or tile * config["bk"] % (8 * threads):
            raise ValueError(
                f"{threads} threads cannot load {tile} by {config['bk']}: they must be at least {max(64, tile)}, "
                f"at most 256, and no more than there are 16-byte vectors"
            )

    def spec(self, call: ProductCall, config: Mapping[str, Any], arch: Arch) -> KernelSpec:
        self.check(call.op, config)
        check_operands(call, _complaint)
        # A symmetric operand's columns are its rows.
        column_major = call.op == "gram" and _by_columns(call.A)
        plan = Plan(call.A.dtype, call.out.dtype, column_major, **config)
        check_shared(plan.shared_bytes, config, call, arch)
        return KernelSpec("cute", "cute_kernels.symmetric_sm80_kernel", arch.name, asdict(plan))

    def launch(
        self, call: ProductCall, config: Mapping[str, Any], binary: Binary, multiprocessors: int
    ) -> Launch:
        plan = Plan(**binary.spec.options)
        side = -(-call.out.rows // plan.tile)
        each = side * (side + 1) // 2
        blocks = each * call.out.batch
        if blocks >= 1 << 31:
            raise Unsupported(f"{blocks} tiles of {plan.tile} are more than a grid holds")
        C = call.C if call.beta != 0 else None
        operands = (call.A, call.B or call.A, C or call.out, call.out)
        addresses = (call.A.address, operands[1].address, C.address if C else 0, call.out.address)
        one = int(call.B is None or call.B == call.A)
        ints = (call.out.rows, call.A.columns, side, each, BAND, one)
        args = (
            *(pointer(address) for address in addresses),
            *(i64(matrices.batch_stride if matrices.batch > 1 else 0) for matrices in operands),
            *(i32(_line_stride(matrices)) for matrices in operands),
            *(i32(value) for value in ints),
            *(f32(value) for value in (call.alpha, call.beta, call.diag)),
        )
        return Launch((blocks, 1, 1), args)


SYMMETRIC_SM80 = SymmetricSm80()

_FIELDS: dict[str, tuple[int, ...]] = {
    "tile": (32, 64, 128),
    "bk": (32, 64),
    "stages": (2, 3, 4, 5, 6),
    "warps_m": (1, 2, 4),
    "warps_n": (1, 2, 4),
}
"""What each field of a configuration may be."""

_CONFIGS = (
    (128, 32, 3, 2, 2),
    (128, 32, 4, 2, 2),
    (128, 32, 5, 2, 2),
    (128, 64, 2, 2, 2),
    (128, 64, 3, 2, 2),
    (128, 32, 3, 2, 4),
    (128, 32, 4, 2, 4),
    (128, 32, 5, 2, 4),
    (64, 32, 4, 2, 2),
    (64, 64, 3, 2, 2),
    (64, 64, 4, 2, 2),
    (64, 64, 6, 2, 2),
    (64, 32, 4, 2, 1),
    (64, 64, 3, 2, 1),
    (64, 64, 4, 2, 4),
    (32, 64, 4, 2, 2),
    (32, 64, 4, 2, 1),
    (32, 64, 6, 2, 1),
)


def _complaint(matrices: Matrices, by_columns: bool) -> str | None:
    """Why the matrices cannot be moved by rows (columns), 16 bytes at a time; ``None`` if they can."""
    lines, kind, count = matrices.row_stride, "row", matrices.rows
    if by_columns:
        lines, kind, count = matrices.column_stride, "column", matrices.columns
    if count > 1 and lines >= 1 << 31:
        return f"must have a {kind} stride below 2**31 elements, got {lines}"
    return complaint(matrices, by_columns)


def _by_columns(matrices: Matrices) -> bool:
    return move_by_columns(matrices, _complaint)


def _line_stride(matrices: Matrices) -> int:
    """Elements from a row (column) to the next; 0 if there is only one, whose stride means nothing."""
    if _by_columns(matrices):
        return matrices.column_stride if matrices.columns > 1 else 0
    return matrices.row_stride if matrices.rows > 1 else 0
