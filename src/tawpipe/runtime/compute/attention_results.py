"""Results of attention that a layer on whole rows keeps, so that its recomputation does not compute attention again.

The cost of attention grows with the square of a document's length, and its results are small. The forward pass builds
autograd's graph of each attention kernel alone. There, notes take the place of the kernel's arguments (queries, keys
and values), so that only its output and the log-sum-exp of its scores stay. The recomputation makes the arguments
again, takes the output from what was kept, and lets the kernel's own backward pass read the new arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tawpipe.model import kernels
from tawpipe.model.attention.chunked import Chunk
from tawpipe.model.kernels import Kernel

MOST = 2
"""Largest size of what one call keeps, relative to its output. A kernel that keeps more runs again instead."""


class _KernelCall:
    """One call of an attention kernel, with its part of the graph. ``run`` makes it."""

    def run(self, kernel: Kernel, operands: tuple[Tensor, ...], others: tuple[Any, ...]) -> Tensor:
        """Run the kernel, and return its output without a graph.

        Args:
            kernel: the kernel. Its result is its output.
            operands: queries, keys and values.
            others: further arguments. Tensors among them get no gradient.
        """
        kept, inputs = list[Tensor](), list[Any]()  # hooks that hold this object would never be freed
        notes = {_identity(each): at for at, each in enumerate((*operands, *others)) if isinstance(each, Tensor)}

        def pack(tensor: Tensor) -> Any:
            """Return the number of a saved argument; keep any other tensor."""
            if (number := notes.get(_identity(tensor))) is None:
                kept.append(tensor.data)
            return kept[-1] if number is None else number

        def unpack(packed: Any) -> Tensor:
            """Return the argument with this number, or the kept tensor."""
            return inputs[packed] if isinstance(packed, int) else packed

        self.leaves = [operand.detach().requires_grad_() for operand in operands]
        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            output = kernel(*self.leaves, *others)
        self.edge, self.output, self.inputs = get_gradient_edge(output), output.data, inputs
        """End of the graph; the output; and arguments, while the kernel's backward pass runs on those made again."""
        self.kept = [*kept, self.output]
        """Tensors that the graph saves, except arguments; and the output. They belong to this call alone."""
        for leaf in self.leaves:  # autograd holds them, for their gradients only
            leaf.data = leaf.new_empty(0)
        return output.detach()

    @property
    def is_small(self) -> bool:
        """True if the graph is one operator that keeps little. Otherwise scores or copies of arguments are kept."""
        after = [node for node, _ in self.edge.node.next_functions if node is not None]
        return not any(node.next_functions for node in after) and _bytes(self.kept) <= MOST * self.output.nbytes


class _FromKept(torch.autograd.Function):
    """Returns the kept output of a call, and runs the kernel's backward pass on arguments that were made again."""

    @staticmethod
    def forward(ctx: Any, call: _KernelCall, *arguments: Any) -> Tensor:
        tensors = [each if isinstance(each, Tensor) else None for each in arguments]
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        call, ctx.call = ctx.call, None
        call.inputs += ctx.saved_tensors
        gradients = torch.autograd.grad(call.edge, call.leaves, gradient)
        others = len(call.inputs) - len(gradients)
        call.inputs.clear()
        return None, *gradients, *[None] * others


class AttentionResults:
    """Results of all attention calls of one layer on one micro-batch, in their order.

    Results of attention that draws (dropout), of kernels that save more than ``MOST``, and of explicit scores are not
    kept. The recomputation then runs this attention again.

    Args:
        catches: also keep results of ``scaled_dot_product_attention`` that the model's own code calls.
    """

    def __init__(self, *, catches: bool = False) -> None:
        self._mode = _Catching() if catches else nullcontext()
        self._calls: list[_KernelCall | tuple[Tensor, Tensor | None] | None] = []
        """Results of every call, or None. A tuple holds output and log-sum-exp of a whole row in a ``Chunk``."""
        self._returned: list[tuple[Tensor, int]] = []
        """Output of every call and its version, while the layer runs, to notice that the layer changes it in place."""
        self._next: int | None = None
        """Number of the next call of the recomputation; None in the forward pass."""
        self.tensors: list[Tensor] = []
        """All tensors that are kept."""

    def keep(self, layer: Callable[[], Tensor]) -> Tensor:
        """Return ``layer()``, run without a graph, and keep its attention results."""
        self.forget()
        self._next = None
        with torch.no_grad():
            output = self._run(layer)
        for number, (returned, version) in enumerate(self._returned):
            call = self._calls[number] = self._calls[number] if returned._version == version else None
            kept = call.kept if isinstance(call, _KernelCall) else call or ()
            # a kernel may keep a random state in CPU memory, which is not to be moved
            self.tensors += [tensor for tensor in kept if tensor is not None and tensor.device == returned.device]
        self._returned.clear()
        return output

    def reuse(self, layer: Callable[[], Tensor]) -> Tensor:
        """Return ``layer()``, run with its graph. Its attention takes its results from those that ``keep`` has kept."""
        self._next = 0
        with torch.enable_grad():
            return self._run(layer)

    def forget(self) -> None:
        """Drop all results, except those that the graph of ``reuse`` needs."""
        for each in (self._calls, self._returned, self.tensors):
            each.clear()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that are kept."""
        return _bytes(self.tensors)

    def attended(self, kernel: Kernel, operands: tuple[Tensor, ...], others: tuple[Any, ...]) -> Tensor:
        """Return the output of a kernel, or the kept one; see ``kernels.attended``."""
        if self._next is None:
            call = _KernelCall()
            output = call.run(kernel, operands, others)
            self._add(call if call.is_small else None, output)
            return output
        call = self._again()
        if call is None or any(isinstance(each, Tensor) and each.requires_grad for each in others):
            return kernel(*operands, *others)
        return _FromKept.apply(call, *operands, *others)  # type: ignore[return-value]

    def of_row(self, chunk: Chunk) -> None:
        """Let a chunk that is a whole row put its output and log-sum-exp here, or take the kept ones."""
        if self._next is None:
            chunk.keep = lambda _, output, sums: self._add((output.data, sums), output)
        else:
            chunk.kept = self._again()

    def _add(self, call: _KernelCall | tuple[Tensor, Tensor | None] | None, returned: Tensor) -> None:
        """Keep ``call`` as the next one, whose output is ``returned``."""
        self._calls.append(call)
        self._returned.append((returned, returned._version))

    def _again(self) -> Any:
        """Return what was kept of the next call."""
        assert self._next is not None
        self._next += 1
        return self._calls[self._next - 1]

    def _run(self, layer: Callable[[], Tensor]) -> Tensor:
        """Return ``layer()``, whose attention finds these results."""
        token = kernels.results.set(self)
        try:
            with self._mode:
                return layer()
        finally:
            kernels.results.reset(token)


class _Catching(TorchFunctionMode):
    """Mode that replaces torch's ``scaled_dot_product_attention`` by the one whose results can be kept."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = kernels.dot_product if func is F.scaled_dot_product_attention else func
        return func(*args, **(kwargs or {}))


def _identity(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Return a key that is equal for tensors with the same elements in the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages. A storage that tensors share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
