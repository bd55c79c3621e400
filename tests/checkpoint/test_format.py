"""The format of a state: what is in its files, and that a manifest which makes no sense is named."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tawpipe.checkpoint.format import MARKER, damage, read_manifest, sealed
from tawpipe.checkpoint.resume import read_run
from tawpipe.errors import UserError


def test_a_damaged_marker_is_named(tmp_path):
    (tmp_path / MARKER).write_text("{")
    with pytest.raises(UserError, match="readable"):
        read_manifest(tmp_path)
    (tmp_path / MARKER).write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="format"):
        read_manifest(tmp_path)


def test_shapes_are_kept_beside_the_flat_tensors(history):
    folder = history / "checkpoints" / "step-00000020"
    assert read_manifest(folder)["parameters"]["model.layers.0.self_attn.q_proj.weight"] == [24, 24]
    assert (read_run(folder).step, read_run(folder).samples) == (20, 20)


def test_nothing_in_a_checkpoint_can_run_code(pipeline, tmp_path):
    pipeline.save(tmp_path / "one")
    assert {path.suffix for path in (tmp_path / "one").iterdir()} == {".safetensors", ".json"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first draw may meet a busy machine
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
            damage(folder, read_manifest(folder), range(len(read_manifest(folder)["files"])))
            or not (good | changes)["files"]
        )
    except UserError as error:
        assert error.setting == "--resume"
    finally:
        shutil.rmtree(folder)
