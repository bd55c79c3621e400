"""The fields of a request: what is taken, and every other one refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tawpipe.runtime.passes import Sampling
from tawpipe.serve.fields import ChatAsked, Refusal, read_asked, with_defaults

LEAST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
DEFAULTS = Sampling(temperature=0.7, top_k=5, top_p=0.9)


def read(**fields: Any) -> ChatAsked:
    return read_asked(json.dumps(LEAST | fields).encode(), DEFAULTS)


def test_what_is_not_said_is_as_usual() -> None:
    asked = read(seed=3)
    assert asked == ChatAsked("m", LEAST["messages"], Sampling(0.7, 5, 0.9, 3, 0))
    assert read().sampling.seed != read().sampling.seed


def test_everything_that_is_taken() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = read(
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": parts, "name": None}],
        max_tokens=7,
        max_completion_tokens=7,
        temperature=0,
        top_p=1,
        top_k=0,
        stop=["x", "y"],
        seed=2**63 - 1,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=20,
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        tools=[],
        response_format={"type": "text"},
        user=None,
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
    sampling = Sampling(0.0, 0, 1.0, 2**63 - 1, 20)
    assert asked == ChatAsked("m", messages, sampling, 7, ("x", "y"), stream=True, usage=True, logprobs=True)
    assert read(stop="x").stops == ("x",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("functions", []),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("user", "me"),
        ("store", True),
        ("audio", {}),
        ("reasoning_effort", "low"),
        ("min_p", 0.1),
        ("echo", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 2.5),
        ("max_tokens", 0),
        ("max_completion_tokens", 1.5),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", [""]),
        ("stop", ""),
        ("stop", 5),
        ("seed", -1),
        ("seed", 2**63),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("logprobs", 5),
        ("top_logprobs", 3),
        ("model", None),
        ("model", 5),
        ("messages", None),
        ("messages", []),
        ("messages", "hi"),
    ],
)
def test_what_is_not_taken_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(Refusal) as refused:
        read(**{name: value})
    assert refused.value.status == 400 and refused.value.param == name and name in str(refused.value)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
        ({"role": "assistant", "content": "x", "tool_calls": [1]}, "messages[0].tool_calls"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
    ],
)
def test_messages_that_are_none_are_refused(message: object, param: str) -> None:
    with pytest.raises(Refusal) as refused:
        read(messages=[message])
    assert refused.value.status == 400 and refused.value.param == param


@pytest.mark.parametrize(
    "more", [{"max_tokens": 5, "max_completion_tokens": 6}, {"logprobs": True, "top_logprobs": 21}]
)
def test_fields_that_contradict_each_other(more: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"max_completion_tokens|top_logprobs"):
        read(**more)


@pytest.mark.parametrize("options", [{"include_usage": 1}, {"include_obfuscation": True}, []])
def test_stream_options_are_checked(options: object) -> None:
    with pytest.raises(Refusal, match=r"include_usage"):
        read(stream=True, stream_options=options)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000, b'"text"'], ids=lambda body: repr(body[:10])
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        read_asked(body, DEFAULTS)
    assert refused.value.status == 400 and refused.value.code == "invalid_json"


def test_a_model_says_how_it_is_drawn_from() -> None:
    class Generation:
        temperature, top_k, top_p = 0.6, 20, None

    assert with_defaults(Generation()) == Sampling(0.6, 20, 1.0)
    assert with_defaults(None) == Sampling(1.0, 0, 1.0)
