"""What one launch did, counted while it ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """Counts of one launch.

    Args:
        executed: warp-level executions by opcode (``"mma.sync.aligned.m16n8k16..."``), guards that are false
            included.
        mma: matrix instructions issued, by opcode: one for each warp (``mma``) or warpgroup (``wgmma``).
        flops: multiplications and additions of matrix instructions.
        loaded: bytes read of each registered tensor, in the order of :meth:`ptx.Memory.of`, repeated reads counted
            again; TMA and asynchronous copies included.
        stored: bytes written of each registered tensor.
        tma_bytes: bytes that tensor and bulk copies moved, zeros for what is out of bounds included.
        barriers: arrivals of warps at block barriers.
        blocks: blocks that ran.
    """

    executed: Counter[str] = field(default_factory=Counter)
    mma: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    loaded: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    tma_bytes: int = 0
    barriers: int = 0
    blocks: int = 0

    def count(self, prefix: str) -> int:
        """Executions of all opcodes that begin with ``prefix``, such as ``"ld.global"``."""
        return sum(
            n for opcode, n in self.executed.items() if opcode == prefix or opcode.startswith(f"{prefix}.")
        )

    @property
    def instructions(self) -> int:
        """Warp-level instructions executed."""
        return sum(self.executed.values())
