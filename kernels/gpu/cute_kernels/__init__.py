"""Kernels written in CuTe DSL."""
