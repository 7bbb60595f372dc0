"""GPU kernels: what they are compiled for, how they are built, cached and launched, and their sources by DSL.

Nothing here imports a DSL; the modules named ``*_kernel.py`` do, and only a compiler process loads those.
"""
