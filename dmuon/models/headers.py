"""Names and shapes from the headers of safetensors files; no weight is read.

A file begins with the header's length (8 bytes, little-endian), then the header: a JSON object from tensor
name to ``{"dtype", "shape", "data_offsets"}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmuon.slots import Slot, slots_of_named

INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # the format's own limit
_FLOATS = ("F", "BF")  # F64, F32, F16, BF16, F8_E4M3, …: the others are never trained


class Header:
    """One tensor of a header, with what routing by name asks of a tensor."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.requires_grad = dtype.startswith(_FLOATS)


def slots_of_file(path: Path) -> list[Slot]:
    """The tensors of a ``.safetensors`` file.

    Raises:
        ValueError: the file is not there, cut short or no safetensors file; the message names it and the
            fault.
    """
    return slots_of_named(_read_header(path).items())


def slots_of_index(path: Path) -> list[Slot]:
    """The tensors of all shards that an index lists; the shards lie beside it.

    Raises:
        ValueError: as :func:`slots_of_file`, for the index and for each shard, which may also be missing or
            lack a tensor that the index says it has.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{path}: no index of safetensors files: weight_map must map names to files")
    headers: dict[str, dict[str, Header]] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if Path(shard).name != shard:
            raise ValueError(f"{path}: a shard must be a file beside the index, got {shard!r}")
        if not (path.parent / shard).is_file():
            raise ValueError(f"{path}: the shard {shard} is missing beside it")
        headers[shard] = _read_header(path.parent / shard)
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ValueError(f"{path.parent / shard}: holds no {name!r}, which the index says it does")
    return slots_of_named((name, headers[shard][name]) for name, shard in weight_map.items())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ValueError: the file cannot be read, is no JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _read_header(path: Path) -> dict[str, Header]:
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= length <= _LONGEST_HEADER:
                raise ValueError(f"{path}: not a safetensors file: it begins with no plausible header length")
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) < length:
        raise ValueError(f"{path}: truncated: the header has {len(text)} of {length} bytes")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header must be a JSON object, got {type(header).__name__}")
    return {name: _tensor(path, name, entry) for name, entry in header.items() if name != "__metadata__"}


def _tensor(path: Path, name: str, entry: object) -> Header:
    dtype = entry.get("dtype") if isinstance(entry, Mapping) else None
    shape = entry.get("shape") if isinstance(entry, Mapping) else None
    if not isinstance(dtype, str):
        raise ValueError(f"{path}: the tensor {name!r} has no dtype")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{path}: the tensor {name!r} has a bad shape: {shape!r}")
    return Header(dtype, tuple(shape))
