"""Serving in the lab: passes that sleep while their stages compute, with real messages between the stages.

A step begins with ``laps`` decode steps, in which every group computes one token for each of its slots. ``chunks`` more
decode steps follow, in which every pass also carries one chunk of a prompt: as many prompts as groups, one after the
other, each of ``chunks`` chunks. In addition to the step, two times are measured: from token to token, and the mean
from the begin of a prompt's first chunk until the token after its last chunk is back.

Rows differ in the number of groups:

* ``laps``: as many groups as keep stages and links busy, see ``groups_of``.
* ``laps-as-stages``: as many groups as stages, as pipelines for serving have.
* ``laps-one-group``: one group, so that one stage computes at a time, as if layers were placed on devices by hand.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.plan.machine.machine import uniform
from tawpipe.runtime.compute.step_input import DecodeInput
from tawpipe.runtime.executor import Executor
from tawpipe.runtime.frame import Frame
from tawpipe.runtime.transport.transport import Transport
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Buffer, Kind, block_input, ids
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.serving.engine import no_homes
from tawpipe.serving.planner import HAND_S, PassCost, ServeRequest, ServeWay, decode_step_seconds
from tawpipe.simulate import LinkModel
from tawpipe.simulate.cost_model import ID_BYTES
from tawpipe.topology import Topology
from tawpipe_lab.bounds import Bounds
from tawpipe_lab.contender import Contender
from tawpipe_lab.ours import INSIDE
from tawpipe_lab.sleeper import Sleeper
from tawpipe_lab.workload import ServingWorkload, Workload

ROWS = ("laps", "laps-as-stages", "laps-one-group")
NEARLY = 0.97
"""Share of the largest tokens per second that ``groups_of`` asks for. One more group would slow down all groups and
gain almost nothing."""
HEADER = 2
"""Bytes of the header of a pass: one that says if the pass is the last, and one that says if it has a chunk."""


def serving_model(workload: ServingWorkload) -> ModelSpec:
    """Return the blocks and units of a workload for schedule builders: tiny layers, and two ends without weights."""
    layers = [BlockSpec((layer,), "layer") for layer in range(workload.layers)]
    units = tuple(UnitSpec(8, False, (layer + 1,)) for layer in range(workload.layers))
    return ModelSpec((BlockSpec((), "embedding", False, False), *layers, BlockSpec((), "head")), units)


def planned(
    workload: ServingWorkload, topology: Topology, between: LinkModel, groups: int, *, hand_s: float = HAND_S
) -> ServeWay:
    """Return the layout of a serving plan with ``groups`` groups and the workload's costs; it predicts the times.

    Args:
        workload: the workload.
        topology: ranks and nodes.
        between: link between nodes.
        groups: number of groups.
        hand_s: seconds of a hop between stages in addition to the link's; 0 for the formula alone.
    """
    usual, most = workload.forward_s, workload.slots + workload.chunk
    layer = PassCost(((0.0, usual), (workload.slots, usual), (most, usual + workload.chunk_s)))
    costs = (PassCost(((0.0, workload.embedding_s),)), *[layer] * workload.layers, PassCost())
    machine = uniform(topology.num_nodes, topology.local_size, between=between, inside=INSIDE)
    users, context = groups * workload.slots, workload.chunks * workload.chunk
    model, token_bytes = serving_model(workload), workload.token_bytes
    request = ServeRequest(model, costs, machine, users, context, token_bytes, 0.0, hand_s=hand_s)
    stages = Layout.even(workload.layers + 2, topology.world_size)
    return ServeWay(request, 1, stages, groups, workload.slots, workload.chunk)


def groups_of(name: str, workload: ServingWorkload, topology: Topology, between: LinkModel) -> int:
    """Return the number of groups of a row.

    For ``laps`` it is the smallest number that reaches ``NEARLY`` the tokens per second that stages and links allow.
    """
    if name != "laps":
        return topology.world_size if name == "laps-as-stages" else 1
    way = planned(workload, topology, between, 1)
    slowest = max((*way.stage_seconds(), *way.hops()[0]))
    return math.ceil(NEARLY * way.token_s / slowest)


def serving_knobs(name: str, workload: Workload, topology: Topology, between: LinkModel) -> dict[str, Any]:
    """Return the number of groups of a row as the knob ``groups``; ``{}`` if the row or the workload does not serve.

    The launcher computes it once, because it depends on measured links."""
    if name not in ROWS or not isinstance(workload, ServingWorkload):
        return {}
    return {"groups": groups_of(name, workload, topology, between)}


def serving_bounds(workload: ServingWorkload, topology: Topology, between: LinkModel, groups: int) -> Bounds:
    """Return lower bounds of the seconds of a step, and the bytes on links, of a row with ``groups`` groups."""
    way, decode_steps = planned(workload, topology, between, groups, hand_s=0.0), workload.laps + workload.chunks
    held, (messages, _) = way.stage_seconds(), way.hops()
    tokens = groups * (decode_steps * workload.slots + workload.chunks * workload.chunk)
    sent, received = ([0.0] * topology.num_nodes for _ in range(2))
    for rank in range(topology.world_size):
        last = rank == topology.world_size - 1
        amount = groups * decode_steps * workload.slots * ID_BYTES if last else tokens * workload.token_bytes
        here, target = topology.node_of(rank), topology.node_of((rank + 1) % topology.world_size)
        if here != target:
            sent[here] += amount
            received[target] += amount
    long, (heavy, latencies) = way.stage_seconds(workload.chunk), way.hops(workload.chunk)
    with_chunks = workload.chunks * decode_step_seconds(long, heavy, latencies, groups)
    compute_s, link_s = (
        groups * (workload.laps * max(usual) + workload.chunks * max(more))
        for usual, more in ((held, long), (messages, heavy))
    )
    return Bounds(compute_s, link_s, workload.laps * way.token_s + with_chunks, tuple(sent), tuple(received))


class DecodeContender(Contender):
    """Contender that runs the decode steps of a serving workload.

    Raises:
        UserError: the workload is of another kind, or the knobs are not exactly ``groups``.
    """

    origin = "ours"
    sleeper: Sleeper

    def __init__(self, name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> None:
        if not isinstance(workload, ServingWorkload) or set(knobs) != {"groups"}:
            raise UserError(name, sorted(knobs), "a workload of the kind serving, and groups as its only knob")
        super().__init__(name, dict(knobs))
        self.decode_steps, self._workload = 0, workload
        self.schedule = build_decode_steps(serving_model(workload), topology, knobs["groups"])
        verify(self.schedule, one_thread=True)
        self.sleeper, device = Sleeper(self._busy), torch.device("cpu")
        self._compute = _SleepingPasses(workload, topology.world_size, self.sleeper)
        self._executor = Executor(
            rank,
            compute=cast(Any, self._compute),
            storage=no_homes(device),
            transport=Transport(topology, rank, [self.schedule], device=device),
            optimizers=None,
            reduce_dtype=torch.float32,
        )

    def step(self) -> None:
        self._compute.begin()
        self.decode_steps = self._executor.loop(self.schedule)

    @property
    def token_s(self) -> float:
        """Mean seconds from one token of a group to its next in the last step; 0.0 on all ranks but the first.

        The first decode step, and those with chunks of prompts, are not counted."""
        groups, decode_steps = self.knobs["groups"], self._workload.laps
        times = self._compute.began[groups : groups * decode_steps : groups]  # skip the first decode step
        return (times[-1] - times[0]) / (len(times) - 1) if times else 0.0

    @property
    def first_s(self) -> float:
        """Mean seconds from the begin of a prompt to its first token in the last step; 0.0 except on the first rank."""
        chunks, begin = self._workload.chunks, self.knobs["groups"] * self._workload.laps
        end = begin + self.knobs["groups"] * chunks
        if not self._compute.began:
            return 0.0
        began, back = self._compute.began[begin:end:chunks], self._compute.back[begin + chunks - 1 : end : chunks]
        return statistics.fmean(ends - begins for begins, ends in zip(began, back, strict=True))

    def close(self) -> None:
        self._executor.close()


class _SleepingPasses:
    """Handlers of the actions of a pass, which sleep for the workload's seconds and send messages of its sizes."""

    def __init__(self, workload: ServingWorkload, world: int, sleeper: Sleeper) -> None:
        self._workload, self._alone, self._sleeper = workload, world == 1, sleeper
        self.began: list[float] = []
        """Times at which passes began, on the first rank."""
        self.back: list[float] = []
        """Times at which the tokens of each pass arrived back on the first rank."""
        self._held: dict[Buffer, bytes] = {}
        self._sent, self._receive_buffer = cache(self._message), cache(self._new_receive_buffer)

    def begin(self) -> None:
        """Forget all times and messages of the step before."""
        self.began, self.back, self._held = [], [], {}

    def forward(self, action: Action, frame: Frame[DecodeInput]) -> None:
        """Sleep for one block of a pass, and store the header for the next block; the first block writes the header.

        The first block also notes the time, and marks the step as ended after its last decode step."""
        work, group, block, inputs = self._workload, action.micro_batch, action.block, frame.inputs
        if block == 0:
            self.began.append(time.perf_counter())
            last = inputs.number >= work.laps + work.chunks
            chunk = work.laps <= inputs.number < work.laps + work.chunks
            header, inputs.last = bytes((last, chunk)), inputs.last or last
        else:
            header = self._held[block_input(group, block)]
        if block <= work.layers and not header[0]:
            layer_s = work.forward_s + work.chunk_s * header[1]
            self._sleeper.compute(layer_s if block else work.embedding_s)
        self._held[ids(group) if block > work.layers else block_input(group, block + 1)] = header
        if self._alone and block > work.layers:
            self.back.append(time.perf_counter())

    def prepare(self, action: Action, frame: Frame[DecodeInput]) -> None:
        """Set ``frame.inputs.last`` to True if the header of a received pass says that it is the last."""
        frame.inputs.last |= bool(self._held[action.reads[0]][0])

    def travel(self, action: Action, frame: Frame[DecodeInput]) -> None:
        """Run an EXCHANGE: send messages of full size, and store the headers of the received ones.

        The first rank also notes the times at which tokens arrive."""
        sent = (transfer.buffer for transfer in action.transfers if transfer.send)
        messages = {buffer: self._sent(buffer.kind, self._held.pop(buffer)) for buffer in sent}
        for buffer in frame.transport.exchange(action, messages):
            self._held[buffer] = bytes(self._receive_buffer(buffer)[0][:HEADER])
            if buffer.kind is Kind.IDS:
                self.back.append(time.perf_counter())

    def receive_buffers(self, action: Action, frame: Frame[DecodeInput]) -> dict[Buffer, Tensor]:
        """Return the tensors that receive the messages of an action, by buffer; reused in every decode step."""
        return {buffer: self._receive_buffer(buffer)[1] for buffer in action.writes}

    def _new_receive_buffer(self, buffer: Buffer) -> tuple[bytearray, Tensor]:
        """Return memory for messages into ``buffer``, as a bytearray and as a tensor over it.

        Headers are read from the bytearray, because torch is slow in its first call after a sleep.
        """
        memory = bytearray(self._bytes(buffer.kind, b"\0\1"))
        return memory, torch.frombuffer(memory, dtype=torch.uint8)

    def _message(self, kind: Kind, header: bytes) -> Tensor:
        """Return a message with this header and zeros, of the size of a pass or of drawn tokens."""
        return torch.frombuffer(bytearray(header.ljust(self._bytes(kind, header))), dtype=torch.uint8)

    def _bytes(self, kind: Kind, header: bytes) -> int:
        """Return the bytes of a message: drawn tokens, or activations of the slots and of a chunk if there is one."""
        work, (last, chunk) = self._workload, header
        if kind is Kind.IDS or last:
            return HEADER + work.slots * ID_BYTES
        return HEADER + (work.slots + chunk * work.chunk) * work.token_bytes
