"""``tawpipe serve`` from beginning to end: what is refused, what is answered, how it ends, who is left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from forked_commands import ForkedCommand
from pages import ROOT, commands
from processes import is_alive, wait_for
from tawpipe.cli import main
from tawpipe.data.chats.templates import PLAIN
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.serving.service.engine import bound_socket

QUESTION = [{"role": "user", "content": "What is a rail?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random values, which ends hardly any text."""
    folder = tmp_path_factory.mktemp("models") / "tuned"
    tokenizer: Any = train_tokenizer(["What is a rail? A rail is what a wheel runs on. " * 20], 300)
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass
class Running:
    """A service in processes of its own, whose output goes to a file."""

    process: subprocess.Popen[bytes] | ForkedCommand
    output: Path

    def address(self, after: int = 0) -> str:
        """That of its ``after`` + first start."""
        assert wait_for(lambda: len(self._said()) > after or self.process.poll() is not None, 90), self._text()
        assert len(self._said()) > after, self._text()
        return self._said()[after]

    def _said(self) -> list[str]:
        return re.findall(r" at (http://\S+/v1):.*\n", self._text())

    def _text(self) -> str:
        return self.output.read_text()

    def client(self, after: int = 0) -> OpenAI:
        return OpenAI(base_url=self.address(after), api_key="none", max_retries=0, timeout=60)

    def workers(self) -> list[int]:
        """Processes that it has started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in children.split()]


@contextmanager
def serving(words: Sequence[str], *, really: bool = False) -> Iterator[Running]:
    """A service that listens at a free port, until the block ends; nothing of it is left.

    Args:
        really: by a command of the system, which imports everything itself.
    """
    command = ["serve", *words, "--device", "cpu", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder, (output := Path(folder) / "output").open("wb") as file:
        if really:
            started = [sys.executable, "-m", "tawpipe", *command]
            process = subprocess.Popen(started, stdout=file, stderr=subprocess.STDOUT, env=environment)
        else:
            process = ForkedCommand(command, environment, output)
        running = Running(process, output)
        workers = list[int]()
        try:
            yield running
            if process.poll() is None:
                workers = running.workers()
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.send_signal(signal.SIGKILL)
        assert not [worker for worker in workers if is_alive(worker)]


def ask(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="tuned", messages=QUESTION, **more)  # type: ignore[arg-type]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of a command line with exit code 2."""
    assert main(["serve", *words]) == 2
    return capsys.readouterr().err


