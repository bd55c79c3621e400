"""Observers of a forward pass, for discovery: parameters used, positions, the head's reads, what autograd saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tawpipe.model.stubs import Feed, Feeder, Recorder, Tape, as_returned

SAMPLE_TOKENS = 7
"""Tokens in the row that is followed; no likely size of anything else in a model."""


_BOOLS = Tensor.__bool__, Tensor.item


class WithoutValues(TorchFunctionMode):
    """Answers what a model asks of values on the meta device: a mask is all ones, as it is for every micro-batch, and
    no document is packed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func in _BOOLS and args[0].is_meta else func(*args, **(kwargs or {}))


class Watch(WithoutValues):
    """Notes on what goes into the operations of a forward pass, in the phases that the caller sets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.used: dict[str, set[str]] = {}
        """Phase -> names of parameters."""
        self.phase: str | None = None
        self.read_by_head: set[str] = set()
        """Tensors that the head reads besides parameters and the last layer's output, in words."""
        self.tables: list[tuple[int, int | None]] = []
        """(rows, padding row) of the tables that positions index."""
        self.counts_by_itself = False
        """True if the model makes positions of its own, which do not start anew in every document."""
        self._before_head: dict[int, tuple[Tensor, str]] = {}
        self._positions: dict[int, Tensor] = {}
        self._counted: dict[int, Tensor] = {}
        """Numbers that were counted along the row, and what was made of them."""

    def begin(self, phase: str, inputs: Mapping[str, Any]) -> None:
        """Start to follow a forward pass with these arguments."""
        self.phase = phase
        self._before_head = {id(value): (value, name) for name, value in inputs.items() if isinstance(value, Tensor)}
        self._positions = {id(inputs["position_ids"]): inputs["position_ids"]}

    def note(self, tensor: Tensor, words: str) -> Tensor:
        """Note a tensor that the head must not read, and return it."""
        self._before_head[id(tensor)] = tensor, words
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs)
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        # Reading `weight.dtype` is no use of the weight; an operation that gives a tensor is.
        if self.phase is not None and results:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            for leaf in read:
                if id(leaf) in self.names:
                    self.used.setdefault(self.phase, set()).add(self.names[id(leaf)])
            if self.phase == "head":
                self.read_by_head.update(self._before_head[id(t)][1] for t in read if id(t) in self._before_head)
            else:
                for tensor in results:
                    self.note(tensor, f"a result of {getattr(func, '__name__', 'an operation')}")
            if self.phase == "embedding":
                self._follow_positions(func, args, kwargs or {}, read, results)
        return output

    def _follow_positions(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], read: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        whole = {id(tensor): tensor for tensor in made if not tensor.is_floating_point()}
        if any(id(tensor) in self._positions for tensor in read[:1]):  # not what they are an index of
            if func is F.embedding:
                self.tables.append((args[1].shape[0], args[2] if len(args) > 2 else kwargs.get("padding_idx")))
            self._positions.update(whole)
        elif func is torch.arange:
            self._counted.update({key: tensor for key, tensor in whole.items() if tensor.numel() == SAMPLE_TOKENS})
        elif any(id(tensor) in self._counted for tensor in read):
            self._counted.update(whole)
            self.counts_by_itself |= any(tensor.is_floating_point() for tensor in made)


class WatchedRecorder(Recorder):
    """A recorder that also tells the watch when the embedding side ends, and hands out tensors of its own."""

    def __init__(self, layer: nn.Module, index: int, count: int, tape: Tape, watch: Watch) -> None:
        super().__init__(layer, index, count, tape)
        self.__dict__["watch"] = watch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["watch"].phase = "between"
        super().forward(*args, **kwargs)
        tape: Tape = self.__dict__["tape"]
        assert tape.hidden is not None
        tape.take(torch.zeros_like(tape.hidden))  # a new object: the next layer must be given this very one
        assert tape.hidden is not None
        return as_returned(tape.hidden, tape.returns)


class WatchedFeeder(Feeder):
    """A feeder that also tells the watch when the head begins; only what the last one gives may be read there."""

    def __init__(self, layer: nn.Module, index: int, count: int, feed: Feed, watch: Watch) -> None:
        super().__init__(layer, feed)
        self.__dict__["watch"], self.index, self.last = watch, index, index == count - 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        watch, feed = self.__dict__["watch"], self.__dict__["feed"]
        if self.last:
            watch.phase = "head"
            return super().forward(*args, **kwargs)
        hidden = watch.note(torch.zeros_like(feed.hidden), f"what layer {self.index} gives")
        return as_returned(hidden, feed.returns)


class FollowedWeights(TorchDispatchMode):
    """Watch for parameters that autograd saves, or what was computed from parameters alone; and for all that was
    computed from parameters and anything else.

    The former, because a copy in another dtype (a norm in fp32) is the parameter itself where the dtypes are the same.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {_storage(parameter) for parameter in model.parameters()}
        self._made = set(self._weights)
        """Storages of parameters, and of whatever has to do with their values."""
        self._alive: list[Tensor] = []  # or another tensor would get the same storage
        self.weights_saved = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if read and all(_storage(tensor) in self._weights for tensor in read):
            self._weights.update(map(_storage, results))
        name = func._schema.name
        if any(map(self.made, read)) and not (name.endswith("_like") or name.startswith("aten::new_")):  # shapes alone
            self._made.update(map(_storage, results))
        self._alive += results
        return output

    def made(self, tensor: Tensor) -> bool:
        """True if the values of a tensor come from those of parameters, in part at least."""
        return _storage(tensor) in self._made

    def pack(self, saved: Tensor) -> Tensor:
        """Hook for ``saved_tensors_hooks``."""
        self.weights_saved |= _storage(saved) in self._weights
        return saved


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
