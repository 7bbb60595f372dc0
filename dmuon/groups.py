"""Parameter groups: splitting each into a Muon half and an AdamW half."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dmuon.options import OPTIONS, check_keys, check_options
from dmuon.ownership.absent import is_owned
from dmuon.policy import Matrix, MatrixPolicy, reasons_of
from dmuon.shards import is_shared, local
from dmuon.slots import slots_of_model, slots_of_named

Matrices = tuple[Matrix, ...]


def route_model(
    model: nn.Module, policy: MatrixPolicy
) -> tuple[list[tuple[str, Tensor]], dict[Tensor, Matrices]]:
    """The trainable parameters of ``model`` by name, and the matrices of all.

    Raises:
        ValueError: none is trainable, or none that is has a matrix.
    """
    parameters = dict(model.named_parameters())
    slots = slots_of_model(model)
    # Frozen ones are routed too, for when they are thawed and added.
    routings = policy.route_slots([replace(slot, trainable=True) for slot in slots])
    trained = [routing for slot, routing in zip(slots, routings, strict=True) if slot.trainable]
    if not trained:
        why = "they are all frozen (requires_grad is False)" if slots else "it has none at all"
        raise ValueError(f"the model has no parameter to train: {why}")
    if not any(routing.matrices for routing in trained):
        raise ValueError(f"the model has no trainable matrix for Muon; it has {reasons_of(trained)}")
    matrices: dict[Tensor, Matrices] = {parameters[routing.name]: routing.matrices for routing in routings}
    return [(routing.name, parameters[routing.name]) for routing in trained], matrices


def split_group(
    group: Mapping[str, Any],
    defaults: Mapping[str, Any],
    routed: Mapping[Tensor, Matrices],
    policy: MatrixPolicy,
) -> tuple[list[dict[str, Any]], dict[Tensor, Matrices]]:
    """One user's group as torch groups of one algorithm each, Muon first, and the matrices of each parameter.

    Args:
        group: ``params`` (tensors or (name, tensor) pairs) and options; ``algorithm`` forces one for all.
        defaults: the optimizer's, for options that ``group`` leaves out.
        routed: parameters whose matrices are known already.
        policy: routes the rest, by name and shape.

    Raises:
        TypeError: ``params`` is a set, or holds something that is no tensor.
        ValueError: an option or a parameter that cannot be optimised; the message names it.
    """
    algorithm = group.get("algorithm")
    if algorithm not in (None, *OPTIONS):
        raise ValueError(f"algorithm must be one of {', '.join(OPTIONS)}, got {algorithm!r}")
    known = {"params", "param_names", "algorithm", *defaults, *OPTIONS["muon"], *OPTIONS["adamw"]}
    check_keys(group.keys() - known, sorted(known))
    options = check_options(group)
    pairs = _named(group)
    matrices: dict[Tensor, Matrices] = {}
    for name, tensor in pairs:
        label = repr(name) if name else f"of shape {tuple(tensor.shape)}"
        _check_tensor(tensor, label)
        if tensor in matrices:
            raise ValueError(f"parameter {label} is given twice in one group")
        matrices[tensor] = _matrices(name, tensor, label, algorithm, routed, policy)

    halves = {
        "muon": [pair for pair in pairs if matrices[pair[1]]],
        "adamw": [pair for pair in pairs if not matrices[pair[1]]],
    }
    extras = {key: value for key, value in group.items() if key not in known}
    chosen = {
        "muon": {key: options.get(key, defaults[key]) for key in OPTIONS["muon"]},
        "adamw": _adamw_options(options, defaults, alone=not halves["muon"]),
    }
    chosen["adamw"].setdefault("fused", all(_fusible(tensor) for _, tensor in halves["adamw"]))
    groups = []
    if algorithm and not pairs and "param_names" in group:
        # What this rank owns may be nothing; the group is there all the same, as on the other ranks.
        groups.append(
            {**extras, "params": [], "param_names": [], "algorithm": algorithm, **chosen[algorithm]}
        )
    for half, members in halves.items():
        params = [tensor if name is None else (name, tensor) for name, tensor in members]
        if params:
            groups.append({**extras, "params": params, "algorithm": half, **chosen[half]})
    return groups, matrices


def _named(group: Mapping[str, Any]) -> list[tuple[str | None, Tensor]]:
    if "params" not in group:
        raise ValueError(f"a parameter group needs 'params', got {sorted(group)}")
    params = group["params"]
    if isinstance(params, (set, frozenset)):
        raise TypeError("params must be an ordered collection: a set gives another order in every run")
    if not isinstance(params, Iterable):
        raise TypeError(f"params must be tensors or (name, tensor) pairs, got {type(params).__name__}")
    params = [params] if isinstance(params, Tensor) else list(params)
    if "param_names" in group and not any(isinstance(entry, tuple) for entry in params):
        if len(group["param_names"]) != len(params):
            raise ValueError(
                f"the group has {len(params)} params but {len(group['param_names'])} param_names"
            )
        params = list(zip(group["param_names"], params, strict=True))
    pairs = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    for _, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"params must hold tensors or (name, tensor) pairs, got {torch.typename(tensor)}")
    if len({name is None for name, _ in pairs}) > 1:
        raise ValueError("params must all be named or all be without a name")
    return pairs


def _check_tensor(tensor: Tensor, label: str) -> None:
    if tensor.is_complex():
        raise ValueError(f"parameter {label} is complex; give Muon its real view (torch.view_as_real)")
    if tensor.is_meta:
        raise ValueError(f"parameter {label} is on the meta device; call model.to_empty(device=...) first")
    if not (tensor.is_leaf or tensor.retains_grad):
        raise ValueError(f"parameter {label} is not a leaf: optimise the tensors that it is computed from")


def _matrices(
    name: str | None,
    tensor: Tensor,
    label: str,
    algorithm: str | None,
    routed: Mapping[Tensor, Matrices],
    policy: MatrixPolicy,
) -> Matrices:
    if algorithm == "adamw":
        return ()
    if tensor in routed and (routed[tensor] or algorithm is None):
        matrices = routed[tensor]
    else:
        if algorithm == "muon":
            policy = replace(policy, include=[lambda slot: True], exclude=())
        # A caller who lists a frozen parameter means to thaw it.
        slot = replace(slots_of_named([(name or "", tensor)])[0], trainable=True)
        routing = policy.route(slot)
        if algorithm == "muon" and not routing.matrices:
            raise ValueError(f"algorithm 'muon' needs matrices, but {label} is none: {routing.reason}")
        matrices = routing.matrices
    if matrices and is_shared(tensor):
        if is_owned(tensor):
            return matrices
        raise ValueError(
            f"parameter {label} is a DTensor, but Muon needs whole matrices: call dmuon.own before it is sharded, with "
            "all trainable that ever will be (where it is tensor-parallel, after parallelize_module), and give the "
            "optimizer the model; or give it to AdamW by algorithm='adamw'"
        )
    for matrix in matrices:
        matrix.view(tensor)
    return matrices


def _adamw_options(options: Mapping[str, Any], defaults: Mapping[str, Any], alone: bool) -> dict[str, Any]:
    def first(*candidates: Any) -> Any:
        return next(value for value in candidates if value is not None)

    # In a mixed group lr is Muon's, whose scale is another; a group without a matrix can only mean AdamW's.
    lr = options.get("lr") if alone else None
    chosen = {
        "lr": first(options.get("adamw_lr"), lr, defaults["adamw_lr"]),
        "weight_decay": first(
            options.get("adamw_weight_decay"),
            options.get("weight_decay"),
            defaults["adamw_weight_decay"],
            defaults["weight_decay"],
        ),
        "betas": first(options.get("adamw_betas"), options.get("betas"), defaults["adamw_betas"]),
        "eps": first(options.get("adamw_eps"), options.get("eps"), defaults["adamw_eps"]),
        "maximize": options.get("maximize", defaults["maximize"]),
    }
    return {**chosen, "fused": options["fused"]} if "fused" in options else chosen


def _fusible(tensor: Tensor) -> bool:
    # torch's fused kernels walk the memory of a tensor as if it had no gaps.
    tensor = local(tensor)
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return dense and tensor.device.type in ("cpu", "cuda") and tensor.is_floating_point()
