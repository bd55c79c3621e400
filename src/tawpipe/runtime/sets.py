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

from tawpipe.model.chunked import Chunk, KeysReached, KeyStore
from tawpipe.runtime.chunks import LayerInChunks
from tawpipe.schedule.pieces import Ranges, tokens_of_ranks


@dataclass(frozen=True)
class Dealt:
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
        return max(sum(end - begin for begin, end in own) for own in self.ranges)

    def part(self, begin: int, end: int) -> Ranges:
        """Where some of this rank's tokens are in the row."""
        at = accumulate((last - first for first, last in self.own), initial=0)
        cut = ((first + max(0, begin - n), min(last, first + end - n)) for n, (first, last) in zip(at, self.own))  # noqa: B905
        return tuple((first, last) for first, last in cut if first < last)

    def _places(self) -> Iterator[tuple[int, slice, slice]]:
        """Every range: whose it is, where it is among the rank's tokens, and where in the row."""
        for rank, own in enumerate(self.ranges):
            at = 0
            for begin, end in own:
                yield rank, slice(at, at + end - begin), slice(begin, end)
                at += end - begin

    def in_order(self, gathered: Tensor) -> Tensor:
        """[ranks, heads, most, d], rank by rank, in the order of the row: [1, heads, S, d]."""
        _, heads, _, dim = gathered.shape
        row = gathered.new_empty(1, heads, sum(self.lengths), dim)
        for rank, own, tokens in self._places():
            row[0, :, tokens] = gathered[rank, :, own]
        return row

    def by_rank(self, row: Tensor) -> Tensor:
        """The inverse of ``in_order``; what is no rank's token is zero."""
        _, heads, _, dim = row.shape
        found = row.new_zeros(self.ranks, heads, self.most, dim)
        for rank, own, tokens in self._places():
            found[rank, :, own] = row[0, :, tokens]
        return found


@dataclass(frozen=True)
class LayerInSet(LayerInChunks):
    """One layer on this rank's tokens, [1, n, H], of a micro-batch of one row; ``size`` of them at a time.

    Args:
        dealt: who computes which tokens.
    """

    dealt: Dealt

    def keys(self, hidden: Tensor) -> list[Tensor]:
        """Keys and values, [ranks, heads, most, d] each, with this rank's own at its place and room for the others'."""
        found: list[Tensor] = []

        def take(begin: int, *own: Tensor) -> None:
            shape = self.dealt.ranks, self.dealt.most
            for place, one in enumerate(own):
                _, heads, tokens, dim = one.shape
                if place == len(found):
                    found.append(one.new_empty(shape[0], heads, shape[1], dim))
                found[place][self.dealt.place, :, begin : begin + tokens] = one[0]

        chunks = list(self._own(hidden))
        if not chunks:  # what keys look like is told by any token; nobody reads what it leaves
            chunks = [(0, Chunk(self._store(), 0, 1))]
            hidden = hidden.new_zeros(1, 1, hidden.shape[2])
        with torch.no_grad():
            for number, chunk in chunks:
                chunk.take = partial(take, chunk.begin)
                self._leave(number, chunk, hidden[:, chunk.begin : chunk.end])
        return found

    def store(self, gathered: list[Tensor]) -> KeyStore:
        """Gathered keys and values in the order of the row; ``gathered`` is empty afterwards."""
        store = self._store()
        store.keys, store.values = (self.dealt.in_order(gathered.pop(0)) for _ in range(2))
        return store

    def attend(self, hidden: Tensor, store: KeyStore) -> Tensor:
        """The layer's output for these keys and values, without a graph."""
        output = torch.empty_like(hidden)
        with torch.no_grad():
            for number, chunk in self._own(hidden, store):
                output[:, chunk.begin : chunk.end] = self._run(number, chunk, hidden[:, chunk.begin : chunk.end])
        return output

    def attend_backward(self, hidden: Tensor, gradient: Tensor, store: KeyStore, *, wanted: bool) -> list[Tensor]:
        """Propagate ``gradient`` of the output, which becomes that of the input as far as it does not come through keys
        and values, if it is ``wanted``.

        Returns:
            What these tokens add to the gradients of keys and values of all, rank by rank; ``store`` is empty then.
        """
        store.begin_backward()
        for number, chunk in reversed(list(self._own(hidden, store))):
            rows = slice(None), slice(chunk.begin, chunk.end)
            leaf = hidden[rows].contiguous().detach().requires_grad_(wanted)
            with torch.enable_grad():
                output = self._run(number, chunk, leaf)
            torch.autograd.backward(output, gradient[rows])
            if wanted:
                assert leaf.grad is not None
                gradient[rows] = leaf.grad
        store.keys = store.values = None
        assert store.key_sums is not None and store.value_sums is not None
        of_keys, store.key_sums = self.dealt.by_rank(store.key_sums), None
        return [of_keys, self.dealt.by_rank(store.value_sums)]

    def keys_backward(self, hidden: Tensor, sums: Sequence[Tensor], gradient: Tensor | None) -> None:
        """Propagate the gradients of this rank's keys and values, [heads, most, d] each; ``gradient`` of the input is
        added to.
        """
        for number, chunk in self._own(hidden):
            rows = slice(None), slice(chunk.begin, chunk.end)
            leaf = hidden[rows].contiguous().detach().requires_grad_(gradient is not None)
            own: list[Tensor] = []
            chunk.take = lambda *found, own=own: own.extend(found)
            with torch.enable_grad():
                self._leave(number, chunk, leaf)
            pairs = [(one, of[None, :, rows[1]].to(one.dtype)) for one, of in zip(own, sums, strict=True)]
            if pairs := [pair for pair in pairs if pair[0].requires_grad]:
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            if gradient is not None and leaf.grad is not None:
                gradient[rows] += leaf.grad

    def _store(self) -> KeyStore:
        return KeyStore(1, sum(self.dealt.lengths))

    def _own(self, hidden: Tensor, store: KeyStore | None = None) -> Iterator[tuple[int, Chunk]]:
        """This rank's chunks, with their numbers."""
        tokens = hidden.shape[1]
        for number, begin in enumerate(range(0, tokens, self.size)):
            end = min(begin + self.size, tokens)
            where = self.dealt.part(begin, end)
            yield number, Chunk(store or self._store(), begin, end, where, gathered=store is not None)

    def _leave(self, number: int, chunk: Chunk, hidden: Tensor) -> None:
        """Run as far as keys and values."""
        with suppress(KeysReached):
            self._run(number, chunk, hidden)
        self._check(chunk)
