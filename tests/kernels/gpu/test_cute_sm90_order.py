"""The order in which the CuTe DSL kernel for sm_90a takes its tiles, asked of the device function itself."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from ptx import Memory, run
from torch import Tensor

from dmuon.kernels.gpu.binary import Binary, KernelSpec, Launch, i32, pointer

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")
device_tiles = pytest.importorskip("dmuon.kernels.gpu.cute_kernels.symmetric_sm90_tiles")
Int32 = cutlass.Int32


@pytest.mark.parametrize(
    ("tile_rows", "band", "tiles"),
    [
        (1, 8, range(1)),
        (5, 2, range(15)),
        (21, 8, range(231)),
        (65535, 8, range(2147450880 - 500, 2147450880)),
    ],
)
def test_every_tile_is_taken_once(tile_rows, band, tiles):
    places = tile_places(tile_rows, band, tiles)
    assert (places[:, 2] == 0).all()
    assert ((places[:, 1] >= 0) & (places[:, 1] <= places[:, 0]) & (places[:, 0] < tile_rows)).all()
    assert len(places.unique(dim=0)) == len(tiles)
    # Bands are walked one after the other.
    assert ((places[:, 0] // band).diff() >= 0).all()


def test_the_next_matrix_begins_after_the_last_tile_of_one():
    places = tile_places(3, 2, range(6, 12))
    assert (places[:, 2] == 1).all() and torch.equal(places[:, :2], tile_places(3, 2, range(6))[:, :2])


MOST_TILES = 512


def tile_places(tile_rows: int, band: int, tiles: range) -> Tensor:
    """(row, column, matrix) of each of ``tiles``, as the device says."""
    out = torch.full((MOST_TILES, 3), -1, dtype=torch.int32)
    blocks = -(-len(tiles) // 128)
    ints = (tiles.start, len(tiles), tile_rows, tile_rows * (tile_rows + 1) // 2, band)
    launch = Launch((blocks, 1, 1), (pointer(out.data_ptr()), *(i32(value) for value in ints)))
    run(tile_order(), launch, Memory.of(out))
    return out[: len(tiles)].long()


@cute.kernel
def write_tiles(out: cute.Tensor, first: Int32, count: Int32, tile_rows: Int32, each: Int32, band: Int32):
    index = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
    if index < count:
        i, j, matrix = device_tiles.tile_at(first + index, tile_rows, each, band)
        out[index, 0] = i
        out[index, 1] = j
        out[index, 2] = matrix


@cute.jit
def start(out: cute.Tensor, first: Int32, count: Int32, tile_rows: Int32, each: Int32, band: Int32, stream):
    kernel = write_tiles(out, first, count, tile_rows, each, band)
    kernel.launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


@lru_cache
def tile_order() -> Binary:
    """A kernel that writes down what ``tile_at`` says."""
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from dmuon.kernels.gpu.cute_kernels.compile import compile_cute

    arguments = (make_fake_tensor(Int32, (MOST_TILES, 3), (3, 1)), *(Int32(1),) * 5, make_fake_stream())
    return compile_cute(
        KernelSpec("cute", "test_cute_sm90_order", "sm_90a"), start, arguments, shared_bytes=0
    )
