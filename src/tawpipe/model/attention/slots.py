"""Key-value cache for generation: keys and values of requests in slots, and attention of new tokens over their slots.

A pass is one packed row. Each of its documents holds the next tokens of one slot: mostly one token, or a part of a
prompt. They see the keys that the slot already holds. A model that keeps the documents of a row apart by our attention
function (``attention.packed_attention``) therefore decodes with the code that trained it. Nothing is copied: a slot is
a row of a layer's buffers, and slots that are computed together are neighbours."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.model.kernels import AttentionOptions, Documents, explicit_scores, with_mask

WASTED = 2
"""Slots with one token each are computed together if this reads at most ``WASTED`` times the number of keys seen."""
SCORES = 2**24
"""Elements of the scores that exist at one time, if no kernel computes them in parts."""


@dataclass(frozen=True)
class SlotTokens:
    """Next tokens of one slot in a pass.

    Args:
        slot: number of the slot.
        first: position of the first of these tokens.
        tokens: token ids; zeros if only positions count.
    """

    slot: int
    first: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        """Position behind the last token, which is the number of keys that the last token sees."""
        return self.first + len(self.tokens)


@dataclass(frozen=True)
class SlotRange:
    """Neighbouring slots whose tokens are computed together: one token of each slot, or all tokens of one slot.

    Args:
        slots: slice of the buffers' rows, including slots in between that have no token.
        tokens: indices of the tokens in the pass, in the order of their slots; a slice for the tokens of one slot.
        places: indices of the tokens' slots within ``slots``; None if each slot has a token.
        firsts: position of the first token of every slot. A slot without token gets the position of another one.
        keys: number of keys that the last token of the longest slot sees.
    """

    slots: slice
    tokens: slice | Tensor
    places: Tensor | None
    firsts: tuple[int, ...]
    keys: int


@dataclass(frozen=True, eq=False)
class SlotDocuments(Documents):
    """Documents of a pass, each continuing the content of its slot."""

    batch: PassBatch = field(kw_only=True)
    written: tuple[Tensor, ...] = field(kw_only=True)
    """Slot and position of every token, on the device."""
    piece: int = 0
    """Number of positions in a block of chunked attention: tokens see only keys of their own block. 0 shows all earlier
    keys."""
    masks: dict[Hashable, Tensor] = field(default_factory=dict)
    """Key of a range -> its mask. Layers of a kind share masks."""

    def cut(self, length: int) -> SlotDocuments:
        """Return these documents with chunked attention in blocks of ``length`` positions."""
        return replace(self, piece=length)

    @cached_property
    def ranges(self) -> tuple[SlotRange, ...]:
        """Ranges of slots that are computed together.

        All slots with one token form one range, unless that would read too many keys that none of them sees (see
        ``WASTED``). Every other slot is a range of its own."""
        parts, starts = self.batch.parts, [first for _, first, _ in self.spans]
        single, together = [at for at, part in enumerate(parts) if len(part.tokens) == 1], list[SlotRange]()
        if len(single) > 1:
            single.sort(key=lambda at: parts[at].slot)
            chosen = [parts[at] for at in single]
            low, high, keys = chosen[0].slot, chosen[-1].slot + 1, max(part.end for part in chosen)
            if (high - low) * keys <= WASTED * sum(part.end for part in chosen):
                first_of_slot = {part.slot: part.first for part in chosen}
                firsts = tuple(first_of_slot.get(slot, chosen[0].first) for slot in range(low, high))
                places = None if len(chosen) == high - low else self._index(part.slot - low for part in chosen)
                tokens = self._index(starts[at] for at in single)
                together.append(SlotRange(slice(low, high), tokens, places, firsts, keys))
        alone = [at for at in range(len(parts)) if not together or at not in single]
        return *together, *(self._alone(parts[at], starts[at]) for at in alone)

    def _index(self, numbers: Iterable[int]) -> Tensor:
        """Return ``numbers`` as an index tensor on the device."""
        return torch.tensor([*numbers], device="cpu").to(self.written[0].device)

    def _alone(self, part: SlotTokens, start: int) -> SlotRange:
        """Return the range of one slot, whose tokens begin at index ``start`` of the pass."""
        tokens = slice(start, start + len(part.tokens))
        return SlotRange(slice(part.slot, part.slot + 1), tokens, None, (part.first,), part.end)

    def put(self, layer: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> None:
        """Write keys and values of the pass into the slots of a layer, behind their present content.

        Remains of an earlier request in a slot are set to zero first.

        Args:
            layer: keys and values of all slots, [slots, heads, context, d] each.
            new: keys and values of the pass, [1, heads, tokens, d] each.
        """
        slots, positions = self.written
        for held, source in zip(layer, new, strict=True):
            # Remains of an earlier request are masked, but masked numbers that are not finite would still change
            # results.
            for slot, end in self.batch.leftover.items():
                held[slot, :, :end].zero_()
            if len(self.batch.parts) == 1:  # a copy is faster than an index
                (part,) = self.batch.parts
                held[part.slot, :, part.first : part.end] = source[0]
            else:
                held[slots, :, positions] = source[0].transpose(0, 1)

    def oldest(self, part: SlotRange, window: int | None) -> int:
        """Return the position of the first key that some query of the range sees."""
        first = min(part.firsts)
        return max(first // self.piece * self.piece if self.piece else 0, 0 if window is None else first - window + 1)

    def visible(self, part: SlotRange, count: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return the mask of a range, True where a query sees a key, or None if every query sees all keys.

        Args:
            part: the range.
            count: queries per slot.
            window: tokens that a query sees, itself included, or None.
            device: device of the mask.

        Returns:
            [slots, 1, count, keys], with the keys from ``oldest`` on.
        """
        if count == 1 and len(part.firsts) == 1:
            return None
        key = part.slots.start, part.slots.stop, count, window, self.piece
        if key not in self.masks:
            with torch.device("cpu"):
                queries = (torch.tensor(part.firsts)[:, None] + torch.arange(count)).view(-1, 1, count, 1)
                keys = torch.arange(self.oldest(part, window), part.keys)
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            if self.piece:
                seen &= keys >= queries - queries % self.piece
            self.masks[key] = seen.to(device)
        return self.masks[key]


