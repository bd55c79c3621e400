"""What a run says before its first step: what is about to happen, and what it costs."""

from __future__ import annotations

import torch

from tawpipe.data.prepared import PreparedData
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.plan.predict import Needs
from tawpipe.runtime.world import World
from tawpipe.schedule.balance import Bins
from tawpipe.schedule.footprint import Costs
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.topology import Topology
from tawpipe.train.config import TrainConfig


def gib(number: float) -> str:
    """Bytes in the unit that people read.

    >>> gib(3 * 2**30), gib(5 * 2**20)
    ('3.00 GiB', '5.0 MiB')
    """
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"


def without_effect(config: TrainConfig, world: World) -> list[str]:
    """Settings that were changed and do nothing here."""
    names = ("step_cache", "gradients_scope", "weights_compression", "gradients_compression")
    usual = ScheduleSettings()
    return [
        name for name in names if world.nodes.num_nodes == 1 and getattr(config.schedule, name) != getattr(usual, name)
    ]


def _batch_words(config: TrainConfig, data: PreparedData, bins: Bins | None) -> str:
    if bins is None:
        each = f"of up to {config.sequence_length}" if config.packing == "none" else f"x {config.sequence_length}"
        return f"{config.global_batch} sequences {each} tokens, micro-batches of {config.micro_batch}"
    shared = f", {bins.shape[0]} of them of bins that {bins.ranks} processes share" if bins.shape[0] else ""
    modelled = f"; modelled imbalance of the first steps {found.after:.2f}" if (found := data.report.balance) else ""
    rounds = f"{sum(bins.shape)} round{'s' if sum(bins.shape) > 1 else ''}"
    return (
        f"documents of up to {config.document_tokens:,} tokens, {config.step_tokens:,} tokens a step; the next has "
        f"{len(bins.lengths):,} documents in {rounds}{shared}, bins of at most {config.bin_tokens:,} "
        f"tokens for each process{modelled}"
    )


def costs_of_next(
    config: TrainConfig, pipeline: Pipeline, data: PreparedData, samples: int
) -> tuple[Costs, Bins | None]:
    """Costs of the next step, and its documents as they are dealt, if they are.

    Args:
        samples: consumed so far.
    """
    if config.packing != "balanced":
        return pipeline.costs(config.global_batch, config.sequence_length), None
    bins = pipeline.deal(data.train.step(samples, config.step_tokens).lengths)
    return pipeline.costs_of_bins(bins), bins


def plan_rows(
    config: TrainConfig,
    said: Costs,
    bins: Bins | None,
    data: PreparedData,
    nodes: Topology,
    needs: Needs | None,
    computing: list[tuple[str, str]],
) -> list[tuple[str, str]]:
    """Rows that say what is about to happen and what it costs, before the first step.

    Args:
        said, bins: of the next step.
        computing: rows that say what it computes in and with.
    """
    rows = [
        ("model", f"{config.model}: {said.parameters / 1e6:.1f} M parameters, {said.trainable / 1e6:.1f} M trained"),
        ("batch", _batch_words(config, data, bins)),
        *computing,
        ("strategy", said.strategy),
        ("schedule", said.schedule),
    ]
    if nodes.num_nodes > 1:
        most = max(said.link_sent_bytes)
        rows.append(("link of a node", f"{gib(most)} sent and {gib(max(said.link_received_bytes))} received per step"))
    rows += [
        ("homes", f"{gib(said.home_bytes)} per process: weights, gradients, optimizer state"),
        ("buffers", f"{gib(said.buffer_bytes)} per process: units on their way"),
    ]
    if needs is None:
        words = "per process, what one block needs while it computes not counted"
        rows.append(("activations", f"{gib(said.activation_bytes)} {words}"))
    else:
        parts = needs.parts
        rows += [
            ("activations", f"{gib(parts['activations'])} per process: what layers keep for their backward passes"),
            ("working", f"{gib(parts['working'])} per process: what one block needs while it computes"),
            ("system", f"{gib(parts['system'])} per process: what libraries and the driver take"),
        ]
        if "apart" in parts:
            words = "what the device's allocator holds for one stream alone"
            rows.append(("apart", f"{gib(parts['apart'])} per process: {words}"))
        if "kept" in parts:
            rows.append(("kept", f"up to {gib(parts['kept'])} per process: what need not be computed again then"))
        rows.append(("memory", f"{gib(needs.device)} per process at the highest, all of this together"))
    if said.host_bytes:
        rows.append(("host memory", f"{gib(said.host_bytes)} per process: inputs of layers that wait there"))
    return rows
