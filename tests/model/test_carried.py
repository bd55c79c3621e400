"""A folder goes in and comes out: tensors byte for byte, config keys, stops, rotary settings in both forms."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tawpipe
from every_family import micro_batches
from family_configs import tiny_config
from model_families import family_config, real_model
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.model.files.carried import TEXTS, tokenizers_agree
from tawpipe.model.files.export import carry, export_hugging_face
from tawpipe.model.files.exported import differences
from tawpipe.model.files.pretrained import SafetensorsSource
from tawpipe.model.settings import RopeSettings
from tawpipe.pipeline.batch import LocalBatch
from tawpipe.runtime.homes.optimizer import adamw

OLDER = ("llama", "qwen2", "mistral", "phi3", "gpt_neox")
"""Families whose config.json is rewritten as transformers 4 wrote it."""
QUICK = ("llama", "deepseek_v3")
FAMILIES = (
    *OLDER,
    *("deepseek_v3", "qwen3_moe", "gpt2", "gemma2", "gemma3_text", "qwen3", "cohere2", "granite", "olmo2", "glm4_moe"),
    *("mixtral", "stablelm", "starcoder2", "smollm3", "gpt_oss"),
)
ADDED = {"rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Keys that an exported config.json has besides those of its base: the other form of its rotary settings."""
DRAWN = {"eos_token_id": [7, 9], "temperature": 0.6, "top_p": 0.95, "do_sample": False, "odd": {"kept": True}}
"""A generation config that transformers' own check would refuse to save."""


