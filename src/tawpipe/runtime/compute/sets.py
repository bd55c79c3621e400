"""A layer's passes over a rank's tokens of a row that several ranks compute together (schedule/sets.py).

In chunks or not, a rank runs its tokens as far as their keys and values, attends to those of all ranks, and in the
backward pass adds to the gradients of all of them; what has been summed up of its own it propagates in a last pass.
Tokens are all that ranks have of their own: what a layer is called with besides is recorded for the whole row.
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
class SetTokens:
    """Who computes which tokens of a row.

    Args:
        lengths: of its documents.
        ranks: of the set.
        place: of this rank among them.
    """

    lengths: tuple[int, ...]
    ranks: int
    place: int

    @cached_property
    def ranges(self) -> tuple[Ranges, ...]:
        """The tokens of every rank."""
        return tokens_of_ranks(self.lengths, self.ranks)

    @property
    def own(self) -> Ranges:
        """This rank's."""
        return self.ranges[self.place]

    @cached_property
    def most(self) -> int:
        """The most tokens that a rank has: what is gathered is of one size for all."""
        return max(sum(end - begin for begin, end in ranges) for ranges in self.ranges)

    def part(self, begin: int, end: int) -> Ranges:
        """Where some of this rank's tokens are in the row."""
        at = accumulate((last - first for first, last in self.own), initial=0)
        cut = ((first + max(0, begin - n), min(last, first + end - n)) for n, (first, last) in zip(at, self.own))  # noqa: B905
        return tuple((first, last) for first, last in cut if first < last)

    def _places(self) -> Iterator[tuple[int, slice, slice]]:
        """Every range: whose it is, where it is among the rank's tokens, and where in the row."""
        for rank, ranges in enumerate(self.ranges):
            at = 0
            for begin, end in ranges:
                yield rank, slice(at, at + end - begin), slice(begin, end)
                at += end - begin

    def in_order(self, gathered: Tensor) -> Tensor:
        """[ranks, heads, most, d], rank by rank, in the order of the row: [1, heads, S, d]."""
        _, heads, _, dim = gathered.shape
        row = gathered.new_empty(1, heads, sum(self.lengths), dim)
        for rank, place, tokens in self._places():
            row[0, :, tokens] = gathered[rank, :, place]
        return row

    def by_rank(self, row: Tensor) -> Tensor:
        """The inverse of ``in_order``; what is no rank's token is zero."""
        _, heads, _, dim = row.shape
        gathered = row.new_zeros(self.ranks, heads, self.most, dim)
        for rank, place, tokens in self._places():
            gathered[rank, :, place] = row[0, :, tokens]
        return gathered


@dataclass(frozen=True)
class LayerInSet(LayerInChunks):
    """One layer on this rank's tokens, [1, n, H], of a micro-batch of one row; ``size`` of them at a time.

    Args:
        dealt: who computes which tokens.
        store: keys and values of all tokens; of none before they are gathered.
    """

    dealt: SetTokens
    store: KeyStore

    def keys(self, hidden: Rows) -> list[Tensor]:
        """Keys and values, [ranks, heads, most, d] each, with this rank's own at its place and room for the others'."""
        keys: list[Tensor] = []

        def take(begin: int, *of_chunk: Tensor) -> None:
            for place, tensor in enumerate(of_chunk):
                _, heads, tokens, dim = tensor.shape
                if place == len(keys):
                    keys.append(tensor.new_empty(self.dealt.ranks, heads, self.dealt.most, dim))
                keys[place][self.dealt.place, :, begin : begin + tokens] = tensor[0]

        chunks = self._chunks(hidden)
        read = hidden.read([chunk.tokens for chunk in chunks])
        if not chunks:  # what keys look like is told by any token; nobody reads what it leaves
            chunks = [Chunk(self.store, 0, 1)]
            read = iter([torch.zeros(1, 1, *hidden.shape[2:], dtype=hidden.dtype, device=self.chain.device)])
        with torch.no_grad():
            for chunk, tokens in zip(chunks, read, strict=True):
                chunk.take = partial(take, chunk.begin)
                self._leave(chunk, tokens)
        return keys

    def gather(self, gathered: list[Tensor]) -> None:
        """Put keys and values, rank by rank, into the store; ``gathered`` is empty afterwards."""
        self.store.keys, self.store.values = (self.dealt.in_order(gathered.pop(0)) for _ in range(2))

    def backward(self, hidden: Rows, gradient: Tensor, *, wanted: bool, kept: KeptAttention | None = None) -> None:
        """Propagate ``gradient`` of the output, which becomes that of the input if it is ``wanted``, as far as it does
        not come through keys and values.
        """
        self.store.make_sums()
        self._propagate(self._chunks(hidden), hidden, gradient, wanted=wanted, kept=kept)

    def key_gradients(self) -> list[Tensor]:
        """What ``backward`` adds to the gradients of keys and values of all, rank by rank; the store is empty then."""
        store = self.store
        store.keys = store.values = None
        assert store.key_sums is not None and store.value_sums is not None
        of_keys, store.key_sums = self.dealt.by_rank(store.key_sums), None
        of_values, store.value_sums = self.dealt.by_rank(store.value_sums), None
        return [of_keys, of_values]

    def keys_backward(self, hidden: Rows, sums: Sequence[Tensor], gradient: Tensor | None) -> None:
        """Propagate the gradients of this rank's keys and values, [heads, most, d] each; ``gradient`` of the input is
        added to.
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
        spans = spans_of(hidden.shape[1], self.size)
        ranges = [self.dealt.part(span.start, span.stop) for span in spans]
        return [Chunk(self.store, s.start, s.stop, r, gathered=True) for s, r in zip(spans, ranges, strict=True)]

    def _leave(self, chunk: Chunk, hidden: Tensor) -> None:
        """Run as far as keys and values."""
        with suppress(KeysReached):
            self._run(chunk, hidden)
        self._check(chunk)
