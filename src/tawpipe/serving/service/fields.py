"""Fields of requests for chat completions and text completions. Unsupported fields are refused by name."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from tawpipe.serving.passes import Sampling

MOST_STOPS = 16
ROLES = ("system", "developer", "user", "assistant")
USUAL_TOKENS = 16
"""Maximum number of tokens of a text completion if the request does not set it."""
NUMBERS = {
    "top_logprobs": (0, 20),
    "logprobs": (0, 20),
    "temperature": (0.0, 2.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "seed": (0, 2**63 - 1),
    "max_completion_tokens": (0, 2**31),
    "max_tokens": (0, 2**31),
}
"""Numeric fields, each with its minimum and maximum. A field takes whole numbers only if its minimum is an ``int``."""
TAKEN = ("model", "stop", "stream", "stream_options", "logprobs", "temperature", "top_k", "top_p", "seed", "max_tokens")
OF_CHAT = (*TAKEN, "messages", "top_logprobs", "max_completion_tokens")
OF_COMPLETION = (*TAKEN, "prompt", "echo")
Neutral = Mapping[str, tuple[object, ...] | type]
"""Fields that change nothing, with their allowed values or the type of any value. Some clients always send them."""
WITHOUT_EFFECT: dict[str, tuple[object, ...] | type] = {
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), str),
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("store", "ignore_eos", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("stop_token_ids", "bad_words"), ([],)),
    "metadata": dict,
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "response_format": ({"type": "text"},),
}
WITHOUT_EFFECT_ON_CHAT = WITHOUT_EFFECT | {
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("echo", "add_special_tokens", "continue_final_message"), (False,)),
    "add_generation_prompt": (True,),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "chat_template_kwargs": ({},),
}
WITHOUT_EFFECT_ON_COMPLETION = WITHOUT_EFFECT | {"suffix": ("",), "add_special_tokens": (True,)}
IN_MESSAGES: Neutral = {"tool_calls": ([],), "annotations": ([],), "reasoning_content": ("",), "type": ("text",)}
ON_STREAM: Neutral = dict.fromkeys(("include_obfuscation", "continuous_usage_stats"), (False,))


class Refusal(Exception):
    """Request that is answered with an error in the format of OpenAI's API.

    Args:
        status: HTTP status.
        message: text for the user.
        param: name of the field that is wrong, or None.
        code: word that identifies the error for programs, or None.
        wait_s: seconds after which a retry may succeed, or None.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, wait_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.wait_s = status, param, code, wait_s

    @property
    def content(self) -> dict[str, Any]:
        """Body of the error response."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Fields:
    """Checked fields of a request.

    Attributes:
        model: name of the model.
        prompts: one list of messages for a chat; for completions, texts or lists of token ids. Later replaced by
            prompts with their tokens.
        sampling: how tokens are drawn.
        tokens: maximum number of tokens of the answer; None if the request does not set it.
        stops: strings that end the answer.
        stream: send the text in parts as it is generated.
        usage: end the stream with the numbers of tokens.
        logprobs: report the logprob of each token, and the ``sampling.logprobs`` likeliest tokens with their logprobs.
        echo: begin the answer with the prompt.
        reasoning: False for an answer without reasoning before it.
        seeded: True if the request sets the seed, False if it is random.
        field: name of the field that holds the prompts.
    """

    model: str
    prompts: Sequence[Any]
    sampling: Sampling
    tokens: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    echo: bool = False
    reasoning: bool = True
    seeded: bool = False
    field: str = "messages"


def read_asked(body: bytes, defaults: Sampling) -> Fields:
    """Parse and check the body of a request for a chat completion, and return its fields.

    Args:
        body: JSON text.
        defaults: sampling settings for fields that the request does not set. Its seed is not used: without a seed in
            the
            request, a random one is chosen.

    Raises:
        Refusal: the body is not a JSON object, or a field is unsupported or has an invalid value.
    """
    fields = _fields(body, OF_CHAT, WITHOUT_EFFECT_ON_CHAT)
    logprobs, others = _bool(fields, "logprobs"), _number(fields, "top_logprobs", 0)
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in fields]
    tokens = {_number(fields, name) or _refuse(name, "at least 1") for name in names}
    if len(tokens) > 1:
        _refuse("max_completion_tokens", "equal to max_tokens if both are given")
    if others and not logprobs:
        _refuse("top_logprobs", "left out unless logprobs is true")
    messages, most = _messages(fields.get("messages")), next(iter(tokens), None)
    asked = _asked(fields, [messages], most, defaults._replace(logprobs=others))
    return replace(asked, logprobs=logprobs, reasoning="reasoning_effort" not in fields)


def read_completion(body: bytes, defaults: Sampling) -> Fields:
    """Parse and check the body of a request for text completions, and return its fields.

    Args:
        body: JSON text.
        defaults: sampling settings for fields that the request does not set. Its seed is not used: without a seed in
            the
            request, a random one is chosen.

    Raises:
        Refusal: the body is not a JSON object, or a field is unsupported or has an invalid value.
    """
    fields = _fields(body, OF_COMPLETION, WITHOUT_EFFECT_ON_COMPLETION)
    echo, tokens = _bool(fields, "echo"), _number(fields, "max_tokens", None)
    if tokens == 0 and not echo:
        _refuse("max_tokens", "at least 1; with echo = true also 0")
    likeliest, prompts = _number(fields, "logprobs", None), _prompts(fields.get("prompt"))
    asked = _asked(fields, prompts, tokens, defaults._replace(logprobs=likeliest or 0))
    return replace(asked, logprobs=likeliest is not None, echo=echo, field="prompt")


def _fields(body: bytes, taken: Sequence[str], neutral: Neutral) -> dict[str, Any]:
    """Parse a JSON body, check the names of its fields, and return all fields whose value is not null.

    Fields in ``neutral`` are returned, too. The values of supported fields are not checked here, except ``model``.

    Args:
        body: JSON text.
        taken: names of supported fields.
        neutral: accepted fields without effect, with the values that change nothing.

    Raises:
        Refusal: the body is not a JSON object, a field is unsupported, or ``model`` is not a string.
    """
    try:
        values = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise Refusal(400, "the body is no JSON object", code="invalid_json")
    _check_others(values, taken, neutral)
    if not isinstance(values.get("model"), str):
        _refuse("model", "the name of a model, which /v1/models has")
    return {name: value for name, value in values.items() if value is not None}


def _check_others(fields: Mapping[str, Any], taken: Sequence[str], neutral: Neutral, where: str = "") -> None:
    """Refuse fields that are neither in ``taken`` nor null, unless ``neutral`` accepts their value.

    Args:
        fields: names and values.
        taken: names of supported fields; their values are not checked.
        neutral: accepted fields without effect, with the values that change nothing.
        where: prefix of the names in messages.

    Raises:
        Refusal: with the name of the first such field.
    """
    for name, value in fields.items():
        if value is None or name in taken:
            continue
        allowed = neutral.get(name, ())
        if isinstance(allowed, type):
            right, words = isinstance(value, allowed), "a text" if allowed is str else "an object"
        else:
            right = any(value == usual and isinstance(value, bool) == isinstance(usual, bool) for usual in allowed)
            words = " or ".join(map(json.dumps, allowed))
        if not right:
            words = f"only {name} = {words}" if words else "no such field"
            message = f"{where}{name} is not supported: this service takes {words}"
            raise Refusal(400, message, param=where + name, code="unsupported")


def _asked(fields: Mapping[str, Any], prompts: Sequence[Any], tokens: int | None, defaults: Sampling) -> Fields:
    """Check the fields that both kinds of requests share, and return the checked request.

    Missing sampling settings come from ``defaults``, and a missing seed is random.

    Args:
        fields: fields of the request.
        prompts: its prompts, already checked.
        tokens: maximum number of tokens of the answer; None if the request does not set it.
        defaults: sampling settings of the model.

    Raises:
        Refusal: a value is invalid.
    """
    stream, usual = _bool(fields, "stream"), defaults._replace(seed=secrets.randbits(63))
    names = ("temperature", "top_k", "top_p", "seed")
    numbers = {name: _number(fields, name, getattr(usual, name)) for name in names}
    numbers["top_k"] = max(0, numbers["top_k"])  # -1 means all tokens, like 0
    if not numbers["top_p"]:
        _refuse("top_p", "a number above 0, at most 1")
    sampling, stops = usual._replace(**numbers), _stops(fields.get("stop"))
    usage, seeded = _usage(fields, stream), "seed" in fields
    return Fields(fields["model"], prompts, sampling, tokens, stops, stream, usage, seeded=seeded)


def with_defaults(generation: Any) -> Sampling:
    """Return the sampling settings of a generation config, with OpenAI's defaults for missing ones.

    Only ``temperature``, ``top_k`` and ``top_p`` are read."""
    values = {name: getattr(generation, name, None) for name in ("temperature", "top_k", "top_p")}
    return Sampling(**{name: value for name, value in values.items() if value is not None})


def _no_constant(word: str) -> NoReturn:
    """Raise ValueError for NaN and infinities in JSON."""
    raise ValueError(f"{word} is no number")


def _refuse(name: str, expected: str) -> NoReturn:
    """Raise a ``Refusal`` with status 400 for an invalid value.

    Args:
        name: name of the field.
        expected: allowed values.
    """
    raise Refusal(400, f"{name}: expected {expected}", param=name, code="invalid_value")


def _bool(fields: Mapping[str, Any], name: str) -> bool:
    """Return the boolean field ``name``, or False if it is missing; raise a Refusal for a value of another type."""
    value = fields.get(name, False)
    return value if isinstance(value, bool) else _refuse(name, "true or false")


def _number(fields: Mapping[str, Any], name: str, usual: Any = None) -> Any:
    """Return the numeric field ``name``, or ``usual`` if it is missing; raise a Refusal outside of ``NUMBERS``."""
    if name not in fields:
        return usual
    value, (low, high) = fields[name], NUMBERS[name]
    whole = isinstance(low, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
        _refuse(name, f"a {'whole ' if whole else ''}number from {low} to {high}")
    return type(low)(value)


def _usage(fields: Mapping[str, Any], stream: bool) -> bool:
    """Check ``stream_options``; return True if the stream is to end with the numbers of tokens, False without options.

    Raises:
        Refusal: an option is unsupported, or is set for an answer that is not streamed.
    """
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        _refuse("stream_options", "an object with include_usage")
    _check_others(options, ("include_usage",), ON_STREAM, "stream_options.")
    usage = options.get("include_usage") is not None and _bool(options, "include_usage")
    if usage and not stream:
        _refuse("stream_options", "left out unless stream is true")
    return usage


def _stops(value: object) -> tuple[str, ...]:
    """Return the stop strings of a request; ``()`` for None or an empty string. Other types raise a Refusal.

    Args:
        value: one string, or a list of at most ``MOST_STOPS`` strings that are not empty.
    """
    stops = [] if value is None or value == "" else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        _refuse("stop", f"a text, or a list of at most {MOST_STOPS}, none of them empty")
    return tuple(stops)


def _messages(value: object) -> list[dict[str, str]]:
    """Check the messages of a chat; return role, content and name of each, with the content as one text.

    Raises:
        Refusal: a message is invalid, or there is none.
    """
    if not isinstance(value, list) or not value:
        _refuse("messages", "a list of at least one message")
    return [_message(f"messages[{number}]", message) for number, message in enumerate(value)]


def _message(name: str, message: object) -> dict[str, str]:
    """Check one message; return its ``role``, its ``content`` as one text, and its ``name`` if it has one.

    Args:
        name: name of the message in error messages, for example ``messages[0]``.
        message: the message. Its content is a string, or a list of text parts, which are joined.

    Raises:
        Refusal: the message is invalid.
    """
    if not isinstance(message, dict):
        _refuse(name, "an object with role and content")
    _check_others(message, ("role", "content", "name"), IN_MESSAGES, f"{name}.")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        _refuse(f"{name}.role", f"one of {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_part(f"{name}.content[{number}]", part) for number, part in enumerate(content))
    author = {} if message.get("name") is None else {"name": _text(f"{name}.name", message["name"])}
    return {"role": role, "content": _text(f"{name}.content", content)} | author


def _part(name: str, part: object) -> str:
    """Check one part of a message's content and return its text; raise a Refusal for parts that are not text."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else None
        raise Refusal(400, f"{name}: only text is taken, not {kind!r}", param=name, code="unsupported")
    _check_others(part, ("type", "text"), {"annotations": ([],)}, f"{name}.")
    return part["text"]


