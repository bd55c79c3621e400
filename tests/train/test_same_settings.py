"""Ranks with other settings: it is said which one differs, and what every rank has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tawpipe.errors import UserError
from tawpipe.runtime.world import World
from tawpipe.train.config import load_config
from tawpipe.train.start import refuse_other_settings


class Rank:
    """A world whose ranks are threads."""

    differences = World.differences

    def __init__(self, rank: int, texts: list[str], barrier: threading.Barrier) -> None:
        self._rank, self._texts, self._barrier = rank, texts, barrier

    def gather_texts(self, text: str) -> list[str]:
        self._texts[self._rank] = text
        self._barrier.wait(30)
        texts = list(self._texts)
        self._barrier.wait(30)
        return texts

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
            refuse_other_settings(load_config([*words[rank]]), world)
        except UserError as error:
            return str(error)
        return ""

    return on_ranks(refused, len(words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [["--seed", "1"], ["--seed", "1"], ["--seed", "2"]],
            "--seed: got '1 on rank 0, 1; 2 on rank 2'; the same on every rank",
        ),
        (
            [["--optimizer.eps", "1e-6"], []],
            "--optimizer.eps: got '1.0e-06 on rank 0; 1.0e-08 on rank 1'; the same on every rank",
        ),
        (
            [[], ["--data", "a*", "b", "--sample.prompt", "漢"]],
            "--data: got '[stdlib] on rank 0; [a*, b] on rank 1'; the same on every rank, "
            "and --sample.prompt (['def '] on rank 0; [漢] on rank 1)",
        ),
        (
            [["--steps", "1"], ["--steps", "2"], ["--steps", "3"]],
            "--steps: got '1 on rank 0; 2 on rank 1; 3 on rank 2'; the same on every rank",
        ),
    ],
)
def test_the_setting_that_differs_is_named_with_all_its_values(words, expected):
    assert refusals(*words) == [expected] * len(words)


def test_a_cache_folder_may_be_each_machines_own():
    assert refusals(["--cache-dir", "/a"], ["--cache-dir", "/b"], []) == ["", "", ""]


def test_a_name_that_one_rank_lacks_differs():
    said = on_ranks(lambda rank, world: str(world.differences({"a": "1"} if rank else {"a": "1", "b": "2"})), 2)
    assert said == [str({"b": "2 on rank 0; none on rank 1"})] * 2
