"""Routes of the service as a Starlette application, in the format of OpenAI's API."""

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
"""Maximum number of seconds for receiving the body of a request."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN = "/health"
"""Route that needs no API key."""


@dataclass(eq=False)
class Service:
    """Routes that answer requests with one model.

    Args:
        config: limits of a request, and the address of the service.
        slots: queue of requests of the engine.
        tokenizer: decodes tokens.
        prompts: makes prompts from chats and texts.
        name: name of the model.
        stops: token ids that end an answer.
        defaults: sampling settings that a request does not set.
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
        """Return the ASGI application with all routes.

        Args:
            key: API key that every request except ``/health`` must send; None for none.
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
        """Answer ``/v1/models``: the list with this service's model."""
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> JSONResponse:
        """Answer ``/v1/models/{name}`` with the model's description; refuse another name with status 404."""
        self._check_name(request.path_params["name"])
        return JSONResponse(self._card)

    async def health(self, _: Request) -> JSONResponse:
        """Answer ``/health``: status 200 with "ok", or 503 with "ending"."""
        ending = self.slots.ending
        return JSONResponse({"status": "ending" if ending else "ok"}, status_code=503 if ending else 200)

    async def metrics(self, _: Request) -> PlainTextResponse:
        """Answer ``/metrics`` with counters in the text format of Prometheus."""
        counts, slot_layout = self.slots.counts, self.slots.slot_layout
        numbers = (
            ("slots", "gauge", slot_layout.groups * slot_layout.slots),
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
        """Answer ``/v1/chat/completions`` with a whole answer, or with a stream of its parts."""
        return await self._answer(request, read_asked, Answering)

    async def complete(self, request: Request) -> Any:
        """Answer ``/v1/completions`` with whole completions, or with a stream of their parts."""
        return await self._answer(request, read_completion, Completing)

    async def _answer(self, request: Request, read: Callable[[bytes, Sampling], Fields], form: type[Answering]) -> Any:
        """Read a request, queue its prompts in the engine, and return the response.

        For a stream, the response is returned at once and sends parts later. Otherwise this waits for the complete
        answers.

        Args:
            request: the HTTP request.
            read: reads the fields of its body.
            form: class of the answer.

        Raises:
            Refusal: the request is not valid, or too many requests are waiting.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "the body's content-type is to be application/json")
        asked = read(await self._body(request), self.defaults)
        self._check_name(asked.model)
        if len(asked.prompts) > self.slots.most:
            words = f"{len(asked.prompts)} prompts; at most {self.slots.most} here"
            raise Refusal(400, f"prompt: got {words}", param="prompt", code="invalid_value")
        # Make the prompts in another thread, so that other answers continue meanwhile.
        prompts = await asyncio.get_running_loop().run_in_executor(self._reader, self._prompts, asked)
        questions = [self._question(asked, number, prompt.ids) for number, prompt in enumerate(prompts)]
        asked, seconds = replace(asked, prompts=prompts), self.config.request_s
        answering = form(self.slots, asked, questions, self.tokenizer, model=self.name, seconds=seconds)
        return answering if asked.stream else await answering.whole(request.receive)

    async def _body(self, request: Request) -> bytes:
        """Receive the complete body of a request and return it.

        Raises:
            Refusal: the body is too long, or does not arrive within ``BODY_S`` seconds.
        """
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
        """Return the tokens of every prompt of a request: chats by the chat template, texts by the tokenizer.

        Raises:
            Refusal: a token id is outside of the vocabulary, or no prompt can be made.
        """
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
        """Return the engine's request for the prompt with index ``number``: tokens, limit, sampling and seed.

        Without a seed in the HTTP request, each prompt gets a different one.

        Args:
            asked: fields of the HTTP request.
            number: index of the prompt.
            prompt: its token ids.

        Raises:
            Refusal: prompt and answer exceed the context, or the answer exceeds ``max_tokens``.
        """
        context, most, name = self.slots.slot_layout.context, self.config.max_tokens, _name(asked, number)
        free_tokens = context - len(prompt) + 1  # the last drawn token needs no position
        usual = USUAL_TOKENS if asked.field == "prompt" else most
        wanted = min(free_tokens, most, usual) if asked.tokens is None else asked.tokens
        if free_tokens < 1 or wanted > free_tokens:
            words = f"{len(prompt)} tokens" + (f" and an answer of {wanted}" if free_tokens >= 1 else "")
            message = f"{name}: got {words}; the context of {context} tokens has no places for more"
            raise Refusal(400, message, param=name, code="context_length_exceeded")
        if wanted > most:
            message = f"max_tokens: got {wanted}; at most {most} here"
            raise Refusal(400, message, param="max_tokens", code="invalid_value")
        # Without a seed in the request, equal prompts get different answers.
        seed = asked.sampling.seed if asked.seeded else (asked.sampling.seed + number) % 2**63
        sampling, scored = asked.sampling._replace(seed=seed), asked.echo and asked.logprobs
        return Question(tuple(prompt), wanted, sampling, self.stops, scored)

    def _check_name(self, name: str) -> None:
        """Refuse a request for another model with status 404."""
        if name != self.name:
            message = f"model {name!r} not found; this service has {self.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    @property
    def _card(self) -> dict[str, Any]:
        """Description of the model in the format of the API."""
        return {"id": self.name, "object": "model", "created": self._born, "owned_by": "tawpipe"}


def _name(asked: Fields, number: int) -> str:
    """Return the name of the request's field that holds the prompt with index ``number``."""
    return asked.field if len(asked.prompts) == 1 else f"{asked.field}[{number}]"


def _refusal(scope: Scope, key: str | None, *, loopback: bool) -> Refusal | None:
    """Check the Host header and the API key of a request; return the refusal, or None if the request may be answered.

    Args:
        scope: ASGI scope of the request.
        key: API key that every request except ``/health`` must send; None for none.
        loopback: refuse requests whose Host header is not a name of this machine. A web page of another host could send
            them.
    """
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if loopback and name.lower() not in LOOPBACK_NAMES:
        return Refusal(400, f"the host {host!r} is not this service's", code="invalid_host")
    if key is not None and scope["path"] != OPEN:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(token.strip().encode("latin-1"), key.encode())
        if scheme.lower() != "bearer" or not right:
            return Refusal(401, "the API key is missing or wrong", code="invalid_api_key")
    return None


def _answer(refusal: Refusal) -> JSONResponse:
    """Build the error response of a refusal: status, JSON body, and headers for a retry or a missing key."""
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
    if refusal.wait_s is not None:
        headers["Retry-After"] = str(refusal.wait_s)
    return JSONResponse(refusal.content, status_code=refusal.status, headers=headers)


async def _refused(_: Request, refusal: Refusal) -> JSONResponse:
    """Return the error response for a request that raised a refusal."""
    return _answer(refusal)


async def _no_route(request: Request, error: HTTPException) -> JSONResponse:
    """Return the error response for a request with an unknown path or method."""
    return _answer(Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _broken(_: Request, error: Exception) -> JSONResponse:
    """Return an error response with status 500 for a request that raised an unexpected exception."""
    return _answer(Refusal(500, f"a fault of the service: {type(error).__name__}"))
