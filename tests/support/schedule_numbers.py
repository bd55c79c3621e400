"""A second opinion on schedules: plays one with numbers, in a random order that lanes and buffers allow.

It shares nothing with the proof but ``Hazards``, which the runtime uses as well, and takes from every action what the
runtime takes from it. Numbers are integers modulo a prime, so that sums are exact in every order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule

PRIME = 2**31 - 1
INPUTS, KEPT = ("x", "host"), ("graph", "kept", "products", "hostkept", "hostgraph", "hostproducts")
"""The beginnings of buffers that hold a block's input, and what a block keeps besides or in its place."""


class WrongNumbers(Exception):
    """A schedule that hangs, asks for what is not there, or computes something else than one process does."""


class Model:
    """What blocks compute: a boundary activation is one number, weights are vectors."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def initial(self, unit: int, elements: int) -> np.ndarray:
        values = (np.arange(elements, dtype=np.int64) * 7919 + 104729 * (unit + 1)) % PRIME
        values[self.spec.units[unit].numel :] = 0
        return values

    def product(self, block: int, weights: list[np.ndarray]) -> int:
        total = block + 1
        for unit, values in zip(self.spec.blocks[block].units, weights, strict=True):
            numel = self.spec.units[unit].numel
            total += int((values[:numel] * (np.arange(numel) + unit + 2) % PRIME).sum())
        return total % PRIME

    def forward(self, block: int, m: int, x: int, weights: list[np.ndarray]) -> int:
        """The block's output, or the head's loss."""
        return (x * self.product(block, weights) + 31 * m + 1) % PRIME

    def backward(self, block: int, m: int, dx: int, weights: list[np.ndarray]) -> int:
        """The gradient of the block's input."""
        return (dx * (self.product(block, weights) if weights else 1) + m) % PRIME

    def keys(self, block: int, m: int, place: int, x: int, weights: list[np.ndarray]) -> int:
        """The keys and values of one rank of a set."""
        return (x * self.product(block, weights) * 5 + 7 * m + place + 1) % PRIME

    def attended(self, place: int, keys: Sequence[int]) -> int:
        """What the keys of all ranks add to one rank's output."""
        return sum(key * (1 + j * (place + 2)) for j, key in enumerate(keys)) % PRIME

    def key_gradients(self, place: int, dx: int, keys: Sequence[int]) -> list[int]:
        """What one rank adds to the gradients of the keys of all."""
        return [dx * (3 + j + place) + key % 1013 for j, key in enumerate(keys)]

    def gradient(self, unit: int, elements: int, m: int, x: int, dx: int) -> np.ndarray:
        values = (np.arange(elements, dtype=np.int64) + x % 1009 + 3 * m) * (dx % 65521) % PRIME
        values[self.spec.units[unit].numel :] = 0
        return values


def update(weights: np.ndarray, gradient: np.ndarray, norm: int) -> np.ndarray:
    return (weights * 5 + gradient * (norm % 65521 + 1)) % PRIME


