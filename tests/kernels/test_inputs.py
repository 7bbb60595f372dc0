"""What gram_ns takes, what it refuses, and that it only reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmuon.kernels import gram_ns, polar_express, polynomial_polar
from dmuon.kernels.choose import NSChoice, Problem, heuristic_choice, set_chooser
from dmuon.kernels.reference import relative_error

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


LAYOUTS = {
    "transposed": draw(40, 24).mT,
    "every other column": draw(24, 80)[:, ::2],
    "rows of a larger one": draw(60, 40)[7:31],
    "batch behind": draw(24, 40, 3).permute(2, 0, 1),
    "permuted batch": draw(3, 2, 24, 40).transpose(0, 1),
    "channels last": draw(24, 10, 2, 2).to(memory_format=torch.channels_last).flatten(1).unsqueeze(0)[0],
    "expanded batch": draw(24, 40).expand(3, 24, 40),
    "one of a stack": draw(5, 24, 40)[3],
}


@pytest.mark.case(row="N10")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_make_no_difference(layout: str, precision: str) -> None:
    G = LAYOUTS[layout]
    before = G.clone()
    plain = gram_ns(G.contiguous(), precision=precision)
    result = gram_ns(G, precision=precision)
    assert torch.equal(G, before)
    assert result.is_contiguous() and result.dtype == G.dtype
    assert (
        relative_error(result, plain.double()).max() < {"fp32": 1e-5, "bf16": 6e-2, "fp16": 8e-3}[precision]
    )


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (3, 24, 60), (2, 2, 60, 24)], ids=str)
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_every_dtype_into_every_precision(
    shape: tuple[int, ...], dtype: torch.dtype, precision: str, method: str
) -> None:
    G = draw(*shape).to(dtype)
    before = G.clone()
    expected = polynomial_polar(G, polar_express())
    tolerance = max(
        {"fp64": 1e-12, "fp32": 1e-5, "fp16": 1e-2, "bf16": 6e-2}[precision], 2 * torch.finfo(dtype).eps
    )
    result = gram_ns(G, precision=precision, method=method)
    assert result.dtype == dtype and result.shape == G.shape
    assert relative_error(result, expected).max() < tolerance
    for out_dtype in FLOATS:
        limit = max(tolerance, 2 * torch.finfo(out_dtype).eps)
        out = torch.empty(shape, dtype=out_dtype)
        assert gram_ns(G, precision=precision, method=method, out=out) is out
        assert relative_error(out, expected).max() < limit
        strided = torch.empty(*shape[:-1], 2 * shape[-1], dtype=out_dtype)[..., ::2]
        gram_ns(G, precision=precision, method=method, out=strided)
        assert relative_error(strided, expected).max() < limit
    assert torch.equal(G, before)
    assert gram_ns(G, precision=precision, method=method, out=G) is G
    assert relative_error(G, expected).max() < tolerance


def test_a_gradient_is_only_read_and_none_flows() -> None:
    W = torch.nn.Parameter(draw(8, 12))
    (W * draw(8, 12)).sum().backward()
    assert W.grad is not None
    before = W.grad.clone()
    assert not gram_ns(W.grad).requires_grad
    assert not gram_ns(W).requires_grad
    assert torch.equal(W.grad, before)


@pytest.mark.parametrize(
    ("G", "error"),
    [
        (torch.ones(3, 4, dtype=torch.int64), TypeError),
        (torch.ones(3, 4, dtype=torch.bool), TypeError),
        (torch.ones(3, 4, dtype=torch.complex64), TypeError),
        (torch.ones(3, 4).to_sparse(), TypeError),
        ([[1.0, 2.0]], TypeError),
        (torch.tensor(1.0), ValueError),
        (torch.ones(4), ValueError),
        (torch.ones(0, 4), ValueError),
        (torch.ones(0, 4, 4), ValueError),
    ],
)
def test_bad_inputs(G: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match="G "):
        gram_ns(G)


def test_bad_options_change_nothing() -> None:
    G, out = draw(6, 9), torch.full((6, 9), 5.0)
    bad: list[tuple[dict[str, object], str]] = [
        ({"method": "svd"}, "method"),
        ({"precision": "fp8"}, "precision"),
        ({"coefficients": "unknown"}, "coefficients"),
        ({"restarts": [0]}, "restarts"),
        ({"restarts": [3, 2]}, "restarts"),
        ({"restarts": [5]}, "restarts"),
        ({"restarts": [True]}, "restarts"),
        ({"restarts": "some"}, "restarts"),
        ({"restarts": [2], "method": "standard"}, "restarts"),
    ]
    for options, word in bad:
        with pytest.raises(ValueError, match=word):
            gram_ns(G, out=out, **options)  # type: ignore[arg-type]
    for restarts in (None, 2, torch.tensor([2])):
        with pytest.raises(TypeError, match="restarts"):
            gram_ns(G, out=out, restarts=restarts)  # type: ignore[arg-type]
    assert (out == 5).all()


def test_bad_outputs_are_refused_before_anything_is_written() -> None:
    base = draw(20, 9)
    before = base.clone()
    G = base[:6]
    for out in (
        base[3:9],
        torch.empty(9, 6),
        torch.empty(6, 9, device="meta"),
        torch.empty(6, 1).expand(6, 9),
    ):
        with pytest.raises(ValueError, match="out"):
            gram_ns(G, out=out)
    with pytest.raises(TypeError, match="out"):
        gram_ns(G, out=torch.empty(6, 9, dtype=torch.int32))
    assert torch.equal(base, before)
    gram_ns(G, out=base[6:12])  # beside it, in the same storage
    assert torch.equal(base[:6], before[:6])


def test_meta_tensors_get_a_shape() -> None:
    result = gram_ns(torch.empty(3, 16, 8, device="meta", dtype=torch.bfloat16).mT)
    assert result.shape == (3, 8, 16) and result.is_contiguous() and result.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_results_of_unusual_strides(precision: str, out_dtype: torch.dtype) -> None:
    """Batch dimensions that do not make one, column-major matrices, a column whose stride says nothing."""
    limit = max({"fp64": 1e-6, "fp32": 1e-5, "bf16": 8e-2}[precision], 2 * torch.finfo(out_dtype).eps)
    for out in (
        torch.empty(3, 2, 24, 40).transpose(0, 1),
        torch.empty(1, 4, 3, 24, 40).transpose(1, 2),
        torch.empty(3, 40, 24).mT,
        torch.empty(24, 3, 40).transpose(0, 1),
        torch.empty(2, 6, 24, 40)[:, ::2],
        torch.empty(1, 30).mT,
    ):
        G = draw(*out.shape)
        out = out.to(out_dtype)
        result = gram_ns(G, precision=precision, out=out)
        assert result is out
        assert relative_error(out, polynomial_polar(G, polar_express())).max() < limit, out.stride()


def test_a_chooser_is_obeyed_and_bent_to_what_the_caller_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Problem] = []
    ran: list[NSChoice] = []

    class Fixed:
        def choose(self, problem: Problem) -> NSChoice:
            asked.append(problem)
            return NSChoice("gram", (1, 2), loop=True)

    import sys

    module = sys.modules["dmuon.kernels.gram_ns"]
    real = module.run_ns
    monkeypatch.setattr(
        module, "run_ns", lambda G, choice, *rest: ran.append(choice) or real(G, choice, *rest)
    )
    previous = set_chooser(Fixed())
    try:
        gram_ns(draw(4, 20, 8))
        gram_ns(draw(8, 20), method="standard")
        gram_ns(draw(8, 20), restarts=[3])
    finally:
        set_chooser(previous)
    assert (asked[0].batch, asked[0].m, asked[0].n, asked[0].dtype) == (4, 8, 20, "fp32")
    assert ran == [
        NSChoice("gram", (1, 2), loop=True),
        NSChoice("standard", (), loop=True),
        NSChoice("gram", (3,), loop=True),
    ]


def test_the_heuristics_are_as_documented() -> None:
    def choice(m: int, n: int, dtype: str = "fp32", batch: int = 1, device: str = "cpu:x:2") -> NSChoice:
        return heuristic_choice(Problem("gram_ns", batch, m, n, dtype, device, "polar_express:5"))

    assert choice(100, 149).method == "standard"
    assert choice(100, 150).method == "gram"
    assert choice(100, 400, "fp16").restarts == (2,)
    assert choice(128, 512, "bf16").restarts == choice(128, 130, "bf16").restarts == ()
    assert choice(129, 512, "bf16").restarts == choice(128, 512, "bf16", batch=2).restarts == (1, 3)
    assert choice(511, 2048).gram.backend == "torch"
    assert choice(512, 2048).gram.config == {"block": 192, "split": "panel"}
    assert choice(1024, 4096).gram.config == {"block": 192, "split": "halves"}
    assert choice(2048, 8192).gram.config == {"block": 256, "split": "halves"}
    assert choice(1024, 4096, "bf16").gram.config == {"block": 256, "split": "panel"}
    assert choice(512, 2048, batch=3).loop and not choice(511, 2048, batch=3).loop
    assert choice(4096, 8192, device="cuda:X").gram.backend == "torch"
