"""Newton–Schulz kernels: the mathematics, the three products and their backends."""
