"""Rotary positions from settings: training and export are those of a transformers config that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
)

from borders import assert_same, packed, plain_numbers, right_or_refused, sgd
from model_families import family_config, keep_fp64, real_model
from pipelines import make_pipeline
from tawpipe.errors import UserError
from tawpipe.model.files.build import PRESETS, build_model
from tawpipe.model.rope import refuse_other_rope, rope_of
from tawpipe.model.settings import RopeSettings

ORIGINAL = 16
SHORT, LONG = [1.0, 1.0, 1.25, 1.5], [1.0, 2.0, 3.0, 4.0]
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "theta": ({"theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, 48),
    "linear": ({"scaling": "linear", "factor": 3}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, 48),
    "yarn": (
        {"scaling": "yarn", "factor": 4, "theta": 2e4, "beta_fast": 2.0, "attention_factor": 1.25},
        {
            "rope_type": "yarn",
            "rope_theta": 2e4,
            "factor": 4.0,
            "beta_fast": 2.0,
            "attention_factor": 1.25,
            "original_max_position_embeddings": ORIGINAL,
        },
        64,
    ),
    "llama3": (
        {"scaling": "llama3", "factor": 6, "original_length": 8, "low_freq_factor": 1, "high_freq_factor": 4},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 6.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
        48,
    ),
    "longrope": (
        {"scaling": "longrope", "factor": 3, "short_factor": SHORT, "long_factor": LONG},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 3.0,
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": ORIGINAL,
        },
        48,
    ),
}
"""Settings, what transformers calls the same, and the positions that the model has then."""


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


def save(folder: Path, config: PreTrainedConfig) -> str:
    real_model(config).save_pretrained(folder)
    return str(folder)


def short(**overrides: Any) -> PreTrainedConfig:
    return family_config("llama", max_position_embeddings=ORIGINAL, **overrides)


def config_with(folder: str, row: int = 48, longest: int | None = None, **settings: Any) -> Any:
    rope = RopeSettings(**settings)
    return build_model(folder, max_positions=row, longest=longest, rope=rope).model.config


def frequencies(model: Any) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}


@pytest.mark.parametrize("kind", KINDS)
def test_rope_settings_train_and_export_as_a_config_with_the_settings(tmp_path, kind):
    """From the first step on: gradients of documents beyond the old length, and the model that is exported then."""
    settings, spelled, positions = KINDS[kind]
    folder = save(tmp_path / "given", short())
    expected = short(rope_parameters=dict(spelled))
    expected.max_position_embeddings = positions

    def plain() -> Any:
        model = real_model(expected)
        weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
        model.load_state_dict(weights)
        return model

    lengths = [[40, 8], [30, 18]] if kind != "longrope" else [[24, 24], [30, 18]]
    batch, documents = packed([0], lengths)
    numbers = plain_numbers(plain, batch, documents)
    own = plain_numbers(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), batch, documents)
    assert abs(own.loss / numbers.loss - 1) > 1e-6, "the settings make no difference in this test"

    built = build_model(folder, max_positions=48, rope=RopeSettings(**settings))
    pipeline = make_pipeline(
        built.model,
        weights=lambda chain: built.source(chain, seed=0),
        dtype=torch.float64,
        clip_norm=None,
        optimizer=sgd,
    )
    before = {name: value.clone() for name, value in plain().named_parameters()}
    loss = pipeline.step(batch).loss
    pipeline.drain()
    changed = {name: before[name] - pipeline.parameter(name) for name in pipeline.parameter_names}
    assert_same(type(numbers)(loss, changed), numbers, 1e-6)

    pipeline.export(tmp_path / "made", dtype=torch.float64)
    pipeline.close()
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float64)
    assert made.config.rope_parameters == expected.rope_parameters
    assert made.config.max_position_embeddings == positions
    assert frequencies(made) and frequencies(made).keys() == frequencies(plain()).keys()
    for name, values in frequencies(plain()).items():
        assert torch.equal(frequencies(made)[name], values)
    assert made.model.rotary_emb.attention_scaling == plain().model.rotary_emb.attention_scaling


def test_extended_rope_config_is_extended_again(tmp_path):
    """What is not said stays as it is where the kind is the same, and the length is that before any scaling."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": ORIGINAL}
    config = family_config("llama", max_position_embeddings=32, rope_parameters={**yarn, "truncate": False})
    folder = save(tmp_path, config)
    again = config_with(folder, scaling="yarn", factor=4, theta=3e4)
    assert again.rope_parameters == {**yarn, "truncate": False, "factor": 4.0, "rope_theta": 3e4}
    assert again.max_position_embeddings == 64
    other = config_with(folder, scaling="linear", factor=4)
    assert other.rope_parameters == {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert config_with(folder, theta=3e4).rope_parameters == {**yarn, "truncate": False, "rope_theta": 3e4}


def test_window_layers_keep_their_rope_settings(tmp_path):
    folder = save(tmp_path, family_config("gemma3", max_position_embeddings=ORIGINAL))
    before = AutoConfig.from_pretrained(folder).rope_parameters
    made = config_with(folder, scaling="linear", factor=4, theta=3e6).rope_parameters
    assert made["sliding_attention"] == before["sliding_attention"]
    assert made["full_attention"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e6}
    extended = AutoConfig.from_pretrained(folder)
    extended.rope_parameters, extended.max_position_embeddings = made, 64
    batch, documents = packed([0], [[40, 8]])
    assert right_or_refused(lambda: real_model(extended), batch, documents=documents, limit=1e-6) == "right"


def test_theta_change_extends_positions_to_the_row_length(tmp_path):
    folder = save(tmp_path, short())
    assert config_with(folder, theta=1e6, row=100).max_position_embeddings == 100
    assert config_with(folder, theta=1e6, row=8).max_position_embeddings == ORIGINAL
    with pytest.raises(UserError, match=r"sequence_length: got 48; at most 16 .*, or --rope.scaling and --rope.factor"):
        config_with(folder)


def test_longrope_attention_factor_is_kept_for_longer_rows(tmp_path):
    """Of longrope without a factor, which transformers takes from the number of positions."""
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG}
    config = family_config(
        "llama",
        max_position_embeddings=32,
        rope_parameters={**longrope, "original_max_position_embeddings": ORIGINAL},
    )
    folder = save(tmp_path, config)
    scaling = real_model(config).model.rotary_emb.attention_scaling
    longer = config_with(folder, theta=2e4, row=64)
    assert longer.max_position_embeddings == 64
    assert real_model(longer).model.rotary_emb.attention_scaling == scaling > 1


