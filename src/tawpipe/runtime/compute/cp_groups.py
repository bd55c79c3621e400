"""Passes of a layer over one rank's tokens of a row that a context-parallel group computes (schedule/cp_groups.py).

With or without chunks, a rank runs its tokens up to their keys and values, and attends to the keys and values of all
ranks. In the backward pass it adds to the gradients of all of them. The sums for its own keys and values are propagated
in a last pass. Only the tokens differ between ranks: all other arguments of a layer are recorded for the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor

from tawpipe.model.attention.chunked import Chunk, KeysReached, KeyStore
from tawpipe.runtime.compute.chunks import KeptAttention, LayerInChunks, spans_of
from tawpipe.runtime.compute.rows import Rows
from tawpipe.schedule.pieces import Ranges, tokens_of_ranks


@dataclass(frozen=True)
class CpTokens:
    """Assignment of a row's tokens to the ranks of a context-parallel group.

    Args:
        lengths: Lengths of the row's documents.
        ranks: Number of ranks in the group.
        place: Index of this rank in the group.
    """

    lengths: tuple[int, ...]
    ranks: int
    place: int

    @cached_property
    def ranges(self) -> tuple[Ranges, ...]:
        """Token ranges of every rank."""
        return tokens_of_ranks(self.lengths, self.ranks)

    @property
    def own(self) -> Ranges:
        """Token ranges of this rank."""
        return self.ranges[self.place]

    @cached_property
    def most(self) -> int:
        """Largest number of tokens of a rank. Gathered tensors have this size for every rank."""
        return max(sum(end - begin for begin, end in ranges) for ranges in self.ranges)

    def part(self, begin: int, end: int) -> Ranges:
        """Return the ranges in the row of this rank's tokens ``begin`` to ``end``."""
        at = accumulate((last - first for first, last in self.own), initial=0)
        cut = ((first + max(0, begin - n), min(last, first + end - n)) for n, (first, last) in zip(at, self.own))  # noqa: B905
        return tuple((first, last) for first, last in cut if first < last)

    def _places(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield every token range: its rank, its slice of the rank's tokens, and its slice of the row."""
        for rank, ranges in enumerate(self.ranges):
            at = 0
            for begin, end in ranges:
                yield rank, slice(at, at + end - begin), slice(begin, end)
                at += end - begin

    def in_order(self, gathered: Tensor) -> Tensor:
        """Reorder ``gathered`` [ranks, heads, most, d] into the order of the row: [1, heads, S, d]."""
        _, heads, _, dim = gathered.shape
        row = gathered.new_empty(1, heads, sum(self.lengths), dim)
        for rank, place, tokens in self._places():
            row[0, :, tokens] = gathered[rank, :, place]
        return row

    def by_rank(self, row: Tensor) -> Tensor:
        """Reorder ``row`` [1, heads, S, d] into [ranks, heads, most, d], padded with zeros: inverse of ``in_order``."""
        _, heads, _, dim = row.shape
        gathered = row.new_zeros(self.ranks, heads, self.most, dim)
        for rank, place, tokens in self._places():
            gathered[rank, :, place] = row[0, :, tokens]
        return gathered


@dataclass(frozen=True)
class LayerInCpGroup(LayerInChunks):
    """One layer on this rank's tokens, [1, n, H], of a micro-batch of one row; ``size`` tokens at a time.

    Args:
        dealt: Tokens of each rank.
        store: Keys and values of all tokens; empty before they are gathered.
    """

    dealt: CpTokens
    store: KeyStore

    def keys(self, hidden: Rows) -> list[Tensor]:
        """Compute this rank's keys and values; return them in tensors [ranks, heads, most, d].

        The parts of other ranks are uninitialised.
        """
        keys: list[Tensor] = []

        def take(begin: int, *of_chunk: Tensor) -> None:
            """Copy the keys and values of a chunk into this rank's part of the tensors in ``keys``.

            The first call allocates these tensors, for the tokens of all ranks.

            Args:
                begin: Index of the chunk's first token among the tokens of this rank.
                of_chunk: Keys and values of the chunk, [1, heads, tokens, d] each.
            """
            for place, tensor in enumerate(of_chunk):
                _, heads, tokens, dim = tensor.shape
                if place == len(keys):
                    keys.append(tensor.new_empty(self.dealt.ranks, heads, self.dealt.most, dim))
                keys[place][self.dealt.place, :, begin : begin + tokens] = tensor[0]

        chunks = self._chunks(hidden)
        read = hidden.read([chunk.tokens for chunk in chunks])
        if not chunks:  # this rank has no tokens: run one zero token to learn the shape of keys; its result is not read
            chunks = [Chunk(self.store, 0, 1)]
            read = iter([torch.zeros(1, 1, *hidden.shape[2:], dtype=hidden.dtype, device=self.chain.device)])
        with torch.no_grad():
            for chunk, tokens in zip(chunks, read, strict=True):
                chunk.take = partial(take, chunk.begin)
                self._leave(chunk, tokens)
        return keys

    def gather(self, gathered: list[Tensor]) -> None:
        """Move gathered keys and values into the store, in the order of the row; ``gathered`` is empty afterwards."""
        self.store.keys, self.store.values = (self.dealt.in_order(gathered.pop(0)) for _ in range(2))

    def backward(self, hidden: Rows, gradient: Tensor, *, wanted: bool, kept: KeptAttention | None = None) -> None:
        """Recompute the layer on this rank's tokens and run its backward pass, except through its own keys and values.

        Adds to the weight gradients. If ``wanted``, ``gradient`` (of the output) is replaced in place by that part of
        the input's gradient. Gradients of the keys and values of all ranks are summed in the store."""
        self.store.make_sums()
        self._propagate(self._chunks(hidden), hidden, gradient, wanted=wanted, kept=kept)

    def key_gradients(self) -> list[Tensor]:
        """Return and remove the gradients that ``backward`` has summed for keys and values of all tokens, rank by rank.

        The store is empty afterwards.
        """
        store = self.store
        store.keys = store.values = None
        assert store.key_sums is not None and store.value_sums is not None
        of_keys, store.key_sums = self.dealt.by_rank(store.key_sums), None
        of_values, store.value_sums = self.dealt.by_rank(store.value_sums), None
        return [of_keys, of_values]

    def keys_backward(self, hidden: Rows, sums: Sequence[Tensor], gradient: Tensor | None) -> None:
        """Recompute this rank's keys and values and run their backward pass, which adds to the weight gradients.

        Args:
            hidden: Input of the layer.
            sums: Gradients of keys and values of this rank's tokens, [heads, most, d] each.
            gradient: Gradient of the input, added to in place; None if it is not needed.
        """
        chunks = self._chunks(hidden)
        for chunk, tokens in zip(chunks, hidden.read([chunk.tokens for chunk in chunks]), strict=True):
            leaf = tokens.contiguous().detach().requires_grad_(gradient is not None)
            taken: list[Tensor] = []
            chunk.take = lambda *tensors, taken=taken: taken.extend(tensors)
            with torch.enable_grad():
                self._leave(chunk, leaf)
            pairs = [(key, of[None, :, chunk.tokens].to(key.dtype)) for key, of in zip(taken, sums, strict=True)]
            if pairs := [pair for pair in pairs if pair[0].requires_grad]:
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            if gradient is not None and leaf.grad is not None:
                gradient[:, chunk.tokens] += leaf.grad

    def _chunks(self, hidden: Rows) -> list[Chunk]:
        """Return this rank's chunks, with their token ranges in the row."""
        spans = spans_of(hidden.shape[1], self.size)
        ranges = [self.dealt.part(span.start, span.stop) for span in spans]
        return [Chunk(self.store, s.start, s.stop, r, gathered=True) for s, r in zip(spans, ranges, strict=True)]

    def _leave(self, chunk: Chunk, hidden: Tensor) -> None:
        """Run the layer on a chunk up to its keys and values, which are passed to ``chunk.take``; discard the rest.

        Raises:
            UserError: If the layer calls no attention, or calls it unexpectedly.
        """
        with suppress(KeysReached):
            self._run(chunk, hidden)
        self._check(chunk)
