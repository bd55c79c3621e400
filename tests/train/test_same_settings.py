"""Ranks with other settings: it is said which one differs, and what every rank has."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tawpipe.errors import UserError
from tawpipe.train.settings.config import load_config
from tawpipe.train.start import require_alike


class Rank:
    """A world whose ranks are threads."""

    group = "threads"

    def __init__(self, rank: int, texts: list[str], barrier: threading.Barrier) -> None:
        self._rank, self._texts, self._barrier = rank, texts, barrier

    def gather_texts(self, text: str) -> list[str]:
        self._texts[self._rank] = text
        self._barrier.wait(30)
        texts = list(self._texts)
        self._barrier.wait(30)
        return texts

    def wait_patiently(self) -> None: ...

    def broadcast_text(self, text: str) -> str:
        return self.gather_texts(text)[0]


def on_ranks(act: Callable[[int, Any], str], size: int) -> list[str]:
    """The results of ``act`` on ``size`` ranks."""
    texts, barrier = [""] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: act(rank, Rank(rank, texts, barrier)), range(size)))


def refusals(*words: Sequence[str]) -> list[str]:
    """What every rank says of settings from these words, a command line for each rank."""

    def refused(rank: int, world: Any) -> str:
        try:
            require_alike(load_config([*words[rank]]), world)
        except UserError as error:
            return str(error)
        return ""

    return on_ranks(refused, len(words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([["--seed", "1"], ["--seed", "1"], ["--seed", "2"]], "--seed is 2 instead of 1 on rank 2 (HOST)"),
        ([["--optimizer.eps", "1e-6"], []], "--optimizer.eps is 1.0e-08 instead of 1.0e-06 on rank 1 (HOST)"),
        (
            [[], ["--data", "a*", "b", "--sample.prompt", "漢"]],
            "--data is [a*, b] instead of [stdlib] (and 1 more) on rank 1 (HOST)",
        ),
        (
            [["--steps", "1"], ["--steps", "2"], ["--steps", "3"]],
            "--steps is 2 instead of 1 on rank 1 (HOST); --steps is 3 instead of 1 on rank 2 (HOST)",
        ),
    ],
)
def test_differing_setting_is_named_with_values_and_ranks(words, expected):
    host = socket.gethostname()
    said = f"settings: got 'different ones'; the same on every rank; {expected}, unlike on rank 0 (HOST)"
    assert refusals(*words) == [said.replace("HOST", host)] * len(words)


def test_cache_folder_may_differ_between_machines():
    assert refusals(["--cache-dir", "/a"], ["--cache-dir", "/b"], []) == ["", "", ""]
