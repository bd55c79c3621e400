"""Words for the console before the first step: description and cost of the run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tawpipe.dealing.balance import Packs
from tawpipe.dealing.lengths import Balance
from tawpipe.plan.cost.predict import Needs
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.footprint import Costs
from tawpipe.topology import Topology
from tawpipe.train.settings.decided import BatchShape


def gib(number: float) -> str:
    """Return a number of bytes as text, in GiB or MiB.

    >>> gib(3 * 2**30), gib(5 * 2**20)
    ('3.00 GiB', '5.0 MiB')
    """
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def measured_words(peaks: Sequence[float], predicted_bytes: int) -> str:
    """Return the peak memory of every process as text, with the difference from the prediction ``predicted_bytes``.

    >>> measured_words([103 * 2**20, 2**20], 100 * 2**20)
    '103.0 MiB, 1.0 MiB (predicted 100.0 MiB; the largest used 3.0% more)'
    >>> measured_words([96 * 2**20], 100 * 2**20)
    '96.0 MiB (predicted 100.0 MiB; the largest used 4.0% less)'

    Args:
        peaks: peak memory of every process, in bytes.
        predicted_bytes: predicted bytes; 0 for no prediction.
    """
    words = ", ".join(map(gib, peaks))
    if not predicted_bytes:
        return words
    more = max(peaks) / predicted_bytes - 1
    return (
        f"{words} (predicted {gib(predicted_bytes)}; the largest used {abs(more):.1%} {'more' if more > 0 else 'less'})"
    )


def device_name(world: World) -> str:
    """Return the name of the GPU, or ``CPU``."""
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"


def without_effect(settings: ScheduleSettings, world: World) -> list[str]:
    """Return the names of settings under ``schedule`` that the user has changed and that have no effect on one node."""
    names = ("step_cache", "gradients_scope", "weights_compression", "gradients_compression")
    usual = ScheduleSettings()
    return [name for name in names if world.nodes.num_nodes == 1 and getattr(settings, name) != getattr(usual, name)]


def batch_words(batch: BatchShape, packs: Packs | None, balance: Balance | None) -> str:
    """Return a description of the batches of a run.

    Args:
        batch: sizes of the batches.
        packs: assignment of the next step's documents under ``balanced``, else None.
        balance: balance of the first steps between processes.
    """
    if packs is None:
        each = f"of up to {batch.row_tokens}" if batch.packing == "none" else f"x {batch.row_tokens}"
        return f"{batch.rows} sequences {each} tokens, micro-batches of {batch.micro_batch}{batch.why}"
    shared = (
        f", {packs.shape[0]} of them of packed micro-batches that {packs.ranks} processes share"
        if packs.shape[0]
        else ""
    )
    modelled = f"; predicted imbalance of the first steps {balance.after:.2f}" if balance else ""
    each = f"{packs.in_words}{shared}, packed micro-batches of at most {batch.bin_tokens:,} tokens per process"
    if packs.positions > 1:
        cut = f" ({sum(map(sum, packs.slices))} slices of long documents in all)" if packs.slices else ""
        each = f"{packs.in_words} per pipeline{cut}, packed micro-batches of at most {batch.bin_tokens:,} tokens"
    return (
        f"documents of up to {batch.document_tokens:,} tokens, {batch.step_tokens:,} tokens per step; the next "
        f"step has {len(packs.lengths):,} documents in {each}{modelled}"
    )


def step_rows(costs: Costs, nodes: Topology, recompute: str) -> list[tuple[str, str]]:
    """Return console rows with the strategy of a step and the bytes that it sends between nodes."""
    rows = [("strategy", f"{costs.strategy}: {costs.schedule}, recompute {recompute}")]
    if nodes.num_nodes > 1:
        most = max(costs.link_sent_bytes)
        received = gib(max(costs.link_received_bytes))
        rows.append(("network", f"{gib(most)} sent and {received} received per node and step"))
    return rows


PARTS = {
    "homes": "weights, gradients, optimizer state",
    "buffers": "weights and gradients in transfer",
    "activations": "kept for backward passes",
    "working": "while a layer computes",
    "system": "libraries, driver, data and plan",
    "texts": "weights, keys and values for sample texts",
    "saving": "copy for a checkpoint",
    "apart": "unused memory of the allocator",
    "host": "inputs of layers in host memory",
    "kept": "at most, activations kept instead of recomputed",
}
"""Description of each part of ``Needs``."""


MEMORY_PARTS = "memory, by use"


def brief(rows: Sequence[tuple[str, str]], device: torch.device) -> list[tuple[str, str]]:
    """Return ``rows`` without those that only pages and dry runs show."""
    left_out = (MEMORY_PARTS,) if device.type == "cuda" else (MEMORY_PARTS, "attention")
    return [row for row in rows if row[0] not in left_out]


def memory_rows(needs: Needs) -> list[tuple[str, str]]:
    """Return console rows with the predicted memory of a device, by part, and of the host and disk of a node."""
    parts = "; ".join(f"{gib(size)} {PARTS[name]}" for name, size in needs.parts.items() if size)
    rows = [("memory", f"{gib(needs.device)} per process at most"), (MEMORY_PARTS, parts)]
    if needs.host:
        rows.append(("host memory", f"{gib(needs.host)} per node, for tensors that wait there for a device"))
    if needs.files:
        rows.append(("files", f"{gib(needs.files)} per node, for inputs of layers that wait on disk"))
    return rows
