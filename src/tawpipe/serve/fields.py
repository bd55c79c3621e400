"""The fields of a request for a chat completion: what is taken, and every other one refused by its name."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from tawpipe.runtime.passes import Sampling

MOST_STOPS = 4
ROLES = ("system", "user", "assistant")
NUMBERS = {
    "top_logprobs": (0, 20),
    "temperature": (0.0, 2.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "seed": (0, 2**63 - 1),
    "max_completion_tokens": (1, 2**31),
    "max_tokens": (1, 2**31),
}
"""Fields that are numbers, the least and the most of each; they are whole where these are."""
TAKEN = ("model", "messages", "stop", "stream", "stream_options", "logprobs", *NUMBERS)
WITHOUT_EFFECT: dict[str, object] = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
"""What may be said of a field that is refused: what holds without it, as some clients always say it."""


class Refusal(Exception):
    """A request that is answered with an error, in the form that OpenAI's interface gives errors.

    Args:
        status: of HTTP.
        param: the field that is at fault.
        code: a word for programs.
        wait_s: seconds after which it is worth while to ask again.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, wait_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.wait_s = status, param, code, wait_s

    @property
    def content(self) -> dict[str, Any]:
        """The body of the answer."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatAsked:
    """A request for a chat completion whose fields are right.

    Attributes:
        tokens: of the answer at most; None where the request does not say.
        stops: strings that end the answer.
        stream: send the text as it comes.
        usage: end the stream with the numbers of tokens.
        logprobs: tell each token's, and those of so many others that ``sampling`` says.
    """

    model: str
    messages: list[dict[str, str]]
    sampling: Sampling
    tokens: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    logprobs: bool = False


def read_asked(body: bytes, defaults: Sampling) -> ChatAsked:
    """What a body asks for.

    Args:
        defaults: how tokens are drawn where the request does not say; its seed is of no effect.

    Raises:
        Refusal: it is no JSON object, or has a field that is not taken, or with a value that it may not have.
    """
    try:
        given = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise Refusal(400, "the body is no JSON object", code="invalid_json")
    fields = {name: value for name, value in given.items() if value is not None}
    for name, value in fields.items():
        if name not in TAKEN and (isinstance(value, bool) or value != WITHOUT_EFFECT.get(name)):
            taken = f"only {name} = {json.dumps(WITHOUT_EFFECT[name])}" if name in WITHOUT_EFFECT else "no such field"
            raise Refusal(400, f"{name} is not supported: this service takes {taken}", param=name, code="unsupported")
    if not isinstance(fields.get("model"), str):
        _refuse("model", "the name of a model, which /v1/models has")
    stream, logprobs = _bool(fields, "stream"), _bool(fields, "logprobs")
    messages = _messages(fields.get("messages"))
    usual = defaults._asdict() | {"seed": secrets.randbits(63), "top_logprobs": 0}
    numbers = {name: _number(name, value) for name, value in (usual | fields).items() if name in NUMBERS}
    tokens = {numbers.pop(name) for name in ("max_completion_tokens", "max_tokens") if name in numbers}
    if len(tokens) > 1:
        _refuse("max_completion_tokens", "the same as max_tokens, where both are said")
    if (others := numbers.pop("top_logprobs")) and not logprobs:
        _refuse("top_logprobs", "left out where logprobs is not true")
    if not numbers["top_p"]:
        _refuse("top_p", "a number above 0, at most 1")
    return ChatAsked(
        model=fields["model"],
        messages=messages,
        sampling=Sampling(**numbers, logprobs=others),
        tokens=next(iter(tokens), None),
        stops=_stops(fields.get("stop")),
        stream=stream,
        usage=_usage(fields, stream),
        logprobs=logprobs,
    )


def with_defaults(generation: Any) -> Sampling:
    """How a model's own generation config draws tokens; where it says nothing, as OpenAI's interface does."""
    values = {name: getattr(generation, name, None) for name in ("temperature", "top_k", "top_p")}
    return Sampling(**{name: value for name, value in values.items() if value is not None})


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _refuse(name: str, expected: str) -> NoReturn:
    raise Refusal(400, f"{name}: expected {expected}", param=name, code="invalid_value")


def _bool(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    return value if isinstance(value, bool) else _refuse(name, "true or false")


def _number(name: str, value: Any) -> Any:
    low, high = NUMBERS[name]
    whole = isinstance(low, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
        _refuse(name, f"a {'whole ' if whole else ''}number from {low} to {high}")
    return type(low)(value)


def _usage(fields: Mapping[str, Any], stream: bool) -> bool:
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or not set(options) <= {"include_usage"}:
        _refuse("stream_options", "an object with include_usage alone")
    if options and not stream:
        _refuse("stream_options", "left out where stream is not true")
    return _bool(options, "include_usage")


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        _refuse("stop", f"a text, or a list of at most {MOST_STOPS}, none of them empty")
    return tuple(stops)


def _messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        _refuse("messages", "a list of at least one message")
    return [_message(f"messages[{number}]", message) for number, message in enumerate(value)]


def _message(name: str, message: object) -> dict[str, str]:
    if not isinstance(message, dict):
        _refuse(name, "an object with role and content")
    for key, value in message.items():
        if key not in ("role", "content") and value is not None:
            raise Refusal(400, f"{name}.{key} is not supported", param=f"{name}.{key}", code="unsupported")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        _refuse(f"{name}.role", f"one of {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_part(f"{name}.content[{number}]", part) for number, part in enumerate(content))
    if not isinstance(content, str):
        _refuse(f"{name}.content", "a text, or a list of parts that are text")
    try:
        content.encode()
    except UnicodeEncodeError:
        _refuse(f"{name}.content", "a text; it has half a surrogate pair, which is none")
    return {"role": role, "content": content}


def _part(name: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else None
        raise Refusal(400, f"{name}: only text is taken, not {kind!r}", param=name, code="unsupported")
    return part["text"]
