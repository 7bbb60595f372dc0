"""Tensors of a checkpoint to and from the disk by :mod:`torch.distributed.checkpoint`; errors say what failed."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as metadata_types
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

_INDEX_PARTS = (
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
)


def write(folder: Path, state: dict[str, Any]) -> str | None:
    """Save ``state`` to ``folder``. Collective. Returns, on the first rank, what :func:`save_id` finds there.

    Raises:
        OSError: this rank could not write.
        RuntimeError: another rank failed, or this one for another reason.
    """
    writer = _Writer(folder)
    with _plain_errors("save_checkpoint"):
        save(state, storage_writer=writer)
    # Not what save returns, of which older versions of torch do not complete the storage's part.
    return _save_id(writer.storage_meta())


def read(folder: Path, state: dict[str, Any], strict: bool) -> None:
    """Load ``state`` in place from ``folder``. Collective.

    Raises:
        OSError: this rank could not read.
        RuntimeError: a file is damaged or holds more than plain values, or another rank failed.
    """
    planner = _PlainPlanner(allow_partial_load=not strict)
    with _plain_errors("load_checkpoint"):
        load(state, storage_reader=_Reader(folder), planner=planner)


def read_index(folder: Path) -> Metadata:
    """What there is in ``folder``.

    Raises:
        OSError: it cannot be read.
        RuntimeError: it is damaged, or holds more than an index does.
    """
    return _Reader(folder).read_metadata()


def save_id(metadata: Metadata) -> str | None:
    """What tells one :func:`write` from another."""
    return _save_id(metadata.storage_meta)


class _Reader(FileSystemReader):
    """Unpickles an index, but nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata: Metadata = _IndexUnpickler(file).load()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
        except OSError:
            raise
        except Exception as error:
            raise RuntimeError(f"{path} is damaged, or not the index of a checkpoint: {error}") from error
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    """Knows what an index is made of: torch's descriptions of it, dtypes, sizes and paths."""

    def find_class(self, module: str, name: str) -> Any:
        described = module == metadata_types.__name__ and isinstance(
            getattr(metadata_types, name, None), type
        )
        a_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        a_path = module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath")
        if described or a_dtype or a_path or f"{module}.{name}" in _INDEX_PARTS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of one")


class _Writer(FileSystemWriter):
    """Fails with the disk's error, where torch tells of the archive that it could not end."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _disk_errors(self.path):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with _disk_errors(self.path):
            super().finish(metadata, results)


class _PlainPlanner(DefaultLoadPlanner):
    """Refuses to unpickle anything but plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def _save_id(storage: StorageMeta | None) -> str | None:
    return storage.save_id if storage else None


@contextmanager
def _disk_errors(folder: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, OSError) and cause.errno):
            cause = cause.__context__
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(folder)) from None


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """One line, instead of every rank's traceback in an exception that ``except Exception`` lets pass."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if rank not in error.failures:
            rank = min(error.failures)
        elif isinstance(own := error.failures[rank][0], OSError):
            raise own from None
        cause = error.failures[rank][0]
        raise RuntimeError(f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}") from error
