"""The service over HTTP, asked by OpenAI's own client; what is refused; who goes away."""

from __future__ import annotations

import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import openai
import pytest

from processes import wait_for
from scripted_engine import LOGPROB
from served import CONFIG, NAME, Served, resident_bytes, served, tokenizer_of_bytes
from tawpipe.serving.passes import Sampling, SlotLayout
from tawpipe.serving.requests import Question

EMOJI = "so \U0001f469‍\U0001f680 naïve \U0001f44d\U0001f3fd"


def ask(service: Served, text: str, **more: Any) -> Any:
    return service.client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": text}], **more)


def post(
    service: Served, body: bytes | dict[str, Any], path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, dict[str, Any], Any]:
    """Status, content and headers of what is answered to a body that no client would send."""
    connection = HTTPConnection("127.0.0.1", service.port, timeout=30)
    given = body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    connection.request("POST", path, given, names)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content, answer.headers


def get(service: Served, path: str, **headers: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", service.port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def body(text: str = "hi", /, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}]} | more


@pytest.fixture(scope="module")
def service():
    with served() as running:
        yield running


def test_chat_answer_has_its_text_finish_reason_and_usage(service: Served) -> None:
    answer = ask(service, EMOJI)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", EMOJI, "stop")
    assert choice.logprobs is None and answer.model == NAME and answer.object == "chat.completion"
    prompt = len(tokenizer_of_bytes().encode(f"<|user|>\n{EMOJI}\n<|assistant|>\n", add_special_tokens=False))
    spoken = len(EMOJI.encode()) + 1
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, spoken, prompt + spoken)


@pytest.mark.parametrize("usage", [True, False])
def test_streamed_chat_answer_has_its_text_finish_reason_and_usage(service: Served, usage: bool) -> None:
    more = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(ask(service, EMOJI, stream=True, **more))
    *texts, last = chunks if not usage else chunks[:-1]
    assert texts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in [*texts, last]) == EMOJI
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * len(texts)
    assert last.choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1 and len(texts) > 10
    if usage:
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(EMOJI.encode()) + 1


