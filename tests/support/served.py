"""A service in this process, whose model repeats what it is told: asked by whoever has its address."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from openai import OpenAI

from scripted_engine import ScriptedEngine
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.serving.passes import Sampling, SlotLayout
from tawpipe.serving.requests import Slots
from tawpipe.serving.service.api import Service
from tawpipe.serving.service.engine import FAILED, answered_by_http, bound_socket
from tawpipe.serving.service.settings import ServeConfig
from tawpipe.serving.service.text import Prompts

NAME = "parrot"
CONFIG = ServeConfig(max_body_kib=20, max_tokens=600, request_s=60.0)
ROOM = SlotLayout(groups=2, slots=4, context=1024, chunk=64)


@cache
def tokenizer_of_bytes() -> Any:
    """Whose tokens are single bytes; without a chat template."""
    return train_tokenizer(["x"], 257)


def repeated(prompt: tuple[int, ...]) -> list[int]:
    """The last message of a prompt, or a prompt without messages; and the token that ends a text."""
    tokenizer = tokenizer_of_bytes()
    text = tokenizer.decode(prompt, skip_special_tokens=True)
    said = text.rpartition("<|user|>\n")[2].removesuffix("\n<|assistant|>\n")
    return [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]


@dataclass
class Served:
    """A running service."""

    slots: Slots
    engine: Any
    port: int
    key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def client(self) -> OpenAI:
        """OpenAI's own, which asks once."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=60)


@contextmanager
def served(
    room: SlotLayout = ROOM,
    *,
    config: ServeConfig = CONFIG,
    waiting: int = 64,
    key: str | None = None,
    pass_s: float = 0.0,
    fails_at: int | None = None,
    engine: Any = None,
) -> Iterator[Served]:
    """A service until the block ends; no slot is in use then.

    Args:
        engine: computes in the place of a scripted one.
    """
    tokenizer = tokenizer_of_bytes()
    slots = Slots(room, waiting=waiting, idle_s=0.05)
    engine = engine or ScriptedEngine(room, repeated, pass_s=pass_s, fails_at=fails_at)
    prompts, stops = Prompts(tokenizer, "plain"), {tokenizer.eos_token_id}
    service = Service(config, slots, tokenizer, prompts, NAME, stops, Sampling(), len(tokenizer))
    listening = bound_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]

    def run() -> None:
        try:
            engine.run(slots)
        except RuntimeError:
            slots.fail(FAILED)

    running = threading.Thread(target=run)
    with answered_by_http(service.application(key), listening, most=500):
        running.start()
        try:
            yield Served(slots, engine, port, key)
        finally:
            slots.drain()
            running.join(30)
    assert not running.is_alive() and slots.in_use == slots.waiting == 0


def resident_bytes() -> int:
    """Memory of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
