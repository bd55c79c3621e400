"""Results that a layer keeps from its forward pass, so that its backward pass computes less again.

Weights must not be kept: they come anew for the backward pass, into whatever buffer is free then. ``keep_graph`` leaves
notes in the graph where autograd saved one, and finds it in the buffers of the backward visit. ``keep_attention`` needs
no such care: what it computes again reads the parameters, which are bound by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.discovery import kind_of
from tawpipe.runtime.randomness import draws

PROBED_TOKENS = 32
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Weight:
    """A note in the place of a saved view of a unit's buffer."""

    unit: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def keep_graph(layer: Layer, hidden: Tensor, units: Sequence[int], bound: Mapping[int, Tensor]) -> Tensor:
    """``layer(hidden)`` with its whole graph, but without its weights.

    Args:
        hidden: [b, S, H].
        units: whose parameters the layer uses.
        bound: unit -> the flat buffer that its parameters are views of. It is read again in the backward pass, when
            the same units must be bound, wherever they are then.
    """
    own = [(unit, bound[unit], bound[unit].untyped_storage().data_ptr()) for unit in units]

    def pack(saved: Tensor) -> Any:
        storage = saved.untyped_storage().data_ptr()
        for unit, flat, place in own:
            offset = int(saved.storage_offset() - flat.storage_offset())
            if storage == place and 0 <= offset < flat.numel():
                return _Weight(unit, offset, tuple(saved.shape), saved.stride())
        return saved

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Weight):
            return kept
        flat = bound[kept.unit]
        return flat.as_strided(kept.size, kept.stride, flat.storage_offset() + kept.offset)

    with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
        return layer(hidden)


def keep_attention(layer: Layer, hidden: Tensor, *, again: Callable[[], AbstractContextManager[object]]) -> Tensor:
    """``layer(hidden)`` with a graph that keeps the results of attention and computes the rest again.

    Attention is the part that grows with the square of a document's length, and its result is small.

    Args:
        again: makes what the recomputation runs in, so that it draws the random numbers of the forward pass.
    """

    def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        first, second = create_selective_checkpoint_contexts(_policy)
        return first, _both(again, second)

    with torch.enable_grad():
        output = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    assert isinstance(output, Tensor)
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
    ids = torch.zeros(1, PROBED_TOKENS, dtype=torch.long)
    batch = MicroBatch.from_rows(ids, ids).to(chain.device)
    most = {"graph": 0, "kept": 0, "attention": 0}
    with torch.no_grad(), _caller_undisturbed(chain.device):
        hidden, context = chain.embed(batch)
    shared = {_place(one) for one in tree_leaves([vars(call) for call in context]) if isinstance(one, Tensor)}
    kinds = {kind_of(layer, index): index + 1 for index, layer in enumerate(chain.layers)}
    for block in {1, len(chain.layers), *kinds.values()}:
        stored: dict[int, Tensor] = {}

        def store(saved: Tensor, stored: dict[int, Tensor] = stored) -> Tensor:
            if saved.untyped_storage().nbytes() > saved.element_size():  # else a placeholder of a weight
                stored[_place(saved)] = saved
            return saved

        given = torch.ones_like(hidden)  # not what there is: numbers, so that changes of them show
        leaf = given.clone().requires_grad_()
        try:
            with _caller_undisturbed(chain.device), torch.no_grad():
                chain.layer(block, given, context)  # the first call gets a copy of its input
            hooks = saved_tensors_hooks(store, lambda saved: saved)
            with _caller_undisturbed(chain.device), torch.enable_grad(), hooks, _Attention() as attention:
                output = chain.layer(block, leaf, context)
        except RuntimeError as error:
            expected = f"full: {chain.block_name(block)} cannot be tried while it has no weights ({error})"
            raise UserError("schedule.recompute", "selective or none", expected) from error
        stored[_place(leaf)] = leaf
        others = {_place(output), *shared}
        total = sum(one.untyped_storage().nbytes() for place, one in stored.items() if place not in others)
        most["graph"] = max(most["graph"], total // PROBED_TOKENS)
        own = attention.bytes + leaf.nbytes
        most["kept"] = max(most["kept"], own // PROBED_TOKENS)
        most["attention"] = max(most["attention"], attention.bytes // PROBED_TOKENS)
    return most


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
