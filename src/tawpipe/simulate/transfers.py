"""Loads of transfers: their messages, the ports that these pass, and their latencies.

A collective is one fluid. All its messages advance together, each port carries the bytes of its messages, and the
slowest port sets the pace. This is exact for rings and for equal links. In a pairwise exchange different ports are the
slowest in different steps; its time is slightly underestimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tawpipe.schedule.actions import Action, Op, Transfer
from tawpipe.schedule.buffers import Buffer, Kind
from tawpipe.schedule.proof.verify import ScheduleError
from tawpipe.schedule.spec import CODED_PART, compressed_width, sum_width
from tawpipe.schedule.step import Schedule
from tawpipe.simulate.cost_model import CostModel, LinkModel
from tawpipe.topology import Topology

Port = tuple[str, int, str]
"""Something with a bandwidth: (``between``, ``inside``, ``host`` or ``rows``; node or rank; direction). ``rows`` is the
link to the host for offloaded rows, if its rate differs from that for homes."""

PAIR = "pair"
"""Name in place of a group for the two sides of an exchange."""

Message = tuple[int, int, float]
"""Message as (sender, receiver, elements)."""


@dataclass(frozen=True)
class Load:
    """One transfer as the network sees it.

    Args:
        ports: bytes that pass each port; ports without a limit are left out.
        delay_s: latencies and additions, which occupy no port.
        sent, received: bytes that leave and enter nodes, by node.
        inside: bytes that stay in a node, by node.
        least_s: least seconds of the transfer, whatever the rates of the ports.
        landing_s: latency of the last message, after its bytes. Neither its sender nor its lane waits for it.
    """

    ports: tuple[tuple[Port, float], ...]
    delay_s: float
    sent: tuple[tuple[int, float], ...] = ()
    received: tuple[tuple[int, float], ...] = ()
    inside: tuple[tuple[int, float], ...] = ()
    least_s: float = 0.0
    landing_s: float = 0.0


def ring(members: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the pairs (member, next member) of a ring; empty for one member."""
    return list(zip(members, members[1:] + members[:1], strict=True)) if len(members) > 1 else []


