"""Charts as inline SVG, drawn by hand: no library, no script, no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 920
_LEFT, _RIGHT = 150, 30
_PLOT = WIDTH - _LEFT - _RIGHT


@dataclass(frozen=True)
class Box:
    """A part of a lane from ``start`` to ``end``; ``kind`` decides on its colour, ``title`` shows on hovering."""

    lane: str
    kind: str
    title: str
    start: float
    end: float


def bars(values: Sequence[float], label: str, text: Callable[[float], str], line: float | None = None) -> str:
    """A column for each value or, of many, for the largest of as many neighbours as it takes; ``line`` is marked."""
    together = -(-len(values) // 256)
    columns = [max(values[k : k + together]) for k in range(0, len(values), together)]
    top, height = max([*columns, line or 0.0]) or 1.0, 180.0
    step = _PLOT / len(columns)
    parts = _axis(top, height, text)
    for k, value in enumerate(columns):
        first, last = k * together, min((k + 1) * together, len(values)) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first}–{last}"
        tall = height * value / top
        parts.append(
            f'<rect class="bar" x="{_LEFT + k * step:.2f}" y="{20 + height - tall:.2f}" '
            f'width="{max(step - (1 if step > 3 else 0), 0.5):.2f}" height="{tall:.2f}">'
            f"<title>{ranks}: {text(value)}</title></rect>"
        )
    if line is not None:
        y = 20 + height - height * line / top
        parts.append(f'<line class="mark" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>')
    parts.append(f'<text class="axis" x="{_LEFT}" y="{height + 40:.0f}">rank 0</text>')
    parts.append(
        f'<text class="axis end" x="{WIDTH - _RIGHT}" y="{height + 40:.0f}">rank {len(values) - 1}</text>'
    )
    return _svg(parts, height + 50, label)


def stacked(rows: Mapping[str, Mapping[str, float]], label: str, text: Callable[[float], str]) -> str:
    """A bar for each row, of the row's parts by kind, with their sum beside it."""
    most = max(sum(parts.values()) for parts in rows.values()) or 1.0
    scale = (_PLOT - 80) / most
    drawn = []
    for k, (name, parts) in enumerate(rows.items()):
        y, x = 10 + 30 * k, float(_LEFT)
        drawn.append(f'<text class="name end" x="{_LEFT - 8}" y="{y + 15}">{escape(name)}</text>')
        for kind, value in parts.items():
            wide = max(value, 0.0) * scale
            drawn.append(
                f'<rect class="{class_of(kind)}" x="{x:.2f}" y="{y}" width="{wide:.2f}" height="20">'
                f"<title>{escape(name)}, {escape(kind)}: {text(value)}</title></rect>"
            )
            x += wide
        drawn.append(f'<text class="axis" x="{x + 6:.2f}" y="{y + 15}">{text(sum(parts.values()))}</text>')
    return _svg(drawn, 20 + 30 * len(rows), label)


def timeline(boxes: Sequence[Box], lanes: Sequence[str], label: str, text: Callable[[float], str]) -> str:
    """A row for each lane, with what kept it busy when."""
    end = max(box.end for box in boxes)
    scale = _PLOT / end
    parts = []
    for k, lane in enumerate(lanes):
        y = 10 + 34 * k
        parts.append(f'<text class="name end" x="{_LEFT - 8}" y="{y + 18}">{escape(lane)}</text>')
        parts.append(f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_PLOT}" height="26"/>')
        for box in boxes:
            if box.lane == lane and box.end > box.start:
                parts.append(
                    f'<rect class="{class_of(box.kind)}" x="{_LEFT + box.start * scale:.2f}" y="{y}" '
                    f'width="{max((box.end - box.start) * scale - 0.3, 0.2):.2f}" height="26">'
                    f"<title>{escape(box.title)}: {text(box.end - box.start)} at {text(box.start)}</title></rect>"
                )
    bottom = 10 + 34 * len(lanes)
    parts.append(f'<text class="axis" x="{_LEFT}" y="{bottom + 12}">0</text>')
    parts.append(f'<text class="axis end" x="{WIDTH - _RIGHT}" y="{bottom + 12}">{text(end)}</text>')
    return _svg(parts, bottom + 20, label)


def curves(
    series: Mapping[str, Sequence[tuple[int, float]]], label: str, text: Callable[[float], str]
) -> str:
    """A line for each series of (ranks, value > 0), on logarithmic axes; the legend is the caller's."""
    points = [point for line in series.values() for point in line]
    ranks, height = sorted({x for x, _ in points}), 260.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    spread = math.log(high / low) or 1.0

    def place(x: int, y: float) -> tuple[float, float]:
        across = math.log(x / ranks[0]) / (math.log(ranks[-1] / ranks[0]) or 1.0)
        return _LEFT + _PLOT * across, 20 + height * (1 - math.log(y / low) / spread)

    parts = []
    for value in _between(low, high):
        y = place(ranks[0], value)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>')
        parts.append(f'<text class="axis end" x="{_LEFT - 8}" y="{y + 4:.2f}">{text(value)}</text>')
    for x in ranks:
        parts.append(
            f'<text class="axis middle" x="{place(x, low)[0]:.2f}" y="{height + 40:.0f}">{x:,}</text>'
        )
    for k, (name, line) in enumerate(series.items()):
        places = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
        parts.append(f'<polyline class="line s{k}" points="{path}"/>')
        for (right, down), (rank, value) in zip(places, line, strict=True):
            parts.append(
                f'<circle class="dot s{k}" cx="{right:.2f}" cy="{down:.2f}" r="3.5">'
                f"<title>{escape(name)}, {rank:,} ranks: {text(value)}</title></circle>"
            )
    return _svg(parts, height + 50, label)


def legend(names: Sequence[str], classes: Sequence[str] | None = None) -> str:
    """Names with their colours; ``classes`` for those of :func:`curves`."""
    keys = classes or [class_of(name) for name in names]
    return (
        '<p class="legend">'
        + " ".join(
            f'<span><svg width="12" height="12" aria-hidden="true"><rect class="{key}" width="12" height="12"/></svg> '
            f"{escape(name)}</span>"
            for name, key in zip(names, keys, strict=True)
        )
        + "</p>"
    )


def _axis(top: float, height: float, text: Callable[[float], str]) -> list[str]:
    parts = []
    for part in (0.0, 0.5, 1.0):
        y = 20 + height * (1 - part)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>')
        parts.append(f'<text class="axis end" x="{_LEFT - 8}" y="{y + 4:.2f}">{text(top * part)}</text>')
    return parts


def _between(low: float, high: float) -> list[float]:
    """Round values from ``low`` to ``high``, at most eight."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,)):
        found = [d * 10.0**e for e in exponents for d in digits if low <= d * 10.0**e <= high]
        if len(found) <= 8:
            return found or [low]
    return found


def class_of(kind: str) -> str:
    """The CSS class of a kind of work."""
    return "k-" + "".join(c if c.isalnum() else "-" for c in kind)


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}">\n'
        f"{body}\n</svg>"
    )