def older_form(folder: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    rope = content.pop("rope_parameters")
    content |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    content["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    content["torch_dtype"] = content.pop("dtype")
    path.write_text(json.dumps(content | {"transformers_version": "4.44.0"}, indent=2))


def base_folder(folder: Path, family: str) -> Path:
    """A folder with random values in bf16, routers and their biases in fp32, and configs with keys of its own."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    wide = [name for name in tensors if "correction_bias" in name or name.endswith(("gate.weight", "sinks"))]
    tensors |= {name: torch.randn(tensors[name].shape) for name in wide}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if family in OLDER:
        older_form(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"a_key_of_others": [1, {"b": None}]}))
    (folder / "generation_config.json").write_text(json.dumps(DRAWN))
    return folder


def raw_tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Name -> dtype and bytes of every tensor of a folder."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                value = file.get_tensor(name)
                tensors[name] = str(value.dtype), value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensors


def after_a_step(base: Path, out: Path, **more: Any) -> Path:
    """The folder that a pipeline exports after a step that changes nothing."""
    built = build_model(str(base), max_positions=24)
    pipeline = tawpipe.Pipeline(
        built.model,
        weights=lambda chain: SafetensorsSource(chain, base),
        optimizer=adamw(0.0, weight_decay=0.0),
        dtype=torch.float32,
        checks=tawpipe.CheckSettings(check="never"),
        **more,
    )
    try:
        batches = micro_batches(((24,),))
        pipeline.step(LocalBatch(1, 24, batches))
        return pipeline.export(out)
    finally:
        pipeline.close()


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_exported_folder_keeps_tensors_and_configs_of_the_base(tmp_path: Path, family: str) -> None:
    base = base_folder(tmp_path / "base", family)
    out = after_a_step(base, tmp_path / "out")
    before, after = raw_tensors(base), raw_tensors(out)
    assert after.keys() == before.keys()
    assert [name for name in before if before[name] != after[name]] == []
    for name, added in (("config.json", ADDED), ("generation_config.json", set())):
        theirs, ours = (json.loads((folder / name).read_text()) for folder in (base, out))
        assert {key: ours.get(key) for key in theirs} == theirs
        assert ours.keys() - theirs.keys() <= added
    read = [AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": ""} for folder in (base, out)]
    assert read[0] == read[1]


def test_ten_texts_distinguish_two_tokenizers() -> None:
    first, other = (train_tokenizer([text * 50], 300) for text in ("some words", "other letters"))
    assert len(TEXTS) == 10 and tokenizers_agree(first, first) and not tokenizers_agree(first, other)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 5e5}, "rotary"),
        ("config.json", {"num_hidden_layers": 1}, "unexpected"),
        ("config.json", {"architectures": None, "model_type": "no such model"}, "cannot be used"),
        ("generation_config.json", {"eos_token_id": 1}, "generation_config.json has another content"),
    ],
)
def test_differences_of_an_exported_folder_are_named(
    tmp_path: Path, file: str, change: dict[str, Any], said: str
) -> None:
    base = base_folder(tmp_path / "base", "llama")
    chain = Chain(build_model(str(base), max_positions=24).model)
    written = {name: (value.dtype, list(value.shape)) for name, value in load_file(base / "model.safetensors").items()}
    files = {path.name: path.read_bytes() for path in base.glob("*.json")}
    assert differences(chain, base, written, files, None, adapter=False) == []
    (base / file).write_text(json.dumps(json.loads((base / file).read_text()) | change))
    assert any(said in line for line in differences(chain, base, written, files, None, adapter=False))


def test_tied_head_stored_twice_is_exported_twice(tmp_path: Path) -> None:
    real_model(family_config("qwen3", tied=True), torch.float32).save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    out = after_a_step(tmp_path / "base", tmp_path / "out")
    assert raw_tensors(out) == raw_tensors(tmp_path / "base")


def test_changed_rope_settings_are_exported_in_both_config_forms(tmp_path: Path) -> None:
    for family in ("llama", "qwen3"):  # which say them in the older form, and in the newer one
        base = base_folder(tmp_path / family, family)
        rope = RopeSettings(scaling="yarn", factor=4.0)
        built = build_model(str(base), max_positions=24, rope=rope)
        files = carry(Chain(built.model)).files
        content = json.loads(files["config.json"])
        assert content["rope_parameters"]["rope_type"] == content["rope_scaling"]["rope_type"] == "yarn"
        assert content["rope_scaling"]["factor"] == content["rope_parameters"]["factor"] == 4.0
        assert content["rope_theta"] == content["rope_parameters"]["rope_theta"]
        assert content["max_position_embeddings"] == built.model.config.max_position_embeddings


def test_rope_settings_per_layer_kind_are_exported_in_the_new_form_only(tmp_path: Path) -> None:
    base = base_folder(tmp_path, "gemma3_text")
    content = json.loads(carry(Chain(build_model(str(base), max_positions=24).model)).files["config.json"])
    assert "rope_scaling" not in content and "full_attention" in content["rope_parameters"]


def test_rope_settings_under_family_specific_names_are_exported_as_trained(tmp_path: Path) -> None:
    base = base_folder(tmp_path, "gpt_neox")
    content = json.loads((base / "config.json").read_text())
    content |= {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_emb_base": 10000}
    (base / "config.json").write_text(json.dumps(content))
    built = build_model(str(base), max_positions=24, rope=RopeSettings(theta=9999.0))
    files = carry(Chain(built.model)).files
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_bytes(files["config.json"])
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == built.model.config.rope_parameters


def test_carried_files_and_weights_survive_removal_of_the_base_folder(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "deepseek_v3")
    before = raw_tensors(base)
    chain = Chain(build_model(str(base), max_positions=24).model)
    carried = carry(chain, base)
    source = SafetensorsSource(chain, base)
    values = {slot.name: slot.view(source.unit(unit)).clone() for unit in chain.units for slot in unit.slots}
    buffers = source.buffers()
    shutil.rmtree(base)
    chain.prepare("cpu", torch.float32)
    chain.load_buffers(buffers)
    out = export_hugging_face(chain, tmp_path / "out", values.__getitem__, is_writer=True, carried=carried)
    assert raw_tensors(out) == before


def test_tokenizer_without_a_template_removes_the_template_of_the_base(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "llama")
    tokenizer = train_tokenizer(["some words"], 300)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(base)
    tokenizer.chat_template = None
    chain = Chain(build_model(str(base), max_positions=24).model)
    files = carry(chain, base, tokenizer=tokenizer).files
    assert "chat_template.jinja" not in files and "tokenizer.json" in files


def test_special_tokens_of_a_run_are_written_into_base_tokenizer_files(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "llama")
    tokenizer = train_tokenizer(["some words"], 300)
    tokenizer.add_tokens(["<end>"], special_tokens=True)
    tokenizer.save_pretrained(base)
    path = base / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer.eos_token = "<end>"
    settings = json.loads(
        carry(Chain(build_model(str(base), max_positions=24).model), tokenizer=tokenizer).files[path.name]
    )
    assert (settings["eos_token"], settings["tokenizer_class"]) == ("<end>", "PreTrainedTokenizerFast")
