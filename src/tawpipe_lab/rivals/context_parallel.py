"""Context parallelism over all devices with FSDP2: each of them computes a share of the tokens of every document.

torch's own ``context_parallel`` takes no packed rows and works with real attention, so its transfers are made here, in
the way that suits it best: keys and values of a layer go round all devices (all-gather, as many bytes as a ring of
attention passes on) while the layer computes, once forward and once more for the recomputation, and their gradients go
round likewise (reduce-scatter) while the next layer computes. Weights and gradients are FSDP2's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tawpipe.runtime.lanes import CpuEvent
from tawpipe.topology import Topology
from tawpipe_lab.rivals.fsdp_collectives import TransferLanes, all_gather, ring_reduce_scatter

LANE = "SEQ"


class KeysOfAll:
    """Moves keys and values of documents between all devices, in the background.

    Args:
        keys_bytes: of one document and layer, fp32.
    """

    def __init__(self, lanes: TransferLanes, topology: Topology, keys_bytes: int) -> None:
        self._lanes, self._size = lanes, topology.world_size
        self._each = max(1, keys_bytes // 4 // self._size)
        self._group = lanes.add(LANE, [tuple(range(self._size))])
        self._last: CpuEvent | None = None

    def attach(self, layer: nn.Module) -> None:
        """Have a layer exchange whenever it computes."""
        layer.register_forward_pre_hook(lambda _, given: (_Begin.apply(given[0], self), *given[1:]))
        layer.register_forward_hook(lambda _, given, output: _End.apply(output, self))

    def gather(self, documents: int) -> None:
        share = torch.ones(documents * self._each)
        self._submit(lambda: all_gather(share.new_empty(self._size * share.numel()), share, group=self._group))

    def reduce(self, documents: int) -> None:
        every = torch.ones(self._size * documents * self._each)
        members = dist.get_process_group_ranks(self._group)
        share = every.new_empty(documents * self._each)
        self._submit(lambda: ring_reduce_scatter(share, every, members, self._group))

    def wait(self) -> None:
        """For all that was begun."""
        if self._last is not None:
            self._last.wait()

    def _submit(self, run: Any) -> None:
        self._last = self._lanes.submit(LANE, run)


class _Begin(torch.autograd.Function):
    """Before a layer: its keys and values set out. Backward, after it: they are there, and their gradients set out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: KeysOfAll) -> Tensor:
        ctx.keys = keys
        keys.gather(x.shape[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.keys.wait()
        ctx.keys.reduce(gradients[0].shape[0])
        return gradients[0], None


class _End(torch.autograd.Function):
    """After a layer: its keys and values are there. Backward, before it: they set out again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: KeysOfAll) -> Tensor:
        ctx.keys = keys
        keys.wait()
        return x.clone()  # what FSDP2 is given to hook on may be no view

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.keys.gather(gradients[0].shape[0])
        return gradients[0], None
