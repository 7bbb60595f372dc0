"""The same for tensor-parallel parameters."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.tensor import DTensor

from dmuon.ownership.absent import Absent


class AbsentDTensor(Absent, DTensor):
    """A DTensor for as long as it is absent, and what ``detach`` gives of it."""

    def to_local(self, **_: Any) -> NoReturn:
        """Raise: nothing is here, nor can it be written: torch's broadcast_from_rank0 would."""
        raise RuntimeError(
            f"{self._absence}. To load whole weights, have them on every rank and leave out broadcast_from_rank0"
        )

    def full_tensor(self, **_: Any) -> NoReturn:
        """Raise: nothing is here."""
        raise RuntimeError(self._absence)

    def redistribute(self, *args: Any, **_: Any) -> NoReturn:
        """Raise: nothing is here."""
        raise RuntimeError(self._absence)


AbsentDTensor._present, AbsentDTensor._alias = DTensor, AbsentDTensor
