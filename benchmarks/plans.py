"""How long does a plan take, and does it name what fits? Thirty cases up to the largest, and cases of the hunt.

    python benchmarks/plans.py --out benchmarks/results/DATE-plans
    make hunt ARGS="--only plans --minutes 30 --seed 7"

A plan takes the processor's seconds (``time.process_time``) of all that ``tawpipe plan`` does and prints, once Python
has loaded it. Other programs change them: a processor that shares its caches and its clock takes up to 1.6 times as
long. So a fixed loop is timed before and after, and seconds are divided by how many times as long it takes as alone
(``YARDSTICK_S``); the table has both. The goal is ``GOAL_S`` for up to 100,000 rows, 1,024 devices and 128 layers.

A case that is drawn is wrong if its plan takes longer, ends in an error that names no setting of a user, says something
that no user should read, is faster than its bound, does not fit, or names nothing though a single setting fits. For the
thirty, the exit code is 1 if one takes longer. ``--out`` writes ``table.md`` and ``results.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from tawpipe.commands.plan import MOST_S, lines
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.model.settings import LoraSettings
from tawpipe.plan.cost.feasible import LEAN, fits, unplayed
from tawpipe.plan.cost.measure import INSIDE, LATENCY_S, Asked, request_of
from tawpipe.plan.cost.predict import memory_quickly
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, Machine
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.search import search
from tawpipe.schedule.strategies.table import strategies
from tawpipe.simulate import LinkModel
from tawpipe.train.settings.config import TrainConfig
from tawpipe.train.settings.optimizers import factory_of

HERE = Path(__file__).resolve().parent.parent
GOAL_S = 20.0
YARDSTICK_S = 0.0146
"""Seconds of ``yardstick`` on an AMD EPYC that does nothing else: a plan's seconds are given as that one's."""
MODELS = {
    "8B, 32 layers": {"layers": 32, "hidden": 4096},
    "13B, 48 layers": {"layers": 48, "hidden": 4096},
    "70B, 80 layers": {"layers": 80, "hidden": 8192},
    "1.5B, 28 layers": {"layers": 28, "hidden": 1536},
    "26B, 128 layers": {"layers": 128, "hidden": 4096},
    "30B-A3B, 48 layers": {"layers": 48, "hidden": 2048, "experts": 128},
}
CASES = (  # model, nodes x devices of each, Gbit/s, tokens of a row, rows of a step
    ("13B, 48 layers", 3, 8, 10, 16384, 192),
    ("13B, 48 layers", 3, 8, 10, 16384, 1536),
    ("13B, 48 layers", 3, 8, 10, 16384, 1537),
    ("13B, 48 layers", 3, 8, 1, 4096, 192),
    ("13B, 48 layers", 3, 8, 1, 4096, 1536),
    ("13B, 48 layers", 3, 8, 1, 4096, 100_000),
    ("8B, 32 layers", 1, 8, 100, 4096, 64),
    ("8B, 32 layers", 1, 8, 100, 8192, 512),
    ("8B, 32 layers", 2, 4, 1, 4096, 128),
    ("8B, 32 layers", 2, 4, 1, 4096, 100_000),
    ("8B, 32 layers", 3, 8, 10, 32768, 96),
    ("8B, 32 layers", 16, 8, 100, 8192, 1024),
    ("8B, 32 layers", 128, 8, 400, 8192, 4096),
    ("8B, 32 layers", 128, 8, 10, 8192, 100_000),
    ("70B, 80 layers", 4, 8, 100, 8192, 256),
    ("70B, 80 layers", 8, 8, 10, 8192, 512),
    ("70B, 80 layers", 8, 8, 1, 4096, 10_000),
    ("70B, 80 layers", 32, 8, 100, 16384, 2048),
    ("70B, 80 layers", 128, 8, 400, 8192, 100_000),
    ("26B, 128 layers", 4, 8, 10, 4096, 256),
    ("26B, 128 layers", 4, 8, 1, 4096, 4096),
    ("26B, 128 layers", 16, 8, 10, 4096, 10_000),
    ("26B, 128 layers", 128, 8, 100, 4096, 100_000),
    ("26B, 128 layers", 128, 8, 1, 4096, 100_000),
    ("1.5B, 28 layers", 1, 2, 100, 4096, 100_000),
    ("1.5B, 28 layers", 24, 1, 1, 2048, 1000),
    ("1.5B, 28 layers", 2, 8, 0.1, 131072, 16),
    ("30B-A3B, 48 layers", 2, 4, 10, 8192, 64),
    ("30B-A3B, 48 layers", 3, 8, 10, 16384, 1536),
    ("30B-A3B, 48 layers", 128, 8, 400, 8192, 100_000),
)
INTERNAL = re.compile(
    r"\b(nan|None|inf|Error|Traceback|Infinity|block_times|memory of a position)\b|\w+ object at|\wError\b"
)
"""What no user should read."""
OF_USERS = re.compile(r"(--|schedule\.|lora\.|topology|documents$|sequence_length$|layers of the model$)")
"""How settings of users begin, as errors name them."""

KINDS = ((1.0, 1.0), (0.45, 0.5), (0.1, 1.0), (1.0, 0.2))
"""Speeds and memories of the devices of a node, beside those of the others."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {"sequence_chunk": 0},
    {"sequence_chunk": 1024},
    {"sequence_ranks": 1},
    {"sequence_ranks": 2},
    {"early_updates": True},
    {"reduce_dtype": "same"},
    {"loss_chunk_tokens": 512},
    {"keep_mib": 512},
    {"reuse": False},
)
"""Settings that a user may give beside a plan, which holds to them."""
PLAIN: dict[str, Any] = {
    "links": [],
    "kinds": [],
    "full_duplex": True,
    "shared": True,
    "inside": "GPU",
    "gpu": "H100",
    "host_gib": 0,
    "micro_batch": 1,
    "documents": [],
    "lora": 0,
    "optimizer": "adamw",
    "host_homes": None,
    "schedule": {},
}
"""Values that the thirty cases have in common."""