def test_wrong_serve_settings_are_refused_before_a_model_is_loaded(folder, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("tawpipe.serving.service.start.load_engine", None)  # who loads a model fails
    model = ["--model", str(folder)]
    assert "--model" in refused(capsys)
    assert "--model" in refused(capsys, "--model", str(tmp_path))
    assert "--api-key-file" in refused(capsys, *model, "--host", "0.0.0.0")
    assert "--api-key-file" in refused(capsys, *model, "--host", "my.machine")
    assert "--api-key-file" in refused(capsys, *model, "--host", "0.0.0.0", "--api-key-file", str(tmp_path / "none"))
    (tmp_path / "key").write_text("short\n")
    assert "16 letters" in refused(capsys, *model, "--api-key-file", str(tmp_path / "key"))
    assert "--slots" in refused(capsys, *model, "--slots", "0")
    assert "--weights" in refused(capsys, *model, "--weights", "int3")
    assert "no such option" in refused(capsys, *model, "--tensor-parallel", "2")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "--port" in refused(capsys, *model, "--port", str(taken.getsockname()[1]))


@pytest.mark.parametrize("template", [[], ["--chat-template", "plain"]])
def test_serve_context_longer_than_model_positions_is_refused(folder, tmp_path, capsys, template) -> None:
    """Also of a model without a chat template, which answers completions."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "--context" in refused(capsys, "--model", str(tmp_path), "--port", "0", *template, "--context", "4096")


def test_missing_serve_extra_names_its_install_command(folder, capsys, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = refused(capsys, "--model", str(folder))
    assert "starlette and uvicorn installed: pip install" in said and "[serve]" in said


def expected(folder: Path, tokens: int) -> str:
    """What transformers answers, the likeliest tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    generated = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(generated, skip_special_tokens=True)


def status(client: OpenAI) -> int:
    """Of the answer to a short request."""
    try:
        ask(client, max_tokens=1)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


@pytest.mark.slow
def test_service_answers_as_transformers_and_drains_on_sigterm(folder: Path) -> None:
    with serving(["--model", str(folder), "--dtype", "float64", "--chunk", "5"], really=True) as running:
        client = running.client()
        answer = ask(client, temperature=0, max_tokens=40)
        assert answer.choices[0].message.content == expected(folder, 40)
        scored = client.completions.create(model="tuned", prompt="What is", echo=True, logprobs=1, max_tokens=0)
        assert scored.choices[0].text == "What is"
        seeded = [ask(client, seed=5, max_tokens=20).choices[0].message.content for _ in range(2)]
        assert seeded[0] == seeded[1] != ask(client, seed=6, max_tokens=20).choices[0].message.content
        stream = ask(client, stream=True, max_tokens=1500, temperature=0)
        next(iter(stream))
        running.process.send_signal(signal.SIGTERM)
        assert wait_for(lambda: status(client) == 503)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason in ("length", "stop") and len(chunks) > 100
        assert running.process.wait(30) == 0


@pytest.mark.slow
def test_second_signal_ends_the_service_at_once(folder: Path) -> None:
    with serving(["--model", str(folder), "--slots", "1"]) as running, ThreadPoolExecutor(6) as threads:
        client, began = running.client(), threading.Event()

        def read() -> str:
            try:
                for _ in ask(client, stream=True, max_tokens=1900):
                    began.set()
            except openai.APIError as error:
                return str(error)
            return ""

        reading = [threads.submit(read) for _ in range(6)]  # one after the other
        assert began.wait(60)
        time.sleep(0.3)
        running.process.send_signal(signal.SIGINT)
        time.sleep(1.2)
        running.process.send_signal(signal.SIGINT)
        assert any("ends" in reader.result(60) for reader in reading)
        assert running.process.wait(30) == 0


@pytest.mark.slow
def test_service_on_two_processes_answers_equally_after_being_idle(folder: Path) -> None:
    words = ["--model", str(folder), "--dtype", "float64", "--nproc", "2", "--chunk", "5", "--timeout-s", "1"]
    with serving(words) as running:
        client = running.client()
        assert ask(client, temperature=0, max_tokens=20).choices[0].message.content == expected(folder, 20)
        time.sleep(3)  # more than twice what a process waits for another
        assert ask(client, temperature=0, max_tokens=20).choices[0].message.content == expected(folder, 20)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0


@pytest.mark.parametrize(
    ("killed", "nproc"),
    [(1, 3), *(pytest.param(*given, marks=pytest.mark.slow) for given in ((0, 3), (None, 3)))],
)
def test_killed_process_ends_every_stream_with_an_error_and_the_service(
    folder: Path, killed: int | None, nproc: int
) -> None:
    """As the others notice it, not when the time that they wait is over, which is ten minutes here. None is the
    launcher, with which the kernel ends them all. Only the first process, which answers, can send an event.
    """
    broken = (openai.APIConnectionError, httpx2.TransportError)
    words = ["--model", str(folder), "--nproc", str(nproc), "--slots", "10", "--timeout-s", "600"]
    with serving(words) as running:
        client, began = running.client(), threading.Semaphore(0)

        def read() -> bool:
            """True if it ended with an error; else it was complete, before the others had begun."""
            stream = ask(client, stream=True, max_tokens=1900)
            next(iter(stream))
            began.release()
            try:
                assert list(stream)[-1].choices[0].finish_reason
                return False
            except (openai.APIError, httpx2.TransportError) as error:
                assert isinstance(error, broken) is not bool(killed)
                return True

        workers = running.workers()
        with ThreadPoolExecutor(20) as threads:
            reading = [threads.submit(read) for _ in range(20)]
            assert all(began.acquire(timeout=60) for _ in reading)
            os.kill(running.process.pid if killed is None else workers[killed], signal.SIGKILL)
            # Long before the limits of requests and of the client.
            assert sum(reader.result(60) for reader in reading)
        assert running.process.wait(30) == (1 if killed is not None else -signal.SIGKILL)
        assert wait_for(lambda: not any(map(is_alive, workers)), 10)
        port = int(running.address().rpartition(":")[2].split("/")[0])
        bound_socket("127.0.0.1", port).close()


@pytest.mark.slow
def test_service_restarts_after_a_process_has_died(folder: Path) -> None:
    with serving(["--model", str(folder), "--nproc", "2", "--max-restarts", "1"], really=True) as running:
        assert ask(running.client(), max_tokens=3).choices
        os.kill(running.workers()[1], signal.SIGKILL)
        assert ask(running.client(after=1), max_tokens=3).choices


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(ROOT / "docs" / "serving.md"), ids=lambda command: command.text)
def test_commands_of_the_serving_page_run(folder: Path, command: Any) -> None:
    words = shlex.split(command.text.replace("tuned", str(folder)))[1:]
    if words[0] != "serve":
        assert main(words) == 0
        return
    with serving(words[1:]) as running:
        assert ask(running.client(), max_tokens=3).usage.completion_tokens == 3
