"""Text generation with the model in training: weights go to pipeline stages once, and tokens travel through the stages.

Some models cannot be served this way: models whose tokens interact other than through attention with this project's
mask, and models with fewer layers than processes. They compute a full evaluation for every new token, in which all
weights travel as in training.
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
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.schedule.proof.verify import verify
from tawpipe.serving.drawing import draw
from tawpipe.serving.engine import Engine, StagesEngine
from tawpipe.serving.held import hold_weights, longest_context, why_not_served
from tawpipe.serving.passes import Drawn, Sampling, SlotLayout
from tawpipe.serving.placed import placed_weights
from tawpipe.serving.placing import build_placing
from tawpipe.serving.requests import End, Question, Slots

MOST_SLOTS = 64
"""Maximum number of texts that are generated at one time in each group."""
CHUNK = 256
"""Maximum number of prompt tokens in one pass."""
ROUNDED = 16
"""Rows of an evaluation are padded to a multiple of this number of tokens, so that kernels see few different shapes."""


@dataclass(frozen=True)
class Wanted:
    """Texts to generate.

    Args:
        prompts: token ids of each prompt; at least one each.
        tokens: maximum number of tokens to add to each prompt.
        sampling: sampling settings of the first prompt. Each later prompt uses the next higher seed.
        stops: token ids that end a text.
    """

    prompts: Sequence[Sequence[int]]
    tokens: int
    sampling: Sampling
    stops: frozenset[int]

    @property
    def longest(self) -> int:
        """Maximum number of tokens of the longest text, prompt included."""
        return max(map(len, self.prompts), default=0) + self.tokens

    def slot_layout(self, ranks: int) -> SlotLayout:
        """Return the groups, slots, context and chunk with which ``ranks`` processes generate these texts.

        There are at most ``ranks`` groups. Each has a slot for every text of its share, at most ``MOST_SLOTS``."""
        texts = max(1, len(self.prompts))
        groups = min(ranks, texts)
        return SlotLayout(groups, min(MOST_SLOTS, -(-texts // groups)), self.longest, min(CHUNK, self.longest))

    def sampling_of(self, number: int) -> Sampling:
        """Return the sampling settings of the prompt with index ``number``: seed ``sampling.seed + number``."""
        return self.sampling._replace(seed=self.sampling.seed + number)

    def check(self, chain: Chain) -> None:
        """Check prompts and sampling settings against the model's vocabulary and positions.

        Raises:
            UserError: a value is outside its range.
        """
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
    """Texts that are being generated: token ids and logprobs so far.

    Args:
        wanted: the prompts and their settings.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.texts = [list(prompt) for prompt in wanted.prompts]
        self._logprobs: list[list[float]] = [[] for _ in wanted.prompts]

    @property
    def continuations(self) -> list[Continuation]:
        """New tokens of each text and their logprobs, without the prompts."""
        texts = zip(self.texts, self._wanted.prompts, self._logprobs, strict=True)
        return [Continuation(tuple(ids[len(prompt) :]), tuple(numbers)) for ids, prompt, numbers in texts]

    def add(self, number: int, token: int, logprob: float) -> bool:
        """Append a token to the text with index ``number``; return True if the text continues, False if it is complete.

        Args:
            number: index of the text.
            token: id of the new token. The text is complete with a stop token, or with its maximum number of new
                tokens.
            logprob: logprob of the token.
        """
        self.texts[number].append(token)
        self._logprobs[number].append(logprob)
        return len(self._logprobs[number]) < self._wanted.tokens and token not in self._wanted.stops

    def ask(self, slots: Slots, number: int) -> None:
        """Queue the text with index ``number`` as a request in ``slots``, and return at once.

        The new tokens are appended to this object later, when the engine draws them."""

        def tell(drawn: Drawn | None, end: End, words: str) -> None:
            if drawn is not None:
                self.add(number, drawn.token, drawn.logprob)

        wanted = self._wanted
        question = Question(tuple(wanted.prompts[number]), wanted.tokens, wanted.sampling_of(number), wanted.stops)
        slots.ask(question, tell)

    def in_slots(self, slot_layout: SlotLayout) -> Slots:
        """Return a new queue of requests with all texts, which accepts no further requests.

        The texts are complete after an engine with ``slot_layout`` has run with the returned object. With 0 tokens to
        add, the queue is empty.
        """
        slots = Slots(slot_layout, waiting=len(self.texts))
        if self._wanted.tokens:
            for number in range(len(self.texts)):
                self.ask(slots, number)
        slots.drain()
        return slots


