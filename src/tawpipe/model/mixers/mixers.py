"""Mixers: modules of a layer that carry a state along a row (Mamba, linear attention, short convolutions), and so would
mix its documents. All else of a layer runs on the whole row, they run on every document by itself.

Documents of similar lengths are padded behind to a rectangle, one call for each. As nothing sees what is behind it,
this is exact with any kernel. Borders that are handed to kernels are not relied on: transformers drops them on the way
to several (Kimi-Linear's, Mamba-2's), silently.

In chunks of a row a document's state goes from one chunk to the next, with its gradient: a ``Carrier`` stands where
transformers has a cache, which would be written in place. What a mixer is, is known by what it asks of that cache. A
document of which a chunk has the first token alone hands on this token instead of a state, since code for one token
more writes its state in place; the next chunk begins with it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tawpipe.model.attention.chunked import Chunk, KeysReached, State
from tawpipe.model.kernels import Documents
from tawpipe.model.mixers.carrier import Carrier, cache_argument
from tawpipe.model.mixers.in_turn import Groups
from tawpipe.model.refuse import unsupported
from tawpipe.model.stubs import HIDDEN, LayerCall

MASK = "attention_mask"
TOKEN = "token", 0
"""The key of a first token in what is handed from chunk to chunk."""
ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Of the largest number, by how much results may differ that should be the same; of other types ``WIDE_ROUNDING``."""
WIDE_ROUNDING = 1e-6
STATE_ROUNDING = 100.0
"""Times as much for a row in two parts, in which sums have another order."""
TRIED = 16
"""Tokens on which a mixer is tried in two parts."""
GOES_ON_WRONGLY = "does not continue from the state that it receives when a chunk begins"
WHOLE = "--schedule.sequence-chunk 0 runs them whole"


@dataclass(frozen=True)
class Piece:
    """A document, or the part of one that a chunk has; whether it goes on from the chunk before, and into the next."""

    row: int
    length: int
    arrives: bool = False
    leaves: bool = False


def pieces_of(documents: Documents, chunk: Chunk | None) -> list[Piece]:
    """The pieces of all rows, in the order of their tokens.

    >>> from tawpipe.model.attention.chunked import KeyStore
    >>> whole = Documents.of((5, 3), (1, 8), torch.device("cpu"))
    >>> [(one.length, one.arrives, one.leaves) for one in pieces_of(whole, Chunk(KeyStore(1, 8), 4, 8))]
    [(1, True, False), (3, False, False)]
    """
    if chunk is None:
        return [Piece(row, length) for row, _, length in documents.spans]
    inside = []
    for row, first, length in documents.spans:
        begin, end = max(first, chunk.begin), min(first + length, chunk.end)
        if begin < end:
            inside.append(Piece(row, end - begin, first < chunk.begin, first + length > chunk.end))
    return inside


