"""Engines: compute the passes of requests with a model whose weights stay on their device.

An engine runs in one process, or in several processes with one stage of the model each.
"""

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
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.step import Schedule
from tawpipe.serving.decode_steps import ServeCompute
from tawpipe.serving.held import hold_weights, refuse_serving
from tawpipe.serving.passes import Drawn, Pass, PassFeeder, Sampling, SlotLayout
from tawpipe.serving.requests import Question, Slots
from tawpipe.serving.stage import StayingStage

PATIENCE = timedelta(minutes=1)
"""Default time limit for waiting for another rank. An idle feeder gives a pass every few seconds."""


class Engine:
    """Engine of a single process: computes the passes of all groups, one after another.

    Args:
        chain: the model, with the weights of all blocks loaded (``hold_weights``).
        slot_layout: number of groups and KV-cache slots.

    Raises:
        UserError: requests cannot share a pass of this model, or the context exceeds its positions.
    """

    def __init__(self, chain: Chain, slot_layout: SlotLayout) -> None:
        self.chain, self.slot_layout = chain, slot_layout
        self.stage = StayingStage(chain, slot_layout)

    def compute(self, pass_: Pass) -> list[Drawn]:
        """Compute one pass through all blocks and return the drawn and scored tokens.

        The list is empty if the pass has no rows.
        """
        if not pass_.rows:
            return []
        hidden, calls = self.stage.embed(pass_)
        for block in range(1, len(self.chain.blocks) - 1):
            hidden = self.stage.layer(block, hidden, calls)
        return self.stage.head(hidden, pass_)

    def run(self, feeder: PassFeeder | None) -> None:
        """Compute the passes that ``feeder`` gives for group 0, 1, ... in turn, and return their tokens to it.

        Returns when a pass of each group, one after another, was marked as last."""
        assert feeder is not None
        group, ended = 0, 0
        while ended < self.slot_layout.groups:
            pass_ = feeder.feed(group)
            feeder.take(group, self.compute(pass_))
            ended = ended + 1 if pass_.last else 0
            group = (group + 1) % self.slot_layout.groups

    def close(self) -> None:
        """Do nothing: an engine of one process has no communication groups to leave."""


def no_homes(device: torch.device) -> Any:
    """Return a stand-in for the executor's storage without units: serving stages hold their weights themselves."""
    return SimpleNamespace(device=device, in_host=False, units=(), master={})


class StagesEngine:
    """Engine of one of several processes, each with one stage of the model. Call every method on all processes.

    Args:
        chain: the model, with the weights of this rank's blocks loaded.
        slot_layout: number of groups and KV-cache slots.
        world: the processes.
        schedule: schedule of a decode step.
        compression: format of hidden states sent between stages: ``int8``, or empty for none.
        timeout: time limit for waiting for another rank.
        transport: existing communication groups to use. By default the engine creates its own. ``close`` leaves the
            groups in both cases.

    Raises:
        UserError: requests cannot share a pass of this model, or the context exceeds its positions.
    """

    def __init__(
        self,
        chain: Chain,
        slot_layout: SlotLayout,
        world: World,
        schedule: Schedule,
        *,
        compression: str = "",
        timeout: timedelta = PATIENCE,
        transport: Transport | None = None,
    ) -> None:
        verify(schedule, one_thread=True)
        self.chain, self.slot_layout, self.world = chain, slot_layout, world
        self.stage = StayingStage(chain, slot_layout)
        self._schedule, self._compression = schedule, compression
        self._transport = transport or Transport(
            world.topology, world.rank, [schedule], device=world.device, timeout=timeout
        )

    def run(self, feeder: PassFeeder | None) -> None:
        """Compute passes until the last pass of every group is computed. Call on all processes; blocks until then.

        Args:
            feeder: source of the passes on rank 0, which has the first stage; None on all other ranks.

        Raises:
            Exception: another rank has ended, or an error occurred here.
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
        """Leave the communication groups of the decode steps."""
        self._transport.close()


def load_engine(
    model: str | Path,
    slot_layout: SlotLayout,
    world: World,
    *,
    dtype: str = AUTO,
    weights: str = AUTO,
    compression: str = "",
    timeout: timedelta = PATIENCE,
    trust_remote_code: bool = False,
) -> Engine | StagesEngine:
    """Load a model and return an engine that is ready for requests.

    The memory for the keys and values of all slots is allocated, and one request is computed as a test. Call on all
    processes.

    Args:
        model: a folder with a model, its name on the Hub, or a preset with random weights.
        slot_layout: number of groups and KV-cache slots, and their context.
        world: the processes. Each gets a stage with an equal number of layers.
        dtype: type to compute in. ``auto`` is bf16 if every device supports it or if ``weights`` are quantised, because
            the kernels of quantised weights compute in bf16. Otherwise fp32.
        weights: format of the weights of linear layers: ``none`` for ``dtype``, ``w4`` or ``int8``. ``auto`` keeps the
            format in the folder.
        compression: format of hidden states sent between stages, see ``StagesEngine``.
        timeout: time limit for waiting for another rank.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        UserError: a setting cannot work, or the model cannot be served. Both are checked before weights are loaded.
            Also raised if the logits of the test request are not numbers.
    """
    check_weights_form(weights)
    if dtype not in (AUTO, *DTYPES):
        raise UserError("dtype", dtype, ", ".join((AUTO, *DTYPES)))
    if dtype == AUTO:
        fast = computes_in_bfloat16(world.device) or weights not in (AUTO, EXACT)
        dtype = usual_dtype(all(world.gather_numbers(float(fast))), world.device.type)[0]
    folder = same_folder(world, str(model), code=trust_remote_code)
    positions = slot_layout.context if folder is None else 1  # a preset gets as many positions as the context
    built = build_model(str(model), max_positions=positions, trust_remote_code=trust_remote_code)
    built.model.requires_grad_(False)  # nothing is trained; parts that text does not use stay
    chain = Chain(built.model)
    refuse_serving(chain, slot_layout.context)
    if world.size > 1 and chain.why_not_staged:
        raise UserError("model", str(model), f"one that runs in stages, or one process: {chain.why_not_staged}")
    schedule = build_decode_steps(chain.spec, world.topology, slot_layout.groups)
    blocks = schedule.step.strategy.computes(schedule.step)[world.rank]

    source = built.source(chain, seed=0)
    chain.prepare(world.device, DTYPES[dtype])
    chain.load_buffers(source.buffers())
    read = torch.promote_types(DTYPES[dtype], torch.float32)
    codes = getattr(source, "codes", lambda name: None)
    hold_weights(chain, blocks, lambda unit: source.unit(unit, dtype=read), form=weights, codes=codes)
    if world.size == 1:
        engine: Engine | StagesEngine = Engine(chain, slot_layout)
    else:
        world.wait_patiently()  # other ranks may still read weights, and groups must form within timeout
        engine = StagesEngine(chain, slot_layout, world, schedule, compression=compression, timeout=timeout)
    # Compute one request now, so that all memory is allocated and errors show before the first real request.
    first, told = Slots(slot_layout, waiting=1), list[Drawn | None]()
    first.ask(Question((0,), 1, Sampling(temperature=0)), lambda drawn, *_: told.append(drawn))
    first.drain()
    engine.run(first)
    if any(drawn is not None and math.isnan(drawn.logprob) for drawn in told):
        raise UserError("model", str(model), "one whose logits are numbers; what it gives for its first token is none")
    return engine
