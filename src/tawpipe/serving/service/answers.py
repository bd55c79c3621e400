"""Answers to one request: turns the tokens that the engine draws into text, in the format of OpenAI's API."""

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
from tawpipe.serving.requests import End, Ended, Question, QueueFull, Slots
from tawpipe.serving.service.fields import Fields, Refusal
from tawpipe.serving.service.text import BROKEN, AnswerText, Prompt, StopStrings, TextPieces

WAIT_S = 2
"""Seconds after which a client may retry a request that was refused because too many requests were waiting."""
LEAST_LOGPROB = -9999.0
"""Value that replaces a logprob of minus infinity, which JSON cannot represent."""
GONE = 499
"""HTTP status of an answer whose client has disconnected."""


@dataclass(frozen=True)
class AnswerPart:
    """New text and tokens of one answer.

    Attributes:
        index: index of the prompt.
        text: new text.
        drawn: tokens whose text is complete with this part, each with the number of characters of the answer before it.
        scored: logprobs of all prompt tokens but the first, in the first part of an answer with ``echo``; else None.
        finish: reason for the end of the answer, in its last part; else empty.
    """

    index: int
    text: str
    drawn: Sequence[tuple[int, Drawn]] = ()
    scored: Sequence[Drawn] | None = None
    finish: End = ""


@dataclass
class _Growing:
    """State of the answer to one prompt while its tokens arrive.

    Attributes:
        index: index of the prompt.
        prompt: number of the prompt's tokens.
        text: text of the answer.
        scored: logprobs of the prompt, collected for the first part of an answer with ``echo``; else None.
        tells_end: report the token that ends the answer among the drawn tokens.
        tokens: number of tokens drawn.
    """

    index: int
    prompt: int
    text: AnswerText[tuple[int, Drawn]]
    scored: list[Drawn] | None
    tells_end: bool
    tokens: int = 0

    def part(self, drawn: Drawn | None, end: End) -> AnswerPart | None:
        """Add a token, and return the new text and tokens that can be sent now; None for a scored token of the prompt.

        The returned part may have no text, for example while a character is incomplete or a stop string may follow.

        Args:
            drawn: new token, or None if the answer ends without one.
            end: reason for the end of the answer, or empty.
        """
        if self.scored is not None and drawn is not None and drawn.position < self.prompt:
            return self.scored.append(drawn)
        text, told = "", list[tuple[int, Drawn]]()
        if drawn is not None:
            self.tokens += 1
            if end != "stop":
                text, told = self.text.add(drawn.token, (self.text.come, drawn))
        if end and not self.text.stops.hit:
            rest, others = self.text.end()
            text, told = text + rest, told + others
            if self.tells_end and drawn is not None and end == "stop":
                told.append((self.text.come, drawn))
        scored, self.scored = self.scored, None
        return AnswerPart(self.index, text, told, scored, "stop" if self.text.stops.hit else end)