@dataclass(frozen=True, eq=False)
class RowCall(LayerCall):
    """A layer's call with the documents of its rows, which the layer's mixers look at."""

    documents: Documents
    checked: set[object] = field(default_factory=set)
    """Mixers that have been seen to keep documents apart, or to go on from a state: by kind and type of numbers."""
    chunk: Chunk | None = None

    def __call__(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        token = _call.set(self)
        try:
            return super().__call__(layer, hidden)
        finally:
            _call.reset(token)

    def cut(self, along: Sequence[int | None], chunk: Chunk) -> RowCall:
        cut = super().cut(along, chunk)
        return replace(self, args=cut.args, kwargs=cut.kwargs, chunk=chunk)


_call: ContextVar[RowCall | None] = ContextVar("tawpipe_row_call", default=None)


class Mixer(nn.Module):
    """What a mixer becomes an instance of, besides its own class: in a ``RowCall`` it runs on every piece by itself."""

    @torch.compiler.disable  # which pieces there are differs from call to call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward  # type: ignore[misc]
        call = _call.get()
        if call is None or (call.chunk is None and len(call.documents.spans) == call.documents.rows):
            return run(*args, **kwargs)
        hidden, given = LayerCall.take(args, kwargs)
        pieces = OnPieces(self, run, given, call)
        output = pieces(hidden)
        key = type(self), hidden.dtype, call.chunk is None
        if key not in call.checked and not hidden.is_meta:
            with torch.no_grad(), _evaluating(self):  # dropout would draw, and differ
                pieces.check(hidden.detach())
            call.checked.add(key)
        if call.chunk is not None and call.chunk.only_keys:
            raise KeysReached
        return (output, *[None] * (pieces.results - 1)) if pieces.results else output


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """A module and what is in it in evaluation mode, and then as they were."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@functools.cache
def _with_mixer(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Mixer.forward(self, *args, **kwargs)

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": functools.wraps(kind.forward)(forward)}
    return type(kind.__name__, (Mixer, kind), names)


def make_mixer(module: nn.Module) -> None:
    """Let a module run on every document by itself, where it is called in a ``RowCall``. No other of its class does."""
    if not isinstance(module, Mixer):
        module.__class__ = _with_mixer(type(module))


class OnPieces:
    """One call of a mixer, on the pieces of some rows.

    Args:
        run: its own forward pass.
        given: what it was called with.
    """

    def __init__(self, mixer: nn.Module, run: Callable[..., Any], given: LayerCall, call: RowCall) -> None:
        self._mixer, self._run, self._given = mixer, run, given
        self._chunk, self._name = call.chunk, cache_argument(mixer)
        self._pieces = pieces_of(call.documents, call.chunk)
        self._arrived = call.chunk.arrived.get(mixer, {}) if call.chunk else {}
        self.results = 0
        """Length of the tuple that the mixer gives; 0 for a tensor."""

    def __call__(self, hidden: Tensor, fill: float = 0.0) -> Tensor:
        """Its output, [b, S, H] as its input, with ``fill`` behind what is shorter than others."""
        groups = Groups.by(map(self._kind, self._pieces), [piece.length for piece in self._pieces])
        leaves, form = tree_flatten((self._given.args, self._given.kwargs))
        split = [groups.split(leaf) if _along_tokens(leaf, hidden) else None for leaf in leaves]
        outputs = []
        for place, (numbers, part) in enumerate(zip(groups.numbers, groups.split(hidden, fill), strict=True)):
            values = [leaf if parts is None else parts[place] for leaf, parts in zip(leaves, split, strict=True)]
            given = LayerCall(*tree_unflatten(values, form))
            outputs.append(self._on_group([self._pieces[number] for number in numbers], part, given))
        return groups.join(outputs, hidden.shape)

    def _kind(self, piece: Piece) -> Hashable:
        """What pieces of one group have in common. A state behind a piece is that behind its last token."""
        after_token = piece.arrives and TOKEN in self._arrived[piece.row]
        size = piece.length if piece.leaves else (piece.length - 1).bit_length()
        return piece.arrives, after_token, piece.leaves, size

    def _on_group(self, pieces: Sequence[Piece], part: Tensor, given: LayerCall) -> Tensor:
        length, leaves = part.shape[1], pieces[0].leaves
        before: State = {}
        if pieces[0].arrives:
            states = [self._arrived[piece.row] for piece in pieces]
            before = {key: torch.cat([state[key] for state in states]) for key in states[0]}
        if (token := before.pop(TOKEN, None)) is not None:
            part = torch.cat([token, part], dim=1)
        alone = leaves and not before and part.shape[1] == 1
        carrier = Carrier(before) if before or (leaves and not alone) else None
        output = self._call(F.pad(part, (0, 0, 0, 1)) if carrier and part.shape[1] == 1 else part, given, carrier)
        if leaves:
            assert self._chunk is not None
            after = {TOKEN: part.clone()} if alone or carrier is None else carrier.after
            left = self._chunk.left.setdefault(self._mixer, {})
            for at, piece in enumerate(pieces):
                left[piece.row] = {key: state[at : at + 1] for key, state in after.items()}
        first = int(token is not None)
        return output[:, first : first + length]

    def _call(self, part: Tensor, given: LayerCall, carrier: Carrier | None) -> Tensor:
        kwargs = {**given.kwargs, MASK: None} if MASK in given.kwargs else dict(given.kwargs)
        if carrier is not None:
            assert self._name is not None
            kwargs[self._name] = carrier
        args = (part, *given.args[1:])
        if not given.args:
            args, kwargs[HIDDEN] = (), part
        output = self._run(*args, **kwargs)
        self.results = len(output) if isinstance(output, tuple) else 0
        return output[0] if isinstance(output, tuple) else output

    def check(self, hidden: Tensor) -> None:
        """Raise UserError if documents reach one another, or if states are not what a mixer goes on from.

        Args:
            hidden: of the call.
        """
        name = type(self._mixer).__name__
        if self._chunk is None:
            check_apart(name, self, hidden, self(hidden), self._pieces[0].length)
            return
        tokens = hidden.flatten(0, 1)
        row = tokens[torch.arange(TRIED, device=hidden.device) % len(tokens)][None]
        arguments = self._given.args, self._given.kwargs
        given = LayerCall(*tree_map(lambda leaf: None if _along_tokens(leaf, hidden) else leaf, arguments))
        first = Carrier()
        parts = [self._call(row[:, : TRIED // 2], given, first)]
        parts.append(self._call(row[:, TRIED // 2 :], given, Carrier(first.after)))
        if not _alike(self._call(row, given, None), torch.cat(parts, dim=1), STATE_ROUNDING):
            raise unsupported(name, f"it {GOES_ON_WRONGLY}; {WHOLE}")


def check_apart(
    name: str, mixer: Callable[[Tensor, float], Tensor], hidden: Tensor, output: Tensor, first: int
) -> None:
    """Exchange the first document for another, and what stands behind documents: what comes of the others must stay.

    Args:
        mixer: is given hidden states, and a number to stand behind documents.
        first: tokens of the first document.

    Raises:
        UserError: a document reaches others.
    """
    tokens = hidden.flatten(0, 1)
    other = torch.cat([tokens[:first].flip(-1) + 1, tokens[first:]]).view_as(hidden)
    again = mixer(other, float(tokens.abs().max()))
    if not _alike(output.flatten(0, 1)[first:], again.flatten(0, 1)[first:], 1.0):
        raise unsupported(
            name, ("documents of one row influence each other; --packing none gives each document its own row")
        )


def _alike(first: Tensor, second: Tensor, times: float) -> bool:
    largest = float(first.abs().nan_to_num().amax()) if first.numel() else 0.0
    limit = ROUNDING.get(first.dtype, WIDE_ROUNDING * times) * largest
    return torch.allclose(first, second, rtol=0.0, atol=limit, equal_nan=True)


def _along_tokens(leaf: object, hidden: Tensor) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[:2] == hidden.shape[:2]
