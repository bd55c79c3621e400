"""Observers of a forward pass, for discovery: parameters used, positions, the head's reads, what autograd saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        self._before_head: dict[int, tuple[Tensor, str]] = {}
        self._positions: dict[int, Tensor] = {}

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
        if any(id(tensor) in self._positions for tensor in read[:1]):  # not what they are an index of
            if func is F.embedding:
                self.tables.append((args[1].shape[0], args[2] if len(args) > 2 else kwargs.get("padding_idx")))
            self._positions.update({id(tensor): tensor for tensor in made if not tensor.is_floating_point()})


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
        if any(map(self.made, read)) and not _is_shape_alone(func._schema.name):
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


class Counting(TorchDispatchMode):
    """Watch for places that code counts along a row by itself: they neither start anew in every document, nor continue
    where the chunk before has ended.

    Args:
        own: the code's parameters and buffers.
    """

    PICKED = "index", "_unsafe_index", "gather", "scatter", "take", "masked_select", "masked_scatter"
    PICKS = tuple(f"aten::{name}" for name in PICKED)

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self._own = set(map(_storage, own))
        self._given: set[int] = set()
        self._counted: set[int] = set()
        self._alive: list[Tensor] = []  # or another tensor would get the same storage
        self._inside = False
        """True in a module that runs on every document by itself."""
        self.has_counted = False
        """True if numbers that come from what was given depend on counted places."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        read = set(map(_storage, leaves))
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._alive += results
        if _is_shape_alone(name):
            return output
        of_given = not read.isdisjoint(self._given)
        counted = not read.isdisjoint(self._counted)
        if name.startswith(self.PICKS):
            # Counts that are an index of what was given (a router's tokens), or numbers that it is an index of, are no
            # places.
            picked = {_storage(leaf) for leaf in leaves if leaf.is_floating_point()}
            counted = not (read - picked).isdisjoint(self._counted) and picked.isdisjoint(self._given)
        if of_given:
            self._given.update(map(_storage, results))
        if not self._inside and (counted or self._counts(name, args, read, results)):
            # Truths about pairs are left out: a mask that is made of places compares two of one document.
            pairs = [t for t in results if t.dtype == torch.bool and t.shape.count(SAMPLE_TOKENS) != 1]
            self._counted.update(map(_storage, results) if not pairs else ())
            self.has_counted |= of_given and any(tensor.is_floating_point() for tensor in results)
        return output

    def _counts(self, name: str, args: Any, read: set[int], results: Sequence[Tensor]) -> bool:
        """True for numbers along the row, and for as much of a table as the row is long."""
        if name in ("aten::arange", "aten::linspace", "aten::lift_fresh"):
            return SAMPLE_TOKENS in results[0].shape
        if name == "aten::cumsum":
            summed = read.isdisjoint(self._given) or not args[0].is_floating_point()
            return summed and results[0].shape[args[1] :][:1] == (SAMPLE_TOKENS,)
        if name == "aten::slice" and not read.isdisjoint(self._own) and len(args) > 1:
            return args[0].shape[args[1]] > results[0].shape[args[1]] == SAMPLE_TOKENS
        return False

    @contextmanager
    def leaving_out(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """A context in which these modules, which run on every document by itself, may count."""
        hooks = [module.register_forward_pre_hook(lambda *_: setattr(self, "_inside", True)) for module in modules]
        hooks += [module.register_forward_hook(lambda *_: setattr(self, "_inside", False)) for module in modules]
        try:
            yield
        finally:
            self._inside = False
            for hook in hooks:
                hook.remove()

    def give(self, *tensors: Tensor) -> None:
        """Note tensors that the code is called with."""
        self._alive += tensors
        self._given.update(map(_storage, tensors))

    def hands_on(self, tensors: Iterable[Tensor]) -> bool:
        """True if numbers among ``tensors`` were made of counted places."""
        return any(tensor.is_floating_point() and _storage(tensor) in self._counted for tensor in tensors)


def _is_shape_alone(name: str) -> bool:
    """True for an operator that reads no values."""
    return name.endswith("_like") or name.startswith("aten::new_")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
