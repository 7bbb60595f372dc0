"""``gram`` and ``symmetric_product`` for Hopper: a persistent kernel on TMA and wgmma (CuTe DSL).

Device code and its parameters: :mod:`dmuon.kernels.gpu.cute_kernels.symmetric_sm90_kernel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dmuon.kernels.gpu.arch import Arch, arch_named
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, TensorMap, Unsupported, f32, i32
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.cute_kernels.operands import (
    BAND,
    HALF,
    ITEM_BYTES,
    OPS,
    check_operands,
    check_shared,
    complaint,
    distances,
    move_by_columns,
)

BLOCK = 64
"""Rows and columns of a block: what one warpgroup finishes and stores at a time."""


_ARCH = arch_named("sm_90a")


@dataclass(frozen=True)
class Plan:
    """What is fixed at compile time, and what follows from it.

    Args:
        dtype: of the operands, ``"bf16"`` or ``"fp16"``.
        out_dtype: of C and the result, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        column_major: whether the operands' columns are contiguous rather than their rows.
        arrangement: ``"cooperative"`` or ``"ping-pong"``.
        tile: rows and columns of a tile.
        rows: of a tile that a CTA (ping-pong: a warpgroup) takes in one turn. With fewer than all, sums fit in
            registers, or more CTAs find work.
        bk: depth of one stage.
        stages: of operands in shared memory.
        cluster: CTAs that share what they load where their tiles are of one column: 1 or 2.
    """

    dtype: str
    out_dtype: str
    column_major: bool
    arrangement: str
    tile: int
    rows: int
    bk: int
    stages: int
    cluster: int

    @property
    def ping_pong(self) -> bool:
        return self.arrangement == "ping-pong"

    @property
    def turns(self) -> int:
        """Turns that a tile takes."""
        return self.tile // self.rows

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return 2 if self.ping_pong else self.rows // BLOCK

    @property
    def groups_on_tile(self) -> int:
        """Consumer warpgroups that share a tile."""
        return 1 if self.ping_pong else self.consumers

    @property
    def rows_of_blocks(self) -> int:
        """Rows of blocks that one consumer warpgroup computes of a tile."""
        return self.rows // BLOCK // self.groups_on_tile

    @property
    def threads(self) -> int:
        """One producer warpgroup and the consumers."""
        return 128 * (1 + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers for a thread of the producer and of a consumer; together they fill the register file."""
        return {2: (40, 232), 3: (32, 160)}[self.consumers]

    @property
    def buffers(self) -> tuple[int, int]:
        """For each consumer warpgroup, blocks of C in flight and pairs of a block and its transpose that are staged:
        two of each where stages leave the room."""
        room = _ARCH.shared_bytes - self._barrier_bytes - self.stages * self.stage_bytes
        for c_slots, stagings in ((2, 2), (2, 1)):
            if self.consumers * (c_slots + 2 * stagings) * self.block_bytes <= room:
                return c_slots, stagings
        return 1, 1

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.tile) * self.bk * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return BLOCK * BLOCK * ITEM_BYTES[self.out_dtype]

    @property
    def shared_bytes(self) -> int:
        """Of one CTA: barriers, stages, slots of C and staged blocks."""
        c_slots, stagings = self.buffers
        blocks = self.consumers * (c_slots + 2 * stagings)
        return self._barrier_bytes + self.stages * self.stage_bytes + blocks * self.block_bytes

    _barrier_bytes = 1024


