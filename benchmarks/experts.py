"""Do experts that stay gain anything? Mixtures of experts on slow links, by the planner's clock.

    python benchmarks/experts.py --out benchmarks/results/DATE-experts

Today all weights of a layer come to a device for every visit. The other way is expert parallelism inside the node: a
device keeps its share of the experts of all layers for the step (or for good), and tokens travel to them and back, two
all-to-alls in a layer's forward pass and four in its backward pass, which computes it again. Between nodes experts move
as under tawpipe-step (weights and gradients once a step, optimizer state over all devices) or as under hsdp (a copy in
every node, gradients once a step). What is dense travels as before.

Shapes are those of Qwen3-30B-A3B, gpt-oss-20b and gpt-oss-120b, nodes of eight H100: half of 989 TFLOP/s reached, 3.35
TB/s of memory, 75 GiB to use, 400 GB/s inside a node or 25 GB/s (PCIe). Products of experts take as long as their
operations or as reading their weights, and gradients of experts are added to their sums for every micro-batch: a device
that keeps an eighth of the experts reads and adds an eighth.

Two clocks for experts that stay enclose what could be built: ``exposed``, where nothing computes while tokens travel
and the busiest device of a node has 1.2 times the mean, and ``free``, where tokens travel in no time to devices with
equal work. ``copies`` is a copy of everything on every device. All sides have the same choice of micro-batches,
look-ahead and buffers, seconds are to a hundredth, and what does not fit is left out. Of today's strategies those are
played of which one device stands for all; tawpipe-striped and tawpipe-whole move as many bytes as tawpipe-step.
Writes ``experts.json`` and ``table.md``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from experts_sides import SIDES, STAY
from tawpipe.model.chain import Chain
from tawpipe.model.flops import attention_width, peak_flops, windows
from tawpipe.plan.feasible import fits
from tawpipe.plan.machine import Machine, uniform
from tawpipe.plan.memory import estimate_memory
from tawpipe.plan.predict import bound_of, memory_quickly, predict
from tawpipe.plan.profile import EFFICIENCY, ESTIMATED_BYTES_PER_S, Profile
from tawpipe.plan.request import PlanRequest
from tawpipe.schedule.footprint import BlockMemory, Widths
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.schedule.step import StepSpec
from tawpipe.schedule.strategies.weights import Hybrid
from tawpipe.simulate import BlockCost, LinkModel, Seconds, size_of

LOCAL = 8
RATE = (peak_flops("H100", "bfloat16") or 0.0) * EFFICIENCY
MEMORY_RATE = 3.35e12
DEVICE_BYTES = 75 << 30
INSIDE = {"NVLink": LinkModel(400e9, 5e-6, shared=False), "PCIe": LinkModel(25e9, 1e-5, shared=False)}
BUSIEST = 1.2
"""Tokens that the busiest device of a node receives, over the mean."""
ADAPTER = 400_000
"""Trainable elements of a layer where its own weights are frozen: about rank 16 in attention."""
KINDS = {"all weights": 1.0, "adapters": 1.0, "adapters, 4 bits": 4.5 / 16}
"""What is trained, and the size of frozen layers as they travel, over that in bf16."""
GIGABITS = (10, 25, 40, 100)
STEPS = ((1, 4096), (1, 8192), (1, 32768), (8, 4096))
"""Rows that a device has in a step, and their tokens."""
AHEAD = 0.99
"""Share of the best step so far that a setting's bound must stay below to be played."""
UPDATE_BYTES = 28
"""Bytes that AdamW moves for an fp32 element: gradient, weight and two states read, three and a copy written."""
ACCUMULATE_BYTES = 12
"""Bytes that a gradient's element moves when it is made in bf16 and added to a sum in fp32."""


