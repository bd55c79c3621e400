"""Engines: a model whose weights stay computes passes for whoever holds requests, on one process or on a stage each."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tawpipe.errors import UserError
from tawpipe.model.bits.lowbit import EXACT, check_weights_form
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.runtime.alike import same_folder
from tawpipe.runtime.dtype import AUTO, DTYPES, computes_in_bfloat16, usual_dtype
from tawpipe.runtime.executor import Executor
from tawpipe.runtime.transport.transport import Transport
from tawpipe.runtime.world import World
from tawpipe.schedule.laps import build_laps
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.step import Schedule
from tawpipe.serving.held import hold_weights, refuse_serving
from tawpipe.serving.laps import ServeCompute
from tawpipe.serving.passes import Drawn, Pass, PassFeeder, Room, Sampling
from tawpipe.serving.requests import Question, Slots
from tawpipe.serving.stage import StayingStage

PATIENCE = timedelta(minutes=1)
"""For what a rank waits for another, by default; an idle feeder gives a pass every few seconds."""


class Engine:
    """The engine of one process: the passes of all groups, one after the other.

    Args:
        chain: with the weights of all blocks held (``hold_weights``).

    Raises:
        UserError: a model that requests cannot share, or a context that it has no positions for.
    """

    def __init__(self, chain: Chain, room: Room) -> None:
        self.chain, self.room = chain, room
        self.stage = StayingStage(chain, room)

    def compute(self, given: Pass) -> list[Drawn]:
        """One pass through all blocks."""
        if not given.rows:
            return []
        hidden, calls = self.stage.embed(given)
        for block in range(1, len(self.chain.blocks) - 1):
            hidden = self.stage.layer(block, hidden, calls)
        return self.stage.head(hidden, given)

    def run(self, feeder: PassFeeder | None) -> None:
        """Ask for passes, compute them and give what was drawn, until every group had one that was the last."""
        assert feeder is not None
        group, ended = 0, 0
        while ended < self.room.groups:
            given = feeder.feed(group)
            feeder.take(group, self.compute(given))
            ended = ended + 1 if given.last else 0
            group = (group + 1) % self.room.groups

    def close(self) -> None:
        """Nothing is left to leave."""


def no_homes(device: torch.device) -> Any:
    """What an executor is told of homes where weights are held by the stages themselves."""
    return SimpleNamespace(device=device, in_host=False, units=(), master={})


class StagesEngine:
    """The engine of one of several processes, each of which holds a stage. Call every method on all of them.

    Args:
        chain: with the weights of this rank's blocks held.
        schedule: of a lap.
        compression: of hidden states between stages: ``int8``, or none if empty.
        timeout: of a wait for another rank.
        transport: whose groups serve for it; its own by default, which ``close`` leaves.

    Raises:
        UserError: as ``Engine`` does.
    """

    def __init__(
        self,
        chain: Chain,
        room: Room,
        world: World,
        schedule: Schedule,
        *,
        compression: str = "",
        timeout: timedelta = PATIENCE,
        transport: Transport | None = None,
    ) -> None:
        verify(schedule, one_thread=True)
        self.chain, self.room, self.world = chain, room, world
        self.stage = StayingStage(chain, room)
        self._schedule, self._compression = schedule, compression
        self._transport = transport or Transport(
            world.topology, world.rank, [schedule], device=world.device, timeout=timeout
        )

    def run(self, feeder: PassFeeder | None) -> None:
        """Compute passes until one was the last; the requests are on the rank of the first stage, rank 0.

        Raises:
            Exception: another rank is gone, or something failed here.
        """
        rank = self.world.rank
        compute: Any = ServeCompute(self.stage, feeder, compression=self._compression)
        executor = Executor(
            rank,
            compute=compute,
            storage=no_homes(self.world.device),
            transport=self._transport,
            optimizers=None,
            reduce_dtype=self.chain.dtype,
            where=f"rank {rank} (node {self.world.nodes.node_of(rank)})",
        )
        compute.stream = executor.compute_stream
        executor.loop(self._schedule)
        executor.close()

    def close(self) -> None:
        """Leave the groups of the laps."""
        self._transport.close()


def load_engine(
    model: str | Path,
    room: Room,
    world: World,
    *,
    dtype: str = AUTO,
    weights: str = AUTO,
    compression: str = "",
    timeout: timedelta = PATIENCE,
    trust_remote_code: bool = False,
) -> Engine | StagesEngine:
    """The engine of a folder, ready for its first pass: the keys and values of all slots have their memory.

    Args:
        model: a folder with a model, its name on the Hub, or a preset with random weights.
        world: the processes, on all of which this is called: a stage of equally many layers on each.
        dtype: to compute in; ``auto`` is bf16 where every device computes in it or ``weights`` are in few bits, which
            kernels multiply in it, else fp32.
        weights: of linear layers: ``none`` for ``dtype``, ``w4`` or ``int8``; ``auto`` for what the folder has.
        compression, timeout: as ``StagesEngine`` takes them.

    Raises:
        UserError: a model that is not served, before anything is loaded; or a setting that cannot work.
    """
    check_weights_form(weights)
    if dtype not in (AUTO, *DTYPES):
        raise UserError("dtype", dtype, ", ".join((AUTO, *DTYPES)))
    if dtype == AUTO:
        fast = computes_in_bfloat16(world.device) or weights not in (AUTO, EXACT)
        dtype = usual_dtype(all(world.gather_numbers(float(fast))), world.device.type)[0]
    folder = same_folder(world, str(model), code=trust_remote_code)
    positions = room.context if folder is None else 1  # of a preset
    built = build_model(str(model), max_positions=positions, trust_remote_code=trust_remote_code)
    built.model.requires_grad_(False)  # nothing is trained, and what text does not use may be there
    chain = Chain(built.model)
    refuse_serving(chain, room.context)
    if world.size > 1 and chain.why_not_staged:
        raise UserError("model", str(model), f"one that runs in stages, or one process: {chain.why_not_staged}")
    schedule = build_laps(chain.spec, world.topology, room.groups)
    blocks = schedule.step.strategy.computes(schedule.step)[world.rank]

    source = built.source(chain, seed=0)
    chain.prepare(world.device, DTYPES[dtype])
    chain.load_buffers(source.buffers())
    read = torch.promote_types(DTYPES[dtype], torch.float32)
    codes = getattr(source, "codes", lambda name: None)
    hold_weights(chain, blocks, lambda unit: source.unit(unit, dtype=read), form=weights, codes=codes)
    if world.size == 1:
        engine: Engine | StagesEngine = Engine(chain, room)
    else:
        world.wait_patiently()  # for ranks that still read their weights: groups are made within ``timeout``
        engine = StagesEngine(chain, room, world, schedule, compression=compression, timeout=timeout)
    # So that everything has its memory, and what is wrong shows before the first request.
    first, told = Slots(room, waiting=1), list[Drawn | None]()
    first.ask(Question((0,), 1, Sampling(temperature=0)), lambda drawn, *_: told.append(drawn))
    first.drain()
    engine.run(first)
    if any(drawn is not None and math.isnan(drawn.logprob) for drawn in told):
        raise UserError("model", str(model), "one whose logits are numbers; what it gives for its first token is none")
    return engine