class SlotCache:
    """Keys and values of all slots, for every layer that runs on this rank.

    Args:
        slots: number of slots.
        context: number of positions in each slot.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.slots, self.context = slots, context
        self._used = [0] * slots
        """Number of positions that are written, for every slot."""
        self._skipped = [0] * slots
        """Number of padding tokens in every slot, for a model that counts positions without padding."""
        self._layers: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._at = 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all layers that have run so far."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def begin(self, block: int) -> None:
        """Set the block to which the next calls of attention belong.

        Some layers call attention several times."""
        self._at = block, 0

    def of_layer(self, *like: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of all slots for the present call of attention, and advance to the block's next call.

        The buffers are allocated at the first call.

        Args:
            like: keys and values of a pass, [1, heads, tokens, d], for shapes and dtypes.
        """
        at, self._at = self._at, (self._at[0], self._at[1] + 1)
        if at not in self._layers:
            self._layers[at] = tuple(
                new.new_zeros(self.slots, new.shape[1], self.context, new.shape[3]) for new in like
            )
        return self._layers[at]

    def batch(self, parts: Sequence[SlotTokens], first: int = 0) -> PassBatch:
        """Build a pass as a micro-batch whose documents continue the content of their slots.

        The positions of the pass count as used from then on. A slot whose tokens begin at position 0 starts a new
        request.

        Args:
            parts: next tokens of some slots.
            first: position of a document's first token in the model (``PositionUse``).

        Raises:
            UserError: a slot or position does not exist, a slot appears twice, or tokens do not continue where a slot
                ends.
        """
        positions, leftover, before = list[int](), dict[int, int](), set[int]()
        for part in parts:
            self._check(part, before)
            before.add(part.slot)
            if part.first == 0:
                leftover[part.slot], self._skipped[part.slot] = self._used[part.slot], 0
            self._used[part.slot] = part.end
            positions += self._positions(part, first)
        ids = torch.tensor([[token for part in parts for token in part.tokens]], device="cpu")
        return PassBatch(
            ids,
            torch.full_like(ids, IGNORE),
            torch.tensor([positions], device="cpu"),
            tuple(len(part.tokens) for part in parts),
            positions_given=True,
            tokens=0,
            cache=self,
            parts=tuple(parts),
            leftover={slot: end for slot, end in leftover.items() if end},
        )

    def _check(self, part: SlotTokens, before: set[int]) -> None:
        """Raise UserError if tokens do not fit their slot, or if the slot is already in ``before``."""
        if not 0 <= part.slot < self.slots or part.slot in before:
            raise UserError("slot", part.slot, f"from 0 to {self.slots - 1}, each once in a pass")
        if part.first not in (0, self._used[part.slot]):
            raise UserError("first", part.first, f"{self._used[part.slot]}, where slot {part.slot} ends; or 0")
        if not part.tokens or part.end > self.context:
            expected = f"at least one, and at most {self.context - part.first} up to the context of {self.context}"
            raise UserError("tokens", len(part.tokens), expected)

    def _positions(self, part: SlotTokens, first: int) -> list[int]:
        """Return the positions of a slot's tokens as the model counts them.

        RoBERTa and similar models (``first`` above 0) do not count padding, which is the token ``first - 1``. The
        padding of a slot so far is counted in ``_skipped``."""
        if not first:
            return list(range(part.first, part.end))
        positions = []
        for place, token in enumerate(part.tokens, start=part.first):
            self._skipped[part.slot] += token == first - 1
            positions.append(first - 1 if token == first - 1 else first + place - self._skipped[part.slot])
        return positions