def why_by_evaluation(chain: Chain, ranks: int) -> str:
    """Return the reason why ``ranks`` processes must evaluate whole texts for every token; ``""`` if stages work."""
    layers = len(chain.blocks) - 2
    if ranks > max(1, layers):
        return f"{layers} layers are too few for {ranks} stages"
    return why_not_served(chain) or (chain.why_not_staged if ranks > 1 else "")


class Generator:
    """Generates texts with the weights in training. Its communication groups are kept for the next call.

    Args:
        chain: the model.
        storage: the home memory of the weights.
        world: the processes.
    """

    def __init__(self, chain: Chain, storage: Storage, world: World) -> None:
        self._chain, self._storage, self._world = chain, storage, world
        self._transport: Transport | None = None

    def run(self, wanted: Wanted) -> list[Continuation]:
        """Load the weights into pipeline stages, generate the texts, and return their continuations on all ranks.

        Call on all ranks, while no other action runs. Afterwards the chain holds no weights."""
        world, texts, slot_layout = self._world, GrowingTexts(wanted), wanted.slot_layout(self._world.size)
        with torch.compiler.set_stance("force_eager"):  # compiled layers expect whole rows
            try:
                engine = self._staged(slot_layout) if world.size > 1 else self._whole(slot_layout)
                engine.run(texts.in_slots(slot_layout) if world.rank == 0 else None)
            finally:
                for unit in self._chain.units:
                    self._chain.release(unit.index)
        everyone = world.together(lambda: texts.continuations, acts=world.rank == 0)
        return [Continuation(tuple(ids), tuple(logprobs)) for ids, logprobs in everyone[0]]

    def close(self) -> None:
        """Leave the communication groups of the decode steps."""
        if self._transport is not None:
            self._transport.close()

    def _whole(self, slot_layout: SlotLayout) -> Engine:
        """Load the weights of all blocks from home memory into the chain, and return the engine of a single process."""
        copies, blocks = self._storage.compute_copy, range(len(self._chain.blocks))
        hold_weights(self._chain, blocks, lambda unit: self._numbers(unit, copies[unit.index]))
        return Engine(self._chain, slot_layout)

    def _staged(self, slot_layout: SlotLayout) -> StagesEngine:
        """Send every stage's weights from their homes to its rank, load this rank's stage, and return its engine.

        Call on all ranks. The first call also creates the communication groups, which waits for all ranks."""
        world, chain, homes = self._world, self._chain, self._storage.homes
        schedule = build_decode_steps(chain.spec, world.topology, slot_layout.groups)
        stages = schedule.step.strategy.computes(schedule.step)
        wanted = [[unit.index for unit in chain.units if set(stage).intersection(unit.blocks)] for stage in stages]
        placing = build_placing(chain.spec, world.topology, tuple(homes), wanted)
        if self._transport is None:
            world.wait_patiently()  # other ranks may arrive later, and groups must form within a time limit
            self._transport = Transport(world.topology, world.rank, [schedule, placing], device=world.device)
            verify(placing, one_thread=True)
        placed = placed_weights(placing, self._storage, self._transport)
        hold_weights(chain, stages[world.rank], lambda unit: self._numbers(unit, placed.pop(unit.index)))
        return StagesEngine(chain, slot_layout, world, schedule, transport=self._transport)

    def _numbers(self, unit: Unit, flat: Tensor) -> Tensor:
        """Return the weights of ``unit`` as plain values of the compute type, without padding or packing.

        Args:
            flat: flat tensor of the unit in the format in which it travels.
        """
        if unit.packing is None:
            return flat[: unit.numel]
        numbers = torch.empty(unit.numel, dtype=self._storage.compute_dtype, device=flat.device)
        unit.packing.unpack(flat, numbers)
        return numbers


