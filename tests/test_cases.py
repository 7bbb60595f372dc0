"""Faults that users met in other systems: each has a test here that is marked with its row, as ``case(row="N1")``."""

from __future__ import annotations

import re
from pathlib import Path

CASES = {
    "N1": "gradients of any scale give the same update",
    "N2": "a zero matrix, NaN and Inf",
    "N3": "hard spectra: low rank, fast decay, Hilbert",
    "N4": "one huge gradient beside normal ones under a global clip",
    "N5": "a step skipped by a GradScaler, then a normal one",
    "N6": "square, tall, wide, one row, one column, odd sizes",
    "N7": "learning rate 0; weight decay exactly as its formula",
    "N8": "the learning rate is adjusted to the shape once",
    "N9": "the momentum is never used as scratch memory",
    "N10": "gradients of any memory layout",
    "P1": "every matrix is orthogonalised exactly once a step",
    "P2": "parameters on the meta device, placeholders and shards go by their logical shape",
    "P3": "each group keeps its own options",
    "P4": "a stack of experts equals a loop over them",
    "P5": "a fused weight equals its parts; sizes that do not add up are refused",
    "P6": "LoRA factors are no matrices unless named",
    "P7": "an optimizer that was built before the model was moved, owned or wrapped says so",
    "R1": "an expert that gets tokens on some ranks only",
    "R2": "a parameter that is unused on one rank, or on all",
    "R3": "fewer rows than ranks",
    "R4": "replicas: what crosses is counted, and the least possible",
    "R5": "a fused weight is split by its whole shape, not by a rank's part of it",
    "R6": "buffers live as long as their transfers; all ranks see the owner's weights after a step",
    "R7": "every process group is connected at construction, in one order",
    "R8": "ranks that know different things make one plan or none",
    "R9": "transfers that overlap with everything else change no bit",
    "R10": "a block that is called twice in one forward",
    "R11": "replicas, two micro-batches, synchronisation on the second alone",
    "R12": "weights are published in the compute dtype",
    "R13": "a slow owner does not hold up the publication of layers that are ready",
    "R14": "tensor-parallel matrices are orthogonalised whole, whatever their layout; what all ranks have stays equal",
    "A1": "one large batch or several accumulated ones, with and without synchronisation",
    "A2": "one gradient norm over owned and sharded parameters",
    "A3": "a checkpoint is resumed on other ranks, meshes and plans, and by a single process",
    "A4": "an expert that never saw a gradient is in the checkpoint, with zeros for its state",
    "A5": "names that are missing or too many in a state that is loaded",
    "A6": "all groups of a saved optimizer are restored, frozen ones too",
    "A7": "a crash while a checkpoint is saved over another one",
    "A8": "buffers and tied aliases are in a saved state, whole, for plain PyTorch",
    "A9": "momenta keep their dtype through a state dict",
    "T1": "many processes write to one store",
    "T2": "what another GPU, driver, library or kernel source measured is not used",
    "T3": "a kernel compiler that raises or aborts",
    "T4": "a configuration that is fast and wrong",
    "T5": "shapes of unequal cost are planned by what their steps take",
    "T6": "a learning rate changed after the first step is the one used",
}


def test_every_case_is_tested_and_every_mark_is_a_case() -> None:
    """``pytest -m 'case(row="N1")'`` runs the tests of a row."""
    sources = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("test_*.py")]
    marked = {row for source in sources for row in re.findall(r'pytest\.mark\.case\(row="(\w+)"\)', source)}
    assert marked == set(CASES)