def yardstick() -> float:
    """Processor seconds of a fixed loop of Python's, the median of nine."""
    took = []
    for _ in range(9):
        begin = time.process_time()
        table = {number: str(number) for number in range(100_000)}
        sum(map(len, table.values()))
        took.append(time.process_time() - begin)
    return statistics.median(took)


class Stopwatch:
    """Processor seconds, and how many times as long the processor takes for everything as alone."""

    def __init__(self) -> None:
        self._before, self._begin = yardstick(), time.process_time()

    def lap(self) -> float:
        """Return the seconds since the beginning, as they were taken."""
        return time.process_time() - self._begin

    def slowness(self) -> float:
        """Return how many times ``YARDSTICK_S`` the loop takes, on the mean of before and now."""
        return (self._before + yardstick()) / 2 / YARDSTICK_S


def draw(source: random.Random) -> dict[str, Any]:
    """A case: a model, machines, the data of a step and what of it is computed at one time."""
    layers = source.choice((source.randint(1, 12), source.randint(8, 48), source.randint(32, 128)))
    model = {"layers": layers, "hidden": source.choice((256, 1024, 1536, 2048, 4096, 5120, 8192))}
    if source.random() < 0.2:
        model["experts"] = source.choice((8, 64, 128))
    local = source.choice((1, 2, 4, 8, 8, 8))
    many = source.choice((source.randint(1, 4), source.randint(1, 16), source.choice((32, 64, 128))))
    nodes = [local] * many
    if many > 1 and source.random() < 0.3:  # uneven, the last one alone or all
        nodes = [source.randint(1, local) if source.random() < 0.5 else local for _ in nodes[1:]]
        nodes.append(source.randint(1, local))
    rows = round(10 ** source.uniform(0, 5))
    if source.random() < 0.2:  # devices without rows
        rows = source.randint(1, sum(nodes))
    links = [source.choice((1, 1, 0.25, 0.5, 3, 0.01)) for _ in nodes] if source.random() < 0.4 else []
    kinds = [source.choice(KINDS) for _ in nodes] if source.random() < 0.25 else []
    tokens = source.choice((1 << source.randint(7, 17), source.randint(100, 100_000)))
    documents = [source.randint(1, tokens) for _ in range(source.randint(1, 60))] if source.random() < 0.15 else []
    return {
        "model": model,
        "nodes": nodes,
        "gbit": source.choice((0.1, 1, 10, 25, 100, 400, 400, None)),
        "links": links,
        "kinds": kinds,
        "full_duplex": source.random() < 0.8,
        "shared": source.random() < 0.7,
        "inside": source.choice(("GPU", "GPU", "CPU", None)),
        "gpu": source.choice(("H100", "A100", "L40S")),
        "memory_gib": source.choice((0, 1, 4, 10, 22, 38, 44, 75, 76, 135)),
        "host_gib": source.choice((0, 0, 4, 200, 1900)),
        "tokens": tokens,
        "rows": rows,
        "micro_batch": 1 if documents else min(rows, source.choice((1, 1, 1, 2, 4))),
        "documents": documents,
        "lora": source.choice((0, 0, 0, 16)),
        "optimizer": source.choice(("adamw", "adamw", "adamw", "sgd", "muon")),
        "host_homes": source.choice((None, None, None, "none", "state", "all", "all")),
        "schedule": source.choice(({}, {}, *SETTINGS)),
    }


