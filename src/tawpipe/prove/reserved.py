"""Check of all memory that a device gives, by four counts, not only of tensors.

Every process plans, and then trains in the same process, as a training run does. Memory that planning leaves in torch's
allocator therefore counts. Rows run whole, in chunks, with layer inputs in CPU memory, and through a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings
from tawpipe.plan.cost.predict import Needs, memory_of
from tawpipe.prove.memory import BESIDES, LIMIT, ask, live_bytes
from tawpipe.prove.models import dtype_here, on_meta, rows, sized, ways
from tawpipe.prove.outcome import Outcome, each_way
from tawpipe.prove.speed import TOKENS
from tawpipe.prove.stand_in import LaneStream, LooksLikeCuda
from tawpipe.runtime.compute.rows import Places
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.memory import Taken, give_back
from tawpipe.runtime.peak import peak_of_step
from tawpipe.runtime.world import World
from tawpipe.schedule.buffers import Buffer, Kind
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies.build import build

SLACK_BYTES = 64 << 20
"""Bytes by which a count may exceed its prediction, in addition to a share of it. The allocator's blocks have 2 to 20
MiB."""


def reserved(world: World) -> Outcome:
    """Train in several ways, and check that all counted memory stays within its prediction. Call on all ranks.

    On a CPU only the last two ways are run, and the check is not decided. Also check that the number of streams that
    copy rows does not grow with the number of layers."""
    cuda = world.device.type == "cuda"
    every = ways(sized(world.device).num_hidden_layers, TOKENS[world.device.type] // 4, micro_batches_per_visit=1)
    names = [*every] if cuda else [*every][-2:]  # on a CPU all memory is one pool
    measured, refused = each_way(names, lambda name: _of(world, every[name]))
    streams = [streams_of_rows(world.device, layers) for layers in (2, 8)]
    too_much = [f"{name}: {words}" for name, row in measured.items() for words in row["too_much"]]
    if streams[1] > streams[0]:
        too_much.append(f"{streams[0]} streams copy the rows of 2 layers, and {streams[1]} those of 8: each has a pool")
    everyone = [words for words in world.gather_texts("; ".join(too_much)) if words]
    note = everyone[0] if everyone else f"{len(measured)} ways to train"
    note += "" if cuda else "; tensors alone, as a CPU has one pool"
    note += "".join(f"; not {name}: {why}" for name, why in refused.items())
    holds = False if everyone else True if cuda else None
    return Outcome(holds, note, {"ways": measured, "refused": refused, "streams": streams, "too_much": everyone})


def _of(world: World, settings: ScheduleSettings) -> dict[str, Any]:
    """Predict the memory of a step, run two steps, and return the prediction with the counts of the second step.

    Call on all ranks.

    Returns:
        A dict of bytes by what was counted. ``too_much`` has a sentence for every count that exceeds its prediction.
    """
    config, dtype, tokens, device = sized(world.device), dtype_here(world), TOKENS[world.device.type], world.device
    give_back(device)
    chain = on_meta(config)
    asked = ask(world, chain, [tokens], settings, dtype, rows=2 * world.size)
    needs = memory_of(asked, build(asked.step(settings)))
    base_bytes = live_bytes(device)
    pipeline = Pipeline(
        chain, optimizer=adamw(), schedule=settings, dtype=dtype, checks=CheckSettings(check="never"), world=world
    )
    with closing(pipeline):
        batches = [rows(config, 2 * world.size, tokens, seed=seed) for seed in range(2)]
        pipeline.step(batches[0])
        pipeline.drain()
        before = live_bytes(device) - base_bytes
        allocated = before + peak_of_step(pipeline.executor, lambda: pipeline.step(batches[1]))
        taken = Taken.of(device) if device.type == "cuda" else None
        groups = {f"{lane} {name}": size for (lane, name), size in pipeline.transport.group_bytes.items()}
    return {
        "predicted": dict(needs.parts),
        "allocated_bytes": allocated,
        "taken": vars(taken) if taken else {},
        "group_bytes": groups,
        "communicator_bytes": asked.communicator_bytes,
        "too_much": too_much(needs, allocated, taken),
    }


def too_much(needs: Needs, allocated: int, taken: Taken | None) -> list[str]:
    """Return a sentence for every count that exceeds its prediction.

    Args:
        needs: the prediction.
        allocated: bytes of tensors.
        taken: all counts of a GPU; None on a CPU.
    """
    tensors = sum(size for name, size in needs.parts.items() if name not in BESIDES)
    counts = {"allocated": (allocated, tensors)}
    if taken is not None:
        kept = needs.device - needs.parts["system"]
        counts |= {"active": (taken.active, kept), "reserved": (taken.reserved, kept)}
        counts["driver"] = taken.driver, needs.device
    return [
        f"{size / 2**30:.2f} GiB {name}, {most / 2**30:.2f} predicted"
        for name, (size, most) in counts.items()
        if size > most * (1 + LIMIT) + SLACK_BYTES
    ]


def streams_of_rows(device: torch.device, layers: int) -> int:
    """Offload the rows of ``layers`` layers as a trial, and return the number of CUDA streams that this creates.

    The allocator keeps separate memory for every stream. On a CPU, stand-ins are counted."""
    counted: list[Any] = []
    with _counting(counted, device):
        places = Places(device if device.type == "cuda" else LooksLikeCuda("cpu"))  # type: ignore[arg-type]
        for layer in range(layers):
            places.of(Buffer(Kind.OFFLOADED, (0, layer)), (1, 8, 8), torch.float32)
        places.close()
    return len(counted)


@contextmanager
def _counting(counted: list[Any], device: torch.device) -> Iterator[None]:
    """Append every CUDA stream that is created within the context to ``counted``; on a CPU, append stand-ins."""
    stream = torch.cuda.Stream

    def new_stream(*args: Any, **kwargs: Any) -> Any:
        counted.append(stream(*args, **kwargs) if device.type == "cuda" else LaneStream("copies"))
        return counted[-1]

    with patch.object(torch.cuda, "Stream", new_stream):
        yield
