"""The format of a state: what is in its files, and that a manifest which makes no sense is named."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from states import BATCHES, everything, train
from tawpipe.checkpoint.format import damage, read_manifest, sealed
from tawpipe.checkpoint.frozen import difference, digests_in
from tawpipe.checkpoint.names import MARKER
from tawpipe.checkpoint.resume import read_run
from tawpipe.errors import UserError


def test_unreadable_manifest_or_unknown_format_is_refused(tmp_path):
    (tmp_path / MARKER).write_text("{")
    with pytest.raises(UserError, match="readable"):
        read_manifest(tmp_path)
    (tmp_path / MARKER).write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="format"):
        read_manifest(tmp_path)


def test_manifest_records_parameter_shapes_step_and_samples(history):
    folder = history / "checkpoints" / "step-00000020"
    assert read_manifest(folder)["parameters"]["model.layers.0.self_attn.q_proj.weight"] == [24, 24]
    assert (read_run(folder).step, read_run(folder).samples) == (20, 20)


def test_checkpoint_holds_only_safetensors_and_json_files(pipeline, tmp_path):
    pipeline.save(tmp_path / "one")
    assert {path.suffix for path in (tmp_path / "one").iterdir()} == {".safetensors", ".json"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first draw may meet a busy machine
@given(
    changes=st.dictionaries(
        st.sampled_from(["format", "parameters", "tensors", "files", "run", "step", "frozen"]), json_values
    )
)
def test_changed_manifest_is_read_or_refused_with_user_error(changes, tmp_path_factory):
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
        assert not difference(read_manifest(folder), digests_in(read_manifest(folder)))
        assert (
            damage(folder, read_manifest(folder), range(len(read_manifest(folder)["files"])))
            or not (good | changes)["files"]
        )
    except UserError as error:
        assert error.setting == "where"
    finally:
        shutil.rmtree(folder)


def test_checkpoint_of_format_2_is_loaded(pipeline, tmp_path):
    """Every name is spelled here, as versions before this one have written it: two ranks, no dtypes, no history."""
    pipeline.save(tmp_path / "new")
    expected, manifest = everything(pipeline), read_manifest(tmp_path / "new")
    values = load_file(tmp_path / "new" / "state-00000.safetensors")
    files, tensors = [{}, {}], {}
    for name, tensor in manifest["tensors"].items():
        value, cut = values[f"{name}@0"], tensor["numel"] // 3
        pieces = [(0, value[:cut]), (cut, value[cut:])] if cut else [(0, value)]
        for number, (start, piece) in enumerate(pieces):
            files[number][f"{name}@{start}"] = piece.clone()
        chunks = [[start, piece.numel(), number] for number, (start, piece) in enumerate(pieces)]
        tensors[name] = {"numel": tensor["numel"], "chunks": chunks[::-1]}
    old, notes = tmp_path / "old", []
    old.mkdir()
    for number, file in enumerate(files):
        data = save(file)
        (old / f"state-0000{number}.safetensors").write_bytes(data)
        notes.append({"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    content = {"format": 2, "parameters": manifest["parameters"], "tensors": tensors, "files": notes}
    content |= {"step": 7, "run": {"mine": 1}, "optimizer": "AdamW"}
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (old / "tawpipe.json").write_text(json.dumps(content, indent=1))
    train(pipeline, BATCHES[1:2])
    assert pipeline.load(old) == {"mine": 1} and pipeline.step_number == 7
    weights = {name: value for name, value in expected.items() if not name.startswith("gradient")}
    assert weights.items() and all(torch.equal(everything(pipeline)[name], value) for name, value in weights.items())
