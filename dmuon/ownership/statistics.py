"""What ownership moves and waits for: counters, and ranges for ``torch.profiler``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch.profiler import record_function


@dataclass
class Tally:
    """How often something happened, and how much of it: bytes or seconds."""

    count: int = 0
    amount: float = 0.0

    def add(self, amount: float) -> None:
        self.count += 1
        self.amount += amount


class Statistics:
    """Counters since construction or :meth:`reset`, of this rank.

    Attributes:
        timing_device: also time on the CUDA device. The host does not wait there: it asks the current stream to,
            and how long this stood still is known from events alone. Off until you set it.
    """

    def __init__(self) -> None:
        self.timing_device = False
        self._lock = Lock()  # exchanges of two levels are counted from threads of their own
        self.reset()

    def reset(self) -> None:
        """Forget everything so far."""
        with self._lock:
            self._exchanges: dict[tuple[str, str, str], Tally] = {}
            self._waits: dict[tuple[str, str], Tally] = {}
            self._phases: dict[str, Tally] = {}
            self._events: list[tuple[tuple[str, str], torch.cuda.Event, torch.cuda.Event]] = []

    def exchanged(self, kind: str, way: str, level: str, nbytes: int) -> None:
        """Count an exchange that brings this rank ``nbytes`` of others' (publish) or takes them away (reduce)."""
        with self._lock:
            self._exchanges.setdefault((kind, way, level), Tally()).add(nbytes)

    @contextmanager
    def waiting(self, kind: str, bucket: str) -> Iterator[None]:
        """Time what is done inside as a wait for ``bucket``'s transfer."""
        before = self._event()
        start = time.perf_counter()
        with record_function(f"dmuon::{kind}.wait"):
            yield
        elapsed = time.perf_counter() - start
        after = self._event()
        with self._lock:
            self._waits.setdefault((kind, bucket), Tally()).add(elapsed)
            if before is not None and after is not None:
                self._events.append(((kind, bucket), before, after))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done inside on the host, as a phase of the step."""
        start = time.perf_counter()
        with record_function(f"dmuon::{name}"):
            yield
        with self._lock:
            self._phases.setdefault(name, Tally()).add(time.perf_counter() - start)

    def as_dict(self) -> dict[str, Any]:
        """Everything so far, of numbers, strings, lists and dicts.

        ``exchanges``: kind (publish, reduce), way, level (flat, or intra and inter), calls, bytes: those that a
        publication brings to this rank and those that a reduction takes from it. ``waits``: kind, bucket (empty
        for the model's own), count, seconds of the host; also ``device_seconds`` where these were timed, for which
        this waits for the device. ``phases``: of the step, with count and seconds of the host.
        """
        with self._lock:
            device: dict[tuple[str, str], float] = {}
            for key, before, after in self._events:
                after.synchronize()
                device[key] = device.get(key, 0.0) + before.elapsed_time(after) / 1e3
            return {
                "exchanges": [
                    {
                        "kind": kind,
                        "way": way,
                        "level": level,
                        "calls": tally.count,
                        "bytes": int(tally.amount),
                    }
                    for (kind, way, level), tally in sorted(self._exchanges.items())
                ],
                "waits": [
                    {"kind": kind, "bucket": bucket, "count": tally.count, "seconds": tally.amount}
                    | ({"device_seconds": device[kind, bucket]} if (kind, bucket) in device else {})
                    for (kind, bucket), tally in sorted(self._waits.items())
                ],
                "phases": {
                    name: {"count": tally.count, "seconds": tally.amount}
                    for name, tally in self._phases.items()
                },
            }

    def _event(self) -> torch.cuda.Event | None:
        if not (self.timing_device and torch.cuda.is_available()):
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
