"""Where states are kept: which rank keeps what, what is removed, and whose folders are used."""

from __future__ import annotations

import json

import pytest

from states import ALONE, run_of
from tawpipe.checkpoint.format import read_manifest, sealed
from tawpipe.checkpoint.names import MARKER, remove
from tawpipe.checkpoint.resume import find, newest
from tawpipe.checkpoint.store import Disk, Memory, _neighbour, is_ours, own_folder
from tawpipe.topology import Topology


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (((0, 1), (2, 3)), (2, 3, 0, 1)),
        (((0, 1, 2, 3), (4, 5)), (4, 5, 4, 5, 0, 1)),  # machines, though schedules make three nodes of them
        (((0, 1),), (None, None)),
    ],
)
def test_memory_copies_are_kept_on_another_machine(nodes, expected):
    machines = Topology(nodes)
    assert tuple(_neighbour(machines, rank) for rank in range(len(expected))) == expected


def test_memory_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    folder = tmp_path / "copies"
    own_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and is_ours(folder)
    (tmp_path / "link").symlink_to(folder)
    assert not is_ours(tmp_path / "link")
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(PermissionError):
        own_folder(folder)


def test_half_written_checkpoints_are_removed_at_start(history):
    half = history / "checkpoints" / "step-00000040.incomplete"
    half.mkdir()
    find(Disk(history / "checkpoints", ALONE), "auto")
    assert not half.exists()


def test_interrupted_removal_is_finished_at_start(history, monkeypatch):
    folder = history / "checkpoints"
    monkeypatch.setattr("tawpipe.checkpoint.names.shutil.rmtree", lambda *_, **__: None)  # the crash
    remove(folder / "step-00000010")
    monkeypatch.undo()
    assert min(path.name for path in folder.iterdir()) == "step-00000010.incomplete"
    find(Disk(folder, ALONE), "auto")
    assert len(list(folder.iterdir())) == 2


def test_checkpoint_that_cannot_be_removed_is_reported(pipeline, history, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("tawpipe.checkpoint.store.remove", refuse)
    pipeline.step_number = 40
    saved = pipeline.save(Disk(history / "checkpoints", ALONE, keep=1), run=run_of(40))
    assert "could not be removed: Permission denied" in saved.left


def test_memory_folder_of_another_user_is_reported_as_a_problem(pipeline, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "copies").symlink_to(tmp_path / "theirs")
    saved = pipeline.start_saving(Memory(tmp_path / "copies", ALONE, ALONE), run=run_of(1)).wait()
    assert "belongs to another user" in saved.problem and not list((tmp_path / "theirs").iterdir())


@pytest.mark.parametrize("samples", range(3))
def test_leftover_node_folders_do_not_hide_a_whole_memory_checkpoint(pipeline, tmp_path, samples):
    """Nodes that were numbered otherwise leave folders under other names."""
    memory = Memory(tmp_path / "copies", ALONE, ALONE)
    pipeline.save(memory, run=run_of(1))
    whole = memory.folder / "step-00000001"
    left = memory.root / "node-7" / whole.name
    left.mkdir(parents=True)
    manifest = read_manifest(whole)
    (left / MARKER).write_text(json.dumps(sealed({**manifest, "run": {**manifest["run"], "samples": 100 + samples}})))
    source = newest(memory).source
    assert source is not None and source.manifest == manifest
    pipeline.step_number = 2
    pipeline.save(memory, run=run_of(2))
    assert list(memory.root.glob("node-*/*")) == [memory.folder / "step-00000002"]
