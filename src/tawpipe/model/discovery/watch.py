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
"""Tokens in the row that is followed. It is unlikely to equal any other size in a model."""


_BOOLS = Tensor.__bool__, Tensor.item


class WithoutValues(TorchFunctionMode):
    """Mode in which tests of values on the meta device return True.

    A mask is then all ones, as for every micro-batch, and no document is packed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func in _BOOLS and args[0].is_meta else func(*args, **(kwargs or {}))


class Watch(WithoutValues):
    """Records the inputs of a forward pass's operations, in phases that the caller sets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.used: dict[str, set[str]] = {}
        """Phase -> names of the parameters used in it."""
        self.phase: str | None = None
        self.read_by_head: set[str] = set()
        """Descriptions of tensors that the head reads, other than parameters and the last layer's output."""
        self.tables: list[tuple[int, int | None]] = []
        """(rows, padding row) of the tables that positions index."""
        self._before_head: dict[int, tuple[Tensor, str]] = {}
        self._positions: dict[int, Tensor] = {}

    def begin(self, phase: str, inputs: Mapping[str, Any]) -> None:
        """Start the phase ``phase`` of a forward pass with the arguments ``inputs``."""
        self.phase = phase
        self._before_head = {id(value): (value, name) for name, value in inputs.items() if isinstance(value, Tensor)}
        self._positions = {id(inputs["position_ids"]): inputs["position_ids"]}

    def note(self, tensor: Tensor, words: str) -> Tensor:
        """Record a tensor that the head must not read, with a description in ``words``, and return the tensor."""
        self._before_head[id(tensor)] = tensor, words
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs)
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        # Reading `weight.dtype` does not use the weight. An operation that returns a tensor does.
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
        self, func: Any, args: Any, kwargs: Mapping[str, Any], read: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Record the table that an operation indexes with positions, and which of its results are positions again.

        Does nothing if the first tensor that the operation reads is not known to hold positions. Tables are recorded
        for ``F.embedding`` only, as (rows, padding row) in ``tables``. Results count as positions if they are integers.

        Args:
            func, args, kwargs: the operation and its arguments.
            read: tensors among the arguments.
            results: tensors that the operation returned.
        """
        if any(id(tensor) in self._positions for tensor in read[:1]):  # not the table that they index
            if func is F.embedding:
                self.tables.append((args[1].shape[0], args[2] if len(args) > 2 else kwargs.get("padding_idx")))
            self._positions.update({id(tensor): tensor for tensor in results if not tensor.is_floating_point()})


class WatchedRecorder(Recorder):
    """Recorder that also tells the watch when the embedding phase ends, and returns new tensors as hidden states."""

    def __init__(self, layer: nn.Module, index: int, count: int, tape: Tape, watch: Watch) -> None:
        super().__init__(layer, index, count, tape)
        self.__dict__["watch"] = watch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["watch"].phase = "between"
        super().forward(*args, **kwargs)
        tape: Tape = self.__dict__["tape"]
        assert tape.hidden is not None
        tape.take(torch.zeros_like(tape.hidden))  # a new object: the next layer must receive exactly this one
        assert tape.hidden is not None
        return as_returned(tape.hidden, tape.returns)


class WatchedFeeder(Feeder):
    """Feeder that also tells the watch when the head begins.

    The head may read only the output of the last feeder."""

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
    """Mode that follows parameters through operations, and notes if autograd saves one of them.

    A result computed from parameters alone counts as a parameter: a copy in another dtype (a norm in fp32) is the
    parameter itself if the dtypes are equal. Results computed partly from parameters are known as well; see
    ``is_derived``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {_storage(parameter) for parameter in model.parameters()}
        self._derived = set(self._weights)
        """Storages of parameters, and of results computed at least partly from their values."""
        self._alive: list[Tensor] = []  # otherwise another tensor could get this storage
        self.weights_saved = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if read and all(_storage(tensor) in self._weights for tensor in read):
            self._weights.update(map(_storage, results))
        if any(map(self.is_derived, read)) and not _is_shape_alone(func._schema.name):
            self._derived.update(map(_storage, results))
        self._alive += results
        return output

    def is_derived(self, tensor: Tensor) -> bool:
        """Return True if the values of ``tensor`` were computed at least partly from parameters."""
        return _storage(tensor) in self._derived

    def pack(self, saved: Tensor) -> Tensor:
        """Set ``weights_saved`` if autograd saves a parameter, and return ``saved``.

        It is the pack hook for ``saved_tensors_hooks``."""
        self.weights_saved |= _storage(saved) in self._weights
        return saved