@dataclass(frozen=True, repr=False)
class PassBatch(MicroBatch):
    """Micro-batch with the tokens of a pass."""

    cache: SlotCache = field(kw_only=True)
    parts: tuple[SlotTokens, ...] = field(kw_only=True)
    leftover: dict[int, int] = field(kw_only=True)
    """Slot in which a new request begins -> number of positions that still hold the previous request."""

    def documents(self, device: torch.device) -> SlotDocuments:
        """Return the documents of the pass, for attention on ``device``."""
        slots = [part.slot for part in self.parts for _ in part.tokens]
        positions = [place for part in self.parts for place in range(part.first, part.end)]
        written = tuple(torch.tensor(numbers, device="cpu").to(device) for numbers in (slots, positions))
        spans = super().documents(torch.device("cpu")).spans
        return SlotDocuments(1, spans, self.cache.context, batch=self, written=written)


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, documents: SlotDocuments, options: AttentionOptions
) -> Tensor:
    """Write the keys and values of a pass into the slots, and compute its attention.

    Args:
        query: [1, heads, T, d].
        key, value: [1, key-value heads, T, d].
        sinks: [heads] logits of attention sinks, or None.
        documents: documents of the pass, with their cache.
        options: window, scale and cap.

    Returns:
        The output [1, T, heads, d].
    """
    layer, groups = documents.batch.cache.of_layer(key, value), key.shape[1]
    documents.put(layer, (key, value))
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    for part in documents.ranges:
        shared = slice(documents.oldest(part, options.window), part.keys)
        keys, values = (held[part.slots, :, shared] for held in layer)
        if isinstance(part.tokens, slice):
            folded = query[:, :, part.tokens].unflatten(1, (groups, -1))  # [1, groups, n, tokens, d]
        else:
            asked = query[0].transpose(0, 1)[part.tokens]  # [tokens, heads, d]
            if part.places is not None:
                asked = asked.new_zeros(keys.shape[0], *asked.shape[1:]).index_copy_(0, part.places, asked)
            folded = asked.unflatten(1, (groups, -1)).unsqueeze(3)  # [slots, groups, n, 1, d]
        seen = documents.visible(part, folded.shape[3], options.window, query.device)
        result = _attention(folded, keys, values, seen, sinks, options)
        if isinstance(part.tokens, slice):
            rows = result[0].permute(2, 0, 1, 3).flatten(1, 2)
            if len(documents.batch.parts) == 1:
                return rows[None]
        else:
            rows = result.squeeze(3).flatten(1, 2)
            rows = rows if part.places is None else rows[part.places]
        output[part.tokens] = rows
    return output[None]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, sinks: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Compute attention of queries in groups of heads that share keys.

    Args:
        query: [b, groups, n, q, d], with n heads per group.
        key, value: [b, groups, L, d].
        seen: True where a query sees a key, [b, 1, q, L]; None if each sees all keys.
        sinks: [heads] logits of attention sinks, or None.
        options: scale and cap.

    Returns:
        The output [b, groups, n, q, d].
    """
    rows, groups, heads, count, dim = query.shape
    plain = sinks is None and options.softcap is None and dim == value.shape[-1]
    if plain and count == 1:  # the heads of a group act as queries of their shared keys
        folded = query.reshape(rows, groups, heads, dim)
        with with_mask(seen):
            output = F.scaled_dot_product_attention(folded, key, value, attn_mask=seen, scale=options.scale)
        return output.unsqueeze(3)
    if plain:
        assert rows == 1
        shared = (tensor[0].unsqueeze(1).expand(-1, heads, -1, -1) for tensor in (key, value))
        with with_mask(seen):
            return F.scaled_dot_product_attention(query[0], *shared, attn_mask=seen, scale=options.scale)[None]
    size = max(1, SCORES // (rows * groups * heads * key.shape[2]))
    folded, pieces = query.flatten(1, 2), list[Tensor]()
    options, score_kwargs = replace(options, window=None, dropout=0.0), {"generator": None, "offset": key.shape[2] - 1}
    for begin in range(0, count, size):
        part = slice(begin, min(begin + size, count))
        hidden = None if seen is None else ~seen[:, :, None, part]  # if None, the only query is at the last key
        pieces.append(explicit_scores(folded[:, :, part], key, value, sinks, options, hidden=hidden, **score_kwargs))
    return torch.cat(pieces, dim=2).unflatten(1, (groups, heads))