def tree(members: tuple[int, ...], root: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of a binomial broadcast as lists of pairs (sender, receiver).

    In round k every rank that has the data sends it to the rank 2**k places on.

    >>> tree((0, 1, 2), 1)
    [[(1, 2)], [(1, 0)]]
    """
    at = members.index(root)
    order = members[at:] + members[:at]
    rounds, have = [], 1
    while have < len(order):
        rounds.append([(order[i], order[i + have]) for i in range(min(have, len(order) - have))])
        have *= 2
    return rounds


def messages(
    collective: str, members: tuple[int, ...], elements: float, *, root: int = -1, reduce_scatter: str = "pairwise"
) -> Iterator[Message]:
    """Yield all messages of a collective as (sender, receiver, elements).

    Messages from one rank to the next in a ring are added up to one.

    Args:
        collective: ``all_gather``, ``reduce_scatter``, ``reduce``, ``all_reduce`` or ``broadcast``.
        members: ranks of the group.
        elements: elements of the whole: the result of an all-gather, or the input of a reduction on one rank.
        root: root of a broadcast or reduce.
        reduce_scatter: ``pairwise`` or ``ring``, see ``CostModel``.

    Sources: all-gather and all-reduce are rings in gloo and NCCL. Reduce is in gloo a ring reduce-scatter, whose pieces
    are then gathered on the root. Broadcast is a binomial tree.
    """
    size = len(members)
    piece = elements / size
    if collective == "broadcast":
        for pairs in tree(members, root):
            yield from ((a, b, elements) for a, b in pairs)
    elif collective == "reduce_scatter" and reduce_scatter == "pairwise":
        yield from ((a, b, piece) for a in members for b in members if a != b)
    elif collective in ("all_gather", "reduce_scatter", "reduce", "all_reduce"):
        passes = 2 if collective == "all_reduce" else 1
        yield from ((a, b, passes * (size - 1) * piece) for a, b in ring(members))
        if collective == "reduce":
            yield from ((a, root, piece) for a in members if a != root)
    else:
        raise ScheduleError(f"unknown cost of a {collective}")


class Transfers:
    """Factory of the loads of a schedule's transfers on the nodes of ``topology``; equal loads are created once."""

    def __init__(self, schedule: Schedule, cost_model: CostModel, topology: Topology) -> None:
        self.cost_model, self.topology, self.step = cost_model, topology, schedule.step
        self._model = schedule.model
        self._played = set(schedule.played)
        self._nodes_played = {topology.node_of(rank) for rank in self._played}
        self._folded = len(self._played) < topology.world_size
        """True if some ranks are simulated for all (``plan.predict``)."""
        self._alike = topology.local_size * len(self._nodes_played) // max(1, len(self._played)) if self._folded else 1
        """Ranks of a node that each simulated rank represents."""
        self._elements = {rank: schedule.buffer_elements(rank) for rank in schedule.played}
        self._collectives: dict[tuple, Load] = {}
        self._parts: dict[tuple, Load] = {}

    def elements(self, rank: int, buffer: Buffer) -> int:
        """Return the number of elements of a home buffer or pool buffer of ``rank``.

        Raises:
            ScheduleError: ``buffer`` belongs to no pool and no home of ``rank``.
        """
        if buffer not in self._elements[rank]:
            raise ScheduleError(f"{buffer} is in no pool and no home of rank {rank}")
        return self._elements[rank][buffer]

    def collective(self, action: Action, members: tuple[int, ...], payer: int) -> Load:
        """Return the load of a COLLECTIVE: all of its messages together.

        Args:
            action: the action of one member.
            members: ranks of its group.
            payer: rank whose ``action`` this is; for a broadcast the root.
        """
        buffer = action.reads[0]
        if buffer.is_activation:
            return self._keys(action, members)
        whole = self.elements(payer, buffer) * (len(members) if action.collective == "all_gather" else 1)
        stays = action.refreshes and not self._model.units[action.unit].trainable  # sent in step one only
        how = "nothing" if stays else action.compression
        key = (action.collective, action.group, members[0], action.root, whole, buffer.is_weight, how)
        if key not in self._collectives:
            costs, n = self.cost_model, len(members)
            width = self._width(action.compression, weights=buffer.is_weight) * (not stays)
            in_8_bits = action.compression not in ("", "exact")
            how = "pairwise" if in_8_bits else costs.reduce_scatter  # a ring would round at every hop
            moved = messages(action.collective, members, whole, root=action.root, reduce_scatter=how)
            delay, landing = self.latency(action.collective, members, action.root), 0.0
            if action.collective in ("all_gather", "reduce_scatter") and n > 1 and not action.compression:
                landing = max(self._latency(a, b) for a, b in ring(members))
                delay = max(0.0, delay - landing)
            if action.collective in ("reduce_scatter", "reduce", "all_reduce"):
                delay += costs.add_s * whole * (n - 1) / n
            load = self._load(moved, width, delay, landing)
            if action.compression == "exact" and not stays:
                load = self._coded(load, whole // n, n, weights=buffer.is_weight)
            self._collectives[key] = self._seen(load, action.group) if self._folded else load
        return self._collectives[key]

    def _keys(self, action: Action, members: tuple[int, ...]) -> Load:
        """Return the load of a collective of keys and values, or of their gradients; cached."""
        gathers = action.collective == "all_gather"
        amount = self.cost_model.keys_bytes(action.micro_batch, gradients=not gathers)
        key = ("keys", action.collective, members[0], amount)
        if key not in self._collectives:
            moved = messages(action.collective, members, amount, reduce_scatter=self.cost_model.reduce_scatter)
            load = self._load(moved, 1, self.latency(action.collective, members, -1))
            self._collectives[key] = self._seen(load, action.group) if self._folded else load
        return self._collectives[key]

    def _seen(self, load: Load, group: str) -> Load:
        """Return the part of a load on the simulated nodes, scaled to all ranks that they represent.

        Ports of nodes carry the transfers of all groups that run at the same time; ports of ranks carry their own only.
        """
        times = self._alike
        if group not in ("rail", PAIR):
            node = set(self.topology.group("node", 0))
            times = self.topology.local_size // len(node.intersection(self.topology.group(group, 0)))
        ports = tuple(
            (port, amount * times if self._by_node(port) else amount)
            for port, amount in load.ports
            if port[1] in (self._nodes_played if self._by_node(port) else self._played)
        )
        sent, received, inside = (
            tuple((node, amount * times) for node, amount in part if node in self._nodes_played)
            for part in (load.sent, load.received, load.inside)
        )
        return Load(ports, load.delay_s, sent, received, inside, load.least_s, load.landing_s)

    def _by_node(self, port: Port) -> bool:
        """Return True if the port belongs to a node, False if it belongs to a rank."""
        return (self.cost_model.between if port[0] == "between" else self.cost_model.inside).shared

    def hosted(self, rank: int, action: Action, least_s: float) -> Load | None:
        """Return the load of an action on the link between a rank's device and its host; None for other actions.

        Only schedules with homes in host memory have such loads, because lanes then share the link.

        Args:
            rank: the rank.
            action: the action.
            least_s: seconds of the action's computation, which runs during the transfer.
        """
        costs, homes = self.cost_model, any(buffer.is_home for buffer in (*action.reads, *action.writes))
        if not self.step.homes_in_host or action.group:
            return None
        if action.op in (Op.OFFLOAD, Op.RELOAD):
            link, amount = costs.host, costs.waiting(action)
            up, down = (amount, 0.0) if action.op is Op.RELOAD else (0.0, amount)
        elif action.op is Op.UPDATE:
            lands = not any(buffer.kind is Kind.LANDING for buffer in action.reads)
            elements, copies = self.elements(rank, action.writes[0]), self.step.copies_in_host
            up, down = costs.streamed_update_bytes(elements, action.unit, lands=lands, copies=copies)
            link = costs.homes
        elif homes and action.op in (Op.ADD, Op.RAISE):
            link, width = costs.homes, costs.weight_bytes if action.op is Op.RAISE else costs.master_bytes
            elements = self.elements(rank, action.writes[0])
            up, down = (
                elements * width * any(buffer.is_home for buffer in side) for side in (action.reads, action.writes)
            )
        else:
            return None
        host = ("host" if link == costs.homes else "rows", rank)
        both = (((*host, "up"), up), ((*host, "down"), down)) if link.full_duplex else (((*host, "both"), up + down),)
        limited = tuple((port, amount) for port, amount in both if amount and link.bytes_per_s < float("inf"))
        return Load(limited, link.latency_s if up or down else 0.0, least_s=least_s)

    def norm(self, action: Action, members: tuple[int, ...], rank: int) -> Load:
        """Return the load of SIZE, COUNT or NORM, in which all members exchange a few numbers; cached.

        It has no bytes: only the latency of these messages, and for SIZE the time to count changed weights."""
        key = (action.op, members[0])
        if key not in self._collectives:
            homes = action.reads[::2] if action.op is Op.SIZE else ()
            counted = sum(self.elements(rank, home) for home in homes if self._model.units[home.at[0]].trainable)
            # All members arrive together: one latency announces that a message is expected, one delivers it.
            furthest = max((self._latency(a, b) for a, b in ring(members)), default=0.0)
            self._collectives[key] = Load((), 2 * furthest + counted * self.cost_model.coding.count)
        return self._collectives[key]

    def _coded(self, load: Load, shard_size: int, members: int, *, weights: bool) -> Load:
        """Return ``load`` with the time for lossless coding added.

        Changes of weights are coded before they are sent and decoded after they arrive. Gradients are coded part by
        part while other parts are sent.

        Args:
            load: load without coding.
            shard_size: elements of one shard.
            members: number of members.
            weights: True for weights, False for gradients.
        """
        if weights:
            write, read = self.cost_model.coding.change
            return replace(load, delay_s=load.delay_s + shard_size * (write + (members - 1) * read))
        each = sum(self.cost_model.coding.gradient)
        first = min(shard_size, CODED_PART) * each
        return replace(load, delay_s=load.delay_s + first, least_s=(members - 1) * shard_size * each)

    def _width(self, compression: str, *, weights: bool) -> float:
        """Return the bytes of an element that travels."""
        costs = self.cost_model
        if weights:
            return compressed_width(compression, costs.weight_bytes, costs.change_bytes)
        exact = sum_width(costs.gradient_bytes, costs.summands or self.step.summands)
        return compressed_width(compression, costs.gradient_bytes, exact)

    def part(self, sender: int, receiver: int, transfer: Transfer, compression: str = "") -> Load:
        """Return the load of one transfer of an EXCHANGE from ``sender`` to ``receiver``; cached."""
        if transfer.buffer.is_activation:
            each = self.cost_model.drawn if transfer.buffer.kind is Kind.IDS else self.cost_model.boundary
            amount = each(transfer.buffer.at[0])
            key = (sender, receiver, amount)
            if key not in self._parts:
                load = self._load(iter([(sender, receiver, amount)]), 1, 0.0, self._latency(sender, receiver))
                self._parts[key] = self._seen(load, PAIR) if self._folded else load
            return self._parts[key]
        weights = transfer.buffer.is_weight
        key = (sender, receiver, transfer.unit, weights, compression)
        if key not in self._parts:
            width = self._width(compression, weights=weights)
            elements = self.elements(sender if transfer.send else receiver, transfer.buffer)
            load = self._load(iter([(sender, receiver, elements)]), width, 0.0, self._latency(sender, receiver))
            self._parts[key] = self._seen(load, PAIR) if self._folded else load
        return self._parts[key]

    def capacity(self, port: Port) -> float:
        """Return the bytes per second of a port."""
        kind, owner, _ = port
        if kind in ("host", "rows"):
            return (self.cost_model.homes if kind == "host" else self.cost_model.host).bytes_per_s
        if kind == "inside":
            return self.cost_model.inside.bytes_per_s
        node = owner if self.cost_model.between.shared else self.topology.node_of(owner)
        return self.cost_model.node_link(node).bytes_per_s

    def latency(self, collective: str, members: tuple[int, ...], root: int) -> float:
        """Return the seconds of latency of a collective: the sum along its longest chain of messages.

        Each message of a chain starts when the one before it has arrived. The time of the bytes is not included."""
        if len(members) == 1:
            return 0.0
        hops = [self._latency(a, b) for a, b in ring(members)]
        around = sum(hops) - min(hops)
        if collective == "broadcast":
            return sum(max(self._latency(a, b) for a, b in pairs) for pairs in tree(members, root))
        if collective == "reduce_scatter" and self.cost_model.reduce_scatter == "pairwise":
            n = len(members)
            return sum(max(self._latency(members[i], members[(i + d) % n]) for i in range(n)) for d in range(1, n))
        if collective == "all_reduce":
            return 2 * around
        if collective == "reduce":
            return around + max(self._latency(a, root) for a in members if a != root)
        return around

    def _latency(self, sender: int, receiver: int) -> float:
        """Return the latency in seconds of one message; between nodes the larger one of their links."""
        here, target = self.topology.node_of(sender), self.topology.node_of(receiver)
        if here == target:
            return self.cost_model.inside.latency_s
        return max(self.cost_model.node_link(here).latency_s, self.cost_model.node_link(target).latency_s)

    def _load(self, moved: Iterator[Message], width: float, delay: float, landing: float = 0.0) -> Load:
        """Add up messages, and return the bytes of each port and node as a ``Load``.

        Args:
            moved: messages as (sender, receiver, elements).
            width: bytes of an element.
            delay: seconds before the first byte, in which no port is busy.
            landing: seconds from the last byte until it has arrived, for which neither sender nor lane waits.
        """
        ports: dict[Port, float] = {}
        sent: dict[int, float] = {}
        received: dict[int, float] = {}
        inside: dict[int, float] = {}
        for sender, receiver, elements in moved:
            amount = elements * width
            here, target = self.topology.node_of(sender), self.topology.node_of(receiver)
            if here == target:
                inside[here] = inside.get(here, 0.0) + amount
            else:
                sent[here] = sent.get(here, 0.0) + amount
                received[target] = received.get(target, 0.0) + amount
            for port in self._path(sender, receiver):
                ports[port] = ports.get(port, 0.0) + amount
        limited = tuple((port, n) for port, n in ports.items() if n > 0 and self.capacity(port) < float("inf"))
        counted = tuple(sent.items()), tuple(received.items()), tuple(inside.items())
        return Load(limited, delay, *counted, landing_s=landing)

    def _path(self, sender: int, receiver: int) -> tuple[Port, ...]:
        """Return the ports that a message passes."""
        here, target = self.topology.node_of(sender), self.topology.node_of(receiver)
        if here == target:
            link = self.cost_model.inside
            if link.shared:
                return (("inside", here, "both"),)
            return _end("inside", link, sender, "out"), _end("inside", link, receiver, "in")
        links = self.cost_model.node_link(here), self.cost_model.node_link(target)
        shared = self.cost_model.between.shared
        return (
            _end("between", links[0], here if shared else sender, "out"),
            _end("between", links[1], target if shared else receiver, "in"),
        )


def _end(kind: str, link: LinkModel, owner: int, direction: str) -> Port:
    """Return the port of ``owner``; without full duplex both directions are one port."""
    return kind, owner, direction if link.full_duplex else "both"
