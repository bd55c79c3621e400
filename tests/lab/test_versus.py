"""The check ``rivals``: equal training on all sides, predictions before measurements, and an end in every case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from processes import wait_for
from tawpipe.cli import main
from tawpipe.plan.machine.devices import Device
from tawpipe.plan.machine.machine import uniform
from tawpipe.prove import checks as listed_checks
from tawpipe.prove import run as run_module
from tawpipe.prove.checks import Check
from tawpipe.prove.models import alone
from tawpipe.prove.outcome import FAILS, HOLDS, Outcome
from tawpipe.prove.private import local_names, scrub
from tawpipe.prove.run import page_file, prove
from tawpipe.runtime.world import World
from tawpipe.simulate import LinkModel
from tawpipe_lab.command import checks
from tawpipe_lab.versus import check, clock, forecast, page, sides

CPU = torch.device("cpu")
TINY = ((16, 1), (32, 2), (48, 2))
MARKER = "mkmarkermk"
OWN = """
import torch
from tawpipe_lab.versus.sides import Sharded

def build(task):
    assert task.world.size == 2
    if {broken}:
        raise OSError("/secret/mkmarkermk/file of mkmarkermk-host")
    return Sharded(task, 2, "full").step
"""


@contextmanager
def tiny(**changes: Any):
    """Small models, and few of the rows and steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(forecast.MODELS, "cpu", TINY)
        patch.setitem(forecast.SIZES, "cpu", (8, 64, 16))
        for module in (forecast, check):
            for name, value in changes.items():
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        patch.setattr(page, "STEPS", check.STEPS)
        yield


def made_up(*, models: int = 2, file: bool = False) -> dict[str, Any]:
    """A forecast that needs no measurements."""
    predicted = {"seconds": 0.1, "bytes": 4_000_000, "gib": 0.5}
    facts = {"length": 16, "tokens": 128, "parameters": 9000, "compute_s": 0.1, "least_bytes": 1, "limit_s": 0.1}
    names = [*((name, "ours") for name in forecast.OURS), *((name, "fsdp2") for name in forecast.THEIRS)]
    rows = [{"name": name, "side": side, "predicted": predicted} for name, side in names]
    for number, row in enumerate(rows):
        full = number % 2
        row |= {"recompute": "full" if full else "none", "micro_batch": 2 if full else 4}
        row["settings"] = forecast.THEIRS.get(row["name"], {"strategy": row["name"], "recompute": row["recompute"]})
    if file:
        rows.append({"name": forecast.FILE, "side": "file", "recompute": "", "micro_batch": 0, "predicted": None})
    names = ("small", "large")[:models]
    sizes = {"small": (16, 2), "large": (32, 2)}
    return {
        "models": {
            name: {"hidden": sizes[name][0], "layers": sizes[name][1], "build_s": 1.0, "total_s": 9.0, **facts}
            for name in names
        },
        "rows": [{"model": name} | json.loads(json.dumps(row)) for name in names for row in rows],
        "left_out": {},
        "links": {"between": {"gbit_s": 1.0, "latency_us": 30.0}},
    }


def rivals_on(world: World, *, out: str, file: str = "", models: int = 2, **changes: Any) -> dict[str, Any]:
    """Run the check with a forecast that is not measured."""
    listed = checks(Namespace(rival=file, only=["rivals"]))
    changes |= {
        "forecast": lambda *_, file: made_up(models=models, file=file),
        "probe": lambda _: SimpleNamespace(machine=None),
    }
    with tiny(**changes):
        return vars(prove(world, Path(out), only=["rivals"], more=listed))


def test_all_sides_train_alike_and_a_broken_loop_of_the_user_is_named(pool, tmp_path):
    (file := tmp_path / "loop.py").write_text(OWN.format(broken=True))
    given = {"models": 1, "STEPS": {"small": (1, 2, 1)}, "file": str(file)}
    proof = pool.run(f"{__name__}:rivals_on", 2, 1, out=str(tmp_path / "a.json"), **given)[0]
    row = proof["checks"]["rivals"]
    *rows, broken = row["numbers"]["rows"]
    assert row["status"] == FAILS and (broken["name"], broken["failed"]) == (forecast.FILE, "OSError")
    assert [row["name"] for row in rows] == [*forecast.OURS, *forecast.THEIRS]
    assert all(len(row["seconds"]) == 2 and len(row["losses"]) == 3 and row["attention"] for row in rows)
    assert row["numbers"]["losses_differ"] < 1e-5  # fp32: only the order of sums differs
    assert json.loads((tmp_path / "a.json").read_text()) == proof
    for text in ((tmp_path / "a.json").read_text(), (tmp_path / "a.html").read_text()):
        assert "FSDP2, HSDP" in text and MARKER not in text and str(tmp_path) not in text


