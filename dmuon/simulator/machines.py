"""Devices and networks, as data files beside this module or of the user's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from dmuon.kernels.precision import PRECISIONS


@dataclass(frozen=True)
class Link:
    """What one rank sends and receives over, in bytes a second each way, and the seconds of one hop."""

    rate: float
    hop: float


@dataclass(frozen=True)
class Machine:
    """Equal nodes of equal devices, in SI units.

    Args:
        name: in words.
        device: the key under which a store keeps this device's trials.
        ranks_per_node: devices in a node.
        memory: bytes of a device.
        peak: operations a second by precision, dense.
        training: the fraction of the peak at which forwards and backwards run.
        products: the fraction of the peak at which Newton–Schulz's products run.
        memory_rate: bytes a second that elementwise work achieves.
        launch: seconds of a kernel launch.
        call: seconds of a collective beside its hops and bytes.
        inside: the links in a node.
        across: the links between nodes, one for each rank.
        overlaps: whether transfers run beside computation; on a CPU they take its cores.
        sources: what the figures rest on, by name.
    """

    name: str
    device: str
    ranks_per_node: int
    memory: float
    peak: Mapping[str, float]
    training: float
    products: float
    memory_rate: float
    launch: float
    call: float
    inside: Link
    across: Link
    overlaps: bool
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """``ranks`` devices of ``machine``, in full nodes, or in a part of one.

    Raises:
        ValueError: fewer than one rank, or a last node that is not full.
    """

    machine: Machine
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {self.ranks}")
        if self.nodes > 1 and self.ranks % self.machine.ranks_per_node:
            raise ValueError(
                f"{self.ranks} ranks do not fill nodes of {self.machine.ranks_per_node}: take a multiple, "
                "or another number of GPUs per node"
            )

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.machine.ranks_per_node)

    @property
    def node_ranks(self) -> int:
        """Ranks in a node."""
        return self.ranks // self.nodes


def machine_names() -> tuple[str, ...]:
    """The machines that are known by name, sorted."""
    folder = files(__package__) / "machines"
    return tuple(sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".json")))


def load_machine(spec: str, ranks_per_node: int | None = None) -> Machine:
    """The machine called ``spec``, or the one that the JSON file ``spec`` describes.

    A file of one's own has the fields of those beside this module; measured figures belong there.

    Raises:
        ValueError: no such machine or file, or a field that is missing, unknown or out of range.
    """
    if spec.lower() in machine_names():
        text = (files(__package__) / "machines" / f"{spec.lower()}.json").read_text(encoding="utf-8")
    elif spec.endswith(".json"):
        try:
            text = Path(spec).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{spec}: cannot be read: {error.strerror}") from error
    else:
        raise ValueError(f"no machine {spec!r}: take {', '.join(machine_names())} or a .json file")
    try:
        machine = machine_from_json(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{spec}: {error}") from error
    return machine if ranks_per_node is None else replace(machine, ranks_per_node=ranks_per_node)


def machine_from_json(data: Any) -> Machine:
    """A machine from a file's contents, whose units are in the fields' names.

    Raises:
        ValueError: a field is missing, unknown or out of range.
    """
    fields = (
        "name", "device", "ranks_per_node", "memory_gb", "peak_tflops", "memory_gb_per_s", "launch_us",
        "call_us", "achieved", "inside", "across", "overlaps", "sources",
    )  # fmt: skip
    _check_fields(data, fields, "a machine")
    _check_fields(data["achieved"], ("training", "products", "memory"), "achieved")
    achieved = {name: _number(data["achieved"], name, at_most=1.0) for name in data["achieved"]}
    _check_fields(data["peak_tflops"], tuple(PRECISIONS), "peak_tflops")
    if type(data["ranks_per_node"]) is not int or data["ranks_per_node"] < 1:
        raise ValueError(f"ranks_per_node must be a positive integer, got {data['ranks_per_node']!r}")
    if not isinstance(data["overlaps"], bool):
        raise ValueError(f"overlaps must be true or false, got {data['overlaps']!r}")
    if not isinstance(data["sources"], dict):
        raise ValueError(f"sources must be an object, got {data['sources']!r}")
    return Machine(
        name=str(data["name"]),
        device=str(data["device"]),
        ranks_per_node=data["ranks_per_node"],
        memory=_number(data, "memory_gb") * 1e9,
        peak={name: _number(data["peak_tflops"], name) * 1e12 for name in PRECISIONS},
        training=achieved["training"],
        products=achieved["products"],
        memory_rate=_number(data, "memory_gb_per_s") * 1e9 * achieved["memory"],
        launch=_number(data, "launch_us") * 1e-6,
        call=_number(data, "call_us") * 1e-6,
        inside=_link(data, "inside"),
        across=_link(data, "across"),
        overlaps=data["overlaps"],
        sources={str(name): str(source) for name, source in data["sources"].items()},
    )


def _link(data: Mapping[str, Any], name: str) -> Link:
    _check_fields(data[name], ("gb_per_s", "hop_us"), name)
    return Link(_number(data[name], "gb_per_s") * 1e9, _number(data[name], "hop_us") * 1e-6)


def _check_fields(data: Any, expected: tuple[str, ...], what: str) -> None:
    if not isinstance(data, dict) or data.keys() != set(expected):
        found = ", ".join(data) if isinstance(data, dict) else repr(data)
        raise ValueError(f"{what} has the fields {', '.join(expected)}, got {found}")


def _number(data: Mapping[str, Any], name: str, at_most: float = float("inf")) -> float:
    value = data[name]
    if type(value) not in (int, float) or not 0 < value <= at_most:
        limit = "" if at_most == float("inf") else f" of at most {at_most:g}"
        raise ValueError(f"{name} must be a positive number{limit}, got {value!r}")
    return float(value)
