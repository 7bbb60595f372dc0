"""``dmuon-tune doctor``: what can run on this machine, and what cannot and why."""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dmuon.cli.errors import BadInput
from dmuon.cli.options import json_option, open_store, parse_shape, store_option
from dmuon.names import plural

if TYPE_CHECKING:
    from dmuon.kernels.gpu.cache import CacheHealth
    from dmuon.tuning_cache import Health

# Distribution → the module to import. Each is a compiler of kernels, and none is needed for the torch path.
_COMPILERS = {
    "triton": "triton",
    "tilelang": "tilelang",
    "nvidia-cutlass-dsl": "cutlass",
    "quack-kernels": "quack",
}
_NOT_INSTALLED = "not installed"
_SETTINGS = ("DMUON_AUTOTUNE", "DMUON_CACHE", "DMUON_COMPILE", "DMUON_DEBUG", "DMUON_GRAPHS")
"""Variables of the environment that change what runs."""

_SHAPE = (2048, 8192)
"""What ``--arch`` examines if not told: large enough for every kind of tile."""


@dataclass(frozen=True)
class Device:
    """A device that kernels could run on. ``key`` is the one that trials carry."""

    name: str
    key: str
    details: str


@dataclass(frozen=True)
class Software:
    """A library that timings depend on; ``problem`` says why it cannot be used."""

    name: str
    version: str | None
    problem: str | None


@dataclass(frozen=True)
class BackendReport:
    """Whether a backend can run on a device; ``problem`` says why not."""

    backend: str
    device: str
    problem: str | None


@click.command()
@click.option("--timeout", default=60.0, metavar="SECONDS", help="For one kernel compiler's import.  [60]")
@click.option("--arch", "arch_name", metavar="NAME", help="Examine the GPU kernels for this architecture.")
@click.option(
    "--shape",
    callback=parse_shape,
    metavar="MxN",
    help=f"With --arch: for matrices of this shape.  [default: {_SHAPE[0]}x{_SHAPE[1]}]",
)
@click.option("--precision", type=click.Choice(["fp16", "bf16"]), help="With --arch.  [default: fp16]")
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="With --arch: this one alone.")
@json_option
@store_option
def doctor(
    timeout: float,
    arch_name: str | None,
    shape: tuple[int, int] | None,
    precision: str | None,
    backends: tuple[str, ...],
    as_json: bool,
    store_path: Path | None,
) -> None:
    """Examine this machine: devices, kernel compilers, backends, the store and compiled kernels.

    Each compiler is imported in a process of its own, so that one that hangs or crashes is reported. A
    compiler that is missing is no fault: DMuon goes without. The exit code is 1 if the store cannot be used.

    With --arch, examine instead every GPU kernel that tuning a shape could time: registers, spills, shared
    memory, occupancy, the instructions that multiply and move tiles, and the least time by a roofline. What is
    not compiled yet is compiled first; no GPU is needed. The exit code is 1 if a kernel spills or fails.

    \b
      dmuon-tune doctor
      dmuon-tune doctor --json
      dmuon-tune doctor --arch sm_90a --shape 2048x8192 --backend cute
    """
    if arch_name is not None:
        from dmuon.cli.compile import find_arch
        from dmuon.cli.doctor_kernels import examine_kernels

        found = find_arch(arch_name)
        if not examine_kernels(found, shape or _SHAPE, precision or "fp16", backends, as_json):
            raise click.exceptions.Exit(1)
        return
    if shape or precision or backends:
        raise BadInput("--shape, --precision and --backend go with --arch")
    store = open_store(store_path)
    software = [Software("torch", _version("torch"), None), *probe_compilers(timeout)]
    devices = find_devices()
    available = judge_backends(devices, software)
    health, binaries = store.health(), examine_binaries()
    if as_json:
        click.echo(json.dumps(_report(devices, software, available, health, binaries), indent=2))
    else:
        _print(devices, software, available, health, binaries)
    if health.problem is not None:
        raise click.exceptions.Exit(1)


def probe_compilers(timeout_s: float) -> list[Software]:
    """Import every installed compiler, side by side, each in its own process."""
    from dmuon.cli.probe import probe_import

    def examine(distribution: str) -> Software:
        found = _version(distribution)
        if found is None:
            return Software(distribution, None, _NOT_INSTALLED)
        return Software(distribution, found, probe_import(_COMPILERS[distribution], timeout_s).problem)

    with ThreadPoolExecutor(len(_COMPILERS)) as pool:
        return list(pool.map(examine, _COMPILERS))


