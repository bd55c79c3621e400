"""One process of ``tawpipe serve`` beside ``transformers serve`` with continuous batching: tokens per second over HTTP.

    python benchmarks/serve_rival.py --rival-python ENV/bin/python --out benchmarks/results/DATE-serve-rival

ENV is an environment with ``transformers[serving]``, on the same torch if versions are to be alike. Both services have
one model with random values, in fp32 on all processors, and are asked by turns, the other one stopped meanwhile:
``users`` streams at the same time, each with a prompt of its own, the likeliest tokens. A row says the medians of
tokens per second, from the first question to the last event, and of the seconds to a stream's first token. Texts are
compared as well. Writes ``results.json`` and ``table.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe.data.templates import PLAIN
from tawpipe.data.tokenizer import train_tokenizer

TEXT = "A pipeline is a row of stages; what one stage has done the next one takes up, and none of them waits for long. "
VOCABULARY = 8192
START_S = 180.0
VERSIONS = "import json, torch, transformers; print(json.dumps([torch.__version__, transformers.__version__]))"


@dataclass
class Service:
    """A service that is asked.

    Args:
        model: its name in requests.
        fields: of a request's body, besides those that both know.
    """

    name: str
    command: Sequence[str]
    port: int
    model: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A stream that has ended: its text and tokens, and seconds to the first of these."""

    text: str
    prompt_tokens: int
    tokens: int
    first_s: float


