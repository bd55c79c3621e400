"""What a strategy is given, what it is, and what it makes: ``StepSpec``, ``Strategy``, ``Schedule``; and what it offers
a plan: ``Trial``.

    step = step_of(model, topology, settings, micro_batches)    # strategies/build.py: checked, homes placed
    schedule = step.strategy.build(step)                        # for all ranks, as data

A schedule is a value: runtime, clock and pictures play it, the proof judges it. Whatever one strategy does unlike
another stands in its class; nobody else asks for its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

from tawpipe.dealing.balance import Bins, LayerTime, deal
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Buffer, Kind, Pool, home_gradient, home_weight
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.placement import Home
from tawpipe.schedule.settings import RECOMPUTE, ScheduleSettings, parse_homes, recompute_of_blocks
from tawpipe.schedule.sharing import share_in_sets, speeds_of
from tawpipe.schedule.spec import ModelSpec
from tawpipe.topology import Topology

NEUTRAL: dict[str, Any] = {
    "step_cache": 0,
    "gradients_scope": "visit",
    "sequence_chunk": 0,
    "sequence_ranks": 1,
    "keep_mib": 0,
    "host_homes": "none",
}
"""What the settings that may be left open are for strategies that have no word on them."""
SPECIAL = ("stages", "block_times", "groups", "pipeline_order")
"""Settings that some strategies alone have a use for, see ``Strategy.uses``."""


@dataclass(frozen=True)
class StepSpec:
    """One step to be scheduled.

    Args:
        topology: what the strategy takes for nodes.
        settings: with no choice left open, see ``Strategy.settle``.
        micro_batches: for every rank the global indices of its micro-batches; those that a set or a pipeline computes
            are in the lists of all its ranks.
        losses: for every rank those whose loss it computes, None where that is all of them.
        shared: micro-batches below this number are computed by sets, the others by single ranks; None for all by sets.
        slices: micro-batches that are slices of one document, in its order, of every document that is cut: consecutive
            numbers, the first ones of a pipeline.
        orders: see ``Bins.orders``.
    """

    strategy: Strategy
    model: ModelSpec
    topology: Topology
    settings: ScheduleSettings
    micro_batches: tuple[tuple[int, ...], ...]
    shared: int | None = None
    losses: tuple[tuple[int, ...], ...] | None = None
    slices: tuple[tuple[int, ...], ...] = ()
    orders: tuple[str, ...] = field(default=(), repr=False)

    @cached_property
    def homes(self) -> tuple[Home, ...]:
        """The home of every unit."""
        return self.strategy.place(self.model, self.topology, parse_homes(self.settings.homes))

    @cached_property
    def _recompute(self) -> tuple[str, ...]:
        return recompute_of_blocks(self.settings.recompute, self.model)

    def recomputes(self, block: int, micro_batch: int = -1) -> str:
        """What the backward pass of a block computes again: ``full``, ``selective`` or ``none``; of slices all."""
        return "full" if micro_batch in self.neighbours else self._recompute[block]

    @property
    def divided_over(self) -> int:
        """Ranks that divide the blocks of a micro-batch among them; 1 where each computes all blocks."""
        return self.strategy.divided_over(self.topology)

    @property
    def keeps_alike(self) -> bool:
        """True if as much is kept of every full micro-batch, in the same places."""
        return not (self.strategy.orders_host or self.settings.keep_mib or self.sequence_ranks > 1)

    @property
    def kept(self) -> frozenset[Kind]:
        """The kinds of activation that layers keep besides their inputs."""
        saved = {kind for block in range(1, self.model.num_layers + 1) if (kind := self.saves(block)) is not None}
        return frozenset(saved | {Kind.LINEAR} if self.strategy.splits else saved)

    def saves(self, block: int, micro_batch: int = -1) -> Kind | None:
        """The kind of activation that a block keeps for its backward pass besides its input."""
        return RECOMPUTE[self.recomputes(block, micro_batch)]

    def keeps(self, block: int, micro_batch: int = -1) -> Kind:
        """The kind of activation that the backward pass of a block on whole rows starts from."""
        return self.saves(block, micro_batch) or Kind.INPUT

    @cached_property
    def neighbours(self) -> Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of every slice of a document the slices before it, and those behind it."""
        return {m: (group[:place], group[place + 1 :]) for group in self.slices for place, m in enumerate(group)}

    def cut_in(self, share: Sequence[int]) -> tuple[int, ...]:
        """Of every document that is cut and whose slices are among some micro-batches, how many these are."""
        return tuple(len(document) for document in self.slices if document[0] in share)

    def with_shares(self, shares: tuple[tuple[int, ...], ...]) -> StepSpec:
        """The same with more or fewer micro-batches for every rank, which begin with the same slices."""
        begins = {new[0]: old for old, new in zip(self.micro_batches, shares, strict=True) if new}
        slices = tuple(
            tuple(first + m - old[0] for m in document)
            for first, old in begins.items()
            for document in self.slices
            if document[0] in old
        )
        return replace(self, micro_batches=shares, slices=slices, orders=())

    def losses_of(self, rank: int) -> tuple[int, ...]:
        """The micro-batches whose loss a rank computes."""
        return (self.losses or self.micro_batches)[rank]

    def ranks_of(self, micro_batch: int) -> int:
        """How many ranks compute a micro-batch together."""
        return self.sequence_ranks if self.shared is None or micro_batch < self.shared else 1

    def offloads(self, block: int) -> bool:
        """True if what a block keeps waits in the host's memory. Layers are the blocks from 1 on."""
        return 1 <= block <= self.settings.offloaded_layers

    def moves(self, block: int) -> bool:
        """True if OFFLOAD and RELOAD move what a block keeps."""
        return self.offloads(block) and not self.settings.sequence_chunk

    def streams(self, block: int) -> bool:
        """True if the input of a block comes and goes by chunk, within the actions that compute."""
        return bool(self.settings.sequence_chunk) and self.offloads(block) and block >= self.model.first_backward

    @property
    def refreshes(self) -> bool:
        """True if a node keeps what it has gathered from step to step, and owners send how it has changed. On one node
        nothing does: a run that goes on without the other machines need not be told.
        """
        return self.settings.weights_compression == "exact" and self.topology.num_nodes > 1

    @property
    def codes_sums(self) -> bool:
        """True if gradients travel between nodes coded without loss."""
        return self.settings.gradients_compression == "exact" and self.topology.num_nodes > 1

    @property
    def summands(self) -> int:
        """How many gradients of single micro-batches the last message of a sum between nodes is the sum of."""
        most = max(map(len, self.micro_batches))
        if self.settings.gradients_scope != "step":
            most = min(most, self.settings.micro_batches_per_visit)
        return max(1, most * self.topology.local_size * (self.topology.num_nodes - 1))

    @property
    def homes_in_host(self) -> bool:
        """True if masters, gradients and the optimizer's state live in the host's memory."""
        return self.settings.host_homes not in (None, "none")

    @property
    def copies_in_host(self) -> bool:
        """True if what travels from homes lives there as well."""
        return self.settings.host_homes == "all"

    @property
    def passes_gradients(self) -> bool:
        """True if a gradient that is made in one go need not go home: one process updates it from where it was made."""
        return self.homes_in_host and self.settings.early_updates and self.topology.world_size == 1

    @cached_property
    def step_cache(self) -> int:
        """Units whose copies are kept beyond what look-ahead needs."""
        cached = self.settings.step_cache
        return len(self.model.units) if cached == "all" else cached or 0

    @property
    def sequence_ranks(self) -> int:
        """Ranks that compute a micro-batch together."""
        return self.settings.sequence_ranks or 1

    @cached_property
    def rounds(self) -> int:
        """Passes through the model, each with up to ``micro_batches_per_visit`` micro-batches a rank."""
        most = max(len(share) for share in self.micro_batches)
        return max(1, -(-most // self.settings.micro_batches_per_visit))

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Of all ranks, that of the fastest being 1; empty where they are alike."""
        return speeds_of(self.settings, self.topology)

    def in_round(self, rank: int, number: int) -> tuple[int, ...]:
        """The micro-batches of ``rank`` in one round; may be empty. A slower device has fewer in every round, not as
        many in fewer rounds: the others would wait for it in these.
        """
        mine = self.micro_batches[rank]
        if self.speeds and self.shared is None:
            first, end = (-(-len(mine) * past // self.rounds) for past in (number, number + 1))
            return mine[first:end]
        k = self.settings.micro_batches_per_visit
        return mine[number * k : (number + 1) * k]


@dataclass(frozen=True)
class Planner:
    """What a plan tells a strategy that offers it something.

    Args:
        settings: what the plan takes as given.
        memory_bytes: that a device may use; 0 for no limit.
        boundary_bytes: of what passes from one layer to the next, of a full micro-batch.
        chunks: sizes of chunks in which rows may run, ascending.
        micro_batches_of: counts the micro-batches of a step under a strategy.
        keeps_attention: says whether the result of attention can be kept in a step.
        least_s: says how many seconds a step of a strategy needs at least; infinite where it cannot be had.
        costs_of: makes what a pipeline over some positions is made for (``pipelines.work.PipelineCosts``).
        lacking_bytes: says what a device lacks under a strategy with some settings; 0 or less if it has enough.
    """

    model: ModelSpec
    topology: Topology
    settings: ScheduleSettings
    memory_bytes: int
    boundary_bytes: float
    chunks: tuple[int, ...]
    micro_batches_of: Callable[[Strategy], int]
    keeps_attention: Callable[[StepSpec], bool]
    least_s: Callable[[Strategy], float]
    costs_of: Callable[..., Any]
    lacking_bytes: Callable[..., int]


@dataclass(frozen=True)
class Trial:
    """One way to lay a strategy out that a plan may look at, without what is made for costs.

    Args:
        least_s: seconds that a step needs at least, as far as that is known before anything is made.
        spare: only looked at while nothing else fits.
        must_gain: only looked at if its bound is ahead of the best step.
        may_overtake: it may be among the best even if others of its kind are far behind.
    """

    strategy: Strategy
    least_s: float = 0.0
    spare: bool = False
    must_gain: bool = False
    may_overtake: bool = False


class Strategy(ABC):
    """A way to move weights and gradients: where units live, and the actions that a step needs.

    A strategy is stateless; two of one name are the same. ``WeightStrategy`` (weight_strategy.py) has all but the homes
    and the route of strategies whose blocks every rank visits in the same order.
    """

    name: str
    summary: str
    """A sentence for ``--help`` and the docs."""
    layout: str = ""
    """One of several ways to lay it out, in words, see ``layouts``."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Settings that it is made for, where the user has left them open (None)."""
    refusals: ClassVar[Mapping[str, str]] = {}
    """Settings that it has no use for, with the reason; ``check`` refuses any value but the neutral one."""
    one_order: ClassVar[bool] = False
    """True if all ranks go through transfers in one order, so that a thread which blocks in one waits for nobody who
    waits for it; the programs of others are sorted before they run (``transform.for_one_thread``).
    """
    sums_on_rings: ClassVar[bool] = False
    """True if between nodes gradients add up round rings and nowhere else, message by message."""
    candidate: ClassVar[bool] = True
    """False to keep it out of plans."""
    usual: ClassVar[bool] = True
    """False to keep it out of a plan's table unless it is among the best, or the user wants to see all."""
    axis: str = ""
    """Over what the blocks of a micro-batch are divided, see ``divided_over``; empty where a rank computes them all."""
    host_levels: ClassVar[tuple[str, ...]] = ("none", "state", "all")
    """Values of ``ScheduleSettings.host_homes`` that it can have."""
    cuts_documents: ClassVar[bool] = False
    """True if documents that no bin holds may be cut into slices, see ``dealing``."""
    rounds_held: ClassVar[int] = 2
    """Full rounds that hold as much as any number of them."""
    uses: ClassVar[tuple[str, ...]] = ()
    """Settings of ``SPECIAL`` that mean something under it."""
    splits: ClassVar[bool] = False
    """True if backward passes of layers may be in two parts."""
    orders_host: ClassVar[bool] = False
    """True if its order says which inputs wait in the host's memory, and where, and not ``offloaded_layers``."""

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @abstractmethod
    def place(self, model: ModelSpec, topology: Topology, homes: tuple[int, ...] = ()) -> tuple[Home, ...]:
        """The home of every unit. Depends on nothing else: all schedules of a strategy share one storage.

        Args:
            homes: where the user wants them; empty for the usual places.

        Raises:
            UserError: this model cannot live on these nodes so.
        """

    @abstractmethod
    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        """The schedule of a step.

        Args:
            training: False for one forward pass with its loss.
            ranks: those whose programs are made, all by default; the others' stay empty, for the clock.

        Raises:
            UserError: a setting cannot work.
        """

    def configured(self, settings: ScheduleSettings) -> Strategy:
        """The strategy as settings lay it out; itself if they have no say in that."""
        return self

    def share(self, count: int, topology: Topology, settings: ScheduleSettings) -> tuple[tuple[int, ...], ...]:
        """Micro-batches 0..count-1 for every rank.

        Raises:
            UserError: settings that these nodes cannot have.
        """
        return share_in_sets(count, topology, settings)

    def dealt_to(self, topology: Topology) -> Sequence[int]:
        """For every rank the number of whom its bins are dealt to: itself, or the pipeline that it is in."""
        return range(topology.world_size)

    def dealing(
        self, step: StepSpec, *, cap: int, work: LayerTime, cuts: float | None = None
    ) -> Callable[[Sequence[int]], Bins]:
        """What deals documents of so many tokens, see ``balance.deal``; it may go to another process.

        Args:
            step: any of the strategy.
            cuts: so many times as long as the mean bin does a document take that is cut though a bin holds it, where
                that is of use; None where the model needs documents whole.
        """
        world, ranks, speeds = step.topology.world_size, step.sequence_ranks, step.speeds
        return partial(deal, world_size=world, cap=cap, work=work, ranks=ranks, speeds=speeds)

    def divided_over(self, topology: Topology) -> int:
        """Ranks that divide the blocks of a micro-batch among them; 1 where each computes all blocks."""
        return 1

    def computes(self, step: StepSpec) -> Sequence[Sequence[int]]:
        """For every rank the blocks that it computes."""
        return [range(len(step.model.blocks))] * step.topology.world_size

    def share_of_a_row(self, step: StepSpec, rank: int) -> float:
        """A rank's part of the time for a row that it computes, relative to the others' of its step."""
        return 1 / step.speeds[rank] if step.speeds else 1.0

    def build_in_order(self, step: StepSpec, order: Any) -> Schedule:
        """A training step in a given order of works.

        Raises:
            UserError: the strategy has none.
        """
        raise UserError("schedule.strategy", self.name, "one whose activations travel, to have an order")

    def in_words(self, step: StepSpec) -> str:
        """How the micro-batches of a step go."""
        passes = f"{step.rounds} pass{'es' * (step.rounds != 1)} over the layers"
        together = step.settings.micro_batches_per_visit
        return f"in {passes}" + (f", {together} on a process in each" if together > 1 else "")

    def view(self, topology: Topology) -> Topology:
        """What the strategy takes for nodes; the real ones, unless it ignores them on purpose."""
        return topology

    def places(self, topology: Topology) -> int:
        """How many places a unit can be put in one by one, numbered from 0; 0 if all units lie alike."""
        return 0

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        """Ranks that stand for all of equally large nodes: the others do what these do, at the same time, but for the
        names of their peers. Empty if there are no such ranks.

        Args:
            inside_is_even: the links inside a node do not care which of its ranks sends.
        """
        return ()

    def fullest(self, step: StepSpec) -> tuple[int, ...] | None:
        """Ranks among which is one that holds as much as any other; None if all have to be looked at."""
        return None

    def traffic(self, step: StepSpec, *, training: bool) -> tuple[LinkTraffic, ...] | None:
        """What every node's link carries in a step, from sizes alone: the formula that the proof compares with the
        actions. None if there is no formula.
        """
        return None

    def layouts(self, topology: Topology) -> Sequence[Strategy]:
        """The ways to lay the strategy out on some nodes, of which a plan takes the best."""
        return (self,)

    def trials(self, planner: Planner, like: Strategy | None) -> Sequence[Trial]:
        """The ways to lay the strategy out that a plan tries.

        Args:
            like: the best pipeline so far, if one fits.
        """
        ways = self.layouts(planner.topology)
        return [Trial(way, must_gain=len(ways) > 1) for way in ways]

    def effort(self, model: ModelSpec, topology: Topology, count: int) -> int:
        """Micro-batches, times blocks, of the orders that are made for it and played, about; 0 where none is made.

        Args:
            count: micro-batches of a step.
        """
        return 0

    def made_for(self, planner: Planner, *, hopeful: bool, stop: Callable[[], None] = lambda: None) -> Strategy:
        """The strategy with what is made for the costs at hand.

        Args:
            hopeful: it may be among the best, so that a search for stages is no lost time.
            stop: raises an error if nothing is to be made once more, with less memory.

        Raises:
            UserError: memory for no order.
        """
        return self

    def instead(self, planner: Planner) -> Iterator[Strategy]:
        """Strategies to look at where what was made turns out to be behind."""
        return iter(())

    def visits(self, count: int, topology: Topology, settings: ScheduleSettings) -> Sequence[int]:
        """Micro-batches per visit that a plan tries: 1, 2, 4, ... up to all of the device that has most."""
        most = max(1, *map(len, share_in_sets(count, topology, settings)))
        return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]

    def changes(
        self, planner: Planner, step: StepSpec, worth: Callable[[str], bool], *, budget: int
    ) -> Iterator[dict[str, Any]]:
        """Settings worth a try next to those of a step, which is of this strategy; it refuses those that are not for
        it.

        Args:
            worth: says whether recomputing so could gain anything.
            budget: for a search for stages.
        """
        settings, units, layers = step.settings, len(step.model.units), step.model.num_layers
        for name in ("look_ahead", "gradient_buffers"):
            yield {name: getattr(settings, name) + 1}
        if planner.topology.num_nodes > 1:
            yield from ({"step_cache": more} for more in (units // 4, units // 2, units) if more > step.step_cache)
        if settings.gradients_scope == "visit" and step.rounds > 1:
            yield {"gradients_scope": "step"}
        offloaded = settings.offloaded_layers
        for fewer in (0, offloaded // 2, offloaded * 3 // 4):
            if fewer < offloaded:
                yield {"offloaded_layers": fewer}
        if settings.sequence_chunk:
            yield from ({"sequence_chunk": size} for size in planner.chunks if size != settings.sequence_chunk)
        if offloaded and not settings.sequence_chunk:  # what layers keep waits there in the place of their inputs
            yield from ({"recompute": recompute} for recompute in ("selective", "none"))
        if planner.keeps_attention(step):
            yield {"recompute": "selective"} | ({} if settings.sequence_chunk else {"offloaded_layers": 0})
        for share in (4, 2, 1) if layers else ():
            last = max(1, layers // share)
            yield {"recompute": f"none:{last},full", "offloaded_layers": min(offloaded, layers - last)}

    def remark(self, step: StepSpec) -> str:
        """A remark on a step for the table of a plan; mostly empty."""
        return ""

    def missing(self) -> str:
        """What is not installed that would make its steps shorter; mostly empty."""
        return ""

    def why_not_exact(self, step: StepSpec) -> str:
        """Why no copy of weights could stay from step to step and be changed there; empty where one can."""
        return "it keeps no copy of weights that the owners could change"

    def extended(self, step: StepSpec, rounds: int) -> tuple[StepSpec, StepSpec, float]:
        """A step with few rounds, one with one more, and how often what that one takes comes on top of the first, to
        the real number of rounds; 0 for short steps. So a step of many rounds need not be played as a whole.
        """
        return step, step, 0.0

    def settle(self, settings: ScheduleSettings) -> ScheduleSettings:
        """Settings in which the choices that were left open are the strategy's own."""
        defaults = {**NEUTRAL, **self.defaults}
        return replace(settings, **{name: value for name, value in defaults.items() if getattr(settings, name) is None})

    def check(self, step: StepSpec) -> None:
        """Look for settings that cannot work.

        Raises:
            UserError: which, and why.
        """
        usual, setting = ScheduleSettings(**NEUTRAL), "schedule.weights_compression"
        if step.codes_sums and not self.sums_on_rings:
            reason = "its gradients do not add up round one ring between nodes, as under tawpipe-spread and -step"
            raise UserError("schedule.gradients_compression", "exact", f"none under {self.name}: {reason}")
        if step.refreshes:
            reason = self.why_not_exact(step) or ("" if step.settings.reuse else "without reuse nothing is kept")
            if not reason and step.copies_in_host:
                reason = "with host_homes all what travels is not on the device, which finds what has changed"
            if reason:
                raise UserError(setting, "exact", f"none under {self.name}: {reason}")
        for name, reason in self.refusals.items():
            value, neutral = getattr(step.settings, name), getattr(usual, name)
            if value not in (neutral, "exact"):  # of which was said above where it can be
                expected = "nothing" if neutral == "" else neutral
                raise UserError(f"schedule.{name}", value, f"{expected} under {self.name}: {reason}", need=reason)
        if step.copies_in_host and "all" not in self.host_levels:
            reason = "its devices compute with weights that stay there"
            raise UserError("schedule.host_homes", "all", f"state or none under {self.name}: {reason}", need=reason)


@dataclass(frozen=True)
class Schedule:
    """One step of every rank.

    Args:
        name: of the strategy, or ``evaluation``.
        programs: for every rank its actions in the order in which they are issued. The order within a lane is the same.
            Empty for ranks that another one stands for, see ``plan.predict``.
        pools: for every rank the buffers that its program uses, homes and activations aside.
        training: False for a forward-only schedule.
        looped: played again and again without an end: what it begins with, it leaves behind, see laps.py.
        placed: for every rank the units that are whole there afterwards, see placing.py; empty for other schedules.
    """

    name: str
    step: StepSpec
    programs: tuple[tuple[Action, ...], ...]
    pools: tuple[tuple[Pool, ...], ...]
    training: bool = True
    looped: bool = False
    placed: tuple[tuple[int, ...], ...] = ()

    def __repr__(self) -> str:
        actions = sum(map(len, self.programs))
        return f"Schedule({self.name}: {len(self.micro_batches)} micro-batches, {actions:,} actions; {self.topology})"

    @property
    def topology(self) -> Topology:
        return self.step.topology

    @property
    def model(self) -> ModelSpec:
        return self.step.model

    @property
    def homes(self) -> tuple[Home, ...]:
        return self.step.homes

    @cached_property
    def played(self) -> tuple[int, ...]:
        """The ranks that have a program."""
        return tuple(rank for rank, program in enumerate(self.programs) if program)

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        """The indices of all micro-batches, ascending."""
        return tuple(sorted({m for share in self.step.micro_batches for m in share}))

    def text(self, rank: int) -> str:
        """The program of one rank, one action a line."""
        return "\n".join(map(str, self.programs[rank]))

    def pool_elements(self, rank: int, kind: Kind) -> int:
        """Elements of all buffers of one kind on a rank."""
        return sum(pool.count * pool.elements for pool in self.pools[rank] if pool.kind is kind)

    def home_elements(self, rank: int, *, trainable: bool, packed: bool = True) -> int:
        """Elements of the stripes that live on ``rank``, of trainable or of frozen units.

        Args:
            packed: packed units count, too.
        """
        units = zip(self.homes, self.model.units, strict=True)
        wanted = (home for home, unit in units if unit.trainable == trainable and (packed or not unit.packed))
        return sum(home.stripe for home in wanted if home.index(rank) is not None)

    def buffer_elements(self, rank: int) -> dict[Buffer, int]:
        """Elements of every pool buffer and home of one rank."""
        sizes = {buffer: pool.elements for pool in self.pools[rank] for buffer in pool.buffers}
        for unit, home in enumerate(self.homes):
            if home.index(rank) is not None:
                sizes[home_weight(unit)] = sizes[home_gradient(unit)] = home.stripe
        return sizes
