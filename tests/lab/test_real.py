"""The real workload: every strategy trains what one process does; its bytes, and what a comparison says of losses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pool import WorkerPool
from selected import asked_for, quick_ones
from tawpipe.errors import UserError
from tawpipe.runtime.world import World
from tawpipe.schedule.transform import for_one_thread
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology
from tawpipe_lab import ours
from tawpipe_lab.compare import bounds_of, check_losses
from tawpipe_lab.real_modules import make_model, random_tokens, real_model_spec
from tawpipe_lab.rivals import fsdp, pipelining
from tawpipe_lab.suite import Entry, load_suite, read_suite
from tawpipe_lab.table import write_table
from tawpipe_lab.worker import make
from tawpipe_lab.workload import RealWorkload

STEPS = 2
SETTINGS: dict[str, Any] = {
    "kind": "real",
    "layers": 8,
    "hidden_size": 32,
    "intermediate_size": 44,
    "heads": 2,
    "vocabulary": 67,  # rows that do not divide by four ranks
    "sequence_length": 16,
    "micro_batches": 8,
    "learning_rate": 0.003,
}
WORKLOAD = RealWorkload(**{name: value for name, value in SETTINGS.items() if name != "kind"})
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*fsdp.NAMES, *pipelining.NAMES, *ours.rows()) if "balanced" not in name},
    "fsdp2 by itself": ("fsdp2", {"prefetch": 0}),
    "fsdp2, ring, two per gather": ("fsdp2", {"reduction": "ring", "prefetch": 2, "micro_batches_per_gather": 2}),
    "fsdp2, kept, reduced once": ("fsdp2", {"keep_weights": True, "reduce_every_round": False}),
    "tawpipe-spread, two per visit": ("tawpipe-spread", {"micro_batches_per_visit": 2}),
    "tawpipe-spread, slices kept": ("tawpipe-spread", {"step_cache": 3}),
}
if torch.__version__ < pipelining.ZBV_NEEDS:
    del CONTENDERS["zbv"]
QUICK = ("fsdp2", "1f1b", "tawpipe-spread", "zero-bubble")


def train_all(world: World, titles: list[str]) -> dict[str, dict[str, Any]]:
    """Losses and gradient norms of contenders, in turn; whether ours ran the schedule that bounds are made of."""
    found = {}
    for title in titles:
        name, knobs = CONTENDERS[title]
        contender: Any = make(name, WORKLOAD, world.topology, world.rank, **knobs)
        shares, norms = [], []
        for _ in range(STEPS):
            contender.step()
            shares.append(contender.loss_share)
            norm = contender.gradient_norm
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        found[title] = {"shares": shares, "norms": norms}
        if name in ours.rows():
            expected = for_one_thread(ours.schedule_of(name, WORKLOAD, world.topology, knobs))
            found[title]["expected schedule"] = contender.schedule == expected
        contender.close()
    return found


@pytest.fixture(scope="module")
def trained(pool: WorkerPool, request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return pool.run(f"{__name__}:train_all", 2, 2, titles=asked_for(request))


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the whole model in one process, all sequences at once."""
    model = make_model(WORKLOAD)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=WORKLOAD.learning_rate, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        tokens = random_tokens(WORKLOAD, step, range(WORKLOAD.micro_batches))
        logits: Tensor = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("title", quick_ones(CONTENDERS, QUICK))
def test_every_strategy_trains_as_one_process(trained, plain, title):
    losses, norms = plain
    shares = [rank[title]["shares"] for rank in trained]
    assert [sum(step) for step in zip(*shares, strict=True)] == pytest.approx(losses, rel=1e-6)
    for rank in trained:
        assert rank[title]["norms"] == pytest.approx(norms, rel=1e-5)


def test_losses_of_the_real_workload_decrease_and_gradients_are_clipped(plain):
    """Or equal losses would say nothing about weights; clipping has something to do."""
    losses, norms = plain
    assert all(later < 0.99 * earlier for earlier, later in pairwise(losses))
    assert max(norms) > 1.0


@pytest.mark.parametrize(
    "title", quick_ones([title for title, (name, _) in CONTENDERS.items() if name in ours.rows()], QUICK)
)
def test_our_strategies_run_the_schedule_whose_bytes_are_counted(trained, title):
    assert all(rank[title]["expected schedule"] for rank in trained)