def reference(schedule: Schedule, steps: int) -> tuple[list[np.ndarray], list[int]]:
    """What one process computes: the weights after all steps, and loss and norm in one number for every step."""
    spec, model = schedule.model, Model(schedule.model)
    weights = [model.initial(u, home.padded) for u, home in enumerate(schedule.homes)]
    norms = []
    for _ in range(steps):
        gradients = [np.zeros_like(values) for values in weights]
        losses = 0
        for m in schedule.micro_batches:
            places = range(schedule.step.ranks_of(m))
            xs, keys = [[0 for _ in places]], list[list[int]]()
            for b, block in enumerate(spec.blocks):
                own = [weights[u] for u in block.units]
                xs.append([model.forward(b, m, x, own) for x in xs[b]])
                keys.append([])
                if block.kind == "layer" and len(places) > 1:
                    keys[b] = [model.keys(b, m, i, xs[b][i], own) for i in places]
                    xs[-1] = [(xs[-1][i] + model.attended(i, keys[b])) % PRIME for i in places]
            losses += sum(xs[-1])
            dxs = [1 for _ in places]
            for b in reversed(range(len(spec.blocks))):
                if not schedule.training or not (spec.blocks[b].needs_backward or spec.blocks[b].kind == "head"):
                    break
                through = [model.key_gradients(i, dxs[i], keys[b]) for i in places]
                of_keys = [sum(own) % PRIME for own in zip(*through, strict=True)]
                for u in spec.trainable_units(b):
                    for x, dx in [*zip(xs[b], dxs, strict=True), *zip(xs[b], of_keys, strict=False)]:
                        gradients[u] = (gradients[u] + model.gradient(u, len(gradients[u]), m, x, dx)) % PRIME
                reads = spec.blocks[b].backward_reads_weights or spec.blocks[b].kind == "head"
                own = [weights[u] for u in spec.blocks[b].units] if reads else []
                dxs = [model.backward(b, m, dx, own) for dx in dxs]
                for i, more in enumerate(of_keys):
                    dxs[i] = (dxs[i] + model.backward(b, m, more, own)) % PRIME
        early = schedule.training and schedule.step.settings.early_updates
        norms.append((losses + (3 if early else 1) * sum(int(g.sum()) for g in gradients)) % PRIME)
        for u, unit in enumerate(spec.units):
            if unit.trainable and schedule.training:
                weights[u] = update(weights[u], gradients[u], len(schedule.micro_batches) if early else norms[-1])
    return weights, norms


def _is_turn(name: str) -> bool:
    return name.startswith("turn.")


def in_texts(action: Action) -> Any:
    """An action with texts for its buffers: what they are called is all that is known of them here."""
    texts = {name: [str(one) for one in getattr(action, name)] for name in ("reads", "writes", "frees")}
    used = {"weights": [str(one) for one in action.weights], "gradients": [str(one) for one in action.gradients]}
    transfers = [SimpleNamespace(send=t.send, peer=t.peer, unit=t.unit, buffer=str(t.buffer)) for t in action.transfers]
    plain = {
        name: getattr(action, name)
        for name in ("op", "lane", "block", "micro_batch", "unit", "root", "group", "compression")
    }
    return SimpleNamespace(**plain, **texts, **used, collective=action.collective, transfers=transfers)


@dataclass(eq=False)
class Issued:
    """An action that has been issued."""

    rank: int
    action: Any
    after: list[Issued]
    done: bool = False
    started: bool = False
    open: list[Any] = field(default_factory=list)


