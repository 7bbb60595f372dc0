"""The registry of backends: who can compute the three products, and what a stored choice of one depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files

from dmuon.kernels.backends.base import Backend, Product
from dmuon.kernels.backends.blocked import BlockedBackend
from dmuon.kernels.backends.compiled import CUTE, TILELANG, TRITON
from dmuon.kernels.backends.quack_backend import QuackBackend
from dmuon.kernels.backends.torch_backend import TorchBackend

__all__ = ["BACKENDS", "Backend", "Product", "source_hash"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (TorchBackend(), BlockedBackend(), TRITON, TILELANG, CUTE, QuackBackend())
}
"""Every backend by name. Adding one is one module and one entry here."""

_SHARED_SOURCES = ("run.py", "normalize.py", "backends/base.py", "backends/torch_backend.py")


def source_hash(backends: Iterable[str]) -> str:
    """A digest of the kernel sources that a choice of these ``backends`` runs through.

    A timing is only as good as the code it timed: entries with another digest are not used.

    Raises:
        KeyError: a name is not in :data:`BACKENDS`.
    """
    sources = {source for name in backends for source in BACKENDS[name].sources}
    return _digest(tuple(sorted({*_SHARED_SOURCES, *sources})))


@lru_cache
def _digest(sources: tuple[str, ...]) -> str:
    folder = files("dmuon.kernels")
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.encode())
        digest.update(folder.joinpath(source).read_bytes())
    return digest.hexdigest()[:16]
