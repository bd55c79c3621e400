"""Texts from the model in training: its weights go to stages once, and tokens travel through them.

Families whose tokens mix otherwise than in attention by our mask, and models of fewer layers than there are processes,
take an evaluation for every token instead, in which all weights travel as they do in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.units import Unit
from tawpipe.pipeline.pipeline import TEXTS
from tawpipe.pipeline.steps import Continuation
from tawpipe.runtime.compute.measures import Head, Measure
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.transport.transport import Transport
from tawpipe.runtime.world import World
from tawpipe.schedule.laps import build_laps
from tawpipe.schedule.proof.verify import verify
from tawpipe.serving.drawing import draw
from tawpipe.serving.engine import Engine, StagesEngine
from tawpipe.serving.held import hold_weights, longest_context, why_not_served
from tawpipe.serving.passes import Drawn, Room, Sampling
from tawpipe.serving.placed import placed_weights
from tawpipe.serving.placing import build_placing
from tawpipe.serving.requests import End, Question, Slots

MOST_SLOTS = 64
"""Texts that grow at one time, at most."""
CHUNK = 256
"""Tokens of a prompt that ride on one pass."""
ROUNDED = 16
"""Rows of an evaluation are padded to a multiple of so many tokens: not every token makes a shape new to kernels."""


@dataclass(frozen=True)
class Wanted:
    """What is to be generated.

    Args:
        prompts: token ids, at least one each.
        tokens: how many to add to each, at most.
        sampling: of the first prompt; the next ones have the seeds that follow.
        stops: tokens that end a text.
    """

    prompts: Sequence[Sequence[int]]
    tokens: int
    sampling: Sampling
    stops: frozenset[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest text, at most."""
        return max(map(len, self.prompts), default=0) + self.tokens

    def room(self, ranks: int) -> Room:
        """The slots in which they grow on so many processes."""
        texts = max(1, len(self.prompts))
        groups = min(ranks, texts)
        return Room(groups, min(MOST_SLOTS, -(-texts // groups)), self.longest, min(CHUNK, self.longest))

    def sampling_of(self, number: int) -> Sampling:
        """How the tokens behind a prompt are drawn."""
        return self.sampling._replace(seed=self.sampling.seed + number)

    def check(self, chain: Chain) -> None:
        """Raises UserError for what cannot be generated."""
        vocabulary, most = chain.config.get_text_config().vocab_size, longest_context(chain)
        for prompt in self.prompts:
            if not prompt or not all(0 <= token < vocabulary for token in prompt):
                raise UserError("prompts", list(prompt), f"at least one token each, from 0 to {vocabulary - 1}")
        drawn, places = self.sampling, f"at most {most} with the longest prompt, the positions of {chain.name}"
        for name, value, right, expected in (
            ("max_tokens", self.tokens, self.tokens >= 0, "0 or more"),
            ("temperature", drawn.temperature, drawn.temperature >= 0, "0 or more"),
            ("top_k", drawn.top_k, drawn.top_k >= 0, "0 or more"),
            ("top_p", drawn.top_p, 0 < drawn.top_p <= 1, "above 0, up to 1"),
            ("seed", drawn.seed, 0 <= drawn.seed < 2**62, "from 0 on, below 2**62"),
            ("max_tokens", self.tokens, self.longest <= most, places),
        ):
            if not right:
                raise UserError(name, value, expected)


class GrowingTexts:
    """The texts that are wanted, as they grow."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.texts = [list(prompt) for prompt in wanted.prompts]
        self._logprobs: list[list[float]] = [[] for _ in wanted.prompts]

    @property
    def continuations(self) -> list[Continuation]:
        texts = zip(self.texts, self._wanted.prompts, self._logprobs, strict=True)
        return [Continuation(tuple(ids[len(prompt) :]), tuple(numbers)) for ids, prompt, numbers in texts]

    def add(self, number: int, token: int, logprob: float) -> bool:
        """A text has a new token; False if that was the last."""
        self.texts[number].append(token)
        self._logprobs[number].append(logprob)
        return len(self._logprobs[number]) < self._wanted.tokens and token not in self._wanted.stops

    def ask(self, slots: Slots, number: int) -> None:
        """Have a text grow in one of an engine's slots."""

        def tell(drawn: Drawn | None, end: End, words: str) -> None:
            if drawn is not None:
                self.add(number, drawn.token, drawn.logprob)

        wanted = self._wanted
        question = Question(tuple(wanted.prompts[number]), wanted.tokens, wanted.sampling_of(number), wanted.stops)
        slots.ask(question, tell)

    def in_slots(self, room: Room) -> Slots:
        """All of them in the slots of an engine, which has computed them when its last pass is over."""
        slots = Slots(room, waiting=len(self.texts))
        if self._wanted.tokens:
            for number in range(len(self.texts)):
                self.ask(slots, number)
        slots.drain()
        return slots


def why_by_evaluation(chain: Chain, ranks: int) -> str:
    """The reason why every token takes an evaluation on so many processes; empty if weights stay."""
    layers = len(chain.blocks) - 2
    if ranks > max(1, layers):
        return f"{layers} layers are too few for {ranks} stages"
    return why_not_served(chain) or (chain.why_not_staged if ranks > 1 else "")


class Generator:
    """Generates texts from the weights at home; what it makes for that stays for the next time.

    Args:
        storage: the homes.
    """

    def __init__(self, chain: Chain, storage: Storage, world: World) -> None:
        self._chain, self._storage, self._world = chain, storage, world
        self._transport: Transport | None = None

    def run(self, wanted: Wanted) -> list[Continuation]:
        """With nothing under way; on all ranks, which all get the same. Afterwards the chain has no weights again."""
        world, texts, room = self._world, GrowingTexts(wanted), wanted.room(self._world.size)
        with torch.compiler.set_stance("force_eager"):  # passes have many lengths, and layers are compiled for rows
            try:
                engine = self._staged(room) if world.size > 1 else self._whole(room)
                engine.run(texts.in_slots(room) if world.rank == 0 else None)
            finally:
                for unit in self._chain.units:
                    self._chain.release(unit.index)
        everyone = world.together(lambda: texts.continuations, acts=world.rank == 0)
        return [Continuation(tuple(ids), tuple(logprobs)) for ids, logprobs in everyone[0]]

    def close(self) -> None:
        """Leave the groups of the laps."""
        if self._transport is not None:
            self._transport.close()

    def _whole(self, room: Room) -> Engine:
        """The engine of a process that has all blocks."""
        copies, blocks = self._storage.compute_copy, range(len(self._chain.blocks))
        hold_weights(self._chain, blocks, lambda unit: self._numbers(unit, copies[unit.index]))
        return Engine(self._chain, room)

    def _staged(self, room: Room) -> StagesEngine:
        """The engine of this rank's stage, to which weights have gone."""
        world, chain, homes = self._world, self._chain, self._storage.homes
        laps = build_laps(chain.spec, world.topology, room.groups)
        stages = laps.step.strategy.computes(laps.step)
        wanted = [[unit.index for unit in chain.units if set(stage).intersection(unit.blocks)] for stage in stages]
        placing = build_placing(chain.spec, world.topology, tuple(homes), wanted)
        if self._transport is None:
            world.wait_patiently()  # for ranks that come later: groups are made within a time limit
            self._transport = Transport(world.topology, world.rank, [laps, placing], device=world.device)
            verify(placing, one_thread=True)
        placed = placed_weights(placing, self._storage, self._transport)
        hold_weights(chain, stages[world.rank], lambda unit: self._numbers(unit, placed.pop(unit.index)))
        return StagesEngine(chain, room, world, laps, transport=self._transport)

    def _numbers(self, unit: Unit, flat: Tensor) -> Tensor:
        """A unit's numbers of what travels of it."""
        if unit.packing is None:
            return flat[: unit.numel]
        numbers = torch.empty(unit.numel, dtype=self._storage.compute_dtype, device=flat.device)
        unit.packing.unpack(flat, numbers)
        return numbers


class Evaluating(Protocol):
    """A ``Pipeline``, as far as an evaluation for every token needs it."""

    world: World

    def part_of(self, rows: int, sequence_length: int, row: Callable[[int], MicroBatch]) -> Any: ...

    def evaluate(self, batch: Any, *, measure: Measure) -> Any: ...


def by_evaluation(pipeline: Evaluating, wanted: Wanted) -> list[Continuation]:
    """The same by an evaluation for every token, on all ranks."""
    texts = GrowingTexts(wanted)
    growing = [*range(len(texts.texts))] if wanted.tokens else []
    while growing:
        seen = [texts.texts[number] for number in growing]
        length = min(-(-max(map(len, seen)) // ROUNDED) * ROUNDED, wanted.longest)
        rows = [row_to_continue(place, ids, length) for place, ids in enumerate(seen)]
        samplings = [wanted.sampling_of(number) for number in growing]
        measure = DrawnTokens(list(zip(map(len, seen), samplings, strict=True)))
        pipeline.evaluate(pipeline.part_of(len(rows), length, rows.__getitem__), measure=measure)
        drawn = measure.of(pipeline.world)
        growing = [number for place, number in enumerate(growing) if texts.add(number, *drawn[place])]
    return texts.continuations


class DrawnTokens:
    """Tokens that are drawn in one evaluation, behind the one position of each row whose label counts: it is the row's
    number.

    Args:
        rows: of each the position of its next token, and how that is drawn.
    """

    def __init__(self, rows: Sequence[tuple[int, Sampling]]) -> None:
        self._rows = rows
        self._drawn: list[Drawn] = []

    def head(self, chain: Chain, batch: MicroBatch, number: int) -> Head:
        def head(hidden: Tensor, labels: Tensor, cut: slice) -> Tensor:
            numbers = batch.labels[:, cut]
            for row, column in (numbers != IGNORE).nonzero().tolist():
                drawn = int(numbers[row, column])
                logits = chain.logits(hidden[row : row + 1, column : column + 1])[0]
                self._drawn += draw(logits, [(drawn, *self._rows[drawn])])
            return hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))

        return head

    def of(self, world: World) -> dict[int, tuple[int, float]]:
        """Token and logprob by the number of the row, on all ranks. Call on all ranks."""
        everyone = world.together(lambda: self._drawn)
        return {number: (token, logprob) for each in everyone for number, _, token, logprob, _ in each}


@TEXTS.register
class PipelineTexts:
    """Continues prompts from a pipeline's weights, in stages or by an evaluation for every token."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._generator = Generator(pipeline.chain, pipeline.storage, pipeline.world)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stops: Sequence[int], **sampling: Any
    ) -> list[Continuation]:
        """Continue every prompt; see ``Pipeline.generate``."""
        wanted = Wanted(prompts, max_tokens, Sampling(**sampling), frozenset(stops))
        wanted.check(self._pipeline.chain)
        if why_by_evaluation(self._pipeline.chain, self._pipeline.world.size):
            return by_evaluation(self._pipeline, wanted)
        return self._generator.run(wanted)

    def close(self) -> None:
        """Leave the groups of the laps."""
        self._generator.close()


def row_to_continue(number: int, ids: Sequence[int], length: int) -> MicroBatch:
    """A text as a row with padding behind it; its last position is the only one that counts."""
    row, labels = torch.tensor([[*ids]]), torch.full((1, len(ids)), IGNORE)
    labels[0, -1] = number
    return MicroBatch(row, labels, torch.arange(len(ids))[None], (len(ids),)).longer(length)
