"""Frozen weights of a folder: a state refers to them, and goes on with the same ones and no others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cases import batches, llama
from pipelines import make_pipeline
from states import ALONE, run_of
from tawpipe import Pipeline, adamw
from tawpipe.checkpoint import load
from tawpipe.checkpoint.format import read_manifest
from tawpipe.checkpoint.frozen import difference, digests_in, folder_of, naming_frozen
from tawpipe.checkpoint.resume import newest
from tawpipe.checkpoint.store import Memory
from tawpipe.checkpoint.values import SavedParameters
from tawpipe.errors import RunError, UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.pretrained import SafetensorsSource
from tawpipe.model.units import Unit
from tawpipe.model.weights import WeightSource
from tawpipe.runtime.world import World

LAST = "model.layers.1.mlp.up_proj.weight"
SMALL: dict[str, Any] = {"strategy": "tawpipe-spread"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model whose values bf16 would round."""
    folder = tmp_path_factory.mktemp("base") / "model"
    llama(torch.float32, layers=2).save_pretrained(folder)
    return folder


def tampered(base: Path, folder: Path) -> Path:
    """A copy of a model's folder with one other value."""
    shutil.copytree(base, folder)
    values = load_file(folder / "model.safetensors")
    values[LAST][3, 2] += 1
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapter_on(base: str | Path, frozen: str = "") -> Any:
    """An adapter on the model of a folder, on the meta device.

    Args:
        frozen: part of the names of the adapter's parameters that are not trained.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(base))
        adapter = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.2))
    if frozen:
        freeze(adapter, lambda name: "lora_" not in name or frozen in name)
    return adapter


def adapted(base: str | Path, world: World = ALONE, frozen: str = "", **knobs: Any) -> Pipeline:
    given = SMALL | {"optimizer": adamw(1e-2), "weights": lambda chain: SafetensorsSource(chain, base)} | knobs
    return make_pipeline(adapter_on(base, frozen), world=world, **given)


def go(pipeline: Pipeline, first: int, last: int) -> list[float]:
    losses = [pipeline.step(batch).loss for batch in batches(2, 4)[first:last]]
    pipeline.drain()
    return losses


def values(pipeline: Pipeline) -> dict[str, Tensor | None]:
    return {name: pipeline.parameter(name) for name in pipeline.parameter_names}


def whole_run(world: World, *, base: str, folder: str, **knobs: Any) -> Any:
    """Losses and weights of four steps; of the last two after a save in between."""
    pipeline = adapted(base, world, **knobs)
    losses = go(pipeline, 0, 2)
    pipeline.save(Path(folder))
    losses += go(pipeline, 2, 4)
    last = values(pipeline), dict(pipeline.storage.digests)
    pipeline.close()
    return losses, *last


def second_half(world: World, *, base: str, folder: str, **knobs: Any) -> Any:
    """Losses and weights of the last two steps, resumed."""
    pipeline = adapted(base, world, **knobs)
    pipeline.load(folder)
    losses = go(pipeline, 2, 4)
    last = values(pipeline), dict(pipeline.storage.digests)
    pipeline.close()
    return losses, *last


def same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)  # type: ignore[arg-type]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "knobs",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float32, "quantize": "nf4"},
        pytest.param({"dtype": torch.float64}, marks=pytest.mark.slow),
        pytest.param({"dtype": torch.bfloat16, "quantize": "int8"}, marks=pytest.mark.slow),
        pytest.param({"dtype": torch.float32, "host_homes": "all"}, marks=pytest.mark.slow),
    ],
)
def test_resumed_adapter_run_repeats_losses_and_values_bit_by_bit(base, tmp_path, knobs):
    given = {"base": str(base), "folder": str(tmp_path / "state"), **knobs}
    losses, last, digests = whole_run(ALONE, **given)
    again, resumed, known = second_half(ALONE, **given)
    assert again == losses[2:] and same(last, resumed) and known == digests
    assert len(digests) == 21 and read_manifest(tmp_path / "state")["frozen"]["parameters"] == digests


@pytest.mark.slow
def test_adapter_run_resumes_on_two_processes_and_on_one(pool, base, tmp_path):
    given = {"base": str(base), "folder": str(tmp_path / "state"), "dtype": torch.float64}
    losses, last, digests = pool.run("test_frozen:whole_run", 1, 2, **given)[0]
    again, resumed, known = pool.run("test_frozen:second_half", 1, 2, **given)[0]
    assert again == losses[2:] and same(last, resumed) and known == digests
    alone, _, here = second_half(ALONE, **given)
    assert alone == pytest.approx(losses[2:], rel=1e-10) and here == digests


def test_digests_depend_on_base_weights_not_on_path_or_dtype(base, tmp_path):
    shutil.copytree(base, tmp_path / "moved")
    ways: list[dict[str, Any]] = [{"dtype": torch.float64}, {"dtype": torch.bfloat16, "quantize": "nf4"}]
    made = [adapted(folder, **way) for way, folder in zip(ways, (base, tmp_path / "moved"), strict=True)]
    assert all(one.storage.digests == made[0].storage.digests for one in made)
    other = adapted(tampered(base, tmp_path / "other"), dtype=torch.float32)
    others = {name for name, digest in other.storage.digests.items() if digest != made[0].storage.digests[name]}
    assert others == {LAST.replace("up_proj", "up_proj.base_layer")}
    for pipeline in (*made, other):
        pipeline.close()


def test_different_frozen_weights_are_refused_by_name_without_changes(base, tmp_path):
    first = adapted(base)
    go(first, 0, 1)
    first.save(tmp_path / "state")
    other = adapted(tampered(base, tmp_path / "other"))
    in_memory = get_peft_model(
        llama(torch.float32, layers=2), LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.2)
    )
    held = make_pipeline(in_memory, optimizer=adamw(1e-2), world=ALONE, **SMALL)
    for pipeline, place, words in (
        (other, tmp_path / "other", rf"weights of {base} or .*in this one {LAST} differs \(1 of 21 parameters do\)"),
        (held, "no folder with weights", r"weights=lambda chain: SafetensorsSource\(chain, FOLDER\)"),
    ):
        before = values(pipeline)
        with pytest.raises(UserError, match=words) as error:
            pipeline.load(tmp_path / "state")
        assert (error.value.setting, error.value.value) == ("model", str(place))
        assert same(values(pipeline), before)
    for pipeline in (first, other, held):
        pipeline.close()


def test_checkpoint_with_frozen_copy_loads_and_next_save_refers_to_base(base, tmp_path):
    first = adapted(base)
    go(first, 0, 1)
    first.save(tmp_path / "copy", copy_frozen=True)
    first.save(tmp_path / "reference")
    frozen = 4 * sum(
        value.numel() for name, value in values(first).items() if value is not None and "lora_" not in name
    )
    assert size(tmp_path / "copy") - size(tmp_path / "reference") >= frozen  # names come to it
    assert "frozen" not in read_manifest(tmp_path / "copy")
    again = adapted(base)
    again.load(tmp_path / "copy")
    again.save(tmp_path / "next")
    assert read_manifest(tmp_path / "next")["frozen"] == read_manifest(tmp_path / "reference")["frozen"]
    assert same(values(first), values(again))
    first.close()
    again.close()


def test_frozen_values_that_differ_from_a_folder_are_written(base, tmp_path):
    """Those of a model in memory, of a source of the user's, of another state, and of an adapter."""

    class Shifted(SafetensorsSource):
        def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
            return super().unit(unit, dtype=dtype) + 1

    def frozen(chain: Chain) -> WeightSource:
        return Shifted(chain, base)

    for number, weights in enumerate((None, frozen)):
        model: Any = llama(torch.float32, layers=2)
        freeze(model, lambda name: "layers.0" in name)
        pipeline = make_pipeline(model, weights=weights, optimizer=adamw(1e-2), world=ALONE, **SMALL)
        pipeline.save(tmp_path / str(number))
        assert "frozen" not in read_manifest(tmp_path / str(number))
        pipeline.close()

    other = adapted(tampered(base, tmp_path / "other"))
    other.save(tmp_path / "copy", copy_frozen=True)
    pipeline = adapted(base)
    pipeline.load(tmp_path / "copy")  # one parameter is no more that of its folder
    assert same(values(pipeline), values(other))
    pipeline.save(tmp_path / "state")
    manifest = read_manifest(tmp_path / "state")
    written = {name for name in manifest["tensors"] if name.startswith("model.") and "lora_" not in name}
    assert written == {f"model.{LAST.replace('up_proj', 'up_proj.base_layer')}"}
    assert len(digests_in(manifest)) == 20 and folder_of(manifest) == str(base)
    again = adapted(base)
    again.load(tmp_path / "state")
    assert same(values(again), values(other))
    for one in (other, pipeline, again):
        one.close()


