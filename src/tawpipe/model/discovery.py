"""Finds the chain in a model by following its forward pass once, with recorders in the place of the layers.

Imports torch and, through the model, transformers. Works on the meta device as on a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tawpipe.errors import UserError
from tawpipe.model.attention import PackedMask, packing
from tawpipe.model.kernels import Documents
from tawpipe.model.refuse import SETTING
from tawpipe.model.stubs import Feed, Feeder, LayerCall, LayersReached, Recorder, Tape, view_with_layers


@dataclass(frozen=True)
class Discovery:
    """Where the layers are, how the model calls them, and which parameters stand before and after them."""

    path: str
    """Name of the layer list in the model."""
    layers: tuple[nn.Module, ...]
    returns_tuple: bool
    """Whether the model expects a tuple from a layer."""
    uses: dict[str, tuple[int, ...]]
    """Canonical name of every parameter -> the blocks that use it, ascending: 0 the embedding, N + 1 the head."""
    embedding_backward_reads_weights: bool


class _ParameterUse(TorchFunctionMode):
    """Notes which parameters go into operations, in the phase that the caller sets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.used: dict[str, set[str]] = {}
        self.phase: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # Reading `weight.dtype` is no use of the weight; an operation that gives a tensor is.
        if self.phase is not None and any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self.names:
                    self.used.setdefault(self.phase, set()).add(self.names[id(leaf)])
        return output


class _WatchedRecorder(Recorder):
    """A recorder that also tells the parameter watch when the embedding side ends, and hands out tensors of its own."""

    def __init__(self, layer: nn.Module, index: int, count: int, tape: Tape, use: _ParameterUse) -> None:
        super().__init__(layer, index, count, tape)
        self.__dict__["use"] = use

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["use"].phase = "between"
        super().forward(*args, **kwargs)
        tape: Tape = self.__dict__["tape"]
        assert tape.hidden is not None
        tape.hidden = torch.empty_like(tape.hidden)  # a new object: the next layer must be given this very one
        return (tape.hidden,) if tape.returns_tuple else tape.hidden


class _WatchedFeeder(Feeder):
    """A feeder that also tells the parameter watch when the head begins."""

    def __init__(self, layer: nn.Module, feed: Feed, use: _ParameterUse, *, last: bool) -> None:
        super().__init__(layer, feed)
        self.__dict__["use"], self.last = use, last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.last:
            self.__dict__["use"].phase = "head"
        return super().forward(*args, **kwargs)


@contextmanager
def _saved_storages(into: set[int]) -> Iterator[None]:
    """Collect the storages of the tensors that autograd saves."""

    def pack(tensor: Tensor) -> Tensor:
        into.add(tensor.untyped_storage()._cdata)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def discover(model: nn.Module) -> Discovery:
    """Follow ``model``, a causal LM whose attention is ``attention.NAME``, and describe its chain.

    Raises:
        UserError: if no list of layers is called one after the other with nothing but hidden states handed on, if a
            layer is not given a mask of ours, or if a trainable parameter is used by no block.
    """
    kind = type(model).__name__
    devices = {parameter.device.type for parameter in model.parameters()}
    if len(devices) != 1:
        raise UserError(SETTING, kind, f"all parameters must be on one device, not on {', '.join(sorted(devices))}")
    count = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr]
    candidates = sorted(
        (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count),
        key=lambda name: name.count("."),
    )
    failures = []
    for path in candidates:
        for returns_tuple in (False, True):
            try:
                return _follow(model, path, returns_tuple=returns_tuple)
            except UserError:
                raise
            except Exception as error:
                failures.append(error)
    reason = f" ({failures[0]})" if failures else ""
    raise UserError(
        SETTING, kind, f"expected {count} layers that are called one after the other with hidden states only{reason}"
    ) from (failures[0] if failures else None)


