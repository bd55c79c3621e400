"""Stand-ins for layers, and views of a model with them, to run the model's own code before and after its layers.

A view shares every module, parameter and buffer with the model, except the layer list and the modules above it. So the
model itself never changes, not even during a call, and its parameters keep their names."""

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
    """Arguments of one call of a layer, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def take(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, LayerCall]:
        """Split the arguments of a call into the hidden states and a ``LayerCall`` with all other arguments."""
        if args:
            return args[0], cls((None, *args[1:]), kwargs)
        return kwargs[HIDDEN], cls((), {**kwargs, HIDDEN: None})

    def __call__(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Call ``layer`` with ``hidden`` and the stored arguments; return its output (the first item of a tuple)."""
        args, kwargs = ((hidden, *self.args[1:]), self.kwargs) if self.args else ((), {**self.kwargs, HIDDEN: hidden})
        output = layer(*args, **kwargs)
        return output[0] if isinstance(output, tuple | list) else output

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, at any nesting depth."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def cut(self, along: Sequence[int | None], chunk: Chunk) -> LayerCall:
        """Return the call for the tokens of ``chunk`` only: every argument is cut along its token dimension.

        Args:
            along: token dimension of each leaf of the arguments, or None if a leaf has none; one entry of
                ``Chain.along_tokens``.
            chunk: the tokens of every row. A packed mask is replaced by one for this chunk.
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
"""Placeholder for results of a layer other than hidden states. No other layer may receive it."""


def as_returned(hidden: Tensor | None, length: int) -> Any:
    """Return ``hidden`` as a layer returns it: in a tuple of ``length`` items, or alone if ``length`` is 0.

    The other items of the tuple are ``NOTHING``."""
    return (hidden, *[NOTHING] * (length - 1)) if length else hidden


def taken_by(model: nn.Module, arguments: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """Return the arguments for a model's forward pass.

    Args:
        model: the model that is called.
        arguments: all arguments that can be passed.
        alone: True if each row holds one document. Arguments that ``model.forward`` does not accept are then left out:
            the model counts positions itself, or needs no mask.
    """
    if not alone:
        return arguments
    known = signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return arguments
    needed = "input_ids", "inputs_embeds"
    return {name: value for name, value in arguments.items() if name in known or name in needed}


class Stub(nn.Module):
    """Stand-in for a layer that returns the layer's attributes when the model reads them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule, so that the view does not list the layer's parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


class LayersReached(Exception):
    """Raised by the last recorder to stop the model's forward pass: code after the layers need not run."""


class Tape:
    """Record of one forward pass: the layers' calls, and the hidden states."""

    def __init__(self, returns: int) -> None:
        self.returns = returns
        self.calls: list[LayerCall] = []
        self.hidden: Tensor | None = None
        self.version = 0
        """Version counter of ``hidden``, by which an in-place change is noticed."""

    def rewind(self) -> None:
        """Forget the calls and the hidden states, before or after a forward pass."""
        self.calls, self.hidden = [], None

    def take(self, hidden: Tensor) -> None:
        """Store ``hidden`` as the hidden states that the next layer must receive unchanged."""
        self.hidden, self.version = hidden, hidden._version


class Recorder(Stub):
    """Stub that records the arguments of its layer's call on a tape and returns the hidden states unchanged.

    The last of the ``count`` recorders raises ``LayersReached`` instead."""

    def __init__(self, layer: nn.Module, index: int, count: int, tape: Tape) -> None:
        super().__init__(layer)
        self.index, self.count = index, count
        self.__dict__["tape"] = tape

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tape: Tape = self.__dict__["tape"]
        hidden, call = LayerCall.take(args, kwargs)
        assert len(tape.calls) == self.index, "the layers are not called in their order"
        if tape.returns > 1:  # ``NOTHING`` exists only in this case, and searching for it is slow
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
    """Container of the hidden states that feeders return in place of the layers."""

    def __init__(self, returns: int, hidden: Tensor | None = None) -> None:
        self.returns, self.hidden = returns, hidden


class Feeder(Stub):
    """Stub that returns the hidden states of its feed and ignores its arguments."""

    def __init__(self, layer: nn.Module, feed: Feed) -> None:
        super().__init__(layer)
        self.__dict__["feed"] = feed

    def forward(self, *_: Any, **__: Any) -> Any:
        feed: Feed = self.__dict__["feed"]
        return as_returned(feed.hidden, feed.returns)


class Remembered(Stub):
    """Stub that calls its module once for each input shape and then returns the stored result for this shape.

    Use it only if the results do not affect the output. The head runs once for each chunk of positions, together with
    the model's code before the layers. Without this stub, rotary angles would be computed for every chunk. If they
    depend on the longest document so far, the host would wait for the device each time."""

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
    """Wrap the modules of a view that compute rotary angles in ``Remembered``, in place.

    Their results then depend on input shapes only, not on the positions. Use it only for a view whose angles are not
    read.

    Args:
        view: modules of a view, each with its own list of children.
    """
    for module in view:
        for name, child in module._modules.items():
            if child is not None and any(key.endswith("inv_freq") for key in child._buffers):
                module._modules[name] = Remembered(child)


def modules_above(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the model, and the modules between it and the layer list at ``path``."""
    ends = (end for end, letter in enumerate(path) if letter == ".")
    return [model, *(model.get_submodule(path[:end]) for end in ends)]


def view_with_layers(model: nn.Module, path: str, layers: Sequence[nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    """Return a view of ``model`` with ``layers`` in place of the layer list at ``path``.

    Returns:
        The view, and all modules that it does not share with the model. Each of them has its own ``training`` flag.
    """
    root = shallow(model)
    unshared, at = [root], root
    *above, name = path.split(".")
    for part in above:
        at._modules[part] = at = shallow(getattr(at, part))
        unshared.append(at)
    stubs = nn.ModuleList(layers)
    stubs.train(model.training)
    at._modules[name] = stubs
    return root, [*unshared, stubs, *layers]


def shallow(module: nn.Module) -> Any:
    """Return a module with the attributes, parameters and buffers of ``module``, but its own list of children."""
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = dict(module._modules)
    return copy