class SymmetricSm90:
    """The :class:`~dmuon.kernels.gpu.family.ProductFamily` of this kernel.

    A config has the fields ``arrangement``, ``tile``, ``rows``, ``bk``, ``stages`` and ``cluster`` of :class:`Plan`.
    """

    sources = tuple(
        f"gpu/cute_kernels/{name}.py"
        for name in (
            "compile",
            "operands",
            "symmetric_sm90",
            "symmetric_sm90_blocks",
            "symmetric_sm90_kernel",
            "symmetric_sm90_tiles",
        )
    )

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch) -> list[dict[str, Any]]:
        if arch != _ARCH or op not in OPS or dtype not in HALF:
            return []
        area = {tile: -(-m // tile) * (-(-m // tile) + 1) // 2 * tile**2 for tile in (64, 128, 192, 256)}
        # Larger tiles load less for each product, but may cover much more than the triangle; from a few thousand
        # rows on, what small ones save is less than what they load.
        tiles = [tile for tile in area if area[tile] <= 1.5 * min(area.values()) and (tile > 64 or m <= 4096)]
        return [dict(config) for config in _CONFIGS if config["tile"] in tiles]

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
        if set(config) != set(_FIELDS):
            raise ValueError(f"config must have the fields {', '.join(_FIELDS)}, got {sorted(config)}")
        shapes = {
            "cooperative": ((128, 128), (192, 192), (256, 128)),
            "ping-pong": ((64, 64), (128, 64), (128, 128), (192, 64), (256, 64)),
        }
        if config["arrangement"] not in shapes:
            raise ValueError(f"arrangement must be one of {', '.join(shapes)}, got {config['arrangement']!r}")
        allowed, shape = shapes[config["arrangement"]], (config["tile"], config["rows"])
        if shape not in allowed:
            raise ValueError(
                f"tile and rows of {config['arrangement']} must be one of {allowed}, got {shape}"
            )
        for name, values in {"bk": (64, 128), "stages": range(2, 17), "cluster": (1, 2)}.items():
            if config[name] not in values:
                raise ValueError(f"{name} must be one of {list(values)}, got {config[name]!r}")

    def spec(self, call: ProductCall, config: Mapping[str, Any], arch: Arch) -> KernelSpec:
        self.check(call.op, config)
        if arch != _ARCH:
            raise Unsupported(f"needs {_ARCH.name}, got {arch.name}")
        check_operands(call, _complaint)
        # A symmetric operand's columns are its rows.
        column_major = call.op == "gram" and _by_columns(call.A)
        plan = Plan(call.A.dtype, call.out.dtype, column_major, **config)
        if plan.cluster == 2 and plan.column_major and plan.tile % 128:
            raise Unsupported(f"clusters of 2 cannot halve tiles of {plan.tile} columns of a column-major X")
        check_shared(plan.shared_bytes, config, call, arch)
        return KernelSpec("cute", "cute_kernels.symmetric_sm90_kernel", arch.name, asdict(plan))

    def launch(
        self, call: ProductCall, config: Mapping[str, Any], binary: Binary, multiprocessors: int
    ) -> Launch:
        plan = Plan(**binary.spec.options)
        rows = -(-call.out.rows // plan.tile)
        each = rows * (rows + 1) // 2
        tiles = each * call.out.batch * plan.turns
        if tiles >= 1 << 31:
            raise Unsupported(f"{tiles} tiles are more than 32 bits count")
        C = call.C if call.beta != 0 else None
        ints = (-(-call.A.columns // plan.bk), rows, each, tiles, BAND, int(C is not None))
        args: tuple[bytes | TensorMap, ...] = (
            _operand_map(call.A, call.op, plan, plan.rows),
            _operand_map(call.B or call.A, call.op, plan, plan.tile // plan.cluster),
            _block_map(C or call.out),
            _block_map(call.out),
            *(i32(value) for value in ints),
            *(f32(value) for value in (call.alpha, call.beta, call.diag)),
        )
        clusters = min(-(-tiles // plan.cluster), max(multiprocessors // plan.cluster, 1))
        return Launch((clusters * plan.cluster, 1, 1), args)


SYMMETRIC_SM90 = SymmetricSm90()

_FIELDS = ("arrangement", "tile", "rows", "bk", "stages", "cluster")

_CONFIGS: tuple[dict[str, Any], ...] = tuple(
    dict(zip(_FIELDS, values, strict=True))
    for values in (
        ("cooperative", 256, 128, 64, 3, 1),
        ("cooperative", 256, 128, 64, 3, 2),
        ("cooperative", 192, 192, 64, 3, 1),
        ("cooperative", 192, 192, 64, 3, 2),
        ("cooperative", 128, 128, 64, 4, 1),
        ("cooperative", 128, 128, 64, 4, 2),
        ("ping-pong", 256, 64, 64, 3, 2),
        ("ping-pong", 192, 64, 64, 4, 1),
        ("ping-pong", 128, 128, 64, 4, 1),
        ("ping-pong", 128, 128, 64, 4, 2),
        ("ping-pong", 128, 64, 64, 5, 1),
        ("ping-pong", 128, 64, 64, 5, 2),
        ("ping-pong", 64, 64, 128, 4, 1),
        ("ping-pong", 64, 64, 128, 4, 2),
    )
)


def _complaint(matrices: Matrices, by_columns: bool) -> str | None:
    """Why TMA cannot move the matrices by rows (columns); ``None`` if it can."""
    for name, value in distances(matrices, by_columns).items():
        if not value:
            return f"must have its {name} at a multiple of 16 bytes, got 0"
    return complaint(matrices, by_columns)


def _by_columns(matrices: Matrices) -> bool:
    return move_by_columns(matrices, _complaint)


def _map(matrices: Matrices, by_columns: bool, lines_at_once: int) -> TensorMap:
    """The tensor map of a batch, for boxes of 128 bytes of so many lines, as swizzled shared memory holds them."""
    length, count, lines = matrices.columns, matrices.rows, matrices.row_stride
    if by_columns:
        length, count, lines = count, length, matrices.column_stride
    size = matrices.item_bytes
    # The stride of a dimension of one means nothing, but has to be valid.
    line_bytes = lines * size if count > 1 else -(-length * size // 16) * 16
    batch_bytes = matrices.batch_stride * size if matrices.batch > 1 else line_bytes
    shape = (length, count, matrices.batch)
    box = (128 // size, lines_at_once, 1)
    return TensorMap(matrices.address, matrices.dtype, shape, (line_bytes, batch_bytes), box, swizzle=128)


def _operand_map(matrices: Matrices, op: str, plan: Plan, rows: int) -> TensorMap:
    """Of an operand that is read ``rows`` rows and ``bk`` columns at a time."""
    if plan.column_major:
        return _map(matrices, True, plan.bk)
    return _map(matrices, op == "symmetric_product" and _by_columns(matrices), rows)


def _block_map(matrices: Matrices) -> TensorMap:
    """Of C or the result."""
    return _map(matrices, _by_columns(matrices), BLOCK)