def test_counted_bytes_of_the_real_workload_include_embedding_and_head():
    """Two rounds at 2 x 2; P 4 and D 2. Pipelines send activations of S x H in fp32, there and back."""
    embedding, layer, head = 67 * 32, 4 * 32 * 32 + 3 * 32 * 44 + 2 * 32, 67 * 32 + 32
    assert [unit.numel for unit in real_model_spec(WORKLOAD).units] == [embedding, *[layer] * 8, head]
    whole = embedding + 8 * layer + head

    def sent(name: str, **knobs: Any) -> float:
        bounds = bounds_of(_suite().cells[0], Entry(name, knobs), LinkModel(1e6))
        assert bounds.sent_bytes == bounds.received_bytes and len(set(bounds.sent_bytes)) == 1
        assert bounds.physical_s == pytest.approx(bounds.sent_bytes[0] / 1e6)
        assert bounds.dependency_s is None
        return bounds.sent_bytes[0] / 4

    # The head is not gathered a second time for its backward pass, the embedding not a second time for the next round.
    assert sent("fsdp2") == pytest.approx(0.75 * (2 * whole - embedding + 2 * (whole - head) + 2 * whole))
    assert sent("fsdp2", micro_batches_per_gather=2) == pytest.approx(0.75 * (whole + whole - head + whole))
    assert sent("hsdp") == pytest.approx(whole)
    assert sent("1f1b") == 8 * 16 * 32
    assert sent("zbv") == 2 * 8 * 16 * 32
    assert sent("hsdp-ours") == pytest.approx(whole, rel=1e-3)
    assert sent("tawpipe-step") == pytest.approx(whole, rel=1e-3)  # half of the weights in, half of the gradients out


CELL = {"name": "c", "nodes": 2, "local": 2, "rate": "none", "workload": SETTINGS}


def _suite(**change: Any) -> Any:
    return read_suite({"name": "x", "cells": [{**CELL, **change}], "strategies": [{"strategy": "flat"}]})


def test_cell_reads_its_kind_of_workload():
    cell = _suite().cells[0]
    assert cell.workload == WORKLOAD
    assert cell.spelled_out()["workload"] == {**SETTINGS, "clip_norm": 1.0, "seed": 0}
    assert [type(c.workload) for c in load_suite("real").cells] == [RealWorkload]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": {**SETTINGS, "kind": "quick"}}, "quick.*timed, lengths, serving, real"),
        ({"workload": {**SETTINGS, "kind": ["real"]}}, "timed, lengths, serving, real"),
        ({"workload": {**SETTINGS, "layer_bytes": 4}}, "layer_bytes.*hidden_size"),
        ({"workload": {"kind": "timed", "hidden_size": 32}}, "hidden_size.*layer_bytes"),
        ({"workload": {"kind": "real", "layers": 2}}, "vocabulary"),
        ({"workload": {**SETTINGS, "layers": "eight"}}, "layers"),
        ({"workload": {**SETTINGS, "sequence_length": 1}}, "sequence_length"),
        ({"workload": {**SETTINGS, "learning_rate": 0}}, "learning_rate"),
        ({"workload": {**SETTINGS, "hidden_size": 30}}, "hidden_size"),
        ({"slow": {"factor": 2.0}}, "slow.*computes"),
    ],
)
def test_mistakes_in_a_real_cell_are_named(change, message):
    with pytest.raises(UserError, match=message):
        _suite(**change)


@pytest.mark.parametrize(
    ("name", "knobs", "setting"),
    [
        ("fsdp2", {"clip": False}, "knob of fsdp2"),
        ("tawpipe-spread", {"clip_norm": 2.0}, "knob of tawpipe-spread"),
        ("zbv", {"parts_per_layer": 2}, "parts_per_layer"),
        ("weipipe", {"parts_per_layer": 2}, "parts_per_layer"),
        ("zero3", {}, "workload"),
    ],
)
def test_settings_that_would_change_the_training_are_refused(name, knobs, setting):
    with pytest.raises(UserError) as caught:
        make(name, WORKLOAD, Topology.grid(2, 2), 0, **knobs)
    assert caught.value.setting == setting


def _row(label: str, loss: list[float | None] | None, status: str = "void") -> dict[str, Any]:
    """A measured row, where there are losses; else one that failed before."""
    row = {"label": label, "origin": "ours", "status": status, "reason": "", "loss": loss}
    row |= {"cell": _suite().cells[0].spelled_out()}
    if loss is not None:
        row |= {"seconds_per_step": {"median": 1.0, "min": 0.9, "max": 1.1, "samples": [1.0] * len(loss)}}
        row |= {"link_bytes_sent": [2e6], "link_bytes_predicted": [2e6], "cpu_busy": 0.9, "peak_gib": None}
        row |= {"physical_bound_s": 0.5, "dependency_bound_s": None, "exposed_communication_s": None}
    return row


def test_strategy_with_differing_losses_is_marked_failed():
    rows = [
        _row("broken", None, "failed"),
        _row("first", [4.0, 3.0]),
        _row("same", [4.0001, 3.0001], "ok"),
        _row("other", [4.0, 3.001], "ok"),
        _row("endless", [4.0, None], "ok"),
    ]
    check_losses(rows)
    assert [row["status"] for row in rows] == ["failed", "void", "ok", "failed", "failed"]
    assert "step 2 is 3.001, of first 3" in rows[3]["reason"]
    assert "finite" in rows[4]["reason"]


def test_table_shows_losses_and_leaves_unknown_values_open(tmp_path):
    rows = [_row("first", [4.0, 3.0]), _row("broken", None, "failed"), _row("endless", [4.0, None], "failed")]
    write_table("x", {"date": "", "command": "", "machine": ""}, rows, tmp_path / "table.md")
    table = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    head, _, first, endless, _ = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert head[-1] == "loss of the last step" and (first[-1], endless[-1]) == ("3.00000", "-")
    assert [first[i] for i in (5, 6, 8, 10)] == ["-"] * 4