class Counting(TorchDispatchMode):
    """Mode that notes if code counts positions along a row itself.

    Such counts do not restart in every document, and do not continue where the previous chunk ended.

    Args:
        own: parameters and buffers of the code.
    """

    PICKED = "index", "_unsafe_index", "gather", "scatter", "take", "masked_select", "masked_scatter"
    PICKS = tuple(f"aten::{name}" for name in PICKED)

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self._own = set(map(_storage, own))
        self._inputs: set[int] = set()
        self._counted: set[int] = set()
        self._alive: list[Tensor] = []  # otherwise another tensor could get this storage
        self._inside = False
        """True inside a module that runs on every document separately."""
        self.has_counted = False
        """True if floating-point results computed from the inputs depend on counted positions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        read = set(map(_storage, leaves))
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._alive += results
        if _is_shape_alone(name):
            return output
        from_inputs = not read.isdisjoint(self._inputs)
        counted = not read.isdisjoint(self._counted)
        if name.startswith(self.PICKS):
            # Counts that index the inputs (a router's tokens), and numbers that the inputs index, are not positions.
            picked = {_storage(leaf) for leaf in leaves if leaf.is_floating_point()}
            counted = not (read - picked).isdisjoint(self._counted) and picked.isdisjoint(self._inputs)
        if from_inputs:
            self._inputs.update(map(_storage, results))
        if not self._inside and (counted or self._counts(name, args, read, results)):
            # Booleans about pairs are left out: a mask computed from positions compares two tokens of one document.
            pairs = [t for t in results if t.dtype == torch.bool and t.shape.count(SAMPLE_TOKENS) != 1]
            self._counted.update(map(_storage, results) if not pairs else ())
            self.has_counted |= from_inputs and any(tensor.is_floating_point() for tensor in results)
        return output

    def _counts(self, name: str, args: Any, read: set[int], results: Sequence[Tensor]) -> bool:
        """Return True if an operation makes numbers along the row, or takes one row of a table for each token."""
        if name in ("aten::arange", "aten::linspace", "aten::lift_fresh"):
            return SAMPLE_TOKENS in results[0].shape
        if name == "aten::cumsum":
            summed = read.isdisjoint(self._inputs) or not args[0].is_floating_point()
            return summed and results[0].shape[args[1] :][:1] == (SAMPLE_TOKENS,)
        if name == "aten::slice" and not read.isdisjoint(self._own) and len(args) > 1:
            return args[0].shape[args[1]] > results[0].shape[args[1]] == SAMPLE_TOKENS
        return False

    @contextmanager
    def leaving_out(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Return a context in which ``modules`` may count, because they run on every document separately."""
        hooks = [module.register_forward_pre_hook(lambda *_: setattr(self, "_inside", True)) for module in modules]
        hooks += [module.register_forward_hook(lambda *_: setattr(self, "_inside", False)) for module in modules]
        try:
            yield
        finally:
            self._inside = False
            for hook in hooks:
                hook.remove()

    def give(self, *tensors: Tensor) -> None:
        """Record ``tensors`` as inputs of the code."""
        self._alive += tensors
        self._inputs.update(map(_storage, tensors))

    def hands_on(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if floating-point numbers among ``tensors`` were computed from counted positions."""
        return any(tensor.is_floating_point() and _storage(tensor) in self._counted for tensor in tensors)


def _is_shape_alone(name: str) -> bool:
    """Return True if the operator ``name`` reads only shapes, no values."""
    return name.endswith("_like") or name.startswith("aten::new_")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
