"""Reading a model's folder: from the Hub its own files alone, and no two sources that differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from family_configs import tiny_config
from model_families import family_config, real_model
from tawpipe.data.tokenizer import load_tokenizer, train_tokenizer
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model, resolve_model
from tawpipe.model.files.pretrained import SafetensorsSource, count_files, stored_dtype, stored_dtypes

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMMIT = "5f0b02c75b57c5855da9ae460ce51323ea669d8a"


def shards(folder: Path, *, tied: bool = False) -> Path:
    """A folder of a Llama in two files with an index."""
    model = real_model(family_config("llama", tied=tied), torch.float32)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def edit_index(folder: Path, **places: str) -> None:
    """Write into an index in which file a tensor is; ``""`` takes it out."""
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"] |= {name.replace("__", "."): place for name, place in places.items()}
    content["weight_map"] = {name: place for name, place in content["weight_map"].items() if place}
    path.write_text(json.dumps(content))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A repository on a Hub that fetches into a cache; ``asked`` has the revisions that were asked for."""
    there, cached = tmp_path / "there", tmp_path / "models--a--b" / "snapshots" / COMMIT
    there.mkdir()
    asked: list[tuple[str, str | None]] = []

    def fetch(name: str, revision: str | None = None, allow_patterns: Any = None, ignore_patterns: Any = None) -> str:
        asked.append((name, revision))
        names = [str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()]
        for wanted in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (cached / wanted).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(there / wanted, cached / wanted)
        return str(cached)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return SimpleNamespace(gather_hops=there, asked=asked)


def test_hub_download_fetches_only_the_files_that_are_read(hub: SimpleNamespace) -> None:
    shards(hub.gather_hops)
    own = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tekken.json", "spiece.model"]
    own += ["qwen.tiktoken", "vocab.bpe", "merges.txt", "modeling_own.py", "tokenizer.model.v3"]
    others = ["consolidated.00.pth", "consolidated.safetensors", "original/params.json", "original/model.safetensors"]
    others += [
        "model.fp16.safetensors",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "onnx/config.json",
        "model.safetensors",
    ]
    for name in own + others:
        (hub.gather_hops / name).parent.mkdir(exist_ok=True)
        (hub.gather_hops / name).write_text("")
    folder = resolve_model("a/b@v1.0")
    assert folder is not None
    fetched = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    of_index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
    assert {*own, *of_index, "config.json"} <= fetched and not fetched & set(others)
    assert hub.asked == [("a/b", "v1.0"), ("a/b", COMMIT)]  # what has come between the two is of another commit


def test_hub_commit_is_recorded_in_origin_and_adapter(hub: SimpleNamespace) -> None:
    pytest.importorskip("peft")
    from tawpipe.model.settings import LoraSettings

    real_model(family_config("llama"), torch.float32).save_pretrained(hub.gather_hops)
    built = build_model("a/b@main", max_positions=8, lora=LoraSettings(rank=2))
    assert built.commit == COMMIT and f"a/b at commit {COMMIT}" in built.origin(seed=0)
    (config,) = built.model.peft_config.values()
    assert (config.base_model_name_or_path, config.revision) == ("a/b", COMMIT)


def test_hub_model_without_safetensors_is_refused(hub: SimpleNamespace) -> None:
    (hub.gather_hops / "config.json").write_text("{}")
    (hub.gather_hops / "pytorch_model.bin").write_text("")
    with pytest.raises(UserError, match="with safetensors, which this has not"):
        resolve_model("a/b")


@pytest.mark.parametrize("beside", ["chat_template.jinja", "special_tokens_map.json", "tokenizer_config.json"])
def test_tokenizer_json_path_uses_the_files_beside_it(tmp_path: Path, beside: str) -> None:
    tokenizer = train_tokenizer(["a b c"], 300)
    tokenizer.add_tokens(["<end>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<end>", "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<end>"}))
    for path in tmp_path.iterdir():
        if path.name not in ("tokenizer.json", beside):
            path.unlink()
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert bool(loaded.chat_template) == (beside == "chat_template.jinja")
    assert loaded.eos_token == ("<|endoftext|>" if beside == "chat_template.jinja" else "<end>")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_differing_tied_tensors_are_refused_and_equal_ones_are_merged(tmp_path: Path, family: str) -> None:
    config = family_config("llama", tied=True) if family == "llama" else tiny_config("gpt2")
    model = real_model(config, torch.float32)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embed = EMBED if family == "llama" else "transformer.wte.weight"
    tensors[HEAD] = tensors[embed].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(chain := Chain(build_model(str(tmp_path), max_positions=8).model), tmp_path)
    source.check_copies()
    tensors[HEAD][5, 3] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(chain, tmp_path)
    with pytest.raises(UserError, match=r"must be equal.*tie_word_embeddings: false.*or remove") as refusal:
        for unit in chain.units:
            source.unit(unit)
    assert embed in str(refusal.value) and HEAD in str(refusal.value)
    with pytest.raises(UserError, match="must be equal"):
        source.check_copies()
    untied = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(untied))
    both = Chain(build_model(str(tmp_path), max_positions=8).model)
    source, values = SafetensorsSource(both, tmp_path), dict[str, torch.Tensor]()
    for unit in both.units:
        flat = source.unit(unit)
        values |= {slot.name: slot.view(flat) for slot in unit.slots}
    assert values[HEAD].equal(tensors[HEAD]) and not values[HEAD].equal(values[embed])


