"""Faults on purpose, and what is there against them: saves, checksums, watchdog, signals, restarts, spikes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tawpipe.schedule.build import build_training
from transformers import LlamaForCausalLM

from cases import llama
from schedules import llama as sizes
from tawpipe import Pipeline, adamw
from tawpipe.checkpoint.save import Saving
from tawpipe.checkpoint.state import MARKER, damaged, file_name, read_record, sealed
from tawpipe.checkpoint.store import Checkpoints, RunState, read_run, remove
from tawpipe.cli import main
from tawpipe.console import Console
from tawpipe.errors import RunError, UserError
from tawpipe.launch.launcher import Shape, launch
from tawpipe.runtime.faults import KINDS, ONLY, PLACES, Fault, Injector, flip_a_bit, parse_faults, place_of, spoil
from tawpipe.runtime.flight import write_record
from tawpipe.runtime.lanes import Doing
from tawpipe.runtime.watchdog import Watchdog
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Action, Lane
from tawpipe.schedule.spec import Knobs, share_micro_batches
from tawpipe.topology import Topology
from tawpipe.train.config import TrainConfig, load_config
from tawpipe.train.history import Mark, write_mark
from tawpipe.train.run import Start, _find_state, _second_copies
from tawpipe.train.spikes import Spikes
from tawpipe.train.stopping import StopRequest
from tawpipe.train.stragglers import Stragglers

ALONE = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)


# faults as text


@given(
    rank=st.integers(0, 999),
    step=st.integers(1, 10**6),
    place=st.sampled_from(PLACES),
    kind=st.sampled_from(KINDS),
    number=st.none() | st.integers(0, 99),
)
def test_a_fault_is_read_as_it_is_written(rank, step, place, kind, number):
    text = f"rank={rank},step={step},at={place.upper()}{'' if number is None else f':{number}'},kind={kind}"
    if place not in ONLY.get(kind, PLACES):
        with pytest.raises(UserError, match="--inject"):
            Fault.parse(text)
        return
    assert Fault.parse(text) == Fault(rank, step, place, kind, number)


@given(st.text() | st.text(alphabet="rankstepkind=,:;0123456789-"))
def test_other_text_is_named(text):
    try:
        parse_faults(text)
    except UserError as error:
        assert error.setting == "--inject"


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "rank=1",
        "rank=1,rank=2",
        "rank=1,step=0,at=push,kind=kill",
        "rank=-1,step=2,at=push,kind=kill",
        "rank=1,step=2,at=moon,kind=kill",
        "rank=1,step=2,at=push:,kind=kill",
        "rank=1,step=2,at=push,kind=magic",
        "rank=1,step=2,at=load,kind=nan",
        "rank=1,step=2,at=push,kind=kill,seconds=-1",
        "rank=1,step=2,at=push,kind=slow,seconds=nan",
    ],
)
def test_what_cannot_be_injected_is_refused(text):
    with pytest.raises(UserError, match="--inject"):
        parse_faults(text)


# where faults strike


@pytest.fixture(scope="module")
def schedule():
    return build_training(sizes(3), Topology.grid(2, 2), Knobs("tawpipe-spread", share_micro_batches(4, 4)))


def test_every_place_of_a_schedule_is_known(schedule):
    found = {place_of(action) for action in schedule.programs[0]}
    assert found >= {"pull", "gather", "forward", "backward", "reduce", "push", "update"}


def test_a_place_that_is_not_there_is_named(schedule):
    Injector([Fault(0, 1, "push", "kill")], 0, restart=0).check(schedule, 0)
    Injector([Fault(1, 1, "push", "kill", number=77)], 0, restart=0).check(schedule, 0)  # another rank's
    with pytest.raises(UserError, match="push:77"):
        Injector([Fault(0, 1, "push", "kill", number=77)], 0, restart=0).check(schedule, 0)
    one_node = build_training(sizes(3), Topology.grid(1, 2), Knobs("tawpipe-spread", share_micro_batches(4, 2)))
    with pytest.raises(UserError, match="pull"):
        Injector([Fault(0, 1, "pull", "kill")], 0, restart=0).check(one_node, 0)


def test_a_fault_happens_once_and_in_its_start():
    action = Action.parse("COMPUTE UPDATE u3 | norm home.g.3 -> home.w.3")
    fault = Fault(0, 4, "update", "error", number=3)
    assert Injector([fault], 0, restart=1).around(action, 4, print, {}) is print
    injector = Injector([fault], 0, restart=0)
    ran: list[int] = []
    assert injector.around(action, 3, print, {}) is print
    faulty = injector.around(action, 4, lambda: ran.append(1), {})
    with pytest.raises(RuntimeError, match="injected at update in step 4"):
        faulty()
    assert not ran and injector.around(action, 4, print, {}) is print


def test_numbers_are_spoiled():
    action = Action.parse("COMPUTE UPDATE u3 | norm home.g.3 -> home.w.3")
    buffers = {"home.w.3": torch.full((4,), 1.5)}
    spoil("bitflip", action, buffers)
    assert float(buffers["home.w.3"][0]) not in (1.5, 0) and bool((buffers["home.w.3"][1:] == 1.5).all())
    spoil("nan", action, buffers)
    assert bool(buffers["home.w.3"].isnan().all())


# saving


@pytest.fixture
def pipeline():
    model = LlamaForCausalLM(llama(torch.float32).config)
    made = Pipeline(model, optimizer=adamw(1e-3), world=ALONE)
    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    made.step({"input_ids": ids, "labels": ids})
    made.drain()
    yield made
    made.close()


def weights(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    return {name: pipeline.parameter(name).clone() for name in pipeline.parameter_names}  # type: ignore[union-attr]


def test_what_is_saved_is_what_was_there_when_it_began(pipeline, tmp_path):
    before, gate = weights(pipeline), threading.Event()
    injector = Injector([], 0, restart=0)
    injector.before_save = gate.wait  # type: ignore[method-assign]
    pipeline.injector = injector
    saving = pipeline.start_saving(tmp_path / "one")
    with torch.no_grad():
        for master in pipeline.storage.master.values():
            master.mul_(2)
    assert not saving.done
    gate.set()
    saved = saving.wait()
    assert not saved.problem and saved.staged_s < 1
    pipeline.load(tmp_path / "one")
    assert all(torch.equal(before[name], value) for name, value in weights(pipeline).items())


def test_a_full_disk_is_named_and_takes_nothing_with_it(pipeline, tmp_path):
    pipeline.save(tmp_path / "step-00000001", run={"step": 1})
    before = (tmp_path / "step-00000001" / MARKER).read_text()
    pipeline.injector = Injector([Fault(0, 2, "save", "disk-full")], 0, restart=0)
    pipeline.injector.step = 2
    with pytest.raises(RunError, match="No space left on device"):
        pipeline.save(tmp_path / "step-00000001", run={"step": 2})
    assert (tmp_path / "step-00000001" / MARKER).read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    pipeline.save(tmp_path / "step-00000002")  # and the next one is written


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(pipeline, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="Permission denied"):
        pipeline.save(tmp_path / "one")


def test_a_file_in_the_way_is_named(pipeline, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file"):
        pipeline.save(tmp_path / "file" / "one")


def test_numbers_that_are_none_are_not_saved(pipeline, tmp_path):
    next(iter(pipeline.storage.master.values()))[3] = float("nan")
    with pytest.raises(RunError, match="not finite; it is not saved"):
        pipeline.save(tmp_path / "one")
    assert not list(tmp_path.iterdir())


def test_a_save_that_never_ends_is_given_up(pipeline, tmp_path):
    injector = Injector([], 0, restart=0)
    gate = threading.Event()
    injector.before_save = gate.wait  # type: ignore[method-assign]
    pipeline.injector = injector
    saving: Saving = pipeline.start_saving(tmp_path / "one")
    with pytest.raises(RunError, match="longer than 0 s"):
        saving.wait(0.1)
    gate.set()
    saving.wait()


def test_nothing_in_a_checkpoint_can_run_code(pipeline, tmp_path):
    pipeline.save(tmp_path / "one")
    assert {path.suffix for path in (tmp_path / "one").iterdir()} == {".safetensors", ".json"}


# checksums


@pytest.fixture
def history(pipeline, tmp_path) -> Path:
    checkpoints = Checkpoints(tmp_path / "checkpoints", ALONE)
    for step in (10, 20, 30):
        checkpoints.save(pipeline, RunState(step=step, samples=step, seed=0))
    return tmp_path


def test_resume_walks_back_to_what_is_sound_and_says_so(history):
    folder = history / "checkpoints"
    flip_a_bit(folder / "step-00000030" / file_name(0))
    with (folder / "step-00000020" / file_name(0)).open("r+b") as file:
        file.truncate(100)
    found = Checkpoints(folder, ALONE).find("auto")
    assert found.path == folder / "step-00000010"
    assert "step-00000030: the checksum of state-00000.safetensors" in found.passed_over[0]
    assert "step-00000020: state-00000.safetensors has 100 bytes instead of" in found.passed_over[1]
    with pytest.raises(UserError, match="checksum"):
        Checkpoints(folder, ALONE).find(str(folder / "step-00000030"))


def test_half_written_folders_are_removed_at_the_start(history):
    half = history / "checkpoints" / "step-00000040.incomplete"
    half.mkdir()
    Checkpoints(history / "checkpoints", ALONE).find("auto")
    assert not half.exists()


def test_the_command_says_what_is_sound(history, capsys):
    assert main(["checkpoint", "verify", str(history)]) == 0
    assert capsys.readouterr().out.count("sound") == 3
    flip_a_bit(history / "checkpoints" / "step-00000020" / file_name(0))
    assert main(["checkpoint", "verify", str(history)]) == 1
    assert "step-00000020  damaged: the checksum" in capsys.readouterr().out
    assert main(["checkpoint", "list", str(history)]) == 0
    assert "step 30, 30 samples" in capsys.readouterr().out
    assert main(["checkpoint", "prune", str(history), "--keep", "1", "--keep-every", "10"]) == 0
    assert len(list((history / "checkpoints").iterdir())) == 3
    assert main(["checkpoint", "prune", str(history), "--keep", "1"]) == 0
    assert [path.name for path in (history / "checkpoints").iterdir()] == ["step-00000030"]


def test_the_last_sound_checkpoint_is_not_pruned(history, capsys):
    flip_a_bit(history / "checkpoints" / "step-00000030" / file_name(0))
    assert main(["checkpoint", "prune", str(history), "--keep", "1"]) == 2
    assert "step-00000030: the checksum" in capsys.readouterr().err
    assert main(["checkpoint", "prune", str(history), "--keep", "2"]) == 0
    assert [path.name[-2:] for path in sorted((history / "checkpoints").iterdir())] == ["20", "30"]


def test_a_digit_that_turns_over_in_the_record_is_found(history):
    marker = history / "checkpoints" / "step-00000030" / MARKER
    marker.write_text(marker.read_text().replace('"samples": 30', '"samples": 31'))
    found = Checkpoints(history / "checkpoints", ALONE).find("auto")
    assert found.path is not None and found.path.name == "step-00000020"
    assert "its checksum is another one" in found.passed_over[0]


def test_what_a_crash_leaves_of_a_removal_goes_at_the_start(history, monkeypatch):
    folder = history / "checkpoints"
    monkeypatch.setattr("tawpipe.checkpoint.store.shutil.rmtree", lambda *_, **__: None)  # the crash
    remove(folder / "step-00000010")
    monkeypatch.undo()
    assert min(path.name for path in folder.iterdir()) == "step-00000010.incomplete"
    Checkpoints(folder, ALONE).find("auto")
    assert len(list(folder.iterdir())) == 2


def test_what_cannot_be_removed_stays_and_is_named(pipeline, history, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("tawpipe.checkpoint.store.remove", refuse)
    checkpoints = Checkpoints(history / "checkpoints", ALONE, keep=1)
    checkpoints.start(pipeline, RunState(step=40, samples=40, seed=0))
    saved = checkpoints.wait()
    assert saved is not None and not saved.problem and "could not be removed: Permission denied" in saved.left


@pytest.mark.parametrize("words", [["list", "nowhere"], ["prune", ".", "--keep", "0"], ["verify", "."]])
def test_the_command_complains(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", *words]) == 2
    assert "tawpipe: error" in capsys.readouterr().err


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(
    changes=st.dictionaries(st.sampled_from(["format", "parameters", "tensors", "files", "run", "step"]), json_values)
)
def test_a_record_that_makes_no_sense_is_named(changes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    good = {
        "format": 2,
        "parameters": {"w": [2, 3]},
        "tensors": {"model.w": {"numel": 6, "chunks": [[0, 6, 0]]}},
        "files": [{"bytes": 10, "sha256": "00"}],
        "run": {"step": 1, "samples": 2, "seed": 0},
        "step": 1,
    }
    (folder / MARKER).write_text(json.dumps(sealed(good | changes)))
    try:
        read_run(folder)
        assert (
            damaged(folder, read_record(folder), range(len(read_record(folder)["files"])))
            or not (good | changes)["files"]
        )
    except UserError as error:
        assert error.setting == "--resume"
    finally:
        shutil.rmtree(folder)


# the watchdog


class Never:
    done = False

    def wait(self) -> None:
        raise AssertionError


def test_a_step_that_takes_too_long_is_reported():
    said, ended = io.StringIO(), threading.Event()
    doing = {Lane.COMPUTE: Doing("FORWARD b3", 4.0, True), Lane.INTER_W: Doing("EXCHANGE <1:u7", 31.0, False)}
    dog = Watchdog(lambda: doing, "rank 3 (node 1)", limit_s=0.1, stream=said, end=ended.set)
    dog.watch("step 7", Never())
    assert ended.wait(10)
    text = said.getvalue()
    assert "tawpipe: stuck: rank 3 (node 1): step 7 has taken" in text
    assert "INTER_W is in EXCHANGE <1:u7, 31 s" in text and "COMPUTE waits to begin FORWARD b3" in text
    assert "waits for nobody" not in text


def test_a_hanging_rank_writes_what_nccl_was_given(tmp_path, monkeypatch):
    """That may hang as well, which must not keep the process. There is no NCCL here: what torch gives is made up."""
    c10d, asked = sys.modules["torch._C._distributed_c10d"], []
    dump = lambda **how: asked.append(how) or b"record"  # noqa: E731
    monkeypatch.setattr(c10d, "_dump_nccl_trace", dump, raising=False)
    monkeypatch.setattr("tawpipe.runtime.watchdog.LAST_WORDS_S", 3.0)
    said, ended = io.StringIO(), threading.Event()
    dog = Watchdog(dict, "rank 3", limit_s=0.1, stream=said, end=ended.set)
    dog.last_words = lambda step: write_record(tmp_path / "flight", 3)
    dog.watch("step 7", Never())
    assert ended.wait(10)
    assert (tmp_path / "flight" / "rank_3").read_bytes() == b"record" and asked[0]["includeStackTraces"] is False
    assert f"rank 3: the flight record is in {tmp_path}" in said.getvalue()
    (tmp_path / "file").touch()
    assert "could not be written" in write_record(tmp_path / "file", 3)
    monkeypatch.delattr(c10d, "_dump_nccl_trace")
    assert write_record(tmp_path / "other", 3) == "" and not (tmp_path / "other").exists()

    ended.clear()
    dog = Watchdog(dict, "rank 3", limit_s=0.1, stream=said, end=ended.set)
    dog.last_words = lambda step: str(threading.Event().wait(60))
    dog.watch("step 7", Never())
    assert ended.wait(10)


@pytest.mark.parametrize("doing", [{}, {Lane.COMPUTE: Doing("FORWARD b3", 4.0, False)}])
def test_the_rank_that_others_wait_for_says_so(doing):
    dog = Watchdog(lambda: doing, "rank 0")
    assert any("waits for nobody" in line for line in dog.report("step 1", 9))


def test_a_step_that_ends_in_time_is_not_reported():
    class Now(Never):
        done = True

    said = io.StringIO()
    dog = Watchdog(dict, "rank 0", limit_s=0.3, stream=said, end=lambda: None)
    for _ in range(4):
        dog.watch("step", Now())
        time.sleep(0.2)
    dog.close()
    assert not said.getvalue()


# signals


def test_a_signal_is_agreed_on_and_a_second_one_ends_at_once():
    with StopRequest(ALONE) as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        assert stop.agreed() is signal.SIGUSR1
    child = "import os, signal, time; from tawpipe.train.stopping import StopRequest\n"
    child += "from test_faults import ALONE\n"
    child += "with StopRequest(ALONE):\n    os.kill(os.getpid(), 15)\n    os.kill(os.getpid(), 15)\n"
    child += "    time.sleep(1.1)\n    os.kill(os.getpid(), 15)\n    time.sleep(9)\n"
    import subprocess

    done = subprocess.run([sys.executable, "-c", child], cwd=Path(__file__).parent, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM


# the launcher


def launched(code: str, **settings) -> tuple[int, str]:
    errors = io.StringIO()
    head = "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n"
    head += "restart = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
    return launch([sys.executable, "-c", head + code], Shape(1, 2), errors=errors, **settings), errors.getvalue()


def test_dead_workers_are_started_again(tmp_path):
    code = f"open('{tmp_path}/' + restart + '-' + str(rank), 'w')\nsys.exit(3 if restart == '0' and rank == 1 else 0)"
    status, said = launched(code, max_restarts=2)
    assert status == 0 and "restart 1 of at most 2" in said and "rank 1" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


def test_restarts_end(tmp_path):
    status, said = launched("sys.exit(3)", max_restarts=1)
    assert status == 3 and said.count("ended with exit code 3") == 2


def test_a_wrong_setting_is_not_tried_again():
    status, said = launched("print('tawpipe: error: no', file=sys.stderr); sys.exit(2)", max_restarts=3)
    assert status == 2 and "restart" not in said


READY = "open(os.path.join(READY, str(rank)), 'w').close()\n"
"""What a worker says when its handlers stand."""


def launched_and_told(folder: Path, numbers: list[int], code: str, **settings) -> tuple[int, str, float]:
    """Signals to the launcher when all workers are ready; the seconds from then on."""
    told: list[float] = []

    def tell() -> None:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.02)
        told.append(time.monotonic())
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    threading.Thread(target=tell).start()
    status, said = launched(f"READY = {str(folder)!r}\n" + code, **settings)
    return status, said, time.monotonic() - told[0]


NOTES = "done = []\nfor s in (15, 10): signal.signal(s, lambda *_: done.append(1))\n" + READY
WAITS = "while not done: time.sleep(0.02)\n"


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGUSR1], [signal.SIGTERM, signal.SIGTERM]])
def test_a_signal_is_passed_on_and_waited_for(tmp_path, numbers):
    code = NOTES + WAITS + "time.sleep(0.5)\nsys.exit(0)"
    status, _, seconds = launched_and_told(tmp_path, numbers, code, patience_s=20)
    assert status == 0 and seconds < 15  # two within a second are one


def test_what_fails_after_a_signal_is_reported(tmp_path):
    code = NOTES + WAITS + "raise SystemExit('no space left' if rank else 0)"
    status, said, _ = launched_and_told(tmp_path, [signal.SIGTERM], code, patience_s=20)
    assert status == 1 and "rank 1" in said and "no space left" in said


def test_what_the_signal_itself_ends_is_no_failure(tmp_path):
    status, said, _ = launched_and_told(tmp_path, [signal.SIGTERM], READY + "time.sleep(60)", patience_s=20)
    assert status == 128 + signal.SIGTERM and "rank" not in said


def test_patience_ends(tmp_path):
    code = NOTES + "time.sleep(60)"
    status, said, seconds = launched_and_told(tmp_path, [signal.SIGTERM], code, patience_s=0.5, grace_s=0.5)
    assert status == 128 + signal.SIGTERM and seconds < 15 and "SIGTERM" in said


# who is slow


def test_who_stays_slow_is_named_and_noise_is_not():
    stragglers = Stragglers(1.3)
    assert not any(stragglers.look([1.0, 1.0, 2.0 if step % 3 else 1.0, 1.0]) for step in range(30))
    named = [step for step in range(1, 40) if stragglers.look([1.0, 1.0, 1.0, 2.0]) == [(3, 2.0)]]
    assert named == [4, 8, 16, 32]
    assert not any(Stragglers(0).look([1.0, 9.0]) for _ in range(9))


# histories


def test_copies_of_another_history_are_not_gone_on_with(pipeline, tmp_path):
    words = ["--output", str(tmp_path / "run"), "--checkpoint.memory-every", "1"]
    words += ["--checkpoint.memory-dir", str(tmp_path)]
    auto, anew = load_config([*words, "--resume", "auto"]), load_config(words)

    def start(config: TrainConfig, restarts: int = 0) -> Start:
        copies = _second_copies(config, ALONE)
        checkpoints = Checkpoints(config.output_path / "checkpoints", ALONE)
        found = _find_state(config, ALONE, Console(0), checkpoints, copies, None, restarts)
        write_mark(config.output_path, found.mark)
        if found.state is None and copies is not None:
            run = asdict(RunState(step=1, samples=1, seed=0))
            pipeline.start_copy(copies, run=run)
            copies.wait()
            assert not copies.problem
        return found

    assert start(auto).copy is None
    assert start(auto).copy is not None and start(auto, restarts=1).copy is not None
    assert start(anew, restarts=1).copy is None  # the start before it died before it had chosen
    assert start(anew, restarts=1).copy is not None
    assert start(anew).copy is None
    shutil.rmtree(tmp_path / "run")
    assert start(auto).copy is None  # of a run that is not there any more
    off = replace(auto, checkpoint=replace(auto.checkpoint, memory_every=0))
    assert start(off).copy is None and not list(tmp_path.glob("tawpipe-*"))


def test_a_mark_that_is_damaged_says_nothing():
    for text in ("", "{", "[]", "{}", '{"history": 1}', "null"):
        assert Mark.of(text) == Mark()
    assert Mark.of(Mark("a", "auto", "b").text) == Mark("a", "auto", "b")


# a full disk


def test_a_row_that_a_full_disk_does_not_take_is_left_out(tmp_path):
    code = "import resource, signal, sys; from pathlib import Path; from tawpipe.train.metrics import MetricsWriter\n"
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "writer = MetricsWriter(Path(sys.argv[1]), tensorboard=False)\n"
    code += "row = dict(loss=1.0, grad_norm=1.0, learning_rate=1.0, tokens_per_second=1.0)\n"
    code += "assert not writer.write(1, row)\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.RLIM_INFINITY))\n"
    code += "said = [writer.write(step, row) for step in (2, 3)]\n"
    code += "assert 'No space left' in said[0] and not said[1], said\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
    code += "assert not writer.write(4, row)\n"
    import subprocess

    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 4]


# jumps of the loss


def test_a_jump_is_named_and_noise_is_not():
    spikes, generator = Spikes(8.0), torch.Generator().manual_seed(0)
    for i in range(200):
        assert not spikes.look(3 - i / 200 + 0.02 * float(torch.randn((), generator=generator)))
    assert "stands out" in spikes.look(4.0)
    assert not spikes.look(float("nan"))
    assert not Spikes(0).look(1e9)


def test_what_is_not_alike_is_named(pipeline):
    pipeline.check_copies()
    unit = next(iter(pipeline.storage.master))
    pipeline.storage.compute_copy[unit] = pipeline.storage.compute_copy[unit].clone() + 1
    with pytest.raises(RunError, match=f"unit {unit}"):
        pipeline.check_copies()


def test_faults_are_frozen():
    assert replace(Fault(0, 1, "push", "kill"), rank=2).rank == 2
