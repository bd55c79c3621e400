"""Checks on the user's devices: what they find is written, what fails says so, what cannot be told stays unproven."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tawpipe.cli import main
from tawpipe.prove import checks, endings, exactness, memory, run, speed
from tawpipe.prove.checks import Check
from tawpipe.prove.models import alone, llama
from tawpipe.prove.outcome import FAILS, HOLDS, UNPROVEN, Outcome
from tawpipe.prove.run import prove
from tawpipe.runtime.world import World


def numbers(world: World, *, out: str, only: list[str]) -> dict[str, Any]:
    return vars(prove(world, Path(out), only=only))


def test_numbers_of_several_processes_hold(pool, tmp_path):
    numbers = ["exact", "bits", "chunks", "order"]
    found = pool.run(f"{__name__}:numbers", 2, 1, out=str(tmp_path / "found.json"), only=numbers)[0]
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert {name: row["status"] for name, row in found["checks"].items()} == dict.fromkeys(numbers, HOLDS)
    differences = found["checks"]["exact"]["numbers"]["differences"]
    assert {"tawpipe-spread", "tawpipe-whole", "hsdp", "flat", "weipipe"} <= differences.keys()
    assert max(differences.values()) < exactness.LIMIT
    assert any("NCCL" in claim for claim in found["unproven"])


def test_rows_over_the_processes_of_a_node_hold(pool, tmp_path):
    found = pool.run(f"{__name__}:numbers", 1, 2, out=str(tmp_path / "found.json"), only=["sets"])[0]
    assert found["checks"]["sets"]["status"] == HOLDS


def test_what_fails_or_breaks_says_so_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    def broken(world: World) -> Outcome:
        raise RuntimeError("no kernel image")

    listed = (
        Check("wrong", "two and two are five", lambda world: Outcome(False, "four", {"sum": 4})),
        Check("broken", "it runs", broken, alone=True),
        Check("far", "it is quick", broken, needs=("cuda", "several")),
        Check("right", "it is right", lambda world: Outcome(True, "yes")),
    )
    monkeypatch.setattr(run, "CHECKS", listed)
    found = prove(alone(torch.device("cpu")), tmp_path / "found.json")
    statuses = {name: row["status"] for name, row in found.checks.items()}
    assert statuses == {"wrong": FAILS, "broken": FAILS, "far": UNPROVEN, "right": HOLDS}
    assert found.failed == ["wrong", "broken"]
    said = capsys.readouterr().out
    assert "two and two are five: four" in said and "no kernel image" in said and "needs a GPU and several" in said


@pytest.mark.slow
def test_memory_of_a_row_is_as_predicted():
    config = llama(hidden=128, layers=2, heads=2, vocabulary=500)
    row = memory.by_itself(config, [512], "none", torch.float32, torch.device("cpu"))
    assert row["passing_error"] == pytest.approx(0, abs=0.05)


def test_the_command(tmp_path, monkeypatch, capsys):
    def sums(world: World) -> Outcome:
        return Outcome(world.size == 2, "four")

    out = str(tmp_path / "found.json")
    assert main(["prove", "--only", "speeed", "--out", out, "--device", "cpu"]) == 2
    assert "--only" in capsys.readouterr().err
    assert main(["prove", "--out", str(tmp_path / "missing" / "found.json")]) == 2
    assert main(["prove", "--nproc", "0"]) == 2
    for listed in (run, checks):
        monkeypatch.setattr(listed, "CHECKS", (Check("sums", "there are two", sums),))
    assert main(["prove", "--out", out, "--device", "cpu"]) == 1
    assert json.loads(Path(out).read_text())["checks"]["sums"]["status"] == FAILS


def test_a_script_that_ends_badly_or_not_at_all_fails(monkeypatch):
    given: list[dict[str, Any]] = []
    ends: list[Any] = [
        subprocess.CompletedProcess([], 0, "1.0", "a warning"),
        subprocess.CompletedProcess([], -6, "", "first\nterminate called"),
        subprocess.TimeoutExpired("python", 120),
    ]

    def ended(words: list[str], **how: Any) -> Any:
        given.append(how)
        end = ends[len(given) - 1]
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(subprocess, "run", ended)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TAWPIPE_LOCAL_LAUNCHER", "1")
    monkeypatch.setenv("KEPT", "1")
    found = [endings.without_close(alone(torch.device("cpu"))) for _ in ends]
    assert [one.holds for one in found] == [True, False, False]
    assert found[1].numbers == {"said": "terminate called"} and "not ended after" in found[2].note
    for how in given:  # it is a process of its own, of no launcher's
        assert "RANK" not in how["env"] and "TAWPIPE_LOCAL_LAUNCHER" not in how["env"] and how["env"]["KEPT"] == "1"


def test_a_kernel_that_is_not_the_best_fails_and_offloading_may_change_no_loss(monkeypatch):
    here = alone(torch.device("cpu"))
    for name, ok in (("flash attention 3", True), ("flash attention 2; 3 would be faster", False)):
        monkeypatch.setattr(speed, "kernel_of_model", lambda *_, name=name: name)
        assert speed.kernel(here) == Outcome(ok, name, {"kernel": name})
    settings: list[int] = []

    def seconds(world: World, config: Any, dtype: Any, given: Any, tokens: int) -> Any:
        settings.append(given.offloaded_layers)
        return [9.0, 9.0, 1.0 + len(settings) % 2, 2.0, 3.0], losses[len(settings) - 1]

    monkeypatch.setattr(speed, "_seconds", seconds)
    losses = [[1.0], [1.0], [1.0], [1.5]]
    equal, other = speed.offload(here), speed.offload(here)
    assert equal.holds and not other.holds and settings[0] == 0 < settings[1] and "differ" in other.note
    assert equal.numbers["seconds"] == [2.0, 2.0]  # of the steps after the first two
