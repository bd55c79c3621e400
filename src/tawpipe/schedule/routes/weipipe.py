"""Builder of WeiPipe-Interleave (PPoPP 2025): everything goes round a ring of all ranks. Imports topology and schedule.

Two streams of weights and one of gradients, all from every rank to the next (ring.py says who holds what and when):
36 H^2 elements a layer and pass where TawPipe moves 24. In every turn a rank computes one backward and one forward of
different micro-batches; one EXCHANGE on INTER_W sends what the turn uses and receives what the next one will, and one
on INTER_G does so for gradients. The gradient of a slot is complete when the last pass has added to it, and goes on to
its home.

As in the paper, streams do not stop at the homes that they pass; a home that gave out its own copy again each time
would spare one hop in P.
"""

from __future__ import annotations

from collections.abc import Iterator

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.blocks import backward, forward
from tawpipe.schedule.routes.ring import Journey, Ring, Stream, place_on_ring
from tawpipe.schedule.routes.route import Slots
from tawpipe.schedule.spec import Knobs, ModelSpec, Schedule
from tawpipe.schedule.step_end import StepEnd
from tawpipe.topology import Topology

WEIGHT_POOLS = {Stream.FORWARD: "WF", Stream.BACKWARD: "WB"}


def build_weipipe(model: ModelSpec, topology: Topology, knobs: Knobs, *, training: bool) -> Schedule:
    """One step on the ring of several ranks, of training or forward only.

    Raises:
        UserError: fewer layers than ranks, or no second buffer for what arrives while the other is in use.
    """
    assert topology.world_size > 1
    if knobs.look_ahead < 1:
        raise UserError(
            "schedule.look_ahead", knobs.look_ahead, "at least 1 under placement ring: a slot arrives while one is sent"
        )
    ring = Ring(model, topology, knobs, place_on_ring(model, topology), training)
    programs, pools = [], []
    for rank in range(topology.world_size):
        worker = _Worker(ring, rank)
        end = StepEnd(rank, topology, model, ring.homes, knobs, training=training)
        programs.append(tuple(end.close(tuple(worker.program()))))
        pools.append(worker.slots.pools())
    name = "weipipe" if training else "evaluation"
    return Schedule(name, topology, model, knobs, ring.homes, tuple(programs), tuple(pools), training)


