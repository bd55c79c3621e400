"""Ranks that read other folders, or hold other models, and what each of them says of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, VeraConfig, get_peft_model
from transformers import LlamaForCausalLM

from cases import llama
from pipelines import grouped
from tawpipe.console import Console
from tawpipe.errors import UserError
from tawpipe.model.files.pretrained import SafetensorsSource
from tawpipe.model.settings import LoraSettings
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.alike import same_folder
from tawpipe.runtime.world import World
from tawpipe.serving.engine import load_engine
from tawpipe.serving.passes import SlotLayout
from tawpipe.train.prepare import check_settings
from tawpipe.train.run_model import RunModel
from tawpipe.train.settings.config import TrainConfig
from tawpipe.train.start import documents_of

MODULES = ["k_proj", "v_proj", "o_proj", "q_proj"]
"""Names that a config keeps as a set, whose order differs from process to process."""


def words(act: Callable[[], Any]) -> str:
    """The refusal, on any of its ranks; empty if there is none."""
    try:
        act()
    except UserError as error:
        return str(error)
    return ""


def of_folders(world: World, *, cases: dict[str, list[str]], code: bool = False) -> dict[str, str]:
    """Refusals of folders by case, the first of each for rank 0 and the second for the others."""
    here = {name: folders[min(world.rank, 1)] for name, folders in cases.items()}
    return {name: words(partial(same_folder, world, folder, code=code)) for name, folder in here.items()}


def of_served(world: World, *, folders: list[str]) -> str:
    return words(lambda: load_engine(folders[min(world.rank, 1)], SlotLayout(2, 1, 8, 4), world, dtype="float32"))


def of_runs(world: World, *, machines: list[str], data: str) -> str:
    """Refusal of a run whose model, and adapter if there is one, are in the folder that stands for a machine's disk."""
    given: dict[str, Any] = {"model": "model", "data": [data], "cache_dir": "cache", "sequence_length": 16}
    config = TrainConfig(**given, global_batch=2, validation_fraction=0.0)
    if Path(machines[world.rank], "adapter").exists():
        config = replace(config, lora=LoraSettings(adapter="adapter"))

    def read() -> None:
        check_settings(config, world, Console(rank=1))
        documents_of(config, RunModel(config), world, Console(rank=1))

    with chdir(machines[world.rank]):
        return words(read) or "ready"


def of_models(world: World, *, folders: list[str]) -> dict[str, str]:
    """Refusals by ``Pipeline`` of models that are other ones on rank 1 than on rank 0."""
    odd = world.rank == 1

    def model(*, adapter: int = 0, **config: Any) -> Any:
        made: Any = llama(torch.float32, layers=2)
        for key, value in config.items():
            setattr(made.config, key, value)
        return adapted(LoraConfig(r=2, lora_alpha=adapter, target_modules=["q_proj"]), made) if adapter else made

    def adapted(config: Any, made: Any = None) -> Any:
        torch.manual_seed(0)
        return get_peft_model(made or model(), config)

    def all_values() -> Any:
        made = model()
        for parameter in made.parameters():
            parameter.data *= 1 + odd
        return made

    def one_value() -> Any:
        made = model()
        with torch.no_grad():
            made.model.layers[1].mlp.up_proj.weight[3, 4] += odd
        return made

    def with_buffer() -> Any:
        made = model()
        made.model.layers[0].register_buffer("bias_of_experts", torch.full([3], float(odd)))
        return made

    def frozen() -> Any:
        made = model()
        made.lm_head.weight.requires_grad_(not odd)
        return made

    def on_meta() -> Any:
        with torch.device("meta"):
            return LlamaForCausalLM(llama(torch.float32, layers=2).config)

    folder = lambda chain: SafetensorsSource(chain, Path(folders[min(world.rank, 1)]))  # noqa: E731

    def broken(chain: Any) -> Any:
        if odd:
            raise RuntimeError("a disk fails")
        return folder(chain)

    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "same": lambda: {"model": model()},
        "same adapter": lambda: {"model": model(adapter=4)},
        "same ia3": lambda: {"model": adapted(IA3Config(target_modules=MODULES, feedforward_modules=[]))},
        "ia3": lambda: {"model": adapted(IA3Config(target_modules=MODULES[odd:], feedforward_modules=[]))},
        "vera": lambda: {"model": adapted(VeraConfig(r=2, target_modules=["q_proj"], projection_prng_key=world.rank))},
        "values": lambda: {"model": all_values()},
        "one value": lambda: {"model": one_value()},
        "buffer": lambda: {"model": with_buffer()},
        "frozen": lambda: {"model": frozen()},
        "config": lambda: {"model": model(rms_norm_eps=1e-6 if odd else 1e-5)},
        "adapter": lambda: {"model": model(adapter=8 if odd else 4)},
        "none": lambda: {"model": on_meta() if odd else model()},
        "seed": lambda: {"model": on_meta(), "seed": world.rank},
        "folder": lambda: {"model": on_meta(), "weights": folder},
        "broken": lambda: {"model": on_meta(), "weights": broken},
    }
    found = dict[str, str]()
    for name, case in cases.items():

        def make(given: dict[str, Any]) -> None:
            Pipeline(**grouped({**given, "check": "never"}), world=world, dtype=torch.float32).close()

        try:
            found[name] = words(partial(make, case()))
        except RuntimeError as error:
            found[name] = f"raised: {error}"
    return found
