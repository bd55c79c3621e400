"""What a run says before its first step: what is about to happen, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tawpipe.dealing.balance import Bins
from tawpipe.dealing.lengths import Balance
from tawpipe.plan.cost.predict import Needs
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.footprint import Costs
from tawpipe.topology import Topology
from tawpipe.train.settings.decided import BatchShape


def gib(number: float) -> str:
    """Bytes in the unit that people read.

    >>> gib(3 * 2**30), gib(5 * 2**20)
    ('3.00 GiB', '5.0 MiB')
    """
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def measured_words(peaks: Sequence[float], said: int) -> str:
    """The most that every process has held, beside what was said before the first step.

    >>> measured_words([103 * 2**20, 2**20], 100 * 2**20)
    '103.0 MiB, 1.0 MiB; 100.0 MiB were said, the largest has taken 3.0% more'
    >>> measured_words([96 * 2**20], 100 * 2**20)
    '96.0 MiB; 100.0 MiB were said, the largest has taken 4.0% less'
    """
    words = ", ".join(map(gib, peaks))
    if not said:
        return words
    more = max(peaks) / said - 1
    return f"{words}; {gib(said)} were said, the largest has taken {abs(more):.1%} {'more' if more > 0 else 'less'}"


def device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"


def without_effect(settings: ScheduleSettings, world: World) -> list[str]:
    """Settings under ``schedule`` that were changed and do nothing here."""
    names = ("step_cache", "gradients_scope", "weights_compression", "gradients_compression")
    usual = ScheduleSettings()
    return [name for name in names if world.nodes.num_nodes == 1 and getattr(settings, name) != getattr(usual, name)]


def batch_words(batch: BatchShape, bins: Bins | None, balance: Balance | None) -> str:
    """The batches of a run.

    Args:
        bins: of the next step, where documents are dealt.
        balance: how even the first steps are.
    """
    if bins is None:
        each = f"of up to {batch.row_tokens}" if batch.packing == "none" else f"x {batch.row_tokens}"
        return f"{batch.rows} sequences {each} tokens, micro-batches of {batch.micro_batch}"
    shared = f", {bins.shape[0]} of them of bins that {bins.ranks} processes share" if bins.shape[0] else ""
    modelled = f"; modelled imbalance of the first steps {balance.after:.2f}" if balance else ""
    each = f"{bins.in_words}{shared}, bins of at most {batch.bin_tokens:,} tokens for each process"
    if bins.positions > 1:
        cut = f" ({sum(map(sum, bins.slices))} slices of long documents in all)" if bins.slices else ""
        each = f"{bins.in_words} for each pipeline{cut}, bins of at most {batch.bin_tokens:,} tokens"
    return (
        f"documents of up to {batch.document_tokens:,} tokens, {batch.step_tokens:,} tokens a step; the next has "
        f"{len(bins.lengths):,} documents in {each}{modelled}"
    )


def step_rows(said: Costs, nodes: Topology) -> list[tuple[str, str]]:
    """Rows that say what a step does, and what it sends between nodes."""
    rows = [("strategy", f"{said.strategy}: {said.schedule}")]
    if nodes.num_nodes > 1:
        most = max(said.link_sent_bytes)
        rows.append(("link of a node", f"{gib(most)} sent and {gib(max(said.link_received_bytes))} received per step"))
    return rows


PARTS = {
    "homes": "weights, gradients, optimizer state",
    "buffers": "weights and gradients on their way",
    "activations": "kept for backward passes",
    "working": "while a layer computes",
    "system": "libraries, the driver, what was read and planned",
    "texts": "weights, keys and values for the texts that it writes",
    "saving": "the copy that a checkpoint is written from",
    "apart": "what the allocator holds besides",
    "host": "inputs of layers that wait",
    "kept": "at most, of what need not be computed again then",
}
"""The parts of ``Needs`` in words."""


def memory_rows(needs: Needs) -> list[tuple[str, str]]:
    """Rows that say what a device holds, and of what, and what its node's host and disk hold."""
    parts = "; ".join(f"{gib(size)} {PARTS[name]}" for name, size in needs.parts.items() if size)
    rows = [("memory", f"{gib(needs.device)} per process at the highest: {parts}")]
    if needs.host:
        rows.append(("host memory", f"{gib(needs.host)} of a node: what waits there until a device needs it"))
    if needs.files:
        rows.append(("files", f"{gib(needs.files)} of a node's disk: inputs of layers that wait there"))
    return rows