def _text(name: str, value: object) -> str:
    """Return ``value`` if it is a string that UTF-8 can encode; else raise a Refusal that names ``name``."""
    if not isinstance(value, str):
        _refuse(name, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(name, "a text; it has half a surrogate pair, which is none")
    return value


def _prompts(value: object) -> list[str | list[int]]:
    """Return the prompts of a completion as a list, with each prompt as a text or a list of token ids.

    Args:
        value: a text, a list of token ids, or a list of texts or of lists of token ids.

    Raises:
        Refusal: ``value`` is anything else, or is empty.
    """
    if isinstance(value, str):
        return [_text("prompt", value)]
    if not isinstance(value, list) or not value:
        _refuse("prompt", "a text, token ids, or a list of at least one text or of lists of token ids")
    if not isinstance(value[0], str | list):
        return [_ids("prompt", value)]
    read: Callable[[str, object], Any] = _text if isinstance(value[0], str) else _ids
    return [read(f"prompt[{number}]", prompt) for number, prompt in enumerate(value)]


def _ids(name: str, value: object) -> list[int]:
    """Return ``value`` if it is a list of at least one token id; else raise a Refusal that names ``name``."""
    if not isinstance(value, list) or not value:
        _refuse(name, "a list of at least one token id")
    for number, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            _refuse(f"{name}[{number}]", "a token id: a whole number from 0")
    return value
