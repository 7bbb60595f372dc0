"""Give every matrix of a model one owner: the entry point, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon.batching import Update
from dmuon.matrix import Matrix
from dmuon.matrix_step import MatrixStep
from dmuon.names import plural
from dmuon.ownership.buckets import Bucket, blocks_of
from dmuon.ownership.checks import check_mesh, check_model, check_plain
from dmuon.ownership.consistency import compare, debugging
from dmuon.ownership.control import Control
from dmuon.ownership.meta import leave_meta, require_values
from dmuon.ownership.planning import PathLike, given_fact, plan_for, plan_together
from dmuon.ownership.presence import Presence, refuse_other_optimizers
from dmuon.ownership.probe import known_network, make_routes
from dmuon.ownership.publisher import Publisher
from dmuon.ownership.reducer import Reducer
from dmuon.ownership.registry import ATTRIBUTE
from dmuon.ownership.routes import Routes
from dmuon.ownership.runtime import Runtime
from dmuon.ownership.sharded import settle
from dmuon.ownership.state_dicts import StateDicts
from dmuon.ownership.tensor_parallel import (
    TensorParallel,
    grids_of,
    is_distributed,
    make_tensor_parallel,
    tensor_mesh_of,
)
from dmuon.ownership.tensor_step import TensorStep, check_group
from dmuon.planner import Owners, Plan
from dmuon.policy import MatrixPolicy, Routing, reasons_of

Run = Callable[[Sequence[Update]], Iterable[Tensor]]
"""Makes updates, and yields each weight as soon as all of it has moved."""


def own(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    policy: MatrixPolicy | None = None,
    plan: Plan | Owners | PathLike | None = None,
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    buckets: Sequence[nn.Module] | None = None,
    timeout: timedelta | None = None,
) -> Owned:
    """Give every matrix of ``model`` one owner among the ranks of ``mesh``. Collective; call it before FSDP.

    The owner keeps the matrix, its momentum and its update, whole; the others see a published copy while a block
    runs. The rest of the model is FSDP2's, to which ``ignored_params`` names what it must leave alone::

        owned = dmuon.own(model, mesh)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, ignored_params=owned.params)
        fully_shard(model, mesh=mesh, ignored_params=owned.params)
        optimizer = dmuon.Muon(model)

    All ranks have to run the same blocks in the same order, forwards and backwards, as FSDP wants it, too.
    Parameters within a block may lack a gradient, on some ranks or on all.

    Parameters may be DTensors over one tensor-parallel axis already, as ``parallelize_module`` leaves them, beside
    ``mesh``. Then each of its ranks keeps its shard of an owned matrix and of the momentum, and the step brings the
    shards together on one of them.

    Args:
        model: on a device, not wrapped by FSDP yet. What the owner holds counts; the other ranks' weights are dropped.
            Or on the meta device: then :func:`~dmuon.ownership.materialize.materialize` or a checkpoint gives it
            values.
        mesh: over all processes, of one dimension, or of two: (replicate, shard), as FSDP2's hybrid sharding has it.
            Then gradients are added up inside a shard group before they cross, and weights cross once. Beside a
            tensor-parallel axis, without that: ``mesh["shard"]`` or ``mesh["replicate", "shard"]``.
        policy: which parameters are matrices; None for :class:`~dmuon.policy.MatrixPolicy`'s defaults.
        plan: who owns what, as a :class:`~dmuon.planner.Plan` or as name → rank; None for the plan of
            :func:`dmuon.planner.make_plan`, by what is known of this device's speed. A path names a file for that
            plan: made the first time, taken from there as long as ranks and parameters stay, else made anew.
        reshard_after_forward: free published weights after the forward and publish them again for the backward
            (ZeRO-3), or keep them until then (ZeRO-2).
        compute_dtype: of published weights, as FSDP's ``param_dtype``; None for the parameters' own. The owner's
            masters keep the parameters' dtype.
        reduce_dtype: of gradients on the wire; None for the gradients' own. They are summed in fp32 or wider.
        buckets: the modules whose matrices travel together; None for the elements of the outermost
            ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential`` around each matrix. What is in none of them
            travels with the model itself.
        timeout: after which a rank that waits in vain for others in dmuon's own process groups raises; None for
            torch's default (minutes), whatever ``init_process_group`` was given.

    Raises:
        ValueError: the mesh does not fit the process group or the tensor-parallel mesh, the policy finds no matrix or
            one that is neither a plain ``nn.Parameter`` nor a DTensor of Shard or Replicate, the plan is for other
            parameters, ``buckets`` holds a module of another model, the model is owned or wrapped already, has
            gradients, is tensor-parallel and on the meta device or has matrices with gradient hooks or that a graph
            or a view refers to, or is not on the mesh's device, or ``DMUON_DEBUG`` is neither 0 nor 1. It is
            raised on the rank that finds it; the others raise a RuntimeError that quotes it.
        RuntimeError: the ranks disagree on names, shapes, dtypes, options or the plan.
    """
    distributed = is_distributed(model)
    try:
        control = Control(range(dist.get_world_size()), timeout)
    except RuntimeError:
        # The others have not come; if that is due to this rank, its own error says why.
        check_mesh(mesh, alone=not distributed)
        raise
    policy = policy or MatrixPolicy()
    routings: list[Routing] = []
    tensor_mesh: DeviceMesh | None = None
    facts: dict[str, Any] | Exception
    try:
        check_mesh(mesh, alone=not distributed)
        check_model(model, mesh, buckets)
        tensor_mesh = tensor_mesh_of(model, mesh) if distributed else None
        every = policy.route_model(model)
        routings = [routing for routing in every if routing.algorithm == "muon"]
        if not routings:
            raise ValueError(
                "the policy finds no trainable matrix in the model: there is nothing to own; "
                f"it has {reasons_of(every) or 'no parameter at all'}"
            )
        check_plain(model, routings)
        blocks = blocks_of(model, [routing.name for routing in routings], buckets)
        debug = debugging()
        options = (reshard_after_forward, compute_dtype, reduce_dtype, debug)
        facts = {
            "parameters": [_fact(model, routing) for routing in routings],
            "tensor parallelism": tensor_mesh is not None,
            "buckets": list(blocks.items()),
            "options (reshard_after_forward, compute_dtype, reduce_dtype, DMUON_DEBUG)": options,
            "plan": given_fact(plan, list(blocks), mesh.size()),
        }
    except Exception as error:
        facts = error
    control.agree(facts)
    grids = None if tensor_mesh is None else grids_of(control, mesh, tensor_mesh)
    sharing = 1 if tensor_mesh is None else tensor_mesh.size()
    chosen = plan_together(
        control, dist.get_rank() == 0, lambda: plan_for(model, mesh, routings, blocks, plan, sharing)
    )
    routes = make_routes(mesh, known_network(mesh, control), timeout=timeout, grids=grids)
    tensor_parallel = None
    if tensor_mesh is not None and grids is not None:
        tensor_parallel = make_tensor_parallel(tensor_mesh, grids, routes.statistics, timeout)
    dtypes = {routing.name: model.get_parameter(routing.name).dtype for routing in routings}
    if len(set(dtypes.values())) > 1 and compute_dtype is None:
        names = ", ".join(sorted(map(str, set(dtypes.values()))))
        raise ValueError(
            f"the matrices have several dtypes ({names}): say in which to publish by compute_dtype"
        )
    dtype = compute_dtype or next(iter(dtypes.values()))
    unset = {name for name in blocks if model.get_parameter(name).is_meta}
    for name in unset:
        leave_meta(model.get_parameter(name), mesh.device_type)
    ranks = mesh.mesh.flatten().tolist()
    made = [
        Bucket(
            block,
            model.get_submodule(block),
            {name: model.get_parameter(name) for name in blocks if blocks[name] == block},
            {name: ranks[owner] for name, (owner,) in chosen.owners.items()},
            routes.order,
            routes.rank,
            dtype,
            poison=debug,
        )
        # The model's own comes first, as its forward does: its gradients are complete last.
        for block in sorted(dict.fromkeys(blocks.values()), key=bool)
    ]
    return Owned(
        model,
        made,
        {routing.name: routing.matrices for routing in routings},
        chosen,
        policy,
        routes,
        tensor_parallel,
        control,
        reshard=reshard_after_forward,
        reduce_dtype=reduce_dtype or dtype,
        dtypes=dtypes,
        unset=unset,
        debug=debug,
    )


class Owned:
    """The ownership of one model; made by :func:`own`.

    Attributes:
        params: the parameters that FSDP must ignore.
        parameters: name → the same, in the order of the model.
        masters: name → weight, of what this rank owns; a DTensor where the parameter is one. The optimizer updates
            these.
        masters_of: the same by the model's parameter.
        matrices: name → what Muon orthogonalises in it, of all owned parameters.
        dtypes: name → of the master, on all ranks.
        unset: names of parameters and buffers from the meta device that are not known to have values yet.
        plan: who owns what.
        policy: which parameters are matrices.
        statistics: what has been moved and waited for.
        tensor_parallel: the ranks that share what this rank owns; None if there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        matrices: Mapping[str, tuple[Matrix, ...]],
        plan: Plan,
        policy: MatrixPolicy,
        routes: Routes,
        tensor_parallel: TensorParallel | None,
        control: Control,
        reshard: bool,
        reduce_dtype: torch.dtype,
        dtypes: Mapping[str, torch.dtype],
        unset: set[str],
        debug: bool,
    ) -> None:
        self.matrices, self.plan, self.policy, self.routes = matrices, plan, policy, routes
        self.statistics, self.tensor_parallel = routes.statistics, tensor_parallel
        self.control, self.dtypes, self.unset = control, dtypes, unset
        every = [matrix for bucket in buckets for matrix in bucket.matrices]
        masters = {matrix.name: matrix.master for matrix in every if matrix.master is not None}
        # Registration order, whatever the order in the buckets.
        self.masters = {name: masters[name] for name in matrices if name in masters}
        parameters = {matrix.name: matrix.parameter for matrix in every}
        self.parameters = {name: parameters[name] for name in matrices}
        self.params = set(parameters.values())
        self.masters_of = {m.parameter: m.master for m in every if m.master is not None}
        self._buckets, self._debug = buckets, debug
        self._publisher = Publisher(buckets, routes, reshard)
        presence = Presence(model, self.parameters)
        self._reducer = Reducer(buckets, routes, control, reduce_dtype, presence)
        self._runtime = Runtime(model, buckets, self._publisher, self._reducer)
        self.state_dicts = StateDicts(model, self, every)
        if tensor_parallel is not None:
            tensor_parallel.equalize(self.masters.values())
        setattr(model, ATTRIBUTE, self)
        require_values(self, [model, *(bucket.module for bucket in buckets)])
        refuse_other_optimizers()

    def describe(self) -> str:
        """Who owns how much, as a table to print."""
        share = [cost / (sum(self.plan.loads) or 1.0) for cost in self.plan.loads]
        each = (
            ""
            if self.tensor_parallel is None
            else f" of {self.tensor_parallel.size} tensor-parallel ones each"
        )
        lines = [
            f"{plural(len(self.matrices), 'owned parameter', 'owned parameters')} on "
            f"{plural(self.plan.ranks, 'rank', 'ranks')}{each}, plan {self.plan.hash}: "
            f"the busiest has {1 + self.plan.gap:.2f} times the least possible"
        ]
        for rank in range(self.plan.ranks):
            names = [name for name, owners in self.plan.owners.items() if rank in owners]
            lines.append(
                f"  rank {rank}: {share[rank]:6.1%} in {plural(len(names), 'parameter', 'parameters')}"
            )
        lines += [f"  {note}" for note in self.plan.notes]
        return "\n".join(lines)

    def finish(self, call: str, check: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Bring all gradients to the masters. Collective, by the same ``call`` of the user's on all ranks.

        Before, ``check`` may raise what is wrong on this rank, and returns what must be equal on all.
        """
        with self.statistics.phase("finish"):
            self._runtime.finish(call, check)

    def end_accumulation(self) -> None:
        """Warn if anything is added to the gradients before they are dropped: a step has had them, or skips them.

        ``Muon.step`` and ``GradScaler.unscale_`` do it.
        """
        self._reducer.stepped = True

    def settle(self, model: nn.Module | None) -> None:
        """Let the parameters that are not owned be sharded again, which an evaluation may have gathered, and their
        gradients be placed as they are. ``Muon.step`` and ``clip_grad_norm_`` do it; ``model`` may be gone.
        """
        if model is not None:
            settle(model, self.tensor_parallel is not None)

    def zero_grad(self) -> None:
        """Drop all owned gradients, those under way included. ``Muon.zero_grad`` does it. Collective."""
        self._reducer.stepped = False
        self.finish("zero_grad")
        for master in self.masters.values():
            master.grad = None

    def refresh(self) -> None:
        """Publish anew: the masters have changed. ``Muon.step`` does it; do it after you wrote to them. Collective."""
        with self.statistics.phase("refresh"):
            self._publisher.refresh()

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise a ValueError if a Muon group has options that its parameters cannot have."""
        if self.tensor_parallel is not None:
            check_group(group)

    def check_hooks(self) -> None:
        """Raise a ValueError if hooks cannot be told of updates."""
        if self.tensor_parallel is not None:
            raise ValueError(
                "update hooks are not to be had with tensor parallelism: no rank has whole matrices"
            )

    def joined(self, step: MatrixStep) -> Run | None:
        """``step`` on all tensor-parallel ranks together; None if there are none."""
        return None if self.tensor_parallel is None else TensorStep(self.tensor_parallel, step).run

    def move(self, updates: Sequence[Update], run: Run) -> None:
        """Let ``run`` make ``updates`` of masters, and publish each bucket as soon as it can. Collective.

        Args:
            updates: of this rank's masters; perhaps none.
            run: yields each master as soon as all of it has moved.
        """
        with self.statistics.phase("refresh"):
            self._publisher.refresh({update.parameter for update in updates})
        with self.statistics.phase("update"):
            for master in run(sorted(updates, key=lambda update: self._publisher.place(update.parameter))):
                self._publisher.moved(master)
        self.end_accumulation()
        if self._debug:
            self.check_consistency()

    def sum(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over all ranks, in place. Collective."""
        value = self.routes.sum(value)
        return value if self.tensor_parallel is None else self.tensor_parallel.sum(value)

    def check_consistency(self) -> None:
        """Raise on all ranks if any sees other weights than the owners hold; see :func:`dmuon.check_consistency`."""
        compare(self._buckets, self._publisher, self.control)

    def set_requires_gradient_sync(self, flag: bool) -> None:
        """Whether backwards reduce the owned gradients, or keep them for a later one that does."""
        self._reducer.synchronizing = flag

    def __deepcopy__(self, memo: dict[int, Any]) -> Owned:
        raise TypeError("an owned model cannot be copied: copy it before dmuon.own")


def _fact(model: nn.Module, routing: Routing) -> str:
    parameter = model.get_parameter(routing.name)
    matrices = " + ".join(f"{m.batch} x {m.rows} x {m.cols}" for m in routing.matrices)
    where = " on the meta device" if parameter.is_meta else ""
    if isinstance(parameter, DTensor):
        where += f" placed as {parameter.placements} on {parameter.device_mesh.mesh_dim_names or 'a mesh'}"
    return f"{routing.name} {routing.shape} {parameter.dtype} as {matrices}{where}"
