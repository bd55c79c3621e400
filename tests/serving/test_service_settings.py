"""Settings of a service, and what refuses to start; an answer's stream by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tawpipe.commands.serve import run
from tawpipe.errors import UserError
from tawpipe.serving.service.answers import Answering
from tawpipe.serving.service.settings import ServeConfig, load, read_key
from tawpipe.serving.service.start import serve


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("", "--model: got ''; the folder of a model"),
        ("--model m --host 0.0.0.0", "--host: got '0.0.0.0'; 127.0.0.1 or localhost; any address with --api-key-file"),
        ("--model m --port 70000", "port"),
        ("--model m --slots 0", "slots"),
    ],
)
def test_wrong_service_settings_are_refused(words: str, refused: str) -> None:
    with pytest.raises(UserError, match=refused):
        load(words.split())


def test_only_local_hosts_are_loopback() -> None:
    hosts = {"127.0.0.1": True, "::1": True, "localhost": True, "0.0.0.0": False, "10.0.0.1": False, "name": False}
    assert {host: ServeConfig(model="m", host=host).loopback for host in hosts} == hosts


def test_api_key_is_the_first_line_of_a_file(tmp_path) -> None:
    file = tmp_path / "key"
    assert read_key(ServeConfig(model="m")) is None
    file.write_text("0123456789abcdef\nmore\n")
    assert read_key(ServeConfig(model="m", api_key_file=str(file))) == "0123456789abcdef"
    for text in ("short", "with a blank in it and long"):
        file.write_text(text)
        with pytest.raises(UserError, match="whose first line is the key"):
            read_key(ServeConfig(model="m", api_key_file=str(file)))


def test_a_folder_without_a_model_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match="--model"):
        run(["--model", str(tmp_path / "none"), "--device", "cpu"])


def test_port_in_use_is_named_before_a_model_is_read(tmp_path, monkeypatch) -> None:
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]:
        monkeypatch.delenv(name)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=str(port)):
            serve(ServeConfig(model=str(tmp_path), port=port, device="cpu"), tmp_path)


def test_answer_stream_ends_with_an_empty_body() -> None:
    class Answer:
        left = False

        @contextlib.contextmanager
        def watched(self, receive: Any) -> Iterator[None]:
            yield
            self.left = True

        async def events(self) -> Any:
            yield b"one"
            yield b"two"

    sent, answer = list[dict[str, Any]](), Answer()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    given: Any = answer
    asyncio.run(Answering.__call__(given, {}, lambda: None, send))  # pyright: ignore[reportArgumentType]
    assert [message.get("body") for message in sent] == [None, b"one", b"two", b""] and answer.left
    assert sent[-1]["more_body"] is False
