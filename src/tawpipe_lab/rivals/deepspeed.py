"""Rivals that shard, as DeepSpeed ships them: ZeRO-3, and ZeRO++'s hpZ, through its public interface.

On the CPU with gloo, which has no streams, DeepSpeed behaves as follows:

* All-gathers are asynchronous there too (``async_op=True``, run by gloo's threads). They overlap with computing if they
  are issued ahead: from the second pass on, when DeepSpeed knows the order of the layers. Reductions are issued with
  ``async_op=False`` on a stream that the CPU lacks, so that each one blocks the backward pass.
* Its reduce-scatter is torch's, which gloo runs as an all-reduce: twice the bytes.
* hpZ makes its copy inside the node when the weights are first released after an update, and drops it after the next
  update. So weights cross between nodes once per step, not once per round as with `fsdp2-node`. The cost is 1/local of
  all weights in the memory of every process.
* The quantised parts of ZeRO++ are CUDA kernels, so that no row has them.

Settings that are not knobs: every layer is sharded however small it is (``stage3_param_persistence_threshold`` 0). It
is reduced by itself (``reduce_bucket_size`` of one layer), straight from where it was computed
(``contiguous_gradients`` off, which would copy it first). Weights are released after the forward pass, except the last
layer's; DeepSpeed's defaults keep the last 10^9 (``stage3_max_reuse_distance``). DeepSpeed builds a small operator with
a C++ compiler at its first start.
"""

from __future__ import annotations

import gc
import os
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.topology import Topology
from tawpipe_lab.contender import Contender, check_grid, check_sharding, read_settings
from tawpipe_lab.rivals.timed_modules import LARGEST_NORM, LEARNING_RATE, TimedChain, TimedLayer, timed_loss
from tawpipe_lab.sleeper import Sleeper
from tawpipe_lab.workload import TimedWorkload, Workload, check_whole

NAMES = ("zero3", "zero-hpz")


@dataclass(frozen=True)
class ZeroSettings:
    """Knobs of DeepSpeed's ZeRO-3.

    Args:
        micro_batches_per_gather: number of micro-batches that are concatenated to one forward and backward pass, so
            that one gather serves them.
        prefetch: number of layers whose weights are gathered ahead (``stage3_prefetch_bucket_size``;
            ``stage3_max_live_parameters`` is one layer more).
    """

    micro_batches_per_gather: int = 1
    prefetch: int = 1

    def __post_init__(self) -> None:
        check_whole(self, micro_batches_per_gather=1, prefetch=0)


def make(name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender:
    """Build a contender that runs DeepSpeed's ZeRO-3; see `tawpipe_lab.contender.Maker`.

    ``zero3`` shards over all ranks. ``zero-hpz`` also keeps a copy of the weights in every node
    (``zero_hpz_partition_size`` of the node's size), from which it gathers until the next update.

    Raises:
        UserError: DeepSpeed is not installed, or cannot run this workload on this topology with these knobs.
    """
    settings = read_settings(ZeroSettings, name, knobs)
    if not isinstance(workload, TimedWorkload):
        raise UserError("workload", workload.kind, f"timed: {name} is not made for any other")
    check_sharding(name, workload, topology, settings.micro_batches_per_gather)
    if name == "zero-hpz":
        check_grid(name, topology)
    return _Zero(name, workload, topology, settings, _deepspeed(name, topology, rank))


def load(name: str) -> Any:
    """Import and return the module ``deepspeed``, for the CPU.

    Args:
        name: strategy, for the message.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        return import_module("deepspeed")
    except ImportError as error:
        raise UserError("strategy", name, f"DeepSpeed, from: pip install deepspeed ninja ({error})") from error


def _deepspeed(name: str, topology: Topology, rank: int) -> Any:
    """Import ``deepspeed`` and initialise it in the existing process group; return the module.

    Raises:
        UserError: DeepSpeed, or something that it needs, is not installed.
    """
    os.environ.setdefault("LOCAL_RANK", str(topology.local_of(rank)))
    deepspeed = load(name)
    try:
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    except (RuntimeError, OSError) as error:
        needed = "what DeepSpeed builds its operators with: a C++ compiler, and pip install ninja"
        raise UserError("strategy", name, f"{needed} ({error})") from error
    return deepspeed


class _Zero(Contender):
    """Contender that trains a timed workload with DeepSpeed's engine."""

    def __init__(
        self, name: str, workload: TimedWorkload, topology: Topology, settings: ZeroSettings, deepspeed: Any
    ) -> None:
        super().__init__(name, asdict(settings))
        self.workload, self.settings = workload, settings
        self._ranks = topology.world_size
        self._rounds = workload.micro_batches // (topology.world_size * settings.micro_batches_per_gather)
        self.sleeper = Sleeper(self._busy)
        self.gradient_norm: Tensor | float | None = None
        config = self._config(topology)
        self.layers = [self._shard(TimedLayer(part, self.sleeper), config, deepspeed) for part in workload.parts]
        self.model = TimedChain(self.layers, workload, embeds=True)
        if workload.optimizer:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        else:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)  # DeepSpeed's engine needs an optimizer
        self._engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)

    def _config(self, topology: Topology) -> dict[str, Any]:
        """Return the configuration for ``deepspeed.initialize``; sizes in it are numbers of weights."""
        settings, sizes = self.settings, [part.elements for part in self.workload.parts]
        layer = max(sizes)
        return {
            "train_micro_batch_size_per_gpu": settings.micro_batches_per_gather,
            "gradient_accumulation_steps": self._rounds,
            "gradient_clipping": LARGEST_NORM,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": topology.local_size if self.name == "zero-hpz" else 1,
                "overlap_comm": True,
                "reduce_scatter": True,
                "contiguous_gradients": False,
                "reduce_bucket_size": layer,
                "stage3_prefetch_bucket_size": settings.prefetch * layer,
                "stage3_max_live_parameters": (1 + settings.prefetch) * layer,
                "stage3_max_reuse_distance": layer,
                "stage3_param_persistence_threshold": 0,
                "memory_efficient_linear": False,  # True would replace torch's linear for the whole process
            },
        }

    @staticmethod
    def _shard(layer: TimedLayer, config: dict[str, Any], deepspeed: Any) -> TimedLayer:
        """Shard one layer right after it was made, so that no process ever holds the whole model; return it.

        DeepSpeed has one hpZ group per process: it refuses to make a second one for a second model. The engine would
        also give that group to a model without hpZ, if the layers were not sharded here.
        """
        groups = import_module("deepspeed.utils.groups")
        hpz = config["zero_optimization"]["zero_hpz_partition_size"] > 1
        inside = groups._get_zero_param_intra_parallel_group() if hpz else None
        deepspeed.zero.Init(module=layer, config_dict_or_path=config, zero_param_parallel_group=inside)
        return layer

    def step(self) -> None:
        tokens = torch.zeros(self.settings.micro_batches_per_gather, 1)
        for _ in range(self._rounds):
            # DeepSpeed averages over the ranks, but gradients here are sums over micro-batches.
            loss = timed_loss(self._engine(tokens)) * self._ranks
            self._engine.backward(loss, scale_wrt_gas=False)
            self._engine.step()
        self.gradient_norm = self._engine.get_global_grad_norm()

    def close(self) -> None:
        self._engine.destroy()
        self.layers.clear()
        del self.model, self._engine
        gc.collect()