def test_frozen_adapter_is_saved_and_its_base_is_referenced(base, tmp_path):
    """Both are in the same packed units; an export reads both."""
    made = [adapted(base, quantize="nf4", seed=seed, frozen="lora_A") for seed in (0, 1)]
    go(made[0], 0, 1)
    made[0].save(tmp_path / "state")
    manifest = read_manifest(tmp_path / "state")
    assert len(digests_in(manifest)) == 21 and any("lora_A" in name for name in manifest["tensors"])
    made[1].load(tmp_path / "state")
    first, second = map(values, made)
    assert same(first, second)
    chain = Chain(adapter_on(base, "lora_A"))
    source = SafetensorsSource(chain, base)
    chain.quantise("nf4", torch.float32)
    with SavedParameters(tmp_path / "state", chain.units, torch.float32, source) as saved:
        assert same({name: saved.parameter(name) for name in first}, first)
    for pipeline in made:
        pipeline.close()


def test_memory_checkpoint_refers_to_the_base(base, tmp_path):
    memory = Memory(tmp_path / "copies", ALONE, ALONE)
    memory.history = "this one"
    first, again = adapted(base), adapted(base, seed=1)
    go(first, 0, 1)
    folder = first.save(memory, run=run_of(1)).folder
    source = newest(memory).source
    assert source is not None and "frozen" in read_manifest(folder)
    again.load(source)
    assert same(values(first), values(again))
    first.close()
    again.close()


