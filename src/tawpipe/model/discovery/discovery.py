"""Finds the chain of layers in a model by following one forward pass, with recorders in place of the layers.

A list of known models could not keep up with transformers. It works on the meta device as well as on a real one."""

from __future__ import annotations

import random
import re
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tawpipe.errors import UserError
from tawpipe.model.attention.attention import NAME, PackedMask, packing
from tawpipe.model.discovery.first_call import ValuesBefore, first_call, plain_tensors
from tawpipe.model.discovery.watch import (
    SAMPLE_TOKENS,
    Counting,
    FollowedWeights,
    Watch,
    WatchedFeeder,
    WatchedRecorder,
)
from tawpipe.model.kernels import Documents
from tawpipe.model.mixers.find_mixers import Mixing, mixing_of
from tawpipe.model.refuse import NOT_CAUSAL, ApartError, refuse_not_causal, rope_settings, unsupported
from tawpipe.model.stubs import Feed, LayerCall, LayersReached, Tape, modules_above, taken_by, view_with_layers

LENGTHS_OF_TUPLES = 0, 1, 2, 3
"""Lengths of the tuple that a model may expect from a layer, which are tried in order; 0 for hidden states alone."""
LAYER_NUMBER = re.compile(r"idx|index|number|_id$")
"""Pattern for names of the attribute in which a layer keeps its number."""
UNLIKELY_SEED = 0x5EED_0F_A_C0DE


@dataclass(frozen=True)
class PositionUse:
    """Use of token positions by a model.

    Args:
        first: position of a document's first token if the caller gives none. It is 0 except for RoBERTa and similar
            models, which count tokens from the padding token's number + 1.
        limit: given positions must be below this number, because they index a table; None if there is no limit.
        scaled_from: document length in tokens above which other angles are used (longrope), for all documents of a
            micro-batch; None if lengths do not matter.
    """

    first: int = 0
    limit: int | None = None
    scaled_from: int | None = None


@dataclass(frozen=True)
class Discovery:
    """Result of following a model: its layers, how the model calls them, and which blocks use each parameter."""

    path: str
    """Name of the layer list in the model."""
    layers: tuple[nn.Module, ...]
    """Layers in the order of their calls. A module that is called several times appears several times."""
    returns: int
    """Length of the tuple that the model expects from a layer, or 0 for hidden states alone."""
    width: int
    """Elements of one token's hidden states."""
    uses: dict[str, tuple[int, ...]]
    """Canonical name of every parameter -> ascending indices of the blocks that use it; 0 is the embedding, N + 1 the
    head."""
    embedding_backward_reads_weights: bool
    calls_need_weights: str
    """Sentence about a layer's argument, other than the hidden states, that is computed from weights; ``""`` if there
    is none."""
    positions: PositionUse
    mixing: tuple[Mixing, ...]
    """Modules that mix tokens in each layer, if layers may carry states; otherwise empty."""


def discover(model: nn.Module, *, alone: bool = False, states: bool = False) -> Discovery:
    """Run a forward pass of ``model`` on a few tokens, without its layers, and describe its chain of layers.

    Recorders take the place of the layers. Afterwards one layer of every kind is called. The model is not changed.

    Args:
        model: a causal LM whose attention implementation is ``attention.NAME``; its own is possible with ``alone``.
        alone: True if every document has a row of its own, so that documents need not be kept apart.
        states: True if layers may carry states along a row, by mixers that are then searched for.

    Raises:
        ApartError: the model does not keep the documents of a row, or its tokens, apart as causal attention would.
        UserError: no list of layers is called in order with only hidden states passed on, a layer does not receive our
            mask, or a trainable parameter is used by no block.
    """
    kind = type(model).__name__
    devices = {parameter.device.type for parameter in model.parameters()}
    if len(devices) != 1:
        raise unsupported(kind, f"all parameters must be on one device, not on {', '.join(sorted(devices))}")
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)  # type: ignore[union-attr]
    if count is None:
        raise unsupported(
            kind, "its config must say num_hidden_layers, and one list of so many layers be called in turn"
        )
    candidates = sorted(
        (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count),
        key=lambda name: name.count("."),
    )
    failures = []
    for path in candidates:
        for returns in LENGTHS_OF_TUPLES:
            try:
                return _follow(model, path, returns, alone=alone, states=states)
            except UserError:
                raise
            except Exception as error:
                failures.append(error)
    failures.sort(key=lambda error: not isinstance(error, AssertionError))  # errors of the recorders first
    template = "; {}" if failures and isinstance(failures[0], AssertionError) else " ({})"
    reason = template.format(failures[0]) if failures else ""
    raise unsupported(
        kind, f"expected {count} layers that are called one after the other with hidden states only{reason}"
    ) from (failures[0] if failures else None)


