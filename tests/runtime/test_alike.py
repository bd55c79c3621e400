"""Processes whose disks hold other models, or whose scripts make other ones, are all refused with the difference."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from cases import llama
from chat_families import TRAINED
from tawpipe.model.facts import SAMPLE, WHOLE, Fact, Facts, tensor_facts
from tawpipe.runtime.alike import _difference

CODE = "modeling_own.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "base"
    llama(torch.float32, layers=2).save_pretrained(folder)
    TRAINED.save_pretrained(folder)
    (folder / CODE).write_text("A = 1")
    return folder


def changed(base: Path, name: str, change: Callable[[Path], Any]) -> str:
    """A copy of the folder that is other than it."""
    folder = base.with_name(name)
    shutil.copytree(base, folder)
    change(folder)
    return str(folder)


def of_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return act


def of_config(**keys: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | keys))

    return act


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def in_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    llama(torch.float32, layers=2).save_pretrained(folder, max_shard_size="8KB")
    assert (folder / "model.safetensors.index.json").is_file()


UP = "model.layers.1.mlp.up_proj.weight"
FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "equal": (lambda folder: None, ""),
    "in shards": (in_shards, ""),
    "saved by another version": (of_config(transformers_version="4.0.0"), ""),
    "with words": (lambda folder: (folder / "README.md").write_text("words"), ""),
    "one value": (of_tensors(lambda t: t[UP][-1].add_(1e-3)), f"{UP} in model.safetensors has other content on rank 1"),
    "dtype": (
        of_tensors(lambda t: t.update({UP: t[UP].bfloat16()})),
        f"{UP} .* is BF16 .* instead of F32 .* on rank 1",
    ),
    "missing": (of_tensors(lambda t: t.pop(UP)), f"{UP} in model.safetensors is missing instead of F32"),
    "besides": (of_tensors(lambda t: t.update(more=torch.ones(2))), r"more in .* is F32 \[2\] instead of missing"),
    "config": (of_config(rms_norm_eps=0.5), r"rms_norm_eps in config.json is 0.5 instead of 1e-06 on rank 1"),
    "cut off": (cut_off, r"(not fully covered|ends too early).*; so on rank 1, 2 \("),
    "no config": (lambda folder: (folder / "config.json").unlink(), "must hold a config.json; so on rank 1, 2 "),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"is missing instead of F32.*and \d+ more",
    ),
    "code": (lambda folder: (folder / CODE).write_text("A = 2"), f"{CODE} is A = 2 instead of A = 1"),
}


def test_differing_model_folders_are_refused_on_all_ranks(pool: Any, base: Path) -> None:
    cases = {name: [str(base), changed(base, name, change)] for name, (change, _) in FOLDERS.items()}
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(base, base.parent / "snapshots" / commit)
    cases["commit"] = [str(base.parent / "snapshots" / (letter * 40)) for letter in "ab"]
    cases["preset"] = ["tiny", "tiny"]
    expected = {name: words for name, (_, words) in FOLDERS.items()} | {"commit": "Hub's commit is b+ instead of a+ on"}
    said = pool.run("one_model:of_folders", 3, 1, cases=cases, code=True)
    for name in cases:
        words = expected.get(name, "")
        assert len({reason(each[name]) for each in said}) == 1, (name, said)
        assert_said(said[0][name], words and f"^model: got .*{words}")
    assert "on rank 1, 2 (" in said[0]["one value"] and "unlike on rank 0 (" in said[0]["one value"]
    assert pool.run("one_model:of_folders", 2, 1, cases={"code": cases["code"]})[0]["code"] == ""  # which is not run
    swapped = {name: folders[::-1] for name, folders in cases.items() if name in ("missing", "no config")}
    said = pool.run("one_model:of_folders", 2, 1, cases=swapped)
    assert [reason(said[0][name]) for name in swapped] == [reason(said[1][name]) for name in swapped]
    assert_said(said[0]["missing"], f"{UP} .* is F32 .* instead of missing on rank 1")
    assert_said(said[0]["no config"], "so on rank 0")


def reason(said: str) -> str:
    """What is said without the folder, which has another name on each rank here."""
    return said.partition("; ")[2]


def assert_said(said: str, words: str) -> None:
    assert (re.search(words, said) is not None) if words else not said, said


def test_service_refuses_differing_model_folders(pool: Any, base: Path) -> None:
    folders = [str(base), changed(base, "served", of_tensors(lambda tensors: tensors[UP].mul_(2)))]
    for words in pool.run("one_model:of_served", 2, 1, folders=folders):
        assert_said(words, f"{UP} in model.safetensors has other content")
    assert pool.run("one_model:of_served", 2, 1, folders=folders[:1] * 2) == ["", ""]


def test_differing_adapters_and_tokenizers_are_refused_on_all_ranks(pool: Any, base: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(9)))
    adapter = base.with_name("adapter")
    get_peft_model(llama(torch.float32, layers=2), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        str(adapter)
    )

    def alpha(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 99}))

    def values(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file({name: value + 1 for name, value in load_file(path).items()}, path)

    def letters(folder: Path) -> None:
        path = folder / "tokenizer.json"
        spelled = json.loads(path.read_text())
        vocabulary = spelled["model"]["vocab"]
        (a, first), (b, second), *_ = ((word, vocabulary[word]) for word in ("x", "y"))
        vocabulary |= {a: second, b: first}
        path.write_text(json.dumps(spelled))

    same = [str(base), changed(base, "again", lambda folder: None)]
    cases = [
        (same, [str(adapter)] * 2, "^ready$"),
        (
            same,
            [str(adapter), changed(adapter, "alpha", alpha)],
            "lora_alpha in adapter_config.json is 99 instead of 8",
        ),
        (
            same,
            [str(adapter), changed(adapter, "values", values)],
            r"lora.adapter: .*q_proj.* in adapter_model.saf.*other",
        ),
        ([same[0], changed(base, "letters", letters)], None, "the data's tokenizer in model has other content"),
    ]
    for number, (folders, adapters, words) in enumerate(cases):
        machines = [tmp_path / f"{number}-{place}" for place in range(2)]
        for place, machine in enumerate(machines):
            machine.mkdir()
            (machine / "model").symlink_to(folders[place])
            if adapters:
                (machine / "adapter").symlink_to(adapters[place])
        given = {"machines": [str(machine) for machine in machines], "data": str(tmp_path / "rows.jsonl")}
        said = pool.run("one_model:of_runs", 2, 1, **given)
        assert said[0] == said[1]
        assert_said(said[0], words)


MODELS = {
    "same": "",
    "same adapter": "",
    "values": r"model.embed_tokens.weight has other content \(and \d+ more\)",
    "one value": "layers.1.mlp.up_proj.weight has other content on rank 1",
    "buffer": "bias_of_experts has other content on rank 1",
    "frozen": "lm_head.weight is frozen .* instead of trained",
    "config": "rms_norm_eps in its config is 1e-06 instead of 1e-05",
    "adapter": "lora_alpha in the config of adapter default is 8 instead of 4",
    "same ia3": "",
    "ia3": r"target_modules in the config of adapter default is \[\"o_proj\".* instead of \[\"k_proj\"",
    "vera": "projection_prng_key in the config of adapter default is 1 instead of 0",
    "none": "the seed is 0 instead of missing|is missing instead of",
    "seed": "the seed is 1 instead of 0",
    "folder": f"{UP} in model.safetensors has other content",
}


def test_differing_models_of_scripts_are_refused_on_all_ranks(pool: Any, base: Path) -> None:
    folders = [str(base), changed(base, "script", of_tensors(lambda tensors: tensors[UP].mul_(2)))]
    said = pool.run("one_model:of_models", 2, 1, folders=folders)
    for name, words in MODELS.items():
        assert said[0][name] == said[1][name], name
        assert_said(said[0][name], words)
    assert said[1]["broken"] == "raised: a disk fails"  # as it was raised there
    assert_said(said[0]["broken"], "RuntimeError: a disk fails.*; so on rank 1")


@pytest.mark.parametrize("length", [3, 60, 79, 80, 200])
def test_difference_of_long_values_shows_the_differing_part(length: int) -> None:
    ours, theirs = (Facts(paths=Fact("", "x" * length + name + "y" * 100)) for name in ("first", "second"))
    said = _difference(ours, theirs)
    assert re.fullmatch(r"paths is (\.\.\.)?x*firsty+\.\.\. instead of (\.\.\.)?x*secondy+\.\.\.", said), said
    assert len(said) < 220


@pytest.mark.parametrize("place", [0, WHOLE // 4, -1])
def test_digest_of_a_large_tensor_samples_bytes_from_everywhere(tmp_path: Path, place: int) -> None:
    size = WHOLE // 2  # elements of 4 bytes
    tensors = {"small": torch.zeros(3), "large": torch.zeros(size)}
    save_file(tensors, tmp_path / "a.safetensors")
    before = tensor_facts([tmp_path / "a.safetensors"])
    tensors["large"][place] = 1
    save_file(tensors, tmp_path / "b.safetensors")
    after = tensor_facts([tmp_path / "b.safetensors"])
    assert before["small"].digest == after["small"].digest and before["large"].digest != after["large"].digest
    assert 4 * size > 3 * SAMPLE
