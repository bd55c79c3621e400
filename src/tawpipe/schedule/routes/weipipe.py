"""Programs of WeiPipe-Interleave (PPoPP 2025): weights and gradients travel round a ring of all ranks.

Two streams of weights and one of gradients go from every rank to the next (see ring.py). That is 36 H^2 elements per
layer and pass, where TawPipe moves 24. In every turn a rank computes one backward and one forward pass of different
micro-batches. One EXCHANGE on INTER_W sends the weights that the turn uses and receives the weights of the next turn;
one on INTER_G does so for gradients. The gradient of a stage is complete when the last pass has added to it, and then
travels on to its home.

As in the paper, weights do not stop at homes that they pass. A home that sent its own copy again each time would save
one hop in P.
"""

from __future__ import annotations

from collections.abc import Iterator

from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.blocks import backward, forward
from tawpipe.schedule.buffers import Buffer, home_gradient, home_weight
from tawpipe.schedule.routes.ring import Journey, Ring, Stream
from tawpipe.schedule.routes.route import Pools
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.step_end import StepEnd

WEIGHT_POOLS = {Stream.FORWARD: "WF", Stream.BACKWARD: "WB"}


def build_weipipe(step: StepSpec, *, training: bool) -> Schedule:
    """Return the schedule of one step on a ring of at least two ranks.

    Args:
        step: the step.
        training: False for forward passes only.
    """
    ring = Ring(step, training)
    programs, pools = [], []
    for rank in range(step.topology.world_size):
        worker = _RingProgram(ring, rank)
        end = StepEnd(rank, step, training=training)
        programs.append(tuple(end.close(tuple(worker.program()))))
        pools.append((*worker.pools.pools(), *end.pools))
    name = step.strategy.name if training else "evaluation"
    return Schedule(name, step, tuple(programs), tuple(pools), training)


