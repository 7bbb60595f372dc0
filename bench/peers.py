"""The Newton–Schulz of other libraries, found at run time. Needs torch and the peer's own package, not dmuon."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

Orthogonalize = Callable[[Tensor], "Tensor | list[Tensor]"]
Steps = tuple[tuple[float, float, float], ...]

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KELLER_JORDAN: Steps = ((3.4445, -4.7750, 2.0315),) * 5
YOU: Steps = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class NotAvailable(Exception):
    """Why a peer cannot take part, in words."""


@dataclass(frozen=True)
class Peer:
    """Another library's Newton–Schulz.

    ``build(precision, device type)`` returns a function from fp32 (m, n) or (batch, m, n) to the orthogonalised
    matrices, or raises :exc:`NotAvailable`. ``steps`` are the polynomials that it computes.
    """

    name: str
    distribution: str
    steps: Steps
    build: Callable[[str, str], Orthogonalize]

    @property
    def version(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return "not installed by pip"


def torch_newton_schulz(G: Tensor, dtype: torch.dtype, steps: Steps = KELLER_JORDAN) -> Tensor:
    """``torch.optim.Muon``'s iteration, which torch runs in bf16 alone, on one matrix in any ``dtype``."""
    X = G.to(dtype)
    if G.size(0) > G.size(1):
        X = X.T
    X = X / X.norm().clamp(min=1e-7)
    for a, b, c in steps:
        gram = X @ X.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        X = torch.addmm(X, update, X, beta=a)
    return X.T if G.size(0) > G.size(1) else X


def check_torch_newton_schulz(device: str) -> None:
    """One step of ``torch.optim.Muon`` from zero weights is minus its update: compare, on a wide and a tall G.

    Raises:
        RuntimeError: this torch computes something else than :func:`torch_newton_schulz` in bf16.
    """
    generator = torch.Generator().manual_seed(0)
    for shape in ((48, 112), (112, 48)):
        weight = torch.nn.Parameter(torch.zeros(shape, device=device))
        weight.grad = torch.randn(shape, generator=generator).to(device)
        update = torch_newton_schulz(weight.grad, torch.bfloat16).float()
        muon = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
        muon.step()  # type: ignore[no-untyped-call]
        expected = -math.sqrt(max(1.0, shape[0] / shape[1])) * update
        # The update itself is the same to the last bit; its scale may round otherwise, in fp32.
        if not torch.allclose(weight.detach(), expected, rtol=1e-6, atol=0):
            raise RuntimeError(
                f"torch {torch.__version__}'s Muon no longer computes what peers.torch_newton_schulz does"
            )


def build_torch(precision: str, device: str) -> Orthogonalize:
    """``torch.optim.Muon``'s iteration; a batch one matrix after the other, as its optimizer does."""
    dtype = DTYPES[precision]

    def run(G: Tensor) -> Tensor | list[Tensor]:
        if G.ndim == 2:
            return torch_newton_schulz(G, dtype)
        return [torch_newton_schulz(matrix, dtype) for matrix in G]

    return run


def _gram_newton_schulz(precision: str, device: str) -> Orthogonalize:
    if precision != "fp16":
        raise NotAvailable("computes in fp16 alone")
    from gram_newton_schulz import GramNewtonSchulz

    # [3] is what its own search of restarts finds for these coefficients.
    run: Orthogonalize = GramNewtonSchulz(
        ns_use_kernels=device == "cuda",
        ns_coefficients=[list(step) for step in KELLER_JORDAN],
        gram_newton_schulz_reset_iterations=[3],
    )
    return run


def _emerging_optimizers(precision: str, device: str) -> Orthogonalize:
    if precision not in ("fp32", "bf16"):
        raise NotAvailable("computes in fp32 or bf16")
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    # "medium" is how its users ask for bf16.
    matmul_precision = "medium" if precision == "bf16" else "highest"

    def run(G: Tensor) -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(matmul_precision)
        try:
            syrk = device == "cuda" and precision == "bf16" and G.ndim == 2
            result: Tensor = newton_schulz(G, len(KELLER_JORDAN), "simple", use_syrk=syrk)
            return result
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def _dion(precision: str, device: str) -> Orthogonalize:
    if precision != "bf16":
        raise NotAvailable("computes in bf16 alone")
    from dion import newton_schulz_triton as dion

    run: Orthogonalize = dion.newton_schulz_triton if device == "cuda" else dion.zeropower_via_newtonschulz5
    return run


PEERS = {
    peer.name: peer
    for peer in (
        Peer("gram-newton-schulz", "gram-newton-schulz", KELLER_JORDAN, _gram_newton_schulz),
        Peer("emerging-optimizers", "emerging-optimizers", KELLER_JORDAN, _emerging_optimizers),
        Peer("dion", "dion", YOU, _dion),
    )
}


def build_peer(name: str, precision: str, device: str) -> Orthogonalize:
    """The peer's function, fresh: nothing that it compiled for another shape is in it.

    Raises:
        NotAvailable: it is not installed, does not import, or does not compute in ``precision``.
    """
    torch.compiler.reset()
    try:
        return PEERS[name].build(precision, device)
    except ModuleNotFoundError as error:
        raise NotAvailable(f"not installed: {error}") from error
    except ImportError as error:
        raise NotAvailable(f"does not import: {error}") from error
