"""torch's schedulers on a pipeline: what they change holds from the next step on, as in a plain loop."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

import tawpipe
from cases import batches, llama
from states import ALONE
from tawpipe.errors import UserError

STEPS, RATE = 5, 1e-2
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=RATE, total_steps=STEPS + 1),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1.0),
}


def factory(parameters: list[torch.nn.Parameter]) -> AdamW:
    return AdamW(groups(parameters, lambda p: len(tawpipe.piece_of(p).shape)), lr=RATE)


def groups(parameters: Any, dimensions: Callable[[Any], int]) -> list[dict[str, Any]]:
    given = list(parameters)
    return [  # of a unit without vectors one is empty
        {"params": [p for p in given if dimensions(p) > 1]},
        {"params": [p for p in given if dimensions(p) < 2], "lr": RATE / 3, "weight_decay": 0.0},
    ]


def make() -> tawpipe.Pipeline:
    return tawpipe.Pipeline(
        llama(torch.float64),
        optimizer=factory,
        dtype=torch.float64,
        world=ALONE,
        training=tawpipe.TrainingSettings(clip_norm=None),
    )


def advance(scheduler: Any, loss: float) -> None:
    scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torch_schedulers_act_as_in_a_plain_loop(name):
    plain, pipeline = llama(torch.float64), make()
    optimizer = AdamW(groups(plain.parameters(), lambda p: p.ndim), lr=RATE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, theirs = SCHEDULERS[name](pipeline.optimizer), SCHEDULERS[name](optimizer)
        for batch in batches(2, STEPS):
            logits = plain(batch["input_ids"]).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            advance(theirs, 1.0)
            pipeline.step(batch)
            advance(ours, 1.0)  # while the step may still run
    assert [group["lr"] for group in pipeline.optimizer.param_groups] == ours.get_last_lr() == theirs.get_last_lr()
    pipeline.drain()
    for key, expected in plain.named_parameters():
        assert torch.allclose(pipeline.parameter(key), expected, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]
    pipeline.close()


@pytest.mark.parametrize("option", ["momentum", "momentum by CyclicLR", "betas", "weight_decay"])
def test_optimizer_option_set_and_reset_acts_as_in_a_plain_loop(option):
    """It is there and back again, and the weights are those of a plain loop whose options do the same."""
    if option.startswith("momentum"):
        make_one = lambda parameters: SGD(parameters, lr=RATE, momentum=0.9)  # noqa: E731
    else:
        make_one = lambda parameters: AdamW(parameters, lr=RATE)  # noqa: E731
    values = {"momentum": (0.9, 0.2), "betas": ((0.9, 0.999), (0.2, 0.5)), "weight_decay": (0.01, 10.0)}.get(option)
    plain = llama(torch.float64)
    optimizer = make_one(plain.parameters())
    pipeline = tawpipe.Pipeline(
        llama(torch.float64),
        optimizer=make_one,
        dtype=torch.float64,
        world=ALONE,
        training=tawpipe.TrainingSettings(clip_norm=None),
    )
    both = optimizer, pipeline.optimizer
    cycles = [] if values else [CyclicLR(one, RATE / 2, RATE, 2, base_momentum=0.2, max_momentum=0.9) for one in both]
    for step, batch in enumerate(batches(2, STEPS)):
        for one in both if values else ():
            for group in one.param_groups:
                group[option] = values[step == 1]  # type: ignore[index]
        optimizer.zero_grad()
        logits = plain(batch["input_ids"]).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100).backward()
        optimizer.step()
        pipeline.step(batch)
        for cycle in cycles:
            cycle.step()
    pipeline.drain()
    for key, expected in plain.named_parameters():
        assert torch.allclose(pipeline.parameter(key), expected, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]
    pipeline.close()


def test_scheduler_state_resumes_bit_by_bit(tmp_path):
    pipeline, given = make(), batches(2, 4)
    scheduler = SCHEDULERS["one cycle"](pipeline.optimizer)
    for batch in given[:2]:
        pipeline.step(batch)
        scheduler.step()
    run = {"optimizer": pipeline.optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    pipeline.save(tmp_path / "state", run=json.loads(json.dumps(run)))
    other = make()
    again = SCHEDULERS["one cycle"](other.optimizer)
    run = other.load(tmp_path / "state")
    other.optimizer.load_state_dict(run["optimizer"])
    again.load_state_dict(run["scheduler"])
    for batch in given[2:]:
        assert pipeline.step(batch).loss == other.step(batch).loss
        scheduler.step()
        again.step()
        assert again.get_last_lr() == scheduler.get_last_lr()
    assert torch.equal(pipeline.parameter("lm_head.weight"), other.parameter("lm_head.weight"))  # type: ignore[arg-type]
    pipeline.close()
    other.close()


def test_pipeline_optimizer_keeps_the_groups_of_the_factory():
    pipeline = make()
    assert [len(group["params"]) for group in pipeline.optimizer.param_groups] == [37, 11]
    assert tawpipe.piece_of(pipeline.optimizer.param_groups[0]["params"][0]).name == "model.embed_tokens.weight"
    pipeline.optimizer.zero_grad()
    pipeline.optimizer.step()
    with pytest.raises(UserError, match="parameter group"):
        pipeline.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    pipeline.close()
