"""A model seen without its layers, so that its own code runs before and after them: what stands in their place, and
views of the model that hold it.

A view shares every module, parameter and buffer with the model except the layer list and the modules above it, so the
model itself is never changed, not even for the time of a call, and its parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tawpipe.model.attention.attention import PackedMask
from tawpipe.model.attention.chunked import Chunk

HIDDEN = "hidden_states"


@dataclass(frozen=True, eq=False)
class LayerCall:
    """The arguments of one layer's call, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def take(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, LayerCall]:
        """Split a call into its hidden states and the rest."""
        if args:
            return args[0], cls((None, *args[1:]), kwargs)
        return kwargs[HIDDEN], cls((), {**kwargs, HIDDEN: None})

    def __call__(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Call ``layer`` as it was called, with other hidden states; the first result if it gives several."""
        args, kwargs = ((hidden, *self.args[1:]), self.kwargs) if self.args else ((), {**self.kwargs, HIDDEN: hidden})
        output = layer(*args, **kwargs)
        return output[0] if isinstance(output, tuple | list) else output

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, at any depth."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def cut(self, along: Sequence[int | None], chunk: Chunk) -> LayerCall:
        """The call for some tokens of every row.

        Args:
            along: the dimension of the tokens of every leaf of the arguments, as ``Chain.along_tokens`` has it.
        """
        leaves, form = tree_flatten((self.args, self.kwargs))
        for place, (leaf, dim) in enumerate(zip(leaves, along, strict=True)):
            if isinstance(leaf, PackedMask):
                leaves[place] = replace(leaf, chunk=chunk)
            elif dim is not None:
                parts = [leaf.narrow(dim, begin, end - begin) for begin, end in chunk.ranges]
                leaves[place] = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return LayerCall(*tree_unflatten(leaves, form))


NOTHING = object()
"""In the place of what a layer returns besides hidden states, which no other layer may be given."""


def as_returned(hidden: Tensor | None, length: int) -> Any:
    """Hidden states as a layer returns them: in a tuple of so many if that is not 0."""
    return (hidden, *[NOTHING] * (length - 1)) if length else hidden


def taken_by(model: nn.Module, arguments: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """Arguments of a model's forward pass; if documents are ``alone``, without those that it does not take: it counts
    positions by itself then, or needs no mask.
    """
    if not alone:
        return arguments
    known = signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return arguments
    needed = "input_ids", "inputs_embeds"
    return {name: value for name, value in arguments.items() if name in known or name in needed}


class Stub(nn.Module):
    """Stand-in for a layer; answers for it when the model reads an attribute."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule: its parameters must not show up here

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


class LayersReached(Exception):
    """Raised by the last recorder: what the model does after its layers is not wanted."""


class Tape:
    """Record of one forward pass: the layers' calls, and the hidden states."""

    def __init__(self, returns: int) -> None:
        self.returns = returns
        self.calls: list[LayerCall] = []
        self.hidden: Tensor | None = None
        self.version = 0
        """Version of ``hidden``, which nobody may change in place."""

    def rewind(self) -> None:
        self.calls, self.hidden = [], None

    def take(self, hidden: Tensor) -> None:
        """Set the hidden states that the next layer must be given."""
        self.hidden, self.version = hidden, hidden._version


class Recorder(Stub):
    """Stub that notes the arguments of its layer's call and returns the hidden states unchanged."""

    def __init__(self, layer: nn.Module, index: int, count: int, tape: Tape) -> None:
        super().__init__(layer)
        self.index, self.count = index, count
        self.__dict__["tape"] = tape

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tape: Tape = self.__dict__["tape"]
        hidden, call = LayerCall.take(args, kwargs)
        assert len(tape.calls) == self.index, "the layers are not called in their order"
        if tape.returns > 1:  # the only place that ``NOTHING`` comes from; looking for it takes long
            assert all(leaf is not NOTHING for leaf in tree_leaves((call.args, call.kwargs))), (
                "a layer is given more of the one before it than hidden states"
            )
        assert tape.hidden is None or (hidden is tape.hidden and hidden._version == tape.version), (
            "the model changes the hidden states between two layers"
        )
        tape.take(hidden)
        tape.calls.append(call)
        if self.index == self.count - 1:
            raise LayersReached
        return as_returned(hidden, tape.returns)


class Feed:
    """The hidden states that the layers are to have computed."""

    def __init__(self, returns: int, hidden: Tensor | None = None) -> None:
        self.returns, self.hidden = returns, hidden


class Feeder(Stub):
    """Stub that returns the hidden states of its feed, whatever it is called with."""

    def __init__(self, layer: nn.Module, feed: Feed) -> None:
        super().__init__(layer)
        self.__dict__["feed"] = feed

    def forward(self, *_: Any, **__: Any) -> Any:
        feed: Feed = self.__dict__["feed"]
        return as_returned(feed.hidden, feed.returns)


class Remembered(Stub):
    """Stub that computes once for every shape of input and gives the same again, for results that nobody reads.

    The head runs for each chunk of positions, with the code before the layers as well: rotary angles would be computed
    for every chunk, and where they depend on the longest document so far the host waits for the device.
    """

    MOST = 8

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.__dict__["results"] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = [*enumerate(args), *kwargs.items()]
        key = tuple(
            (name, value.shape, value.dtype, value.device) if isinstance(value, Tensor) else (name, repr(value))
            for name, value in named
        )
        results = self.__dict__["results"]
        if key not in results:
            if len(results) >= self.MOST:
                results.clear()
            results[key] = self.__dict__["layer"](*args, **kwargs)
        return results[key]


def remember_angles(view: Sequence[nn.Module]) -> None:
    """Let the modules of a view, each with its own list of children, compute rotary angles once for every shape."""
    for module in view:
        for name, child in module._modules.items():
            if child is not None and any(key.endswith("inv_freq") for key in child._buffers):
                module._modules[name] = Remembered(child)


def modules_above(model: nn.Module, path: str) -> list[nn.Module]:
    """The model, and the modules between it and the layer list at ``path``."""
    ends = (end for end, letter in enumerate(path) if letter == ".")
    return [model, *(model.get_submodule(path[:end]) for end in ends)]


def view_with_layers(model: nn.Module, path: str, layers: Sequence[nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    """A view of ``model`` with other modules in the layer list at ``path``.

    Returns:
        The view of the model, and all modules that are not shared with it (their ``training`` flags are their own).
    """
    root = _shallow(model)
    unshared, at = [root], root
    *above, name = path.split(".")
    for part in above:
        at._modules[part] = at = _shallow(getattr(at, part))
        unshared.append(at)
    stubs = nn.ModuleList(layers)
    stubs.train(model.training)
    at._modules[name] = stubs
    return root, [*unshared, stubs, *layers]


def _shallow(module: nn.Module) -> Any:
    """A module of the same class with the same attributes, parameters and buffers, but its own list of children."""
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = dict(module._modules)
    return copy
