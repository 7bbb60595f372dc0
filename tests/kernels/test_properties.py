"""gram_ns on whatever shapes, strides and settings hypothesis thinks of, against an SVD."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from spectra import DTYPES, expected
from torch import Tensor

from dmuon.kernels import default_restarts, gram_ns, polar_express
from dmuon.kernels.choose import TINY, NSChoice, ProductChoice
from dmuon.kernels.reference import relative_error
from dmuon.kernels.run import run_ns

LIMIT = {"fp64": 1e-13, "fp32": 1e-5, "fp16": 0.04, "bf16": 0.25}
"""For singular values within a factor of two: whatever mixes up elements or buffers shows at once."""

sizes = st.integers(1, 20)


def well_conditioned(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(*shape, dtype=torch.float64, generator=generator)
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    S = 0.5 + 0.5 * torch.rand(*U.shape[:-2], 1, U.shape[-1], dtype=torch.float64, generator=generator)
    return (U * S) @ Vh


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """A tensor of 2 to 5 dimensions in any float dtype, as a view of some other layout."""
    rows, columns = draw(sizes), draw(sizes)
    shape = [*draw(st.lists(st.integers(1, 3), max_size=3)), rows, columns]
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(1, 2)) for _ in shape]
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    stored = torch.zeros([shape[k] * gaps[k] for k in order], dtype=dtype)
    view = stored.permute([order.index(k) for k in range(len(shape))])
    view = view[tuple(slice(None, None, gap) for gap in gaps)]
    return view.copy_(well_conditioned(*shape, seed=draw(st.integers(0, 2**16))))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(G=matrices(), precision=st.sampled_from(list(DTYPES)), in_place=st.booleans())
def test_any_layout_gives_the_polynomial(G: Tensor, precision: str, in_place: bool) -> None:
    before = G.clone()
    exact = expected(G, polar_express().steps)
    out = G if in_place else None
    result = gram_ns(G, precision=precision, out=out)
    limit = max(LIMIT[precision], 4 * torch.finfo(G.dtype).eps)
    assert relative_error(result, exact).max() < limit
    assert result is G if in_place else torch.equal(G, before)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 40),
    wider=st.floats(1.6, 4),
    tall=st.booleans(),
    block=st.integers(1, 50),
    split=st.sampled_from(["panel", "halves"]),
    method=st.sampled_from(["gram", "standard"]),
    batch=st.integers(0, 5),
    loop=st.booleans(),
    precision=st.sampled_from(list(DTYPES)),
    out_dtype=st.sampled_from(list(DTYPES.values())),
    extra=st.sets(st.integers(1, 4)),
)
def test_any_choice_gives_the_polynomial(
    m: int,
    wider: float,
    tall: bool,
    block: int,
    split: str,
    method: str,
    batch: int,
    loop: bool,
    precision: str,
    out_dtype: torch.dtype,
    extra: set[int],
) -> None:
    """Restarts beyond the default ones too: each changes which buffer the result ends in."""
    assume(m >= TINY or precision in ("fp64", "fp32"))  # what rounds so coarsely leaves to the standard form
    shape = (*([batch] if batch else []), m, int(m * wider) + 1)
    G = well_conditioned(*shape, seed=m)
    G = G.mT.contiguous() if tall else G
    product = ProductChoice("blocked", {"block": block, "split": split})
    restarts = tuple(sorted({*default_restarts(polar_express(), DTYPES[precision]), *extra}))
    choice = NSChoice(method, restarts if method == "gram" else (), product, product, loop=loop)
    out = torch.empty(G.shape, dtype=out_dtype)
    run_ns(G, choice, polar_express(), DTYPES[precision], out)
    limit = max(LIMIT[precision], 4 * torch.finfo(out_dtype).eps)
    assert relative_error(out, expected(G, polar_express().steps)).max() < limit