def _follow(model: nn.Module, path: str, returns: int, *, alone: bool, states: bool) -> Discovery:
    """Run the model with recorders at ``path``, check all requirements of a chain, and return its description.

    Args:
        model: the model.
        path: name of the list of layers.
        returns: length of the tuple that a layer returns, or 0 for hidden states alone.
        alone, states: as in ``discover``.

    Raises:
        ApartError, UserError: a requirement is not met; see ``discover``.
        Exception: anything that the model's code raises if ``path`` or ``returns`` is wrong.
    """
    at: Any = model.get_submodule(path)
    layers = tuple(at)
    kind = type(model).__name__
    for module in modules_above(model, path):
        if "forward" in vars(module):
            raise unsupported(
                f"{type(module).__name__}.forward",
                "the method was replaced on the object, where it would call the object's own layers; make a subclass",
            )
    refuse_not_causal(model, layers)
    watch = Watch(model)
    held = ValuesBefore(model)
    tape, followed, counting = _follow_embedding(model, path, layers, watch, returns, alone=alone)
    assert tape.hidden is not None
    assert tape.hidden.shape[:2] == (1, SAMPLE_TOKENS), "hidden states are not [rows, tokens, ...]"
    _follow_head(model, path, layers, watch, Feed(returns, torch.zeros_like(tape.hidden)), alone=alone)

    held.check(kind)
    if watch.used.get("between"):
        raise unsupported(kind, f"parameters used between layers: {', '.join(sorted(watch.used['between']))}")
    counted = counting.has_counted or any(counting.hands_on(call.tensors) for call in tape.calls)
    if counted and not alone:
        raise ApartError(kind, "the model counts positions along the row by itself and takes no position_ids")
    if watch.read_by_head:
        raise unsupported(
            kind,
            f"after its last layer the model reads {', '.join(sorted(watch.read_by_head))}, from before the layers; "
            "the head may read what the last layer gives and its own parameters only",
        )
    for index, call in enumerate(tape.calls):
        leaves = tree_leaves((call.args, call.kwargs))
        masks = [leaf for leaf in leaves if isinstance(leaf, PackedMask)]
        if not masks and not alone and not states:
            raise ApartError(kind, f"layer {index} is not given a mask made by transformers' mask interface")
        if masks and all(mask.sees_future for mask in masks):
            raise unsupported(kind, NOT_CAUSAL)
        for mask in masks:
            mask.check()
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise unsupported(kind, f"layer {index} is given a trainable tensor besides the hidden states")
    mixing = _mixing(model, layers, tape.calls, tape.hidden) if states and not alone else ()
    _try_layers(model, layers, tape.calls, tape.hidden, mixing, counting, alone=alone)
    uses = _uses(model, layers, watch)
    width = tape.hidden.shape[2:].numel()
    why = [
        f"layer {index} is given a tensor besides the hidden states that is computed from weights of the embedding side"
        for index, call in enumerate(tape.calls)
        if any(map(followed.is_derived, call.tensors))
    ]
    positions = _positions(model, watch, counts_by_itself=counted)
    return Discovery(path, layers, returns, width, uses, followed.weights_saved, "".join(why[:1]), positions, mixing)


def _sample(model: nn.Module, *, alone: bool) -> tuple[dict[str, Tensor], Documents]:
    """Return arguments for a forward pass of a few tokens without padding, and the borders of their documents.

    The row holds two documents, or one if ``alone``."""
    device = next(model.parameters()).device
    lengths = (SAMPLE_TOKENS,) if alone else (4, SAMPLE_TOKENS - 4)
    ids = torch.zeros(1, SAMPLE_TOKENS, dtype=torch.long, device=device)
    positions = torch.tensor([[place for length in lengths for place in range(length)]], device=device)
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids), "use_cache": False}
    return inputs, Documents.of(lengths, (1, SAMPLE_TOKENS), device)


