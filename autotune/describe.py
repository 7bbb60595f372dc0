"""Choices in words, for tables and logs."""

from __future__ import annotations

from dmuon.kernels.choose import NSChoice, ProductChoice


def choice_text(choice: NSChoice) -> str:
    """``"gram, restart 2 · blocked 256 halves"``: the form, its restarts, and what computes the products.

    Restarts are 0-based iterations. Where products differ, each is named; plain torch products are not.
    """
    form = choice.method
    if choice.restarts:
        form += ", restart " + "+".join(map(str, choice.restarts))
    if choice.loop:
        form += ", one by one"
    gram, square, apply = map(_product_text, (choice.gram, choice.symmetric_product, choice.apply))
    if gram == square:
        parts = [gram] if apply in (gram, "torch") else [gram, f"apply {apply}"]
    else:
        parts = [f"gram {gram}", f"square {square}"] + ([f"apply {apply}"] if apply != "torch" else [])
    return " · ".join([form, *parts])


def _product_text(product: ProductChoice) -> str:
    values = (f"{value:g}" if isinstance(value, float) else str(value) for value in product.config.values())
    return " ".join([product.backend, *values])
