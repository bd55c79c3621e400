"""Training with exact changes of weights, or coded gradients, beside the same without, bit by bit; what workers run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cases import LAYERS, LENGTH, batches, llama, random_delays
from host_homes import state_of_rank
from pipelines import make_pipeline
from tawpipe import Pipeline
from tawpipe.errors import RunError
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.transport import transport as transport_module
from tawpipe.runtime.transport.exact import CODED, NOTHING, WHOLE, checksum
from tawpipe.runtime.transport.refresh import logger
from tawpipe.runtime.world import World
from tawpipe.schedule.buffers import home_weight, weight_copy
from tawpipe.schedule.sizes.traffic import link_elements, scratch_bytes

RATES = (1.0, 1.0, 0.0, 1.0, 1000.0, 1.0, 1.0)
"""Of the steps: one changes nothing, one changes everything."""
EMPTY, POISONED, EVALUATED, SAVED = 3, 5, (1, 2, 5), 5
"""Steps without a label, with a loss that is no number, with an evaluation after them; the one after which the state is
saved, spoiled by a step more, and loaded.
"""


poison = [False]
"""Whether losses are no numbers."""


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return total * float("nan") if poison[0] else total


def pipeline_of(world: World, *, lora: bool = False, frozen: bool = False, **knobs: Any) -> Pipeline:
    tied, delays = knobs.pop("tied", False), knobs.pop("delays", None)
    model: Any = llama(torch.float32, tied=tied, layers=knobs.pop("layers", LAYERS))
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0." not in name and "layers.1." not in name and "embed" not in name)
    if lora:
        peft = pytest.importorskip("peft")
        torch.manual_seed(5)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        )
    return make_pipeline(
        model,
        optimizer=adamw(knobs.pop("lr", 3e-4)),
        world=world,
        strict=knobs.pop("strict", True),
        dtype=torch.bfloat16,
        skip_limit=3,
        loss=loss,
        check="never",
        delay=(lambda lane: random_delays(hash((lane, world.rank, delays)), 0.002)) if delays is not None else None,
        **{"strategy": "tawpipe-step", **knobs},
    )


def copies_of(pipeline: Pipeline) -> dict[int, Tensor]:
    """The copies of this rank by unit."""
    buffers = pipeline.executor._buffers
    return {u.index: buffers[weight_copy(u.index)] for u in pipeline.storage.units if weight_copy(u.index) in buffers}


def wrong_copies(pipeline: Pipeline) -> list[str]:
    """What is not as it should be when a step has refreshed all copies and no update has come since."""
    found, world, lines = [], pipeline.world, []
    for unit, copy in copies_of(pipeline).items():
        home = pipeline.executor._buffers[home_weight(unit)].view(torch.int16)
        if not any(torch.equal(home, part) for part in copy.view(torch.int16).view(-1, home.numel())):
            found.append(f"unit {unit}: the copy has not what is at home here")
        lines.append(f"{unit} {int(checksum(copy))}")
    sums = world.gather_texts("\n".join(lines))
    rail = [sums[rank] for rank in pipeline.transport.topology.group("rail", world.rank)]
    return found + ["members hold other copies"] * (len(set(rail)) > 1)


def run(world: World, folder: str = "", **knobs: Any) -> tuple[list[Any], dict[str, Tensor], list[str], set[int]]:
    """Numbers of all steps and evaluations; the state of this rank; what is wrong with copies; forms that occurred."""
    pipeline = pipeline_of(world, **knobs)
    exact, refresh, forms = knobs.get("weights_compression") == "exact", pipeline.executor.refresh, set[int]()
    refresh.check_every = 2
    numbers, wrong, given = list[Any](), list[str](), batches(5, len(RATES))
    for step, (batch, rate) in enumerate(zip(given, RATES, strict=True)):
        if step == EMPTY:
            batch = {**batch, "labels": torch.full_like(batch["labels"], -100)}
        poison[0] = step == POISONED and not knobs.get("early_updates")
        result = pipeline.step(batch, rate=rate)
        numbers.append((result.loss, result.grad_norm, result.finite))
        poison[0] = False
        forms |= {form.bits for form in refresh._forms.values()}
        if step in EVALUATED:
            numbers.append(pipeline.evaluate(given[0]).loss)
            wrong += wrong_copies(pipeline) if exact else []
        if step == SAVED and folder:
            pipeline.save(folder)
            pipeline.step(given[0])
            pipeline.load(folder)
            assert not refresh._present
        if exact and 0 < step <= SAVED:
            frozen = [unit.index for unit in pipeline.storage.units if not unit.trainable]
            wrong += [f"step {step}: frozen unit {u} came" for u in frozen if refresh._forms[u].bits != NOTHING]
    pipeline.drain()
    if knobs.get("gradients_compression") == "exact" and not 0 < (pipeline.transport.gradients_sent.share() or 0) < 0.9:
        wrong.append("no gradient was coded in fewer bytes")
    if sum(r.nbytes for r in pipeline.transport._scratch.values()) > scratch_bytes(pipeline.schedule(5), world.rank):
        wrong.append("more room for messages than said")
    if refresh.healed:
        wrong.append(f"differed: {refresh.healed}")
    state = dict(state_of_rank(pipeline))
    pipeline.close()
    return numbers, state, wrong, forms


WEIGHTS = {"weights_compression": "exact"}


def compared(
    world: World, *, cases: list[dict[str, Any]], coded: Mapping[str, str] = MappingProxyType(WEIGHTS)
) -> list[list[str]]:
    """For every case what is not equal in every bit on this rank, or is wrong.

    Args:
        coded: settings that should change nothing.
    """
    found = []
    for case in cases:
        numbers, state, _, _ = run(world, **case)
        exact = run(world, **case, **coded)
        here = [] if str(numbers) == str(exact[0]) else [f"numbers {numbers} and {exact[0]}"]
        here += sorted(state.keys() ^ exact[1].keys())
        here += [name for name in state.keys() & exact[1].keys() if not torch.equal(state[name], exact[1][name])]
        if "weights_compression" in coded and (not {NOTHING, WHOLE} < exact[3] or not exact[3] & {*CODED}):
            here.append(f"forms {exact[3]} alone")
        found.append(here + exact[2])
    return found


def run_cases(pool: Any, cases: Mapping[str, dict[str, Any]], folder: str, **coded: Any) -> None:
    """``compared`` for named cases with their topologies; the first of each saves and loads."""
    by = lambda case: case[1]["topology"]  # noqa: E731
    for (nodes, local), group in groupby(sorted(cases.items(), key=by), key=by):
        names, mine = zip(*group, strict=True)
        given = [{"layers": 3} | {key: value for key, value in case.items() if key != "topology"} for case in mine]
        given[0] |= {"folder": f"{folder}/{nodes}x{local}"}
        for found in pool.run("exact:compared", nodes, local, cases=given, timeout_s=600, **coded):
            assert not any(found), dict(zip(names, found, strict=True))


PLANS: tuple[dict[str, Any], ...] = (
    {"strategy": "tawpipe-step"},
    {"strategy": "tawpipe-spread", "step_cache": "all", "look_ahead": 0, "micro_batches_per_visit": 2},
)
"""Of the first half of a long run, and of the second."""


def long_run(world: World, steps: int, folder: str, **knobs: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """Numbers and state of a run over skipped steps, evaluations, steps without a label, loads, and another plan."""
    given, numbers, knobs = batches(3, 8), list[Any](), knobs | {"layers": 2, "strict": False}
    pipeline = pipeline_of(world, **PLANS[0], **knobs)
    for step in range(steps):
        if step == steps // 2:
            pipeline.save(folder)
            pipeline.close()
            pipeline = pipeline_of(world, **PLANS[1], **knobs)
            pipeline.load(folder)
        batch = given[step % len(given)]
        if step % 41 == 7:
            batch = {**batch, "labels": torch.full_like(batch["labels"], -100)}
        poison[0] = step % 37 == 5
        result = pipeline.step(batch, rate=min(1.0, (step + 1) / 10) if step % 53 else 100.0)
        numbers.append((result.loss, result.grad_norm, result.finite))
        poison[0] = False
        if step % 20 == 3:
            numbers.append(pipeline.evaluate(given[0]).loss)
        if step % 60 == 31:
            pipeline.save(folder)
            pipeline.step(given[0])
            pipeline.load(folder)
    pipeline.drain()
    pipeline.check_copies()
    if "gradients_compression" in knobs:
        assert 0 < (pipeline.transport.gradients_sent.share() or 0) < 0.9, "no gradient was coded in fewer bytes"
    state = dict(state_of_rank(pipeline))
    pipeline.close()
    return numbers, state


def long_runs(world: World, *, steps: int, folder: str, coded: Mapping[str, Any]) -> list[str]:
    """What is not equal in every bit on this rank after a long run and after one with ``coded``."""
    plain, exact = (long_run(world, steps, f"{folder}/{len(how)}", **how) for how in ({}, coded))
    found = [] if str(plain[0]) == str(exact[0]) else ["losses or norms"]
    return found + [name for name in plain[1] if not torch.equal(plain[1][name], exact[1][name])]


def moved(world: World, *, coded: Mapping[str, Any], lr: float) -> tuple[float, float, float, float, float]:
    """Bytes that left this rank in the third step; those that its schedule says, with shares as they were measured;
    those that the pipeline says; and these shares, of weights and of gradients.
    """
    pipeline = pipeline_of(world, lr=lr, strict=False, **coded)
    transport, refresh, sent = pipeline.transport, pipeline.executor.refresh, [0]
    isend, gather = dist.isend, transport_module._all_gather

    def counted_send(tensor: Tensor, *of: Any, **how: Any) -> Any:
        sent[0] += tensor.nbytes
        return isend(tensor, *of, **how)

    def counted_gather(target: Tensor, source: Tensor, *of: Any, **how: Any) -> Any:
        sent[0] += target.nbytes - source.nbytes
        return gather(target, source, *of, **how)

    for batch in batches(8, 2):
        pipeline.step(batch)
    pipeline.drain()
    _ = refresh.sent.share(), transport.gradients_sent.share()
    dist.isend, transport_module._all_gather = counted_send, counted_gather
    try:
        pipeline.step(batches(8, 1)[0])
        pipeline.drain()
    finally:
        dist.isend, transport_module._all_gather = isend, gather
    shares = refresh.sent.share() or 1.0, transport.gradients_sent.share() or 1.0
    node = pipeline.transport.topology.node_of(world.rank)
    link, said = link_elements(pipeline.schedule(8))[node], pipeline.costs(8, LENGTH).link_sent_bytes[node]
    pipeline.close()
    return sent[0], link.bytes_sent(2 * shares[0], 4 * shares[1]), said, *shares


def spoiled(world: World) -> tuple[list[int], list[str], bool]:
    """A bit of one rank's copy turns over between two steps: units found, what is wrong after it, and whether the state
    is as if it had not happened.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    states = []
    for spoils in (False, True):
        pipeline = pipeline_of(world, weights_compression="exact")
        pipeline.executor.refresh.check_every = 3
        for step, batch in enumerate(batches(4, 4)):
            if spoils and step == 2 and world.rank == 1:
                copies_of(pipeline)[2].view(torch.int16)[5] ^= 4
            if spoils and step == 2:
                with pytest.raises(RunError, match="unit 2: what rank 1 and rank 3 keep of its weights differs"):
                    pipeline.check_copies()
            pipeline.step(batch)
            pipeline.drain()
        pipeline.check_copies()
        pipeline.evaluate(batches(4, 1)[0])
        wrong, healed = wrong_copies(pipeline), pipeline.executor.refresh.healed
        states.append(dict(state_of_rank(pipeline)))
        pipeline.close()
    logging.getLogger("tawpipe.runtime.transport.refresh").removeHandler(handler)
    same = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return healed, wrong + [line for line in said if "unit 2" not in line], same