def check(case: dict[str, Any]) -> str:
    """What is wrong with the plan of a case, a line each; empty if nothing is.

    Raises:
        UserError: the case is refused.
    """
    watch = Stopwatch()
    try:
        request = ask(case)
        plan = Plan.of(request, search(request, most_s=lambda _: MOST_S))
        said = [*lines(plan, config_of(case), ask_with(case)), *map(str, (one.why_not for one in plan.candidates))]
    except UserError as error:
        if INTERNAL.search(str(error)) or not OF_USERS.match(error.setting):
            return f"says {str(error)!r}\n{traceback.format_exc()}"
        raise
    except Exception:
        return traceback.format_exc()
    took = watch.lap() / watch.slowness()
    wrong = [f"takes {took:.1f} s of a free processor"] if took > GOAL_S else []
    wrong += [f"says {line!r}" for line in said if INTERNAL.search(line)]
    for one in plan.candidates:
        if one.prediction is not None and one.seconds < one.prediction.bound_s * (1 - 1e-6):
            wrong.append(f"{one.strategy} takes {one.seconds:.6g} s, and its bound is {one.prediction.bound_s:.6g} s")
    if plan.chosen is None:
        wrong += [f"names nothing, and {name} fits" for name in _single(request)][:1]
    elif plan.chosen.step is None or not fits(request, memory_quickly(request, plan.chosen.step)):
        wrong.append(f"{plan.chosen.strategy} is chosen, and does not fit")
    return "\n".join(wrong)


def config_of(case: dict[str, Any]) -> TrainConfig:
    """The settings of a case's run."""
    schedule = replace(TrainConfig().schedule, host_homes=case["host_homes"], **case["schedule"])
    optimizer = replace(TrainConfig().optimizer, name=case["optimizer"])
    config = replace(TrainConfig(), lora=LoraSettings(rank=case["lora"] or None), schedule=schedule)
    return replace(config, optimizer=optimizer, learning_rate=1e-3)


def ask_with(case: dict[str, Any]) -> Callable[[TrainConfig], PlanRequest]:
    """Makes the request for a case's plan with other settings of the run."""
    return lambda config: ask(case, config)


