"""Rivals that shard, as torch ships them: FSDP2 with its settings, called only through its public interface.

On the CPU with gloo, which has no streams, FSDP2 behaves as follows:

* A gather that FSDP2 issues by itself blocks until the weights have arrived. This includes its own prefetch, implicit
  or set by ``set_modules_to_forward_prefetch``. A gather issued by ``FSDPModule.unshard(async_op=True)`` runs in gloo's
  threads while the device computes. The knob ``prefetch`` is the number of layers for which hooks around each layer
  issue such gathers ahead.
* The reduction blocks, and gloo runs it as an all-reduce: twice the bytes (see `tawpipe_lab.rivals.fsdp_collectives`).
  With ``reduction="ring"`` it sends the bytes of a reduce-scatter and runs in the background, through the public hook.
  FSDP2 does that on a GPU with NCCL.
* HSDP's all-reduce between nodes blocks; no hook replaces it.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tawpipe.errors import UserError
from tawpipe.topology import Topology
from tawpipe_lab.contender import Contender, check_grid, check_sharding, read_settings
from tawpipe_lab.lengths import dealt
from tawpipe_lab.rivals.context_parallel import KeysOfAll
from tawpipe_lab.rivals.fsdp_collectives import (
    BackgroundReduction,
    HierarchicalGather,
    HierarchicalReduction,
    RingReduction,
    TransferLanes,
)
from tawpipe_lab.rivals.task import task_of
from tawpipe_lab.workload import (
    Known,
    LengthsWorkload,
    RealWorkload,
    ServingWorkload,
    TimedWorkload,
    Workload,
    check_whole,
)

CONTEXT_PARALLEL = "fsdp2-cp"
"""Rival that only runs timed workloads with keys and values."""
NAMES = ("fsdp2", "fsdp2-node", "hsdp", "fsdp2-hierarchical")


@dataclass(frozen=True)
class ShardedSettings:
    """Knobs of the sharding rivals.

    Args:
        micro_batches_per_gather: number of micro-batches that are concatenated to one forward and backward pass, so
            that one gather serves them. In FSDP2 this is a larger batch.
        prefetch: number of layers whose weights are gathered ahead with ``unshard(async_op=True)``; 0 leaves prefetch
            to FSDP2.
        keep_weights: if True, keep all weights gathered from the first round of micro-batches to the last
            (``reshard_after_forward``, ``set_reshard_after_backward``). The last layer is always kept from its forward
            to its backward pass, which comes next.
        reduce_every_round: if False, accumulate whole gradients and reduce them in the last round only
            (``set_requires_gradient_sync``).
        reduction: ``gloo`` as shipped. ``ring`` and ``hierarchical`` are this project's, run in the background through
            the public hook.
        packing: method that assigns documents of uneven lengths to ranks, as a user of FSDP2 can; see
            ``lengths.dealt``.
    """

    micro_batches_per_gather: int = 1
    prefetch: int = 1
    keep_weights: bool = False
    reduce_every_round: bool = True
    reduction: Literal["gloo", "ring", "hierarchical"] = "gloo"
    packing: Literal["in turn", "tokens", "balanced"] = "in turn"

    def __post_init__(self) -> None:
        check_whole(self, micro_batches_per_gather=1, prefetch=0)
        if self.reduction not in ("gloo", "ring", "hierarchical"):
            raise UserError("reduction", self.reduction, "one of gloo, ring, hierarchical")
        if self.packing not in ("in turn", "tokens", "balanced"):
            raise UserError("packing", self.packing, "one of in turn, tokens, balanced")


def make(name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender:
    """Build a contender that runs FSDP2 in one of its settings; see `tawpipe_lab.contender.Maker`.

    * ``fsdp2`` shards over all ranks.
    * ``fsdp2-node`` also shards over all ranks, but keeps weights sharded inside the node from the forward to the
      backward pass (integer ``reshard_after_forward``).
    * ``hsdp`` shards inside the node and replicates across nodes, with the all-reduce in the last round only.
    * ``fsdp2-hierarchical`` is ``fsdp2`` with this project's gathers and reductions, in the background.
    * ``fsdp2-cp`` has every document computed by all ranks (`tawpipe_lab.rivals.context_parallel`).

    Documents of uneven lengths are assigned as ``packing`` says.

    Raises:
        UserError: the rival cannot run this workload on this topology with these knobs.
    """
    if name == "fsdp2-hierarchical":
        knobs = {"reduction": "hierarchical", "prefetch": 2, **knobs}
    settings = read_settings(ShardedSettings, name, knobs)
    if isinstance(workload, LengthsWorkload):
        if name == CONTEXT_PARALLEL:
            raise UserError("workload", workload.kind, f"timed: {name} has documents of one length")
        workload = dealt(workload, settings.packing, topology)
    elif settings.packing != "in turn":
        raise UserError("packing", settings.packing, "a workload of the kind lengths: others have nothing to pack")
    assert not isinstance(workload, ServingWorkload)
    if name == CONTEXT_PARALLEL:
        workload = _shared_by_all(workload, topology, settings.micro_batches_per_gather)
    else:
        check_sharding(name, workload, topology, settings.micro_batches_per_gather)
    if name == "hsdp" and settings.reduction != "gloo":
        raise UserError("reduction", settings.reduction, "gloo: hsdp reduces in its own way")
    if name == "fsdp2-node":
        check_grid(name, topology)
    return _Sharded(name, workload, topology, rank, settings)


def _shared_by_all(workload: Known, topology: Topology, per_gather: int) -> TimedWorkload:
    """Return the workload of one rank if all ranks compute every micro-batch together, each an equal share.

    Raises:
        UserError: the workload has no keys and values, or its micro-batches are not a multiple of ``per_gather``.
    """
    if isinstance(workload, RealWorkload) or not workload.keys_bytes:
        raise UserError("strategy", CONTEXT_PARALLEL, "a timed workload with keys_bytes")
    if workload.micro_batches % per_gather:
        expected = f"a divisor of the {workload.micro_batches} micro-batches"
        raise UserError("micro_batches_per_gather", per_gather, expected)
    size = max(1, workload.activation_bytes // topology.world_size)
    return replace(workload.faster(topology.world_size), activation_bytes=size)


class _Sharded(Contender):
    """Contender that trains a timed or real workload with FSDP2."""

    def __init__(self, name: str, workload: Known, topology: Topology, rank: int, settings: ShardedSettings) -> None:
        super().__init__(name, asdict(settings))
        self.settings = settings
        shared = name == CONTEXT_PARALLEL
        own_count = workload.micro_batches // (1 if shared else topology.world_size)
        self._first, self._rounds = 0 if shared else rank * own_count, own_count // settings.micro_batches_per_gather
        self._task = task_of(workload, self._busy)
        self.sleeper = self._task.sleeper
        self.layers, self.model = self._shard(topology)
        # The sharded, trained parameters. While a layer's weights are gathered, the module shows other tensors.
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.gradient_norm: Tensor | None = None
        self._steps = 0
        self._lanes = TransferLanes(self._busy)
        self._reduction = self._plug_in(topology, rank)
        if settings.prefetch:
            self._prefetch_in_the_background()
        self._keys: KeysOfAll | None = None
        if shared and isinstance(workload, TimedWorkload):
            self._keys = KeysOfAll(self._lanes, topology, workload.keys_bytes)
            for layer in self.layers:
                self._keys.attach(layer)
        self._optimizer = self._task.optimizer(self.parameters)

    # construction

    def _shard(self, topology: Topology) -> tuple[list[nn.Module], nn.Module]:
        """Build the parts of the model, apply ``fully_shard`` to each, and return the parts and the whole model.

        The parts are called layers here, although embedding and head may be among them.
        """
        if self.name == "hsdp":
            mesh = DeviceMesh("cpu", torch.tensor(topology.nodes), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = DeviceMesh("cpu", torch.arange(topology.world_size), mesh_dim_names=("shard",))
        reshard: bool | int = not self.settings.keep_weights
        if self.name == "fsdp2-node" and reshard:
            reshard = topology.local_size
        layers = []
        # Each part is sharded right after it was made, so that no process ever holds a whole large model.
        for i, layer in enumerate(self._task.parts()):
            last = i == self._task.num_parts - 1
            fully_shard(layer, mesh=mesh, reshard_after_forward=False if last else reshard)
            layers.append(layer)
        model = self._task.whole(layers)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Gradients are sums over micro-batches. With divisor 1 nothing reads a reduction's result early.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return layers, model

    def _plug_in(self, topology: Topology, rank: int) -> BackgroundReduction | None:
        """Replace FSDP2's collectives in every layer by this project's, as far as the settings ask for them.

        Returns:
            The reduction that runs in the background, or None if FSDP2 reduces by itself.
        """
        reduction: BackgroundReduction | None = None
        if self.settings.reduction == "ring":
            reduction = RingReduction(topology, self._lanes)
        elif self.settings.reduction == "hierarchical":
            reduction = HierarchicalReduction(topology, rank, self._lanes)
        gather = HierarchicalGather(topology, rank, self._lanes) if self.name == "fsdp2-hierarchical" else None
        for layer in self._sharded_layers():
            if gather is not None:
                layer.set_custom_all_gather(cast(Any, gather))
            if reduction is not None:
                layer.set_custom_reduce_scatter(cast(Any, reduction))
        return reduction

    def _sharded_layers(self) -> list[FSDPModule]:
        return [layer for layer in self.layers if isinstance(layer, FSDPModule)]

    def _prefetch_in_the_background(self) -> None:
        """Add hooks to all layers that issue the gathers of the next ``prefetch`` layers of a round.

        In the forward pass, a hook issues them when its layer has its weights. In the backward pass, it issues them,
        and the gather of its own layer, when its layer needs its weights.
        """
        layers, depth = self._sharded_layers(), self.settings.prefetch
        count = len(layers)
        # The last layer keeps its weights for its backward pass, so the layer before it is the next to gather.
        order = [*range(count), *(() if self.settings.keep_weights else range(count - 2, -1, -1))]

        def issue(position: int, number: int) -> None:
            for i in order[position : position + number]:
                layers[i].unshard(async_op=True)  # does nothing if the weights are gathered or in flight

        for i, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda *_, position=i + 1: issue(position, depth))
            if not self.settings.keep_weights:

                def hear_backward(
                    _: nn.Module, __: object, output: Tensor, position: int = 2 * (count - 1) - i
                ) -> None:
                    output.register_hook(lambda _: issue(position, depth + 1))

                # Before FSDP2's own hook, which waits for this layer's weights: `issue` begins with this layer.
                layer.register_forward_hook(hear_backward, prepend=True)

    # a step

    def step(self) -> None:
        task, together = self._task, self.settings.micro_batches_per_gather
        gradients: list[list[Tensor]] = []
        losses: list[Tensor] = []
        for done in range(self._rounds):
            last = done == self._rounds - 1
            self._prepare_round(last=last)
            begin = self._first + done * together
            inputs, targets = task.batch(self._steps, range(begin, begin + together))
            loss = task.loss(self.model(inputs), targets)
            loss.backward()
            losses.append(loss.detach())
            if self._reduction is not None and (last or self.settings.reduce_every_round):
                # Remove gradients before the next round, or FSDP2 would add to results that are still in flight.
                gradients.append([self._take_gradient(parameter) for parameter in self.parameters])
        if self._keys is not None:
            self._keys.wait()
        if self._reduction is not None:
            self._reduction.finish()
            self._put_back(gradients)
        self.gradient_norm = nn.utils.clip_grad_norm_(self.parameters, task.largest_norm)
        if self._optimizer is not None:
            self._optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.loss_share = sum(map(float, losses)) if task.has_loss else None
        self._steps += 1

    def _prepare_round(self, *, last: bool) -> None:
        """Set in FSDP2 whether this round reduces gradients and releases weights after its backward pass.

        Args:
            last: True for the last round of the step.
        """
        if self._rounds == 1:
            return
        model, first = self.model, self.layers[0]
        assert isinstance(model, FSDPModule) and isinstance(first, FSDPModule)
        model.set_requires_gradient_sync(last or self.settings.reduce_every_round)
        if self.name == "hsdp":
            model.set_requires_all_reduce(last)
        # The first layer always keeps its weights for the next round, where it is needed first.
        (model if self.settings.keep_weights else first).set_reshard_after_backward(last)

    @staticmethod
    def _take_gradient(parameter: nn.Parameter) -> Tensor:
        """Return the gradient of a parameter, which must have one, and set ``parameter.grad`` to None."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        return gradient

    @torch.no_grad()
    def _put_back(self, gradients: list[list[Tensor]]) -> None:
        """Set each parameter's ``grad`` to the sum of its gradients in all rounds.

        Args:
            gradients: for each round, the gradients of all parameters. Those of the first round are changed in place.
        """
        for parameter, (total, *others) in zip(self.parameters, zip(*gradients, strict=True), strict=True):
            for other in others:
                total.add_(other)
            parameter.grad = total

    def close(self) -> None:
        self._lanes.close()
        self.layers.clear()
        self.parameters.clear()
        del self.model, self._optimizer
        gc.collect()  # FSDP2's modules and their state refer to each other
