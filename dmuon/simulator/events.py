"""Discrete events: tasks that follow each other and share lanes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A task as it ran, in seconds since the start. ``kind`` says what work it is, ``lanes`` what it kept busy."""

    name: str
    kind: str
    lanes: tuple[str, ...]
    start: float
    end: float


class Schedule:
    """Tasks to run. A lane, such as a compute stream or a link, runs one task at a time, first come first served."""

    def __init__(self) -> None:
        self._tasks: list[tuple[str, str, tuple[str, ...], float]] = []
        self._followers: list[list[int]] = []
        self._waits_for: list[int] = []

    def add(
        self, name: str, kind: str, seconds: float, lanes: tuple[str, ...] = (), after: Iterable[int] = ()
    ) -> int:
        """Add a task that can start once those of ``after`` have ended; returns its number.

        Without lanes it is a delay that keeps nothing busy.
        """
        number, before = len(self._tasks), set(after)
        self._tasks.append((name, kind, lanes, seconds))
        self._followers.append([])
        self._waits_for.append(len(before))
        for each in before:
            self._followers[each].append(number)
        return number

    def run(self) -> list[Span]:
        """When each task runs, by its number.

        Tasks are taken in the order in which they become ready, ties in the order of their numbers. That is
        exact: what becomes ready later cannot have been waiting for a lane.
        """
        waits_for = list(self._waits_for)
        ready_at = [0.0] * len(self._tasks)
        ready = [(0.0, number) for number, count in enumerate(waits_for) if not count]
        heapq.heapify(ready)
        free: dict[str, float] = {}
        spans: list[Span | None] = [None] * len(self._tasks)
        while ready:
            time, number = heapq.heappop(ready)
            name, kind, lanes, seconds = self._tasks[number]
            start = max([time, *(free.get(lane, 0.0) for lane in lanes)])
            end = start + seconds
            free.update(dict.fromkeys(lanes, end))
            spans[number] = Span(name, kind, lanes, start, end)
            for follower in self._followers[number]:
                ready_at[follower] = max(ready_at[follower], end)
                waits_for[follower] -= 1
                if not waits_for[follower]:
                    heapq.heappush(ready, (ready_at[follower], follower))
        return [span for span in spans if span is not None]
