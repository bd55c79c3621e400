"""Imitation of GPU behaviour on a CPU, for checks on machines without a GPU.

* GPU kernels read some tensors from their first address, as if they were contiguous (``read_as_a_gpu_does``).
* Code that asks for a device's type follows its GPU path, with tensors of the CPU (``LooksLikeCuda``, ``LaneStream``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BY_ADDRESS = {"aten::_scaled_dot_product_flash_attention_for_cpu_backward": ("logsumexp",)}
"""Operations, and names of their arguments that the kernel of a GPU reads without regard to strides."""


class read_as_a_gpu_does(TorchDispatchMode):
    """Context in which flash attention on the CPU reads the log-sum-exp like a GPU: row by row from its first address.

    A log-sum-exp that the CPU's own kernel made is transposed, and is read as it is.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if names := BY_ADDRESS.get(func._schema.name):
            places = [at for at, argument in enumerate(func._schema.arguments) if argument.name in names]
            args = tuple(_by_address(value) if at in places else value for at, value in enumerate(args))
        return func(*args, **(kwargs or {}))


def _by_address(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape that reads memory as if ``tensor`` were contiguous, from its first address.

    A tensor whose dimensions 1 and 2 are swapped in memory is returned unchanged."""
    if tensor.transpose(1, 2).is_contiguous():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


class LooksLikeCuda(str):
    """Device that is the CPU for torch, and a GPU for code that asks for its type."""

    type = "cuda"


class LaneStream(str):
    """Stand-in for the CUDA stream of a lane, by name.

    Work on it has always ended, as the lanes of a CPU are threads.
    """

    def record_event(self, *_: Any) -> LaneStream:
        return self

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True
