"""The stages of gpu_suite.py: each a list of named tasks, each task one record of its results."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from cases import Shape
from comparison import TORCH, compare
from gpu_checks import compile_tasks, correctness_tasks
from gpu_setting import LIMIT_S, Setting, Stage, Task, short
from peers import build_torch
from timing import typical_ms
from torch import nn

import dmuon
from dmuon.autotune import Tuner, install, ns_problem
from dmuon.autotune.describe import choice_text
from dmuon.kernels import gram_ns
from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.candidates import ns_candidates
from dmuon.kernels.choose import NSChoice
from dmuon.kernels.coefficients import keller_jordan, polar_express
from dmuon.kernels.gpu.arch import arch_of
from dmuon.kernels.precision import PRECISIONS
from dmuon.kernels.run import run_ns
from dmuon.models import load_shapes

MODEL = "qwen2.5-7b"


def launch_tasks(setting: Setting) -> Iterator[Task]:
    """What a whole iteration costs the host: launched one by one, and as a CUDA graph."""
    shapes = (
        [(1, 16, 32)] if setting.toy else [(1, 1024, 4096), (1, 4096, 4096), (64, 128, 512), (64, 64, 256)]
    )
    for shape in shapes:
        for precision in setting.precisions:
            yield Task(f"{Shape(*shape)} {precision}", partial(_launch, setting, shape, precision))


def _launch(setting: Setting, shape: tuple[int, int, int], precision: str, seconds: float) -> dict[str, Any]:
    G = torch.randn(*shape, device=setting.device)

    def run() -> None:
        gram_ns(G, precision=precision, out=G)

    run()
    result: dict[str, Any] = {
        "eager host µs": setting.host_us(run),
        "eager ms": setting.typical_ms(run),
    }
    if not setting.toy:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        result["graph host µs"] = setting.host_us(graph.replay)
        result["graph ms"] = setting.typical_ms(graph.replay)
    return result


def ceiling_tasks(setting: Setting) -> Iterator[Task]:
    """The symmetric products at their fastest configuration against torch.matmul of the whole product."""
    sides = [256] if setting.toy else [256, 512, 1024, 2048, 4096, 8192]
    for precision in setting.precisions:
        side = 128 if setting.toy else 8192
        yield Task(f"ceiling {precision}", partial(_matmul, setting, side, precision))
        for m in sides:
            for op in ("gram", "symmetric_product"):
                for name in setting.backends:
                    run = partial(_against_matmul, setting, name, op, m, precision)
                    yield Task(f"{op} {m} {precision} {name}", run)


def _matmul(setting: Setting, side: int, precision: str, seconds: float) -> dict[str, Any]:
    A = torch.randn(side, side, device=setting.device, dtype=PRECISIONS[precision])
    taken = setting.typical_ms(lambda: A @ A)
    return {"m": side, "matmul ms": taken, "matmul TFLOP/s": 2e-9 * side**3 / taken}


def _against_matmul(
    setting: Setting, backend: str, op: str, m: int, precision: str, seconds: float
) -> dict[str, Any]:
    """The best of all configurations, found by a quick look at each; then both in turn."""
    n = 4 * m if op == "gram" else m
    dtype = PRECISIONS[precision]
    A = torch.randn(m, n, device=setting.device, dtype=dtype)
    if op == "symmetric_product":
        A = (A + A.mT).div_(m**0.5)
    B = A.mT if op == "gram" else A
    out = torch.empty(m, m, device=setting.device, dtype=dtype)
    operands = (A,) if op == "gram" else (A, A)
    end, found = time.monotonic() + min(seconds, LIMIT_S), {}
    for config in BACKENDS[backend].configs(op, m, n, precision, arch_of(setting.device)):
        if config.get("lower") in ("write", "both"):
            continue  # half of a result is no match for a whole one
        product = BACKENDS[backend].build(op, config)
        run = partial(product, *operands, out)
        run()
        found[typical_ms(run, 3, setting.kind)] = (config, run)
        if time.monotonic() > end:
            break
    config, run = found[min(found)]
    ours, full = setting.in_turn({"ours": run, "matmul": lambda: torch.matmul(A, B, out=out)}).values()
    return {
        "m": m,
        "n": n,
        "ms": ours,
        "matmul ms": full,
        "matmul / ours": full / ours,
        "TFLOP/s": 1e-9 * m * (m + 1) * n / ours,
        "of": len(found),
        "config": short(config),
    }


def tuning_tasks(setting: Setting) -> Iterator[Task]:
    """Whole iterations at the shapes of real models, kept in the store."""
    for precision in setting.precisions:
        for m, n, batch in tuned_shapes(setting):
            yield Task(f"{Shape(batch, m, n)} {precision}", partial(_tune, setting, m, n, batch, precision))


def tuned_shapes(setting: Setting) -> list[tuple[int, int, int]]:
    """(m, n, batch), the most useful first."""
    if setting.toy:
        return [(16, 32, 1)]
    models = ("gpt2", MODEL, "llama-3.1-8b", "qwen2.5-1.5b", "pi0")
    counts = [count for model in models for count in load_shapes(model).matrices()]
    lone = [(count.m, count.n, 1) for count in counts]
    return list(dict.fromkeys([(2048, 8192, 1), (128, 512, 64), *lone, (64, 256, 64), (768, 3072, 12)]))


def _tune(setting: Setting, m: int, n: int, batch: int, precision: str, seconds: float) -> dict[str, Any]:
    problem = ns_problem(m, n, batch, device=setting.device, precision=precision)
    candidates = len(ns_candidates(problem, polar_express()))
    outcome = Tuner(setting.store).tune([problem], min(seconds, LIMIT_S)).outcomes[0]
    best, choice = outcome.best, outcome.choice
    if best is None or choice is None:
        raise RuntimeError(outcome.reason or outcome.status)
    bad = [trial for trial in outcome.trials if trial.status != "ok"]
    variants = {}
    for name, field in (("lower halves / tuned", "lower"), ("divided tiles / tuned", "splits")):
        taken = [
            trial.median_ms for trial in outcome.trials if field in trial.config["gram"] and trial.median_ms
        ]
        if taken and best.median_ms:
            variants[name] = min(taken) / best.median_ms
    return {
        "ms": best.median_ms,
        "plain / tuned": outcome.speedup,
        "choice": choice_text(choice),
        **variants,
        "candidates": candidates,
        "timed": len(outcome.trials) - len(bad),
        "rejected or failed": "; ".join(dict.fromkeys(f"{t.backend}: {t.message}" for t in bad))[:300],
    }


def peer_tasks(setting: Setting) -> Iterator[Task]:
    """Tuned, against torch.optim.Muon's iteration, the same under torch.compile, and other libraries'."""
    for precision in setting.precisions:
        for m, n, batch in tuned_shapes(setting):
            yield Task(f"{Shape(batch, m, n)} {precision}", partial(_peers, setting, m, n, batch, precision))


def _peers(setting: Setting, m: int, n: int, batch: int, precision: str, seconds: float) -> dict[str, Any]:
    # Others compute with Keller Jordan's coefficients: so do we here, and tune for them.
    device = setting.device
    problem = ns_problem(m, n, batch, device=device, precision=precision, coefficients="keller_jordan")
    Tuner(setting.store).tune([problem], min(seconds / 2, LIMIT_S))
    install(setting.store, "cache")
    result = compare(Shape(batch, m, n), precision, setting.device.type, setting.rounds, {})
    found: dict[str, Any] = {"dmuon ms": result.timings["dmuon"].median_ms, "choice": result.choice}
    for name, timing in result.timings.items():
        if name != "dmuon":
            found[f"{name} / dmuon"] = timing.over_dmuon.of_medians
    if not setting.toy:
        G = torch.randn(batch, m, n, device=setting.device).squeeze(0)
        compiled = torch.compile(build_torch(precision, "cuda"))
        ours = partial(gram_ns, G, precision=precision, coefficients="keller_jordan")
        runs = {"ours": ours, "compiled": partial(compiled, G)}
        if batch > 1:
            runs["batched"] = partial(run_ns, G, NSChoice("standard"), keller_jordan(), PRECISIONS[precision])
        taken = setting.in_turn(runs)
        found["torch.compile / dmuon"] = taken["compiled"] / taken["ours"]
        if batch > 1:
            found["batched cuBLAS / dmuon"] = taken["batched"] / taken["ours"]
    for name, reason in result.absent.items():
        found[name] = reason
    return found


def owner_tasks(setting: Setting) -> Iterator[Task]:
    """One owner's optimizer step on the matrices it would hold, against torch's Muon and AdamW on the same."""
    for ranks in (8,) if setting.toy else (256, 64, 8):
        yield Task(f"{MODEL} / {ranks}", partial(_owner, setting, ranks))


def _owner(setting: Setting, ranks: int, seconds: float) -> dict[str, Any]:
    """Every ``ranks``-th matrix by size, the largest first: no owner holds more."""
    install(setting.store, "cache")
    every = [(c.m, c.n) for c in load_shapes(MODEL).matrices() for _ in range(c.count)]
    mine = sorted(every, key=lambda shape: -(shape[0] ** 2) * shape[1])[::ranks]
    if setting.toy:
        mine = [(m // 64, n // 64) for m, n in mine[:4]]

    def parameters() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.randn(shape, device=setting.device).bfloat16()) for shape in mine]
        for parameter in made:
            parameter.grad = torch.randn_like(parameter)
        return made

    weights = parameters()
    ours = dmuon.Muon([{"params": weights, "algorithm": "muon"}], lr=0.02)
    optimizers: dict[str, Any] = {
        "dmuon": ours,
        TORCH: torch.optim.Muon(weights, lr=0.02),
        "AdamW": torch.optim.AdamW(weights, lr=1e-3, fused=True),
    }
    for optimizer in optimizers.values():
        for _ in range(3):  # to see every batch, record it, and replay it
            optimizer.step()
    taken = setting.in_turn({name: optimizer.step for name, optimizer in optimizers.items()})
    return {
        "matrices": len(mine),
        "elements": sum(m * n for m, n in mine),
        "dmuon ms": taken["dmuon"],
        "torch.optim.Muon / dmuon": taken[TORCH] / taken["dmuon"],
        "dmuon / AdamW": taken["dmuon"] / taken["AdamW"],
        "dmuon host µs": setting.host_us(ours.step),
    }


STAGES = {
    "compile": Stage("Kernels compiled on this machine's cores.", 5, compile_tasks),
    "correctness": Stage(
        "Every configuration against fp64, as an error over torch's own.", 4, correctness_tasks
    ),
    "ceiling": Stage("Symmetric products against torch.matmul of the whole product.", 4, ceiling_tasks),
    "tuning": Stage("Whole iterations tuned; plain is the standard form on torch.", 5, tuning_tasks),
    "launch": Stage("Host and device time of a whole iteration.", 1, launch_tasks),
    "peers": Stage("Side by side with other implementations, in one run.", 3, peer_tasks),
    "owner": Stage("One owner's step.", 2, owner_tasks),
}
"""In the order they run: what later ones launch is compiled, checked and tuned before."""
