"""The routes of the service, in the form of OpenAI's interface, as a Starlette application."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tawpipe.data.chats.messages import Malformed
from tawpipe.serving.passes import Sampling
from tawpipe.serving.requests import Question, Slots
from tawpipe.serving.service.answers import Answering, Completing
from tawpipe.serving.service.fields import USUAL_TOKENS, Fields, Refusal, read_asked, read_completion
from tawpipe.serving.service.settings import ServeConfig
from tawpipe.serving.service.text import Prompt, Prompts

BODY_S = 30.0
"""Seconds in which a request's body has come."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN = "/health"
"""The route that needs no key."""


@dataclass(eq=False)
class Service:
    """The routes for one model.

    Args:
        config: says what a request may take, and whether only this machine can ask.
        name: of the model.
        stops: tokens that end an answer.
        defaults: how tokens are drawn where a request does not say.
        vocabulary: number of the model's tokens.
    """

    config: ServeConfig
    slots: Slots
    tokenizer: Any
    prompts: Prompts
    name: str
    stops: Collection[int]
    defaults: Sampling
    vocabulary: int

    def __post_init__(self) -> None:
        self._born = int(time.time())
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    def application(self, key: str | None) -> ASGIApp:
        """The application of these routes.

        Args:
            key: that every request but ``/health`` must bring; None for none.
        """
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        handlers: Any = {Refusal: _refused, HTTPException: _no_route, Exception: _broken}
        application = Starlette(routes=routes, exception_handlers=handlers)

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            refusal = _refusal(scope, key, loopback=self.config.loopback) if scope["type"] == "http" else None
            await (application if refusal is None else _answer(refusal))(scope, receive, send)

        return guarded

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
        numbers = (
            ("slots", "gauge", room.groups * room.slots),
            ("slots_in_use", "gauge", self.slots.in_use),
            ("requests_waiting", "gauge", self.slots.waiting),
            ("passes_total", "counter", counts.passes),
            ("prompt_tokens_total", "counter", counts.prompt_tokens),
            ("answer_tokens_total", "counter", counts.answer_tokens),
        )
        lines = [f"# TYPE tawpipe_{name} {kind}\ntawpipe_{name} {value}" for name, kind, value in numbers]
        lines.append("# TYPE tawpipe_requests_total counter")
        lines += [f'tawpipe_requests_total{{end="{end}"}} {number}' for end, number in sorted(counts.ends.items())]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def chat(self, request: Request) -> Any:
        """The answer to a chat as a whole, or a stream of its parts."""
        return await self._answer(request, read_asked, Answering)

    async def complete(self, request: Request) -> Any:
        """The completions of some prompts as a whole, or a stream of their parts."""
        return await self._answer(request, read_completion, Completing)

    async def _answer(self, request: Request, read: Callable[[bytes, Sampling], Fields], form: type[Answering]) -> Any:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "the body's content-type is to be application/json")
        asked = read(await self._body(request), self.defaults)
        self._check_name(asked.model)
        if len(asked.prompts) > self.slots.most:
            words = f"{len(asked.prompts)} prompts; at most {self.slots.most} here"
            raise Refusal(400, f"prompt: got {words}", param="prompt", code="invalid_value")
        # Another thread makes the prompts, as others' answers go on meanwhile.
        prompts = await asyncio.get_running_loop().run_in_executor(self._reader, self._prompts, asked)
        questions = [self._question(asked, number, prompt.ids) for number, prompt in enumerate(prompts)]
        asked, seconds = replace(asked, prompts=prompts), self.config.request_s
        answering = form(self.slots, asked, questions, self.tokenizer, model=self.name, seconds=seconds)
        return answering if asked.stream else await answering.whole(request.receive)

    async def _body(self, request: Request) -> bytes:
        limit, body = self.config.max_body_kib * 1024, bytearray()
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

    def _prompts(self, asked: Fields) -> list[Prompt]:
        """Read the prompts."""
        prompts = list[Prompt]()
        for number, prompt in enumerate(asked.prompts):
            name, by_ids = _name(asked, number), asked.field == "prompt" and isinstance(prompt, list)
            if by_ids and (highest := max(prompt)) >= self.vocabulary:
                message = f"{name}: got the token id {highest}; expected ids from 0 to {self.vocabulary - 1}"
                raise Refusal(400, message, param=name, code="invalid_value")
            try:
                if asked.field == "messages":
                    prompts.append(Prompt(self.prompts.tokens(prompt, reasoning=asked.reasoning)))
                else:
                    prompts.append(self.prompts.completed(prompt, echo=asked.echo))
            except Malformed as error:
                words = ": ".join(filter(None, (error.why, error.detail)))
                raise Refusal(400, f"{name}, {words}", param=name, code="invalid_value") from error
        return prompts

    def _question(self, asked: Fields, number: int, prompt: list[int]) -> Question:
        """Tokens to be computed for the prompt with this number."""
        context, most, name = self.slots.room.context, self.config.max_tokens, _name(asked, number)
        room = context - len(prompt) + 1  # the last token that is drawn takes no place
        usual = USUAL_TOKENS if asked.field == "prompt" else most
        wanted = min(room, most, usual) if asked.tokens is None else asked.tokens
        if room < 1 or wanted > room:
            words = f"{len(prompt)} tokens" + (f" and an answer of {wanted}" if room >= 1 else "")
            message = f"{name}: got {words}; the context of {context} tokens has no places for more"
            raise Refusal(400, message, param=name, code="context_length_exceeded")
        if wanted > most:
            message = f"max_tokens: got {wanted}; at most {most} here"
            raise Refusal(400, message, param="max_tokens", code="invalid_value")
        # Without a seed, equal prompts of a request get different answers.
        seed = asked.sampling.seed if asked.seeded else (asked.sampling.seed + number) % 2**63
        sampling, scored = asked.sampling._replace(seed=seed), asked.echo and asked.logprobs
        return Question(tuple(prompt), wanted, sampling, self.stops, scored)

    def _check_name(self, name: str) -> None:
        if name != self.name:
            message = f"model {name!r} not found; this service has {self.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    @property
    def _card(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._born, "owned_by": "tawpipe"}


def _name(asked: Fields, number: int) -> str:
    """The field of the prompt with this number."""
    return asked.field if len(asked.prompts) == 1 else f"{asked.field}[{number}]"


def _refusal(scope: Scope, key: str | None, *, loopback: bool) -> Refusal | None:
    """The refusal of who may not ask.

    Args:
        key: that a request must bring but for ``/health``; None for none.
        loopback: refuse requests whose Host is not this machine's own name: such come from pages of other hosts.
    """
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if loopback and name.lower() not in LOOPBACK_NAMES:
        return Refusal(400, f"the host {host!r} is not this service's", code="invalid_host")
    if key is not None and scope["path"] != OPEN:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
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
