"""Compiled kernels on disk: one file each, written whole or not at all, by any number of processes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import uuid
import warnings
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dmuon.kernels.gpu.binary import Binary, KernelSpec, Param
from dmuon.kernels.gpu.locks import file_lock
from dmuon.kernels.gpu.sources import source_digest

COMPILERS: Mapping[str, str] = {"triton": "triton", "tilelang": "tilelang", "cute": "nvidia-cutlass-dsl"}
"""The distribution of each DSL. Which ``nvcc`` or ``ptxas`` it called is not asked: a node that runs kernels need
not have what the node that compiled them had."""

FAILURE_DAYS = 1.0
"""For how long a failed build is not tried again."""

_MAGIC = b"DMUONKRN"
_FORMAT = 1
_PREFIX = struct.Struct("<8sIQ")
_DIGEST_BYTES = 32


class Damaged(ValueError):
    """A file that is not what was written."""


@dataclass(frozen=True)
class CacheHealth:
    """What a folder of binaries holds. ``failed`` and ``damaged`` have a line for each such file."""

    path: Path
    binaries: int
    size_bytes: int
    failed: tuple[str, ...]
    damaged: tuple[str, ...]
    writable: bool


class BinaryCache:
    """A folder of binaries.

    Args:
        folder: made when first written to; :func:`default_folder` if ``None``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder
        self._warned = False

    def load(self, spec: KernelSpec) -> Binary | None:
        """The binary of ``spec``; ``None`` if there is none or its file is damaged, as good as none."""
        try:
            return decode(self._path(spec, "kernel").read_bytes(), spec)
        except (OSError, Damaged):
            return None

    def failure(self, spec: KernelSpec) -> str | None:
        """Why building ``spec`` failed within the last :data:`FAILURE_DAYS`; ``None`` if it did not."""
        path = self._path(spec, "failed")
        try:
            if time.time() - path.stat().st_mtime > FAILURE_DAYS * 86400:
                return None
            return str(json.loads(path.read_bytes())["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def store(self, binary: Binary) -> None:
        """Keep ``binary``; where the disk is full or read-only, warn once and do without."""
        self._write(self._path(binary.spec, "kernel"), encode(binary))
        with suppress(OSError):
            self._path(binary.spec, "failed").unlink(missing_ok=True)

    def store_failure(self, spec: KernelSpec, reason: str) -> None:
        """Keep ``reason``, so that nobody soon tries the same in vain."""
        text = json.dumps({"spec": json.loads(spec.text), "reason": reason})
        self._write(self._path(spec, "failed"), text.encode())

    def lock(self, spec: KernelSpec, timeout_s: float) -> AbstractContextManager[bool]:
        """Be the only process that builds ``spec``: see :func:`~dmuon.kernels.gpu.locks.file_lock`."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        return file_lock(self._path(spec, "lock"), timeout_s)

    def health(self) -> CacheHealth:
        """Read every file."""
        count, size, damaged, failed = 0, 0, [], []
        for path in sorted(self.folder.glob("*.kernel")):
            with suppress(FileNotFoundError):
                count, size = count + 1, size + path.stat().st_size
                try:
                    decode(path.read_bytes())
                except (OSError, Damaged) as error:
                    damaged.append(f"{path.name}: {error}")
        for path in sorted(self.folder.glob("*.failed")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                failed.append(f"{path.stem}: {json.loads(path.read_bytes())['reason']}")
        existing = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        writable = os.access(existing, os.W_OK)
        return CacheHealth(self.folder, count, size, tuple(failed), tuple(damaged), writable)

    def _path(self, spec: KernelSpec, suffix: str) -> Path:
        name = spec.module.rpartition(".")[2].removesuffix("_kernel")
        return self.folder / f"{spec.dsl}-{name}-{spec.arch}-{key_of(spec)}.{suffix}"

    def _write(self, path: Path, data: bytes) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_whole(path, data)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"compiled kernels cannot be kept in {self.folder} ({error.strerror or error}): every process "
                    "compiles its own; DMUON_CACHE names another folder",
                    stacklevel=2,
                )


def default_folder() -> Path:
    """``binaries`` in the folder that ``$DMUON_CACHE`` names, else in the user's cache folder.

    Where ``DMUON_CACHE`` names the tuning store's file (``.db``, ``.sqlite``, ``.sqlite3``), ``binaries`` is
    appended to its name. Nothing is created.
    """
    override = os.environ.get("DMUON_CACHE")
    if not override:
        from platformdirs import user_cache_path

        return user_cache_path("dmuon", appauthor=False) / "binaries"
    path = Path(override).expanduser()
    if path.suffix in (".db", ".sqlite", ".sqlite3") and not path.is_dir():
        return path.with_name(f"{path.name}.binaries")
    return path / "binaries"


def key_of(spec: KernelSpec) -> str:
    """What a binary's content depends on, digested: the spec, the kernel's sources, the DSL's version."""
    parts = [_FORMAT, spec.text, source_digest(spec.module), _version(COMPILERS.get(spec.dsl, spec.dsl))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def encode(binary: Binary) -> bytes:
    """One file's content: a header in JSON, the PTX (deflated), the cubin, and a digest of it all."""
    ptx = zlib.compress(binary.ptx.encode())
    header = {
        "spec": json.loads(binary.spec.text),
        "entry": binary.entry,
        "threads": binary.threads,
        "shared_bytes": binary.shared_bytes,
        "params": [asdict(param) for param in binary.params],
        "cluster": list(binary.cluster),
        "extra": dict(binary.extra),
        "ptx_bytes": len(ptx),
        "cubin_bytes": len(binary.cubin),
    }
    text = json.dumps(header).encode()
    body = b"".join((_PREFIX.pack(_MAGIC, _FORMAT, len(text)), text, ptx, binary.cubin))
    return body + hashlib.sha256(body).digest()


def decode(data: bytes, spec: KernelSpec | None = None) -> Binary:
    """The inverse of :func:`encode`.

    Raises:
        Damaged: it is not what that wrote, or not of ``spec``.
    """
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if len(body) < _PREFIX.size or hashlib.sha256(body).digest() != digest:
        raise Damaged(f"{len(data)} bytes that do not match their digest")
    magic, form, length = _PREFIX.unpack_from(body)
    if (magic, form) != (_MAGIC, _FORMAT):
        raise Damaged(f"format {form} of {magic!r}, not {_FORMAT} of {_MAGIC!r}")
    header: dict[str, Any] = json.loads(body[_PREFIX.size : _PREFIX.size + length])
    found = KernelSpec(**header["spec"])
    if spec is not None and found.text != spec.text:
        raise Damaged(f"of {found.text}, not of {spec.text}")
    start = _PREFIX.size + length
    end = start + header["ptx_bytes"]
    return Binary(
        spec=spec or found,
        entry=header["entry"],
        threads=header["threads"],
        shared_bytes=header["shared_bytes"],
        params=tuple(Param(**param) for param in header["params"]),
        ptx=zlib.decompress(body[start:end]).decode(),
        cubin=body[end : end + header["cubin_bytes"]],
        cluster=tuple(header["cluster"]),
        extra=header["extra"],
    )


def _write_whole(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("xb") as file:
            file.write(data)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@lru_cache
def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
