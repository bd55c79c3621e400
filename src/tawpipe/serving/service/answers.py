"""The answers to one request: tokens that the engine draws for it, as text, in the form of OpenAI's interface."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tawpipe.serving.passes import Drawn
from tawpipe.serving.requests import End, Ended, NoRoom, Question, Slots
from tawpipe.serving.service.fields import Fields, Refusal
from tawpipe.serving.service.text import BROKEN, AnswerText, Prompt, StopStrings, TextPieces

WAIT_S = 2
"""Seconds after which a request for which there was no room may be tried again."""
LEAST_LOGPROB = -9999.0
"""In the place of minus infinity, which JSON does not have."""
GONE = 499
"""The status of what nobody reads any more."""


@dataclass(frozen=True)
class AnswerPart:
    """New text and tokens of an answer.

    Attributes:
        index: number of the prompt.
        drawn: tokens whose text is let out with it, each with the characters of the answer before it.
        scored: logprobs of the prompt's tokens but the first, in the first part of an echo; else None.
        finish: how the answer has ended, with its last part.
    """

    index: int
    text: str
    drawn: Sequence[tuple[int, Drawn]] = ()
    scored: Sequence[Drawn] | None = None
    finish: End = ""


@dataclass
class _Growing:
    """The answer to one prompt as its tokens come.

    Attributes:
        prompt: number of its tokens.
        scored: logprobs of the prompt for the first part of an echo; else None.
        tells_end: the token that ends the answer counts among the drawn ones.
    """

    index: int
    prompt: int
    text: AnswerText[tuple[int, Drawn]]
    scored: list[Drawn] | None
    tells_end: bool
    tokens: int = 0

    def part(self, drawn: Drawn | None, end: End) -> AnswerPart | None:
        """The part that a token makes; None for a token of the prompt."""
        if self.scored is not None and drawn is not None and drawn.position < self.prompt:
            return self.scored.append(drawn)
        text, told = "", list[tuple[int, Drawn]]()
        if drawn is not None:
            self.tokens += 1
            if end != "stop":
                text, told = self.text.add(drawn.token, (self.text.come, drawn))
        if end and not self.text.stops.found:
            rest, others = self.text.end()
            text, told = text + rest, told + others
            if self.tells_end and drawn is not None and end == "stop":
                told.append((self.text.come, drawn))
        scored, self.scored = self.scored, None
        return AnswerPart(self.index, text, told, scored, "stop" if self.text.stops.found else end)


class Answering:
    """A request in the service, from its questions to the last part of its answers. In the thread of an event loop.
    Called as an ASGI application, it sends the answers' events as they come.

    Args:
        asked: of a request for a chat completion; its prompts are those of the questions, read.
        model: the name that the answer says.
        seconds: after which the answer ends with what there is.

    Raises:
        Refusal: there is no room, or the service is ending.
    """

    name, kind, streamed = "chatcmpl", "chat.completion", "chat.completion.chunk"
    """How the answer's id begins; and the kinds of object that a whole answer and a part of one are."""
    continues = False
    """True if an answer continues the text of its prompt, and the token that ends it has a logprob."""
    opening: Sequence[dict[str, Any]] = (
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
    )
    """Choices of the first events of a stream."""

    def __init__(
        self, slots: Slots, asked: Fields, questions: Sequence[Question], tokenizer: Any, *, model: str, seconds: float
    ) -> None:
        self.asked = asked
        self.prompts: Sequence[Prompt] = asked.prompts
        self.spelling = cache(lambda token: tokenizer.decode([token]))
        self._slots, self._model = slots, model
        self._answers = list[_Growing]()
        for index, prompt in enumerate(self.prompts):
            pieces = TextPieces(tokenizer, prompt.ids if self.continues else ())
            text, scored = AnswerText(pieces, StopStrings(asked.stops)), list[Drawn]() if asked.echo else None
            self._answers.append(_Growing(index, len(prompt.ids), text, scored, self.continues))
        self._id, self._created = f"{self.name}-{secrets.token_hex(12)}", int(time.time())
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._news = asyncio.Queue[tuple[int, Drawn | None, End, str] | None]()
        """News of the engine about a prompt; None after the client has gone."""
        try:
            self._tickets = slots.ask_all([(each, partial(self._tell, at)) for at, each in enumerate(questions)])
        except NoRoom as error:
            raise Refusal(429, "too many requests wait; ask again", code="busy", wait_s=WAIT_S) from error
        except Ended as error:
            raise Refusal(503, "the service is ending", code="ending") from error

    def _tell(self, index: int, drawn: Drawn | None, end: End, words: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is there
            self._loop.call_soon_threadsafe(self._news.put_nowait, (index, drawn, end, words))

    def _give_up(self) -> None:
        for ticket in self._tickets:
            self._slots.give_up(ticket)

    @contextlib.contextmanager
    def watched(self, receive: Receive) -> Iterator[None]:
        """The answer ends where its client goes; behind it the slots are free, whatever is missing."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._give_up()
            self._news.put_nowait(None)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            self._give_up()

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """The parts of the answers as they come; the last one of each says how it ends. None after the client has gone.

        Raises:
            Refusal: the service has failed, or no token was there in time.
        """
        growing = dict(enumerate(self._answers))
        while growing:
            try:
                async with asyncio.timeout_at(self._deadline):
                    news = await self._news.get()
            except TimeoutError as error:
                if not all(answer.tokens for answer in growing.values()):
                    raise Refusal(503, "no slot was free in time; ask again", code="busy", wait_s=WAIT_S) from error
                for answer in growing.values():
                    if part := answer.part(None, "length"):
                        yield part
                return
            if news is None:
                return
            index, drawn, end, words = news
            if end == "error":
                raise Refusal(503, words, code="failed")
            if index not in growing:  # a stop string has ended it
                continue
            part = growing[index].part(drawn, end)
            if part is None:
                continue
            if part.finish:
                del growing[index]
                self._slots.give_up(self._tickets[index])
            if part.text or part.finish or part.scored is not None or (part.drawn and self.asked.logprobs):
                yield part

    async def whole(self, receive: Receive) -> Response:
        """The answers when they are complete.

        Raises:
            Refusal: as ``parts``.
        """
        with self.watched(receive):
            parts = [part async for part in self.parts()]
        if sum(bool(part.finish) for part in parts) < len(self._answers):
            return Response(status_code=GONE)
        choices = []
        for index in range(len(self._answers)):
            of_prompt = [part for part in parts if part.index == index]
            text, drawn = "".join(part.text for part in of_prompt), [each for part in of_prompt for each in part.drawn]
            choices.append(self.choice(AnswerPart(index, text, drawn, of_prompt[0].scored, of_prompt[-1].finish)))
        return JSONResponse(self._head(self.kind) | {"choices": choices, "usage": self._usage})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"cache-control": "no-cache"}
        response = StreamingResponse(self.events(), headers=headers, media_type="text/event-stream")
        with self.watched(receive):
            await response.stream_response(send)

    async def events(self) -> AsyncIterator[bytes]:
        """The answers as server-sent events. What fails is the last of them; else it is ``[DONE]``."""
        usage = {"usage": None} if self.asked.usage else {}
        try:
            for choice in self.opening:
                yield _event(self._head(self.streamed) | {"choices": [choice]} | usage)
            async for part in self.parts():
                yield _event(self._head(self.streamed) | {"choices": [self.chunk(part)]} | usage)
            if self.asked.usage:
                yield _event(self._head(self.streamed) | {"choices": [], "usage": self._usage})
        except Refusal as refusal:
            yield _event(refusal.content)
        else:
            yield b"data: [DONE]\n\n"

    def choice(self, part: AnswerPart) -> dict[str, Any]:
        """A whole answer to one prompt."""
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": self._logprobs(part), "finish_reason": part.finish}

    def chunk(self, part: AnswerPart) -> dict[str, Any]:
        """A part of an answer in a stream."""
        delta = {"content": part.text} if part.text else {}
        return {"index": 0, "delta": delta, "logprobs": self._logprobs(part), "finish_reason": part.finish or None}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    @property
    def _usage(self) -> dict[str, int]:
        prompt, tokens = sum(len(prompt.ids) for prompt in self.prompts), sum(each.tokens for each in self._answers)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        content = [
            self._entry(token.token, token.logprob) | {"top_logprobs": [self._entry(*other) for other in token.top]}
            for _, token in part.drawn
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.spelling(token)
        spelt = None if BROKEN in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": spelt}


class Completing(Answering):
    """A request for completions, in OpenAI's form; ``asked`` is of one, and each prompt has an answer."""

    name, kind, streamed = "cmpl", "text_completion", "text_completion"
    continues, opening = True, ()

    def choice(self, part: AnswerPart) -> dict[str, Any]:
        text = part.text if part.scored is None else self.prompts[part.index].text + part.text
        logprobs = self._columns(part) if self.asked.logprobs else None
        return {"index": part.index, "text": text, "logprobs": logprobs, "finish_reason": part.finish or None}

    chunk = choice

    def _columns(self, part: AnswerPart) -> dict[str, list[Any]]:
        """Texts, logprobs, likeliest tokens and offsets. The first token of a prompt has no logprob."""
        prompt, columns = self.prompts[part.index], ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        rows = [] if part.scored is None else [(self.spelling(prompt.ids[0]), None, None, 0)]
        rows += [(*self._row(token), prompt.offsets[token.position]) for token in part.scored or ()]
        rows += [(*self._row(token), len(prompt.text) + place) for place, token in part.drawn]
        return {name: [row[at] for row in rows] for at, name in enumerate(columns)}

    def _row(self, token: Drawn) -> tuple[str, float, dict[str, float]]:
        likely = dict[str, float]()
        for other, logprob in (*token.top, (token.token, token.logprob)):
            # Of several tokens with one text the likeliest counts.
            likely.setdefault(self.spelling(other), max(logprob, LEAST_LOGPROB))
        return self.spelling(token.token), max(token.logprob, LEAST_LOGPROB), likely


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
