"""Sample texts from the model during training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tawpipe.console import Console
from tawpipe.data.chats.chat import ChatRenderer
from tawpipe.data.chats.messages import Malformed
from tawpipe.data.encode import Encoder
from tawpipe.data.prepared import PreparedData
from tawpipe.data.rows import PackedDataset
from tawpipe.data.tokenizer import stops_of
from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.serving.generate import Wanted
from tawpipe.serving.held import longest_context
from tawpipe.serving.passes import Sampling
from tawpipe.train.saying.metrics import cut_after
from tawpipe.train.settings.config import SampleConfig

CHOICES = 40
"""Number of likeliest tokens from which each token is drawn (top-k)."""
LONGEST_QUESTION = 512
"""Largest number of tokens of a prompt that is taken from the data."""
WORDS = 12
"""Largest number of tokens at the beginning of a text that are used as a prompt."""
FILE = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """Prompt as the user wrote it, and the text that the model added."""

    prompt: str
    text: str

    def __str__(self) -> str:
        return f"{self.prompt!r}: {self.text!r}"


class Samples:
    """Sample texts of a run, which are also appended to samples.jsonl.

    Args:
        folder: output folder of the run.
        window: largest number of tokens of a text, including its prompt; a prompt that is too long loses its first
            tokens.
        seed: seed for drawing tokens.
        first: step that the run resumed from; lines of samples.jsonl about later steps are deleted.
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
        self._chat, self._asked = through_template(settings, data), beginnings(settings, data)
        self._stops = stops_of(pipeline.chain.model, self._tokenizer)
        self._window = min(window, longest_context(pipeline.chain))
        self._path = folder / FILE
        if pipeline.world.rank == 0:
            with console.showing(FILE):
                cut_after(self._path, first)

    def due(self, step: int) -> bool:
        """Return True if texts are to be written after ``step``, during the run."""
        return bool(self._settings.every and self._settings.tokens and step % self._settings.every == 0)

    def write(self, step: int) -> list[Sample]:
        """Generate texts with the model after ``step``, and append them to samples.jsonl; call on all ranks.

        Returns:
            the texts on rank 0; an empty list on other ranks, and if the texts cannot be shown.
        """
        wanted = wanted_texts(self._asked, self._settings.tokens, self._window)
        written = self._pipeline.generate(
            wanted.prompts,
            wanted.tokens,
            temperature=self._settings.temperature,
            top_k=CHOICES,
            seed=self._seed,
            stops=self._stops,
        )
        samples: list[Sample] = []
        if self._pipeline.world.rank:
            return samples
        with self._console.showing("samples"):
            samples = [
                Sample(prompt, self._written([*start, *new.ids], len(start)))
                for (prompt, start), new in zip(self._asked.items(), written, strict=True)
            ]
        lines = [json.dumps({"step": step, "prompt": sample.prompt, "text": sample.text}) for sample in samples]
        with self._console.showing(FILE), self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        return samples

    def _written(self, ids: list[int], prompt: int) -> str:
        """Return the text that was added after the first ``prompt`` tokens of ``ids``.

        The added tokens are decoded together with the prompt, as some tokenizers write a text differently at its
        beginning.
        """
        whole, before = (self._tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:prompt]))
        return whole.removeprefix(before).strip() if self._chat else whole.removeprefix(before)


def through_template(settings: SampleConfig, data: PreparedData) -> bool:
    """Return True if prompts go through the chat template."""
    return {"auto": data.report.read.chat > 0, "on": True, "off": False}[settings.chat]


def beginnings(settings: SampleConfig, data: PreparedData) -> dict[str, list[int]]:
    """Return the prompts of all texts as token ids, by the words that name them on the console.

    Without ``sample.prompt`` there is one prompt, taken from the data. With ``sample.tokens`` 0 there is none.

    Raises:
        UserError: the chat template does not accept a prompt.
    """
    if not settings.tokens:
        return {}
    chat = through_template(settings, data)
    tokenizer: Any = data.tokenizer
    if settings.prompt:
        return {prompt: _encoded(prompt, tokenizer, chat=chat) for prompt in settings.prompt}
    ids = (chat and first_question(data.some_text)) or first_words(data.some_text)
    ids = ids or Encoder(tokenizer).beginning("") or [tokenizer.eos_token_id or 0]
    return {tokenizer.decode(ids, skip_special_tokens=True).strip(): ids}


def _encoded(prompt: str, tokenizer: Any, *, chat: bool) -> list[int]:
    """Return the token ids of ``prompt``.

    Args:
        chat: True to use ``prompt`` as a user's question in the chat template.

    Raises:
        UserError: the chat template does not accept the prompt.
    """
    if chat:
        try:
            return tokenizer.encode(ChatRenderer(tokenizer).question(prompt), add_special_tokens=False)
        except Malformed as error:
            expected = f"one that the chat template takes ({error}); or --sample.chat off"
            raise UserError("--sample.prompt", prompt, expected) from error
    return Encoder(tokenizer).beginning(prompt) or [tokenizer.eos_token_id or 0]


def wanted_texts(asked: Mapping[str, Sequence[int]], tokens: int, window: int) -> Wanted:
    """Return what to generate: ``tokens`` more tokens for each prompt in ``asked``.

    A prompt that is too long loses its first tokens, so that no text exceeds ``window`` tokens.
    """
    tokens = min(tokens, window - 1)
    return Wanted([ids[tokens - window :] for ids in asked.values()], tokens, Sampling(), frozenset())


def first_question(documents: PackedDataset) -> list[int]:
    """Return the tokens of a chat up to its first answer, in the form of its template.

    Looks at the first 8 rows. Returns an empty list if no question there has fewer than ``LONGEST_QUESTION`` tokens: a
    long prompt makes samples slow.
    """
    for number in range(min(len(documents), 8)):
        row = documents.sample(number)
        length = row.lengths[0]
        learned = (row.labels[0, :length] != IGNORE).nonzero()
        end = int(learned[0]) + 1 if len(learned) else length  # the label of a position is the next token
        if 1 < end < min(length, LONGEST_QUESTION):
            return row.input_ids[0, :end].tolist()
    return []


def first_words(documents: PackedDataset) -> list[int]:
    """Return the first tokens of a document, at most ``WORDS`` and at most half of the document.

    The list is empty if the document has fewer than two tokens.
    """
    tokens, _ = documents.document(0)
    return tokens[: min(WORDS, len(tokens) // 2)].tolist()