def ask(case: dict[str, Any], config: TrainConfig | None = None) -> PlanRequest:
    """The request for a case's plan."""
    config, nodes = config or config_of(case), case["nodes"]
    rate = math.inf if case["gbit"] is None else case["gbit"] / 8 * 1e9
    between = LinkModel(rate, LATENCY_S, full_duplex=case["full_duplex"], shared=case["shared"])
    links = {node: replace(between, bytes_per_s=rate * factor) for node, factor in enumerate(case["links"])}
    memory = int(case["memory_gib"] * 2**30)
    devices = [Device(case["gpu"], int(memory * share), speed=speed) for speed, share in case["kinds"]]
    device_of = [device for device, size in zip(devices, nodes, strict=False) for _ in range(size)]
    machine = Machine(
        tuple(nodes),
        between,
        INSIDE[case["inside"]] if case["inside"] else LinkModel(math.inf),
        {node: link for node, link in links.items() if link != between and len(nodes) > 1},
        host=LinkModel(50e9, 1e-5),
        device=device_of[0] if device_of else Device(case["gpu"], memory),
        host_bytes=case["host_gib"] << 30,
        device_of=tuple(device_of) if len(set(device_of)) > 1 else (),
    )
    asked = Asked(case["tokens"], case["rows"], case["micro_batch"], memory_bytes=machine.most_memory)
    asked = replace(asked, quantize=config.quantize, settings=config.schedule, dealt=case["documents"])
    asked = replace(asked, optimizer=factory_of(config), learning_rate=float(config.learning_rate))
    folder = model_folder(**case["model"])
    built = build_model(folder, max_positions=asked.row, longest=asked.longest, lora=config.lora)
    return request_of(Chain(built.model), machine, asked)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def model_folder(layers: int, hidden: int, experts: int = 0) -> str:
    """A folder with the config of such a model, and nothing else."""
    folder = Path(_folder().name, f"{layers}-{hidden}-{experts}")
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 7 * hidden // 2,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": 4 if hidden % 512 == 0 else 2,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    }
    mixture = {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    kind = AutoConfig.for_model("qwen3_moe", **sizes, **mixture) if experts else AutoConfig.for_model("llama", **sizes)
    kind.save_pretrained(folder)
    return str(folder)


def _single(request: PlanRequest) -> Iterator[str]:
    """Single settings that fit: every strategy, laid out in every way, with what needs the least memory."""
    layers = request.model.num_layers
    leaner: list[dict[str, Any]] = [{}, {"offloaded_layers": layers}]
    leaner += [one | request.in_chunks(request.chunks[0]) for one in leaner] if request.chunks else []
    leaner += [one | {"sequence_ranks": ranks} for one in leaner for ranks in request.cp_group_sizes[-1:]]
    for strategy in strategies().values():
        for way in strategy.layouts(request.topology) if strategy.candidate else ():
            for lean in leaner:
                settings = replace(request.settings, strategy=strategy.name, recompute="full", **{**LEAN, **lean})
                try:
                    step = request.step(settings, way)
                    if not unplayed(request, step) and fits(request, memory_quickly(request, step)):
                        yield f"{strategy.name} {way.layout} {lean or ''}".rstrip()
                except UserError:
                    continue


def measured(
    model: str, nodes: int, local: int, gbit: float, tokens: int, rows: int, memory_gib: float
) -> dict[str, Any]:
    """A plan of the thirty, and what it took."""
    case = {**PLAIN, "model": MODELS[model], "nodes": [local] * nodes, "gbit": gbit, "memory_gib": memory_gib}
    case |= {"tokens": tokens, "rows": rows}
    watch = Stopwatch()
    request = ask(case)
    asked = watch.lap()
    plan = Plan.of(request, search(request, most_s=lambda _: MOST_S))
    found = watch.lap()
    said = list(lines(plan, config_of(case), ask_with(case)))
    end, slowness = watch.lap(), watch.slowness()
    chosen = plan.chosen
    return {
        "model": model,
        "machines": f"{nodes}x{local}@{gbit:g}gbit",
        "sequence_length": tokens,
        "global_batch": rows,
        "chosen": chosen.strategy if chosen else None,
        "settings": chosen.chosen_settings() if chosen else {},
        "step_seconds": chosen.seconds if chosen else None,
        "processor_s": {"request": asked, "search": found - asked, "words": end - found, "all": end},
        "slowness": slowness,
        "said": said,
    }


def alone_s(row: dict[str, Any]) -> float:
    """Processor seconds of a case, as a free processor would take."""
    return row["processor_s"]["all"] / row["slowness"]


def table(rows: list[dict[str, Any]]) -> str:
    """The cases as a page."""
    lines = [
        "| model | machines | tokens of a row | rows of a step | chosen | s/step | processor s | of them searching "
        "| of a free processor |",
        "| --- | --- | --: | --: | --- | --: | --: | --: | --: |",
    ]
    for row in rows:
        step = "" if row["step_seconds"] is None else f"{row['step_seconds']:.1f}"
        sizes = f"{row['sequence_length']:,} | {row['global_batch']:,}"
        took = row["processor_s"]
        cells = (row["model"], row["machines"], sizes, row["chosen"] or "nothing fits", step)
        lines.append(f"| {' | '.join(cells)} | {took['all']:.1f} | {took['search']:.1f} | {alone_s(row):.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--memory", type=float, default=76, metavar="GIB")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.json"
    rows = json.loads(results.read_text(encoding="utf-8"))["cases"] if results.exists() else []
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, text=True).strip()
    for case in CASES[len(rows) :]:  # goes on where it was interrupted
        rows.append({"commit": commit} | measured(*case, args.memory))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        content = {"settings": settings(args.memory), "cases": rows}
        results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    most = max(map(alone_s, rows))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    head = f"# How long plans take\n\n{', '.join(f'{name} {value}' for name, value in settings(args.memory).items())}; "
    head += f"at {commits}: `{shlex.join(['python', 'benchmarks/plans.py', *sys.argv[1:]])}`.\n\n"
    head += f"The longest takes {most:.1f} s of a free processor; the goal is {GOAL_S:g}.\n\n"
    (args.out / "table.md").write_text(head + table(rows) + "\n", encoding="utf-8")
    return int(most > GOAL_S)


def settings(memory_gib: float) -> dict[str, Any]:
    """What all cases have in common, and what they ran with."""
    return {
        "device": f"H100 with {memory_gib:g} GiB, by estimate",
        "processor": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
