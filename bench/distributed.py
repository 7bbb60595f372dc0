"""Train the same GPT by DMuon and by what one would use instead, side by side on several ranks.

    python bench/distributed.py                     # 4 ranks on the CPU, one thread each
    python bench/distributed.py --device cuda --ranks 8 --width 4096 --layers 16
    python bench/distributed.py --quick             # does it run?

README.md, next to this file, says what is measured.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from distributed_contenders import ADAMW, GATHER, OURS, TORCH
from distributed_run import NEWTON_SCHULZ, Measured, Setting, measure_in_processes
from report import write_json
from rich.console import Console
from rich.markdown import Markdown
from timing import Ratio, ratio

from dmuon.kernels.choose import device_key

QUICK = {"width": 64, "layers": 2, "rows": 2, "time": 16, "rounds": 3, "steps": 2}
STEP_TARGET, TOTAL_TARGET = 3.0, 1.15


@click.command()
@click.option("--ranks", type=click.IntRange(min=2), default=4, show_default=True)
@click.option(
    "--width", type=click.IntRange(min=4), default=256, show_default=True, help="Of the GPT; a multiple of 4."
)
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True)
@click.option(
    "--rows", type=click.IntRange(min=1), default=4, show_default=True, help="Sequences a rank and step."
)
@click.option(
    "--time", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of a sequence."
)
@click.option(
    "--rounds", type=click.IntRange(min=2), default=10, show_default=True, help="Samples of each contender."
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=3, show_default=True, help="In a row, for one sample."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--quick", is_flag=True, help="A tiny model and few rounds: does it run?")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(__file__).parent / "results",
    help="Folder for the JSON and the table.  [default: bench/results]",
)
def main(ranks: int, device: str, quick: bool, out: Path, **sizes: int) -> None:
    """Train the same GPT by DMuon and by what one would use instead, side by side."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise click.BadParameter(f"{ranks} ranks need as many GPUs, torch sees {torch.cuda.device_count()}")
    if sizes["width"] % 4:
        raise click.BadParameter("it must be a multiple of 4, the number of heads", param_hint="--width")
    setting = Setting(ranks=ranks, device=device, **(QUICK if quick else sizes))
    measured = measure_in_processes(setting)
    now = datetime.now().astimezone()
    document = {
        "created": now.isoformat(timespec="seconds"),
        "device": device_key(device),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **asdict(setting),
        **asdict(measured),
        "targets": targets(measured),
    }
    text = table(document, measured)
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"distributed-{device}-{now:%Y-%m-%d-%H%M%S}"
    write_json(document, stem.with_suffix(".json"))
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    console.print(Markdown(text))
    console.print(f"{stem}.json\n{stem}.md", soft_wrap=True)


def targets(measured: Measured) -> list[dict[str, Any]]:
    """What was promised, with what came out."""
    ours = measured.optimizer_ms[OURS]
    bound = [
        adamw + ns for adamw, ns in zip(measured.total_ms[ADAMW], measured.newton_schulz_ms, strict=True)
    ]
    rows = [
        (f"optimizer step of {name} / ours", ratio(measured.optimizer_ms[name], ours))
        for name in (TORCH, GATHER)
    ]
    due = [
        {"what": what, **asdict(found), "at_least": STEP_TARGET, "passed": found.of_medians >= STEP_TARGET}
        for what, found in rows
    ]
    total = ratio(measured.total_ms[OURS], bound)
    what = f"our total / ({ADAMW}'s + {NEWTON_SCHULZ})"
    return [
        *due,
        {"what": what, **asdict(total), "at_most": TOTAL_TARGET, "passed": total.of_medians <= TOTAL_TARGET},
    ]


def table(document: dict[str, Any], measured: Measured) -> str:
    """All of it as Markdown."""
    lines = [
        f"# One GPT, {len(measured.total_ms)} trainings, {document['created'][:10]}",
        "",
        "{ranks} ranks on {device} ({cores} cores), width {width}, {layers} layers, {rows} × {time} tokens a rank and "
        "step, torch {torch}. Medians of {rounds} rounds of {steps} steps; of the slowest rank.".format_map(
            document
        ),
        "",
        "| training | forward, backward ms | optimizer ms | total ms | total / ours | MB to collectives | MB held |",
        "|---|--:|--:|--:|--:|---|--:|",
    ]
    for name, samples in measured.total_ms.items():
        total, optimizer = median(samples), median(measured.optimizer_ms[name])
        over = _text(ratio(samples, measured.total_ms[OURS]))
        sent = ", ".join(
            f"{_mb(size)} {kind}" for kind, size in sorted(measured.traffic[name].items()) if size > 1e4
        )
        lines.append(
            f"| {name} | {total - optimizer:.1f} | {optimizer:.1f} | {total:.1f} | {over} | {sent} "
            f"| {_mb(measured.held_bytes[name])} |"
        )
    lines += ["", "| target | found | must be | |", "|---|--:|--:|---|"]
    for target in document["targets"]:
        must = f"≥ {target['at_least']:g}" if "at_least" in target else f"≤ {target['at_most']:g}"
        found = _text(Ratio(*(target[key] for key in ("of_medians", "quartile_1", "quartile_3"))))
        lines.append(f"| {target['what']} | {found} | {must} | {'pass' if target['passed'] else 'miss'} |")
    waits = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in measured.waits_ms.items())
    phases = ", ".join(f"{name} {ms:.1f} ms" for name, ms in measured.phases_ms.items())
    return "\n".join(
        [
            *lines,
            "",
            "What bounds ours, a step, on the rank that has most of each:",
            "",
            f"- {NEWTON_SCHULZ}: {median(measured.newton_schulz_ms):.1f} ms; the plan's longest load is "
            f"{1 + measured.gap:.2f} times the least possible",
            f"- waits for transfers: {waits}",
            f"- phases of the optimizer: {phases}",
            "",
        ]
    )


def _text(found: Ratio) -> str:
    return f"{found.of_medians:.2f} ({found.quartile_1:.2f}–{found.quartile_3:.2f})"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}"


if __name__ == "__main__":
    main()
