"""Requests in slots: admission, chunks, ends, giving up, draining."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from processes import wait_for
from scripted_engine import ScriptedEngine
from tawpipe.serving.passes import Drawn, Pass, Row, Sampling, SlotLayout
from tawpipe.serving.requests import End, Ended, Question, QueueFull, Slots

STOP = 9
ROOM = SlotLayout(groups=2, slots=3, context=32, chunk=4)


@dataclass
class Told:
    """What a request is told."""

    tokens: list[int] = field(default_factory=list)
    end: str = ""
    words: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, drawn: Drawn | None, end: End, words: str) -> None:
        assert not self.over.is_set()
        if drawn is not None:
            self.tokens.append(drawn.token)
        self.end, self.words = end, words
        if end:
            self.over.set()


def question(prompt: int, tokens: int = 5) -> Question:
    return Question(tuple(range(100, 100 + prompt)), tokens, Sampling(), {STOP})


def counting(prompt: tuple[int, ...]) -> list[int]:
    """Answers with 1000, 1001, ... ."""
    return list(range(1000, 1100))


def stopping(prompt: tuple[int, ...]) -> list[int]:
    """As many tokens as the prompt has, then the one that ends a text."""
    return [*range(1000, 1000 + len(prompt)), STOP]


def served(
    room: SlotLayout, answer: Callable, ask: Callable[[Slots], object], **more: int
) -> tuple[Slots, ScriptedEngine]:
    """The slots and the engine after what ``ask`` asked has been answered."""
    slots, engine = Slots(room, waiting=more.get("waiting", 1000), idle_s=0.01), ScriptedEngine(room, answer)
    ask(slots)
    slots.drain()
    engine.run(slots)
    assert slots.in_use == slots.waiting == 0
    return slots, engine


def test_prompts_of_every_length_get_their_whole_answer() -> None:
    told = {length: Told() for length in range(1, 33)}
    slots, _ = served(ROOM, stopping, lambda slots: [slots.ask(question(n, 100), told[n]) for n in told])
    for length, answer in told.items():
        room = ROOM.context - length + 1
        assert answer.tokens == stopping((0,) * length)[:room], length
        assert answer.end == ("stop" if length < room else "length")
    assert slots.counts.ends == {"stop": 16, "length": 16}
    assert slots.counts.prompt_tokens == sum(told)
    assert slots.counts.answer_tokens == sum(len(answer.tokens) for answer in told.values())


@pytest.mark.parametrize("length", [1, 32])
def test_prompts_of_one_token_and_of_the_whole_context_are_answered(length: int) -> None:
    told = Told()
    served(ROOM, counting, lambda slots: slots.ask(question(length, 40), told))
    assert told.tokens == counting(())[: 32 - length + 1] and told.end == "length"


def test_prompt_is_computed_in_chunks_over_successive_passes() -> None:
    _, engine = served(SlotLayout(1, 2, 32, 4), counting, lambda slots: slots.ask(question(10, 2), Told()))
    rows = [row for given in engine.passes for row in given.rows]
    assert [(row.first, len(row.tokens), row.draw is not None) for row in rows] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
        (10, 1, True),
    ]
    assert rows[3].tokens == (1000,)


def test_pass_holds_one_prompt_chunk_beside_other_tokens() -> None:
    def ask(slots: Slots) -> None:
        for _ in range(3):
            slots.ask(question(8, 10), Told())

    _, engine = served(SlotLayout(1, 3, 32, 4), counting, ask)
    sizes = [sorted(len(row.tokens) for row in given.rows) for given in engine.passes[:7]]
    assert sizes == [[4], [4], [1, 4], [1, 4], [1, 1, 4], [1, 1, 4], [1, 1, 1]]


def test_prompts_are_spread_evenly_over_the_groups() -> None:
    def ask(slots: Slots) -> None:
        for _ in range(4):
            slots.ask(question(4, 10), Told())

    _, engine = served(ROOM, counting, ask)
    assert [[row.slot for row in given.rows] for given in engine.passes[:4]] == [[0], [3], [0, 1], [3, 4]]


def test_prompt_chunks_use_successive_passes_of_all_groups() -> None:
    room = SlotLayout(3, 2, 40, 4)
    told, other = Told(), Told()

    def ask(slots: Slots) -> None:
        slots.ask(question(10, 2), told)
        slots.ask(question(3, 2), other)

    _, engine = served(room, counting, ask)
    rows = [[(row.slot, row.first, len(row.tokens)) for row in given.rows] for given in engine.passes[:8]]
    # The second prompt is read behind the first, into another group; what is drawn comes back a lap later.
    assert rows == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)], [(2, 0, 3)], [], [], [(0, 10, 1)], [(2, 3, 1)]]
    assert told.tokens == other.tokens == [1000, 1001]


def test_late_token_of_a_cancelled_request_is_not_given_to_its_successor() -> None:
    slots = Slots(SlotLayout(2, 1, 32, 4), waiting=5)
    gone, stays, comes = Told(), Told(), Told()
    ticket = slots.ask(question(2), gone)
    slots.ask(question(2), stays)
    slots.ask(question(2), comes)
    assert [row.slot for row in slots.feed(0).rows] == [0]
    slots.give_up(ticket)
    assert [row.slot for row in slots.feed(1).rows] == [0]  # one group's slot, in the pass of another
    slots.take(0, [Drawn(0, 2, 7, 0.0)])
    assert [row.slot for row in slots.feed(0).rows] == [1]
    slots.take(1, [Drawn(0, 2, 8, 0.0)])
    assert (gone.tokens, stays.tokens, comes.tokens) == ([], [8], [])


def test_cancelled_request_leaves_its_slot_within_two_passes() -> None:
    slots = Slots(SlotLayout(1, 1, 32, 4), waiting=5)
    first, second = Told(), Told()
    ticket = slots.ask(question(2), first)
    slots.ask(question(3), second)
    slots.feed(0)
    slots.give_up(ticket)
    slots.take(0, [Drawn(0, 2, 7, 0.0)])
    assert first.tokens == []  # it is told nothing more
    assert slots.feed(0) == Pass(0, (Row(0, 0, (100, 101, 102), Sampling()),))


def test_cancelled_waiting_request_leaves_the_queue() -> None:
    slots = Slots(SlotLayout(1, 1, 32, 4), waiting=1)
    slots.ask(question(2), Told())
    slots.feed(0)
    ticket = slots.ask(question(2), Told())
    with pytest.raises(QueueFull):
        slots.ask(question(2), Told())
    slots.give_up(ticket)
    slots.ask(question(2), Told())
    assert slots.waiting == 1 and slots.counts.ends == {"given up": 1}


def test_waiting_limit_counts_requests_beyond_the_free_slots() -> None:
    slots = Slots(ROOM, waiting=0)
    for _ in range(6):
        slots.ask(question(2), Told())
    with pytest.raises(QueueFull):
        slots.ask(question(2), Told())


def test_several_requests_are_admitted_together_or_not_at_all() -> None:
    slots = Slots(ROOM, waiting=1)
    slots.ask(question(2), Told())
    with pytest.raises(QueueFull):
        slots.ask_all([(question(2), Told())] * 7)
    assert slots.waiting == 1 and slots.most == 7
    assert len(slots.ask_all([(question(2), Told())] * 6)) == 6


@pytest.mark.parametrize("length", [1, 4, 5, 13, 32])
@pytest.mark.parametrize("tokens", [0, 1])
def test_scored_prompt_reports_all_tokens_but_the_first(length: int, tokens: int) -> None:
    """Also where the chunks ride on passes of several groups, whose results come later than the next chunk goes."""
    told, other, asked = Told(), Told(), replace(question(length, tokens), scored=True)
    room = SlotLayout(3, 2, 32, 4)
    slots, engine = served(room, counting, lambda slots: [slots.ask(asked, told), slots.ask(question(3, 2), other)])
    assert told.tokens == [*asked.prompt[1:], *[1000] * tokens] and told.end == "length"
    assert other.tokens == [1000, 1001]
    assert slots.counts.answer_tokens == 2 + tokens and slots.counts.ends == {"length": 2}
    drawn = [row for given in engine.passes for row in given.rows if row.draw and row.slot == 0]
    assert len(drawn) == tokens


def test_cancelled_scoring_request_reports_nothing() -> None:
    slots, told = Slots(SlotLayout(1, 1, 32, 4), waiting=5), Told()
    ticket = slots.ask(replace(question(3, 0), scored=True), told)
    assert slots.feed(0).rows == (Row(0, 0, (100, 101, 102), None, (101, 102)),)
    slots.give_up(ticket)
    slots.take(0, [Drawn(0, 1, 101, 0.0), Drawn(0, 2, 102, 0.0)])
    assert not slots.feed(0).rows and slots.in_use == 0
    assert (told.tokens, told.end) == ([], "") and slots.counts.ends == {"given up": 1}


def test_draining_finishes_open_requests_and_refuses_new_ones() -> None:
    told = Told()
    slots, engine = served(ROOM, counting, lambda slots: slots.ask(question(2, 3), told))
    assert told.tokens == [1000, 1001, 1002]
    first = [given.last for given in engine.passes].index(True)
    assert all(given.last and not given.rows for given in engine.passes[first:])
    with pytest.raises(Ended):
        slots.ask(question(2), Told())


def test_failure_is_reported_to_all_open_and_waiting_requests() -> None:
    slots = Slots(SlotLayout(1, 1, 32, 4), waiting=5)
    told = [Told() for _ in range(3)]
    tickets = [slots.ask(question(2), each) for each in told]
    slots.feed(0)
    slots.give_up(tickets[1])
    slots.fail("gone")
    slots.take(0, [Drawn(0, 2, 7, 0.0)])
    assert [(each.end, each.words) for each in told] == [("error", "gone"), ("", ""), ("error", "gone")]
    assert slots.counts.ends == {"error": 2, "given up": 1} and slots.feed(0).last


def test_idle_decode_loop_sleeps_until_a_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, waited = Slots(ROOM, waiting=5, idle_s=0.01), list[float]()
    wait = slots._changed.wait
    monkeypatch.setattr(slots._changed, "wait", lambda seconds: waited.append(seconds) or wait(seconds))
    engine = ScriptedEngine(ROOM, counting)
    running = threading.Thread(target=engine.run, args=(slots,))
    running.start()
    assert wait_for(lambda: len(waited) > 5)
    slots._idle_s = 1000.0
    assert wait_for(lambda: waited[-1] == 1000)
    assert len(engine.passes) == ROOM.groups * (len(waited) - 1), "before every lap"
    told = Told()
    slots.ask(question(2, 3), told)
    assert told.over.wait(60)
    slots.drain()
    running.join(60)
    assert not running.is_alive()


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_get_right_answers_and_free_their_slots(seed: int) -> None:
    draws = random.Random(seed)
    room = SlotLayout(draws.randint(1, 4), draws.randint(1, 4), 24, draws.randint(1, 6))
    slots, engine = Slots(room, waiting=1000, idle_s=0.001), ScriptedEngine(room, stopping)
    running = threading.Thread(target=engine.run, args=(slots,))
    running.start()
    asked = list[tuple[int, int, Told, bool]]()
    for _ in range(60):
        length, tokens, given_up = draws.randint(1, 24), draws.randint(1, 24), draws.random() < 0.2
        told = Told()
        ticket = slots.ask(question(length, tokens), told)
        asked.append((length, tokens, told, given_up))
        if given_up:
            threading.Event().wait(draws.random() * 0.002)
            slots.give_up(ticket)
    slots.drain()
    running.join(30)
    assert not running.is_alive() and slots.in_use == slots.waiting == 0
    assert sum(slots.counts.ends.values()) == len(asked)
    for length, tokens, told, given_up in asked:
        whole = stopping((0,) * length)[: min(tokens, 24 - length + 1)]
        assert told.tokens == (whole[: len(told.tokens)] if given_up else whole)
