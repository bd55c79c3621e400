"""``tawpipe checkpoint``: what it says of a run's checkpoints, and which it removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from states import save_history, stepped
from tawpipe.checkpoint.names import MARKER, file_name
from tawpipe.cli import main
from tawpipe.commands.checkpoint import problem_of, run
from tawpipe.errors import UserError
from tawpipe.runtime.watch.faults import flip_a_bit


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """The output folder of a run with checkpoints of steps 10, 20 and 30."""
    pipeline = stepped()
    save_history(pipeline, tmp_path)
    pipeline.close()
    return tmp_path


def test_checkpoint_command_verifies_lists_and_prunes(history, capsys):
    assert main(["checkpoint", "verify", str(history)]) == 0
    assert capsys.readouterr().out.count("sound") == 3
    flip_a_bit(history / "checkpoints" / "step-00000020" / file_name(0))
    assert main(["checkpoint", "verify", str(history)]) == 1
    assert "step-00000020  damaged: the checksum" in capsys.readouterr().out
    damaged = history / "checkpoints" / "step-00000020"
    assert problem_of(damaged).startswith("the checksum") and problem_of(damaged.with_name("step-00000030")) == ""
    assert run(["list", str(history)]) == 0
    assert "step 30, 30 samples" in capsys.readouterr().out
    with pytest.raises(UserError, match="--keep: got 0; at least 1"):
        run(["prune", str(history), "--keep", "0"])
    assert main(["checkpoint", "prune", str(history), "--keep", "1", "--keep-every", "10"]) == 0
    assert len(list((history / "checkpoints").iterdir())) == 3
    assert main(["checkpoint", "prune", str(history), "--keep", "1"]) == 0
    assert [path.name for path in (history / "checkpoints").iterdir()] == ["step-00000030"]


def test_a_checkpoint_without_its_manifest_is_listed_as_damaged(history, capsys):
    (history / "checkpoints" / "step-00000030" / MARKER).unlink()
    for command, code in (("list", 0), ("verify", 1)):
        assert main(["checkpoint", command, str(history)]) == code
        last = capsys.readouterr().out.splitlines()[-1]
        assert "step-00000030  damaged: " in last and MARKER in last
    assert main(["checkpoint", "prune", str(history), "--keep", "1"]) == 0
    assert [path.name[-2:] for path in sorted((history / "checkpoints").iterdir())] == ["20", "30"]


def test_the_last_sound_checkpoint_is_not_pruned(history, capsys):
    flip_a_bit(history / "checkpoints" / "step-00000030" / file_name(0))
    assert main(["checkpoint", "prune", str(history), "--keep", "1"]) == 2
    assert "step-00000030: the checksum" in capsys.readouterr().err
    assert main(["checkpoint", "prune", str(history), "--keep", "2"]) == 0
    assert [path.name[-2:] for path in sorted((history / "checkpoints").iterdir())] == ["20", "30"]


@pytest.mark.parametrize("words", [["list", "nowhere"], ["prune", ".", "--keep", "0"], ["verify", "."]])
def test_checkpoint_command_refuses_wrong_arguments(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", *words]) == 2
    assert "tawpipe: error" in capsys.readouterr().err