@pytest.mark.slow
def test_large_model_is_built_timed_and_freed_twice(pool, tmp_path):
    (file := tmp_path / "loop.py").write_text(OWN.format(broken=False))
    given = {"STEPS": {"small": (1, 1, 1), "large": (1, 1, 2)}, "file": str(file)}
    row = pool.run(f"{__name__}:rivals_on", 2, 1, out=str(tmp_path / "a.json"), **given)[0]["checks"]["rivals"]
    assert row["status"] == HOLDS, row["note"]
    large = [row for row in row["numbers"]["rows"] if row["model"] == "large"]
    assert len(large) == 7 and all(len(row["seconds"]) == 2 and len(row["losses"]) == 4 for row in large)


def test_rows_without_time_left_are_named(pool, tmp_path):
    row = pool.run(f"{__name__}:rivals_on", 2, 1, out=str(tmp_path / "a.json"), LIMIT_S=0.0)[0]["checks"]["rivals"]
    assert not any("seconds" in row for row in row["numbers"]["rows"])
    assert len(row["numbers"]["left_out"]) == 12 and "large: FSDP2" in row["numbers"]["left_out"]


@pytest.mark.slow
def test_forecast_chooses_models_and_settings_that_fit():
    world: Any = SimpleNamespace(size=2, device=CPU)
    machine = uniform(2, 1, between=LinkModel(1e6), inside=LinkModel(1e9), device=Device("CPU", 1 << 33))
    with tiny():
        numbers = forecast.forecast(world, machine, torch.float32, file=True)
        slow = uniform(2, 1, between=LinkModel(1e2), inside=LinkModel(1e9), device=Device("CPU", 1 << 33))
        few = forecast.forecast(world, slow, torch.float32, file=False)
    assert list(numbers["models"]) == ["small", "large"] and not numbers["left_out"]
    assert numbers["models"]["small"]["parameters"] < numbers["models"]["large"]["parameters"]
    assert len(numbers["rows"]) == 14 and all(row["predicted"] for row in numbers["rows"] if row["side"] != "file")
    by_name = {row["name"]: row["predicted"]["bytes"] for row in numbers["rows"] if row["predicted"]}
    assert by_name["FSDP2"] > by_name["FSDP2, kept"] > by_name["FSDP2, HSDP"]
    assert list(few["models"]) == ["small"] and "large" in few["left_out"]