class _RingProgram:
    """Program of one rank on the ring."""

    def __init__(self, ring: Ring, rank: int) -> None:
        self.ring, self.rank, self.model, self.settings = ring, rank, ring.model, ring.step.settings
        self.position = ring.ranks.index(rank)
        self.before, self.after = (ring.ranks[(self.position + d) % ring.size] for d in (-1, 1))
        visited = [tuple({u for b in blocks for u in self.model.blocks[b].units}) for blocks in ring.stages]
        self.homes, self.pools = ring.step.homes, Pools(ring.step.homes, visited)
        self._stays: dict[int, list[Journey]] = {}
        """Turn -> the journeys that are at this position in that turn."""
        for journey in ring.journeys:
            offset = (self.position - journey.start) % ring.size
            for turn in range(journey.departure + offset, journey.arrival + 1, ring.size):
                self._stays.setdefault(turn, []).append(journey)
        self._arrived: dict[tuple[int, Stream, int], Buffer] = {}
        """(Turn, stream, unit) -> buffer that holds it in that turn. Missing at the start of a journey."""
        self._gradients: dict[int, Buffer] = {}
        """Unit -> buffer with the gradient that this rank computes in the present turn."""
        self._started: set[int] = set()

    def program(self) -> Iterator[Action]:
        """Yield all actions of the rank without the end of the step."""
        exchanged, turns = 0, self.ring.num_turns
        for turn in range(turns):
            while exchanged < min(turn + self.settings.look_ahead, turns):
                yield from self._exchange_weights(exchanged)
                exchanged += 1
            self._gradients.clear()
            if work := self.ring.backward_at(self.position, turn):
                yield from self._backward(turn, *work)
            yield from self._pass_gradients_on(turn)
            if work := self.ring.forward_at(self.position, turn):
                yield from self._forward(turn, *work)

    # compute

    def _forward(self, turn: int, number: int, stage: int) -> Iterator[Action]:
        """Yield the FORWARD actions of pass ``number`` on the blocks of ``stage``."""
        for block in self.ring.forward_blocks(stage):
            weights = [self._weights(turn, Stream.FORWARD, unit) for unit in self.model.blocks[block].units]
            for place, m in enumerate(self.ring.micro_batches(number)):
                yield forward(self.ring.step, block, m, weights, place=place, training=self.ring.training)

    def _backward(self, turn: int, number: int, stage: int) -> Iterator[Action]:
        """Yield the BACKWARD actions of pass ``number`` on the blocks of ``stage``."""
        for block in self.ring.backward_blocks(stage):
            weights = [self._weights(turn, Stream.BACKWARD, unit) for unit in self.ring.backward_weights(block)]
            gradients = {}
            for unit in self.model.trainable_units(block):
                accumulate = unit in self._gradients
                if not accumulate:
                    self._gradients[unit] = self._gradient_buffer("G", unit, self.settings.gradient_buffers)
                gradients[unit] = (self._gradients[unit], accumulate)
            yield from backward(self.ring.step, block, self.ring.micro_batches(number), weights, gradients)

    # transfers

    def _exchange_weights(self, turn: int) -> Iterator[Action]:
        """Yield the EXCHANGE that sends the weights used in ``turn`` and receives weights for the next turn."""
        transfers = []
        for journey in self._here(turn, Stream.FORWARD, Stream.BACKWARD):
            if turn < journey.arrival:
                buffer = self._weights(turn, journey.stream, journey.unit)
                transfers.append(Transfer(True, self.after, journey.unit, buffer))
        for journey in self._here(turn + 1, Stream.FORWARD, Stream.BACKWARD):
            if journey.departure <= turn:
                buffer = self.pools.visiting(
                    WEIGHT_POOLS[journey.stream],
                    journey.unit,
                    elements=self.homes[journey.unit].padded,
                    visits=self.settings.look_ahead + 1,
                )
                self._arrived[turn + 1, journey.stream, journey.unit] = buffer
                transfers.append(Transfer(False, self.before, journey.unit, buffer))
        if transfers:
            yield exchange(Lane.INTER_W, tuple(transfers), "world")

    def _pass_gradients_on(self, turn: int) -> Iterator[Action]:
        """Yield the actions for gradients at the end of ``turn``: additions, then one exchange.

        The rank's own gradient is added to the one that has arrived. The sum is sent to the next rank, or added at home
        if it has arrived there. Gradients for the next turn are received."""
        transfers = []
        for journey in self._here(turn, Stream.GRADIENT):
            unit = journey.unit
            arrived, computed = self._arrived.pop((turn, Stream.GRADIENT, unit), None), self._gradients.get(unit)
            gradients = tuple(buffer for buffer in (arrived, computed) if buffer)
            if turn == journey.arrival:
                home = home_gradient(unit)
                reads = (home, *gradients) if unit in self._started else gradients
                self._started.add(unit)
                yield Action(Op.ADD, Lane.INTER_G, reads, (home,), unit=unit)
                continue
            if len(gradients) == 2:
                yield Action(Op.ADD, Lane.INTER_G, gradients, gradients[:1], unit=unit)
            transfers.append(Transfer(True, self.after, unit, gradients[0]))
        for journey in self._here(turn + 1, Stream.GRADIENT):
            if journey.departure <= turn:
                # Two buffers: one gradient is sent while the next one arrives.
                buffer = self._arrived[turn + 1, Stream.GRADIENT, journey.unit] = self._gradient_buffer(
                    "R", journey.unit, 2
                )
                transfers.append(Transfer(False, self.before, journey.unit, buffer))
        if transfers:
            yield exchange(Lane.INTER_G, tuple(transfers), "world")

    def _here(self, turn: int, *streams: Stream) -> list[Journey]:
        """Return the journeys of ``streams`` that are at this position in ``turn``."""
        return [journey for journey in self._stays.get(turn, ()) if journey.stream in streams]

    def _weights(self, turn: int, stream: Stream, unit: int) -> Buffer:
        """Return the buffer with the weights of ``unit`` in ``turn``: the one that received them, or else the home."""
        return self._arrived.get((turn, stream, unit), home_weight(unit))

    def _gradient_buffer(self, purpose: str, unit: int, visits: int) -> Buffer:
        return self.pools.visiting(purpose, unit, elements=self.homes[unit].padded, visits=visits)