def make_model(folder: Path, layers: int, hidden: int) -> float:
    """A model with random values, which never draws the token that ends a text; millions of parameters."""
    tokenizer: Any = train_tokenizer([TEXT * 20], VOCABULARY)
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for unwanted in (tokenizer.eos_token_id, slice(len(tokenizer), None)):  # others are likelier than a logit of 0
            model.lm_head.weight[unwanted] = 0
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def running(service: Service, log: Path, threads: int) -> Iterator[subprocess.Popen[bytes]]:
    """The service in a process, until the block ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(service.command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        end = time.monotonic() + START_S
        while not is_ready(service.port):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{service.name} has not started:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def ask(service: Service, user: int, words: int, tokens: int) -> Answer:
    """One stream, read to its end."""
    content = " ".join((f"User {user} asks: " + TEXT * (1 + words // 20)).split()[:words])
    body = {"model": service.model, "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    body |= {"stream": True, "temperature": 0, **service.fields}
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=300)
    began, first_s, text, usage = time.perf_counter(), 0.0, "", {}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{service.name}: {response.status} {response.read().decode()}")
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise SystemExit(f"{service.name}: {event}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            part = choice["delta"].get("content") or ""
            if part and not first_s:
                first_s = time.perf_counter() - began
            text += part
    connection.close()
    return Answer(text, usage["prompt_tokens"], usage["completion_tokens"], first_s)


def machine_s() -> float:
    """Seconds of processors that the machine has worked, all processes together."""
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def seconds_of(pid: int) -> float:
    """Seconds of processors of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def turn(service: Service, pid: int, users: int, given: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    """All users ask one service at the same time; what that took, and the texts."""
    before, busy, asking = machine_s(), seconds_of(pid), seconds_of(os.getpid())
    began = time.perf_counter()
    with ThreadPoolExecutor(users) as threads:
        answers = list(threads.map(lambda user: ask(service, user, given.words, given.tokens), range(users)))
    wall = time.perf_counter() - began
    busy, asking = seconds_of(pid) - busy, seconds_of(os.getpid()) - asking
    tokens = sum(answer.tokens for answer in answers)
    reading = {
        "tokens": tokens,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "seconds": wall,
        "tokens_per_s": tokens / wall,
        "first_s": statistics.median(answer.first_s for answer in answers),
        "busy_ms": 1000 * busy / tokens,
        "others": max(0.0, machine_s() - before - busy - asking) / wall / (os.cpu_count() or 1),
    }
    return reading, [answer.text for answer in answers]


def measured(services: Sequence[Service], pids: Sequence[int], given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of users: the readings of both services, whose turns alternate."""
    rows = []
    for users in given.users:
        readings: list[list[dict[str, float]]] = [[] for _ in services]
        alike, wrong = 0, 0
        for repeat in range(given.repeats + 1):
            order = (0, 1) if repeat % 2 else (1, 0)
            texts: list[list[str]] = [[], []]
            for side in order:
                os.kill(pids[1 - side], signal.SIGSTOP)
                reading, texts[side] = turn(services[side], pids[side], users, given)
                os.kill(pids[1 - side], signal.SIGCONT)
                if repeat:  # the first one warms up
                    readings[side].append(reading)
            alike += sum(a == b for a, b in zip(*texts, strict=True))
            wrong += sum(a != b for a, b in zip(*texts, strict=True))
        row = {"users": users, "same_texts": alike, "other_texts": wrong}
        row |= {service.name: some for service, some in zip(services, readings, strict=True)}
        rows.append(row)
        print(line_of(row, services), flush=True)
    return rows


def line_of(row: dict[str, Any], services: Sequence[Service]) -> str:
    """A row of the table."""
    readings = [row[service.name] for service in services]
    rates = [[reading["tokens_per_s"] for reading in of_service] for of_service in readings]
    medians = [statistics.median(some) for some in rates]
    firsts, work = (
        [statistics.median(reading[name] for reading in of_service) for of_service in readings]
        for name in ("first_s", "busy_ms")
    )
    others = max(reading["others"] for of_service in readings for reading in of_service)
    cells = [f"{row['users']}"]
    cells += [f"{median:.1f} ({min(some):.1f} to {max(some):.1f})" for median, some in zip(medians, rates, strict=True)]
    cells += [
        f"{medians[0] / medians[1]:.2f}",
        *(f"{seconds:.2f}" for seconds in firsts),
        *(f"{ms:.1f}" for ms in work),
    ]
    cells += [f"{row['same_texts']} of {row['same_texts'] + row['other_texts']}", f"{others:.0%}"]
    return "| " + " | ".join(cells) + " |"


def table(rows: Sequence[dict[str, Any]], services: Sequence[Service], about: dict[str, Any]) -> str:
    """All rows as a page."""
    names = [service.name for service in services]
    rates, firsts = (f"{name}, tokens/s" for name in names), (f"{name}, first token, s" for name in names)
    work = (f"{name}, ms of a processor for a token" for name in names)
    heads = ("users", *rates, "ratio", *firsts, *work, "same texts", "others' work")
    lines = [
        "# One process beside `transformers serve`",
        "",
        f"`{about['command']}`, {about['date']}, {about['machine']}.",
        "",
        f"{about['model']}. {about['asked']} Medians of {about['repeats']} turns (least to most). Others' work: share "
        "of the processors that other processes had in the busiest turn.",
        "",
        *(f"* {name}: `{about['commands'][name]}`, {about['versions'][name]}" for name in names),
        "",
        "| " + " | ".join(heads) + " |",
        "|" + " --- |" * len(heads),
        *(line_of(row, services) for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival-python", default=sys.executable, help="of an environment with transformers[serving]")
    parser.add_argument("--rival-options", default="--continuous-batching", help="of transformers serve, besides")
    parser.add_argument("--options", default="", help="of tawpipe serve, besides")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--words", type=int, default=40, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each service")
    parser.add_argument("--out", type=Path, help="folder for results.json and table.md")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the services end, too

    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary, "model")
        millions = make_model(folder, given.layers, given.hidden)
        ports = free_port(), free_port()
        slots = max(given.users)
        ours = f"serve --model {folder} --port {ports[0]} --device cpu --dtype float32 --slots {slots} --context 512"
        theirs = f"serve {folder} --port {ports[1]} --host 127.0.0.1 --device cpu --dtype float32 {given.rival_options}"
        services = (
            Service(
                "tawpipe",
                [sys.executable, "-m", "tawpipe", *shlex.split(f"{ours} {given.options}")],
                ports[0],
                folder.name,
                {"stream_options": {"include_usage": True}},
            ),
            Service(
                "transformers",
                [given.rival_python, "-m", "transformers.cli.transformers", *shlex.split(theirs)],
                ports[1],
                str(folder),
            ),
        )
        pids = []
        for service in services:
            pids.append(stack.enter_context(running(service, Path(temporary, service.name), given.threads)).pid)
        rows = measured(services, pids, given)
        versions = {}
        for service in services:
            told = subprocess.run([service.command[0], "-c", VERSIONS], check=True, capture_output=True, text=True)
            versions[service.name] = "torch {}, transformers {}".format(*json.loads(told.stdout.splitlines()[-1]))
        shown = lambda service: shlex.join(service.command[3:]).replace(str(folder), "MODEL")  # noqa: E731
        prompt = rows[0]["tawpipe"][0]["prompt_tokens"] / rows[0]["users"]
        about = {
            "command": shlex.join(["python", "benchmarks/serve_rival.py", *_shown(sys.argv[1:])]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} processors, {given.threads} threads a service",
            "model": f"A Llama of {millions:.0f} million random parameters, {given.layers} layers, {given.hidden} wide",
            "asked": f"Every user asks with {prompt:.0f} tokens and gets {given.tokens}, the likeliest, as a stream.",
            "repeats": given.repeats,
            "commands": {
                "tawpipe": f"tawpipe {shown(services[0])}",
                "transformers": f"transformers {shown(services[1])}",
            },
            "versions": versions,
        }
        text = table(rows, services, about)
        print(text)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "table.md").write_text(text, encoding="utf-8")
            content = json.dumps({**about, "rows": rows}, indent=1)
            (given.out / "results.json").write_text(content + "\n", encoding="utf-8")
    return 0


def _shown(words: Sequence[str]) -> list[str]:
    """The command's words, with the place of the environment left out."""
    at = words.index("--rival-python") + 1 if "--rival-python" in words else -1
    return ["ENV/bin/python" if number == at else word for number, word in enumerate(words)]


if __name__ == "__main__":
    sys.exit(main())
