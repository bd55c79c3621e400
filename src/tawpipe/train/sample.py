"""Short texts from the model in training, its weights still spread over all processes.

For a glance along the way, not for serving: every token is a forward pass over the texts so far, and each pass brings
all weights here once. All texts grow together, dealt to the processes like any rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tawpipe.console import Console
from tawpipe.data.chat import ChatRenderer
from tawpipe.data.encode import Encoder
from tawpipe.data.messages import Malformed
from tawpipe.data.prepared import PreparedData
from tawpipe.data.rows import PackedDataset
from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.model.build import longest_allowed
from tawpipe.model.chain import Chain
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.measures import Head, over_ranks
from tawpipe.train.config import SampleConfig
from tawpipe.train.metrics import cut_after

CHOICES = 40
"""Tokens among which each next one is drawn: the likeliest."""
ROUNDED = 16
"""Rows are padded to a multiple of so many tokens, so that not every token makes a shape that is new to kernels."""
LONGEST_QUESTION = 512
"""Tokens of a prompt that is taken from the data, at most."""
FILE = "samples.jsonl"


class LikelyTokens:
    """The likeliest next tokens of the rows of one evaluation, behind the one position of each whose label counts: it
    is the row's number.

    Args:
        rows: of the global batch.
        choices: tokens of a row.
    """

    def __init__(self, rows: int, choices: int) -> None:
        self._ids = torch.zeros(rows * choices, dtype=torch.long)
        self._logits = torch.zeros(rows * choices, dtype=torch.float64)
        self._choices = choices

    def head(self, chain: Chain, batch: MicroBatch, number: int) -> Head:
        def head(hidden: Tensor, labels: Tensor, cut: slice) -> Tensor:
            numbers = batch.labels[:, cut]
            for row, column in (numbers != IGNORE).nonzero().tolist():
                top = chain.logits(hidden[row : row + 1, column : column + 1])[0, 0].double().cpu().topk(self._choices)
                place = int(numbers[row, column]) * self._choices
                self._ids[place : place + self._choices] = top.indices
                self._logits[place : place + self._choices] = top.values
            return hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))

        return head

    def of(self, pipeline: Pipeline) -> tuple[Tensor, Tensor]:
        """Tokens and their logits [rows, choices], each row's likeliest first, on all ranks. Call on all ranks."""
        ids, logits = over_ranks(pipeline.world, self._ids, self._logits)
        shape = (-1, self._choices)
        return torch.tensor(ids).long().view(shape), torch.tensor(logits, dtype=torch.float64).view(shape)