def test_parameter_under_two_names_is_refused(tmp_path: Path) -> None:
    real_model(family_config("llama"), torch.float32).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    chain = Chain(build_model(str(tmp_path), max_positions=8).model)
    with pytest.raises(UserError, match=r"model.norm.weight and norm.weight are both model.norm.weight"):
        SafetensorsSource(chain, tmp_path)


def test_safetensors_index_beside_a_single_file_must_hold_equal_tensors(tmp_path: Path) -> None:
    tensors = dict[str, torch.Tensor]()
    for path in shards(tmp_path).glob("*.safetensors"):
        tensors |= load_file(path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert count_files(tmp_path) == len(list(tmp_path.glob("model-*.safetensors")))
    assert "; not read: model.safetensors" in build_model(str(tmp_path), max_positions=8).origin(seed=0)
    tensors[EMBED][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"model.safetensors and the files of .*index.json differ in {EMBED}: remove"):
        count_files(tmp_path)
    del tensors[EMBED]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"differ in {EMBED}: remove"):
        count_files(tmp_path)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (
            {"model__norm__weight": "model-00001-of"},
            r"says model.norm.weight in model-00001-of\S+, where the files have no",
        ),
        ({"model__norm__weight": ""}, r"does not say model.norm.weight in \S+, which the files hold"),
        ({"model__other": "model-00001-of"}, r"says model.other in"),
        ({"model__norm__weight": "gone.safetensors"}, "names files that are not there: gone.safetensors"),
        ({"model__norm__weight": 3}, "cannot be read"),
    ],
)
def test_safetensors_index_that_contradicts_its_files_is_refused(
    tmp_path: Path, places: dict[str, Any], said: str
) -> None:
    first = next(path.name for path in sorted(shards(tmp_path).glob("model-*.safetensors")))
    edit_index(
        tmp_path, **{name: first if str(place).startswith("model-") else place for name, place in places.items()}
    )
    with pytest.raises(UserError, match=said):
        count_files(tmp_path)


def mixed(folder: Path, family: str, wide: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """A folder in bf16 with some tensors in fp32, whose values bf16 has not; those tensors."""
    real_model(tiny_config(family), torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: torch.randn(tensors[name].shape) for name in tensors if name.endswith(wide)}
    save_file(tensors | kept, folder / "model.safetensors", metadata={"format": "pt"})
    return kept


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_fp32_buffers_are_used_unchanged(tmp_path: Path, family: str) -> None:
    kept = mixed(tmp_path, family, ("correction_bias",))
    built = build_model(str(tmp_path), max_positions=24)
    chain = Chain(built.model)
    source = built.source(chain, seed=0)
    chain.prepare("cpu", torch.bfloat16)
    chain.load_buffers(source.buffers())
    buffers = dict(chain.model.named_buffers())
    assert kept and all(buffers[name].equal(value) for name, value in kept.items())
    assert "correction_bias" not in built.wide_words(chain, torch.bfloat16)  # but from transformers 5.24 on, the router


@pytest.mark.parametrize(("family", "wide"), [("qwen3_moe", ("gate.weight",)), ("gpt_oss", ("sinks", "router.weight"))])
def test_fp32_parameters_computed_in_fewer_bits_are_named(tmp_path: Path, family: str, wide: tuple[str, ...]) -> None:
    kept = mixed(tmp_path, family, wide)
    built = build_model(str(tmp_path), max_positions=24)
    words = built.wide_words(Chain(built.model), torch.bfloat16)
    assert words.startswith(f"{len(kept)} parameters have 32 bits") and "bfloat16" in words
    assert all(any(name.endswith(end) for end in wide) for name in kept) and wide[0] in words
    assert built.wide_words(Chain(built.model), torch.float32) == ""


def test_parameters_that_a_class_keeps_in_fp32_are_named() -> None:
    from tawpipe.model.buffers import wide_parameters

    class Careful(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = {"model.norm", "q_proj"}

    names = wide_parameters(Careful(family_config("llama")))  # pyright: ignore[reportArgumentType]
    assert "model.norm.weight" in names and all(name == "model.norm.weight" or "q_proj" in name for name in names)


def test_invalid_generation_config_still_gives_the_eos_tokens(tmp_path: Path) -> None:
    real_model(family_config("llama"), torch.float32).save_pretrained(tmp_path)
    settings = {"eos_token_id": [3, 4], "do_sample": False, "temperature": 0.6, "pad_token_id": -1}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert build_model(str(tmp_path), max_positions=8).model.generation_config.eos_token_id == [3, 4]


def test_stored_dtype_ignores_8_bit_codes(tmp_path: Path) -> None:
    few = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    save_file({"codes": few, "norm": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == torch.bfloat16 and stored_dtypes(tmp_path) == {"norm": torch.bfloat16}
    save_file({"codes": few, "counts": torch.ones(4, dtype=torch.int64)}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == torch.float32
