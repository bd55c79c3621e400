"""Finds the chain in a model by following its forward pass once, with recorders in the place of the layers.

Imports torch and, through the model, transformers. Works on the meta device as on a real one.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tawpipe.errors import UserError
from tawpipe.model.attention import PackedMask, packing
from tawpipe.model.first_call import first_call
from tawpipe.model.kernels import Documents
from tawpipe.model.refuse import SETTING
from tawpipe.model.stubs import Feed, Feeder, LayerCall, LayersReached, Recorder, Tape, view_with_layers

SAMPLE_TOKENS = 7  # no likely size of anything else in a model
UNLIKELY_SEED = 0x5EED_0F_A_C0DE


@dataclass(frozen=True)
class Positions:
    """How a model uses the positions of tokens.

    Args:
        first: the position of a document's first token where the caller gives none; 0 but for RoBERTa's kin, which
            count tokens from the padding token's number + 1 on.
        limit: positions given by a caller must be below, because they index a table; None where nothing does.
        scaled_from: longer documents than that are rotated by other angles (longrope), and with them all that share a
            micro-batch; None where lengths do not matter.
    """

    first: int = 0
    limit: int | None = None
    scaled_from: int | None = None


@dataclass(frozen=True)
class Discovery:
    """Where the layers are, how the model calls them, and which parameters stand before and after them."""

    path: str
    """Name of the layer list in the model."""
    layers: tuple[nn.Module, ...]
    """One per call; the same module several times if the model calls it several times."""
    returns_tuple: bool
    """Whether the model expects a tuple from a layer."""
    uses: dict[str, tuple[int, ...]]
    """Canonical name of every parameter -> the blocks that use it, ascending: 0 the embedding, N + 1 the head."""
    embedding_backward_reads_weights: bool
    positions: Positions


class _Watch(TorchFunctionMode):
    """Notes what goes into the operations of a forward pass, in the phases that the caller sets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.used: dict[str, set[str]] = {}
        """Phase -> names of parameters."""
        self.phase: str | None = None
        self.read_by_head: set[str] = set()
        """What the head reads besides parameters and the last layer's output, in words."""
        self.tables: list[tuple[int, int | None]] = []
        """(rows, padding row) of the tables that positions index."""
        self.counts_by_itself = False
        """Whether the model makes positions of its own, which do not start anew in every document."""
        self._before_head: dict[int, tuple[Tensor, str]] = {}
        self._positions: dict[int, Tensor] = {}
        self._counted: dict[int, Tensor] = {}
        """Numbers that were counted along the row, and what was made of them."""

    def begin(self, phase: str, inputs: Mapping[str, Tensor]) -> None:
        """Start to follow a forward pass with these arguments."""
        self.phase = phase
        self._before_head = {id(tensor): (tensor, name) for name, tensor in inputs.items()}
        self._positions = {id(inputs["position_ids"]): inputs["position_ids"]}

    def note(self, tensor: Tensor, words: str) -> Tensor:
        """The head must not read ``tensor``."""
        self._before_head[id(tensor)] = tensor, words
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        # Reading `weight.dtype` is no use of the weight; an operation that gives a tensor is.
        if self.phase is not None and made:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            for leaf in read:
                if id(leaf) in self.names:
                    self.used.setdefault(self.phase, set()).add(self.names[id(leaf)])
            if self.phase == "head":
                self.read_by_head.update(self._before_head[id(t)][1] for t in read if id(t) in self._before_head)
            else:
                for tensor in made:
                    self.note(tensor, f"a result of {getattr(func, '__name__', 'an operation')}")
            if self.phase == "embedding":
                self._follow_positions(func, args, kwargs or {}, read, made)
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


class _WatchedRecorder(Recorder):
    """A recorder that also tells the watch when the embedding side ends, and hands out tensors of its own."""

    def __init__(self, layer: nn.Module, index: int, count: int, tape: Tape, watch: _Watch) -> None:
        super().__init__(layer, index, count, tape)
        self.__dict__["watch"] = watch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["watch"].phase = "between"
        super().forward(*args, **kwargs)
        tape: Tape = self.__dict__["tape"]
        assert tape.hidden is not None
        tape.take(torch.zeros_like(tape.hidden))  # a new object: the next layer must be given this very one
        assert tape.hidden is not None
        return (tape.hidden,) if tape.returns_tuple else tape.hidden


