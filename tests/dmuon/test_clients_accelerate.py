"""accelerate's FSDP2 with owned matrices: its own loop equals one process, in fp64, and resumes."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from client_ranks import pretend_launched, shard_on_cpu
from own_models import HOW, batch, build, difference, loss_of
from own_processes import outcome, run_ranks

import dmuon

pytest.importorskip("accelerate", reason="needs pip install dmuon[clients]")


def accelerator_on_cpu(**options: Any) -> Any:
    """An Accelerator that shards; two micro-batches a step."""
    from accelerate import Accelerator

    pretend_launched()
    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    shard_on_cpu({"fsdp_version": 2, "cpu_ram_efficient_loading": False, **wrapped, **options})
    return Accelerator(cpu=True, gradient_accumulation_steps=2)


def train(reshard: bool, replicas: int = 1) -> dict[str, float]:
    """Four micro-batches, two a step, beside one process; then the last step again, from a checkpoint."""
    from accelerate import ParallelismConfig
    from torch.distributed.fsdp import FSDPModule

    from dmuon.integrations.accelerate import shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    accelerator = accelerator_on_cpu(reshard_after_forward=reshard)
    if replicas > 1:
        parallelism = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=ranks // replicas)
        accelerator.state.parallelism_config = parallelism
        accelerator.state.device_mesh = parallelism.build_device_mesh("cpu")
    model = build()
    reference = copy.deepcopy(model)
    owned = shard(model, accelerator)
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert sharded == ["", "blocks.0", "blocks.1", "blocks.2"]
    model, optimizer = accelerator.prepare(model, dmuon.Muon(model, **HOW))
    alone = dmuon.Muon(reference, **HOW)

    def run(micro_batches: range) -> None:
        for micro in micro_batches:
            with accelerator.accumulate(model):
                tokens, targets = batch(micro, ranks)
                accelerator.backward(loss_of(model(tokens[rank : rank + 1]), targets[rank : rank + 1]))
                if accelerator.sync_gradients:
                    dmuon.clip_grad_norm_(model, 0.1)
                optimizer.step()
                optimizer.zero_grad()

    def run_alone(micro_batches: range) -> None:
        for micro in micro_batches:
            tokens, targets = batch(micro, ranks)
            (loss_of(reference(tokens), targets) / 2).backward()
            if micro % 2:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
                alone.step()
                alone.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        folder = [folder]
        dist.broadcast_object_list(folder, 0)
        run(range(2))
        accelerator.save_state(folder[0])
        run(range(2, 4))
        run_alone(range(4))
        found = {"trained": difference(model, owned, reference)}
        accelerator.load_state(folder[0])
        run(range(2, 4))
        found["resumed"] = difference(model, owned, reference)
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("ranks", "reshard", "replicas"),
    [
        (2, True, 1),
        pytest.param(2, False, 1, marks=pytest.mark.slow),
        pytest.param(4, True, 2, marks=pytest.mark.slow),
    ],
)
def test_a_loop_of_accelerate_equals_one_process(ranks: int, reshard: bool, replicas: int) -> None:
    for found in run_ranks(ranks, train, reshard, replicas, timeout=120):
        assert max(found.values()) < 1e-12, found


def refuse() -> list[str]:
    from accelerate import Accelerator

    from dmuon.integrations.accelerate import shard

    plain = Accelerator(cpu=True)
    found = [outcome(lambda: shard(build(), plain))]
    for options in (
        {"state_dict_type": "FULL_STATE_DICT"},
        {"cpu_offload": True},
        {"activation_checkpointing": True},
    ):
        accelerator = accelerator_on_cpu(**options)
        found.append(outcome(lambda: shard(build(), accelerator)))  # noqa: B023 - called at once
    return found


def test_what_owned_parameters_cannot_have_is_refused() -> None:
    for found in run_ranks(2, refuse, timeout=120):
        wanted = ["FSDP2", "state_dict_type", "cpu_offload", "activation_checkpointing"]
        assert all(word in text for word, text in zip(wanted, found, strict=True)), found