class Answering:
    """Request for a chat completion in the service, from its questions to the last part of its answers.

    Use it in the thread of an event loop. Called as an ASGI application, it sends the answers as a stream of events.

    Args:
        slots: queue of requests of the engine.
        asked: fields of the request, with tokenized prompts.
        questions: the engine's question for each prompt.
        tokenizer: decodes tokens.
        model: model name that the answer states.
        seconds: time limit after which the answer ends with its present text.

    Raises:
        Refusal: too many requests are waiting, or the service is ending.
    """

    name, kind, streamed = "chatcmpl", "chat.completion", "chat.completion.chunk"
    """Prefix of the answer's id; then the object types of a whole answer and of a part of an answer."""
    continues = False
    """True if an answer continues the text of its prompt, and the token that ends it has a logprob."""
    opening: Sequence[dict[str, Any]] = (
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
    )
    """Choices in the first events of a stream."""

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
        """Messages from the engine about a prompt; None after the client has disconnected."""
        try:
            self._tickets = slots.ask_all([(each, partial(self._tell, at)) for at, each in enumerate(questions)])
        except QueueFull as error:
            raise Refusal(429, "too many requests wait; ask again", code="busy", wait_s=WAIT_S) from error
        except Ended as error:
            raise Refusal(503, "the service is ending", code="ending") from error

    def _tell(self, index: int, drawn: Drawn | None, end: End, words: str) -> None:
        """Put a message from the engine's thread into the queue of the event loop."""
        with contextlib.suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(self._news.put_nowait, (index, drawn, end, words))

    def _give_up(self) -> None:
        """Cancel the requests of all prompts in the engine."""
        for ticket in self._tickets:
            self._slots.give_up(ticket)

    @contextlib.contextmanager
    def watched(self, receive: Receive) -> Iterator[None]:
        """Cancel the requests when the client disconnects, and at the end of the context in every case.

        The end of the context frees the slots, even if the answer is incomplete.
        """

        async def watch() -> None:
            """Wait for the client to disconnect, then cancel the requests."""
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
        """Yield the parts of all answers as they arrive. The last part of each answer has the reason for its end.

        Parts without anything new for the client are left out. Stops early if the client disconnects. If the time limit
        passes, each answer ends with its present text.

        Raises:
            Refusal: the service has failed, or an answer had no token within the time limit.
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
            if index not in growing:  # the answer has ended at a stop string
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
        """Wait for the complete answers and return them in one response; status ``GONE`` if the client disconnects.

        Raises:
            Refusal: as in ``parts``.
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
        """Send the answers to the client as a stream of server-sent events."""
        headers = {"cache-control": "no-cache"}
        response = StreamingResponse(self.events(), headers=headers, media_type="text/event-stream")
        with self.watched(receive):
            await response.stream_response(send)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answers as server-sent events. The last event is ``[DONE]``, or the error if the request fails."""
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
        """Return the complete answer as an entry of ``choices`` in the format of the API."""
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": self._logprobs(part), "finish_reason": part.finish}

    def chunk(self, part: AnswerPart) -> dict[str, Any]:
        """Return a part of an answer as an entry of ``choices`` in the format of the API's streams."""
        delta = {"content": part.text} if part.text else {}
        return {"index": 0, "delta": delta, "logprobs": self._logprobs(part), "finish_reason": part.finish or None}

    def _head(self, kind: str) -> dict[str, Any]:
        """Return the fields that every answer and event begins with, for the object type ``kind``."""
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    @property
    def _usage(self) -> dict[str, int]:
        """Numbers of tokens of all prompts, of all answers, and in total, in the format of the API."""
        prompt, tokens = sum(len(prompt.ids) for prompt in self.prompts), sum(each.tokens for each in self._answers)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        """Return the logprobs of a part's tokens in the format of the API, or None if they were not requested."""
        if not self.asked.logprobs:
            return None
        content = [
            self._entry(token.token, token.logprob) | {"top_logprobs": [self._entry(*other) for other in token.top]}
            for _, token in part.drawn
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Return text, logprob and bytes of a token. The bytes are None for a token that is no whole character."""
        text = self.spelling(token)
        spelt = None if BROKEN in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": spelt}


class Completing(Answering):
    """Request for text completions, in the format of OpenAI's API. Each prompt has one answer."""

    name, kind, streamed = "cmpl", "text_completion", "text_completion"
    continues, opening = True, ()

    def choice(self, part: AnswerPart) -> dict[str, Any]:
        text = part.text if part.scored is None else self.prompts[part.index].text + part.text
        logprobs = self._columns(part) if self.asked.logprobs else None
        return {"index": part.index, "text": text, "logprobs": logprobs, "finish_reason": part.finish or None}

    chunk = choice

    def _columns(self, part: AnswerPart) -> dict[str, list[Any]]:
        """Return a dict of four lists with one element per token: texts, logprobs, likeliest tokens and text offsets.

        With ``echo``, the prompt's tokens come first. The first token of a prompt has None as logprob."""
        prompt, columns = self.prompts[part.index], ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        rows = [] if part.scored is None else [(self.spelling(prompt.ids[0]), None, None, 0)]
        rows += [(*self._row(token), prompt.offsets[token.position]) for token in part.scored or ()]
        rows += [(*self._row(token), len(prompt.text) + place) for place, token in part.drawn]
        return {name: [row[at] for row in rows] for at, name in enumerate(columns)}

    def _row(self, token: Drawn) -> tuple[str, float, dict[str, float]]:
        """Return the token's text, its logprob, and the logprobs of the likeliest tokens by their texts.

        The token itself is included among the likeliest."""
        likely = dict[str, float]()
        for other, logprob in (*token.top, (token.token, token.logprob)):
            # If several tokens have the same text, the first and likeliest one is kept.
            likely.setdefault(self.spelling(other), max(logprob, LEAST_LOGPROB))
        return self.spelling(token.token), max(token.logprob, LEAST_LOGPROB), likely


def _event(content: dict[str, Any]) -> bytes:
    """Encode ``content`` as one server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
