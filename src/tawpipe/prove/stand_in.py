"""What a CPU can show of how a GPU behaves, for checks on machines without one.

* Kernels of a GPU read some tensors by their first address, as if they were contiguous (``read_as_a_gpu_does``).
* Code that asks for a device's type goes the way of a GPU, with the CPU's tensors (``LooksLikeCuda``, ``LaneStream``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BY_ADDRESS = {"aten::_scaled_dot_product_flash_attention_for_cpu_backward": ("logsumexp",)}
"""Operations, and those of their arguments that the kernel of a GPU reads without their strides."""


class read_as_a_gpu_does(TorchDispatchMode):
    """Within it flash attention on the CPU reads the log-sum-exp as a GPU's does: row by row from its first address.

    What the CPU's own kernel has made, which is transposed, it reads as it is.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if names := BY_ADDRESS.get(func._schema.name):
            places = [at for at, argument in enumerate(func._schema.arguments) if argument.name in names]
            args = tuple(_by_address(value) if at in places else value for at, value in enumerate(args))
        return func(*args, **(kwargs or {}))


def _by_address(tensor: Tensor) -> Tensor:
    """The numbers that stand one after the other from a tensor's first one on, in its shape."""
    if tensor.transpose(1, 2).is_contiguous():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


class LooksLikeCuda(str):
    """The CPU for torch, a GPU for code that asks which it is."""

    type = "cuda"


class LaneStream(str):
    """The stream of a lane, by its name; a CPU's lanes are threads, and what they have done is over."""

    def record_event(self, *_: Any) -> LaneStream:
        return self

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True
