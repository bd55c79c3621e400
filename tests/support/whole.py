"""What worker processes run for optimizers that look at whole matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from transformers import MixtralConfig, MixtralForCausalLM

import tawpipe
from cases import VOCABULARY, batches, relative
from model_families import keep_fp64
from pipelines import make_pipeline
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.homes.named_optimizers import BY_NAME
from tawpipe.runtime.homes.optimizer import OptimizerFactory
from tawpipe.runtime.world import World

RATE, STEPS = 3e-3, 3


def experts(*, frozen: Sequence[str] = ()) -> Any:
    """Three layers with experts, the same values in every process."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        max_position_embeddings=64,
    )
    torch.manual_seed(5)
    config._experts_implementation = "eager"  # the only one that computes in fp64
    model: Any = MixtralForCausalLM(config)
    model = model.to(torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def factory(name: str) -> OptimizerFactory:
    if name == "muon":
        return tawpipe.muon(RATE)
    return BY_NAME[name](RATE)


def _plain_matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trained parameters, experts one by one, in the memory of the model, with the gradients that are there."""
    found = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        whole = [(parameter.data, parameter.grad)]
        for value, gradient in zip(parameter.data, parameter.grad, strict=True) if parameter.ndim == 3 else whole:
            one = nn.Parameter(value)
            one.grad = gradient
            found.append((name, one))
    return found


def _plain_optimizers(name: str, matrices: Sequence[tuple[str, nn.Parameter]]) -> list[Optimizer]:
    if name != "muon":
        return [Adafactor([p for _, p in matrices], lr=RATE)]
    is_hidden = lambda name: ".layers." in name and ".experts." not in name  # noqa: E731
    hidden = [p for n, p in matrices if p.ndim == 2 and is_hidden(n)]
    outside = [p for n, p in matrices if p.ndim == 2 and not is_hidden(n)]
    vectors = [p for _, p in matrices if p.ndim < 2]
    groups = [{"params": outside, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [
        Muon(hidden, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW([group for group in groups if group["params"]], lr=RATE, betas=(0.9, 0.95)),
    ]


def plain_weights(name: str, clip: float | None, frozen: Sequence[str], rows: int) -> dict[str, Tensor]:
    """The weights after some steps of a plain loop."""
    model, optimizers, matrices = experts(frozen=frozen), list[Optimizer](), list[tuple[str, nn.Parameter]]()
    for batch in batches(rows, STEPS):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()  # in place: the matrices have views of it
        logits = model(batch["input_ids"]).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100).backward()
        nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip)
        matrices = matrices or _plain_matrices(model)
        optimizers = optimizers or _plain_optimizers(name, matrices)
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _make(world: World, name: str, *, seed: int = 0, **knobs: Any) -> Pipeline:
    frozen = knobs.pop("frozen", ())
    return make_pipeline(
        experts(frozen=frozen), optimizer=factory(name), dtype=torch.float64, world=world, seed=seed, **knobs
    )


def exact(world: World, *, settings: list[dict[str, Any]]) -> list[float]:
    """For every setting the largest relative difference of a weight to the plain loop's."""
    with pytest.MonkeyPatch.context() as patch:  # Muon rounds to bf16, which makes much of a norm's difference of 1e-8
        keep_fp64(patch)
        return _exact(world, settings)


def _exact(world: World, settings: list[dict[str, Any]]) -> list[float]:
    worst = []
    for setting in settings:
        name, rows = setting["name"], 7
        knobs = {key: value for key, value in setting.items() if key != "name"}
        pipeline = _make(world, name, strict=True, **knobs)
        for batch in batches(rows, STEPS):
            pipeline.step(batch)
        pipeline.drain()
        values = {one: pipeline.parameter(one) for one in pipeline.parameter_names}
        pipeline.close()
        worst.append(0.0)
        if world.rank == 0:
            expected = plain_weights(name, setting.get("clip_norm", 1.0), setting.get("frozen", ()), rows)
            worst[-1] = max(relative(value, expected[one]) for one, value in values.items() if value is not None)
    return worst


def resumed(world: World, *, name: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses of two steps after a save, and of the same steps from the state in another pipeline."""
    pipeline, given = _make(world, name, strategy="tawpipe-whole"), batches(5, 4)
    for batch in given[:2]:
        pipeline.step(batch)
    pipeline.save(folder)
    losses = [pipeline.step(batch).loss for batch in given[2:]]
    pipeline.close()
    return losses, go_on(world, name=name, folder=folder, strategy="tawpipe-whole")


def go_on(world: World, *, name: str, folder: str, **knobs: Any) -> list[float]:
    """Losses of the last steps from a state."""
    pipeline = make_pipeline(
        experts(),
        optimizer=factory(name),
        weights=lambda chain: tawpipe.InitSource(chain, 9),
        dtype=torch.float64,
        world=world,
        **knobs,
    )
    pipeline.load(folder)
    losses = [pipeline.step(batch).loss for batch in batches(5, 4)[2:]]
    pipeline.close()
    return losses


def refused(world: World) -> str:
    """What is said where matrices are cut."""
    try:
        make_pipeline(experts(), optimizer=factory("muon"), world=world, strategy="tawpipe-striped")
    except tawpipe.UserError as error:
        return str(error)
    return ""


def apart(world: World) -> str:
    """A scheduler that one rank alone has moved: what is said."""
    pipeline = make_pipeline(experts(), optimizer=lambda parameters: SGD(parameters, lr=1.0), world=world)
    pipeline.optimizer.param_groups[0]["lr"] = 1.0 + world.rank
    try:
        pipeline.step(batches(4, 1)[0])
        pipeline.drain()
    except tawpipe.UserError as error:
        return str(error)
    finally:
        pipeline._steps.forget()
        pipeline.close()
    return ""
