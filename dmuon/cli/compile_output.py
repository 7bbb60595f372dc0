"""What ``dmuon-tune compile`` shows: a progress bar while it works, and a closing table or a JSON document."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from dmuon.autotune.tuner import seconds_text
from dmuon.cli.ahead import kernel_name

if TYPE_CHECKING:
    from dmuon.kernels.gpu.binary import KernelSpec
    from dmuon.kernels.gpu.load import Outcome

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_REASON_WIDTH = 400
_SHOWN = 8
"""Of the kernels that compile."""

_STATUSES = ("compiled", "cached", "failed", "not reached")


class Watcher:
    """Progress on stderr: on a terminal a bar with what compiles, elsewhere a line for each tenth of the kernels; and
    a line for each failure."""

    def __init__(self, total: int) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
        from rich.text import Text

        self.finished: list[Outcome] = []
        self._total = total
        self._running: dict[KernelSpec, None] = {}
        self._console = Console(stderr=True)
        self._bar = Progress(BarColumn(bar_width=40), MofNCompleteColumn(), TimeElapsedColumn())
        self._task = self._bar.add_task("", total=total)
        self._text = Text(style="dim", no_wrap=True, overflow="ellipsis")
        live = Live(Group(self._bar, self._text), console=self._console, transient=True)
        self._live = live if self._console.is_terminal else None

    def __enter__(self) -> Watcher:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, spec: KernelSpec, outcome: Outcome | None) -> None:
        if outcome is None:
            self._running[spec] = None
        else:
            self._running.pop(spec, None)
            self.finished.append(outcome)
            if outcome.status == "failed":
                reason = (outcome.reason or "").strip().partition("\n")[0][:_REASON_WIDTH]
                line = f"failed: {title(spec)}: {reason}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            done, total = len(self.finished), self._total
            if self._live is None and done * 10 // total > (done - 1) * 10 // total:
                self._console.print(f"{done:,} of {total:,} kernels", highlight=False)
        self._bar.update(self._task, completed=len(self.finished))
        self._text.plain = "\n".join(title(each) for each in list(self._running)[:_SHOWN])


def title(spec: KernelSpec) -> str:
    """One line that tells a kernel from its siblings."""
    return f"{spec.dsl} {kernel_name(spec)} {options_text(spec.options)}"


def options_text(options: Mapping[str, Any]) -> str:
    """Such as ``"tile=128 dtype=bf16 by_rows"``: of flags, those that are on; lists are left out."""
    words = []
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif value is not False and value is not None and not isinstance(value, list):
            words.append(f"{name}={value}")
    return " ".join(words)


def as_document(
    model: str,
    arch: str,
    precisions: Sequence[str],
    specs: Mapping[KernelSpec, str],
    finished: Iterable[Outcome],
    *,
    folder: Path,
    elapsed_s: float,
    interrupted: bool,
) -> dict[str, Any]:
    """All there is to say about a compilation, as JSON values."""
    outcomes = {outcome.spec: outcome for outcome in finished}
    kernels = []
    for spec, backend in specs.items():
        outcome = outcomes.get(spec)
        kernels.append(
            {
                "backend": backend,
                "kernel": kernel_name(spec),
                "options": dict(spec.options),
                "status": outcome.status if outcome else "not reached",
                "reason": outcome.reason if outcome else None,
                "seconds": outcome.seconds if outcome else None,
            }
        )
    counts = Counter(kernel["status"] for kernel in kernels)
    return {
        "model": model,
        "arch": arch,
        "precisions": list(precisions),
        "folder": str(folder),
        "elapsed_s": elapsed_s,
        "interrupted": interrupted,
        **{status.replace(" ", "_"): counts[status] for status in _STATUSES},
        "kernels": kernels,
    }


def print_report(document: dict[str, Any], as_json: bool) -> None:
    """The document on stdout, for a program or for a person."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    what = f"{document['arch']}, {', '.join(document['precisions'])}"
    console.print(f"[bold]{escape(document['model'])}[/] [dim]{what}[/]\n")
    if not document["kernels"]:
        console.print(
            "No backend that is installed has kernels for these shapes; dmuon-tune doctor says more."
        )
        return
    console.print(_table(document["kernels"]))
    for reason, count in Counter(each["reason"] for each in document["kernels"] if each["reason"]).items():
        line = textwrap.shorten(_ESCAPES.sub("", reason), _REASON_WIDTH)
        console.print(f"\n[red]{count} failed[/]: {escape(line)}")
    console.print(f"\n{_closing(document)}", soft_wrap=True)


def _table(kernels: Sequence[dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("backend", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    used = [status for status in _STATUSES if any(each["status"] == status for each in kernels)]
    for status in used:
        table.add_column(status, justify="right", no_wrap=True)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for each in kernels:
        counts.setdefault((each["backend"], each["kernel"]), Counter())[each["status"]] += 1
    for (backend, kernel), found in counts.items():
        table.add_row(backend, kernel, *(f"{found[status]:,}" if found[status] else "" for status in used))
    return table


def _closing(document: dict[str, Any]) -> str:
    parts = [
        f"{document[key.replace(' ', '_')]} {key}" for key in _STATUSES if document[key.replace(" ", "_")]
    ]
    return f"{', '.join(parts)}, in {seconds_text(document['elapsed_s'])}; kept in {document['folder']}."
