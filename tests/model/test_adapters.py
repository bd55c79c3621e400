"""Adapters and frozen parameters as the settings ask for them: the numbers are those of a plain process with peft, and
folders go both ways.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from borders import rows_of
from model_families import family_config, keep_fp64, real_model
from pipelines import make_pipeline
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.adapters import (
    adapter_facts,
    adapter_words,
    check_adapter,
    freeze,
    other_base_words,
    with_adapter,
)
from tawpipe.model.files.build import NO_ADAPTER, BuiltModel, build_model
from tawpipe.model.files.merged import refuse_unmergeable
from tawpipe.model.settings import LoraSettings
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.homes.optimizer import adamw

peft = pytest.importorskip("peft")
PROJECTIONS = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "lora": LoraSettings(rank=3, alpha=5, targets=PROJECTIONS),
    "dora": LoraSettings(rank=3, targets=PROJECTIONS, dora=True),
    "rslora": LoraSettings(rank=4, alpha=3, rslora=True),
    "experts": LoraSettings(rank=3, expert_rank=2, targets=["q_proj", "experts"]),
    "one of the experts": LoraSettings(rank=3, alpha=5, targets=["experts.down_proj"], rslora=True),
}
FAMILY = {"experts": "qwen3_moe", "one of the experts": "gpt_oss"}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


def saved(folder: Path, family: str = "llama", *, tied: bool = False, dtype: torch.dtype = torch.float32) -> str:
    """A folder with a model's weights."""
    real_model(family_config(family, tied=tied), torch.float32).to(dtype).save_pretrained(folder)
    return str(folder)


def built(folder: str, lora: LoraSettings = NO_ADAPTER, frozen: tuple[str, ...] = ()) -> BuiltModel:
    return build_model(folder, max_positions=16, lora=lora, frozen=frozen)


def piped(model: BuiltModel, **knobs: Any) -> Pipeline:
    knobs = {"dtype": torch.float64, "optimizer": adamw(1e-2, eps=1e-6), "check": "never"} | knobs
    return make_pipeline(model.model, weights=lambda chain: model.source(chain, seed=3), **knobs)


