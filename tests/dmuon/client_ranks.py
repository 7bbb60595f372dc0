"""accelerate in the processes of own_processes."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist


def pretend_launched() -> None:
    """Set what accelerate takes as a sign of several processes. They have their group already."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def shard_on_cpu(settings: dict[str, Any]) -> None:
    """Let every Accelerator of this process shard by a plugin with ``settings``; on a CPU it would replicate."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = Accelerator(cpu=True).state
    PartialState().distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**settings)
