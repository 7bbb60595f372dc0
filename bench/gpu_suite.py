"""Everything that a GPU alone can tell, in one command, in stages that keep their results and can be resumed.

    python bench/gpu_suite.py --minutes 25             # needs one GPU, no network
    python bench/gpu_suite.py --out DIR                # goes on where an earlier run into DIR ended
    python bench/gpu_suite.py --device cpu --minutes 1 # toy sizes: does it run?

README.md, next to this file, says what each stage measures and what must come out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import torch
from gpu_setting import Setting, Task
from gpu_stages import STAGES
from rich.console import Console

from dmuon.kernels.choose import device_key
from dmuon.tuning_cache import Store

RECORDS, TABLES, TUNED = "results.jsonl", "README.md", "tuned.jsonl"


@dataclass
class Records:
    """The results so far, one JSON object a line in a file that only grows."""

    path: Path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            # A run that was killed while writing leaves a last line without an end.
            for line in self.path.read_text().splitlines():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue

    def add(self, record: dict[str, Any]) -> None:
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write("\n" * torn + json.dumps(record) + "\n")


def run_stages(
    setting: Setting, names: list[str], records: Records, seconds: float, console: Console
) -> bool:
    """Run the stages' tasks that ``records`` lacks, within ``seconds``; whether all are done.

    A stage may use what is left of the time by its share among the stages that remain.
    """
    done = {(record["stage"], record["task"]) for record in records if "failed" not in record}
    end, complete = time.monotonic() + seconds, True
    for index, name in enumerate(names):
        share = STAGES[name].share / sum(STAGES[other].share for other in names[index:])
        deadline = time.monotonic() + share * (end - time.monotonic())
        console.print(f"{name}: {STAGES[name].about}")
        left = 0
        for task in STAGES[name].tasks(setting):
            if (name, task.name) in done:
                continue
            if time.monotonic() >= deadline:
                left += 1
                continue
            result = _run(task, deadline - time.monotonic())
            records.add({"stage": name, "task": task.name, **result})
            console.print(f"  {task.name}: {_text(result)}", style="red" if "failed" in result else "dim")
        if left:
            console.print(f"  {left} tasks did not fit the time")
        complete &= not left
    return complete


def _run(task: Task, seconds: float) -> dict[str, Any]:
    start = time.monotonic()
    try:
        result = task.run(seconds)
    except Exception as error:
        result = {"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    return {**result, "seconds": round(time.monotonic() - start, 2)}


def markdown(records: Records, about: dict[str, Any]) -> str:
    """A table for each stage; what failed is listed below it."""
    lines = ["# " + about["device"], ""] + [f"- {key}: {value}" for key, value in about.items()] + [""]
    latest = {(record["stage"], record["task"]): record for record in records}
    for name in STAGES:
        rows = [record for (stage, _), record in latest.items() if stage == name]
        if not rows:
            continue
        lines += [f"## {name}", "", STAGES[name].about, ""]
        good = [row for row in rows if "failed" not in row]
        columns = list(dict.fromkeys(key for row in good for key in row if key not in ("stage", "seconds")))
        if good:
            lines += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
            lines += [
                "| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in good
            ]
            lines.append("")
        lines += [f"- failed: {row['task']}: {row['failed']}" for row in rows if "failed" in row]
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return (f"{value:.4g}" if isinstance(value, float) else str(value)).replace("|", "\\|")


def _text(result: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_cell(value)}" for key, value in result.items())


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=25.0, show_default=True)
@click.option(
    "--stage", "stages", multiple=True, type=click.Choice(list(STAGES)), help="Run this alone; repeatable."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the results; one that exists is resumed.  [default: bench/results/gpu-DATE]",
)
def main(device: str, minutes: float, stages: tuple[str, ...], out: Path | None) -> None:
    """Check, tune and time DMuon's kernels on this machine's GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter(
            "torch sees no CUDA GPU here; --device cpu runs toy sizes", param_hint="--device"
        )
    now = datetime.now().astimezone()
    out = out or Path(__file__).parent / "results" / f"gpu-{now:%Y-%m-%d-%H%M%S}"
    out.mkdir(parents=True, exist_ok=True)
    records, console = Records(out / RECORDS), Console(highlight=False, soft_wrap=True)
    about = {
        "device": device_key(device),
        "date": now.isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
    }
    with Store(out / "tuning.db") as store:
        setting = Setting(torch.device(device), store)
        names = [name for name in STAGES if not stages or name in stages]
        try:
            complete = run_stages(setting, names, records, minutes * 60, console)
        except KeyboardInterrupt:
            complete = False
            console.print("stopped; what was finished is kept")
        store.export_jsonl(out / TUNED)
    (out / TABLES).write_text(markdown(records, about))
    console.print(f"{out / TABLES}\n{out / TUNED}: move it into tuning_cache/shipped/ to ship it")
    if not complete:
        console.print(f"not complete: run it again with --out {out}")


if __name__ == "__main__":
    main()
