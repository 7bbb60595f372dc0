"""FSDP2 as Hugging Face accelerate configures it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from dmuon.ownership.owned import Owned, own
from dmuon.planner import Plan
from dmuon.policy import MatrixPolicy


def shard(
    model: nn.Module,
    accelerator: Accelerator,
    *,
    policy: MatrixPolicy | None = None,
    plan: Plan | Mapping[str, int | tuple[int, ...]] | None = None,
) -> Owned:
    """Own the matrices of ``model`` and shard the rest by the accelerator's FSDP2 plugin. Collective.

    ``Accelerator.prepare`` would shard the matrices too; a model that is sharded already it leaves as it is::

        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        dmuon.integrations.accelerate.shard(model, accelerator)
        optimizer = dmuon.Muon(model)
        model, optimizer = accelerator.prepare(model, optimizer)

    Then clip with :func:`dmuon.clip_grad_norm_`, which ``Accelerator.clip_grad_norm_`` cannot replace: it sees no
    gradients of owned parameters. Drop gradients with ``optimizer.zero_grad()``.

    Args:
        model: whole, equal on all ranks; it is moved to the accelerator's device. In mixed precision its trainable
            parameters become fp32, as ``prepare`` has it.
        accelerator: its plugin says what is a block, whether to reshard after the forward, and in which precision
            to compute and to reduce; its parallelism the mesh, of one dimension or, with replicas, of two.
        policy: which parameters are matrices, as for :func:`dmuon.own`.
        plan: who owns what, as for :func:`dmuon.own`.

    Raises:
        ValueError: the accelerator does not use FSDP2, or uses something of it that owned parameters cannot have; or
            as :func:`dmuon.own`.
    """
    _check(accelerator)
    plugin = accelerator.state.fsdp_plugin
    model.to(accelerator.device)
    if accelerator.mixed_precision != "no":
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    plugin.set_auto_wrap_policy(model)
    precision, mesh = plugin.mixed_precision_policy or MixedPrecisionPolicy(), _mesh(accelerator)
    owned = own(
        model,
        mesh,
        policy=policy,
        plan=plan,
        reshard_after_forward=plugin.reshard_after_forward,
        compute_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
    )
    # From the inside out, as fully_shard wants it.
    for module in (*reversed(_blocks(model, plugin.auto_wrap_policy)), model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=precision,
            ignored_params=owned.params,
        )
    return owned


def _check(accelerator: Accelerator) -> None:
    if not accelerator.is_fsdp2:
        raise ValueError(
            "the accelerator does not shard by FSDP2: give it "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), and more than one process"
        )
    plugin = accelerator.state.fsdp_plugin
    refused = {
        "state_dict_type": ("FULL" in str(plugin.state_dict_type), "'SHARDED_STATE_DICT'"),
        "cpu_offload": (isinstance(plugin.cpu_offload, CPUOffloadPolicy), "False"),
        "cpu_ram_efficient_loading": (plugin.cpu_ram_efficient_loading, "False"),
        "activation_checkpointing": (
            plugin.activation_checkpointing,
            "False, and checkpoint the model's own way",
        ),
        "ignored_modules": (plugin.ignored_modules is not None, "None"),
    }
    for setting, (found, wanted) in refused.items():
        if found:
            raise ValueError(
                f"owned parameters cannot have FSDP's {setting}={getattr(plugin, setting)}: set it to {wanted}"
            )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision must be 'no' or 'bf16', got {accelerator.mixed_precision!r}: the GradScaler "
            "that accelerate makes cannot scale gradients that only their owner has"
        )


def _blocks(model: nn.Module, policy: Callable[..., bool] | None) -> list[nn.Module]:
    if policy is None:
        return []
    modules = list(model.modules())[1:]
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in modules]
    return [
        module
        for module, size in zip(modules, sizes, strict=True)
        if policy(module=module, recurse=False, nonwrapped_numel=size)
    ]


def _mesh(accelerator: Accelerator) -> DeviceMesh:
    mesh: DeviceMesh | None = getattr(accelerator, "torch_device_mesh", None)
    if mesh is None:
        return init_device_mesh(accelerator.device.type, (torch.distributed.get_world_size(),))
    return mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
