"""The routes of the service, in the form of OpenAI's interface, as a Starlette application."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tawpipe.data.messages import Malformed
from tawpipe.runtime.passes import Sampling
from tawpipe.runtime.requests import Question, Slots
from tawpipe.serve.answers import Answering, EventStream
from tawpipe.serve.fields import ChatAsked, Refusal, read_asked
from tawpipe.serve.text import Prompts

BODY_S = 30.0
"""Seconds in which a request's body has come."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN = "/health"
"""The route that needs no key."""


@dataclass(frozen=True)
class RequestLimits:
    """What a request may take.

    Attributes:
        body_bytes: of its body.
        tokens: of an answer.
        seconds: from when it is asked; an answer that is not complete then ends there.
    """

    body_bytes: int
    tokens: int
    seconds: float


class Service:
    """The routes for one model.

    Args:
        name: of the model.
        stops: tokens that end an answer.
        defaults: how tokens are drawn where a request does not say.
    """

    def __init__(
        self,
        slots: Slots,
        tokenizer: Any,
        prompts: Prompts,
        *,
        name: str,
        stops: Sequence[int],
        defaults: Sampling,
        limits: RequestLimits,
    ) -> None:
        self.slots, self.name, self._limits, self._defaults = slots, name, limits, defaults
        self._tokenizer, self._prompts, self._stops = tokenizer, prompts, frozenset(stops)
        self._born = int(time.time())
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    def application(self, *, key: str | None = None, loopback: bool = True) -> ASGIApp:
        """The application of these routes.

        Args:
            key: that every request but ``/health`` must bring; None for none.
            loopback: refuse requests that name another host, as a foreign page's would in a browser on this machine.
        """
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        handlers: Any = {Refusal: _refused, HTTPException: _no_route, Exception: _broken}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), key=key, loopback=loopback)

    async def models(self, _: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> JSONResponse:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._card)

    async def health(self, _: Request) -> JSONResponse:
        ending = self.slots.ending
        return JSONResponse({"status": "ending" if ending else "ok"}, status_code=503 if ending else 200)

    async def metrics(self, _: Request) -> PlainTextResponse:
        counts, room = self.slots.counts, self.slots.room
        lines = [
            *_metric("slots", "gauge", room.groups * room.slots),
            *_metric("slots_in_use", "gauge", self.slots.in_use),
            *_metric("requests_waiting", "gauge", self.slots.waiting),
            *_metric("passes_total", "counter", counts.passes),
            *_metric("prompt_tokens_total", "counter", counts.prompt_tokens),
            *_metric("answer_tokens_total", "counter", counts.answer_tokens),
            "# TYPE tawpipe_requests_total counter",
            *(f'tawpipe_requests_total{{end="{end}"}} {number}' for end, number in sorted(counts.ends.items())),
        ]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def chat(self, request: Request) -> Any:
        """The answer as a whole, or a stream of its parts."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "the body's content-type is to be application/json")
        asked = read_asked(await self._body(request), self._defaults)
        self._check_name(asked.model)
        question = await self._question(asked)
        seconds = self._limits.seconds
        answering = Answering(self.slots, asked, question, self._tokenizer, model=self.name, seconds=seconds)
        return EventStream(answering) if asked.stream else await answering.whole(request.receive)

    async def _body(self, request: Request) -> bytes:
        limit, body = self._limits.body_bytes, bytearray()
        too_long = Refusal(413, f"the body has more than {limit} bytes", code="body_too_long")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise too_long
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_long
        except TimeoutError as error:
            raise Refusal(408, f"the body has not come in {BODY_S:.0f} s") from error
        return bytes(body)

    async def _question(self, asked: ChatAsked) -> Question:
        """The tokens to be computed, which another thread makes, as others' answers go on meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            prompt = await loop.run_in_executor(self._reader, self._prompts.tokens, asked.messages)
        except Malformed as error:
            words = ": ".join(filter(None, (error.why, error.detail)))
            raise Refusal(400, f"messages, {words}", param="messages", code="invalid_value") from error
        context, most = self.slots.room.context, self._limits.tokens
        room = context - len(prompt) + 1  # the last token that is drawn takes no place
        wanted = min(room, most) if asked.tokens is None else asked.tokens
        if room < 1 or wanted > room:
            words = f"{len(prompt)} tokens" + (f" and an answer of {wanted}" if room >= 1 else "")
            message = f"the messages have {words}, more than the context of {context} tokens has places for"
            raise Refusal(400, message, param="messages", code="context_length_exceeded")
        if wanted > most:
            param = "max_tokens"
            raise Refusal(400, f"{param}: got {wanted}; at most {most} here", param=param, code="invalid_value")
        return Question(tuple(prompt), wanted, asked.sampling, self._stops)

    def _check_name(self, name: str) -> None:
        if name != self.name:
            message = f"the model {name!r} is not here; this service has {self.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    @property
    def _card(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._born, "owned_by": "tawpipe"}


class Guard:
    """The application behind a check of who asks.

    Args:
        key: that a request must bring but for ``/health``; None for none.
        loopback: refuse requests whose Host is not this machine's own name: such come from pages of other hosts.
    """

    def __init__(self, application: ASGIApp, *, key: str | None, loopback: bool) -> None:
        self._application, self._loopback = application, loopback
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await _answer(refusal)(scope, receive, send)
        else:
            await self._application(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._loopback and name.lower() not in LOOPBACK_NAMES:
            return Refusal(400, f"the host {host!r} is not this service's", code="invalid_host")
        if self._key is not None and scope["path"] != OPEN:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not right:
                return Refusal(401, "the API key is missing or wrong", code="invalid_api_key")
        return None


def _answer(refusal: Refusal) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
    if refusal.wait_s is not None:
        headers["Retry-After"] = str(refusal.wait_s)
    return JSONResponse(refusal.content, status_code=refusal.status, headers=headers)


async def _refused(_: Request, refusal: Refusal) -> JSONResponse:
    return _answer(refusal)


async def _no_route(request: Request, error: HTTPException) -> JSONResponse:
    return _answer(Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _broken(_: Request, error: Exception) -> JSONResponse:
    return _answer(Refusal(500, f"a fault of the service: {type(error).__name__}"))


def _metric(name: str, kind: str, value: int) -> Iterator[str]:
    yield f"# TYPE tawpipe_{name} {kind}"
    yield f"tawpipe_{name} {value}"