class Evaluating(Protocol):
    """Methods of a ``Pipeline`` that generation by evaluation needs."""

    world: World

    def part_of(self, rows: int, sequence_length: int, row: Callable[[int], MicroBatch]) -> Any: ...

    def evaluate(self, batch: Any, *, measure: Measure) -> Any: ...


def by_evaluation(pipeline: Evaluating, wanted: Wanted) -> list[Continuation]:
    """Generate by evaluating all unfinished texts again for every new token, for models that cannot be served.

    Call on all ranks.

    Args:
        pipeline: evaluates rows.
        wanted: prompts and settings.

    Returns:
        New tokens and logprobs of each text, on all ranks.
    """
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
    """Measure of an evaluation that draws the next token of each row.

    In each row exactly one position has a label: the last token of the text. The label is the index of the row.

    Args:
        rows: for each row, the position of its next token and its sampling settings.
    """

    def __init__(self, rows: Sequence[tuple[int, Sampling]]) -> None:
        self._rows = rows
        self._drawn: list[Drawn] = []

    def head(self, chain: Chain, batch: MicroBatch, number: int) -> Head:
        """Return the head function of one micro-batch, which draws a token at each labelled position.

        The function stores the tokens in this object and returns a loss of zero. ``number`` is not used."""

        def head(hidden: Tensor, labels: Tensor, cut: slice) -> Tensor:
            """Draw and store the next token at each labelled position of ``hidden``; return a scalar zero as loss."""
            numbers = batch.labels[:, cut]
            for row, column in (numbers != IGNORE).nonzero().tolist():
                drawn = int(numbers[row, column])
                logits = chain.logits(hidden[row : row + 1, column : column + 1])[0]
                self._drawn += draw(logits, [(drawn, *self._rows[drawn])])
            return hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))

        return head

    def of(self, world: World) -> dict[int, tuple[int, float]]:
        """Gather the drawn tokens of all ranks; return (token, logprob) by row index. Call on all ranks."""
        everyone = world.together(lambda: self._drawn)
        return {number: (token, logprob) for each in everyone for number, _, token, logprob, _ in each}


@TEXTS.register
class PipelineTexts:
    """Continues prompts with the weights of a pipeline, in stages or with an evaluation for every token."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._generator = Generator(pipeline.chain, pipeline.storage, pipeline.world)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stops: Sequence[int], **sampling: Any
    ) -> list[Continuation]:
        """Continue every prompt; see ``Pipeline.generate``.

        Args:
            prompts: token ids of each prompt.
            max_tokens: maximum number of new tokens for each prompt.
            stops: token ids that end a text.
            **sampling: fields of ``Sampling``.

        Raises:
            UserError: a prompt or a setting is outside its range.
        """
        wanted = Wanted(prompts, max_tokens, Sampling(**sampling), frozenset(stops))
        wanted.check(self._pipeline.chain)
        if why_by_evaluation(self._pipeline.chain, self._pipeline.world.size):
            return by_evaluation(self._pipeline, wanted)
        return self._generator.run(wanted)

    def close(self) -> None:
        """Leave the communication groups of the decode steps."""
        self._generator.close()


def row_to_continue(number: int, ids: Sequence[int], length: int) -> MicroBatch:
    """Build a micro-batch of one row from a text, padded to ``length`` tokens. Only the last text token has a label.

    Args:
        number: the label: index of the text.
        ids: token ids of the text.
        length: tokens of the row with padding.
    """
    row, labels = torch.tensor([[*ids]]), torch.full((1, len(ids)), IGNORE)
    labels[0, -1] = number
    return MicroBatch(row, labels, torch.arange(len(ids))[None], (len(ids),)).longer(length)
