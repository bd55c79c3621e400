"""The fields of a request: what is taken, and every other one refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tawpipe.serving.passes import Sampling
from tawpipe.serving.service.fields import Fields, Refusal, read_asked, read_completion, with_defaults

LEAST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
DEFAULTS = Sampling(temperature=0.7, top_k=5, top_p=0.9)


def read(**fields: Any) -> Fields:
    return read_asked(json.dumps(LEAST | fields).encode(), DEFAULTS)


def test_missing_request_fields_take_their_defaults() -> None:
    asked = read(seed=3)
    assert asked == Fields("m", [LEAST["messages"]], Sampling(0.7, 5, 0.9, 3, 0), seeded=True)
    assert read().sampling.seed != read().sampling.seed


def test_all_supported_request_fields_are_read() -> None:
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
    more: dict[str, Any] = {"stream": True, "usage": True, "logprobs": True, "seeded": True}
    assert asked == Fields("m", [messages], sampling, 7, ("x", "y"), **more)
    assert read(stop="x").stops == ("x",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("user", 5),
        ("store", True),
        ("store", 0),
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
        ("top_k", -2),
        ("top_k", 2.5),
        ("max_tokens", 0),
        ("max_completion_tokens", 1.5),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", False),
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
def test_unsupported_request_fields_are_refused_by_name(name: str, value: object) -> None:
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
def test_malformed_chat_messages_are_refused(message: object, param: str) -> None:
    with pytest.raises(Refusal) as refused:
        read(messages=[message])
    assert refused.value.status == 400 and refused.value.param == param


@pytest.mark.parametrize(
    "more", [{"max_tokens": 5, "max_completion_tokens": 6}, {"logprobs": True, "top_logprobs": 21}]
)
def test_contradicting_request_fields_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"max_completion_tokens|top_logprobs"):
        read(**more)


@pytest.mark.parametrize("options", [{"include_usage": 1}, {"include_obfuscation": True}, []])
def test_wrong_stream_options_are_refused(options: object) -> None:
    with pytest.raises(Refusal, match=r"stream_options|include_usage"):
        read(stream=True, stream_options=options)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000, b'"text"'], ids=lambda body: repr(body[:10])
)
def test_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        read_asked(body, DEFAULTS)
    assert refused.value.status == 400 and refused.value.code == "invalid_json"


def test_sampling_defaults_are_read_from_the_generation_config() -> None:
    class Generation:
        temperature, top_k, top_p = 0.6, 20, None

    assert with_defaults(Generation()) == Sampling(0.6, 20, 1.0)
    assert with_defaults(None) == Sampling(1.0, 0, 1.0)


TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
NEUTRAL: list[dict[str, Any]] = [
    {"user": "abc", "safety_identifier": "a", "prompt_cache_key": "b", "metadata": {"run": "1"}, "store": False},
    {"n": 1, "best_of": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "seed": None},
    {"min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "typical_p": 1, "min_tokens": 0},
    {"ignore_eos": False, "skip_special_tokens": True, "use_beam_search": False, "include_stop_str_in_output": False},
    {"stop_token_ids": [], "bad_words": [], "service_tier": "default", "response_format": {"type": "text"}},
    {"stop": ""},
    {"stop": []},
    {"stream": True, "stream_options": {"include_obfuscation": False, "continuous_usage_stats": False}},
    {"stream_options": {"include_usage": False}},
]
OF_CHAT: list[dict[str, Any]] = [
    {"tools": [], "functions": [], "tool_choice": "auto", "function_call": "none", "parallel_tool_calls": False},
    {"reasoning_effort": None, "verbosity": "medium", "modalities": ["text"], "chat_template_kwargs": {}},
    {"echo": False, "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
]


def complete(**fields: Any) -> Fields:
    return read_completion(json.dumps(TEXT | fields).encode(), DEFAULTS)


@pytest.mark.parametrize("fields", [*NEUTRAL, *OF_CHAT, {"suffix": "", "add_special_tokens": True}], ids=str)
def test_neutral_values_of_unsupported_fields_are_accepted(fields: dict[str, Any]) -> None:
    readers = [read] * (fields in NEUTRAL + OF_CHAT) + [complete] * (fields not in OF_CHAT)
    if "suffix" not in fields:
        assert readers
    for reader in readers:
        asked, usual = reader(**fields), reader(stream="stream" in fields)
        assert replace(asked, sampling=usual.sampling) == usual


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user", {}),
        ("metadata", "a"),
        ("service_tier", "flex"),
        ("store", 0),
        ("n", True),
        ("n", 2),
        ("best_of", 2),
        ("logit_bias", {"5": 1}),
        ("repetition_penalty", 1.1),
        ("min_p", False),
        ("ignore_eos", True),
        ("skip_special_tokens", False),
        ("stop_token_ids", [2]),
        ("seed", -1),
        ("temperature", True),
        ("top_k", -2),
        ("stream", 1),
    ],
)
def test_effective_values_of_unsupported_fields_are_refused_on_both_routes(name: str, value: object) -> None:
    for reader in (read, complete):
        with pytest.raises(Refusal, match=name) as refused:
            reader(**{name: value})
        assert refused.value.status == 400 and refused.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "end"),
        ("messages", []),
        ("tools", []),
        ("max_completion_tokens", 5),
        ("top_logprobs", 1),
        ("logprobs", True),
        ("logprobs", False),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", 1.0),
        ("echo", 1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("add_special_tokens", False),
    ],
)
def test_unsupported_completion_fields_are_refused(name: str, value: object) -> None:
    with pytest.raises(Refusal, match=name) as refused:
        complete(**{name: value})
    assert refused.value.status == 400 and refused.value.param == name


def test_completion_fields_are_read() -> None:
    numbers = {"logprobs": 5, "max_tokens": 0, "top_k": -1, "temperature": 0, "seed": 3}
    asked = complete(prompt=[[1, 2], [3]], echo=True, stop="x", **numbers)
    sampling = Sampling(0.0, 0, 0.9, 3, 5)
    more = {"logprobs": True, "echo": True, "seeded": True, "field": "prompt"}
    assert asked == Fields("m", [[1, 2], [3]], sampling, 0, ("x",), **more)
    assert complete().tokens is None and not complete().logprobs and complete(logprobs=0).logprobs
    assert complete(prompt=[5, 6]).prompts == [[5, 6]] and complete().prompts == ["hi"]


def test_neutral_message_fields_and_names_are_accepted() -> None:
    more = {"tool_calls": [], "annotations": [], "refusal": None, "audio": None, "function_call": None, "type": "text"}
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": "a", "name": "bob"}]
    asked = read(messages=[*messages, {"role": "assistant", "content": "b", "reasoning_content": "", **more}])
    assert asked.prompts == [[*messages, {"role": "assistant", "content": "b"}]]
    for field, value in (("name", 5), ("tool_calls", [{}]), ("reasoning_content", "so"), ("refusal", "no")):
        with pytest.raises(Refusal) as refused:
            read(messages=[{"role": "assistant", "content": "b", field: value}])
        assert refused.value.param == f"messages[0].{field}"
    with pytest.raises(Refusal) as refused:
        read(messages=[{"role": "user", "content": [{"type": "text", "text": "a", "weight": 0}]}])
    assert refused.value.param == "messages[0].content[0].weight"
