"""An engine without a model, which draws what a function says of a prompt and checks the passes that it is fed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tawpipe.serving.passes import Drawn, Pass, PassFeeder, Row, SlotLayout

LOGPROB = -0.5
"""Of every token; the one besides has -1.5."""
REMEMBERED = 2000
"""Passes that an engine remembers: its first ones."""


def likely(token: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens where this one stands."""
    return (token, LOGPROB), (token + 1, LOGPROB - 1)


class ScriptedEngine:
    """Computes passes as the real ones do: a group's drawn tokens are taken when its next pass is asked for.

    Args:
        answer: a prompt's tokens to those of its answer; behind them, the last again and again.
        pass_s: seconds that a pass takes.
        fails_at: the pass with this number is not computed.
    """

    def __init__(
        self,
        slot_layout: SlotLayout,
        answer: Callable[[tuple[int, ...]], Sequence[int]],
        *,
        pass_s: float = 0.0,
        fails_at: int | None = None,
    ) -> None:
        self.slot_layout, self._answer, self._pass_s = slot_layout, answer, pass_s
        self.fails_at = fails_at
        self._kept: dict[int, list[int]] = {}
        self._answers: dict[int, tuple[int, Sequence[int]]] = {}
        """Of each slot the prompt's length, and what is drawn."""
        self.passes: list[Pass] = []

    def run(self, feeder: PassFeeder) -> None:
        """Compute until each group has had its last pass."""
        drawn: dict[int, list[Drawn]] = {}
        ended = set[int]()
        while len(ended) < self.slot_layout.groups:
            for group in range(self.slot_layout.groups):
                if group in drawn:
                    feeder.take(group, drawn.pop(group))
                given = feeder.feed(group)
                drawn[group] = self._compute(given)
                if given.last:
                    ended.add(group)

    def _compute(self, given: Pass) -> list[Drawn]:
        if self.fails_at is not None and len(self.passes) >= self.fails_at:
            raise RuntimeError("the engine fails, as it was told")
        if len(self.passes) < REMEMBERED:
            self.passes.append(given)
        assert len({row.slot for row in given.rows}) == len(given.rows), given
        others = [row for row in given.rows if row.slot // self.slot_layout.slots != given.group]
        assert len(others) <= 1 and sum(len(row.tokens) > 1 for row in given.rows) <= 1, given
        assert all(row in others for row in given.rows if len(row.tokens) > 1) or not others, given
        assert not (given.last and given.rows)
        time.sleep(self._pass_s)
        scored = [
            Drawn(
                row.slot,
                row.first + 1 + at,
                token,
                LOGPROB,
                likely(token)[: row.likeliest],
            )
            for row in given.rows
            for at, token in enumerate(row.known)
        ]
        drawn = [self._row(row) for row in given.rows]
        return scored + [token for token in drawn if token is not None]

    def _row(self, row: Row) -> Drawn | None:
        place = row.slot
        if row.first == 0:
            self._kept[place] = []
            self._answers.pop(place, None)
        kept = self._kept[place]
        assert (
            0 <= row.slot < self.slot_layout.slots * self.slot_layout.groups
            and 1 <= len(row.tokens) <= self.slot_layout.chunk
        )
        assert row.first == len(kept), (row, len(kept))
        kept += row.tokens
        assert len(kept) <= self.slot_layout.context
        if row.draw is None:
            assert place not in self._answers
            return None
        length, tokens = self._answers.setdefault(place, (len(kept), self._answer(tuple(kept))))
        token = tokens[min(len(kept) - length, len(tokens) - 1)]
        return Drawn(row.slot, len(kept), token, LOGPROB, likely(token)[: row.draw.logprobs])