RANK = """
import os, sys, time
sys.path[:0] = {path!r}
import test_versus as tests
from tawpipe_lab.versus import check
from tawpipe.runtime.world import connect

step = check.Rivals._step
def slowly(self, row, side, task, number, *, timed):
    if row["name"] == "FSDP2, HSDP" and timed:
        open(sys.argv[2] + str(self.world.rank), "w").close()
        time.sleep(4)
    step(self, row, side, task, number, timed=timed)
check.Rivals._step = slowly
tests.rivals_on(connect(device="cpu"), out=sys.argv[1], PATIENCE_S=30.0, models=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ended", "ends_by"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_rows_survive_a_rank_that_ends_or_hangs_and_the_other_rank_ends(tmp_path, ends_by, ended):
    """No launcher looks after these processes, as if they were on machines of their own."""
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(path=[str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]))
    port = str(29700 + os.getpid() % 200)
    words = [sys.executable, str(script), str(tmp_path / "a.json"), str(tmp_path / "reached")]
    ranks = [
        subprocess.Popen(
            words,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        assert wait_for(lambda: (tmp_path / f"reached{ended}").exists(), seconds=240)
        ranks[ended].send_signal(ends_by)
        _, words_of_other = ranks[1 - ended].communicate(timeout=240)
        assert ranks[1 - ended].returncode == 1, words_of_other
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    row = json.loads((tmp_path / "a.json").read_text())["checks"]["rivals"]
    assert row["numbers"]["rows"][0]["seconds"]  # of a row that was timed before
    if ended == 1:
        assert row["status"] == FAILS and "small model, FSDP2, HSDP, step" in row["note"]
        assert "another process" in row["note"] or "a process may have ended" in row["note"]
    assert all(row["predicted"] for row in row["numbers"]["rows"]) and not list(tmp_path.glob("*.new"))


def test_no_name_of_the_machine_or_its_user_reaches_the_file(tmp_path, monkeypatch, capsys):
    """Names of host and user, address, path, command line and traceback hold a marker each."""

    def numbers(world: World, *, keep: Any) -> Outcome:
        keep(Outcome(None, f"at {tmp_path}/{MARKER}/x", {"where": [f"~/{MARKER}", f"host-{MARKER}", "10.20.30.40:99"]}))
        raise OSError(2, f"no {MARKER}", f"/tmp/{MARKER}")

    monkeypatch.setattr("platform.node", lambda: f"host-{MARKER}.net")
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(name, f"user-{MARKER}")
    monkeypatch.setenv("MASTER_ADDR", f"address-{MARKER}")
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"/var/{MARKER}")
    monkeypatch.setenv("NCCL_COMM_ID", "10.20.30.40:99")
    monkeypatch.setenv("NCCL_HOSTID", f"rack-7-{MARKER}")
    monkeypatch.setattr(sys, "argv", ["tawpipe", "prove", "--only", "it", f"--out=/x/{MARKER}"])
    (folder := tmp_path / MARKER).mkdir()
    shown = Check("it", "it is", numbers, alone=False, keeps=True, page=lambda *given: json.dumps(given))
    plain = Check("fails", "it is", lambda _: numbers(alone(CPU), keep=lambda _: None), alone=True)
    monkeypatch.setattr(run_module, "CHECKS", (plain,))
    prove(alone(CPU), folder / "a.json", only=["it", "fails"], more=[shown])
    assert MARKER in capsys.readouterr().out  # the console has it
    content = (folder / "a.json").read_text()
    found = json.loads(content)
    for text in (content, page_file(folder / "a.json").read_text()):
        assert MARKER not in text and "10.20.30" not in text and "Traceback" not in text
    assert found["setting"]["options"] == "--only --out" and "NCCL_COMM_ID" in found["setting"]["nccl"]
    assert found["checks"]["it"]["note"] == found["checks"]["fails"]["note"] == "FileNotFoundError"
    assert found["checks"]["it"]["numbers"]["where"]  # what was kept before


def test_scrubbing_keeps_numbers_units_and_dates():
    assert local_names()
    for text in ("2026-11-30 01:02:03", "12 tokens/s, 1.5 GB/s", "2.13.0+cpu", "0/0/0,32x10/20", "1 node x 2"):
        assert scrub(text, ["nobody"]) == text
    assert scrub("fe80::1 and 2001:db8:0:0:1:2:3:4", []) == "… and …"


def test_check_runs_only_when_named_and_its_option_only_beside_it(monkeypatch, tmp_path, capsys):
    ran: list[list[str]] = []
    monkeypatch.setattr(
        run_module, "prove", lambda world, out, *, only, more: ran.append([*only]) or SimpleNamespace(failed=[])
    )
    out = ["--device", "cpu", "--out", str(tmp_path / "a.json")]
    assert main(["prove", "--only", "rivals", *out]) == 0 and ran == [["rivals"]]
    assert "rivals" not in [check.name for check in listed_checks.CHECKS]
    assert main(["prove", "--only", "other", *out]) == 2 and "rivals" in capsys.readouterr().err
    (file := tmp_path / "loop.py").write_text("")
    assert main(["prove", "--rival", str(file), *out]) == 2 and "--only rivals" in capsys.readouterr().err


def test_deadline_ends_the_process_after_its_last_word(monkeypatch):
    ended: list[Any] = []
    monkeypatch.setattr(clock.os, "_exit", lambda code: (ended.append(code), deadline.close()))
    deadline = clock.Deadline(lambda: ended.append("late"))
    deadline.allow(0.0)
    wait_for(lambda: 1 in ended, seconds=10)
    assert ended == ["late", 1]


def test_bytes_of_cards_are_added_and_too_few_are_not_visible(tmp_path):
    for name in ("eth0", "eth1"):
        (tmp_path / name / "device").mkdir(parents=True)
    before, after = {"eth0": 10, "eth1": 0, "br0": 0}, {"eth0": 110, "eth1": 50, "br0": 150}
    assert clock.grown_bytes(before, after, tmp_path) == 150
    assert clock.grown_bytes(before, after, tmp_path / "none") == 150 and not clock.grown_bytes({}, {})
    assert clock.visible_bytes(10, 1000) == "not visible" and clock.visible_bytes(900.4, 1000) == 900


def test_initial_values_do_not_depend_on_where_a_shard_begins():
    whole = sides.initial("layers.0.weight", 0, 1000, CPU)
    assert torch.equal(sides.initial("layers.0.weight", 300, 200, CPU), whole[300:500])
    assert abs(float(whole.std()) - sides.DEVIATION) < 2e-3 and abs(float(whole.mean())) < 2e-3
    assert torch.equal(sides.initial("norm.weight", 0, 4, CPU), torch.ones(4))


def test_page_shows_rows_that_we_lose_and_what_was_not_visible():
    numbers = made_up()
    for row in numbers["rows"]:
        seconds = 1.0 if row["side"] == "ours" else 0.5
        row |= {"seconds": [seconds] * 5, "median": seconds, "spread": 0.0, "bytes": "not visible", "losses": [4.0]}
    numbers["rows"][0] |= {"failed": "TypeError"}
    setting = {"processes": "2", "date": "now", "device": "CPU", "versions": {}, "nccl": {"NCCL_DEBUG": "WARN"}}
    text = page.rivals_page(setting, {"status": HOLDS, "note": "yes", "numbers": numbers})
    assert text.index("FSDP2, kept") < text.index("tawpipe-spread")  # the fastest first
    assert "not visible" in text and "failed: TypeError" in text and "NCCL_DEBUG" in text
    assert "<svg" in text and "<script src" not in text


def test_losses_of_a_second_build_are_compared_with_the_first():
    rows = [
        {"model": "large", "losses": [4.0, 3.0, 2.0, 1.0, 4.0, 3.0, 2.0, 1.0]},
        {"model": "large", "losses": [4.0, 3.3]},
    ]
    assert check.disagreement(rows) == pytest.approx(0.3 / 3.3)
    assert check.disagreement([]) == 0.0
