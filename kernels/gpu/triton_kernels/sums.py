"""The second launch of a symmetric product whose last tiles were divided: it adds their parts and finishes them.

Parts are added first to last, whichever was there first: every run has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmuon.kernels.gpu.arch import Arch
from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, f32, i32, i64, pointer
from dmuon.kernels.gpu.calls import ProductCall
from dmuon.kernels.gpu.triton_kernels.operands import HIDDEN_ARGS, batch_stride, line_stride, vectors
from dmuon.kernels.gpu.triton_kernels.symmetric import by_rows, division

_PIECE, _WARPS = 32, 4
"""A block adds a square this wide; small, so that a few tiles keep many multiprocessors busy."""


class SumsFamily:
    """The kernel beside any configuration with ``splits``. What its methods do,
    :class:`~dmuon.kernels.gpu.family.ProductFamily` says."""

    def spec(self, call: ProductCall, config: Mapping[str, Any], arch: Arch) -> KernelSpec:
        C, out = by_rows(call.C or call.out), by_rows(call.out)
        options = {
            "tile_side": config["block"],
            "piece": _PIECE,
            "warps": _WARPS,
            "write_lower": "lower" in config,
            "out_dtype": out.dtype,
            "vector_out": vectors(C) and vectors(out),
        }
        return KernelSpec("triton", "triton_kernels.sums_kernel", arch.name, options)

    def launch(
        self, call: ProductCall, config: Mapping[str, Any], binary: Binary, multiprocessors: int
    ) -> Launch:
        C, out = by_rows(call.C or call.out), by_rows(call.out)
        whole, divided, _ = division(call, config, multiprocessors)
        assert call.scratch is not None
        args = (
            *(pointer(matrices.address) for matrices in (call.scratch, C, out)),
            i32(out.rows),
            *(i64(line_stride(matrices)) for matrices in (C, out)),
            *(i64(batch_stride(matrices)) for matrices in (C, out)),
            f32(call.alpha),
            f32(call.beta if call.C is not None else 0.0),
            f32(call.diag),
            *map(i32, (config["group"], whole, config["splits"])),
            *HIDDEN_ARGS,
        )
        return Launch((divided * (config["block"] // _PIECE) ** 2, 1, 1), args)


SUMS = SumsFamily()