def freeze(model: nn.Module, chosen: Callable[[str], bool]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not chosen(name))


def test_interrupted_load_invalidates_digests_of_frozen_weights(base, tmp_path, monkeypatch):
    pipeline = adapted(base)
    pipeline.save(tmp_path / "copy", copy_frozen=True)
    pipeline.save(tmp_path / "state")

    def breaks(*_: Any) -> None:
        raise OSError("no such disk")

    monkeypatch.setattr(load.torch, "equal", breaks)
    with pytest.raises(RunError, match="no such disk"):
        pipeline.load(tmp_path / "copy")
    monkeypatch.undo()
    with pytest.raises(UserError, match="21 of 21"):
        pipeline.load(tmp_path / "state")
    pipeline.load(tmp_path / "copy")
    pipeline.close()


def test_hub_folder_and_differing_parameters_are_described():
    hub = "/cache/models--org--name/snapshots/1a2b"
    manifest = {"frozen": {"folder": hub, "parameters": {"a": "1", "b.base_layer.weight": "2"}}}
    assert folder_of(manifest) == "org/name@1a2b"
    assert difference(manifest, {"a": "1", "b.base_layer.weight": "2"}) == difference({}, {}) == ""
    assert difference(manifest, {"a": "1"}) == "b.weight differs (1 of 2 parameters do)"


def test_model_refusal_names_the_base_that_the_checkpoint_needs(base, tmp_path):
    pipeline = adapted(base)
    pipeline.save(tmp_path / "state")
    pipeline.save(tmp_path / "copy", copy_frozen=True)
    pipeline.close()
    for state, words in ((tmp_path / "state", f"no folder. .*weights of {base} or"), (tmp_path / "copy", "no folder$")):
        with pytest.raises(UserError, match=words), naming_frozen(state):
            raise UserError("model", "gone", "no folder")
    with pytest.raises(UserError, match=r"no folder$"), naming_frozen(None):
        raise UserError("model", "gone", "no folder")
