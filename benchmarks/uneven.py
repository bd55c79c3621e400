"""What does a pipeline made for its layers gain where a model really computes? A mixture whose first layers are dense.

    python benchmarks/uneven.py --out benchmarks/results/DATE-uneven

A Qwen3-MoE whose first layers have a wide dense MLP and all others a mixture of experts trains on two processes of one
thread each, which a step of every way to lay it out takes in turn, so that drift of the machine hits all of them: 1F1B
with as many layers in each stage and with stages balanced by time, interleaved 1F1B likewise, and ``generated``. Its
costs are those that ``tawpipe plan`` measures, once, before the first step; beside every time stands the plan's
prediction. The first step of each way does not count. Losses of all ways are equal but for rounding, or it fails.
Writes ``uneven.json`` and ``table.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, AutoModelForCausalLM

from tawpipe import Pipeline, ScheduleSettings
from tawpipe.model.chain import Chain
from tawpipe.plan.measure import Asked, request_of
from tawpipe.plan.pipelines import made_for, pipeline_costs
from tawpipe.plan.predict import predict
from tawpipe.plan.probe import probe
from tawpipe.runtime.world import World
from tawpipe.schedule.pipelines.search.generate import fixed_layouts
from tawpipe.schedule.pipelines.search.moves import Moves
from tawpipe.schedule.pipelines.search.ticks import Ticks
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.times import spell_times
from tawpipe.schedule.strategies.table import find
from tawpipe.topology import Topology

RANKS = 2
VOCABULARY = 4096


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dense", type=int, default=4, help="the first layers, with a dense MLP")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="of each way, after one that does not count")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def model_of(args: argparse.Namespace) -> Any:
    """The model, with the same random weights in every process."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=16 * args.hidden,
        moe_intermediate_size=args.hidden // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=list(range(args.dense)),
        max_position_embeddings=args.tokens,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config)


