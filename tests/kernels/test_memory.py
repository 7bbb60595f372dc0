"""What an iteration holds beyond its result: one working copy and four m×m matrices, measured by the profiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dmuon.kernels import polar_express
from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.restarts import default_restarts
from dmuon.kernels.run import run_ns, working_memory

SLACK = 1 << 19
"""Bytes for norms and for the smallest panels."""


def peak_bytes(run: Callable[[], object], folder: Path) -> int:
    """The most that ``run`` has allocated at a time, from the profiler's trace of each allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    recorded.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    return max(accumulate(change for _, change in sorted(changes, key=lambda pair: pair[0])), default=0)


def test_the_measure_sees_a_copy(tmp_path: Path) -> None:
    G = torch.ones(256, 1024)
    assert G.nbytes <= peak_bytes(lambda: G.clone(), tmp_path) < 1.1 * G.nbytes
    assert 2 * G.nbytes <= peak_bytes(lambda: (G * 2 * 3).sum(), tmp_path) < 2.1 * G.nbytes


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("working", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 1024), (1024, 256), (3, 256, 640), (2, 2, 640, 128)], ids=str)
def test_the_budget_holds(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    working: torch.dtype,
    method: str,
    blocked: bool,
    tmp_path: Path,
) -> None:
    G, out = torch.randn(*shape).to(dtype), torch.empty(shape, dtype=dtype)
    m = min(shape[-2:])
    matrices = G[..., 0, 0].numel()
    budget = (G.numel() + 4 * m * m * matrices) * working.itemsize
    if working == torch.bfloat16 and shape[-2] > shape[-1]:
        # Not ours: oneDNN packs a column-major operand in half precision, and frees it with the product.
        budget += G.numel() * working.itemsize
    product = (
        ProductChoice("blocked", {"block": 64, "split": "halves"}) if blocked else ProductChoice("torch")
    )
    restarts = default_restarts(polar_express(), working) if method == "gram" else ()
    # Blocks go one matrix at a time on a CPU, whose batched products would copy them.
    choice = NSChoice(method, restarts, product, product, loop=blocked)
    run_ns(G, choice, polar_express(), working, out)
    peak = peak_bytes(lambda: run_ns(G, choice, polar_express(), working, out), tmp_path)
    assert peak <= budget + SLACK


@pytest.mark.parametrize(
    ("shape", "dtype", "lone", "row"),
    [
        ((4, 1024, 1024), torch.float32, True, 1024 + 16),
        ((4, 1536, 1536), torch.float32, True, 1536 + 16),
        ((512, 512), torch.float64, True, 512 + 8),
        ((4, 512, 512), torch.float32, True, 512),
        ((4, 1100, 1100), torch.float32, True, 1100),
        ((4, 2048, 2048), torch.bfloat16, True, 2048),
        ((4, 2, 1024, 1024), torch.float32, False, 1024),
    ],
)
def test_columns_of_large_matrices_do_not_share_places_of_a_cache(
    shape: tuple[int, ...], dtype: torch.dtype, lone: bool, row: int
) -> None:
    memory = working_memory(shape, dtype, torch.device("cpu"), lone=lone)
    assert memory.shape == shape and memory.stride(-2) == row and memory.stride(-1) == 1


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(1024, 2048), (2048, 1024)], ids=str)
def test_padding_costs_a_cache_line_a_row(shape: tuple[int, int], method: str, tmp_path: Path) -> None:
    G, out = torch.randn(shape), torch.empty(shape)
    choice = NSChoice(method)
    peak = peak_bytes(lambda: run_ns(G, choice, polar_express(), torch.float32, out), tmp_path)
    copy = G.numel() + 16 * shape[0] if method == "standard" else 0
    assert peak <= 4 * (copy + (4 if method == "gram" else 3) * 1024 * (1024 + 16)) + SLACK
    expected = run_ns(G.double(), choice, polar_express(), torch.float64)
    assert (out - expected).norm() < 1e-5 * expected.norm()


def test_a_lone_fp32_matrix_is_read_where_it_lies(tmp_path: Path) -> None:
    G, out = torch.randn(128, 2048), torch.empty(128, 2048)
    torch_product = ProductChoice("torch")
    choice = NSChoice("gram", (), torch_product, torch_product)
    peak = peak_bytes(lambda: run_ns(G, choice, polar_express(), torch.float32, out), tmp_path)
    assert peak < G.nbytes / 2
