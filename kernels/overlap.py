"""Whether two tensors may share memory: products and iterations that write one while they read the other."""

from __future__ import annotations

from torch import Tensor


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` are the same elements in the same place."""
    place = (a.data_ptr(), a.shape, a.stride(), a.dtype)
    return place == (b.data_ptr(), b.shape, b.stride(), b.dtype) and not a.is_meta


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the stretches of memory from first to last element meet; never on the meta device."""
    if a.is_meta or b.is_meta:
        return False
    (a_first, a_end), (b_first, b_end) = _extent(a), _extent(b)
    return a_first < b_end and b_first < a_end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of ``tensor`` in memory and the one after its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (steps + 1) * tensor.itemsize