def with_peft(base: str, lora: LoraSettings, folder: Path) -> Any:
    """A plain peft model whose adapter does something, in fp64; saved in fp32, which it has been rounded to."""
    modules = [name for name in lora.targets if "experts" not in name]
    experts = [name for name in EXPERTS for target in lora.targets if f".{target}" in name and target not in modules]
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * (lora.rank or 0),
        target_modules="all-linear" if modules == ["all-linear"] else modules,
        target_parameters=experts or None,
        rank_pattern=dict.fromkeys(experts, lora.expert_rank) if lora.expert_rank else {},
        alpha_pattern=dict.fromkeys(experts, 2 * lora.expert_rank) if lora.expert_rank else {},
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(2)
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", experts_implementation="eager")
    model = peft.get_peft_model(plain, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.05
    model.save_pretrained(folder)
    buffers = {name: (path, value.clone()) for name, value in model.named_buffers() for path in [name.rpartition(".")]}
    model.double().train()
    for (path, _, leaf), value in buffers.values():  # rotary frequencies are fp32, whatever the model computes in
        model.get_submodule(path)._buffers[leaf] = value
    return model


def plain_steps(model: Any, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a plain process with the optimizer of ``piped``."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    losses = []
    for step in range(steps):
        batch = rows_of(step)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.get_base_model().named_parameters()}


def weights(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    found = {name: pipeline.parameter(name) for name in pipeline.parameter_names}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("made_on", "spec", "other"),
    [
        ("Org/Name", "Org/Name", False),
        ("Org/Name", "Other/Name", True),
        ("Org/Name", "Org/Name-Instruct", True),
        ("Org/Name", "/data/name", False),
        ("Org/Name", "{}/hub/models--Org--Name/snapshots/1a2b", False),
        ("Org/Name", "{}/hub/models--Org--Name-2/snapshots/1a2b", True),
        ("/elsewhere/Name", "{}/Name/", False),
        ("/elsewhere/runs/first/model", "{}/runs/first/model", False),
        ("/elsewhere/runs/first/model", "{}/runs/second/model", True),
        ("{}/link", "{}/Name", False),
        (None, "Org/Name", False),
    ],
)
def test_adapter_made_on_another_base_names_both_bases(made_on, spec, other, tmp_path):
    (tmp_path / "Name").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "Name")
    made_on, spec = made_on and made_on.format(tmp_path), spec.format(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": made_on}))
    words = other_base_words(tmp_path, spec)
    assert bool(words) is other and (not other or (str(made_on) in words and spec in words))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_adapter_folder_trains_exports_and_merges_as_in_peft(kind: str, tmp_path: Path):
    """Loaded, trained, exported as an adapter and merged: all as peft has it."""
    base = saved(tmp_path / "base", FAMILY.get(kind, "llama"))
    plain = with_peft(base, KINDS[kind], tmp_path / "adapter")
    model = built(base, LoraSettings(adapter=str(tmp_path / "adapter")))
    assert model.adapter_settings == built(base, KINDS[kind]).adapter_settings | {"targets": ANY}
    pipeline = piped(model)
    losses, expected = plain_steps(plain, 3)
    assert [pipeline.step(rows_of(step)).loss for step in range(3)] == pytest.approx(losses, rel=1e-10)
    found = weights(pipeline)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.linalg.norm(found[name] - value) <= 1e-10 * torch.linalg.norm(value), name

    pipeline.export(tmp_path / "out", dtype=torch.float64)
    opened = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base).double(), tmp_path / "out")
    pipeline.export(tmp_path / "merged", dtype=torch.float64, merge=True, max_shard_bytes=4096)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    pipeline.close()
    wanted = plain.merge_and_unload()
    for name, value in opened.merge_and_unload().named_parameters():
        assert torch.allclose(value, wanted.get_parameter(name), rtol=1e-6, atol=1e-8), name
        assert torch.allclose(merged.get_parameter(name), wanted.get_parameter(name), rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("kind", KINDS)
def test_new_adapter_leaves_the_loss_unchanged(kind: str, tmp_path: Path):
    """The norms of DoRA among them, which are those of the base weights."""
    base = saved(tmp_path, FAMILY.get(kind, "llama"))
    with_one, without = (piped(built(base, lora)) for lora in (KINDS[kind], LoraSettings()))
    batch = rows_of()
    assert with_one.evaluate(batch).loss == pytest.approx(without.evaluate(batch).loss, rel=1e-12)
    assert any("lora_A" in name and value.any() for name, value in weights(with_one).items())
    with_one.step(batch)
    assert any("lora_B" in name and value.any() for name, value in weights(with_one).items())
    assert all(one.trainable == ("lora_" in s.name) for one in with_one.chain.units for s in one.slots)
    for one in (with_one, without):
        one.close()


def test_dora_starts_with_the_norms_of_a_quantized_base(tmp_path: Path):
    """A new adapter changes nothing there, either."""
    base = saved(tmp_path)
    pipelines = [piped(built(base, KINDS[kind]), quantize="nf4", dtype=torch.float32) for kind in ("lora", "dora")]
    plain, normed = (one.evaluate(rows_of()).loss for one in pipelines)
    assert normed == pytest.approx(plain, rel=1e-6)
    for one in pipelines:
        one.close()


def test_resumed_adapter_with_dropout_repeats_losses_bit_by_bit(tmp_path: Path):
    """With dropout, whose numbers come again."""
    base, lora = saved(tmp_path / "base"), replace(KINDS["dora"], dropout=0.4)
    whole = piped(built(base, lora))
    whole.step(rows_of(0))
    whole.save(tmp_path / "state")
    undisturbed = whole.evaluate(rows_of(1)).loss
    losses = [whole.step(rows_of(step)).loss for step in (1, 2)]
    assert abs(losses[0] / undisturbed - 1) > 1e-6, "nothing was dropped"
    again = piped(built(base, lora))
    again.load(tmp_path / "state")
    assert [again.step(rows_of(step)).loss for step in (1, 2)] == losses
    first, second = weights(whole), weights(again)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    for one in (whole, again):
        one.close()


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_merged_model_has_the_loss_of_its_adapter(family: str, tmp_path: Path):
    """Layers of another kind, and weights that are stored in another form."""
    base = saved(tmp_path / "base", family)
    model = built(base, LoraSettings(rank=2))
    assert ("get none" in model.adapter_words) == (family == "qwen3_moe")
    pipeline = piped(model, dtype=torch.float32)
    pipeline.step(rows_of())
    loss = pipeline.evaluate(rows_of()).loss
    pipeline.export(tmp_path / "merged", merge=True)
    pipeline.close()
    merged = piped(built(str(tmp_path / "merged")), dtype=torch.float32)
    assert merged.evaluate(rows_of()).loss == pytest.approx(loss, rel=1e-5)
    merged.close()


def test_frozen_parameters_are_unchanged_and_all_others_are_trained(tmp_path: Path):
    base = saved(tmp_path)
    model = built(base, frozen=("model.layers.[01]", "*norm.weight"))
    before = {name: p.clone() for name, p in AutoModelForCausalLM.from_pretrained(base).named_parameters()}
    pipeline = piped(model, dtype=torch.float32)
    pipeline.step(rows_of())
    changed = {name for name, value in weights(pipeline).items() if not torch.equal(value, before[name])}
    frozen = {n for n in before if n.startswith(("model.layers.0.", "model.layers.1.")) or n.endswith("norm.weight")}
    assert changed == before.keys() - frozen and frozen
    pipeline.close()


def test_freeze_patterns_use_parameter_names_without_the_adapter(tmp_path: Path):
    model = built(saved(tmp_path), LoraSettings(rank=2), ("model.layers.0", "*.lora_A.*")).model.get_base_model()
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert trained and all("lora_B" in name and not name.startswith("model.layers.0.") for name in trained)
    tied = build_model("tiny", max_positions=16, frozen=["lm_head"]).model
    assert not tied.get_input_embeddings().weight.requires_grad


REFUSED = {
    "a name that is not there": ({"lora": LoraSettings(rank=2, targets=["q_prj"])}, "q_prj.*did you mean q_proj"),
    "one of two is not there": ({"lora": LoraSettings(rank=2, targets=["q_proj", "w1"])}, "lora.targets: got 'w1'"),
    "a module that is no layer": ({"lora": LoraSettings(rank=2, targets=["mlp"])}, "lora.targets: got 'mlp'"),
    "no such parameter": ({"frozen": ("model.layrs.0",)}, "freeze: got 'model.layrs.0'.*model.layers.0"),
    "everything": ({"frozen": ("model", "lm_head")}, "freeze: got 'model lm_head'.*leave a parameter"),
    "every adapter": ({"lora": LoraSettings(rank=2), "frozen": ("*lora_?.*",)}, "freeze.*leave a parameter"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_lora_and_freeze_settings_that_match_nothing_are_refused(what: str):
    arguments, words = REFUSED[what]
    with pytest.raises(UserError, match=words):
        build_model("tiny", max_positions=16, **arguments)


def test_expert_targets_are_named_as_settings_or_parameters(tmp_path: Path):
    base = saved(tmp_path, "qwen3_moe")
    for targets, names in (
        (["experts"], EXPERTS),
        (["gate_up_proj"], EXPERTS[:1]),
        (["experts.down_proj", "q_proj"], [EXPERTS[1], "q_proj"]),
        (["all-linear", "experts"], [*EXPERTS, "k_proj", "o_proj", "q_proj", "v_proj"]),
    ):
        model = built(base, LoraSettings(rank=2, expert_rank=3, targets=targets))
        assert model.adapter_settings["targets"] == sorted(names)
        assert model.adapter_settings["expert_rank"] == 3 and "(experts: 3 each, alpha 6)" in model.adapter_words
    assert (
        "experts.gate_up_proj) get none (--lora.targets all-linear experts)"
        in built(base, LoraSettings(2)).adapter_words
    )


EXPERTS_REFUSED = {
    "no experts": ("llama", {"targets": ["experts"]}, "lora.targets: got 'experts'.*no experts"),
    "another name": ("qwen3_moe", {"targets": ["experts.up"]}, "or experts, or one of them: mlp.experts.down_proj"),
    "a name for two": ("qwen3_moe", {"targets": ["down_proj", "q_proj"]}, "peft takes these for experts"),
    "dropout": ("qwen3_moe", {"targets": ["experts"], "dropout": 0.1}, "lora.dropout: got 0.1; unset with experts"),
    "dora": ("qwen3_moe", {"targets": ["experts"], "dora": True}, "lora.dora: got True; unset with experts"),
    "a rank for none": ("qwen3_moe", {"expert_rank": 2}, "lora.expert_rank: got 2; unset without experts"),
}


@pytest.mark.parametrize("what", EXPERTS_REFUSED)
def test_expert_settings_that_cannot_work_are_refused(what: str, tmp_path: Path):
    family, settings, words = EXPERTS_REFUSED[what]
    with pytest.raises(UserError, match=words):
        built(saved(tmp_path, family), LoraSettings(rank=2, **settings))


def test_adapter_of_another_number_of_experts_is_refused(tmp_path: Path):
    base, folder = saved(tmp_path / "base", "qwen3_moe"), tmp_path / "adapter"
    with_peft(base, KINDS["experts"], folder)
    config = family_config("qwen3_moe", num_experts=2)
    real_model(config, torch.float32).save_pretrained(tmp_path / "fewer")
    model = built(str(tmp_path / "fewer"), LoraSettings(adapter=str(folder)))
    with pytest.raises(UserError, match=r"experts.*there and .* here \(the number of experts is a factor\)"):
        model.source(Chain(model.model), seed=0)
    with pytest.raises(UserError, match=r"lora.expert_rank: got 4; 2 as in .*adapter, or unset"):
        built(base, LoraSettings(adapter=str(folder), expert_rank=4))
    again = built(base, LoraSettings(adapter=str(folder), targets=["all-linear", "experts"]))
    assert again.adapter_settings["expert_rank"] == 2


def test_mismatching_adapter_folder_is_refused_by_name(tmp_path: Path):
    base, folder = saved(tmp_path / "base"), tmp_path / "adapter"
    with_peft(base, KINDS["lora"], folder)
    given = LoraSettings(adapter=str(folder))
    agreeing = replace(given, rank=3, alpha=5, targets=PROJECTIONS, dropout=0.5)
    assert built(base, agreeing).adapter_settings["dropout"] == 0.5
    for name, value in {"rank": 4, "alpha": 4, "targets": ["q_proj"], "dora": True, "rslora": True}.items():
        with pytest.raises(UserError, match=rf"^lora.{name}: got .* as in .*adapter, or unset"):
            built(base, replace(given, **{name: value}))
    wider = family_config("llama", hidden_size=family_config("llama").hidden_size * 2)
    real_model(wider, torch.float32).save_pretrained(tmp_path / "wider")
    other = built(str(tmp_path / "wider"), given)
    with pytest.raises(UserError, match=r"lora.adapter.*an adapter of this model"):
        other.source(Chain(other.model), seed=0)
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, words in (
        ({"peft_type": "IA3"}, "a LoRA adapter"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"layers_to_transform": [0]}, "has besides"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=words):
            model = built(base, given)
            model.source(Chain(model.model), seed=0)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="adapter_config"):
        built(base, given)


def test_unmergeable_models_are_refused_before_the_run(tmp_path: Path):
    tied = built(saved(tmp_path, tied=True), LoraSettings(rank=2, targets=["lm_head", "q_proj"]))
    for model, words in ((tied.model, "tied"), (built(str(tmp_path)).model, "no LoRA adapter")):
        with pytest.raises(UserError, match=f"merge: .*{words}"):
            refuse_unmergeable(model)


def test_export_dtype_is_that_of_the_loaded_weights(tmp_path: Path):
    base = saved(tmp_path, dtype=torch.bfloat16)
    assert built(base).dtype_on_disk(merge=False) == torch.bfloat16
    adapted = built(base, LoraSettings(rank=2))
    assert (adapted.dtype_on_disk(merge=False), adapted.dtype_on_disk(merge=True)) == (torch.float32, torch.bfloat16)
    assert build_model("tiny", max_positions=16).dtype_on_disk(merge=False) == torch.float32


def test_lora_settings_without_an_adapter_are_refused():
    for given in (LoraSettings(alpha=3), LoraSettings(dora=True), LoraSettings(targets=["q_proj"])):
        with pytest.raises(UserError, match="unset without"):
            given.check()
    with pytest.raises(UserError, match="names of modules, or all-linear, or experts"):
        LoraSettings(rank=2, targets=[]).check()


class Towers(torch.nn.Module):
    """Two towers that share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)) for _ in range(2))
        self.right[0].weight = self.left[0].weight


LEFT = ["left.0.weight", "left.0.bias", "left.1.weight", "left.1.bias"]
RIGHT = ["right.0.bias", "right.1.weight", "right.1.bias"]


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ([], [*LEFT, *RIGHT]),
        (["left"], RIGHT),
        (["*.bias", "right.1"], ["left.0.weight", "left.1.weight"]),
        (["right.0.weight"], [*LEFT[1:], *RIGHT]),
        (["*.[01].weight"], ["left.0.bias", "left.1.bias", "right.0.bias", "right.1.bias"]),
    ],
)
def test_freeze_patterns_match_parameters_and_their_modules(patterns: list[str], left: list[str]):
    model = Towers()
    freeze(model, patterns)
    assert [name for name, one in model.named_parameters() if one.requires_grad] == left


def test_freeze_takes_an_existing_name_literally_not_as_a_pattern():
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(1, 1, bias=False) for name in ("a[1]", "a1", "b*", "bb", "c?", "cc")}
    )
    freeze(model, ["a[1]", "b*.weight"])
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["a[1].weight", "b*.weight"]
    freeze(model, ["[bc]?"])
    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["a1.weight"]


def test_freeze_patterns_without_a_match_or_trainable_rest_are_refused():
    cases = (["lefd"], "freeze: got 'lefd'.*left"), (["left", "right"], "leave a parameter to train")
    for patterns, words in cases:
        with pytest.raises(UserError, match=words):
            freeze(Towers(), patterns)


def test_adapter_reports_its_facts_and_wrong_targets_are_refused():
    model = real_model(family_config("llama"), torch.float32)
    assert adapter_facts(model) == {} and adapter_words(model) == ""
    made = with_adapter("small", model, LoraSettings(rank=3, targets=["q_proj", "up_proj"], dora=True), "where/it/is")
    facts = adapter_facts(made)
    assert facts["rank"] == 3 and facts["alpha"] == 6 and facts["dora"] and facts["targets"] == ["q_proj", "up_proj"]
    words = adapter_words(made)
    assert words.startswith("DoRA of rank 3, alpha 6, on 6 modules (q_proj, up_proj): ")
    trained = sum(one.numel() for one in made.parameters() if one.requires_grad)
    assert f"{trained:,} parameters" in words
    wrong = LoraSettings(rank=3, targets=["up_proj", "q_prj"])
    with pytest.raises(UserError, match=r"lora.targets: got 'q_prj'.*did you mean q_proj"):
        with_adapter("small", real_model(family_config("llama")), wrong, "")


def test_a_folder_without_an_adapter_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"lora.adapter: got .*adapter_config.json"):
        check_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"lora.adapter: got .*adapter_model.safetensors in it"):
        check_adapter(tmp_path)
