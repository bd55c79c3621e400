"""Requests in the KV-cache slots of an engine: accepting requests, building passes, and ending requests.

Requests can be added from one thread, such as the HTTP thread, while the engine takes passes in another. A cancelled
request has left its slot when the next pass is built. Without torch.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tawpipe.serving.passes import IDLE_S, Drawn, Pass, Row, Sampling, SlotLayout

End = Literal["", "stop", "length", "error"]
"""End of a request: ``stop`` (by a stop token), ``length`` (by a token limit), ``error``; ``""`` if it is open."""
Tell = Callable[[Drawn | None, End, str], None]
"""Callback of a request: receives a token, the end or ``""``, and the message of a failure or ``""``.

It is called for each token of the request. The token is None for a failure, and at the end of a request that draws no
tokens.
"""


class QueueFull(Exception):
    """Raised if the maximum number of requests are already waiting."""


class Ended(Exception):
    """Raised if the service accepts no more requests."""


@dataclass(frozen=True)
class Question:
    """Prompt and settings of a request.

    Attributes:
        prompt: token ids; at least one and at most the context.
        tokens: maximum number of tokens of the answer. The context may end it earlier. With 0, only the prompt is
            computed.
        sampling: how tokens are drawn.
        stops: token ids that end the answer.
        scored: report the logprobs of all prompt tokens but the first, before the tokens of the answer.
    """

    prompt: tuple[int, ...]
    tokens: int
    sampling: Sampling
    stops: Collection[int] = ()
    scored: bool = False


@dataclass(eq=False)
class Ticket:
    """Request from its acceptance to its end.

    Attributes:
        question: prompt and settings.
        tell: callback for its tokens.
        slot: KV-cache slot; None while the request waits for one.
        computed_tokens: number of tokens that were put into passes.
        answer: number of tokens drawn.
        latest: last drawn token; None if it is not known yet or was already put into a pass.
        cancelled: True if the request was cancelled or has failed; its callback is not called again.
    """

    question: Question
    tell: Tell
    slot: int | None = None
    computed_tokens: int = 0
    answer: int = 0
    latest: int | None = None
    cancelled: bool = False

    @property
    def in_prompt(self) -> bool:
        """True while a part of the prompt was not put into a pass yet."""
        return self.computed_tokens < len(self.question.prompt)

    def next_row(self, chunk: int) -> Row:
        """Return the next row of this request for a pass, and count its tokens as computed.

        The row holds the next prompt tokens, at most ``chunk``, or else the token that was drawn last. It draws a token
        unless more of the prompt follows, or the request wants no answer."""
        assert self.slot is not None
        asked, first = self.question, self.computed_tokens
        tokens = asked.prompt[first : first + chunk]
        known = asked.prompt[first + 1 : first + 1 + len(tokens)] if asked.scored else ()
        if not tokens:
            assert self.latest is not None
            tokens, self.latest = (self.latest,), None
        self.computed_tokens += len(tokens)
        draw = None if self.in_prompt or not asked.tokens else asked.sampling
        return Row(self.slot, first, tokens, draw, known, asked.sampling.logprobs if known else 0)


@dataclass
class Counts:
    """Counters since the start of the service.

    Attributes:
        passes: passes built.
        prompt_tokens: tokens of completely read prompts.
        answer_tokens: tokens drawn.
        ends: number of requests by the way in which they ended; cancelled ones as ``given up``.
    """

    passes: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)


class Slots:
    """Waiting requests and requests in KV-cache slots; the ``PassFeeder`` of an engine.

    Prompts are read one after another: every pass, of any group, takes a chunk of the current prompt.

    Args:
        slot_layout: groups, slots and context of the engine.
        waiting: maximum number of requests that wait for a slot, in addition to requests that find a free one.
        idle_s: maximum seconds between decode steps while there are no requests.
    """

    def __init__(self, slot_layout: SlotLayout, *, waiting: int, idle_s: float = IDLE_S) -> None:
        self.slot_layout, self.counts = slot_layout, Counts()
        self._most_waiting, self._idle_s = waiting, idle_s
        self._places = range(slot_layout.groups * slot_layout.slots)
        self._slots: dict[int, Ticket] = {}
        """Occupied slots and their requests."""
        self._queue = deque[Ticket]()
        self._reading: Ticket | None = None
        """Request whose prompt is being read, or None."""
        self._drawing: list[dict[int, Ticket]] = [{} for _ in range(slot_layout.groups)]
        """For each group's pass being computed: slot -> request for which the pass draws or scores tokens."""
        self._closing: list[Ticket | None] = [None] * slot_layout.groups
        """For each group's pass being computed: a request without an answer whose prompt ends in this pass, or None."""
        self._changed = threading.Condition()
        self.ending = self._last = False
        """True if no more requests are accepted. ``_last`` is True once a pass was marked as the last."""

    @property
    def in_use(self) -> int:
        """Number of slots with a request."""
        return len(self._slots)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._queue)

    @property
    def most(self) -> int:
        """Maximum number of requests at one time, waiting ones included."""
        return self._most_waiting + len(self._places)

    def ask(self, question: Question, tell: Tell) -> Ticket:
        """Queue a request for a slot and return its ticket.

        Args:
            question: prompt and settings.
            tell: callback for tokens. It is called in the engine's thread and must return at once.

        Raises:
            QueueFull: too many requests are waiting.
            Ended: the service accepts no more requests.
        """
        return self.ask_all([(question, tell)])[0]

    def ask_all(self, questions: Sequence[tuple[Question, Tell]]) -> list[Ticket]:
        """Queue several requests, or none of them if there is not enough space for all; see ``ask``.

        Args:
            questions: (question, callback) of each request.
        """
        with self._changed:
            if self.ending:
                raise Ended
            if len(self._queue) + len(questions) > self.most - self.in_use:
                raise QueueFull
            tickets = [Ticket(question, tell) for question, tell in questions]
            self._queue.extend(tickets)
            self._changed.notify_all()
        return tickets

    def give_up(self, ticket: Ticket) -> None:
        """Cancel a request; its callback is not called again. Has no effect on a request that has ended.

        A waiting request leaves the queue at once. A computed one leaves its slot at the next ``feed``."""
        with self._changed:
            ticket.cancelled = True
            if ticket in self._queue:
                self._queue.remove(ticket)
                self.counts.ends["given up"] += 1

    def drain(self) -> None:
        """Accept no more requests. The engine ends when all accepted requests have ended."""
        with self._changed:
            self.ending = True
            self._changed.notify_all()

    def fail(self, words: str) -> None:
        """End all requests with an error, accept no more, and call the callbacks of requests not cancelled.

        Args:
            words: message for the callback of every request.
        """
        with self._changed:
            self.ending = True
            tickets = [*self._queue, *self._slots.values()]
            self._queue.clear()
            self._slots.clear()
            self._reading = None
            for ticket in tickets:
                self.counts.ends["given up" if ticket.cancelled else "error"] += 1
                if not ticket.cancelled:
                    ticket.tell(None, "error", words)
                ticket.cancelled = True
            self._changed.notify_all()

    def feed(self, group: int) -> Pass:
        """Build the next pass of a group: the latest token of each busy slot, and a chunk of the current prompt.

        First frees the slots of cancelled requests, and moves a waiting request to a free slot if no prompt is being
        read. For group 0, waits up to ``idle_s`` seconds while there are no requests. The pass is marked as last if no
        requests are accepted and none is left."""
        with self._changed:
            if group == 0 and not (self.ending or self._queue or self._slots):
                self._changed.wait(self._idle_s)
            for ticket in [*self._slots.values()]:
                if ticket.cancelled:
                    self._free(ticket, "given up")
            if self._reading is None and self._queue and len(self._slots) < len(self._places):
                self._reading = self._queue.popleft()
                self._reading.slot = self._emptiest()
                self._slots[self._reading.slot] = self._reading
            held = map(
                self._slots.get, self._places[group * self.slot_layout.slots : (group + 1) * self.slot_layout.slots]
            )
            tickets = [ticket for ticket in held if ticket is not None and ticket.latest is not None]
            if self._reading is not None:
                tickets.append(self._reading)
            rows = tuple(ticket.next_row(self.slot_layout.chunk) for ticket in tickets)
            self._closing[group] = None
            if self._reading is not None and not self._reading.in_prompt:
                self.counts.prompt_tokens += self._reading.computed_tokens
                self._closing[group] = None if self._reading.question.tokens else self._reading
                self._reading = None
            self._drawing[group] = {row.slot: who for row, who in zip(rows, tickets, strict=True)}
            self.counts.passes += 1
            self._last |= self.ending and not self._queue and not self._slots
            return Pass(group, rows, self._last)

    def take(self, group: int, drawn: Sequence[Drawn]) -> None:
        """Pass the drawn and scored tokens to the callbacks of their requests, and free the slots of requests that end.

        A request ends with a stop token, with its maximum number of tokens, or at the end of the context. Tokens of
        cancelled requests are dropped.

        Args:
            group: index of the group whose pass was computed.
            drawn: its tokens.
        """
        with self._changed:
            for token in drawn:
                ticket = self._drawing[group][token.slot]
                if ticket.cancelled:  # its slot may hold another request by now
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
                elif ticket.answer >= ticket.question.tokens or token.position >= self.slot_layout.context:
                    end = "length"
                ticket.tell(token, end, "")
                if end:
                    self._free(ticket, end)
            if (closing := self._closing[group]) is not None and not closing.cancelled:
                closing.tell(None, "length", "")
                self._free(closing, "length")

    def _emptiest(self) -> int:
        """Return a free slot in a group with the fewest requests."""
        busy = Counter(slot // self.slot_layout.slots for slot in self._slots)
        free = (slot for slot in self._places if slot not in self._slots)
        return min(free, key=lambda slot: busy[slot // self.slot_layout.slots])

    def _free(self, ticket: Ticket, how: str) -> None:
        """Free the slot of a request, and count its end as ``how``."""
        assert ticket.slot is not None
        del self._slots[ticket.slot]
        if ticket is self._reading:
            self._reading = None
        self.counts.ends[how] += 1
