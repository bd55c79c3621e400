"""Requests in the slots of an engine's groups: who comes in, what each pass computes, who has ended.

They may be asked from one thread, as HTTP does it, and the engine feeds from another. A request that is given up has
left its slot when the next pass is fed. Without torch.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tawpipe.serving.passes import IDLE_S, Drawn, Pass, Room, Row, Sampling

End = Literal["", "stop", "length", "error"]
"""How a request has ended: by a token that ends a text, by a limit of tokens, by a failure; or not yet."""
Tell = Callable[[Drawn | None, End, str], None]
"""Is told each token of a request, whether it ends with that, and of a failure what is to be said. The token is None
for a failure, and at the end of a request without an answer."""


class NoRoom(Exception):
    """As many requests wait as may."""


class Ended(Exception):
    """The service takes no requests any more."""


@dataclass(frozen=True)
class Question:
    """What is asked of the model.

    Attributes:
        prompt: at least one token, at most the context.
        tokens: of the answer at most; the context may end it before. With 0 the prompt alone is computed.
        stops: tokens that end it.
        scored: tell the logprobs of the prompt's tokens, but of the first one, before those of the answer.
    """

    prompt: tuple[int, ...]
    tokens: int
    sampling: Sampling
    stops: Collection[int] = ()
    scored: bool = False


@dataclass(eq=False)
class Ticket:
    """A request from when it is asked until it ends.

    Attributes:
        slot: None while it waits for one.
        given: tokens that were in a pass.
        answer: tokens that were drawn.
        latest: the last of them; None while it is not known, or was given to a pass.
    """

    question: Question
    tell: Tell
    slot: int | None = None
    given: int = 0
    answer: int = 0
    latest: int | None = None
    given_up: bool = False

    @property
    def in_prompt(self) -> bool:
        """True while some of the prompt was in no pass."""
        return self.given < len(self.question.prompt)

    def next_row(self, chunk: int) -> Row:
        """What its slot computes next: of the prompt at most ``chunk`` tokens, or the token that was drawn last."""
        assert self.slot is not None
        asked, first = self.question, self.given
        tokens = asked.prompt[first : first + chunk]
        known = asked.prompt[first + 1 : first + 1 + len(tokens)] if asked.scored else ()
        if not tokens:
            assert self.latest is not None
            tokens, self.latest = (self.latest,), None
        self.given += len(tokens)
        draw = None if self.in_prompt or not asked.tokens else asked.sampling
        return Row(self.slot, first, tokens, draw, known, asked.sampling.logprobs if known else 0)


@dataclass
class Counts:
    """What has happened since the service began.

    Attributes:
        ends: requests by how they have ended; ``given up`` by those who asked, too.
    """

    passes: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)


class Slots:
    """Requests that wait and those in slots; the ``PassFeeder`` of an engine.

    Prompts are read one after the other, a chunk with every pass, whatever its group.

    Args:
        waiting: requests that may wait for a slot, besides those that find one free.
        idle_s: seconds between laps in which nothing is computed.
    """

    def __init__(self, room: Room, *, waiting: int, idle_s: float = IDLE_S) -> None:
        self.room, self.counts = room, Counts()
        self._most_waiting, self._idle_s = waiting, idle_s
        self._places = range(room.groups * room.slots)
        self._slots: dict[int, Ticket] = {}
        """Those with a request in them."""
        self._queue = deque[Ticket]()
        self._reading: Ticket | None = None
        """Whose prompt is read."""
        self._drawing: list[dict[int, Ticket]] = [{} for _ in range(room.groups)]
        """For each group's pass on its way: slot -> request for which tokens are drawn or known ones are scored."""
        self._closing: list[Ticket | None] = [None] * room.groups
        """Request without an answer whose prompt ends in each group's pass that is on its way."""
        self._changed = threading.Condition()
        self.ending = self._last = False
        """True if no more requests are taken; and once a pass was the last."""

    @property
    def in_use(self) -> int:
        """Slots with a request in them."""
        return len(self._slots)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def most(self) -> int:
        """Requests that may be open at one time."""
        return self._most_waiting + len(self._places)

    def ask(self, question: Question, tell: Tell) -> Ticket:
        """Begin a request, which waits for a slot.

        Args:
            tell: called from the engine's thread; it returns at once.

        Raises:
            NoRoom: too many wait.
            Ended: the service is ending.
        """
        return self.ask_all([(question, tell)])[0]

    def ask_all(self, questions: Sequence[tuple[Question, Tell]]) -> list[Ticket]:
        """Begin several requests, or none of them where there is no room for all; see ``ask``."""
        with self._changed:
            if self.ending:
                raise Ended
            if len(self._queue) + len(questions) > self.most - self.in_use:
                raise NoRoom
            tickets = [Ticket(question, tell) for question, tell in questions]
            self._queue.extend(tickets)
            self._changed.notify_all()
        return tickets

    def give_up(self, ticket: Ticket) -> None:
        """Nobody wants the rest of a request; of no effect on one that has ended. It is told nothing more."""
        with self._changed:
            ticket.given_up = True
            if ticket in self._queue:
                self._queue.remove(ticket)
                self.counts.ends["given up"] += 1

    def drain(self) -> None:
        """Take no more requests, and end the engine when those that were taken have ended."""
        with self._changed:
            self.ending = True
            self._changed.notify_all()

    def fail(self, words: str) -> None:
        """End every request now, as the service cannot go on; each is told why."""
        with self._changed:
            self.ending = True
            tickets = [*self._queue, *self._slots.values()]
            self._queue.clear()
            self._slots.clear()
            self._reading = None
            for ticket in tickets:
                self.counts.ends["given up" if ticket.given_up else "error"] += 1
                if not ticket.given_up:
                    ticket.tell(None, "error", words)
                ticket.given_up = True
            self._changed.notify_all()

    def feed(self, group: int) -> Pass:
        """The group's next pass: the latest token of each of its busy slots, and a chunk of the prompt that is read."""
        with self._changed:
            if group == 0 and not (self.ending or self._queue or self._slots):
                self._changed.wait(self._idle_s)
            for ticket in [*self._slots.values()]:
                if ticket.given_up:
                    self._free(ticket, "given up")
            if self._reading is None and self._queue and len(self._slots) < len(self._places):
                self._reading = self._queue.popleft()
                self._reading.slot = self._emptiest()
                self._slots[self._reading.slot] = self._reading
            held = map(self._slots.get, self._places[group * self.room.slots : (group + 1) * self.room.slots])
            tickets = [ticket for ticket in held if ticket is not None and ticket.latest is not None]
            if self._reading is not None:
                tickets.append(self._reading)
            rows = tuple(ticket.next_row(self.room.chunk) for ticket in tickets)
            self._closing[group] = None
            if self._reading is not None and not self._reading.in_prompt:
                self.counts.prompt_tokens += self._reading.given
                self._closing[group] = None if self._reading.question.tokens else self._reading
                self._reading = None
            self._drawing[group] = {row.slot: who for row, who in zip(rows, tickets, strict=True)}
            self.counts.passes += 1
            self._last |= self.ending and not self._queue and not self._slots
            return Pass(group, rows, self._last)

    def take(self, group: int, drawn: Sequence[Drawn]) -> None:
        """Tell those for whom a token was drawn or scored, and free the slots of those that end with it."""
        with self._changed:
            for token in drawn:
                ticket = self._drawing[group][token.slot]
                if ticket.given_up:  # its slot may be another's by now
                    continue
                if token.position < len(ticket.question.prompt):
                    ticket.tell(token, "", "")
                    continue
                ticket.latest = token.token
                ticket.answer += 1
                self.counts.answer_tokens += 1
                end: End = ""
                if token.token in ticket.question.stops:
                    end = "stop"
                elif ticket.answer >= ticket.question.tokens or token.position >= self.room.context:
                    end = "length"
                ticket.tell(token, end, "")
                if end:
                    self._free(ticket, end)
            if (closing := self._closing[group]) is not None and not closing.given_up:
                closing.tell(None, "length", "")
                self._free(closing, "length")

    def _emptiest(self) -> int:
        """A free slot, of a group with the fewest requests."""
        busy = Counter(slot // self.room.slots for slot in self._slots)
        free = (slot for slot in self._places if slot not in self._slots)
        return min(free, key=lambda slot: busy[slot // self.room.slots])

    def _free(self, ticket: Ticket, how: str) -> None:
        assert ticket.slot is not None
        del self._slots[ticket.slot]
        if ticket is self._reading:
            self._reading = None
        self.counts.ends[how] += 1