def test_a_stream_ends_with_done(service: Served) -> None:
    connection = HTTPConnection("127.0.0.1", service.port, timeout=30)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body(stream=True)), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: {") for line in lines[:-2])
    assert answer.headers.get("access-control-allow-origin") is None
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_match_across_token_borders(service: Served, stream: bool) -> None:
    answer = ask(service, "one END two EN and three", stop=["three", "END t"], stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text, finish = "".join(choice.delta.content or "" for choice in chunks), chunks[-1].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, finish) == ("one ", "stop")


def test_answer_has_the_requested_number_of_tokens(service: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(service, "abcdefgh", **{name: 3})
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "length")
        assert answer.usage.completion_tokens == 3


def test_logprobs_are_given_for_the_returned_tokens(service: Served) -> None:
    answer = ask(service, "ab\u00e9 END", stop=["END"], logprobs=True, top_logprobs=2)
    told = answer.choices[0].logprobs.content
    assert [(entry.token, entry.logprob) for entry in told if entry.bytes] == [
        ("a", LOGPROB),
        ("b", LOGPROB),
        (" ", LOGPROB),
    ]
    assert len(told) == 5 and [entry.bytes for entry in told[2:4]] == [None, None]  # half a character each
    assert [(top.token, top.logprob) for top in told[0].top_logprobs] == [("a", LOGPROB), ("b", LOGPROB - 1)]
    chunks = [chunk.choices[0] for chunk in ask(service, "ab", logprobs=True, stream=True)]
    entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert [entry.token for entry in entries] == ["a", "b"] and entries[0].top_logprobs == []


def test_sampling_settings_reach_the_engine(service: Served) -> None:
    ask(service, "z", temperature=0.5, top_p=0.5, seed=77, extra_body={"top_k": 3})
    drawn = [row.draw for given in service.engine.passes for row in given.rows if row.draw]
    assert {(0.5, 0.5, 3, 77)} & {(draw.temperature, draw.top_p, draw.top_k, draw.seed) for draw in drawn}


def test_served_model_is_listed_and_others_are_refused(service: Served) -> None:
    assert [model.id for model in service.client.models.list()] == [NAME]
    assert service.client.models.retrieve(NAME).owned_by == "tawpipe"
    with pytest.raises(openai.NotFoundError, match="other"):
        service.client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as refused:
        service.client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert refused.value.param == "model" and refused.value.code == "model_not_found"


def test_refused_request_names_its_field(service: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(service, "x", tools=[{"type": "function", "function": {"name": "f"}}])
    assert refused.value.param == "tools" and refused.value.type == "invalid_request_error"
    status, content, _ = post(service, b"{")
    assert status == 400 and content["error"]["code"] == "invalid_json"
    assert post(service, body(), content_type="text/plain")[0] == 415
    assert get(service, "/v1/chat/completions")[0] == 405 and get(service, "/v2")[0] == 404
    assert "error" in json.loads(get(service, "/v2")[1])


def test_body_size_tokens_and_context_are_limited(service: Served) -> None:
    status, content, _ = post(service, body("x" * 20_481))
    assert status == 413 and "20480 bytes" in content["error"]["message"]
    for more, code in [({"max_tokens": 601}, "invalid_value"), ({"max_tokens": 5000}, "context_length_exceeded")]:
        status, content, _ = post(service, body(**more))
        assert status == 400 and content["error"]["code"] == code
    status, content, _ = post(service, body("x" * 1100))
    assert status == 400 and content["error"]["code"] == "context_length_exceeded"


def test_body_without_a_length_is_limited(service: Served) -> None:
    connection = HTTPConnection("127.0.0.1", service.port, timeout=30)
    chunks = (b"x" * 1000 for _ in range(30))
    try:
        connection.request(
            "POST", "/v1/chat/completions", chunks, {"content-type": "application/json"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # it was closed before all was sent
    connection.close()


def test_prompts_up_to_the_whole_context_are_answered_over_http() -> None:
    room = SlotLayout(1, 2, 40, 8)
    with served(room) as service:
        begin = len(tokenizer_of_bytes().encode("<|user|>\n\n<|assistant|>\n", add_special_tokens=False))
        answer = ask(service, "y" * (40 - begin))
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("y", "length")
        assert answer.usage.prompt_tokens == 40
        with pytest.raises(openai.BadRequestError, match="context"):
            ask(service, "y" * (41 - begin))


def test_requests_for_other_hosts_are_refused(service: Served) -> None:
    assert get(service, "/v1/models", Host="evil.example:80")[0] == 400
    assert get(service, "/v1/models", Host="")[0] == 400
    for name in ("localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "[::1]"):
        assert get(service, "/v1/models", Host=name)[0] == 200, name


def test_requests_without_the_api_key_are_refused() -> None:
    with served(key="k" * 20, config=replace(CONFIG, host="0.0.0.0")) as service:
        assert ask(service, "hi").choices[0].message.content == "hi"
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "k" * 20}, {"Authorization": "Basic x"}):
            for path in ("/v1/models", "/metrics", "/v1/nothing"):
                assert get(service, path, **given)[0] == 401, (given, path)
        assert get(service, "/health", Host="my.host")[0] == 200
        wrong = Served(service.slots, service.engine, service.port, "wrong")
        with pytest.raises(openai.AuthenticationError):
            ask(wrong, "hi")


def test_requests_beyond_the_waiting_limit_get_retry_after() -> None:
    with served(SlotLayout(1, 1, 600, 64), waiting=1, pass_s=0.01) as service:
        streams = [ask(service, "long " * 50, stream=True) for _ in range(2)]
        status, content, headers = post(service, body())
        assert status == 429 and content["error"]["type"] == "rate_limit_error" and int(headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        assert wait_for(lambda: not service.slots.in_use)
        assert ask(service, "hi").choices[0].message.content == "hi"


def test_answer_beyond_the_time_limit_ends_with_its_text_so_far() -> None:
    with served(SlotLayout(1, 1, 600, 64), config=replace(CONFIG, request_s=0.7), pass_s=0.02) as service:
        text = "abcdefgh" * 30
        chunks = [chunk.choices[0] for chunk in ask(service, text, stream=True)]
        said = "".join(choice.delta.content or "" for choice in chunks)
        assert chunks[-1].finish_reason == "length" and text.startswith(said) and 0 < len(said) < len(text)


def test_request_that_waits_too_long_gets_retry_after() -> None:
    with served(SlotLayout(1, 1, 600, 64), config=replace(CONFIG, request_s=0.5), pass_s=0.02) as service:
        holding = service.slots.ask(Question((5,), 500, Sampling()), lambda *_: None)
        status, content, headers = post(service, body())
        assert (status, content["error"]["code"]) == (503, "busy") and int(headers["retry-after"]) >= 1
        service.slots.give_up(holding)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_client_frees_its_slot(stream: bool) -> None:
    with served(SlotLayout(1, 1, 600, 64), pass_s=0.02) as service:
        connection = socket.create_connection(("127.0.0.1", service.port))
        given = json.dumps(body("abcdefgh" * 30, stream=stream)).encode()
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(given)}", "", ""])
        connection.sendall(head.encode() + given)
        assert wait_for(lambda: service.slots.in_use > 0)
        connection.close()
        before = service.slots.counts.answer_tokens
        assert wait_for(lambda: not service.slots.in_use)
        assert service.slots.counts.ends == {"given up": 1} and service.slots.counts.answer_tokens - before < 20


def test_draining_service_finishes_open_answers_and_refuses_new_ones() -> None:
    with served(SlotLayout(1, 1, 600, 64), pass_s=0.01) as service:
        stream = ask(service, "abcdefgh" * 10, stream=True)
        service.slots.drain()
        assert post(service, body())[0] == 503 and get(service, "/health")[0] == 503
        chunks = [chunk.choices[0] for chunk in stream]
        assert "".join(choice.delta.content or "" for choice in chunks) == "abcdefgh" * 10


def test_engine_failure_ends_every_stream_with_an_error() -> None:
    with served(pass_s=0.005, fails_at=100) as service:

        def read() -> tuple[int, str]:
            chunks = list[str]()
            with pytest.raises(openai.APIError, match="the service has failed"):
                for chunk in ask(service, "abcdefgh" * 30, stream=True):
                    chunks.append(chunk.choices[0].delta.content or "")
            return len(chunks), "".join(chunks)

        with ThreadPoolExecutor(10) as threads:
            reading = [threads.submit(read) for _ in range(10)]
            read_ones = [reader.result(10) for reader in reading]
        assert all(("abcdefgh" * 30).startswith(said) for _, said in read_ones)
        assert post(service, body())[0] == 503


def test_metrics_endpoint_counts_requests_tokens_and_slots() -> None:
    with served() as service:
        ask(service, "hi", max_tokens=2)
        lines = get(service, "/metrics")[1].splitlines()
        assert 'tawpipe_requests_total{end="length"} 1' in lines and "tawpipe_answer_tokens_total 2" in lines
        assert {"tawpipe_slots 8", "tawpipe_slots_in_use 0", "tawpipe_requests_waiting 0"} <= set(lines)


def test_service_still_answers_after_being_idle() -> None:
    with served() as service:
        assert wait_for(lambda: len(service.engine.passes) > 20)
        assert ask(service, "hi").choices[0].message.content == "hi"


def mixed(service: Served, number: int) -> None:
    """One of many requests, each of which has an answer that is known beforehand."""
    draws = random.Random(number)
    text = "".join(draws.choice(["word ", "END", "\U0001f44d", "\n", "é"]) for _ in range(draws.randint(1, 30)))
    kind = draws.choice(["whole", "stream", "stop", "tokens", "unknown", "field", "broken", "overlong", "leaves"])
    if kind == "whole":
        assert ask(service, text).choices[0].message.content == text
    elif kind == "stream":
        assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(service, text, stream=True)) == text
    elif kind == "stop":
        assert ask(service, text, stop=["END"]).choices[0].message.content == text.partition("END")[0]
    elif kind == "tokens":
        plain = "word " * draws.randint(3, 20)
        assert ask(service, plain, max_tokens=9).choices[0].message.content == plain[:9]
    elif kind == "unknown":
        assert post(service, body(text, model="other"))[0] == 404
    elif kind == "field":
        assert post(service, body(text, min_p=0.5))[0] == 400
    elif kind == "broken":
        assert post(service, json.dumps(body(text)).encode()[:-1])[0] == 400
    elif kind == "overlong":
        assert post(service, body("x" * 1500))[0] == 400
    else:
        stream = ask(service, "abcdefgh" * 60, stream=True)
        for _, _ in zip(stream, range(draws.randint(0, 20)), strict=False):
            pass
        stream.close()


def many(requests: int, clients: int) -> None:
    with served(pass_s=0.0005) as service, ThreadPoolExecutor(clients) as threads:
        for asking in [threads.submit(mixed, service, number) for number in range(requests)]:
            asking.result(120)
        assert wait_for(lambda: not service.slots.in_use and not service.slots.waiting)
        assert service.slots.counts.ends["given up"] >= requests / 20


def test_mixed_requests_get_right_answers_and_free_their_slots() -> None:
    many(100, 8)


@pytest.mark.slow
def test_thousand_mixed_requests_leak_no_memory() -> None:
    many(100, 32)
    before, threads = resident_bytes(), threading.active_count()
    many(1000, 32)
    assert resident_bytes() <= 1.05 * before
    assert threading.active_count() <= threads + 1
