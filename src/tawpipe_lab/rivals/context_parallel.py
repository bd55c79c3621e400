"""Context parallelism over all devices with FSDP2: each device computes a share of every document's tokens.

torch's own ``context_parallel`` takes no packed rows and works only with real attention. So its transfers are made
here, in the way that is best for it. Keys and values of a layer are all-gathered over all devices while the layer
computes, once in the forward pass and once more for the recomputation. An all-gather passes as many bytes as ring
attention. Their gradients are reduce-scattered while the next layer computes. Weights and gradients are FSDP2's.
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
    """Transfers of documents' keys and values between all devices, in a background thread.

    Args:
        keys_bytes: bytes of the keys and values of one document in one layer, fp32.
    """

    def __init__(self, lanes: TransferLanes, topology: Topology, keys_bytes: int) -> None:
        self._lanes, self._size = lanes, topology.world_size
        self._each = max(1, keys_bytes // 4 // self._size)
        self._group = lanes.add(LANE, [tuple(range(self._size))])
        self._last: CpuEvent | None = None

    def attach(self, layer: nn.Module) -> None:
        """Add hooks to a layer so that it gathers keys and values when it computes, and reduces their gradients."""
        layer.register_forward_pre_hook(lambda _, inputs: (_Begin.apply(inputs[0], self), *inputs[1:]))
        layer.register_forward_hook(lambda _, inputs, output: _End.apply(output, self))

    def gather(self, documents: int) -> None:
        """Start to all-gather the keys and values of ``documents`` documents in the background; return at once."""
        share = torch.ones(documents * self._each)
        self._submit(lambda: all_gather(share.new_empty(self._size * share.numel()), share, group=self._group))

    def reduce(self, documents: int) -> None:
        """Start to reduce-scatter the gradients of keys and values of ``documents`` documents; return at once."""
        every = torch.ones(self._size * documents * self._each)
        members = dist.get_process_group_ranks(self._group)
        share = every.new_empty(documents * self._each)
        self._submit(lambda: ring_reduce_scatter(share, every, members, self._group))

    def wait(self) -> None:
        """Wait until the transfer that was started last is done, and with it all earlier ones."""
        if self._last is not None:
            self._last.wait()

    def _submit(self, run: Any) -> None:
        self._last = self._lanes.submit(LANE, run)


class _Begin(torch.autograd.Function):
    """Autograd node before a layer, which starts to gather the layer's keys and values.

    In backward, it waits until they are gathered, and starts to reduce their gradients.
    """

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
    """Autograd node after a layer, which waits for the layer's keys and values; in backward, it gathers them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: KeysOfAll) -> Tensor:
        ctx.keys = keys
        keys.wait()
        return x.clone()  # FSDP2 adds hooks to the output, which must not be a view

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.keys.gather(gradients[0].shape[0])
        return gradients[0], None
