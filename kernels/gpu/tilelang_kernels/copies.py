"""Copies between global and shared memory in 16-byte pieces, which handle ragged edges themselves. Imports TileLang.

TileLang's own copies fall back to single elements where sizes are not known to be multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T


def copies(threads: int) -> tuple[Any, Any]:
    """``copy_in`` and ``copy_out`` for blocks of ``threads`` threads.

    A block of height × width elements must be a multiple of ``threads`` pieces of ``lanes`` elements.
    """

    @T.macro
    def copy_in(X, matrix, row, column, part, slot, height: int, width: int, lanes: int):
        """Start cp.async of X's block at (row, column) to ``part[slot]`` (``part`` if ``None``); zeros beyond X."""
        thread = T.get_thread_binding()
        for k in T.unroll(height * width // (lanes * threads)):
            y = (k * threads + thread) * lanes // width
            x = (k * threads + thread) * lanes % width
            T.call_extern(
                "handle",
                "dmuon::copy_in",
                T.address_of(part[y, x] if slot is None else part[slot, y, x]),
                T.address_of(X[matrix, row + y, column + x]),
                T.if_then_else(row + y < X.shape[1], X.shape[2] - (column + x), 0),
            )

    @T.macro
    def copy_out(part, X, matrix, row, column, height: int, width: int, lanes: int):
        """Store ``part`` to (row, column) of X, as far as X goes."""
        thread = T.get_thread_binding()
        for k in T.unroll(height * width // (lanes * threads)):
            y = (k * threads + thread) * lanes // width
            x = (k * threads + thread) * lanes % width
            T.call_extern(
                "handle",
                "dmuon::copy_out",
                T.address_of(part[y, x]),
                T.address_of(X[matrix, row + y, column + x]),
                T.if_then_else(row + y < X.shape[1], X.shape[2] - (column + x), 0),
            )

    return copy_in, copy_out
