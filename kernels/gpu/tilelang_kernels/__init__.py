"""Kernels written in TileLang."""
