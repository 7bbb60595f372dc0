"""The first stages of gpu_suite.py: compiling every kernel, and checking its numbers on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from gpu_setting import Setting, Task, short
from torch import Tensor, nn

import dmuon
from dmuon.kernels.backends import BACKENDS
from dmuon.kernels.backends.compiled import CompiledBackend
from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.coefficients import polar_express
from dmuon.kernels.gpu.arch import arch_of
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.gpu.load import compile_all
from dmuon.kernels.precision import PRECISIONS
from dmuon.kernels.reference import polynomial_polar, relative_error, tolerance
from dmuon.kernels.restarts import default_restarts
from dmuon.kernels.run import run_ns
from dmuon.kernels.step import step_specs


def compile_tasks(setting: Setting) -> Iterator[Task]:
    """Everything that the later stages launch, by backend."""
    arch = arch_of(setting.device)
    for name in setting.backends:
        backend = BACKENDS[name]
        if isinstance(backend, CompiledBackend) and arch:
            for precision in setting.precisions:
                steps = polar_express().steps
                restarts = default_restarts(polar_express(), PRECISIONS[precision])
                sides = (128, 512), (4096, 4096)
                specs = list(
                    chain.from_iterable(
                        backend.specs(m, n, precision, arch, steps, restarts) for m, n in sides
                    )
                )
                if name == "triton":
                    specs += chain.from_iterable(step_specs(m, n, precision, arch) for m, n in sides)
                yield Task(f"{name} {precision}", partial(_compile, specs))


def _compile(specs: list[Any], seconds: float) -> dict[str, Any]:
    outcomes = compile_all(specs)
    failed = [outcome for outcome in outcomes if outcome.binary is None]
    reasons = "; ".join(dict.fromkeys(str(outcome.reason) for outcome in failed))
    return {"kernels": len(outcomes), "not compiled": len(failed), "reasons": reasons[:400]}


def correctness_tasks(setting: Setting) -> Iterator[Task]:
    """Every configuration of every kernel against fp64, on sizes with and without ragged edges."""
    shapes = [(272, 80)] if setting.toy else [(512, 1024), (200, 456), (72, 1096), (1, 8)]
    side = 256 if setting.toy else 4096
    arch = arch_of(setting.device)
    for name in setting.backends:
        for precision in setting.precisions:
            for op in ("gram", "symmetric_product", "apply"):
                for config in BACKENDS[name].configs(op, side, side, precision, arch):
                    run = partial(_check_product, setting, name, op, config, precision, shapes)
                    yield Task(f"{name} {op} {precision} {short(config)}", run)
            for config in BACKENDS[name].configs("gram_ns", 64, 256, precision, arch):
                run = partial(_check_whole, setting, name, config, precision)
                yield Task(f"{name} gram_ns {precision} {short(config)}", run)

    for precision in setting.precisions:
        for weight in ("fp32", "bf16"):
            yield Task(f"step {precision} of {weight}", partial(_check_step, setting, precision, weight))


def _check_product(
    setting: Setting,
    backend: str,
    op: str,
    config: Mapping[str, Any],
    precision: str,
    shapes: list[tuple[int, int]],
    seconds: float,
) -> dict[str, Any]:
    product, plain = BACKENDS[backend].build(op, config), BACKENDS["torch"].build(op, {})
    worst, served, lower = 0.0, 0, config.get("lower")
    for m, n in shapes:
        operands, C = _operands(setting, op, precision, m, n)
        # A symmetric product is of symmetric operands: its exact result is that of torch on the same ones.
        second = operands[1] if len(operands) == 2 else operands[0].mT
        exact = 0.75 * operands[0].double() @ second.double() - 0.5 * C.double()
        torchs, ours = torch.empty_like(C), torch.full_like(C, torch.nan)
        plain(*operands, torchs, alpha=0.75, beta=-0.5, C=C)
        if lower in ("read", "both"):
            for operand in (*operands, C):
                operand.masked_fill_(_above(operand), torch.nan)
        try:
            product(*operands, ours, alpha=0.75, beta=-0.5, C=C)
        except Unsupported:
            continue  # such as lines too short for wide accesses, which only small tiles do without
        served += 1
        if lower in ("write", "both"):
            ours = ours.tril() + ours.tril(-1).mT
        errors = [float((result.double() - exact).norm() / exact.norm()) for result in (ours, torchs)]
        if op != "apply" and not torch.equal(ours, ours.mT):
            raise ValueError(f"the result of {m}x{n} is not symmetric")
        if not errors[0] <= 2 * errors[1] + 1e-6:
            raise ValueError(f"error {errors[0]:.1e} at {m}x{n}, where torch has {errors[1]:.1e}")
        worst = max(worst, errors[0] / max(errors[1], 1e-9))
    if not served:
        raise ValueError("it serves none of the shapes")
    return {"error over torch's": worst, "shapes": served}


def _above(S: Tensor) -> Tensor:
    """What lies above the diagonal."""
    return torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).triu(1)


def _operands(setting: Setting, op: str, precision: str, m: int, n: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Operands of a batch of two, with lines at multiples of 16 bytes, and a symmetric C."""
    dtype, device = PRECISIONS[precision], setting.device

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(2, rows, -(-columns // 8) * 8, device=device, dtype=dtype)[..., :columns]

    def symmetric() -> Tensor:
        S = random(m, m)
        S.copy_(S.float() + S.float().mT)
        return S

    if op == "gram":
        return (random(m, n),), symmetric()
    if op == "symmetric_product":
        # A and its square commute; in the working precision, nearly.
        A = symmetric().div_(m**0.5)
        return (A, A), symmetric()
    return (random(m, m), random(m, n)), random(m, n)


def _check_whole(
    setting: Setting, backend: str, config: Mapping[str, Any], precision: str, seconds: float
) -> dict[str, Any]:
    dtype = PRECISIONS[precision]
    restarts = default_restarts(polar_express(), dtype)
    choice = NSChoice("gram", restarts, whole=ProductChoice(backend, config))
    worst = 0.0
    for shape in ((5, 64, 256), (3, 100, 24), (2, 17, 1000)):
        G = torch.randn(*shape, device=setting.device)
        result = run_ns(G, choice, polar_express(), dtype, strict=True)
        worst = max(worst, float(relative_error(result, polynomial_polar(G, polar_express())).max()))
    if not worst <= tolerance(dtype):
        raise ValueError(f"error {worst:.1e} exceeds {tolerance(dtype):.1e}")
    return {"error over the bound": worst / tolerance(dtype)}


def _check_step(setting: Setting, precision: str, weight: str, seconds: float) -> dict[str, Any]:
    """Steps of the optimizer, graphs and all, at a rate that changes, against fp64 on the CPU."""
    wide = [(512, 1024), (512, 1024), (456, 200), (3, 128, 512), (72, 1099)]
    shapes = [(64, 96), (3, 24, 40)] if setting.toy else wide
    exact = [nn.Parameter(torch.randn(shape).to(PRECISIONS[weight]).double()) for shape in shapes]
    ours = [nn.Parameter(w.detach().to(setting.device, PRECISIONS[weight])) for w in exact]
    starts = [w.detach().clone() for w in exact]
    optimizers = [
        dmuon.Muon([{"params": weights, "algorithm": "muon"}], lr=1.0, precision=each)
        for weights, each in ((exact, "fp64"), (ours, precision))
    ]
    for step in range(5):
        for w, other in zip(exact, ours, strict=True):
            other.grad = torch.randn_like(other)
            w.grad = other.grad.cpu().double()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1.0 / (step + 1)
            optimizer.step()
    # Of the way that a weight has come; those in bf16 are rounded at every step.
    ways = [(w.detach() - start).norm() for w, start in zip(exact, starts, strict=True)]
    gaps = [(other.detach().cpu().double() - w.detach()).norm() for w, other in zip(exact, ours, strict=True)]
    error = max(float(gap / way) for gap, way in zip(gaps, ways, strict=True))
    bound = tolerance(PRECISIONS[precision]) + (0.1 if weight == "bf16" else 0.0)
    if not error <= bound or optimizers[1].nonfinite():
        raise ValueError(
            f"error {error:.1e} exceeds {bound:.1e}, {optimizers[1].nonfinite()} updates not finite"
        )
    return {"error over the bound": error / bound}
