"""Fields of a request for a chat completion or a completion: a field that is not taken is refused by its name."""

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
"""Tokens of a completion at most, where the request does not say."""
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
"""Fields that are numbers, the least and the most of each; they are whole where these are."""
TAKEN = ("model", "stop", "stream", "stream_options", "logprobs", "temperature", "top_k", "top_p", "seed", "max_tokens")
OF_CHAT = (*TAKEN, "messages", "top_logprobs", "max_completion_tokens")
OF_COMPLETION = (*TAKEN, "prompt", "echo")
Neutral = Mapping[str, tuple[object, ...] | type]
"""Values, or the type of any value, of fields that change nothing: some clients always say them."""
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
class Fields:
    """A request whose fields are right.

    Attributes:
        prompts: the messages of a chat; or texts, or lists of token ids, each to be completed. Later their tokens.
        tokens: of the answer at most; None where the request does not say.
        stops: strings that end the answer.
        stream: send the text as it comes.
        usage: end the stream with the numbers of tokens.
        logprobs: tell each token's, and those of so many others that ``sampling`` says.
        echo: begin with the prompt.
        reasoning: False for an answer without reasoning before it.
        seeded: the seed is the request's, not a random number.
        field: name of the field that has the prompts.
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
    """Read the body of a request for a chat completion.

    Args:
        defaults: how tokens are drawn where the request does not say; its seed is of no effect.

    Raises:
        Refusal: it is no JSON object, or has a field that is not taken, or with a value that it may not have.
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
    """Read the body of a request for completions.

    Args:
        defaults: as ``read_asked`` takes them.

    Raises:
        Refusal: as ``read_asked`` raises it.
    """
    fields = _fields(body, OF_COMPLETION, WITHOUT_EFFECT_ON_COMPLETION)
    echo, tokens = _bool(fields, "echo"), _number(fields, "max_tokens", None)
    if tokens == 0 and not echo:
        _refuse("max_tokens", "at least 1; with echo = true also 0")
    likeliest, prompts = _number(fields, "logprobs", None), _prompts(fields.get("prompt"))
    asked = _asked(fields, prompts, tokens, defaults._replace(logprobs=likeliest or 0))
    return replace(asked, logprobs=likeliest is not None, echo=echo, field="prompt")


def _fields(body: bytes, taken: Sequence[str], neutral: Neutral) -> dict[str, Any]:
    """Fields of a body that are not null.

    Args:
        taken: names of fields that count.
        neutral: values of other fields that change nothing.
    """
    try:
        given = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise Refusal(400, "the body is no JSON object", code="invalid_json")
    _check_others(given, taken, neutral)
    if not isinstance(given.get("model"), str):
        _refuse("model", "the name of a model, which /v1/models has")
    return {name: value for name, value in given.items() if value is not None}


def _check_others(fields: Mapping[str, Any], taken: Sequence[str], neutral: Neutral, where: str = "") -> None:
    """Refuse a field that is not taken, unless its value changes nothing."""
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
    stream, usual = _bool(fields, "stream"), defaults._replace(seed=secrets.randbits(63))
    names = ("temperature", "top_k", "top_p", "seed")
    numbers = {name: _number(fields, name, getattr(usual, name)) for name in names}
    numbers["top_k"] = max(0, numbers["top_k"])  # -1 is for all, too
    if not numbers["top_p"]:
        _refuse("top_p", "a number above 0, at most 1")
    sampling, stops = usual._replace(**numbers), _stops(fields.get("stop"))
    usage, seeded = _usage(fields, stream), "seed" in fields
    return Fields(fields["model"], prompts, sampling, tokens, stops, stream, usage, seeded=seeded)


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


def _number(fields: Mapping[str, Any], name: str, usual: Any = None) -> Any:
    if name not in fields:
        return usual
    value, (low, high) = fields[name], NUMBERS[name]
    whole = isinstance(low, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
        _refuse(name, f"a {'whole ' if whole else ''}number from {low} to {high}")
    return type(low)(value)


def _usage(fields: Mapping[str, Any], stream: bool) -> bool:
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        _refuse("stream_options", "an object with include_usage")
    _check_others(options, ("include_usage",), ON_STREAM, "stream_options.")
    usage = options.get("include_usage") is not None and _bool(options, "include_usage")
    if usage and not stream:
        _refuse("stream_options", "left out unless stream is true")
    return usage


def _stops(value: object) -> tuple[str, ...]:
    stops = [] if value is None or value == "" else [value] if isinstance(value, str) else value
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
    _check_others(message, ("role", "content", "name"), IN_MESSAGES, f"{name}.")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        _refuse(f"{name}.role", f"one of {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_part(f"{name}.content[{number}]", part) for number, part in enumerate(content))
    author = {} if message.get("name") is None else {"name": _text(f"{name}.name", message["name"])}
    return {"role": role, "content": _text(f"{name}.content", content)} | author


def _part(name: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else None
        raise Refusal(400, f"{name}: only text is taken, not {kind!r}", param=name, code="unsupported")
    _check_others(part, ("type", "text"), {"annotations": ([],)}, f"{name}.")
    return part["text"]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(name, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(name, "a text; it has half a surrogate pair, which is none")
    return value


def _prompts(value: object) -> list[str | list[int]]:
    """Texts, or lists of token ids."""
    if isinstance(value, str):
        return [_text("prompt", value)]
    if not isinstance(value, list) or not value:
        _refuse("prompt", "a text, token ids, or a list of at least one text or of lists of token ids")
    if not isinstance(value[0], str | list):
        return [_ids("prompt", value)]
    read: Callable[[str, object], Any] = _text if isinstance(value[0], str) else _ids
    return [read(f"prompt[{number}]", prompt) for number, prompt in enumerate(value)]


def _ids(name: str, value: object) -> list[int]:
    if not isinstance(value, list) or not value:
        _refuse(name, "a list of at least one token id")
    for number, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            _refuse(f"{name}[{number}]", "a token id: a whole number from 0")
    return value
