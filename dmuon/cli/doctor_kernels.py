"""``dmuon-tune doctor --arch``: what each compiled kernel takes of a multiprocessor, and what it could reach."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from dmuon.cli.ahead import compiling_backends, kernel_name, specs_ahead
from dmuon.cli.compile_output import Watcher, options_text
from dmuon.cli.errors import BadInput, bad_input
from dmuon.kernels.gpu.binary import KernelSpec, Unsupported
from dmuon.kernels.gpu.load import Outcome, compile_all
from dmuon.kernels.gpu.resources import Resources, resources_of
from dmuon.kernels.gpu.roofline import DEVICES, Estimate, best_splits, device_of, symmetric_estimate
from dmuon.kernels.gpu.toolchain import tool

if TYPE_CHECKING:
    from rich.table import Table

    from dmuon.kernels.gpu.arch import Arch

_SHORT = {
    "HGMMA": "wgmma",
    "HMMA": "mma",
    "UTCHMMA": "tcgen05",
    "UTMALDG": "TMA load",
    "UTMASTG": "TMA store",
}
_SHORT |= {"LDGSTS": "cp.async", "LDL": "spill load", "STL": "spill store", "LDG": "load", "STG": "store"}


@dataclass(frozen=True)
class KernelReport:
    """One kernel in one configuration. ``problem`` says why it could not be compiled or examined; ``estimates``
    has the least milliseconds of one product by device, none for kernels of whole iterations; ``splits`` is what a
    kernel that divides the tiles of its last wave is given for that, and 1 for any other."""

    backend: str
    spec: KernelSpec
    resources: Resources | None
    problem: str | None
    splits: int
    estimates: Mapping[str, Estimate]


def examine_kernels(
    arch: Arch, shape: tuple[int, int], precision: str, backends: Sequence[str], as_json: bool
) -> bool:
    """Compile, where need be, and describe every kernel that tuning matrices of ``shape`` could time.

    Returns:
        whether all were compiled, and none of them spills.
    """
    with bad_input():
        chosen = compiling_backends(backends)
    try:
        for name in ("cuobjdump", "nvdisasm"):
            tool(name)
    except Unsupported as error:
        raise BadInput(str(error)) from error
    specs = specs_ahead(chosen, [shape], arch, [precision], "polar_express")
    with Watcher(len(specs)) as watcher:
        outcomes = compile_all(specs, progress=watcher)
    reports = [_report(specs[outcome.spec], outcome, arch, shape) for outcome in outcomes]
    if as_json:
        click.echo(json.dumps(_document(arch, shape, precision, reports), indent=2))
    else:
        _print(arch, shape, precision, reports)
    return all(each.resources is not None and not each.resources.local_bytes for each in reports)


def _report(backend: str, outcome: Outcome, arch: Arch, shape: tuple[int, int]) -> KernelReport:
    resources, problem = None, outcome.reason
    if outcome.binary is not None:
        try:
            resources = resources_of(outcome.binary)
        except RuntimeError as error:
            problem = str(error)
    tile = outcome.spec.options.get("tile", outcome.spec.options.get("block"))
    devices = [device for device in DEVICES if device.arch == arch.name] if tile else []
    usual = device_of(arch.name) if outcome.spec.options.get("split") else None
    splits = best_splits(usual, *shape, tile) if usual else 1
    estimates = {
        device.name: symmetric_estimate(device, *shape, tile=tile, splits=splits) for device in devices
    }
    return KernelReport(backend, outcome.spec, resources, problem, splits, estimates)


def _document(
    arch: Arch, shape: tuple[int, int], precision: str, reports: Iterable[KernelReport]
) -> dict[str, Any]:
    kernels = [
        {
            "backend": each.backend,
            "kernel": kernel_name(each.spec),
            "options": dict(each.spec.options),
            "problem": each.problem,
            "splits": each.splits,
            "resources": None if each.resources is None else asdict(each.resources),
            "estimates": {name: asdict(estimate) for name, estimate in each.estimates.items()},
        }
        for each in reports
    ]
    return {"arch": asdict(arch), "m": shape[0], "n": shape[1], "precision": precision, "kernels": kernels}


def _print(arch: Arch, shape: tuple[int, int], precision: str, reports: Sequence[KernelReport]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    groups: dict[tuple[str, str], list[KernelReport]] = {}
    for each in reports:
        groups.setdefault((each.backend, kernel_name(each.spec)), []).append(each)
    if not groups:
        console.print(f"No backend that is installed has kernels for this shape on {arch.name}.")
        return
    for (backend, kernel), members in groups.items():
        same = _common(members)
        console.print(f"[bold]{backend} {kernel}[/] [dim]{escape(options_text(same))}[/]")
        console.print(_table(members, same), "")
    size, devices = f"{shape[0]}×{shape[1]}", ", ".join(reports[0].estimates)
    console.print(
        f"[dim]{arch.name}, {precision}. regs: registers of a thread. local: its bytes outside registers, "
        "spills included. shared: KiB of a block. blocks: on a multiprocessor, and the share of its threads. "
        + (
            f"least: µs of the Gram product of {size} at the peak of {devices}: reckoned, not measured.[/]"
            if devices
            else "[/]"
        )
    )


def _common(reports: Sequence[KernelReport]) -> dict[str, Any]:
    """The options that all have alike."""
    first, *others = (each.spec.options for each in reports)
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}


def _table(reports: Sequence[KernelReport], same: Mapping[str, Any]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("options", overflow="fold")
    for name in ("regs", "local", "shared", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("instructions", overflow="fold")
    if any(each.estimates for each in reports):
        table.add_column("least", justify="right")
    for each in reports:
        own = {name: value for name, value in each.spec.options.items() if name not in same}
        found = each.resources
        if found is None:
            table.add_row(escape(options_text(own)), "", "", "", "", f"[red]{escape(_line(each.problem))}[/]")
            continue
        shared = found.static_shared_bytes + found.dynamic_shared_bytes
        local = f"[red]{found.local_bytes}[/]" if found.local_bytes else "0"
        cells = (str(found.registers), local, f"{shared / 1024:.0f}")
        blocks = f"{found.blocks_per_sm}, {found.occupancy:.0%}"
        least = ", ".join(f"{estimate.ms * 1e3:.3g}" for estimate in each.estimates.values())
        least += f" ({each.splits} splits)" if each.splits > 1 else ""
        row = (escape(options_text(own)), *cells, blocks, _instructions_text(found.instructions))
        table.add_row(*row, *([least] if each.estimates else []))
    return table


def _instructions_text(instructions: Mapping[str, int]) -> str:
    """Those that multiply, those of global memory, and spills; shared memory's are in the JSON document."""
    words = []
    for name, count in instructions.items():
        kind, _, detail = name.partition(".")
        if kind in _SHORT or "MMA" in kind:
            words.append(f"{_SHORT.get(kind, kind)} {detail}".strip() + f" ×{count}")
    return ", ".join(words)


def _line(problem: str | None) -> str:
    return " ".join((problem or "").split())[:200]
