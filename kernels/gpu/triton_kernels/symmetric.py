"""``gram`` and ``symmetric_product`` in Triton: one kernel, which computes only tiles on and below the diagonal.

A configuration has ``block`` (the side of a square tile), ``block_k`` (elements of the inner dimension per step),
``warps``, ``stages`` (of the copy pipeline) and ``group`` (tile rows of a band that is walked column by column,
for the L2 cache). Two fields are optional:

* ``splits``: tiles of the last wave are divided into so many parts along the inner dimension, if that wave leaves
  multiprocessors idle; :mod:`dmuon.kernels.gpu.triton_kernels.sums` adds the parts.
* ``lower``: for chains of products that hand each other lower halves alone. ``"write"`` writes of the result no more
  than the lower half and the tiles on the diagonal, ``"read"`` reads symmetric operands from their lower halves,
  ``"both"`` does both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, Unsupported, f32, i32, i64, pointer
from dmuon.kernels.gpu.calls import Matrices, ProductCall
from dmuon.kernels.gpu.roofline import SPLITS, best_splits, device_of
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

OPS = ("gram", "symmetric_product")

FIELDS = {
    "block": (16, 32, 64, 128),
    "block_k": (16, 32, 64, 128),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4, 5, 6),
    "group": (1, 2, 4, 8, 16, 32),
}
"""What each field of a configuration may be."""

OPTIONAL: dict[str, tuple[Any, ...]] = {"splits": SPLITS, "lower": ("read", "write", "both")}
"""And what those may be that need not be there."""


class SymmetricFamily:
    """The kernel in all its configurations; see :class:`~dmuon.kernels.gpu.family.ProductFamily`."""

    sources = tuple(
        f"gpu/triton_kernels/{name}.py"
        for name in (
            *("symmetric", "symmetric_kernel", "tile_kernel", "sums", "sums_kernel"),
            *("operands", "compile"),
        )
    )

    def configs(self, op: str, m: int, n: int, dtype: str, arch: Arch) -> list[dict[str, Any]]:
        if op not in OPS or dtype not in HALF:
            return []
        inner = n if op == "gram" else m
        choices = [
            {"block": block, "block_k": block_k, "warps": warps, "stages": stages, "group": group}
            for block, warps in ((32, 2), (32, 4), (64, 4), (128, 8))
            # A tile beyond the matrix gains nothing over the next smaller one.
            if block < 2 * max(m, 32)
            for block_k in (32, 64, 128)
            if block_k < 2 * max(inner, 32)
            for stages in (3, 4, 5)
            if stages == 3 or stages * block_k <= inner
            for group in ((8, 16) if m > 32 * block else (8,))
        ]
        choices += [more for choice in choices for more in _variants(choice, op, m, inner, arch)]
        ragged = m % 8 or inner % 8
        return [
            choice
            for choice in choices
            if _shared_bytes(choice, arch, 4) <= arch.shared_bytes and (_elementwise(choice) or not ragged)
        ]

    def check(self, op: str, config: Mapping[str, Any]) -> None:
        check_config("symmetric", OPS, FIELDS, OPTIONAL, op, config)
        lower = config.get("lower")
        if op == "gram" and lower not in (None, "write"):
            raise ValueError(
                f"lower can be 'write' alone for gram, whose operand is not symmetric, got {lower!r}"
            )
        if lower in ("read", "both") and "splits" in config:
            raise ValueError(f"splits does not go with lower={lower!r}")
        if lower in ("read", "both") and config["block_k"] > config["block"]:
            raise ValueError(f"block_k must be at most block with lower={lower!r}, got {config['block_k']}")

    def spec(self, call: ProductCall, config: Mapping[str, Any], arch: Arch) -> KernelSpec:
        self.check(call.op, config)
        check_operands(call)
        check_shared(_shared_bytes(config, arch, call.out.item_bytes), config, arch)
        operands = A, B, C, out = _operands(call)
        check_elementwise(operands, _elementwise(config), config)
        lower = config.get("lower")
        if lower:
            given = (call.A if call.op != "gram" else None, call.B, call.C, call.out)
            check_lower(matrices for matrices in given if matrices is not None)
        options = {
            **{name: config[name] for name in FIELDS if name != "group"},
            "read_lower": lower in ("read", "both"),
            "write_lower": lower in ("write", "both"),
            "split": "splits" in config,
            "by_rows": contiguous_rows(A),
            "dtype": A.dtype,
            "out_dtype": out.dtype,
            "vector_in": vectors(A) and vectors(B),
            "vector_out": vectors(C) and vectors(out),
        }
        return KernelSpec("triton", "triton_kernels.symmetric_kernel", arch.name, options)

    def launch(
        self, call: ProductCall, config: Mapping[str, Any], binary: Binary, multiprocessors: int
    ) -> Launch:
        operands = _operands(call)
        A, splits = operands[0], config.get("splits", 1)
        whole, divided, chunk = division(call, config, multiprocessors)
        blocks = whole + divided * splits
        if blocks >= 1 << 31:
            raise Unsupported(f"triton: {blocks} tiles of {config['block']} are more than a grid holds")
        args = (
            *(pointer(operand.address) for operand in operands),
            i32(A.rows),
            i32(A.columns),
            *(i64(line_stride(operand)) for operand in operands),
            *(i64(batch_stride(operand)) for operand in operands),
            f32(call.alpha),
            f32(call.beta if call.C is not None else 0.0),
            f32(call.diag),
            i32(config["group"]),
            pointer(call.scratch.address if call.scratch else 0),
            *map(i32, (whole, splits, chunk)),
            *HIDDEN_ARGS,
        )
        return Launch((blocks, 1, 1), args)

    def parts(
        self, call: ProductCall, config: Mapping[str, Any], multiprocessors: int
    ) -> tuple[int, int, int]:
        """The shape of ``call.scratch``: contiguous fp32 tiles, one for each part of a divided one."""
        divided = division(call, config, multiprocessors)[1]
        return divided * config["splits"], config["block"], config["block"]


SYMMETRIC = SymmetricFamily()


def division(call: ProductCall, config: Mapping[str, Any], multiprocessors: int) -> tuple[int, int, int]:
    """How many tiles are computed whole, how many after them are divided, and how much of the inner dimension each
    of their parts takes: with ``splits``, all but those of complete waves are divided."""
    side = -(-call.out.rows // config["block"])
    tiles = call.out.batch * side * (side + 1) // 2
    if "splits" not in config:
        return tiles, 0, 0
    divided = tiles % multiprocessors
    steps = -(-call.A.columns // config["block_k"])
    return tiles - divided, divided, -(-steps // config["splits"]) * config["block_k"]


def by_rows(matrices: Matrices) -> Matrices:
    """A symmetric matrix with contiguous rows: with contiguous columns, it is its own transpose."""
    return matrices if contiguous_rows(matrices) else matrices.transposed


def _variants(choice: dict[str, Any], op: str, m: int, inner: int, arch: Arch) -> Iterator[dict[str, Any]]:
    """``choice`` with divided tiles, if it should pay on the GPU that is known of ``arch``, and for lower halves."""
    block, block_k = choice["block"], choice["block_k"]
    # One pipeline depth and one order of tiles: what else differs is the tuner's to find without them.
    if choice["stages"] != 3 or choice["group"] != 8 or block < 64 or block_k not in (32, 64):
        return
    device = device_of(arch.name)
    splits = best_splits(device, m, inner, block) if device else 1
    if splits > 1:
        yield choice | {"splits": splits}
    # Tiles read element by element, as they are and transposed, would spill registers.
    if m > block and m % 8 == 0:
        yield from (choice | {"lower": lower} for lower in (("write",) if op == "gram" else ("read", "both")))


def _shared_bytes(config: Mapping[str, Any], arch: Arch, out_bytes: int) -> int:
    block = config["block"]
    stage = 2 * block * config["block_k"] * 2
    widest = 4 if "splits" in config else out_bytes
    return shared_bytes(arch, config["stages"], stage, block * block * widest)


def _elementwise(config: Mapping[str, Any]) -> bool:
    return elementwise(config["block"], config["block"], config["block_k"], config["warps"])


def _operands(call: ProductCall) -> tuple[Matrices, Matrices, Matrices, Matrices]:
    """A, B, C and out. An absent B is A, an absent C is out."""
    A, C, out = call.A, by_rows(call.C or call.out), by_rows(call.out)
    return (A, A, C, out) if call.B is None else (by_rows(A), by_rows(call.B), C, out)