def _follow_embedding(
    model: nn.Module, path: str, layers: tuple[nn.Module, ...], watch: Watch, returns: int, *, alone: bool
) -> tuple[Tape, FollowedWeights, Counting]:
    """Run the model up to its last layer.

    Returns:
        The tape with the layers' calls, the watch over results computed from weights, and the watch over counted
        positions.
    """
    tape = Tape(returns)
    recorders = [WatchedRecorder(layer, i, len(layers), tape, watch) for i, layer in enumerate(layers)]
    view, _ = view_with_layers(model, path, recorders)
    inputs, documents = _sample(model, alone=alone)
    followed = FollowedWeights(model)
    counting = Counting((*model.parameters(), *model.buffers(), *plain_tensors(model).values()))
    counting.give(inputs["input_ids"], inputs["position_ids"])  # counting the mask means counting the row's tokens
    hooks = torch.autograd.graph.saved_tensors_hooks(followed.pack, lambda tensor: tensor)
    try:
        with _own_random_numbers(model), watch, packing(documents), torch.enable_grad(), hooks, followed, counting:
            watch.begin("embedding", inputs)
            view(**taken_by(view, inputs, alone=alone))
        raise AssertionError("the model does not call all of its layers")
    except LayersReached:
        return tape, followed, counting
    finally:
        watch.phase = None


def _follow_head(
    model: nn.Module, path: str, layers: tuple[nn.Module, ...], watch: Watch, feed: Feed, *, alone: bool
) -> None:
    """Run the model's code after its last layer; ``watch`` notes the parameters and tensors that it reads."""
    feeders = [WatchedFeeder(layer, i, len(layers), feed, watch) for i, layer in enumerate(layers)]
    view, _ = view_with_layers(model, path, feeders)
    inputs, documents = _sample(model, alone=alone)
    assert feed.hidden is not None
    inputs["inputs_embeds"] = feed.hidden.new_zeros(*inputs.pop("input_ids").shape, embedding_width(model))
    try:
        with _own_random_numbers(model), watch, packing(documents), torch.no_grad():
            watch.begin("before", inputs)
            view(**taken_by(view, inputs, alone=alone))
    finally:
        watch.phase = None


def embedding_width(model: Any) -> int:
    """Return the number of elements of one token's embedding."""
    width = getattr(model.get_input_embeddings(), "embedding_dim", None)
    return width or model.config.get_text_config().hidden_size


def _try_layers(
    model: nn.Module,
    layers: tuple[nn.Module, ...],
    calls: list[LayerCall],
    hidden: Tensor,
    mixing: tuple[Mixing, ...],
    counting: Counting,
    *,
    alone: bool,
) -> None:
    """Call one layer of every kind, and check its use of masks, in-place changes, random numbers and positions.

    A layer that branches on values (a router) cannot run on the meta device. The chain checks its first real call
    instead.

    Raises:
        ApartError: a layer counts positions along the row.
        UserError: a layer changes tensors in place, seeds torch, or draws from Python's ``random``.
    """
    name = type(model).__name__
    tried = set()
    counting.give(hidden)
    for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        kind = kind_of(layer, index)
        if kind in tried:
            continue
        tried.add(kind)
        before, seeds = random.getstate(), False
        mixers = [layer.get_submodule(mixer) for mixer in mixing[index].mixers] if mixing else []
        try:
            with _own_random_numbers(model), torch.no_grad(), counting.leaving_out(mixers), counting:
                torch.default_generator.manual_seed(UNLIKELY_SEED)
                first_call(layer, call, hidden.detach(), f"layer {index} of {name}")
                seeds = torch.initial_seed() != UNLIKELY_SEED
        except UserError:
            raise
        except Exception:
            pass
        if counting.has_counted and not alone:
            raise ApartError(name, f"layer {index} counts positions along the row by itself")
        if seeds:
            raise unsupported(f"layer {index} of {name}", "it seeds torch's random numbers, which belong to the caller")
        if random.getstate() != before:
            random.setstate(before)
            raise unsupported(
                f"layer {index} of {name}",
                "it draws from Python's random, which cannot be repeated when the layer is computed again; use torch's",
            )


