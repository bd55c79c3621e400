"""Checkpoints: what was saved goes on with the same numbers, on any topology; what is incomplete is never chosen."""

from __future__ import annotations

import json
import shutil

import pytest

from tawpipe.checkpoint.memory import _neighbour, is_ours, own_folder
from tawpipe.checkpoint.state import MARKER, read_record
from tawpipe.checkpoint.store import Checkpoints, complete_checkpoints, read_run
from tawpipe.errors import UserError
from tawpipe.runtime.world import World
from tawpipe.topology import Topology

TOTAL = 5


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A checkpoint after 3 steps on 2 x 2 (dropout on), and the losses of the steps after it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    losses = pool.run("cases:save_after", 2, 2, folder=str(folder), steps=3, total=TOTAL, strategy="tawpipe-spread")[0]
    return folder, losses


def test_resume_goes_on_with_the_identical_curve(pool, saved):
    folder, losses = saved
    assert pool.run("cases:go_on", 2, 2, folder=str(folder), total=TOTAL, strategy="tawpipe-spread")[0] == losses


@pytest.mark.parametrize(
    ("nodes", "local", "strategy"),
    [(1, 4, "tawpipe-spread"), (4, 1, "tawpipe-striped"), (1, 1, "tawpipe-spread"), (3, 2, "tawpipe-whole")],
)
def test_resume_on_another_topology(pool, saved, nodes, local, strategy):
    folder, losses = saved
    again = pool.run("cases:go_on", nodes, local, folder=str(folder), total=TOTAL, strategy=strategy)[0]
    assert again == pytest.approx(losses, rel=1e-10)


def test_a_checkpoint_of_another_model_is_refused_by_name(pool, saved):
    message = pool.run("cases:load_into_another_model", 1, 2, folder=str(saved[0]))[0]
    assert "--resume" in message and "mlp" in message


@pytest.mark.parametrize(("nodes", "local", "lost"), [(2, 2, 1), (3, 1, 0), (1, 2, None), (2, 1, None)])
def test_a_lost_node_is_made_up_for_from_memory(pool, tmp_path, nodes, local, lost):
    found = pool.run(
        "cases:lose_a_node", nodes, local, folder=str(tmp_path / "copies"), lost=lost, strategy="tawpipe-spread"
    )
    assert all(one[:2] == (True, True) for one in found)
    assert set(found[0][2].split()) == {"step-00000004"}  # older ones are gone
    assert not (tmp_path / "copies").exists()


def test_a_copy_without_a_neighbour_is_lost_with_its_node(pool, tmp_path):
    found = pool.run("cases:lose_a_node", 1, 2, folder=str(tmp_path / "copies"), lost=0, strategy="tawpipe-spread")
    assert found[0][0] is False


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (((0, 1), (2, 3)), (2, 3, 0, 1)),
        (((0, 1, 2, 3), (4, 5)), (4, 5, 4, 5, 0, 1)),  # machines, though schedules make three nodes of them
        (((0, 1),), (None, None)),
    ],
)
def test_copies_go_to_another_machine(nodes, expected):
    machines = Topology(nodes)
    assert tuple(_neighbour(machines, rank) for rank in range(len(expected))) == expected


def test_a_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    folder = tmp_path / "copies"
    own_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and is_ours(folder)
    (tmp_path / "link").symlink_to(folder)
    assert not is_ours(tmp_path / "link")
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(PermissionError):
        own_folder(folder)


def alone() -> World:
    import torch

    return World(Topology.grid(1, 1), 0, torch.device("cpu"), None)


def test_an_incomplete_folder_is_never_chosen(saved, tmp_path):
    good = tmp_path / "step-00000003"
    shutil.copytree(saved[0] / "step-00000003", good)
    (tmp_path / "step-00000004").mkdir()  # no marker
    half = tmp_path / "step-00000005.incomplete"
    shutil.copytree(good, half)  # all there but for its name
    assert [path.name for path in complete_checkpoints(tmp_path)] == [good.name]
    checkpoints = Checkpoints(tmp_path, alone())
    assert checkpoints.find("auto").path == good
    with pytest.raises(UserError, match="sound checkpoint"):
        checkpoints.find(str(tmp_path / "step-00000004"))


def test_nothing_to_resume_from_is_said_not_guessed(tmp_path):
    assert Checkpoints(tmp_path / "none", alone()).find("auto").path is None
    with pytest.raises(UserError, match="--resume"):
        Checkpoints(tmp_path, alone()).find(str(tmp_path / "missing"))


def test_a_damaged_marker_is_named(tmp_path):
    (tmp_path / MARKER).write_text("{")
    with pytest.raises(UserError, match="readable"):
        read_record(tmp_path)
    (tmp_path / MARKER).write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="format"):
        read_record(tmp_path)


def test_shapes_are_kept_beside_the_flat_tensors(saved):
    state = read_run(saved[0] / "step-00000003")
    record = read_record(saved[0] / "step-00000003")
    assert record["parameters"]["model.layers.0.self_attn.q_proj.weight"] == [24, 24]
    assert (state.step, state.samples) == (3, 15)
