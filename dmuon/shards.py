"""What a rank holds of a tensor that several share."""

from __future__ import annotations

from torch import Tensor


def is_shared(tensor: Tensor) -> bool:
    """Whether it is a DTensor, found out without loading these."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its storage; any other tensor itself.

    Work that is elementwise needs no more, and spares a dispatch per operation.
    """
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