def configs() -> dict[str, PretrainedConfig]:
    """The models by their published shapes."""
    qwen: dict[str, Any] = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
    qwen |= {"head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768}
    return {
        "Qwen3-30B-A3B": Qwen3MoeConfig(**qwen),
        "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
        "gpt-oss-120b": GptOssConfig(num_hidden_layers=36, num_local_experts=128),
    }


@dataclass(frozen=True)
class Shape:
    """A mixture of experts in numbers.

    Args:
        dense, experts: elements of a layer.
        met: share of its experts' elements that a token is multiplied with.
        sent: elements that travel to experts for a token, in one direction.
        embedding, head: elements.
        width: of queries.
        windows: of every layer.
    """

    dense: int
    experts: int
    met: float
    sent: int
    embedding: int
    head: int
    width: int
    windows: tuple[int | None, ...]
    memory: BlockMemory


@cache
def shape_of(name: str) -> Shape:
    """The numbers of one of ``configs``, from a model on the meta device."""
    config: Any = configs()[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    chain = Chain(model)
    slots = [slot for unit in chain.blocks[1].units for slot in chain.units[unit].slots]
    experts = sum(slot.numel for slot in slots if ".experts." in slot.name)
    embedding, head = (sum(chain.units[unit].numel for unit in chain.blocks[end].units) for end in (0, -1))
    return Shape(
        sum(slot.numel for slot in slots) - experts,
        experts,
        config.num_experts_per_tok / config.num_local_experts,
        config.num_experts_per_tok * config.hidden_size,
        embedding,
        head,
        attention_width(config),
        tuple(windows(config)),
        estimate_memory(chain, dtype=torch.bfloat16, chunk_tokens=1024),
    )


@dataclass(frozen=True)
class Place:
    """What is asked: a model and its training, machines, and the rows of a device in a step."""

    model: str
    trains: str
    nodes: int
    inside: str
    rows: int
    length: int
    gigabits: int

    @property
    def machine(self) -> Machine:
        link = LinkModel(self.gigabits * 1e9 / 8, 1e-5)
        return uniform(self.nodes, LOCAL, between=link, inside=INSIDE[self.inside])


def seconds(place: Place, rows: int, side: str, window: int | None) -> tuple[float, float]:
    """Of a layer on a micro-batch, forward and backward.

    Args:
        side: one of ``SIDES``.
    """
    shape, tokens = shape_of(place.model), rows * place.length
    trained, share = place.trains == "all weights", 1 / LOCAL if side in STAY else 1.0
    attention = 2 * shape.width * size_of([place.length] * rows, [window] if window else []).seen(window).pairs / RATE
    dense = 2 * shape.dense * tokens / RATE + attention
    busiest = BUSIEST if side == "exposed" else 1.0
    reading = 2 * shape.experts * share / MEMORY_RATE
    product_s = max(busiest * 2 * shape.met * shape.experts * tokens / RATE, reading)
    made = 0.0 if KINDS[place.trains] == 1 else (KINDS[place.trains] + 1) * reading  # bf16 from four bits
    link, bytes_sent = INSIDE[place.inside], 2 * shape.sent * tokens * (LOCAL - 1) / LOCAL
    sent = busiest * bytes_sent / link.bytes_per_s + (LOCAL - 1) * link.latency_s if side == "exposed" else 0.0
    forward = dense + product_s + made + 2 * sent
    backward = forward + dense + product_s + 2 * sent
    if trained:
        backward += dense + product_s + ACCUMULATE_BYTES * (shape.dense + shape.experts * share) / MEMORY_RATE
    return forward, backward


def request_of(place: Place, rows: int, side: str) -> PlanRequest:
    """The plan for micro-batches of so many rows."""
    shape, tokens = shape_of(place.model), rows * place.length
    trained, factor, stay = place.trains == "all weights", KINDS[place.trains], side in STAY
    ends = [UnitSpec(shape.embedding, trained, (0,)), UnitSpec(shape.head, trained, (len(shape.windows) + 1,))]
    units, blocks, costs = ends[:1], [], []
    blocks.append(BlockSpec((0,), "embedding", False, trained))
    costs.append(BlockCost())
    for number, window in enumerate(shape.windows, 1):
        parts = [shape.dense, shape.experts] if stay else [shape.dense + shape.experts]
        own = [UnitSpec(round(part * factor), trained, (number,)) for part in parts]
        own += [] if trained else [UnitSpec(ADAPTER, True, (number,))]
        blocks.append(BlockSpec(tuple(range(len(units), len(units) + len(own))), "layer"))
        units += own
        forward, backward = (Seconds(fixed=one) for one in seconds(place, rows, side, window))
        costs.append(BlockCost(forward, backward, window=window))
    blocks.append(BlockSpec((len(units),), "head"))
    head = 2 * shape.head * tokens / RATE
    costs.append(BlockCost(Seconds(fixed=head), Seconds(fixed=(3 if trained else 2) * head)))
    memory = shape.memory
    # Tokens in the order of experts, before and after them, and their gradients; in the exposed case sent and received.
    copies = 2 * shape.sent * (1 + BUSIEST if stay else 1)
    made = round(2 * shape.experts * (1 / LOCAL if stay else 1)) if factor < 1 else 0
    layer = {
        name: (fixed + made, token + copies * (2 if name.startswith("forward") else 4))
        for name, (fixed, token) in memory.working["layer"].items()
    }
    memory = replace(memory, working={**memory.working, "layer": layer})
    profile = Profile(tuple(costs), UPDATE_BYTES / ESTIMATED_BYTES_PER_S, memory, "formula")
    return PlanRequest(
        ModelSpec(tuple(blocks), (*units, ends[1])),
        profile,
        place.machine,
        place.rows * place.nodes * LOCAL,
        rows,
        place.length,
        size_of([place.length] * rows),
        Widths(2, 4, 4, 2),
        memory_bytes=DEVICE_BYTES,
        system_bytes=round(0.7 * 2**30),
        communicator_bytes=1 << 28,
    )


def steps_of(place: Place, side: str) -> Iterator[tuple[PlanRequest, StepSpec]]:
    """Every setting that is tried."""
    for rows, strategy, buffers in product((1, 2, 4, 8), SIDES[side], (1, 2)):
        if place.rows % rows:
            continue
        asked = request_of(place, rows, side)
        once = strategy.name not in ("tawpipe-spread", "flat")  # those bring weights for every visit
        for per_visit in (1, 2, 4, 8):
            if place.rows // rows % per_visit == 0:
                settings = ScheduleSettings(
                    strategy.name,
                    micro_batches_per_visit=per_visit,
                    look_ahead=buffers,
                    gradient_buffers=buffers,
                    step_cache="all" if once and not isinstance(strategy, Hybrid) else None,
                    gradients_scope="step" if once else None,
                )
                yield asked, asked.step(settings, strategy)


def best_of(place: Place, side: str) -> dict[str, Any]:
    """The fastest setting that fits; nothing if none does."""
    best: dict[str, Any] = {}
    at_home = {True: 18, False: 2}  # bytes of an element, see Widths.at_home
    tried = []
    for asked, step in steps_of(place, side):
        homes = zip(step.homes, step.model.units, strict=True)
        if sum(home.stripe * at_home[unit.trainable] for home, unit in homes) < DEVICE_BYTES:
            together = asked.micro_batch * step.settings.micro_batches_per_visit
            tried.append((bound_of(asked, step), -together, len(tried), asked, step))
    for bound, *_, asked, step in sorted(tried, key=lambda one: one[:3]):
        if (best and bound >= best["seconds"] * AHEAD) or not fits(asked, memory_quickly(asked, step)):
            continue
        made = predict(asked, step)
        if fits(asked, made.needs) and (not best or made.step_seconds < best["seconds"]):
            best = {
                "seconds": made.step_seconds,
                "strategy": step.strategy.name,
                "rows": asked.micro_batch,
                "per_visit": step.settings.micro_batches_per_visit,
                "buffers": step.settings.look_ahead,
                "gib": made.peak_bytes / 2**30,
                "waits": made.exposed_communication_s,
            }
    return best


def cell(place: Place) -> dict[str, Any]:
    """The best of every side."""
    return {**vars(place), **{side: best_of(place, side) for side in SIDES}}


def places() -> Iterator[Place]:
    """All that is asked. Of adapters nothing else crosses the links between nodes, and the slowest says it all."""
    for model in configs():
        large = model == "gpt-oss-120b"
        for rows, length in STEPS:
            if length != 8192:
                for nodes, gigabits in product((8, 16) if large else (2, 4), GIGABITS):
                    yield Place(model, "all weights", nodes, "NVLink", rows, length, gigabits)
                for trains in list(KINDS)[large:]:
                    yield Place(model, trains, 2, "PCIe", rows, length, GIGABITS[-1])
            for trains in list(KINDS)[1:]:
                yield Place(model, trains, 2, "NVLink", rows, length, GIGABITS[0])


def spell(row: dict[str, Any] | None) -> str:
    """Seconds of today's best, and what the others gain on it."""
    if row is None:
        return ""
    if not row["today"]:
        return "does not fit"
    seconds = row["today"]["seconds"]
    gains = {side: f"{seconds / row[side]['seconds'] - 1:+.0%}" if row[side] else "-" for side in list(SIDES)[1:]}
    stay = " to ".join(dict.fromkeys(gains[side] for side in ("exposed", "free")))
    copies = f"; copies {gains['copies']}" if row["trains"] != "all weights" else ""
    return f"{seconds:.2f} s; stay {stay}{copies}".replace("-0%", "+0%")


def table(environment: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """A line for every model, training, machines and rows; a column for every link."""
    columns = [f"{gigabits} Gbit/s" for gigabits in GIGABITS]
    lines = [
        f"{environment['date']}, `{environment['command']}`",
        "",
        "Seconds of a step by the best of today, and what others gain on it: experts that stay, from tokens that are "
        "waited for to tokens that travel in no time; a copy of everything on every device. A dash: does not fit.",
        "",
        f"| model | trained | nodes | inside | rows a device | tokens of a row | {' | '.join(columns)} |",
        f"| --- | --- | ---: | --- | ---: | ---: |{' --- |' * len(columns)}",
    ]
    names = [one.name for one in fields(Place)][:-1]
    cells = {(*(row[name] for name in names), row["gigabits"]): row for row in rows}
    order = list(configs()), list(KINDS)
    for key in sorted({key[:-1] for key in cells}, key=lambda k: (order[0].index(k[0]), order[1].index(k[1]), *k[2:])):
        words = [*key, *(spell(cells.get((*key, gigabits))) for gigabits in GIGABITS)]
        lines.append(f"| {' | '.join(map(str, words))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("experts"))
    parser.add_argument("--jobs", type=int, help="processes, else one per processor")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    rows = []
    with multiprocessing.Pool(args.jobs) as pool:
        for row in pool.imap(cell, places()):
            rows.append(row)
            print(*(row[one.name] for one in fields(Place)), spell(row), flush=True)
            content = {"environment": environment, "rows": rows}
            (args.out / "experts.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            (args.out / "table.md").write_text("\n".join(table(environment, rows)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