def _follow(model: nn.Module, path: str, *, returns_tuple: bool) -> Discovery:
    layers = tuple(model.get_submodule(path).children())
    use = _ParameterUse(model)
    calls, saved = _follow_embedding(model, path, layers, use, returns_tuple=returns_tuple)
    _follow_head(model, path, layers, use, returns_tuple=returns_tuple)

    kind = type(model).__name__
    if use.used.get("between"):
        raise UserError(SETTING, kind, f"parameters used between layers: {', '.join(sorted(use.used['between']))}")
    for index, call in enumerate(calls):
        given = tree_leaves((call.args, call.kwargs))
        if not any(isinstance(leaf, PackedMask) for leaf in given):
            raise UserError(
                SETTING,
                kind,
                f"layer {index} is not given a mask made by transformers' mask interface, so the documents of a row "
                "would see each other (linear attention, state spaces, ALiBi and older code are not supported)",
            )
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given):
            raise UserError(SETTING, kind, f"layer {index} is given a trainable tensor besides the hidden states")

    uses = _uses(model, layers, use)
    storages = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    return Discovery(path, layers, returns_tuple, uses, embedding_backward_reads_weights=bool(saved & storages))


def _sample(model: nn.Module) -> tuple[Tensor, Tensor, Tensor, Documents]:
    """Four tokens in two documents: input ids, positions, an attention mask without padding, the documents."""
    device = next(model.parameters()).device
    ids = torch.zeros(1, 4, dtype=torch.long, device=device)
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    return ids, positions, torch.ones_like(ids), Documents.of((2, 2), (1, 4), device, verify=True)


def _follow_embedding(
    model: nn.Module, path: str, layers: tuple[nn.Module, ...], use: _ParameterUse, *, returns_tuple: bool
) -> tuple[list[LayerCall], set[int]]:
    """Run up to the last layer: the layers' calls, and the storages that the embedding side saves for its backward."""
    tape = Tape(returns_tuple=returns_tuple)
    recorders = [_WatchedRecorder(layer, i, len(layers), tape, use) for i, layer in enumerate(layers)]
    view, _ = view_with_layers(model, path, recorders)
    ids, positions, mask, documents = _sample(model)
    saved: set[int] = set()
    try:
        with use, packing(documents), torch.enable_grad(), _saved_storages(saved):
            use.phase = "embedding"
            view(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        raise AssertionError("the model does not call all of its layers")
    except LayersReached:
        return tape.calls, saved
    finally:
        use.phase = None


def _follow_head(
    model: nn.Module, path: str, layers: tuple[nn.Module, ...], use: _ParameterUse, *, returns_tuple: bool
) -> None:
    """Run from the last layer on, for the parameters that it uses."""
    feed = Feed(returns_tuple=returns_tuple)
    feeders = [_WatchedFeeder(layer, feed, use, last=layer is layers[-1]) for layer in layers]
    view, _ = view_with_layers(model, path, feeders)
    ids, positions, mask, documents = _sample(model)
    width = model.config.get_text_config().hidden_size  # type: ignore[union-attr]
    parameter = next(model.parameters())
    feed.hidden = torch.zeros(*ids.shape, width, dtype=parameter.dtype, device=parameter.device)
    try:
        with use, packing(documents), torch.no_grad():
            view(inputs_embeds=feed.hidden, attention_mask=mask, position_ids=positions, use_cache=False)
    finally:
        use.phase = None


def _uses(model: nn.Module, layers: tuple[nn.Module, ...], use: _ParameterUse) -> dict[str, tuple[int, ...]]:
    """Which blocks use each parameter. A frozen parameter that nothing uses stays with the head."""
    blocks: dict[str, set[int]] = {name: set() for name in use.names.values()}
    for name in use.used.get("embedding", ()):
        blocks[name].add(0)
    for index, layer in enumerate(layers, start=1):
        for parameter in layer.parameters():
            blocks[use.names[id(parameter)]].add(index)
    for name in use.used.get("head", ()):
        blocks[name].add(len(layers) + 1)

    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    unused = [name for name, found in blocks.items() if not found]
    if wrong := [name for name in unused if name in trainable]:
        raise UserError(
            SETTING,
            type(model).__name__,
            f"trainable parameters that no block of the chain uses: {', '.join(wrong[:5])}"
            f"{' and more' if len(wrong) > 5 else ''}; freeze them (requires_grad_(False)) or remove them",
        )
    for name in unused:
        blocks[name].add(len(layers) + 1)
    return {name: tuple(sorted(found)) for name, found in blocks.items()}
