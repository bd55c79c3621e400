"""Mixers: modules that carry a state along a row (Mamba, linear attention, short convolutions).

On a packed row they would mix its documents. So they run on every document separately, while the rest of a layer runs
on the whole row. Documents of similar lengths are padded at the end to a rectangle and run in one call. No token sees
tokens behind it, so this is exact with any kernel. Document borders passed to kernels would not be reliable:
transformers silently drops them for several kernels (Kimi-Linear's, Mamba-2's).

In chunks of a row, a document's state is passed from one chunk to the next, with its gradient. A ``Carrier`` takes the
place of transformers' cache, which would be written in place. A module is recognised as a mixer by its calls of that
cache. If a chunk holds only the first token of a document, it passes on this token instead of a state, and the next
chunk begins with it: a mixer's code for one token would write the state in place."""

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
"""Key of a document's first token among the states passed from chunk to chunk."""
ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Tolerance, relative to the largest number, for results that should be equal. Other dtypes use ``WIDE_ROUNDING``."""
WIDE_ROUNDING = 1e-6
STATE_ROUNDING = 100.0
"""Factor on the tolerance for a row in two parts, whose sums have another order."""
TRIED = 16
"""Number of tokens on which a mixer is tested in two parts."""
GOES_ON_WRONGLY = "does not continue from the state that it receives when a chunk begins"
WHOLE = "--schedule.sequence-chunk 0 runs them whole"


@dataclass(frozen=True)
class Piece:
    """A document, or the part of a document in a chunk.

    Args:
        row: index of the row.
        length: number of tokens.
        arrives: True if the document began in an earlier chunk.
        leaves: True if the document continues in the next chunk.
    """

    row: int
    length: int
    arrives: bool = False
    leaves: bool = False


def pieces_of(documents: Documents, chunk: Chunk | None) -> list[Piece]:
    """Return the pieces of all rows, in the order of their tokens; without a chunk these are whole documents.

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
    """Layer call with the documents of its rows, which the layer's mixers read."""

    documents: Documents
    checked: set[object] = field(default_factory=set)
    """Mixers that were checked to keep documents apart, or to continue from a state: (class, dtype, True for whole
    rows)."""
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
    """Mixin class for a mixer, which in a ``RowCall`` runs on every piece separately."""

    @torch.compiler.disable  # the pieces differ from call to call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward  # type: ignore[misc]
        call = _call.get()
        if call is None or (call.chunk is None and len(call.documents.spans) == call.documents.rows):
            return run(*args, **kwargs)
        hidden, layer_call = LayerCall.take(args, kwargs)
        pieces = OnPieces(self, run, layer_call, call)
        output = pieces(hidden)
        key = type(self), hidden.dtype, call.chunk is None
        if key not in call.checked and not hidden.is_meta:
            with torch.no_grad(), _evaluating(self):  # dropout would make results differ
                pieces.check(hidden.detach())
            call.checked.add(key)
        if call.chunk is not None and call.chunk.only_keys:
            raise KeysReached
        return (output, *[None] * (pieces.results - 1)) if pieces.results else output


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Return a context in which a module and its submodules are in evaluation mode; modes are restored afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@functools.cache
def _with_mixer(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``kind``, with the same name, whose forward pass is ``Mixer.forward``.

    It is made once for each class."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Mixer.forward(self, *args, **kwargs)

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": functools.wraps(kind.forward)(forward)}
    return type(kind.__name__, (Mixer, kind), names)


def make_mixer(module: nn.Module) -> None:
    """Change the class of ``module`` in place, so that in a ``RowCall`` it runs on every document separately.

    Other modules of its class are not changed."""
    if not isinstance(module, Mixer):
        module.__class__ = _with_mixer(type(module))


class OnPieces:
    """One call of a mixer, on the pieces of some rows.

    Args:
        mixer: the mixer.
        run: its own forward pass.
        layer_call: arguments of the call.
        call: the layer's call, with documents and chunk.
    """

    def __init__(self, mixer: nn.Module, run: Callable[..., Any], layer_call: LayerCall, call: RowCall) -> None:
        self._mixer, self._run, self._layer_call = mixer, run, layer_call
        self._chunk, self._name = call.chunk, cache_argument(mixer)
        self._pieces = pieces_of(call.documents, call.chunk)
        self._arrived = call.chunk.arrived.get(mixer, {}) if call.chunk else {}
        self.results = 0
        """Length of the tuple that the mixer returns; 0 for a tensor."""

    def __call__(self, hidden: Tensor, fill: float = 0.0) -> Tensor:
        """Run the mixer on all pieces, group by group.

        Input and output are [b, S, H].

        Args:
            hidden: hidden states of all rows.
            fill: value of the padding behind shorter pieces.
        """
        groups = Groups.by(map(self._kind, self._pieces), [piece.length for piece in self._pieces])
        leaves, form = tree_flatten((self._layer_call.args, self._layer_call.kwargs))
        split = [groups.split(leaf) if _along_tokens(leaf, hidden) else None for leaf in leaves]
        outputs = []
        for place, (numbers, part) in enumerate(zip(groups.numbers, groups.split(hidden, fill), strict=True)):
            values = [leaf if parts is None else parts[place] for leaf, parts in zip(leaves, split, strict=True)]
            layer_call = LayerCall(*tree_unflatten(values, form))
            outputs.append(self._on_group([self._pieces[number] for number in numbers], part, layer_call))
        return groups.join(outputs, hidden.shape)

    def _kind(self, piece: Piece) -> Hashable:
        """Return a key that is equal for pieces that can run in one call.

        Pieces that continue in the next chunk need equal lengths, because the state is taken behind the last token.
        Others may have similar lengths."""
        after_token = piece.arrives and TOKEN in self._arrived[piece.row]
        size = piece.length if piece.leaves else (piece.length - 1).bit_length()
        return piece.arrives, after_token, piece.leaves, size

    def _on_group(self, pieces: Sequence[Piece], part: Tensor, layer_call: LayerCall) -> Tensor:
        """Run the mixer on the pieces of one group, [n, L, H]; pass states in, and store states for the next chunk."""
        length, leaves = part.shape[1], pieces[0].leaves
        before: State = {}
        if pieces[0].arrives:
            states = [self._arrived[piece.row] for piece in pieces]
            before = {key: torch.cat([state[key] for state in states]) for key in states[0]}
        if (token := before.pop(TOKEN, None)) is not None:
            part = torch.cat([token, part], dim=1)
        alone = leaves and not before and part.shape[1] == 1
        carrier = Carrier(before) if before or (leaves and not alone) else None
        output = self._call(F.pad(part, (0, 0, 0, 1)) if carrier and part.shape[1] == 1 else part, layer_call, carrier)
        if leaves:
            assert self._chunk is not None
            after = {TOKEN: part.clone()} if alone or carrier is None else carrier.after
            left = self._chunk.left.setdefault(self._mixer, {})
            for at, piece in enumerate(pieces):
                left[piece.row] = {key: state[at : at + 1] for key, state in after.items()}
        first = int(token is not None)
        return output[:, first : first + length]

    def _call(self, part: Tensor, layer_call: LayerCall, carrier: Carrier | None) -> Tensor:
        """Call the mixer's own forward pass without an attention mask, and return its output.

        Args:
            part: hidden states of some pieces, [n, L, H].
            layer_call: all other arguments.
            carrier: replacement for the mixer's cache, or None to leave that argument unchanged.
        """
        kwargs = {**layer_call.kwargs, MASK: None} if MASK in layer_call.kwargs else dict(layer_call.kwargs)
        if carrier is not None:
            assert self._name is not None
            kwargs[self._name] = carrier
        args = (part, *layer_call.args[1:])
        if not layer_call.args:
            args, kwargs[HIDDEN] = (), part
        output = self._run(*args, **kwargs)
        self.results = len(output) if isinstance(output, tuple) else 0
        return output[0] if isinstance(output, tuple) else output

    def check(self, hidden: Tensor) -> None:
        """Check this mixer by running it again on other inputs; raise UserError if its results are wrong.

        On whole rows, the outputs of a document must not depend on other documents. In chunks, a row that is run in two
        parts, the second from the states of the first, must give the output of the whole row.

        Args:
            hidden: hidden states of the call, [b, S, H].
        """
        name = type(self._mixer).__name__
        if self._chunk is None:
            check_apart(name, self, hidden, self(hidden), self._pieces[0].length)
            return
        tokens = hidden.flatten(0, 1)
        row = tokens[torch.arange(TRIED, device=hidden.device) % len(tokens)][None]
        arguments = self._layer_call.args, self._layer_call.kwargs
        layer_call = LayerCall(*tree_map(lambda leaf: None if _along_tokens(leaf, hidden) else leaf, arguments))
        first = Carrier()
        parts = [self._call(row[:, : TRIED // 2], layer_call, first)]
        parts.append(self._call(row[:, TRIED // 2 :], layer_call, Carrier(first.after)))
        if not _alike(self._call(row, layer_call, None), torch.cat(parts, dim=1), STATE_ROUNDING):
            raise unsupported(name, f"it {GOES_ON_WRONGLY}; {WHOLE}")


def check_apart(
    name: str, mixer: Callable[[Tensor, float], Tensor], hidden: Tensor, output: Tensor, first: int
) -> None:
    """Check that a mixer keeps documents apart: run it again with another first document and other padding.

    The outputs of all other documents must not change.

    Args:
        name: name of the mixer, for messages.
        mixer: function of hidden states and a number for the padding.
        hidden: hidden states [b, S, H].
        output: the mixer's output for them.
        first: number of tokens in the first document.

    Raises:
        UserError: the output of another document has changed.
    """
    tokens = hidden.flatten(0, 1)
    other = torch.cat([tokens[:first].flip(-1) + 1, tokens[first:]]).view_as(hidden)
    again = mixer(other, float(tokens.abs().max()))
    if not _alike(output.flatten(0, 1)[first:], again.flatten(0, 1)[first:], 1.0):
        raise unsupported(
            name, ("documents of one row influence each other; --packing none gives each document its own row")
        )


def _alike(first: Tensor, second: Tensor, times: float) -> bool:
    """Return True if two tensors are equal within the tolerance of their dtype, times ``times`` for wide dtypes."""
    largest = float(first.abs().nan_to_num().amax()) if first.numel() else 0.0
    limit = ROUNDING.get(first.dtype, WIDE_ROUNDING * times) * largest
    return torch.allclose(first, second, rtol=0.0, atol=limit, equal_nan=True)


def _along_tokens(leaf: object, hidden: Tensor) -> bool:
    """Return True if ``leaf`` is a tensor with one entry for each token of ``hidden``."""
    return isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[:2] == hidden.shape[:2]
