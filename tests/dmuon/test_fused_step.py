"""Steps made in kernels: the optimizer's very launches run by the PTX interpreter, with torch's products between."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fused_gpu import Gpu, Oracle, build_once, muon
from muon_helpers import gradient_like, parameter
from torch import Tensor, nn

import dmuon
import dmuon.fused_step
import dmuon.kernels.gpu.driver
from dmuon.cli.ahead import specs_ahead
from dmuon.kernels import step as step_module
from dmuon.kernels.backends.compiled import TRITON
from dmuon.kernels.choose import NSChoice, ProductChoice
from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.lr_adjust import RULES

pytest.importorskip("triton")

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}
"""Of a whole step, relative to its length."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    step_module._prepared.cache_clear()
    monkeypatch.setattr(TRITON, "_built", {})
    gc.freeze()
    yield Gpu(monkeypatch)
    gc.unfreeze()
    step_module._prepared.cache_clear()


@pytest.mark.case(row="P3")
@pytest.mark.case(row="P4")
@pytest.mark.case(row="T6")
@pytest.mark.parametrize(
    ("arch", "precision", "dtype"),
    [
        ("sm_80", "fp16", torch.float32),
        pytest.param("sm_90a", "bf16", torch.float32, marks=pytest.mark.slow),
        pytest.param("sm_90a", "fp16", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_those_by_an_svd(gpu: Gpu, arch: str, precision: str, dtype: torch.dtype) -> None:
    """Two groups with options of their own share batches; experts; tall and wide; the rate changes between replays."""
    gpu.use(arch)
    first, second = (parameter(24, 40, seed=k, dtype=dtype) for k in range(2))
    tall, experts = parameter(40, 24, seed=2, dtype=dtype), parameter(3, 24, 40, seed=3, dtype=dtype)
    groups: list[dict[str, Any]] = [
        {"params": [first, tall], "lr": 0.1, "weight_decay": 0.5, "momentum": 0.9, "adjust_lr": "original"},
        {
            "params": [second, experts],
            "lr": torch.tensor(0.2),
            "weight_decay": 0.0,
            "momentum": 0.5,
            "maximize": True,
            "adjust_lr": "match_rms_adamw",
        },
    ]
    optimizer = muon(*groups, precision=precision)
    weights = {weight: group for group in optimizer.param_groups for weight in group["params"]}
    oracles = {
        weight: [Oracle(matrix) for matrix in weight.view(-1, *weight.shape[-2:])] for weight in weights
    }
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.param_groups[1]["lr"].fill_(0.2 / (step + 1))
        for k, (weight, group) in enumerate(weights.items()):
            weight.grad = None if (step, k) == (1, 0) else gradient_like(weight, seed=10 * step + k)
            if weight.grad is None:
                continue
            for oracle, gradient in zip(
                oracles[weight], weight.grad.view(-1, *weight.shape[-2:]), strict=True
            ):
                oracle.step(
                    gradient,
                    lr=float(group["lr"]),
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    factor=RULES[group["adjust_lr"]](*weight.shape[-2:]),
                    maximize=group["maximize"],
                )
        optimizer.step()
    rounding = 2 * 2.0**-8 * 4 if dtype == torch.bfloat16 else 0.0
    for weight, group in weights.items():
        length = 0.1 * RULES[group["adjust_lr"]](*weight.shape[-2:])
        for oracle, matrix in zip(oracles[weight], weight.view(-1, *weight.shape[-2:]), strict=True):
            scale = np.linalg.norm(oracle.weight) / (length * np.sqrt(min(oracle.weight.shape)))
            assert oracle.error(matrix, length) < 5 * TOLERANCE[precision] + rounding * scale
    assert gpu.recorder.replayed >= 2 and optimizer.nonfinite() == 0
    assert {spec.module.rpartition(".")[2] for spec in gpu.launched} == {
        "prepare_kernel",
        "guard_kernel",
        "apply_kernel",
    }


def one_step(weights: list[nn.Parameter], **options: Any) -> dmuon.Muon:
    """Of each weight by a gradient of its own seed, where it has none yet."""
    for k, weight in enumerate(weights):
        if weight.grad is None:
            weight.grad = gradient_like(weight, seed=20 + k)
    optimizer = muon({"params": weights}, **{"lr": 0.1, **options})
    optimizer.step()
    return optimizer


def stepped_by_torch(weights: list[nn.Parameter], **options: Any) -> list[nn.Parameter]:
    """Copies of ``weights`` after one step by torch's operations: to be asked for before :meth:`Gpu.use`."""
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    for weight, other in zip(weights, copies, strict=True):
        other.grad = None if weight.grad is None else weight.grad.clone()
    one_step(copies, **options)
    return copies


def check_close(weights: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """To a hundredth of a step at a rate of 0.1: both are rounded to fp16 on the way, in one form or the other."""
    for weight, other in zip(weights, expected, strict=True):
        assert torch.equal(weight.isnan(), other.isnan())
        gap = (weight.detach() - other.detach()).nan_to_num().float()
        assert (gap.norm(dim=(-2, -1)) <= 1e-2 * 0.1 * min(weight.shape[-2:]) ** 0.5).all()


@pytest.mark.case(row="N2")
def test_zero_and_nan_stay_in_their_own_matrix_and_are_counted(gpu: Gpu) -> None:
    """The gradient of nothing decays alone; what is not finite shows, is counted once, and spoils no other."""
    weights = [parameter(16, 24, seed=k, dtype=torch.float32) for k in range(4)]
    for k, weight in enumerate(weights):
        weight.grad = gradient_like(weight, seed=k)
    weights[1].grad.zero_()
    weights[2].grad[3, 4] = torch.inf
    weights[3].grad *= 1e-30
    before, expected = weights[1].detach().clone(), stepped_by_torch(weights)
    gpu.use()
    optimizer = one_step(weights)
    check_close(weights, expected)
    assert torch.equal(weights[1], (before * (1 - 0.1 * 0.1)).float())
    assert weights[2].isnan().any() and optimizer.nonfinite() == 1
    assert all(torch.isfinite(weights[k]).all() for k in (0, 1, 3))
    optimizer.step()
    assert optimizer.nonfinite() == 2


def test_torchs_steps_count_what_is_not_finite_too() -> None:
    weights = [parameter(16, 24, seed=k, dtype=torch.float32) for k in range(3)]
    weights[0].grad, weights[2].grad = (gradient_like(weight) for weight in weights[::2])
    weights[0].grad[0, 0] = torch.nan
    weights[2].grad[5, 5] = -torch.inf
    optimizer = one_step(weights)
    assert optimizer.nonfinite() == 2
    optimizer.step()
    assert optimizer.nonfinite() == 4


@pytest.mark.case(row="N7")
def test_a_rate_of_zero_moves_nothing_and_decay_is_exact(gpu: Gpu) -> None:
    gpu.use()
    weight = parameter(16, 24, dtype=torch.float32)
    before = weight.detach().clone()
    one_step([weight], lr=0.0, weight_decay=10.0)
    assert torch.equal(weight, before)
    for lr, decay in ((0.1, 10.0), (0.25, 2.0)):
        kept, alone = parameter(16, 24, dtype=torch.float32), parameter(16, 24, dtype=torch.float32)
        one_step([kept], lr=lr, weight_decay=decay)
        one_step([alone], lr=lr, weight_decay=0.0)
        moved = alone.detach().double() - before.double()
        torch.testing.assert_close(
            kept.double(), (1 - lr * decay) * before.double() + moved, rtol=0, atol=1e-6
        )


@pytest.mark.parametrize(("rows", "cols"), [(16, 24), (24, 16)])
def test_without_nesterov_and_with_the_whole_iteration_in_one_launch(gpu: Gpu, rows: int, cols: int) -> None:
    """Where the result is written out, another launch moves the weights."""
    weights = [
        parameter(2, rows, cols, dtype=torch.float32),
        parameter(rows, cols, seed=3, dtype=torch.float32),
    ]
    expected = stepped_by_torch(weights, nesterov=False)
    gpu.use()
    whole = ProductChoice("triton", TRITON.configs("gram_ns", 16, 24, "fp16", ARCHS["sm_80"])[0])
    gpu.choose(NSChoice("standard", whole=whole))
    optimizer = one_step(weights, nesterov=False)
    check_close(weights, expected)
    assert optimizer.nonfinite() == 0
    names = [spec.module.rpartition(".")[2] for spec in gpu.launched]
    assert names == [*["prepare_kernel"] * 2, "small_kernel", *["guard_kernel"] * 2, "move_kernel"]


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_one_matrix_at_a_time(gpu: Gpu, method: str) -> None:
    weights = [parameter(3, 16, 40, dtype=torch.float32)]
    expected = stepped_by_torch(weights)
    gpu.use(graphs=False)
    gpu.choose(NSChoice(method, (2,) if method == "gram" else (), loop=True))
    one_step(weights)
    check_close(weights, expected)
    assert len(gpu.launched) == 2 + 3 * 3


@pytest.mark.slow
@pytest.mark.case(row="N6")
def test_odd_shapes(gpu: Gpu) -> None:
    """Rows and columns, sizes that fill no vector, parts of a tile; convolutions too."""
    shapes = [(1, 1), (1, 8), (9, 1), (5, 3), (33, 70), (6, 2, 3, 3)]
    weights = [parameter(*shape, seed=k, dtype=torch.float32) for k, shape in enumerate(shapes)]
    expected = stepped_by_torch(weights)
    gpu.use(graphs=False)
    one_step(weights)
    for weight, other in zip(weights, expected, strict=True):
        check_close([weight.flatten(1)], [other.flatten(1)])
    assert len(gpu.launched) == 5 * len(shapes)


def test_gradients_that_lie_anywhere(gpu: Gpu) -> None:
    """As in buckets: contiguous, at odd addresses."""
    weights = [parameter(16, 24, dtype=torch.float32), parameter(3, 16, 24, seed=1, dtype=torch.float32)]
    bucket, first = torch.empty(2000), 1
    for k, weight in enumerate(weights):
        weight.grad = bucket[first : first + weight.numel()].view(weight.shape)
        weight.grad.copy_(gradient_like(weight, seed=k))
        first += weight.numel() + 1
    expected = stepped_by_torch(weights)
    gpu.use()
    one_step(weights)
    check_close(weights, expected)
    assert not any(spec.options["aligned"] for spec in gpu.launched if "prepare" in spec.module)
    assert all(spec.options["vector_out"] for spec in gpu.launched if spec.options.get("update"))


@pytest.mark.case(row="P5")
def test_parts_of_a_fused_weight(gpu: Gpu) -> None:
    """Of 16 + 8 + 8 rows, each orthogonalised by itself; momentum advances once."""
    model = nn.Module()
    model.qkv = nn.Linear(24, 32, bias=False)
    model.qkv.weight.grad = gradient_like(model.qkv.weight)
    policy = dmuon.MatrixPolicy(splits={"qkv.weight": (16, 8, 8)})
    options: dict[str, Any] = {"policy": policy, "precision": "fp16", "lr": 0.1}
    other = nn.Module()
    other.qkv = nn.Linear(24, 32, bias=False)
    other.load_state_dict(model.state_dict())
    other.qkv.weight.grad = model.qkv.weight.grad.clone()
    dmuon.Muon(other, **options).step()
    gpu.use()
    optimizer = dmuon.Muon(model, **options)
    optimizer.step()
    check_close([model.qkv.weight], [other.qkv.weight])
    momentum = optimizer.state[model.qkv.weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, 0.05 * model.qkv.weight.grad)
    assert len([spec for spec in gpu.launched if spec.options.get("update")]) == 2


def test_what_kernels_cannot_serve_goes_by_torch(gpu: Gpu) -> None:
    """Strides, dtypes and precisions; beside matrices that kernels serve, without a warning."""
    turned = nn.Parameter(parameter(24, 16, dtype=torch.float32).detach().mT)
    strided = parameter(16, 24, seed=1, dtype=torch.float32)
    strided.grad = gradient_like(torch.empty(24, 16)).mT
    half = parameter(16, 24, seed=2, dtype=torch.float16)
    exact = parameter(16, 24, seed=3, dtype=torch.float64)
    served = parameter(16, 24, seed=4, dtype=torch.float32)
    weights = [turned, strided, half, exact, served]
    expected = stepped_by_torch(weights)
    gpu.use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(weights)
    check_close(weights, expected)
    assert all(torch.equal(a, b) for a, b in zip(weights[:4], expected[:4], strict=True))
    assert {spec.options.get("weight_dtype", "fp32") for spec in gpu.launched} == {"fp32"}
    assert len(gpu.launched) == 5
    gpu.launched.clear()
    one_step([parameter(16, 24, dtype=torch.float32)], precision="fp32")
    assert not gpu.launched


@pytest.mark.parametrize(
    ("option", "dtype", "served"),
    [
        ({"normuon_beta2": 0.9}, torch.float32, False),
        ({"cautious_decay": True}, torch.float32, False),
        ({"cautious_decay": True, "weight_decay": 0.0}, torch.float32, True),
        ({"stochastic_rounding": True}, torch.bfloat16, False),
        ({"stochastic_rounding": True}, torch.float32, True),
    ],
)
def test_variants_go_by_torch(gpu: Gpu, option: dict[str, Any], dtype: torch.dtype, served: bool) -> None:
    weights = [parameter(16, 24, dtype=dtype)]
    torch.manual_seed(0)
    expected = stepped_by_torch(weights, **option)
    gpu.use()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(weights, **option)
    assert bool(gpu.launched) == served
    check_close(weights, expected)
    assert served or torch.equal(weights[0], expected[0])


@pytest.mark.parametrize("at", ["compiling", "loading"])
def test_a_kernel_that_is_not_to_be_had_is_reported_once(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Before anything is changed: the step is then torch's, momentum and all."""
    dmuon.fused_step._report.cache_clear()
    weights = [parameter(16, 24, dtype=torch.float32), parameter(8, 24, dtype=torch.float32)]
    expected = stepped_by_torch(weights)
    gpu.use()

    name, original = {
        "compiling": ("load.binary_for", build_once),
        "loading": ("driver.prepared", dmuon.kernels.gpu.driver.prepared),
    }[at]

    def refusing(first: Any, *rest: Any) -> Any:
        if getattr(first, "spec", first).module.endswith("apply_kernel"):
            raise Unsupported(f"apply is refused on {at}")
        return original(first, *rest)

    monkeypatch.setattr(f"dmuon.kernels.gpu.{name}", refusing)
    with pytest.warns(RuntimeWarning, match="torch's operations.*: apply is refused") as warned:
        optimizer = one_step(weights)
        assert all(map(torch.equal, weights, expected))
        optimizer.step()
    assert len(warned) == 1 and not gpu.launched


@pytest.mark.case(row="N5")
def test_a_step_skipped_by_the_scaler_changes_nothing(gpu: Gpu) -> None:
    gpu.use()
    weight = parameter(16, 24, dtype=torch.float32)
    optimizer, before = muon({"params": [weight]}, lr=0.1), weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad, steps in ((torch.inf, 0), (1.0, 1)):
        optimizer.zero_grad()
        scaler.scale((weight * bad).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert len(gpu.launched) == 5 * steps and torch.equal(weight, before) == (not steps)
        assert optimizer.nonfinite() == 0 and weight.isfinite().all()


def test_weights_come_as_they_have_moved(gpu: Gpu) -> None:
    """Ownership publishes each weight as soon as it is yielded."""
    gpu.use()
    weights = [parameter(8, 16, dtype=torch.float32), parameter(16, 8, dtype=torch.float32)]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = gradient_like(weight)
    optimizer = muon({"params": weights})
    updates = optimizer._updates_of(optimizer.param_groups[0])
    with torch.no_grad():
        moved = optimizer._matrix_step.run(updates)
        assert next(moved) is weights[0]
        assert not torch.equal(weights[0], before[0]) and torch.equal(weights[1], before[1])
        assert next(moved) is weights[1]
        assert not torch.equal(weights[1], before[1]) and not list(moved)


def test_autograd_notices_that_a_weight_has_moved(gpu: Gpu) -> None:
    gpu.use()
    weight = parameter(8, 16, dtype=torch.float32)
    product = (torch.randn(4, 8) @ weight).square() @ weight.mT
    one_step([weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize(("rows", "cols", "dtype"), [(16, 24, torch.float32), (24, 16, torch.bfloat16)])
def test_all_that_is_launched_is_compiled_ahead(gpu: Gpu, rows: int, cols: int, dtype: torch.dtype) -> None:
    gpu.use()
    weights = [parameter(3, rows, cols, dtype=dtype), parameter(rows, cols, seed=1, dtype=dtype)]
    one_step(weights)
    sides = [(min(rows, cols), max(rows, cols))]
    assert set(gpu.launched) <= specs_ahead([TRITON], sides, ARCHS["sm_80"], ["fp16"], "keller_jordan").keys()
