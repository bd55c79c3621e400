"""Initial values and exports: the same weights whichever way they come and go."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from model_families import FAMILIES, MORE_FAMILIES, family_config, meta_model, real_model
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.errors import RunError, UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import PRESETS, build_model
from tawpipe.model.files.export import export_hugging_face
from tawpipe.model.files.pretrained import SafetensorsSource
from tawpipe.model.weights import InitSource, ModuleSource


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def named(chain: Chain, source: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """All parameters of a source by name."""
    values = {}
    for unit in chain.units:
        flat = source.unit(unit, dtype=dtype)
        assert flat.shape == (unit.numel,) and flat.dtype == dtype
        values |= {s.name: flat[s.offset : s.offset + s.numel].view(s.shape) for s in unit.slots}
    return values


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_folder_gives_the_weights_of_the_model_that_was_saved(family: str, tied: bool, tmp_path: Path):
    config = family_config(family, tied=tied)
    model = real_model(config, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    chain = Chain(meta_model(config))
    read = named(chain, SafetensorsSource(chain, tmp_path))
    assert_same(read, {name: parameter.detach() for name, parameter in model.named_parameters()})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_exported_model_opens_with_equal_logits(family: str, tied: bool, tmp_path: Path):
    """No missing or unexpected keys, and the exported model computes what the original computes."""
    config = family_config(family, tied=tied)
    model = real_model(config, torch.float32).eval()
    ids = torch.randint(3, 60, (2, 11))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.save_pretrained(tmp_path / "in")

    chain = Chain(meta_model(config))
    chain.prepare("cpu", torch.float32)
    chain.load_buffers(SafetensorsSource(chain, tmp_path / "in").buffers())
    folder = export_hugging_face(
        chain, tmp_path / "out", values.__getitem__, dtype=torch.float32, max_shard_bytes=20_000, is_writer=True
    )
    assert not list(tmp_path.glob("*.incomplete"))
    opening: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dense", output_loading_info=True)
    opened, info = opening
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    if opened._can_set_experts_implementation():
        opened.set_experts_implementation("eager")
    with torch.no_grad():
        assert torch.equal(opened.eval()(ids, use_cache=False).logits, logits)


def test_export_has_the_names_and_config_of_save_pretrained(tmp_path: Path):
    """Experts leave one by one, as every checkpoint of the family has them, and our attention leaves no trace."""
    model = real_model(family_config("qwen3_moe"), torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    chain = Chain(model)
    values = dict(model.named_parameters())
    export_hugging_face(chain, tmp_path / "ours", values.__getitem__, dtype=torch.float32, is_writer=True)
    assert_same(load_file(tmp_path / "ours/model.safetensors"), load_file(tmp_path / "theirs/model.safetensors"))
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs"))
    assert ours == theirs | {"rope_theta": theirs["rope_parameters"]["rope_theta"]}


def test_every_rank_requests_equal_parameters_and_only_one_writes(tmp_path: Path):
    config = family_config("qwen3_moe", tied=True)
    values = dict(real_model(config, torch.float32).named_parameters())
    asked: list[list[str]] = []
    for is_writer in (True, False):
        names: list[str] = []

        def get(name: str, names: list[str] = names, is_writer: bool = is_writer) -> torch.Tensor | None:
            names.append(name)
            return values[name] if is_writer else None

        chain = Chain(meta_model(config))
        folder = tmp_path / str(is_writer)
        export_hugging_face(chain, folder, get, dtype=torch.bfloat16, is_writer=is_writer)
        assert folder.exists() is is_writer
        asked.append(names)
    assert asked[0] == asked[1]
    assert {t.dtype for t in load_file(tmp_path / "True/model.safetensors").values()} == {torch.bfloat16}


def test_unfinished_export_is_replaced_by_the_next(tmp_path: Path):
    chain = Chain(meta_model(family_config("llama")))
    values = dict(real_model(family_config("llama"), torch.float32).named_parameters())

    def fails(name: str) -> torch.Tensor:
        if name == "model.norm.weight":
            raise RuntimeError("the node is gone")
        return values[name]

    with pytest.raises(RuntimeError):
        export_hugging_face(chain, tmp_path / "out", fails, dtype=torch.float32, is_writer=True)
    assert not (tmp_path / "out").exists()
    for _ in range(2):
        export_hugging_face(chain, tmp_path / "out", values.__getitem__, dtype=torch.float32, is_writer=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_export_raises_after_requesting_all_parameters(tmp_path: Path):
    chain = Chain(meta_model(family_config("llama")))
    values = dict(real_model(family_config("llama"), torch.float32).named_parameters())
    asked: list[str] = []
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"could not be exported to .*out: "):
        get = lambda name: asked.append(name) or values[name]  # noqa: E731
        export_hugging_face(chain, tmp_path / "file" / "out", get, dtype=torch.float32, is_writer=True)
    assert set(asked) == set(values)


@pytest.mark.parametrize("full_at", ["weights", "tokenizer"])
def test_export_without_disk_space_leaves_the_former_export(tmp_path: Path, full_at: str):
    """Small files are made before parameters are asked for; then all are, since other ranks take part in that."""
    chain = Chain(meta_model(family_config("llama")))
    values = dict(real_model(family_config("llama"), torch.float32).named_parameters())
    arguments = {"dtype": torch.float32, "is_writer": True, "max_shard_bytes": 20_000}
    export_hugging_face(chain, tmp_path / "out", values.__getitem__, **arguments)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    asked: list[str] = []

    def get(name: str) -> torch.Tensor:
        asked.append(name)
        return values[name]

    tokenizer = train_tokenizer(["a b c"], 300)
    tokenizer.add_tokens([f"token {n}" for n in range(2000)])
    before_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before_limit[1]))
    error = RunError if full_at == "weights" else UserError
    try:
        with pytest.raises(error, match=r"too large"):
            given = tokenizer if full_at == "tokenizer" else None
            export_hugging_face(chain, tmp_path / "out", get, tokenizer=given, **arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before_limit)
    assert set(asked) == (set(values) if full_at == "weights" else set())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_weight_files_written_before_a_full_disk_are_kept_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chain = Chain(meta_model(family_config("llama")))
    values = dict(real_model(family_config("llama"), torch.float32).named_parameters())
    saved = list[Path]()

    def full_later(tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        if len(saved) == 2:
            raise OSError(28, "No space left on device")
        saved.append(path)
        save_file(tensors, path, **more)

    monkeypatch.setattr("safetensors.torch.save_file", full_later)
    with pytest.raises(
        RunError, match=rf"No space left on device; 2 files of weights stay in {tmp_path}/out.incomplete"
    ):
        export_hugging_face(
            chain, tmp_path / "out", values.__getitem__, dtype=torch.float32, max_shard_bytes=20_000, is_writer=True
        )
    assert not (tmp_path / "out").exists() and all(path.is_file() for path in saved)
    assert json.loads((tmp_path / "out.incomplete" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_random_initialization_has_the_distribution_of_from_config(family: str):
    """Per parameter the same mean and deviation as ``from_config`` gives, constants exactly."""
    config = family_config(family, hidden_size=64, intermediate_size=96, vocab_size=257)
    torch.manual_seed(5)
    plain = {name: p.detach() for name, p in AutoModelForCausalLM.from_config(config).float().named_parameters()}
    chain = Chain(meta_model(config))
    for name, value in named(chain, InitSource(chain, 3)).items():
        expected = plain[name]
        if expected.numel() < 300:
            assert torch.equal(value, expected), name  # norms and biases
        else:
            assert abs(value.std() / expected.std() - 1) < 6 / value.numel() ** 0.5, name
            assert abs(value.mean()) < 5 * expected.std() / value.numel() ** 0.5, name
            assert value.unique().numel() > 0.9 * value.numel() and not torch.equal(value, expected)
    if family != "gpt2":  # which has no padding index
        assert not InitSource(chain, 3).parameter("model.embed_tokens.weight")[config.pad_token_id].any()


def test_initial_values_depend_only_on_seed_and_name():
    config = family_config("llama", tied=True)
    chain = Chain(meta_model(config))
    first = named(chain, InitSource(chain, 3))
    torch.manual_seed(99)
    frozen = meta_model(config)
    for parameter in frozen.model.layers[1].parameters():
        parameter.requires_grad_(False)
    other = Chain(frozen)
    other.prepare("cpu", torch.bfloat16)
    state = torch.get_rng_state()
    assert_same(first, named(other, InitSource(other, 3)))
    assert torch.equal(state, torch.get_rng_state())
    again = named(chain, InitSource(chain, 4))
    assert not torch.equal(first["model.embed_tokens.weight"], again["model.embed_tokens.weight"])
    wide = named(chain, InitSource(chain, 3), torch.float64)
    assert_same({n: v.float() for n, v in wide.items()}, first)


def test_model_with_values_is_its_own_weight_source():
    model = real_model(family_config("granite"), torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    chain = Chain(model)
    source = ModuleSource(chain)
    chain.prepare("cpu", torch.float32)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert_same(named(chain, source), before)


def test_extra_state_of_a_module_is_not_read_as_a_tensor():
    class Scaled(LlamaMLP):
        def get_extra_state(self) -> dict[str, int]:
            return {"scale": 2}

    model = real_model(family_config("llama"), torch.float32)
    model.model.layers[0].mlp.__class__ = Scaled
    facts = ModuleSource(Chain(model)).facts()
    assert "model.layers.0.mlp.up_proj.weight" in facts and not any("extra_state" in name for name in facts)


def test_folder_with_wrong_tensors_is_refused_by_name(tmp_path: Path):
    config = family_config("llama")
    real_model(config, torch.float32).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file({**tensors, "model.layers.7.extra": lost}, tmp_path / "model.safetensors")
    chain = Chain(meta_model(config))
    with pytest.raises(
        UserError, match=r"1 missing \(model.layers.1.mlp.up_proj.weight\).*1 unexpected \(model.layers.7"
    ):
        SafetensorsSource(chain, tmp_path)

    save_file({**tensors, "model.layers.1.mlp.up_proj.weight": lost[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"up_proj.weight must have shape \[40, 32\].*not \[39, 32\]"):
        SafetensorsSource(chain, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(UserError, match="cannot be read"):
        SafetensorsSource(chain, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"expected model.safetensors"):
        SafetensorsSource(chain, tmp_path)


def test_weights_without_the_base_prefix_or_under_the_tied_name_are_found(tmp_path: Path):
    config = family_config("llama", tied=True)
    model = real_model(config, torch.float32)
    save_file({n: p.detach() for n, p in model.model.named_parameters()}, tmp_path / "model.safetensors")
    chain = Chain(meta_model(config))
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert_same(named(chain, SafetensorsSource(chain, tmp_path)), expected)

    tensors = {name: value.clone() for name, value in expected.items()}
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(named(chain, SafetensorsSource(chain, tmp_path)), expected)


def test_presets_have_their_documented_sizes():
    for name, millions in {"tiny": 8, "small-125m": 124, "llama-1b": 1236, "llama-8b": 8030}.items():
        built = build_model(name, max_positions=2048)
        assert built.folder is None and all(p.is_meta for p in built.model.parameters())
        assert round(sum(p.numel() for p in built.model.parameters()) / 1e6) == millions, name
    built = build_model("tiny", vocab_size=500, max_positions=64)
    assert built.model.config.vocab_size == 500 and built.model.config.max_position_embeddings == 64
    assert PRESETS["tiny"]["vocab_size"] == 8192
    chain = Chain(built.model)
    assert isinstance(built.source(chain, seed=0), InitSource)


def test_folder_with_weights_is_loaded_and_config_alone_starts_random(tmp_path: Path):
    config = family_config("qwen3")
    config.save_pretrained(tmp_path)
    assert build_model(str(tmp_path), max_positions=128).folder is None
    real_model(config, torch.float32).save_pretrained(tmp_path)
    built = build_model(str(tmp_path), vocab_size=61, max_positions=128)
    chain = Chain(built.model)
    assert isinstance(built.source(chain, seed=0), SafetensorsSource)


def test_impossible_models_and_sizes_are_refused_by_name(tmp_path: Path):
    with pytest.raises(UserError, match=r"^model: .*'nothing'.*tiny, small-125m, llama-1b, llama-8b"):
        build_model("nothing", max_positions=16)
    with pytest.raises(UserError, match=r"must hold a config\.json"):
        build_model(str(tmp_path), max_positions=16)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(UserError, match=r"config\.json cannot be used"):
        build_model(str(tmp_path), max_positions=16)
    LlamaConfig(vocab_size=50, max_position_embeddings=32).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"vocab_size: .*vocabulary of 50"):
        build_model(str(tmp_path), vocab_size=51, max_positions=16)
    with pytest.raises(UserError, match=r"sequence_length: got 40; at most 32 .*longest document in a row has 33"):
        build_model(str(tmp_path), max_positions=40, longest=33)
    assert build_model(str(tmp_path), max_positions=40, longest=32).model.config.max_position_embeddings == 32
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UserError, match="decoder-only causal language model; a t5 model is none"):
        build_model(str(tmp_path), max_positions=16)


PICKLED = "pytorch_model.bin"


@pytest.mark.parametrize(
    ("files", "way"),
    [
        ([PICKLED], "AutoModelForCausalLM.from_pretrained("),
        (
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"],
            "and 1 more files; convert them: python",
        ),
        (["tf_model.h5"], "from_tf=True"),
        (["flax_model.msgpack"], "from_flax=True"),
        (["tiny.gguf"], 'gguf_file="tiny.gguf"'),
        (["consolidated.00.pth"], "save_pretrained"),
        (["consolidated.safetensors"], "save_pretrained"),
        (["model-00001-of-00002.safetensors"], "save_pretrained"),
    ],
)
def test_weights_that_are_not_safetensors_are_refused(tmp_path: Path, files: list[str], way: str):
    family_config("llama").save_pretrained(tmp_path)
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"^model: .*weights as model\.safetensors.*config\.json alone") as caught:
        build_model(str(tmp_path), max_positions=16)
    assert sorted(files)[0] in str(caught.value) and way in str(caught.value)


def test_trainer_files_beside_a_config_are_not_taken_for_weights(tmp_path: Path):
    family_config("llama").save_pretrained(tmp_path)
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state.pth"):
        (tmp_path / name).touch()
    assert build_model(str(tmp_path), max_positions=16).origin(seed=3) == "random (seed 3)"


@pytest.mark.slow
def test_recommended_command_converts_pickled_weights(tmp_path: Path):
    config = family_config("llama")
    model = real_model(config, torch.float32)
    config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / PICKLED)
    with pytest.raises(UserError) as caught:
        build_model(str(tmp_path), max_positions=16)
    command = shlex.split(str(caught.value).split("convert them: ")[1].split("; or config.json")[0])
    subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True)
    built = build_model(str(tmp_path), max_positions=16)
    assert built.origin(seed=0) == f"{tmp_path}, 1 safetensors file"
    chain = Chain(built.model)
    assert_same(named(chain, SafetensorsSource(chain, tmp_path)), dict(model.named_parameters()))


def test_hub_model_without_safetensors_is_refused_by_build_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    family_config("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'some/one'; a model on the Hub with safetensors.*AutoTokenizer") as caught:
        build_model("some/one", max_positions=16)
    assert 'save_pretrained("one")' in str(caught.value)
    real_model(family_config("llama"), torch.float32).save_pretrained(tmp_path, max_shard_size="20KB")
    origin = build_model("some/one", max_positions=16).origin(seed=0)
    assert origin == f"{tmp_path}, {len(list(tmp_path.glob('*.safetensors')))} safetensors files"