def test_explicit_attention_factor_is_kept_under_the_same_scaling(tmp_path):
    """The help of --rope.attention-factor says so; transformers computes one where the config gives none."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": ORIGINAL}
    config = family_config(
        "llama", max_position_embeddings=32, rope_parameters={**yarn, "attention_factor": 1.25, "beta_fast": 2.0}
    )
    folder = save(tmp_path, config)
    cases: list[tuple[dict[str, Any], float]] = [({}, 1.25), ({"attention_factor": 2.0}, 2.0)]
    for new, factor in cases:
        longer = config_with(folder, scaling="yarn", factor=4, **new).rope_parameters
        assert longer["attention_factor"] == factor and longer["beta_fast"] == 2.0
    other = config_with(folder, scaling="linear", factor=4).rope_parameters
    assert "attention_factor" not in other and "beta_fast" not in other


def test_presets_accept_rope_settings_and_are_not_changed():
    before = json.dumps(PRESETS)
    rope = RopeSettings(scaling="yarn", factor=4, original_length=32)
    config = build_model("llama-1b", max_positions=128, rope=rope).model.config
    assert config.rope_parameters["factor"] == 4 and config.rope_parameters["rope_theta"] == 5e5
    assert config.max_position_embeddings == 128
    assert json.dumps(PRESETS) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factor": 4.0}, r"rope\.factor: got 4\.0; unset under --rope\.scaling none; it is for linear or yarn or"),
        (
            {"scaling": "linear", "factor": 2.0, "beta_fast": 8.0},
            r"rope\.beta_fast: got 8\.0; unset under .* for yarn",
        ),
        ({"scaling": "yarn"}, r"rope\.factor: got 'nothing'; .*at least 3 for rows of 48 tokens, 16 before"),
        ({"scaling": "yarn", "factor": 2.0}, r"rope\.factor: got 2\.0; at least 3, as the longest .* has 48 tokens"),
        (
            {"scaling": "yarn", "factor": 5.0, "original_length": 20},
            r"original_length: got 20; at most 16, the positions",
        ),
        ({"scaling": "yarn", "factor": 2.0, "original_length": 4}, r"factor: got 2\.0; at least 4: .* for 16 tokens"),
        ({"scaling": "yarn", "factor": 3.0, "beta_slow": 40.0}, r"rope\.beta_fast: got 32; above --rope\.beta-slow"),
        ({"scaling": "llama3", "factor": 3.0, "high_freq_factor": 4.0}, r"rope\.low_freq_factor: got 'nothing'"),
        (
            {"scaling": "llama3", "factor": 3.0, "high_freq_factor": 4.0, "low_freq_factor": 4.0},
            r"rope\.high_freq_factor: got 4\.0; above --rope\.low-freq-factor, which is 4",
        ),
        ({"scaling": "longrope", "factor": 3.0, "long_factor": LONG}, r"rope\.short_factor: got 'nothing'"),
        (
            {"scaling": "longrope", "factor": 3.0, "short_factor": SHORT, "long_factor": [1.0] * 3},
            r"rope\.long_factor: got '3 numbers'; 4, one for each frequency",
        ),
        (
            {"scaling": "longrope", "factor": 3.0, "short_factor": SHORT, "long_factor": [0.0] * 4},
            r"rope\.long_factor: got \[0\.0, 0\.0, 0\.0, 0\.0\]; numbers above 0",
        ),
    ],
)
def test_impossible_rope_settings_are_refused_by_name(tmp_path, settings, message):
    short().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        config_with(str(tmp_path), **settings)


def test_config_that_contradicts_rope_settings_is_named(tmp_path):
    phi = Phi3Config(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, original_max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    cases: list[tuple[PreTrainedConfig, dict[str, Any], str]] = [
        (GPT2Config(n_embd=32, n_head=2, n_layer=1), {"theta": 1e5}, r"rope\.theta.*gpt.*no rotary positions"),
        (
            GPT2Config(n_embd=32, n_head=2, n_layer=1),
            {"scaling": "yarn", "factor": 2.0},
            r"rope\.scaling: got 'yarn'",
        ),
        (phi, {"scaling": "yarn", "factor": 4.0}, r"rope\.scaling: got 'yarn'.*longrope"),
        (
            PhimoeConfig(max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
            {"scaling": "yarn", "factor": 4.0},
            r"rope\.scaling: got 'yarn'.*short_mscale",
        ),
        (phi, {"scaling": "linear", "factor": 8.0, "original_length": 8}, r"original_length: got 8; 16, as the config"),
        (
            LlamaConfig(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
            {"scaling": "yarn", "factor": 8.0},
            r"rope\.original_length: got 'nothing'; the context of .* before it was scaled \(linear\)",
        ),
    ]
    for number, (config, settings, message) in enumerate(cases):
        folder = tmp_path / f"gpt-{number}"
        config.save_pretrained(folder)
        with pytest.raises(UserError, match=message):
            config_with(str(folder), row=16, **settings)


def test_checkpoint_with_other_rope_settings_is_refused():
    own, longer = rope_of(short()), rope_of(short(rope_parameters=dict(KINDS["yarn"][1])))
    refuse_other_rope(own, rope_of(short()), "there")
    refuse_other_rope({}, longer, "there")  # of an earlier version
    with pytest.raises(UserError, match=r"rope\.scaling: got 'yarn'; default, as in there; --model with an exported"):
        refuse_other_rope(own, longer, "there")
    with pytest.raises(UserError, match=r"rope\.theta: got 30000\.0; 20000\.0, as in there"):
        refuse_other_rope(longer, longer | {"rope_theta": 3e4}, "there")
    nested = rope_of(family_config("gemma3"))
    other = json.loads(json.dumps(nested))
    refuse_other_rope(nested, other, "there")
    other["full_attention"]["rope_theta"] = 7.0
    with pytest.raises(UserError, match=r"rope\.theta: got 7\.0"):
        refuse_other_rope(nested, other, "there")