def batch_of(args: argparse.Namespace, step: int) -> dict[str, torch.Tensor]:
    """Random tokens."""
    size = args.micro_batches, args.tokens
    ids = torch.randint(0, VOCABULARY, size, generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def planned(world: World, args: argparse.Namespace) -> dict[str, Any]:
    """By way what it is set to and what the plan predicts, and the seconds of layers, on all ranks."""
    machine, text = probe(world).machine, ""
    if world.rank == 0:
        with torch.device("meta"):
            chain = Chain(model_of(args))
        batch = Asked(args.tokens, args.micro_batches, dtype=torch.float32, profile="measure")
        request = request_of(chain, machine, batch)
        made = made_for(request, find("generated"))
        assert isinstance(made, ActivationPipeline)
        costs = pipeline_costs(request, made.positions(request.topology), "full")
        moves, times = Moves(Ticks.of(costs), RANKS, args.micro_batches, 4 * RANKS), spell_times(costs)
        even, balanced, rounds, balanced_rounds, *_ = fixed_layouts(moves, RANKS)
        given = {
            "1f1b": ("1f1b", f"world:{even}", times),
            "1f1b, balanced": ("1f1b", f"world:{balanced}", times),
            "interleaved-1f1b": ("interleaved-1f1b", f"world:{rounds}", times),
            "interleaved-1f1b, balanced": ("interleaved-1f1b", f"world:{balanced_rounds}", times),
            "generated": ("generated", made.stages, made.block_times),
        }
        seconds = {way: predict(request, request.step(settings_of(*one))).step_seconds for way, one in given.items()}
        layers = [round(sum((one.forward, one.backward_input, one.backward_weight)) / 1e6, 4) for one in costs.blocks]
        text = json.dumps({"ways": given, "predicted": seconds, "blocks_s": layers})
    return json.loads(world.broadcast_text(text))


def settings_of(strategy: str, stages: str, block_times: str) -> ScheduleSettings:
    """The settings of a way."""
    return ScheduleSettings(strategy=strategy, stages=stages, block_times=block_times, micro_batches_per_visit=1)


def timed(world: World, pipeline: Pipeline, batch: dict[str, torch.Tensor]) -> tuple[float, float, float]:
    """(seconds of a step, the mean share of it in which ranks computed, loss)"""
    pipeline.drain()
    world.gather_numbers(0.0)
    computed, began = pipeline.executor.compute_s, time.perf_counter()
    result = pipeline.step(batch)
    pipeline.drain()
    seconds = max(world.gather_numbers(time.perf_counter() - began))
    computing = statistics.mean(world.gather_numbers(pipeline.executor.compute_s - computed))
    return seconds, computing / seconds, result.loss


def measured(world: World, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way."""
    plan = planned(world, args)
    pipelines = {
        way: Pipeline(model_of(args), schedule=settings_of(*given), dtype=torch.float32, check="never", world=world)
        for way, given in plan["ways"].items()
    }
    readings: dict[str, list[tuple[float, float, float]]] = {way: [] for way in pipelines}
    for step in range(args.steps + 1):
        for way, pipeline in pipelines.items():
            readings[way].append(timed(world, pipeline, batch_of(args, step)))
    for pipeline in pipelines.values():
        pipeline.close()
    expected = [loss for *_, loss in readings["1f1b"]]
    for way, own in readings.items():
        assert all(abs(loss / one - 1) < 1e-4 for (*_, loss), one in zip(own, expected, strict=True)), way
    return [
        {
            "way": way,
            "stages": plan["ways"][way][1],
            "seconds": statistics.median(seconds for seconds, *_ in own[1:]),
            "fastest": min(seconds for seconds, *_ in own[1:]),
            "samples": [seconds for seconds, *_ in own[1:]],
            "computing": statistics.median(share for _, share, _ in own[1:]),
            "predicted": plan["predicted"][way],
            "blocks_s": plan["blocks_s"],
        }
        for way, own in readings.items()
    ]


def table(rows: list[dict[str, Any]], args: argparse.Namespace, command: str) -> str:
    """The readings as a page."""
    ours = next(row for row in rows if row["way"] == "generated")
    blocks = rows[0]["blocks_s"]
    dense, mixture = (statistics.mean(some) for some in (blocks[1 : 1 + args.dense], blocks[1 + args.dense : -1]))
    lines = [
        f"{time.strftime('%Y-%m-%d')}, `{command}`, {platform.machine()}, {os.cpu_count()} processors, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, {RANKS} processes of one thread, fp32.",
        "",
        f"{args.layers} layers, {args.hidden} wide. A micro-batch of {args.tokens} tokens takes {1000 * dense:.0f} ms "
        f"in each of the first {args.dense}, which are dense, {1000 * mixture:.0f} ms in a mixture, and "
        f"{1000 * blocks[-1]:.0f} ms in the head. {args.micro_batches} micro-batches in a step. Seconds of a step, the "
        f"median and the fastest of {args.steps}, which other work on the machine disturbs least.",
        "",
        "| | stages | median | fastest | samples | predicted | computing | over `generated`: median, fastest |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        samples = ", ".join(f"{one:.2f}" for one in row["samples"])
        lines.append(
            f"| {row['way']} | `{row['stages']}` | {row['seconds']:.2f} | {row['fastest']:.2f} | {samples} | "
            f"{row['predicted']:.2f} | {row['computing']:.2f} | {row['seconds'] / ours['seconds']:.2f}, "
            f"{row['fastest'] / ours['fastest']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def work(rank: int, args: argparse.Namespace, command: str, store: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    world = World(Topology.grid(1, RANKS), rank, torch.device("cpu"), dist.group.WORLD)
    rows = measured(world, args)
    if rank == 0:
        text = table(rows, args, command)
        print(text)
        content = json.dumps({"command": command, "rows": rows}, indent=1)
        (args.out / "uneven.json").write_text(content + "\n", encoding="utf-8")
        (args.out / "table.md").write_text(text, encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (args, shlex.join(["python", *sys.argv]), f"{folder}/store"), nprocs=RANKS)


if __name__ == "__main__":
    main()
