"""Results that a layer keeps from its forward pass, so that its backward pass recomputes less.

Weights must not be kept: for the backward pass they are loaded again, into any free buffer. ``keep_graph`` replaces
saved weights in the graph by notes, and finds them in the buffers of the backward visit. It also replaces results of
norms and gates by notes that compute them again. ``AttentionResults`` keep attention alone, and need no notes: the
recomputation reads the parameters, which are bound by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.discovery.discovery import kind_of
from tawpipe.model.fused.operations import Again, again_of
from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.compute.attention_results import AttentionResults
from tawpipe.runtime.compute.split import DeferredProducts

PROBED_TOKENS = 32
T = TypeVar("T")
Layer = Callable[[Tensor], Tensor]
Saved = list[Tensor]
"""Tensors that belong only to one graph.

Replacing the memory of one by other memory with equal numbers does not affect the backward pass.
"""


@dataclass(frozen=True)
class _Weight:
    """Note that replaces a saved view of a unit's buffer."""

    unit: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Result:
    """Note that replaces a saved view of a result that is computed again."""

    again: Again
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def keep_graph(
    layer: Layer,
    hidden: Tensor,
    units: Sequence[int],
    bound: Mapping[int, Tensor],
    saved: Saved | None = None,
    *,
    notes: bool = False,
) -> Tensor:
    """Return ``layer(hidden)`` with its whole graph, but without keeping its weights.

    Args:
        layer: The layer.
        hidden: Input, [b, S, H].
        units: Units whose parameters the layer uses.
        bound: Unit -> the flat buffer that its parameters are views of. It is read again in the backward pass, when the
            units must be bound to any buffers.
        saved: Receives the tensors that the graph saves, except weights.
        notes: Do not keep results of norms and gates (``Again``) either; the backward pass computes them again, once.
    """
    spans = {unit: (int(bound[unit].storage_offset()), bound[unit].numel()) for unit in units}
    weights = [(unit, _place(bound[unit]), begin, begin + size) for unit, (begin, size) in spans.items()]

    # No function refers to itself: such a cycle would keep ``saved`` until the garbage is collected.
    def keep(tensor: Tensor) -> Any:
        """Return a note for a weight, else the tensor, which is added to ``saved``."""
        place = tensor.untyped_storage().data_ptr()
        for unit, of_unit, begin, end in weights:
            if place == of_unit and begin <= (offset := int(tensor.storage_offset())) < end:
                return _Weight(unit, offset - begin, tuple(tensor.shape), tensor.stride())
        if saved is None:
            return tensor.detach() if notes else tensor
        saved.append(tensor.data)
        return saved[-1]

    def get(kept: Any) -> Tensor:
        """Return the weight that a note stands for, in its present buffer, or the kept tensor."""
        if not isinstance(kept, _Weight):
            return kept
        flat = bound[kept.unit]
        return flat.as_strided(kept.size, kept.stride, flat.storage_offset() + kept.offset)

    def pack(tensor: Tensor) -> Any:
        """Return a note for a result that is computed again, else what ``keep`` returns."""
        if (again := again_of(tensor)) is None:
            return keep(tensor)
        again.pack(keep)
        return _Result(again, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def unpack(kept: Any) -> Tensor:
        """Return the result that a note stands for, else what ``get`` returns."""
        if not isinstance(kept, _Result):
            return get(kept)
        return kept.again.compute(get).as_strided(kept.size, kept.stride, kept.offset)

    with torch.enable_grad(), saved_tensors_hooks(pack, unpack) if notes else saved_tensors_hooks(keep, get):
        return layer(hidden)


def kept_per_token(chain: Chain) -> dict[str, int]:
    """Return the bytes per token that ``keep_graph`` (``graph``) and ``AttentionResults`` (``kept``) keep of a layer.

    ``products`` is for ``keep_graph`` with notes. Of ``kept``, ``attention`` is the part without the layer's input. The
    numbers are counted by running the first layer, the last layer and one layer of every kind on a few tokens; the
    largest counts. The size grows linearly with the tokens, because no kernel keeps a matrix of scores. A layer's input
    counts. Its output does not, as it is the next block's input. Tensors that all layers of a micro-batch share, such
    as position embeddings, do not count either.

    Call it before the first step, while parameters are placeholders: they do not count.
    """
    most = {"graph": 0, "kept": 0, "attention": 0, "products": 0}
    for block, leaf, context in _one_of_every_kind(chain):
        units = chain.blocks[block].units

        @torch.no_grad()
        def kept(block=block, leaf=leaf, context=context, units=units) -> tuple[int, int, int]:
            """Run a layer; return the bytes that its graph saves, without and with notes, and those of attention."""
            layer, saved, products = partial(chain.layer, block, calls=context), Saved(), Saved()
            layer(leaf.detach().clone())  # a first run, on a copy of the input
            attention = attention_bytes(chain, lambda: layer(leaf.detach()))
            outputs = [keep_graph(layer, leaf, (), {}, saved), keep_graph(layer, leaf, (), {}, products, notes=True)]
            shared = [tensor for tensor in tree_leaves([vars(call) for call in context]) if isinstance(tensor, Tensor)]
            others = set(map(_place, [*outputs, *shared, *chain.parameters_of(units)]))
            stored = [{_place(tensor): tensor for tensor in (*tensors, leaf)} for tensors in (saved, products)]
            sums = [sum(t.untyped_storage().nbytes() for at, t in some.items() if at not in others) for some in stored]
            return sums[0], sums[1], attention

        graph, products, attention = _tried(chain, block, kept, "schedule.recompute", "selective or none", "full")
        sizes = {"graph": graph, "products": products, "kept": attention + leaf.nbytes, "attention": attention}
        most = {name: max(most[name], size // PROBED_TOKENS) for name, size in sizes.items()}
    return most


def kept_for_weights_per_token(chain: Chain) -> int:
    """Return the largest number of bytes per token that a layer keeps between the two parts of its backward pass.

    This is what ``DeferredProducts`` keeps: the gradient of the layer's output is included, and its input if the layer
    begins with a matrix product. It is counted by running layers on a few tokens, as in ``kept_per_token``.
    """
    most = 0
    for block, leaf, context in _one_of_every_kind(chain):

        def kept(block=block, leaf=leaf, context=context) -> int:
            """Run a layer forward and the first part of its backward pass; return the bytes that are kept."""
            deferred = DeferredProducts(chain.parameters_of(chain.blocks[block].units))
            with torch.no_grad():
                chain.layer(block, leaf.detach().clone(), context)
            with torch.enable_grad():
                output = deferred.around(partial(chain.layer, block, calls=context))(leaf)
            torch.autograd.grad(output, leaf, torch.ones_like(output))
            return deferred.bytes

        total = _tried(chain, block, kept, "schedule.strategy", "a backward pass in two parts", "a strategy without")
        most = max(most, total // PROBED_TOKENS)
    return most


def _one_of_every_kind(chain: Chain) -> Iterator[tuple[int, Tensor, tuple[LayerCall, ...]]]:
    """Yield the first layer, the last layer and one of every kind: block, input that requires a gradient, and calls."""
    ids = torch.zeros(1, PROBED_TOKENS, dtype=torch.long, device="cpu")
    batch = MicroBatch.from_rows(ids, ids).to(chain.device)
    with torch.no_grad(), _caller_undisturbed(chain.device):
        hidden, context = chain.embed(batch)
    kinds = {kind_of(layer, index): index + 1 for index, layer in enumerate(chain.layers)}
    for block in {1, len(chain.layers), *kinds.values()}:
        # Ones instead of the placeholder hidden states, so that in-place changes show.
        yield block, torch.ones_like(hidden, requires_grad=True), context


def _tried(chain: Chain, block: int, run: Callable[[], T], setting: str, value: str, otherwise: str) -> T:
    """Return ``run()``, which calls a layer, on placeholders for its weights; if that fails, on weights of zeros.

    The weights are released afterwards, and the caller's random generators stay unchanged.

    Args:
        chain: The model.
        block: Block of the layer.
        run: Function to call.
        setting: Name of the setting that needs the result, for the error.
        value: Its value, for the error.
        otherwise: Values that would work, for the error.

    Raises:
        UserError: If ``run`` fails on zeros, too.
    """
    units = chain.blocks[block].units
    try:
        with _caller_undisturbed(chain.device):
            return run()
    except RuntimeError:
        pass
    try:
        for unit in units:
            chain.bind(unit, torch.zeros(chain.units[unit].spec.numel, dtype=chain.dtype, device=chain.device))
        with _caller_undisturbed(chain.device):
            return run()
    except RuntimeError as error:
        expected = f"{otherwise}: {chain.block_name(block)} cannot be tried while it has no weights ({error})"
        raise UserError(setting, value, expected) from error
    finally:
        for unit in units:
            chain.release(unit)
        chain.forget()


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _caller_undisturbed(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which random draws do not change the caller's generators."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def attention_bytes(chain: Chain, run: Callable[[], Tensor]) -> int:
    """Call ``run``, which runs a layer of ``chain``, and return the bytes of the attention results that it can keep."""
    results = AttentionResults(catches=chain.own_code)
    results.keep(run)
    return results.bytes