class _WatchedFeeder(Feeder):
    """A feeder that also tells the watch when the head begins; only what the last one gives may be read there."""

    def __init__(self, layer: nn.Module, index: int, count: int, feed: Feed, watch: _Watch) -> None:
        super().__init__(layer, feed)
        self.__dict__["watch"], self.index, self.last = watch, index, index == count - 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        watch, feed = self.__dict__["watch"], self.__dict__["feed"]
        if self.last:
            watch.phase = "head"
            return super().forward(*args, **kwargs)
        hidden = watch.note(torch.zeros_like(feed.hidden), f"what layer {self.index} gives")
        return (hidden,) if feed.returns_tuple else hidden


class _SavedWeights(TorchDispatchMode):
    """Finds out whether autograd saves parameters, or what was computed from parameters alone.

    The latter, because a copy in another dtype (a norm in fp32) is the parameter itself where the dtypes are the same.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {_storage(parameter) for parameter in model.parameters()}
        self._alive: list[Tensor] = []  # or another tensor would get the same storage
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if read and all(_storage(tensor) in self._weights for tensor in read):
            made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._alive += made
            self._weights.update(map(_storage, made))
        return output

    def pack(self, saved: Tensor) -> Tensor:
        """For ``saved_tensors_hooks``."""
        self.found |= _storage(saved) in self._weights
        return saved


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


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
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)  # type: ignore[union-attr]
    if count is None:
        raise UserError(
            SETTING, kind, "its config must say num_hidden_layers, and one list of so many layers be called in turn"
        )
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
    at: Any = model.get_submodule(path)
    layers = tuple(at)
    kind = type(model).__name__
    for module in (model, *(model.get_submodule(path[:end]) for end, letter in enumerate(path) if letter == ".")):
        if "forward" in vars(module):
            raise UserError(
                SETTING,
                f"{type(module).__name__}.forward",
                "the method was replaced on the object, where it would call the object's own layers; make a subclass",
            )
    watch = _Watch(model)
    before = {name: (tensor, tensor._version) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    tape, reads_weights = _follow_embedding(model, path, layers, watch, returns_tuple=returns_tuple)
    _follow_head(model, path, layers, watch, returns_tuple=returns_tuple)

    if changed := [name for name, (tensor, version) in before.items() if tensor._version != version]:
        raise UserError(
            SETTING, kind, f"its forward pass changes {changed[0]} in place; only the optimizer may do that"
        )
    if watch.used.get("between"):
        raise UserError(SETTING, kind, f"parameters used between layers: {', '.join(sorted(watch.used['between']))}")
    if watch.counts_by_itself:
        raise UserError(
            SETTING,
            kind,
            "the model counts positions along the row by itself and takes no position_ids, so the documents of a row "
            "would not start anew",
        )
    if watch.read_by_head:
        raise UserError(
            SETTING,
            kind,
            f"after its last layer the model reads {', '.join(sorted(watch.read_by_head))}, from before the layers; "
            "the head may read what the last layer gives and its own parameters only",
        )
    for index, call in enumerate(tape.calls):
        given = tree_leaves((call.args, call.kwargs))
        masks = [leaf for leaf in given if isinstance(leaf, PackedMask)]
        if not masks:
            raise UserError(
                SETTING,
                kind,
                f"layer {index} is not given a mask made by transformers' mask interface, so the documents of a row "
                "would see each other (linear attention, state spaces, ALiBi and older code are not supported)",
            )
        for mask in masks:
            mask.check()
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given):
            raise UserError(SETTING, kind, f"layer {index} is given a trainable tensor besides the hidden states")
    assert tape.hidden is not None
    _try_layers(kind, layers, tape.calls, tape.hidden)
    uses = _uses(model, layers, watch)
    return Discovery(path, layers, returns_tuple, uses, reads_weights, _positions(model, watch))


def _sample(model: nn.Module) -> tuple[dict[str, Tensor], Documents]:
    """A few tokens in two documents: the arguments of a forward pass, without padding, and the documents."""
    device = next(model.parameters()).device
    ids = torch.zeros(1, SAMPLE_TOKENS, dtype=torch.long, device=device)
    positions = torch.tensor([[*range(4), *range(SAMPLE_TOKENS - 4)]], device=device)
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
    return inputs, Documents.of((4, SAMPLE_TOKENS - 4), (1, SAMPLE_TOKENS), device)


def _follow_embedding(
    model: nn.Module, path: str, layers: tuple[nn.Module, ...], watch: _Watch, *, returns_tuple: bool
) -> tuple[Tape, bool]:
    """Run up to the last layer: the layers' calls, and whether the embedding side's backward pass needs weights."""
    tape = Tape(returns_tuple=returns_tuple)
    recorders = [_WatchedRecorder(layer, i, len(layers), tape, watch) for i, layer in enumerate(layers)]
    view, _ = view_with_layers(model, path, recorders)
    inputs, documents = _sample(model)
    saved = _SavedWeights(model)
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor)
    try:
        with torch.random.fork_rng(devices=[]), watch, packing(documents), torch.enable_grad(), hooks, saved:
            watch.begin("embedding", inputs)
            view(**inputs, use_cache=False)
        raise AssertionError("the model does not call all of its layers")
    except LayersReached:
        return tape, saved.found
    finally:
        watch.phase = None


def _follow_head(
    model: nn.Module, path: str, layers: tuple[nn.Module, ...], watch: _Watch, *, returns_tuple: bool
) -> None:
    """Run from the last layer on, for the parameters that it uses and for what else it reads."""
    feed = Feed(returns_tuple=returns_tuple)
    feeders = [_WatchedFeeder(layer, i, len(layers), feed, watch) for i, layer in enumerate(layers)]
    view, _ = view_with_layers(model, path, feeders)
    inputs, documents = _sample(model)
    width = model.config.get_text_config().hidden_size  # type: ignore[union-attr]
    parameter = next(model.parameters())
    shape = (*inputs.pop("input_ids").shape, width)
    feed.hidden = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    inputs["inputs_embeds"] = torch.zeros_like(feed.hidden)
    try:
        with torch.random.fork_rng(devices=[]), watch, packing(documents), torch.no_grad():
            watch.begin("before", inputs)
            view(**inputs, use_cache=False)
    finally:
        watch.phase = None


def _try_layers(name: str, layers: tuple[nn.Module, ...], calls: list[LayerCall], hidden: Tensor) -> None:
    """Call one layer of every kind, for what it does with its mask, in place and with random numbers.

    A layer whose work depends on values (a router) cannot run on the meta device; the chain looks at its first call.
    """
    tried = set()
    for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        kind = kind_of(layer, index)
        if kind in tried:
            continue
        tried.add(kind)
        before, seeds = random.getstate(), False
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(UNLIKELY_SEED)
                first_call(layer, call, hidden.detach(), f"layer {index} of {name}")
                seeds = torch.initial_seed() != UNLIKELY_SEED
        except UserError:
            raise
        except Exception:
            continue
        if seeds:
            raise UserError(
                SETTING, f"layer {index} of {name}", "it seeds torch's random numbers, which belong to the caller"
            )
        if random.getstate() != before:
            random.setstate(before)
            raise UserError(
                SETTING,
                f"layer {index} of {name}",
                "it draws from Python's random, which cannot be repeated when the layer is computed again; use torch's",
            )


def kind_of(layer: nn.Module, index: int) -> Hashable:
    """What layers have in common that are built alike; one with methods or hooks of its own is its own kind."""
    modules = list(layer.named_modules())
    changed = any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for _, m in modules)
    return (index if changed else None, *((name, type(module)) for name, module in modules))


def _positions(model: nn.Module, watch: _Watch) -> Positions:
    text = model.config.get_text_config()  # type: ignore[union-attr]
    if not watch.tables:
        rope = getattr(text, "rope_parameters", None) or {}
        scales = rope.get("rope_type") == "longrope"
        return Positions(scaled_from=rope.get("original_max_position_embeddings") if scales else None)
    rows = min(rows for rows, _ in watch.tables)
    paddings = {padding for _, padding in watch.tables if padding is not None}
    if paddings:
        return Positions(first=max(paddings) + 1, limit=rows)
    configured = getattr(text, "max_position_embeddings", None)
    return Positions(limit=rows if configured is None else min(rows, configured))


def _uses(model: nn.Module, layers: tuple[nn.Module, ...], watch: _Watch) -> dict[str, tuple[int, ...]]:
    """Which blocks use each parameter. A frozen parameter that nothing uses stays with the head."""
    blocks: dict[str, set[int]] = {name: set() for name in watch.names.values()}
    for name in watch.used.get("embedding", ()):
        blocks[name].add(0)
    for index, layer in enumerate(layers, start=1):
        for parameter in layer.parameters():
            blocks[watch.names[id(parameter)]].add(index)
    for name in watch.used.get("head", ()):
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