class Numbers:
    """One play of all ranks."""

    def __init__(self, schedule: Schedule, *, steps: int, seed: int) -> None:
        self.schedule, self.model, self.random = schedule, Model(schedule.model), random.Random(seed)
        self.buffers: list[dict[str, np.ndarray]] = []
        self.held: list[dict[str, Any]] = []
        self.norms: list[list[int]] = []
        self.present: list[set[str]] = [set() for _ in schedule.programs]
        """Copies that have come."""
        self.sized: list[dict[str, bool]] = [{} for _ in schedule.programs]
        """Copies whose changes were counted last, and whether there were any."""
        self.counts: dict[int, int] = {}
        self.lanes: dict[tuple[int, Lane], deque[Issued]] = {}
        for rank, program in enumerate(schedule.programs):
            pools = schedule.pools[rank]
            own = {f"{p.name}.{i}": np.full(p.elements, 12345 + rank) for p in pools for i in range(p.count)}
            for unit, home in enumerate(schedule.homes):
                if (i := home.index(rank)) is not None:
                    whole = self.model.initial(unit, home.padded)
                    own[f"home.w.{unit}"] = whole[i * home.shard_size : (i + 1) * home.shard_size].copy()
                    own[f"home.g.{unit}"] = np.full(home.shard_size, 999)
            self.buffers.append(own)
            self.held.append({})
            self.norms.append([])
            hazards: Hazards[Issued] = Hazards()
            for _ in range(steps):
                for action in map(in_texts, program):
                    names = {"reads": action.reads, "writes": action.writes, "frees": action.frees}
                    issued = Issued(rank, action, hazards.before(**names, lane=action.lane))
                    hazards.record(issued, **names, lane=action.lane)
                    self.lanes.setdefault((rank, action.lane), deque()).append(issued)
        self.posted: dict[tuple, deque[tuple[Issued, Any]]] = {}
        self.priority = {key: self.random.random() for key in self.lanes}

    def play(self) -> None:
        while any(self.lanes.values()):
            moves = list(self._moves())
            if not moves:
                raise WrongNumbers("hangs")
            moves.sort(key=lambda move: self.priority[move[0]])
            chosen = moves[0] if self.random.random() < 0.7 else self.random.choice(moves)
            try:
                chosen[1]()
            except (KeyError, IndexError, ValueError) as error:
                raise WrongNumbers(repr(error)) from error

    def _moves(self) -> Iterator[tuple]:
        for key, queue in self.lanes.items():
            if not queue or any(not other.done for other in queue[0].after):
                continue
            head = queue[0]
            if head.action.op is Op.EXCHANGE:
                if not head.started:
                    yield key, lambda head=head: self._post(head)
            elif not head.action.group:
                yield key, lambda head=head: self._local(head)
            elif members := self._together(head):
                yield key, lambda members=members: self._collective(members)
        for way, waiting in self.posted.items():
            lane, group, sender, receiver, send = way
            if send and waiting and self.posted.get((lane, group, sender, receiver, False)):
                yield (sender, lane), lambda way=way: self._copy(way)

    def _end(self, *ended: Issued) -> None:
        for issued in ended:
            issued.done = True
            self.held[issued.rank].update(dict.fromkeys(filter(_is_turn, issued.action.writes), 0))
            assert self.lanes[issued.rank, issued.action.lane].popleft() is issued

    # transfers

    def _post(self, head: Issued) -> None:
        head.started = True
        head.open = list(head.action.transfers)
        for t in head.action.transfers:
            sender, receiver = (head.rank, t.peer) if t.send else (t.peer, head.rank)
            way = (head.action.lane, head.action.group, sender, receiver, t.send)
            self.posted.setdefault(way, deque()).append((head, t))
        if not head.open:
            self._end(head)

    def _copy(self, way: tuple) -> None:
        (source, give), (target, take) = self.posted[way].popleft(), self.posted[(*way[:4], False)].popleft()
        if give.buffer in self.held[way[2]]:
            self.held[way[3]][take.buffer] = self.held[way[2]].pop(give.buffer)
        else:
            self._fill(self.buffers[way[3]], take.buffer, self.buffers[way[2]][give.buffer])
        for issued, transfer in ((source, give), (target, take)):
            issued.open.remove(transfer)
            if not issued.open:
                self._end(issued)

    @staticmethod
    def _fill(buffers: dict[str, np.ndarray], name: str, values: np.ndarray) -> None:
        if len(buffers[name]) != len(values):
            raise WrongNumbers(f"{len(values)} elements for {name}")
        buffers[name][:] = values

    def _together(self, head: Issued) -> list[Issued] | None:
        action, topology = head.action, self.schedule.topology
        try:
            members = topology.group(action.group, head.rank)
        except AssertionError as error:
            raise WrongNumbers(repr(error)) from error
        found = []
        for member in members:
            queue = self.lanes.get((member, action.lane))
            if not queue or queue[0].action.group != action.group or any(not other.done for other in queue[0].after):
                return None
            theirs = queue[0].action
            if theirs.op is Op.EXCHANGE or (theirs.op, theirs.collective) != (action.op, action.collective):
                return None
            found.append(queue[0])
        return found

    def _collective(self, members: list[Issued]) -> None:
        action, buffers = members[0].action, self.buffers
        if any(name.startswith(("kv.", "dkv.")) for name in (*action.reads, *action.writes)):
            self._keys_together(members)
        elif action.op is Op.SIZE:
            self._size(members)
        elif action.op is Op.COUNT:
            for one in members:
                step = self.schedule.step
                each = [1 / step.ranks_of(m) for other in members for m in step.micro_batches[other.rank]]
                self.counts[one.rank] = round(sum(each))
        elif action.op is Op.NORM:
            total = 0
            for one in members:
                total += sum(int(buffers[one.rank][n].sum()) for n in one.action.reads if n.startswith("home.g."))
                total += sum(self.held[one.rank].pop(n) for n in one.action.frees)
            for one in members:
                self.norms[one.rank].append(total % PRIME)
        elif action.compression == "exact" and action.collective == "all_gather":
            self._refresh(members)
        elif action.collective == "all_gather":
            whole = np.concatenate([buffers[one.rank][one.action.reads[0]] for one in members])
            for one in members:
                self._fill(buffers[one.rank], one.action.writes[0], whole)
        elif action.collective == "broadcast":
            roots = [one for one in members if one.rank == action.root]
            values = buffers[roots[0].rank][(roots[0].action.writes or roots[0].action.reads)[0]]
            for one in members:
                self._fill(buffers[one.rank], (one.action.writes or one.action.reads)[0], values)
        else:
            total = np.sum([buffers[one.rank][one.action.reads[0]] for one in members], axis=0) % PRIME
            for i, one in enumerate(members):
                if action.collective == "reduce_scatter":
                    size = len(total) // len(members)
                    self._fill(buffers[one.rank], one.action.writes[0], total[i * size : (i + 1) * size])
                elif action.collective == "all_reduce" or one.rank == one.action.root:
                    self._fill(buffers[one.rank], one.action.writes[0], total)
                else:
                    buffers[one.rank][one.action.writes[0]][:] = 55  # whatever a reduction leaves there
        self._end(*members)

    def _size(self, members: list[Issued]) -> None:
        """Find the copies of which something has changed on any member, or which are not there."""
        for home, copy in zip(members[0].action.reads[::2], members[0].action.reads[1::2], strict=True):
            changed = any(
                copy not in self.present[one.rank] or self._change(members, at, home, copy).any()
                for at, one in enumerate(members)
            )
            for one in members:
                self.sized[one.rank][copy] = changed

    def _refresh(self, members: list[Issued]) -> None:
        """Add to copies how what is at home differs from the owner's part of its copy; whole the first time."""
        home, copy = members[0].action.reads[0], members[0].action.writes[0]
        if self.sized[members[0].rank][copy]:
            there = all(copy in self.present[one.rank] for one in members)
            changes = np.concatenate([self._change(members, at, home, copy) for at in range(len(members))])
            whole = np.concatenate([self.buffers[one.rank][home] for one in members])
            for one in members:
                held = self.buffers[one.rank][copy]
                self._fill(self.buffers[one.rank], copy, held + changes if there else whole)
                self.present[one.rank].add(copy)

    def _change(self, members: list[Issued], at: int, home: str, copy: str) -> np.ndarray:
        own = self.buffers[members[at].rank]
        return own[home] - own[copy].reshape(len(members), -1)[at]

    def _keys_together(self, members: list[Issued]) -> None:
        """Every rank's own number is at its place; of gradients the sum of all is left there."""
        held = [self.held[one.rank] for one in members]
        read = [own[one.action.reads[0]] for own, one in zip(held, members, strict=True)]
        for place, (own, one) in enumerate(zip(held, members, strict=True)):
            if one.action.collective == "all_gather":
                own[one.action.writes[0]] = [numbers[i] for i, numbers in enumerate(read)]
            else:
                summed = sum(numbers[place] for numbers in read) % PRIME
                own[one.action.writes[0]] = [summed if i == place else 77 for i in range(len(read))]

    # on one rank

    def _place(self, rank: int) -> int:
        return rank % self.schedule.step.sequence_ranks

    def _keys(self, head: Issued) -> None:
        held, b, m = self.held[head.rank], head.action.block, self._own(head)
        x = self._input(head)
        place, ranks = self._place(head.rank), self.schedule.step.sequence_ranks
        own = self.model.keys(b, held[f"ctx.{m}"], place, x, self._weights(head))
        held[head.action.writes[0]] = [own if i == place else 99 for i in range(ranks)]
        self._free(head)

    def _keys_backward(self, head: Issued) -> None:
        held, b, m = self.held[head.rank], head.action.block, self._own(head)
        x = self._input(head)
        summed = held[f"dkv.{m}.{b}"][self._place(head.rank)]
        self._add_gradients(head, x, summed)
        if f"dx.{m}.{b}" in head.action.writes:
            more = self.model.backward(b, held[f"ctx.{m}"], summed, self._weights(head))
            before = held[f"dx.{m}.{b}"] if f"dx.{m}.{b}" in head.action.reads else 0
            held[f"dx.{m}.{b}"] = (before + more) % PRIME
        self._free(head)

    def _add_gradients(self, head: Issued, x: int, dx: int) -> None:
        buffers, m = self.buffers[head.rank], self.held[head.rank][f"ctx.{head.action.micro_batch}"]
        units = self.schedule.model.trainable_units(head.action.block)
        for unit, name in zip(units, head.action.gradients, strict=True):
            mine = self.model.gradient(unit, self.schedule.homes[unit].padded, m, x, dx)
            self._fill(buffers, name, (buffers[name] + mine) % PRIME if name in head.action.reads else mine)

    def _local(self, head: Issued) -> None:
        action, buffers = head.action, self.buffers[head.rank]
        if action.op is Op.KEYS:
            self._keys(head)
        elif action.op is Op.KEYS_BACKWARD:
            self._keys_backward(head)
        elif action.op is Op.FORWARD:
            self._forward(head)
        elif action.op is Op.BACKWARD:
            self._backward(head)
        elif action.op is Op.PREPARE:
            self.held[head.rank][action.writes[0]] = self._own(head)
        elif action.op in (Op.OFFLOAD, Op.RELOAD):
            self.held[head.rank][action.writes[0]] = self.held[head.rank][action.reads[0]]
            self._free(head)
        elif action.op is Op.ZERO:
            buffers[action.writes[0]][:] = 0
        elif action.op is Op.ADD:
            sources = [buffers[name] for name in action.reads if name != action.writes[0]]
            total = np.sum(sources, axis=0)
            if action.writes[0] in action.reads:
                total = total + buffers[action.writes[0]]
            self._fill(buffers, action.writes[0], total % PRIME)
        elif action.op is Op.UPDATE:
            weights, home = buffers[f"home.w.{action.unit}"], buffers[f"home.g.{action.unit}"]
            landed = [buffers[name] for name in action.reads if name.startswith("L")]
            gradient = landed[0] if landed else home
            early = "count" in action.reads
            weights[:] = update(weights, gradient, self.counts[head.rank] if early else self.norms[head.rank][-1])
            home[:] = gradient * 3 % PRIME
        elif action.op is Op.RAISE:
            self._fill(buffers, action.writes[0], buffers[action.reads[0]])
        else:
            raise WrongNumbers(f"nobody runs {action}")
        self._end(head)

    def _weights(self, head: Issued) -> list[np.ndarray]:
        found = [self.buffers[head.rank][name] for name in head.action.weights]
        units = self.schedule.model.blocks[head.action.block].units
        for unit, values in zip(units, found, strict=bool(found)):
            if len(values) < self.schedule.model.units[unit].numel:
                raise WrongNumbers(f"{len(values)} elements for unit {unit}")
        return found

    def _own(self, head: Issued) -> int:
        if head.action.micro_batch not in self.schedule.step.micro_batches[head.rank]:
            raise WrongNumbers("a micro-batch of another rank")
        return head.action.micro_batch

    def _forward(self, head: Issued) -> None:
        held, b, m = self.held[head.rank], head.action.block, self._own(head)
        kind = self.schedule.model.blocks[b].kind
        x = 0 if kind == "embedding" else self._input(head)
        if kind == "embedding":
            held[f"ctx.{m}"] = m
        result = self.model.forward(b, held[f"ctx.{m}"], x, self._weights(head))
        for name in self._key_names(head.action.reads):
            result = (result + self.model.attended(self._place(head.rank), held[name])) % PRIME
        for name in head.action.writes:
            what, *_, block = name.split(".")
            if (what in INPUTS and block == str(b + 1)) or what == "loss":
                held[name] = result
            elif what in KEPT:
                held[name] = x
        self._free(head)

    def _input(self, head: Issued) -> int:
        """The input of a block, by all that a pass starts from."""
        at = str(head.action.block)
        found = {
            self.held[head.rank][name]
            for name in head.action.reads
            if name.startswith("reload") or (name.split(".")[0] in (*INPUTS, *KEPT) and name.split(".")[-1] == at)
        }
        if len(found) != 1:
            raise WrongNumbers(f"a pass starts from {len(found)} inputs")
        return found.pop()

    @staticmethod
    def _key_names(names: Sequence[str]) -> list[str]:
        return [name for name in names if name.startswith("kv.")]

    def _backward(self, head: Issued) -> None:
        held, b, m = self.held[head.rank], head.action.block, self._own(head)
        spec = self.schedule.model.blocks[b]
        x = 0 if spec.kind == "embedding" else self._input(head)
        weights = self._weights(head)
        dx = 1
        if spec.kind == "head":
            held[f"loss.{m}"] = self.model.forward(b, held[f"ctx.{m}"], x, weights)
        else:
            dx = held[f"dx.{m}.{b + 1}"]
        self._add_gradients(head, x, dx)
        for name in self._key_names(head.action.reads):
            held[f"d{name}"] = self.model.key_gradients(self._place(head.rank), dx, held[name])
        if f"dx.{m}.{b}" in head.action.writes:
            held[f"dx.{m}.{b}"] = self.model.backward(b, held[f"ctx.{m}"], dx, weights)
        self._free(head)

    def _free(self, head: Issued) -> None:
        for name in head.action.frees:
            del self.held[head.rank][name]


def check_numbers(schedule: Schedule, *, seed: int, steps: int | None = None) -> None:
    """Play a schedule once.

    Raises:
        WrongNumbers: it hangs, or weights, losses or norms are not those of one process, or activations are left.
    """
    steps = steps or (2 if schedule.training else 1)
    numbers = Numbers(schedule, steps=steps, seed=seed)
    numbers.play()
    weights, norms = reference(schedule, steps)
    for rank in range(schedule.topology.world_size):
        if numbers.norms[rank] != norms:
            raise WrongNumbers(f"rank {rank} has the norms {numbers.norms[rank]}, not {norms}")
        if numbers.held[rank]:
            raise WrongNumbers(f"rank {rank} still holds {sorted(numbers.held[rank])}")
    for unit, home in enumerate(schedule.homes):
        for copy in home.copies:
            parts = [numbers.buffers[rank][f"home.w.{unit}"] for rank in copy]
            if not np.array_equal(
                np.concatenate(parts)[: schedule.model.units[unit].numel], _cut(schedule, weights, unit)
            ):
                raise WrongNumbers(f"unit {unit} differs")


def _cut(schedule: Schedule, weights: list[np.ndarray], unit: int) -> np.ndarray:
    return weights[unit][: schedule.model.units[unit].numel]
