"""Two-level routes against flat ones, between nodes that are joined by a slow link.

    sudo python bench/network.py
    sudo python bench/network.py --ranks-per-node 4 --link 100

Nodes are network namespaces, the link is a veth pair held to a rate by tc. That needs root on Linux; elsewhere the
bench says what is missing and ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

NODES, KINDS = 2, ("publish", "reduce")

TARGET = 1.5
"""How many times quicker the two levels must be."""


class NotPossible(Exception):
    """There are no namespaces or links to be had here; the text says why."""


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NotPossible(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


@contextmanager
def nodes(link_mbit: float) -> Iterator[list[str]]:
    """Two network namespaces, joined by a link that carries ``link_mbit`` each way.

    Raises:
        NotPossible: this machine or user cannot make them.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NotPossible(f"there is no {tool!r} (Debian: iproute2)")
    if os.geteuid() != 0:
        raise NotPossible("network namespaces need root")
    names = [f"dmuon-{os.getpid()}-{node}" for node in range(NODES)]
    # Small bursts, and a queue that no window of TCP overflows.
    held = ["rate", f"{link_mbit}mbit", "burst", "256kb", "limit", "16mb"]
    try:
        for name in names:
            command("ip", "netns", "add", name)
        first, second = names
        command(
            "ip", "link", "add", "link0", "netns", first, "type", "veth", "peer", "link0", "netns", second
        )
        for node, name in enumerate(names):
            for words in (
                ["ip", "address", "add", f"10.77.0.{node + 1}/24", "dev", "link0"],
                ["ip", "link", "set", "link0", "up"],
                ["ip", "link", "set", "lo", "up"],
                ["tc", "qdisc", "add", "dev", "link0", "root", "tbf", *held],
            ):
                command("ip", "netns", "exec", name, *words)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def measure(names: Sequence[str], ranks_per_node: int, elements: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each exchange and bytes that cross the link, by its name in bench/network_rank.py.

    Raises:
        RuntimeError: a rank failed.
    """
    script = Path(__file__).with_name("network_rank.py")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "link0"}
    with tempfile.TemporaryDirectory() as folder:
        numbers = (NODES, ranks_per_node, elements, rounds)
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, script, *map(str, (rank, *numbers, folder))],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(name for name in names for _ in range(ranks_per_node))
        ]
        try:
            errors = [process.communicate(timeout=600)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise RuntimeError("\n".join(errors))
        found: dict[str, list[float]] = json.loads((Path(folder) / "result.json").read_text())
    return found


@click.command()
@click.option("--ranks-per-node", type=click.IntRange(min=2), default=2, show_default=True)
@click.option(
    "--link", "link_mbit", default=200.0, show_default=True, help="Mbit/s between the nodes, each way."
)
@click.option("--bucket", "bucket_mb", default=8.0, show_default=True, help="MB of weights in a bucket.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
def main(ranks_per_node: int, link_mbit: float, bucket_mb: float, rounds: int) -> None:
    """Two-level routes against flat ones, between two nodes that are joined by a slow link."""
    console = Console(highlight=False)
    elements = int(bucket_mb * 1e6) // 4 // (NODES * ranks_per_node) * NODES * ranks_per_node
    try:
        with nodes(link_mbit) as names:
            found = measure(names, ranks_per_node, elements, rounds)
    except NotPossible as reason:
        console.print(f"skipped: {reason}")
        return
    rates = {name: elements * 32 / 1e9 / found[name][0] for name in ("local", "link")}
    console.print(
        f"{NODES} nodes of {ranks_per_node} ranks; a broadcast in a node carries {rates['local']:.2f} Gbit/s, "
        f"the link {rates['link']:.2f}"
    )
    rows = {routes: [found[f"{kind}, {routes}"] for kind in KINDS] for routes in ("two levels", "flat")}
    ways = {kind: _quickest(found, f"{kind}, flat by ") for kind in KINDS}
    rows["flat, quickest"] = [found[f"{kind}, flat by {way}"] for kind, way in ways.items()]
    table = Table(title=f"a bucket of {bucket_mb:g} MB, ms")
    for heading in ("", *KINDS, "both", "over two levels", "MB crossed"):
        table.add_column(heading, justify="right" if heading else "left")
    both = {name: [sum(each) for each in zip(*row, strict=True)] for name, row in rows.items()}
    for name, row in rows.items():
        seconds, nbytes = both[name]
        times = (f"{each * 1e3:.0f}" for each in (*(seconds for seconds, _ in row), seconds))
        table.add_row(name, *times, f"{seconds / both['two levels'][0]:.2f}", f"{nbytes / 1e6:.1f}")
    console.print(table)
    console.print(f"quickest of flat: {' and '.join(ways.values())}")
    console.print(f"the least that can cross: {2 * (NODES - 1) * elements * 4 / 1e6:.1f} MB")
    ratio = both["flat"][0] / both["two levels"][0]
    verdict = "pass" if ratio >= TARGET else "MISS"
    console.print(f"flat / two levels = {ratio:.2f}, target {TARGET}: {verdict}")


def _quickest(found: Mapping[str, Sequence[float]], start: str) -> str:
    """The rest of the name of the quickest of what is called ``start``…"""
    return min((name for name in found if name.startswith(start)), key=lambda n: found[n][0])[len(start) :]


if __name__ == "__main__":
    main()
