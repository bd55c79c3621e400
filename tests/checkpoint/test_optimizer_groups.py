"""Groups of an optimizer by roles or by shapes: a checkpoint says which rule made them, and none changes unsaid."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GptOssConfig

import tawpipe
from cases import batches, llama
from runs import command
from small import make_small
from states import ALONE
from tawpipe.checkpoint.format import SEAL, read_manifest, sealed
from tawpipe.checkpoint.names import MARKER, complete_states
from tawpipe.cli import main
from tawpipe.errors import UserError
from tawpipe.pipeline.pipeline import Pipeline

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TABLES = {
    "experts' biases": GptOssConfig(**SHAPE, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
    "norms of heads": CohereConfig(**SHAPE, use_qk_norm=True),
}


def made(config: Any, optimizer: Any) -> Pipeline:
    torch.manual_seed(0)
    model = llama(torch.float32) if config is None else AutoModelForCausalLM.from_config(config)
    return tawpipe.Pipeline(model, optimizer=optimizer, world=ALONE, checks=tawpipe.CheckSettings(check="never"))


def without_record(folder: Path) -> None:
    """Make of a checkpoint what it was before the rule was recorded."""
    manifest = {name: value for name, value in read_manifest(folder).items() if name not in ("groups", SEAL)}
    (folder / MARKER).write_text(json.dumps(sealed(manifest)))


@pytest.mark.parametrize("kind", TABLES)
def test_load_with_other_groups_is_refused_and_names_the_groups_to_keep(kind, tmp_path):
    folder, config = tmp_path / "state", TABLES[kind]
    old = made(config, tawpipe.muon(1e-3, groups="shapes"))
    old.step(batches(2, 1)[0])
    old.save(folder)
    without_record(folder)
    new = made(config, tawpipe.muon(1e-3))
    with pytest.raises(UserError, match=r"by 'shapes', not roles, .* such as model\.layers\.0.*set groups='shapes'"):
        new.load(folder)
    same = made(config, tawpipe.muon(1e-3, groups="shapes"))
    same.load(folder)
    assert same.step(batches(2, 2)[1]).loss == old.step(batches(2, 2)[1]).loss
    same.save(folder)
    assert read_manifest(folder)["groups"] == "shapes"
    for one in (old, new, same):
        one.close()


@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        (None, partial(tawpipe.adamw, 1e-3)),
        (TABLES["norms of heads"], partial(tawpipe.adamw, 1e-3, weight_decay=0.0)),
        (TABLES["norms of heads"], lambda **_: partial(torch.optim.AdamW, lr=1e-3)),
    ],
    ids=["no tables of vectors", "nothing decays", "a factory of one's own"],
)
def test_equal_optimizer_groups_load_under_either_rule(config, optimizer, tmp_path):
    folder = tmp_path / "state"
    old = made(config, optimizer(groups="shapes"))
    old.step(batches(2, 1)[0])
    old.save(folder)
    without_record(folder)
    new = made(config, optimizer(groups="roles"))
    new.load(folder)
    assert new.step_number == 1
    old.close()
    new.close()


def test_unknown_group_rule_is_refused():
    with pytest.raises(UserError, match="groups: got 'shape'; roles or shapes"):
        tawpipe.adamw(groups="shape")


@pytest.mark.parametrize("kind", ["norms of heads", "experts' biases"])
@pytest.mark.slow
def test_resumed_run_keeps_and_reports_optimizer_groups_of_its_checkpoint(kind, tmp_path, capsys):
    make_small(tmp_path, files=20, layers=1, positions=256)
    TABLES[kind].save_pretrained(tmp_path / "model")
    quiet = ("--nproc", "1", "--device", "cpu", "--sample.tokens", "0", "--export.enabled", "false")
    quiet += ("--evaluation.every", "0", "--optimizer.name", "muon", "--optimizer.warmup-steps", "0")
    words = command(tmp_path, "run", *quiet, "--optimizer.weight-decay", "0.5", "--resume", "auto")[2:]
    states = tmp_path / "run" / "checkpoints"
    assert main([*words, "--steps", "1", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "decay, " in said and "Muon" in said and "self_attn.q_proj" in said and "optimizer groups" not in said
    with pytest.MonkeyPatch.context() as patch:
        by_shapes = lambda config, start, units: (tawpipe.muon(1e-3, weight_decay=0.5, groups="shapes"), "")  # noqa: E731
        patch.setattr("tawpipe.train.prepare.resumed_factory", by_shapes)
        assert main([*words, "--steps", "1"]) == 0
    without_record(complete_states(states)[-1])
    for flags in (("--dry-run",), ()):
        capsys.readouterr()
        assert main([*words, "--steps", "2", *flags]) == 0
        assert "optimizer groups: by shapes, as in the checkpoint" in "".join(capsys.readouterr())
    assert read_manifest(complete_states(states)[-1])["groups"] == "shapes"
