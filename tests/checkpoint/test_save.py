"""Writing a state: what was there when it began is saved whole, or not at all and by name."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from states import ALONE
from tawpipe import Pipeline
from tawpipe.checkpoint.format import StatePiece, damage, read_manifest
from tawpipe.checkpoint.names import MARKER
from tawpipe.checkpoint.save import Saving, stage
from tawpipe.checkpoint.store import Disk
from tawpipe.errors import RunError
from tawpipe.runtime.watch.faults import Fault, Injector


def weights(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    return {name: pipeline.parameter(name).clone() for name in pipeline.parameter_names}  # type: ignore[union-attr]


def test_background_save_writes_the_values_from_its_start(pipeline, tmp_path):
    before, gate = weights(pipeline), threading.Event()
    injector = Injector([], 0, restart=0)
    injector.before_save = lambda step: gate.wait()  # type: ignore[method-assign, return-value]
    pipeline.injector = injector
    saving = pipeline.start_saving(tmp_path / "one")
    with torch.no_grad():
        for master in pipeline.storage.master.values():
            master.mul_(2)
    assert not saving.done
    gate.set()
    saved = saving.wait()
    assert not saved.problem
    pipeline.load(tmp_path / "one")
    assert all(torch.equal(before[name], value) for name, value in weights(pipeline).items())


def test_full_disk_is_reported_and_earlier_checkpoint_is_kept(pipeline, tmp_path):
    pipeline.save(tmp_path / "step-00000001", run={"step": 1})
    before = (tmp_path / "step-00000001" / MARKER).read_text()
    pipeline.injector = Injector([Fault(0, 2, "save", "disk-full")], 0, restart=0)
    pipeline.step_number = 2
    with pytest.raises(RunError, match="No space left on device"):
        pipeline.save(tmp_path / "step-00000001", run={"step": 2})
    assert (tmp_path / "step-00000001" / MARKER).read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    pipeline.save(tmp_path / "step-00000002")  # and the next one is written


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A folder that this process may not write. Root may write everywhere, and is another user meanwhile."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # the parents of tmp_path are closed to other users
        Path(folder).chmod(0o555)
        if user == 0:
            os.seteuid(65534)
        yield Path(folder)
        os.seteuid(user)


def test_save_into_an_unwritable_folder_names_the_error(pipeline, unwritable):
    with pytest.raises(RunError, match="Permission denied"):
        pipeline.save(unwritable / "one")
    assert not list(unwritable.iterdir())


def test_save_below_a_file_names_the_file(pipeline, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file"):
        pipeline.save(tmp_path / "file" / "one")


def test_nonfinite_values_are_not_saved(pipeline, tmp_path):
    next(iter(pipeline.storage.master.values()))[3] = float("nan")
    with pytest.raises(RunError, match="not finite; not saved"):
        pipeline.save(tmp_path / "one")
    assert not list(tmp_path.iterdir())


def test_wait_for_a_stuck_save_ends_at_its_time_limit(pipeline, tmp_path):
    injector = Injector([], 0, restart=0)
    gate = threading.Event()
    injector.before_save = lambda step: gate.wait()  # type: ignore[method-assign, return-value]
    pipeline.injector = injector
    saving = pipeline.start_saving(tmp_path / "one")
    with pytest.raises(RunError, match="longer than 0 s"):
        saving.wait(0.1)
    gate.set()
    saving.wait()


def test_a_second_save_waits_for_the_first(pipeline, tmp_path):
    injector, gate = Injector([], 0, restart=0), threading.Event()
    injector.before_save = lambda step: gate.wait()  # type: ignore[method-assign, return-value]
    pipeline.injector = injector
    first = pipeline.start_saving(tmp_path / "one")
    with pytest.raises(RunError, match=r"saving .*one took longer than 0 s"):
        pipeline.start_saving(tmp_path / "two", limit_s=0.1)
    gate.set()
    second = pipeline.start_saving(tmp_path / "two")
    assert first.done and not first.wait().problem
    assert not second.wait().problem and read_manifest(tmp_path / "two")


def test_save_detects_bytes_changed_by_the_disk(pipeline, tmp_path, monkeypatch):
    """What this machine has in its page cache is as it was written; what comes from the disk after that is not."""

    def from_the_disk(handle: int, begin: int, length: int, advice: int) -> None:
        assert (begin, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        path = Path(f"/proc/self/fd/{handle}").readlink()
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    pipeline.save(tmp_path / "good")
    monkeypatch.setattr(os, "posix_fadvise", from_the_disk)
    with pytest.raises(RunError, match="the bytes read back from the disk differ from the bytes written"):
        pipeline.save(tmp_path / "bad")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    assert "checksum" in damage(tmp_path / "good", read_manifest(tmp_path / "good"), [0])


def pieces() -> list[StatePiece]:
    return [StatePiece("weight", 6, 0, torch.arange(6.0)), StatePiece("step", 1, 0, torch.tensor([3]))]


def test_staging_copies_finite_values_and_refuses_nonfinite_values() -> None:
    given = [*pieces(), StatePiece("empty", 4, 4, torch.zeros(0))]
    copies = stage(given)
    given[0].value.fill_(9)
    assert torch.equal(copies[0].value, torch.arange(6.0)) and copies[1].value.tolist() == [3]
    assert [(one.name, one.numel, one.start) for one in copies] == [(one.name, one.numel, one.start) for one in given]
    for wrong in (float("nan"), float("-inf")):
        given[0].value[4] = wrong
        with pytest.raises(RunError, match="weight has values that are not finite"):
            stage(given)


def test_save_writes_a_folder_with_matching_checksums(tmp_path: Path) -> None:
    saving = Saving(
        Disk(tmp_path, ALONE), "step-00000003", stage(pieces()), content={"step": 3, "parameters": {}}, world=ALONE
    )
    saved = saving.wait(60.0)
    saving.join()
    assert saving.done and not saved.problem and not saved.left and saved.folder == tmp_path / "step-00000003"
    manifest = read_manifest(saved.folder)
    assert manifest["step"] == 3 and damage(saved.folder, manifest, range(len(manifest["files"]))) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
