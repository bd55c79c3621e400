"""The answer to one request: what the engine draws for it, as text, in the form of OpenAI's interface."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tawpipe.runtime.passes import Drawn
from tawpipe.runtime.requests import End, Ended, NoRoom, Question, Slots
from tawpipe.serve.fields import ChatAsked, Refusal
from tawpipe.serve.text import BROKEN, AnswerText, StopStrings, TextPieces

WAIT_S = 2
"""Seconds after which a request for which there was no room may be tried again."""
LEAST_LOGPROB = -9999.0
"""In the place of minus infinity, which JSON does not have."""
GONE = 499
"""The status of what nobody reads any more."""


@dataclass(frozen=True)
class AnswerPart:
    """What is new of an answer.

    Attributes:
        drawn: tokens whose text is let out with it.
        finish: how the answer has ended, with its last part.
    """

    text: str
    drawn: Sequence[Drawn]
    finish: End = ""


class Answering:
    """A request in the service, from its question to the last part of its answer. In the thread of an event loop.
    Called as an ASGI application, it sends the answer's events as they come.

    Args:
        model: the name that the answer says.
        seconds: after which the answer ends with what there is.

    Raises:
        Refusal: there is no room, or the service is ending.
    """

    def __init__(
        self, slots: Slots, asked: ChatAsked, question: Question, tokenizer: Any, *, model: str, seconds: float
    ) -> None:
        self.asked = asked
        self._slots, self._tokenizer, self._model = slots, tokenizer, model
        self._text: AnswerText[Drawn] = AnswerText(TextPieces(tokenizer), StopStrings(asked.stops))
        self._prompt, self._tokens = len(question.prompt), 0
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._news = asyncio.Queue[tuple[Drawn | None, End, str] | None]()
        """What the engine has told; None where the client has gone."""
        try:
            self._ticket = slots.ask(question, self._tell)
        except NoRoom as error:
            raise Refusal(429, "too many requests wait; ask again", code="busy", wait_s=WAIT_S) from error
        except Ended as error:
            raise Refusal(503, "the service is ending", code="ending") from error

    def _tell(self, drawn: Drawn | None, end: End, words: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is there
            self._loop.call_soon_threadsafe(self._news.put_nowait, (drawn, end, words))

    @contextlib.contextmanager
    def watched(self, receive: Receive) -> Iterator[None]:
        """The answer ends where its client goes; behind it the slot is free, whatever is missing."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._slots.give_up(self._ticket)
            self._news.put_nowait(None)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            self._slots.give_up(self._ticket)

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """The parts of the answer as they come; the last one says how it ends. None after the client has gone.

        Raises:
            Refusal: the service has failed, or no token was there in time.
        """
        finish: End = ""
        while not finish:
            try:
                async with asyncio.timeout_at(self._deadline):
                    news = await self._news.get()
            except TimeoutError as error:
                if not self._tokens:
                    raise Refusal(503, "no slot was free in time; ask again", code="busy", wait_s=WAIT_S) from error
                news = None, "length", ""
            if news is None:
                return
            drawn, end, words = news
            if end == "error":
                raise Refusal(503, words, code="failed")
            text, told = "", list[Drawn]()
            if drawn is not None:
                self._tokens += 1
                if end != "stop":
                    text, told = self._text.add(drawn.token, drawn)
            if end and not self._text.stops.found:
                rest, others = self._text.end()
                text, told = text + rest, told + others
            finish = "stop" if self._text.stops.found else end
            if text or finish or (told and self.asked.logprobs):
                yield AnswerPart(text, told, finish)

    async def whole(self, receive: Receive) -> Response:
        """The answer when it is complete.

        Raises:
            Refusal: as ``parts``.
        """
        with self.watched(receive):
            parts = [part async for part in self.parts()]
        if not parts or not parts[-1].finish:
            return Response(status_code=GONE)
        message = {"role": "assistant", "content": "".join(part.text for part in parts), "refusal": None}
        logprobs = self._logprobs([drawn for part in parts for drawn in part.drawn])
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": parts[-1].finish}
        return JSONResponse(self._head("chat.completion") | {"choices": [choice], "usage": self._usage})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"cache-control": "no-cache"}
        response = StreamingResponse(self.events(), headers=headers, media_type="text/event-stream")
        with self.watched(receive):
            await response.stream_response(send)

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events. What fails is the last of them; else it is ``[DONE]``."""
        try:
            yield self._chunk({"role": "assistant", "content": ""})
            async for part in self.parts():
                yield self._chunk({"content": part.text} if part.text else {}, part)
            if self.asked.usage:
                yield _event(self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage})
        except Refusal as refusal:
            yield _event(refusal.content)
        else:
            yield b"data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, str], part: AnswerPart | None = None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        if part is not None:
            choice |= {"logprobs": self._logprobs(part.drawn), "finish_reason": part.finish or None}
        usage = {"usage": None} if self.asked.usage else {}
        return _event(self._head("chat.completion.chunk") | {"choices": [choice]} | usage)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    @property
    def _usage(self) -> dict[str, int]:
        total = self._prompt + self._tokens
        return {"prompt_tokens": self._prompt, "completion_tokens": self._tokens, "total_tokens": total}

    def _logprobs(self, drawn: Sequence[Drawn]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        content = [
            self._entry(token.token, token.logprob) | {"top_logprobs": [self._entry(*other) for other in token.top]}
            for token in drawn
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        spelt = None if BROKEN in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": spelt}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