class _Worker:
    """One rank's program."""

    def __init__(self, ring: Ring, rank: int) -> None:
        self.ring, self.rank, self.model, self.knobs = ring, rank, ring.model, ring.knobs
        self.position = ring.ranks.index(rank)
        self.before, self.after = (ring.ranks[(self.position + d) % ring.size] for d in (-1, 1))
        self.slots = Slots(
            ring.homes, [tuple({u for b in blocks for u in self.model.blocks[b].units}) for blocks in ring.slots]
        )
        self._stays: dict[int, list[Journey]] = {}
        """Turn -> the journeys that are here then."""
        for journey in ring.journeys:
            offset = (self.position - journey.start) % ring.size
            for turn in range(journey.departure + offset, journey.arrival + 1, ring.size):
                self._stays.setdefault(turn, []).append(journey)
        self._arrived: dict[tuple[int, Stream, int], str] = {}
        """(turn, stream, unit) -> buffer in which it is here then; where a journey begins it has none."""
        self._made: dict[int, str] = {}
        """Unit -> buffer with this rank's own gradient of the turn."""
        self._started: set[int] = set()

    def program(self) -> Iterator[Action]:
        exchanged, turns = 0, self.ring.num_turns
        for turn in range(turns):
            while exchanged < min(turn + self.knobs.look_ahead, turns):
                yield from self._exchange_weights(exchanged)
                exchanged += 1
            self._made.clear()
            if found := self.ring.backward_at(self.position, turn):
                yield from self._backward(turn, *found)
            yield from self._pass_gradients_on(turn)
            if found := self.ring.forward_at(self.position, turn):
                yield from self._forward(turn, *found)

    # compute

    def _forward(self, turn: int, number: int, slot: int) -> Iterator[Action]:
        for block in self.ring.forward_blocks(slot):
            weights = [self._weights(turn, Stream.FORWARD, unit) for unit in self.model.blocks[block].units]
            keep = self.ring.training and block >= self.model.first_backward
            for m in self.ring.micro_batches(number):
                kept = self.knobs.keeps(block) if keep else ""
                yield forward(self.model, block, m, weights, keep=keep, kept=kept)

    def _backward(self, turn: int, number: int, slot: int) -> Iterator[Action]:
        for block in self.ring.backward_blocks(slot):
            weights = [self._weights(turn, Stream.BACKWARD, unit) for unit in self.ring.backward_weights(block)]
            gradients = {}
            for unit in self.model.trainable_units(block):
                accumulate = unit in self._made
                if not accumulate:
                    self._made[unit] = self._gradient_slot("G", unit, self.knobs.gradient_buffers)
                gradients[unit] = (self._made[unit], accumulate)
            own, kept = self.ring.micro_batches(number), self.knobs.keeps(block)
            yield from backward(self.model, block, own, weights, gradients, kept=kept)

    # transfers

    def _exchange_weights(self, turn: int) -> Iterator[Action]:
        """What this turn has used goes on; what the next one will use arrives."""
        transfers = []
        for journey in self._here(turn, Stream.FORWARD, Stream.BACKWARD):
            if turn < journey.arrival:
                buffer = self._weights(turn, journey.stream, journey.unit)
                transfers.append(Transfer(True, self.after, journey.unit, buffer))
        for journey in self._here(turn + 1, Stream.FORWARD, Stream.BACKWARD):
            if journey.departure <= turn:
                buffer = self.slots.visiting(
                    WEIGHT_POOLS[journey.stream],
                    journey.unit,
                    kind="weight",
                    elements=self.ring.homes[journey.unit].padded,
                    visits=self.knobs.look_ahead + 1,
                )
                self._arrived[turn + 1, journey.stream, journey.unit] = buffer
                transfers.append(Transfer(False, self.before, journey.unit, buffer))
        if transfers:
            yield exchange(Lane.INTER_W, tuple(transfers), "world")

    def _pass_gradients_on(self, turn: int) -> Iterator[Action]:
        """Add what this turn has made to what has arrived; send it on, or take it in at home; receive the next."""
        transfers = []
        for journey in self._here(turn, Stream.GRADIENT):
            unit = journey.unit
            arrived, made = self._arrived.pop((turn, Stream.GRADIENT, unit), None), self._made.get(unit)
            found = tuple(name for name in (arrived, made) if name)
            if turn == journey.arrival:
                home = f"home.g.{unit}"
                reads = (home, *found) if unit in self._started else found
                self._started.add(unit)
                yield Action(Op.ADD, Lane.INTER_G, reads, (home,), unit=unit)
                continue
            if len(found) == 2:
                yield Action(Op.ADD, Lane.INTER_G, found, found[:1], unit=unit)
            transfers.append(Transfer(True, self.after, unit, found[0]))
        for journey in self._here(turn + 1, Stream.GRADIENT):
            if journey.departure <= turn:
                # One is sent while the next arrives.
                buffer = self._arrived[turn + 1, Stream.GRADIENT, journey.unit] = self._gradient_slot(
                    "R", journey.unit, 2
                )
                transfers.append(Transfer(False, self.before, journey.unit, buffer))
        if transfers:
            yield exchange(Lane.INTER_G, tuple(transfers), "world")

    def _here(self, turn: int, *streams: Stream) -> list[Journey]:
        return [journey for journey in self._stays.get(turn, ()) if journey.stream in streams]

    def _weights(self, turn: int, stream: Stream, unit: int) -> str:
        return self._arrived.get((turn, stream, unit), f"home.w.{unit}")

    def _gradient_slot(self, name: str, unit: int, visits: int) -> str:
        elements = self.ring.homes[unit].padded
        return self.slots.visiting(name, unit, kind="gradient", elements=elements, visits=visits)
