"""Going on: with the same numbers, on any topology, from the newest sound state of the run's own history."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases import WITH_HOST, batches
from states import ALONE, memory_of, resumable, run_of
from tawpipe.checkpoint.format import read_manifest, sealed
from tawpipe.checkpoint.names import MARKER, complete_states, file_name, passed_over
from tawpipe.checkpoint.resume import Mark, ResumePoint, choose, find, newest
from tawpipe.checkpoint.store import Disk
from tawpipe.errors import UserError
from tawpipe.runtime.watch.faults import flip_a_bit
from tawpipe.runtime.world import World
from tawpipe.train.run import open_stores
from tawpipe.train.settings.config import TrainConfig, load_config

TOTAL = 5
SMALL: dict[str, Any] = {"strategy": "tawpipe-spread", "layers": 2}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A checkpoint after 3 steps on 2 x 2 (dropout on), and the losses of the steps after it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    losses = pool.run(
        "test_resume:save_after", 2, 2, folder=str(folder), steps=3, total=TOTAL, strategy="tawpipe-spread"
    )[0]
    return folder, losses


def test_resumed_run_repeats_the_loss_curve_exactly(pool, saved):
    folder, losses = saved
    assert pool.run("test_resume:go_on", 2, 2, folder=str(folder), total=TOTAL, strategy="tawpipe-spread")[0] == losses


@pytest.mark.parametrize(
    ("nodes", "local", "strategy"),
    [
        *((4, 1, "tawpipe-striped"), (1, 1, "tawpipe-spread")),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 4, "tawpipe-spread"), (3, 2, "tawpipe-whole"))),
    ],
)
def test_resumed_run_on_another_topology_has_equal_losses(pool, saved, nodes, local, strategy):
    folder, losses = saved
    again = pool.run("test_resume:go_on", nodes, local, folder=str(folder), total=TOTAL, strategy=strategy)[0]
    assert again == pytest.approx(losses, rel=1e-10)


def test_resumed_run_with_replicated_state_groups_has_equal_losses(pool, saved):
    folder, losses = saved
    knobs = {"strategy": "tawpipe-groups", "groups": "1n/1n/2n"}
    again = pool.run("test_resume:go_on", 4, 1, folder=str(folder), total=TOTAL, **knobs)[0]
    assert again == pytest.approx(losses, rel=1e-10)


@pytest.mark.slow
def test_graphs_kept_in_host_memory_are_not_part_of_a_checkpoint(pool, saved, tmp_path):
    """Kept graphs that wait in runs that go on, in a run that has saved, and in a pipeline."""
    folder, losses = saved
    plain = {"strategy": "tawpipe-spread", "total": TOTAL}
    waiting = plain | {"recompute": "none:3,full", "offloaded_layers": 4}
    order = plain | {"strategy": "solved", "stages": "nodes", "pipeline_order": WITH_HOST, "recompute": "none"}
    again = pool.run("test_resume:save_after", 2, 1, folder=str(tmp_path), steps=3, **waiting)[0]
    assert again == pytest.approx(losses, rel=1e-10)
    for local, source, knobs in ((1, folder, waiting), (1, tmp_path, plain), (2, tmp_path, order)):
        again = pool.run("test_resume:go_on", 2, local, folder=str(source), **knobs)[0]
        assert again == pytest.approx(losses, rel=1e-10)


def save_after(world: World, *, folder: str, steps: int, total: int, **knobs: Any) -> list[float]:
    """Train, save after ``steps``, train on; the losses after the save."""
    pipeline = resumable(world, **knobs)
    given = batches(5, total)
    for batch in given[:steps]:
        pipeline.step(batch)
    pipeline.drain()
    pipeline.save(Disk(Path(folder), world, keep=2), run=run_of(steps))
    losses = [result.loss for result in [pipeline.step(batch) for batch in given[steps:]]]
    pipeline.close()
    return losses


def go_on(world: World, *, folder: str, total: int, **knobs: Any) -> list[float]:
    """Resume from the newest checkpoint in a fresh pipeline with other initial weights."""
    pipeline = resumable(world, seed=99, **knobs)
    source = find(Disk(Path(folder), world), "auto").source
    assert source is not None
    pipeline.load(source)
    pipeline.seed = 0  # random numbers go on from the run's seed
    losses = [result.loss for result in [pipeline.step(batch) for batch in batches(5, total)[source.step :]]]
    pipeline.close()
    return losses


@pytest.mark.parametrize(
    ("nodes", "local", "lost"),
    [
        (2, 2, 1),
        pytest.param(3, 1, 0, marks=pytest.mark.slow),
        pytest.param(1, 2, None, marks=pytest.mark.slow),
    ],
)
def test_lost_node_is_restored_from_memory_checkpoints(pool, tmp_path, nodes, local, lost):
    found = pool.run("test_resume:lose_a_node", nodes, local, folder=str(tmp_path / "copies"), lost=lost, **SMALL)
    assert all(one[:2] == (True, True) for one in found)
    assert set(found[0][2].split()) == {"step-00000004"}  # older ones are gone


@pytest.mark.slow
def test_memory_checkpoint_on_one_node_is_lost_with_the_node(pool, tmp_path):
    results = pool.run("test_resume:lose_a_node", 1, 2, folder=str(tmp_path), lost=0, **SMALL)
    assert results[0][0] is False


def lose_a_node(world: World, *, folder: str, lost: int | None, **knobs: Any) -> tuple[bool, bool, str]:
    """Copy the state into the memory of the nodes, lose what one of them holds, go on in a fresh pipeline.

    Returns:
        whether a copy was found, whether the losses are those of a run that went on, and what is left of the folder.
    """
    pipeline = resumable(world, **knobs)
    given = batches(5, 6)
    memory = memory_of(world, folder)
    memory.history = "this one"
    for step, batch in enumerate(given[:4]):
        pipeline.step(batch)
        if step in (1, 3):
            pipeline.save(memory, run=run_of(step + 1))
    losses = [result.loss for result in [pipeline.step(batch) for batch in given[4:]]]
    pipeline.close()
    world.barrier()
    if lost is not None and world.rank == 0:
        shutil.rmtree(Path(folder) / f"machine-{lost}")
    world.barrier()
    other = resumable(world, seed=99, **knobs)
    memory.history = "another"
    assert newest(memory).source is None
    memory.history = "this one"
    if lost is None and world.rank == 0 and world.topology.num_nodes > 1:  # a file whose twin is sound
        flip_a_bit(Path(folder) / "machine-0" / "node-0" / "step-00000004" / file_name(0))
    world.barrier()
    source = newest(memory).source
    if source is not None:
        assert other.load(source)["step"] == 4
        other.seed = 0
    again = [result.loss for result in [other.step(batch) for batch in given[4:]]]
    other.close()
    names = sorted(path.name for path in Path(folder).glob("machine-*/node-*/*"))
    return source is not None, again == losses, " ".join(names)


def test_machines_with_different_checkpoints_refuse_to_resume(pool, history, tmp_path):
    for rank in range(2):
        folder = tmp_path / f"machine-{rank}" / "step-00000030"
        shutil.copytree(history / "checkpoints" / folder.name, folder)
        manifest = read_manifest(folder)
        (folder / MARKER).write_text(json.dumps(sealed({**manifest, "run": {**manifest["run"], "samples": rank}})))
    messages = pool.run("test_resume:find_apart", 2, 1, folder=str(tmp_path))
    assert all("step-00000030: not the same checkpoint on all machines" in message for message in messages)
    shutil.rmtree(tmp_path / "machine-1")
    messages = pool.run("test_resume:find_apart", 2, 1, folder=str(tmp_path))
    assert all("rank 1: the folder of a complete checkpoint" in message for message in messages)


def find_apart(world: World, *, folder: str) -> str:
    """What is said of a folder that is another one on every machine."""
    try:
        find(Disk(Path(folder) / f"machine-{world.rank}", world), "auto")
    except UserError as error:
        return str(error)
    return ""


def where(folder: Path, resume: str = "auto") -> Path | None:
    """The folder that ``--resume`` means."""
    source = find(Disk(folder, ALONE), resume).source
    return source and source.where


def test_incomplete_checkpoint_folder_is_never_chosen(saved, tmp_path):
    good = tmp_path / "step-00000003"
    shutil.copytree(saved[0] / "step-00000003", good)
    (tmp_path / "step-00000004").mkdir()  # no marker
    half = tmp_path / "step-00000005.incomplete"
    shutil.copytree(good, half)  # all there but for its name
    assert complete_states(tmp_path) == [good] and where(tmp_path) == good
    with pytest.raises(UserError, match="sound checkpoint"):
        where(tmp_path, str(tmp_path / "step-00000004"))


def test_empty_folder_gives_no_checkpoint_and_a_missing_path_is_refused(tmp_path):
    assert where(tmp_path / "none") is None
    with pytest.raises(UserError, match="resume: got "):
        where(tmp_path, str(tmp_path / "missing"))


def test_resume_falls_back_to_the_newest_sound_checkpoint_and_reports(history):
    folder = history / "checkpoints"
    flip_a_bit(folder / "step-00000030" / file_name(0))
    with (folder / "step-00000020" / file_name(0)).open("r+b") as file:
        file.truncate(100)
    found = find(Disk(folder, ALONE), "auto")
    assert found.source is not None and found.source.where == folder / "step-00000010"
    assert "step-00000030: the checksum of state-00000.safetensors" in found.passed_over[0]
    assert "step-00000020: state-00000.safetensors has 100 bytes instead of" in found.passed_over[1]
    with pytest.raises(UserError, match="checksum"):
        where(folder, str(folder / "step-00000030"))


@pytest.mark.parametrize("lost", [(30,), (20, 30), (10, 20, 30)])
def test_checkpoints_without_manifest_are_skipped_and_reported(history, tmp_path, lost):
    for step in lost:
        (history / "checkpoints" / f"step-000000{step}" / MARKER).unlink()
    disk = Disk(history / "checkpoints", ALONE)
    begins = choose(tmp_path, "auto", disk, None, restarts=0)
    left = [step for step in (10, 20, 30) if step not in lost]
    assert (begins.state.step if begins.state else 0) == max(left, default=0)
    instead = f"{disk.folder / f'step-000000{max(left)}'} is used instead" if left else "the run starts at step 0"
    for step, line in zip(reversed(lost), begins.notices, strict=True):
        assert line.startswith(f"skipped step-000000{step}: ") and MARKER in line and line.endswith(f"; {instead}")
    if left:  # a look says as much
        assert passed_over(disk.folder, max(left)) == tuple(f"step-000000{n}: it holds no {MARKER}" for n in lost[::-1])


@pytest.mark.parametrize("lost", [False, True])
def test_newer_checkpoints_are_set_aside_only_after_settings_are_accepted(history, tmp_path, lost):
    disk = Disk(history / "checkpoints", ALONE)
    chosen = choose(tmp_path, str(disk.folder / "step-00000010"), disk, None, restarts=0)
    assert len(complete_states(disk.folder)) == 3, "settings may still be refused"
    if lost:  # or it would be passed over at every start from now on
        (disk.folder / "step-00000030" / MARKER).unlink()
    chosen.take(tmp_path, disk)
    assert [path.name for path in complete_states(disk.folder)] == ["step-00000010"]
    assert len([*disk.folder.glob("*.abandoned")]) == 2 and (tmp_path / "history.json").exists()


def test_changed_digit_in_a_manifest_is_found_by_its_checksum(history):
    marker = history / "checkpoints" / "step-00000030" / MARKER
    marker.write_text(marker.read_text().replace('"samples": 30', '"samples": 31'))
    found = find(Disk(history / "checkpoints", ALONE), "auto")
    assert found.source is not None and found.source.step == 20
    assert "differs; expected a sound one" in found.passed_over[0]


def test_memory_checkpoints_of_another_run_history_are_not_resumed(pipeline, tmp_path):
    words = ["--output", str(tmp_path / "run"), "--checkpoint.memory-every", "1"]
    words += ["--checkpoint.memory-dir", str(tmp_path)]
    auto, anew = load_config([*words, "--resume", "auto"]), load_config(words)

    def start(config: TrainConfig, restarts: int = 0) -> ResumePoint:
        disk, memory = open_stores(config, ALONE)
        chosen = choose(config.output_path, config.resume, disk, memory, restarts=restarts)
        chosen.mark.write(config.output_path)
        if chosen.state is None and memory is not None:
            pipeline.save(memory, run=run_of(1))
        return chosen

    assert start(auto).source is None
    assert start(auto).place == start(auto, restarts=1).place == "memory"
    assert start(anew, restarts=1).source is None  # the start before it died before it had chosen
    assert start(anew, restarts=1).place == "memory"
    assert start(anew).source is None
    shutil.rmtree(tmp_path / "run")
    assert start(auto).source is None  # of a run that is not there any more
    off = replace(auto, checkpoint=replace(auto.checkpoint, memory_every=0))
    assert start(off).source is None and not list(tmp_path.glob("tawpipe-*"))


def test_damaged_history_mark_reads_as_empty():
    for text in ("", "{", "[]", "{}", '{"history": 1}', "null"):
        assert Mark.of(text) == Mark()
    assert Mark.of(Mark("a", "auto", "b").text) == Mark("a", "auto", "b")
