"""Newton–Schulz kernels: the mathematics, the three products and their backends."""

# Imported here, so that `import dmuon.kernels.gram_ns as gram_ns` too gives the function and not its module.
from dmuon.kernels.gram_ns import gram_ns

from dmuon.kernels.coefficients import CoefficientSet, keller_jordan, polar_express, you  # isort: skip
from dmuon.kernels.products import apply, gram, symmetric_product
from dmuon.kernels.reference import exact_polar, polynomial_polar
from dmuon.kernels.restarts import default_restarts, search_restarts

__all__ = [
    "CoefficientSet",
    "apply",
    "default_restarts",
    "exact_polar",
    "gram",
    "gram_ns",
    "keller_jordan",
    "polar_express",
    "polynomial_polar",
    "search_restarts",
    "symmetric_product",
    "you",
]
