"""Results that a layer keeps from its forward pass, so that its backward pass computes less again.

Weights must not be kept: they come anew for the backward pass, into whatever buffer is free then. ``keep_graph`` leaves
notes in the graph where autograd saved one, and finds it in the buffers of the backward visit. ``keep_attention`` needs
no such care: what it computes again reads the parameters, which are bound by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.discovery.discovery import kind_of
from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.compute.randomness import draws
from tawpipe.runtime.compute.split import DeferredProducts

PROBED_TOKENS = 32
T = TypeVar("T")
Layer = Callable[[Tensor], Tensor]
Saved = list[Tensor]
"""Tensors of a graph that are nobody else's, each under a name of its own: whoever gives one other memory with the same
numbers changes nothing for the backward pass.
"""


@dataclass(frozen=True)
class _Weight:
    """A note in the place of a saved view of a unit's buffer."""

    unit: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def keep_graph(
    layer: Layer, hidden: Tensor, units: Sequence[int], bound: Mapping[int, Tensor], saved: Saved | None = None
) -> Tensor:
    """``layer(hidden)`` with its whole graph, but without its weights.

    Args:
        hidden: [b, S, H].
        units: whose parameters the layer uses.
        bound: unit -> the flat buffer that its parameters are views of. It is read again in the backward pass, when
            the same units must be bound, wherever they are then.
        saved: takes what the graph saves besides weights.
    """
    weights = [(unit, bound[unit], bound[unit].untyped_storage().data_ptr()) for unit in units]

    def pack(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage().data_ptr()
        for unit, flat, place in weights:
            offset = int(tensor.storage_offset() - flat.storage_offset())
            if storage == place and 0 <= offset < flat.numel():
                return _Weight(unit, offset, tuple(tensor.shape), tensor.stride())
        if saved is None:
            return tensor
        saved.append(tensor.data)
        return saved[-1]

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Weight):
            return kept
        flat = bound[kept.unit]
        return flat.as_strided(kept.size, kept.stride, flat.storage_offset() + kept.offset)

    with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
        return layer(hidden)


def keep_attention(
    layer: Layer, hidden: Tensor, *, again: Callable[[], AbstractContextManager[object]], saved: Saved | None = None
) -> Tensor:
    """``layer(hidden)`` with a graph that keeps the results of attention and computes the rest again.

    Attention is the part that grows with the square of a document's length, and its result is small.

    Args:
        again: makes what the recomputation runs in, so that it draws the random numbers of the forward pass.
        saved: takes the results of attention.
    """
    modes: list[Any] = []

    def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        first, second = create_selective_checkpoint_contexts(_policy)
        modes.append(first)
        return first, _both(again, second)

    with torch.enable_grad():
        output = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    assert isinstance(output, Tensor)
    if saved is not None:  # torch has no public way to them; where there is none of these names, they stay
        tables = [[*getattr(mode, "storage", {}).values()] for mode in modes]
        results = [getattr(kept, "val", None) for kept in tree_leaves(tables)]
        saved += [result for result in results if isinstance(result, Tensor)]
    return output


@contextmanager
def _both(
    again: Callable[[], AbstractContextManager[object]], cached: AbstractContextManager[object]
) -> Iterator[None]:
    with again(), cached:
        yield


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name()
    is_attention = ("attention" in name or "attn" in name) and "backward" not in name
    # A result that is kept is not drawn again, and all random numbers after it would be other ones.
    keeps = is_attention and not draws(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def kept_per_token(chain: Chain) -> dict[str, int]:
    """Bytes that ``keep_graph`` (``graph``) and ``keep_attention`` (``kept``; of it, ``attention``) keep of a layer for
    every token.

    Counted by running the first layer, the last one and one of every kind on a few tokens; the layer that keeps most
    counts. What is kept grows with the tokens alone, because no kernel keeps a matrix of scores. A layer's input
    counts, its output does not: that is the next block's input; nor does what all layers of a micro-batch share, such
    as position embeddings.
    To be called before the first step, while parameters are placeholders: they do not count.
    """
    most = {"graph": 0, "kept": 0, "attention": 0}
    for block, leaf, context in _one_of_every_kind(chain):
        units = chain.blocks[block].units

        def kept(block=block, leaf=leaf, context=context, units=units) -> tuple[int, int]:
            stored: dict[int, Tensor] = {}

            def store(saved: Tensor) -> Tensor:
                saved = saved.detach()  # or the graph would hold itself
                stored[_place(saved)] = saved
                return saved

            with torch.no_grad():
                chain.layer(block, leaf.detach().clone(), context)  # the first call gets a copy of its input
            with torch.enable_grad(), saved_tensors_hooks(store, lambda saved: saved), _Attention() as attention:
                output = chain.layer(block, leaf, context)
            stored[_place(leaf)] = leaf
            shared = [tensor for tensor in tree_leaves([vars(call) for call in context]) if isinstance(tensor, Tensor)]
            others = set(map(_place, [output, *shared, *chain.parameters_of(units)]))
            total = sum(tensor.untyped_storage().nbytes() for place, tensor in stored.items() if place not in others)
            return total, attention.bytes

        total, attention = _tried(chain, block, kept, "schedule.recompute", "selective or none", "full")
        most["graph"] = max(most["graph"], total // PROBED_TOKENS)
        most["kept"] = max(most["kept"], (attention + leaf.nbytes) // PROBED_TOKENS)
        most["attention"] = max(most["attention"], attention // PROBED_TOKENS)
    return most


def kept_for_weights_per_token(chain: Chain) -> int:
    """Bytes that the layer which keeps most keeps for every token between the two parts of its backward pass
    (``DeferredProducts``), counted in the same way. The gradient of its output is among them, and where it begins with
    a product its input.
    """
    most = 0
    for block, leaf, context in _one_of_every_kind(chain):

        def kept(block=block, leaf=leaf, context=context) -> int:
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
    """The first layer, the last one and one of every kind: its block, an input that takes a gradient, and the calls."""
    ids = torch.zeros(1, PROBED_TOKENS, dtype=torch.long, device="cpu")
    batch = MicroBatch.from_rows(ids, ids).to(chain.device)
    with torch.no_grad(), _caller_undisturbed(chain.device):
        hidden, context = chain.embed(batch)
    kinds = {kind_of(layer, index): index + 1 for index, layer in enumerate(chain.layers)}
    for block in {1, len(chain.layers), *kinds.values()}:
        # Not the hidden states that there are: numbers, so that changes of them show.
        yield block, torch.ones_like(hidden, requires_grad=True), context


def _tried(chain: Chain, block: int, run: Callable[[], T], setting: str, value: str, otherwise: str) -> T:
    """``run()``, which calls a layer, on placeholders; or on zeros, where a kernel takes none.

    Raises:
        UserError: it cannot; the value of a setting that needs it, and what would do.
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
    return tensor.untyped_storage().data_ptr()


def _caller_undisturbed(device: torch.device) -> AbstractContextManager[object]:
    """A context: within it, what is drawn takes nothing from the caller's generators."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def attention_bytes(run: Callable[[], object]) -> int:
    """Bytes of the results of attention in ``run`` that ``keep_attention`` would keep."""
    with _Attention() as attention:
        run()
    return attention.bytes


class _Attention(TorchDispatchMode):
    """Adds up the results of attention."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _policy(None, func, *args, **(kwargs or {})) is CheckpointPolicy.MUST_SAVE:
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result
