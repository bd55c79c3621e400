"""Completions of texts and of token ids, asked by OpenAI's own client: the numbers are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch
from test_service_api import post

from processes import wait_for
from scripted_engine import LOGPROB
from served import CONFIG, NAME, Served, served, tokenizer_of_bytes
from served_families import by_generate, plain_model, staying
from tawpipe.data.chats.messages import Malformed
from tawpipe.model.chain import Chain
from tawpipe.serving.engine import Engine
from tawpipe.serving.passes import SlotLayout
from tawpipe.serving.service.text import Prompts

ROOM = SlotLayout(groups=2, slots=2, context=96, chunk=5)
TEXTS = ["a rail", "naïve 語", "x", "what a wheel runs on. " * 4]


@pytest.fixture(scope="module")
def model() -> Any:
    return plain_model(vocab_size=len(tokenizer_of_bytes()), eos_token_id=None)


@pytest.fixture(scope="module")
def service(model: Any) -> Iterator[Served]:
    """A model with random values."""
    chain = Chain(plain_model(vocab_size=model.config.vocab_size, eos_token_id=None).requires_grad_(False))
    with served(ROOM, waiting=4, engine=Engine(staying(chain), ROOM)) as running:
        yield running


def complete(service: Served, prompt: Any, **more: Any) -> Any:
    return service.client.completions.create(model=NAME, prompt=prompt, **more)


def ids_of(text: str, *, special: bool = True) -> list[int]:
    """With the special token that the tokenizer puts in front, as ``tokenizer(text)`` has it."""
    return tokenizer_of_bytes().encode(text, add_special_tokens=special)


@torch.no_grad()
def check_echo(choice: Any, model: Any, text: str, prompt: list[int], tokens: int) -> None:
    """Texts, logprobs and offsets of a prompt's tokens and of the answer's."""
    told = choice.logprobs
    logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    spelt = [tokenizer_of_bytes().decode([token]) for token in prompt]
    assert told.tokens[: len(prompt)] == spelt and len(told.tokens) == len(prompt) + tokens
    assert {len(column) for column in (told.token_logprobs, told.top_logprobs, told.text_offset)} == {len(told.tokens)}
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    expected = [float(logprobs[at, token]) for at, token in enumerate(prompt[1:])]
    assert told.token_logprobs[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
    for at, token in enumerate(prompt[1:]):
        # As evaluation harnesses see whether a token is the likeliest.
        likeliest = told.token_logprobs[at + 1] == max(told.top_logprobs[at + 1].values())
        assert likeliest is (int(logprobs[at].argmax()) == token)
    starts = [len(text.encode()[:end].decode(errors="ignore")) for end in range(len(text.encode()))]  # of its bytes
    assert told.text_offset[: len(prompt)] == [0] * (len(prompt) - len(starts)) + starts
    assert choice.text.startswith(text) and told.text_offset[len(prompt) :] == [len(text)] * tokens


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [True, False])
def test_completions_echo_prompts_with_the_logprobs_of_transformers(
    service: Served, model: Any, tokens: int, as_ids: bool
) -> None:
    ids = [ids_of(text, special=not as_ids) for text in TEXTS[: 2 if as_ids else 4]]
    more = {"echo": True, "logprobs": 1, "max_tokens": tokens, "temperature": 0, "seed": 1234}
    answer = complete(service, ids if as_ids else TEXTS, **more)
    assert [choice.index for choice in answer.choices] == [*range(len(ids))] and answer.object == "text_completion"
    for choice, text, prompt in zip(answer.choices, TEXTS, ids, strict=False):
        check_echo(choice, model, text, prompt, tokens)
        assert choice.finish_reason in ("length", "stop" if tokens else "length")
        assert tokens or choice.text == text
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (sum(map(len, ids)), len(ids) * tokens)


@torch.no_grad()
def test_completions_of_text_and_ids_equal_transformers(service: Served, model: Any) -> None:
    ids = ids_of(TEXTS[0])
    expected = by_generate(model, torch.tensor([ids]), 16)[0, len(ids) :]
    text = tokenizer_of_bytes().decode(expected, skip_special_tokens=True)
    for prompt in (TEXTS[0], ids, [ids], [TEXTS[0]]):
        (choice,) = complete(service, prompt, temperature=0).choices
        assert choice.text and text.startswith(choice.text) and choice.logprobs is None
        if choice.finish_reason == "length":
            assert choice.text == text


def test_completion_stream_has_the_parts_of_every_prompt(service: Served) -> None:
    more = {"echo": True, "logprobs": 2, "temperature": 0, "max_tokens": 7}
    whole = complete(service, TEXTS, **more)
    parts: dict[int, list[Any]] = {}
    *chunks, last = complete(service, TEXTS, stream=True, stream_options={"include_usage": True}, **more)
    for chunk in chunks:
        (choice,) = chunk.choices
        parts.setdefault(choice.index, []).append(choice)
    assert last.usage == whole.usage and not last.choices
    for choice in whole.choices:
        of_prompt = parts[choice.index]
        assert "".join(part.text for part in of_prompt) == choice.text
        assert [part.finish_reason for part in of_prompt] == [None] * (len(of_prompt) - 1) + [choice.finish_reason]
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [each for part in of_prompt for each in getattr(part.logprobs, column)]
            assert joined == getattr(choice.logprobs, column)


def test_equal_prompts_differ_unless_the_request_has_a_seed(service: Served) -> None:
    def texts(**more: Any) -> set[str]:
        return {choice.text for choice in complete(service, ["a", "a"], max_tokens=30, **more).choices}

    assert len(texts()) == 2 and len(texts(seed=3)) == 1 and texts(seed=3) == texts(seed=3)


@pytest.fixture(scope="module")
def parrot() -> Iterator[Served]:
    with served(SlotLayout(2, 4, 64, 16), waiting=4, config=replace(CONFIG, max_tokens=30)) as running:
        yield running


def test_end_token_of_a_completion_has_a_logprob_and_no_text(parrot: Served) -> None:
    """Harnesses leave out the last token, of which they expect one for max_tokens = 1."""
    eos = tokenizer_of_bytes().eos_token
    for more, tokens in (({"stop": ["never"]}, ["a", "b", eos]), ({"stop": "b"}, ["a"])):
        choice = complete(parrot, "<|user|>\nab", logprobs=0, **more).choices[0]
        assert choice.logprobs.tokens == tokens and choice.finish_reason == "stop"
        assert choice.text == "".join(tokens).removesuffix(eos)
    assert choice.logprobs.top_logprobs == [{"a": choice.logprobs.token_logprobs[0]}]


def test_top_logprobs_of_tokens_with_one_text_keep_the_most_likely(parrot: Served) -> None:
    half = ids_of("é", special=False)[0]
    told = complete(parrot, [1, half, half], echo=True, logprobs=2, max_tokens=0).choices[0].logprobs
    assert told.tokens[1:] == ["\ufffd"] * 2 and told.top_logprobs[1:] == [{"\ufffd": LOGPROB}] * 2


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        (True, "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        ([[]], "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([1, 2.0], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, [2]], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], [2, [3]]], "prompt[1][1]"),
        ([[1], [10**6]], "prompt[1]"),
        ([[1], [2**40]], "prompt[1]"),
        (["\ud800"], "prompt[0]"),
        (["a"] * 13, "prompt"),
        (["a", "b" * 65], "prompt[1]"),
        ([[1] * 65], "prompt"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_malformed_prompts_are_refused_by_their_place(parrot: Served, prompt: Any, param: str) -> None:
    asked = {"model": NAME, "prompt": prompt, "echo": True, "max_tokens": 0}
    status, content, _ = post(parrot, json.dumps(asked).encode(), path="/v1/completions")
    assert status == 400 and content["error"]["param"] == param, content
    assert parrot.slots.in_use == parrot.slots.waiting == 0


def test_prompt_longer_than_the_context_is_refused_with_its_length(parrot: Served) -> None:
    answer = complete(parrot, "y" * 63, echo=True, max_tokens=0)
    assert answer.choices[0].text == "y" * 63
    with pytest.raises(openai.BadRequestError, match=r"65 tokens.*context of 64 tokens"):
        complete(parrot, "y" * 64, echo=True, max_tokens=0)
    with pytest.raises(openai.BadRequestError, match=r"60 tokens and an answer of 6.*context of 64 tokens"):
        complete(parrot, "y" * 59, max_tokens=6)
    assert complete(parrot, "<|user|>\n" + "y" * 50).usage.completion_tokens == 5


@pytest.mark.parametrize("begin", [7, None])
def test_empty_prompt_becomes_the_begin_token(begin: int | None) -> None:
    class Beginning:
        chat_template, eos_token_id, bos_token_id = "", 7, begin

        def encode(self, text: str) -> list[int]:
            return []

    if begin is not None:
        assert Prompts(Beginning()).completed("") == ([7], "", ())
        return
    with pytest.raises(Malformed, match="begins a text"):
        Prompts(Beginning()).completed("")


def test_disconnected_client_frees_the_slots_of_all_prompts() -> None:
    with served(SlotLayout(2, 2, 600, 64), waiting=4, pass_s=0.02) as service:
        stream = complete(service, ["<|user|>\n" + "abcdefgh" * 30] * 5, stream=True, max_tokens=300)
        next(iter(stream))
        assert wait_for(lambda: service.slots.in_use == 4 and service.slots.waiting == 1)
        with pytest.raises(openai.RateLimitError):
            complete(service, ["a"] * 4)
        assert service.slots.in_use + service.slots.waiting == 5
        stream.close()
        assert wait_for(lambda: not service.slots.in_use and not service.slots.waiting)
        assert service.slots.counts.ends == {"given up": 5}


def test_stop_string_of_one_prompt_frees_its_slot_while_others_continue() -> None:
    with served(SlotLayout(1, 2, 600, 64), pass_s=0.005) as service:
        prompts = ["<|user|>\nab END" + "c" * 400, "<|user|>\n" + "d" * 60]
        first, second = complete(service, prompts, stop=["END"], max_tokens=150).choices
        assert (first.text, first.finish_reason) == ("ab ", "stop")
        assert (second.text, second.finish_reason) == ("d" * 60, "stop")
        assert service.slots.counts.ends["given up"] == 1 and service.slots.counts.answer_tokens < 200


def test_prompt_not_scored_in_time_is_an_error() -> None:
    with served(SlotLayout(1, 1, 600, 2), config=replace(CONFIG, request_s=0.5), pass_s=0.02) as service:
        with pytest.raises(openai.InternalServerError, match="in time"):
            complete(service, "y" * 500, echo=True, logprobs=1, max_tokens=0)
        assert wait_for(lambda: not service.slots.in_use)