def find_devices() -> list[Device]:
    """The processor, then every GPU that torch sees."""
    import torch

    from dmuon.kernels.choose import device_key

    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    devices = [Device("cpu", device_key("cpu"), f"{threads} threads, {capability}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        details = (
            f"sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
        )
        devices.append(Device(f"cuda:{index}", device_key(f"cuda:{index}"), details))
    return devices


def judge_backends(devices: Iterable[Device], software: Iterable[Software]) -> list[BackendReport]:
    """Ask each backend about each device, unless a library that it needs is known to be unusable."""
    import torch

    from dmuon.kernels.backends import BACKENDS

    problems = {each.name: f"{each.name}: {each.problem}" for each in software if each.problem}
    reports = []
    for name, backend in BACKENDS.items():
        broken = next((problems[library] for library in backend.requires if library in problems), None)
        for device in devices:
            problem = broken or backend.unavailable(torch.device(device.name))
            reports.append(BackendReport(name, device.name, problem))
    return reports


def find_settings() -> dict[str, str]:
    """The variables of the environment that are set and that DMuon reads."""
    return {name: os.environ[name] for name in _SETTINGS if name in os.environ}


def examine_binaries() -> CacheHealth:
    """Read all compiled kernels."""
    from dmuon.kernels.gpu.cache import BinaryCache

    return BinaryCache().health()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _report(
    devices: list[Device],
    software: list[Software],
    backends: list[BackendReport],
    health: Health,
    binaries: CacheHealth,
) -> dict[str, Any]:
    return {
        "settings": find_settings(),
        "devices": [asdict(device) for device in devices],
        "software": [asdict(each) for each in software],
        "backends": [asdict(each) for each in backends],
        "store": {**asdict(health), "path": str(health.path)},
        "compiled_kernels": {**asdict(binaries), "path": str(binaries.path)},
    }


def _print(
    devices: list[Device],
    software: list[Software],
    backends: list[BackendReport],
    health: Health,
    binaries: CacheHealth,
) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)

    def section(title: str, rows: Iterable[tuple[str, ...]]) -> None:
        console.print(f"[bold]{title}[/]")
        table = Table(box=box.SIMPLE, show_header=False, pad_edge=True, padding=(0, 1), show_edge=False)
        for row in rows:
            table.add_row(*row)
        console.print(table, "")

    settings = find_settings()
    if settings:
        section("Settings", ((name, escape(value)) for name, value in settings.items()))
    section("Devices", ((device.name, escape(f"{device.key}\n{device.details}")) for device in devices))
    section(
        "Libraries", ((escape(each.name), each.version or "–", _verdict(each.problem)) for each in software)
    )
    section("Backends", ((each.backend, each.device, _verdict(each.problem)) for each in backends))
    section("Store", ((name, escape(value)) for name, value in _store_rows(health)))
    section("Compiled kernels", ((name, escape(value)) for name, value in _binary_rows(binaries)))


def _verdict(problem: str | None) -> str:
    from rich.markup import escape

    if problem is None:
        return "[green]usable[/]"
    return f"[dim]{problem}[/]" if problem == _NOT_INSTALLED else f"[red]{escape(problem)}[/]"


def _store_rows(health: Health) -> Iterable[tuple[str, str]]:
    yield "path", str(health.path)
    if not health.exists:
        yield "state", "not there yet; the first trial creates it"
    elif health.problem is None:
        size = f"{health.size_bytes / 1e6:,.1f} MB, schema version {health.schema_version}"
        yield "holds", f"{health.rows:,} trials, {size}"
        yield "state", "sound"
    else:
        yield "problem", health.problem
    if not health.writable:
        yield "writable", "no: new trials would stay in memory"


def _binary_rows(binaries: CacheHealth) -> Iterable[tuple[str, str]]:
    yield "path", str(binaries.path)
    yield "holds", f"{binaries.binaries:,} kernels, {binaries.size_bytes / 1e6:,.1f} MB"
    for line in binaries.damaged:
        yield "damaged", f"{line}; it is compiled again when needed"
    for reason, count in Counter(line.partition(": ")[2] for line in binaries.failed).items():
        yield "failed", textwrap.shorten(f"{plural(count, 'kernel', 'kernels')}: {reason}", 200)
    if not binaries.writable:
        yield "writable", "no: every process would compile for itself"
