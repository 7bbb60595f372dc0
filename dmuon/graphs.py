"""Work on batches, replayed from CUDA graphs: one launch on the host instead of dozens.

A graph holds addresses, so every batch — its matrices, or a table that says where they are — is put in one buffer that
all graphs of a device share: they run one after the other. What changes from step to step is in the buffer, or stays
outside of the graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_GRAPHS = 128
"""Kinds of batches that are recorded on one device; further ones run without a graph."""


def replayable(device: torch.device) -> bool:
    """Whether work on ``device`` is worth recording and can be now.

    Raises:
        ValueError: ``DMUON_GRAPHS`` is neither ``on`` nor ``off``.
    """
    setting = os.environ.get("DMUON_GRAPHS", "on")
    if setting not in ("on", "off"):
        raise ValueError(f"DMUON_GRAPHS must be on or off, got {setting!r}")
    on = setting == "on" and device.type == "cuda"
    return on and not torch.cuda.is_current_stream_capturing()


@dataclass
class _Device:
    """A device's buffer, the kinds of batches seen, and the graphs of those seen again."""

    buffer: Tensor
    seen: set[Hashable]
    graphs: dict[Hashable, Callable[[], object]]


class Replays:
    """Runs a function on batches in a shared buffer; records it at the second batch of a kind, then replays it.

    Args:
        record: makes a replay of a function that takes no arguments; a CUDA graph of it by default.
    """

    def __init__(self, record: Callable[[Callable[[], object]], Callable[[], object]] | None = None) -> None:
        self._record = record or _Recorder()
        self._devices: dict[torch.device, _Device] = {}

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor to assemble a batch in. It is valid until the next call."""
        size = torch.Size(shape).numel() * dtype.itemsize
        known = self._devices.get(device)
        if known is None or known.buffer.numel() < size:
            # The graphs are bound to the smaller buffer. What was seen is recorded anew when it comes again.
            seen = known.seen if known else set()
            self._devices.pop(device, None)
            empty = torch.empty(size, dtype=torch.uint8, device=device)
            known = self._devices[device] = _Device(empty, seen, {})
        return known.buffer[:size].view(dtype).view(shape)

    def run(self, kind: Hashable, batch: Tensor, work: Callable[[Tensor], object]) -> None:
        """``work(batch)``, for a ``batch`` from :meth:`buffer`; ``kind`` says all that its effect depends on.

        ``work`` must not wait for the device, and has to write its result into ``batch``.
        """
        known = self._devices[batch.device]
        key = (kind, batch.shape, batch.dtype)
        if key in known.graphs:
            known.graphs[key]()
            return
        # The first run may tune, compile and allocate, which a recording cannot.
        work(batch)
        if key in known.seen and len(known.graphs) < MAX_GRAPHS:
            with torch.cuda.device_of(batch):  # type: ignore[no-untyped-call]
                known.graphs[key] = self._record(lambda: work(batch))
        known.seen.add(key)


class _Recorder:
    """Records CUDA graphs without running them.

    Their working memory comes from one pool: no graph leaves anything there that another could overwrite.
    """

    def __init__(self) -> None:
        self._pools: dict[int, Any] = {}

    def __call__(self, work: Callable[[], object]) -> Callable[[], object]:
        device = torch.cuda.current_device()
        pool = self._pools.setdefault(device, torch.cuda.graph_pool_handle())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            work()
        return graph.replay