def _mixing(
    model: nn.Module, layers: tuple[nn.Module, ...], calls: list[LayerCall], hidden: Tensor
) -> tuple[Mixing, ...]:
    """Return the modules that mix tokens, for every layer.

    Raises:
        ApartError: a module mixes tokens that is neither a mixer nor attention with our mask, or there are no mixers.
    """
    kinds: dict[Hashable, Mixing] = {}
    for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        kind = kind_of(layer, index)
        if kind not in kinds:
            with _own_random_numbers(model), torch.no_grad():
                kinds[kind] = mixing_of(layer, call, hidden.detach())
        mixing = kinds[kind]
        masked = any(isinstance(leaf, PackedMask) for leaf in tree_leaves((call.args, call.kwargs)))
        convolves = not mixing.mixers and any(isinstance(module, nn.Conv1d) for module in layer.modules())
        if mixing.unknown or convolves or (mixing.attention and not masked):
            what = ", ".join(mixing.unknown) or "something"
            raise ApartError(type(model).__name__, f"{what} of layer {index} mixes tokens in a way that is not known")
    if not any(mixing.mixers for mixing in kinds.values()):
        raise ApartError(
            type(model).__name__, "its layers carry a state in a way that is not known: none asks a cache for it"
        )
    return tuple(kinds[kind_of(layer, index)] for index, layer in enumerate(layers))


def _own_random_numbers(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which the model's random draws do not change the state of the caller's generators."""
    return torch.random.fork_rng(devices={p.device for p in model.parameters() if p.device.type == "cuda"})


def kind_of(layer: nn.Module, index: int) -> Hashable:
    """Return a key that is equal for layers built alike: equal modules and settings, except the layer's number.

    A layer with its own methods or hooks is its own kind.

    Args:
        layer: the layer.
        index: number of the layer in the model.
    """
    modules = list(layer.named_modules())
    changed = any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for _, m in modules)
    settings = [
        (key, value)
        for _, module in modules
        for key, value in vars(module).items()
        if isinstance(value, int | str) and not LAYER_NUMBER.search(key)
    ]
    return (index if changed else None, *((name, type(module)) for name, module in modules), *settings)


def _positions(model: nn.Module, watch: Watch, *, counts_by_itself: bool) -> PositionUse:
    """Return how the model uses positions, from its config and from the tables that positions index."""
    text = model.config.get_text_config()  # type: ignore[union-attr]
    if counts_by_itself or text._attn_implementation != NAME:  # its own tables may have this length
        return PositionUse(limit=getattr(text, "max_position_embeddings", None))
    if not watch.tables:
        edges = [
            rope["original_max_position_embeddings"]
            for rope in rope_settings(getattr(text, "rope_parameters", None))
            if rope["rope_type"] == "longrope"
        ]
        return PositionUse(scaled_from=min(edges, default=None))
    rows = min(rows for rows, _ in watch.tables)
    paddings = {padding for _, padding in watch.tables if padding is not None}
    if paddings:
        return PositionUse(first=max(paddings) + 1, limit=rows)
    configured = getattr(text, "max_position_embeddings", None)
    return PositionUse(limit=rows if configured is None else min(rows, configured))


def _uses(model: nn.Module, layers: tuple[nn.Module, ...], watch: Watch) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> indices of the blocks that use each parameter.

    A frozen parameter that is unused belongs to the head.

    Raises:
        UserError: a trainable parameter is used by no block.
    """
    blocks: dict[str, set[int]] = {name: set() for name in watch.names.values()}
    for name in watch.used.get("embedding", ()):
        blocks[name].add(0)
    for index, layer in enumerate(layers, start=1):
        for parameter in layer.parameters():
            blocks[watch.names[id(parameter)]].add(index)
    for name in watch.used.get("head", ()):
        blocks[name].add(len(layers) + 1)

    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    unused = [name for name, users in blocks.items() if not users]
    if wrong := [name for name in unused if name in trainable]:
        raise unsupported(
            type(model).__name__,
            f"trainable parameters that no block of the chain uses: {', '.join(wrong[:5])}"
            f"{' and more' if len(wrong) > 5 else ''}; freeze them (requires_grad_(False)) or remove them",
        )
    for name in unused:
        blocks[name].add(len(layers) + 1)
    return {name: tuple(sorted(users)) for name, users in blocks.items()}