def generate(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    window: int,
    seed: int,
    temperature: float = 1.0,
    stops: Sequence[int] = (),
) -> list[list[int]]:
    """Continue every prompt; call on all ranks, with the same arguments. All ranks get the results, prompts included.

    Args:
        prompts: token ids, at least one each.
        tokens: how many to add at most.
        window: how many of the last tokens the model sees.
        seed: of the draws.
        temperature: divides the logits of the ``CHOICES`` likeliest tokens; 0 takes the likeliest.
        stops: tokens that end a text.
    """
    texts = [list(prompt) for prompt in prompts]
    draws = [torch.Generator().manual_seed(seed + number) for number in range(len(texts))]
    choices = min(CHOICES if temperature else 1, pipeline.chain.config.get_text_config().vocab_size)
    open_ones = list(range(len(texts)))
    for _ in range(tokens):
        seen = [texts[number][-window:] for number in open_ones]
        length = min(-(-max(map(len, seen)) // ROUNDED) * ROUNDED, window)
        rows = [_row(number, ids, length) for number, ids in enumerate(seen)]
        measure = LikelyTokens(len(rows), choices)
        pipeline.evaluate(pipeline.part_of(len(rows), length, rows.__getitem__), measure=measure)
        ids, logits = measure.of(pipeline)
        picked = torch.zeros(len(seen), dtype=torch.long)
        if temperature:
            for row, number in enumerate(open_ones):
                chances = (logits[row] / temperature).softmax(-1)
                picked[row] = torch.multinomial(chances, 1, generator=draws[number])
        next_ones = pipeline.world.broadcast(ids.gather(1, picked[:, None]).flatten()).tolist()
        for number, token in zip(open_ones, next_ones, strict=True):
            texts[number].append(token)
        open_ones = [number for number in open_ones if texts[number][-1] not in stops]
        if not open_ones:
            break
    return texts


def _row(number: int, ids: Sequence[int], length: int) -> MicroBatch:
    """A text as a row with padding behind it; its last position is the only one that counts."""
    padding = length - len(ids)
    labels = torch.full((1, length), IGNORE)
    labels[0, len(ids) - 1] = number
    positions = torch.tensor([[*range(len(ids)), *[0] * padding]])
    lengths = (len(ids), padding) if padding else (len(ids),)
    return MicroBatch(torch.tensor([[*ids, *[0] * padding]]), labels, positions, lengths)


@dataclass(frozen=True)
class Sample:
    """A prompt as the user wrote it, and what the model wrote."""

    prompt: str
    text: str

    def __str__(self) -> str:
        return f"{self.prompt!r}: {self.text!r}"


class Samples:
    """The texts that the settings ask for, now and then, in a file of their own besides.

    Args:
        folder: of the run, for the file.
        window: how many of the last tokens the model sees at most.
        seed: of the draws.
        first: step after which the run began; what the file says of later ones is of an earlier start.
    """

    def __init__(
        self,
        settings: SampleConfig,
        console: Console,
        pipeline: Pipeline,
        data: PreparedData,
        *,
        folder: Path,
        window: int,
        seed: int,
        first: int,
    ) -> None:
        self._settings, self._console, self._pipeline, self._seed = settings, console, pipeline, seed
        self._tokenizer: Any = data.tokenizer
        self._asked = dict[str, list[int]]()
        """By what is said of them, beginnings that are tokens already."""
        self._chat = {"auto": data.report.read.chat > 0, "on": True, "off": False}[settings.chat]
        taken = settings.tokens and self._chat and settings.prompt == SampleConfig().prompt
        if taken and (ids := first_question(data.some_text)):
            self._asked[self._tokenizer.decode(ids, skip_special_tokens=True).strip()] = ids
        if settings.tokens and not self._asked:
            self._asked = {prompt: self._encode(prompt) for prompt in settings.prompt}
        self._stops = stops_of(pipeline.chain.model, self._tokenizer)
        self._window = min(window, longest_allowed(pipeline.chain.config))
        self._path = folder / FILE
        self.last: list[Sample] = []
        if pipeline.world.rank == 0:
            cut_after(self._path, first)

    def due(self, step: int) -> bool:
        """True if texts are wanted along the way, after this step."""
        return bool(self._settings.every and self._settings.tokens and step % self._settings.every == 0)

    def write(self, step: int) -> list[Sample]:
        """The texts of the model as it is after ``step``; on all ranks."""
        prompts = list(self._asked.values())
        texts = generate(
            self._pipeline,
            prompts,
            tokens=self._settings.tokens,
            window=self._window,
            seed=self._seed,
            temperature=self._settings.temperature,
            stops=self._stops,
        )
        self.last = [
            Sample(prompt, self._written(ids, len(start)))
            for prompt, start, ids in zip(self._asked, prompts, texts, strict=True)
        ]
        if self._pipeline.world.rank == 0:
            lines = [json.dumps({"step": step, "prompt": sample.prompt, "text": sample.text}) for sample in self.last]
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.writelines(f"{line}\n" for line in lines)
            except OSError as error:
                self._console.notice(f"step {step}: samples were not written, training goes on: {error}")
        return self.last

    def _encode(self, prompt: str) -> list[int]:
        if self._chat:
            try:
                question = ChatRenderer(self._tokenizer).question(prompt)
            except Malformed as error:
                if self._settings.prompt == SampleConfig().prompt:  # nobody has asked this
                    return Encoder(self._tokenizer).beginning(prompt)
                expected = f"one that the chat template takes ({error}); or --sample.chat off"
                raise UserError("--sample.prompt", prompt, expected) from error
            return self._tokenizer.encode(question, add_special_tokens=False)
        return Encoder(self._tokenizer).beginning(prompt) or [self._tokenizer.eos_token_id or 0]

    def _written(self, ids: list[int], prompt: int) -> str:
        """What was added, in the place where it stands: some tokenizers spell a beginning otherwise."""
        whole, before = (self._tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:prompt]))
        return whole.removeprefix(before).strip() if self._chat else whole.removeprefix(before)


def first_question(documents: PackedDataset) -> list[int]:
    """The tokens of a chat up to its first answer, as the template has them; empty if the first rows have none of a few
    hundred tokens, of which every token of a sample computes all.
    """
    for number in range(min(len(documents), 8)):
        row = documents.sample(number)
        length = row.lengths[0]
        learned = (row.labels[0, :length] != IGNORE).nonzero()
        end = int(learned[0]) + 1 if len(learned) else length  # a label is that of the token before it
        if 1 < end < min(length, LONGEST_QUESTION):
            return row.input_ids[0, :end].tolist()
    return []


def stops_of(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text: the tokenizer's, and what the model's generation config names."""
    config = getattr(model, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return sorted({token for token in ids if isinstance(token, int)})
