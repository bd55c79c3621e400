"""Interfaces of a schedule: ``StepSpec``, ``Strategy``, ``Schedule``, and the ``Trial`` that a strategy offers a plan.

    step = step_of(model, topology, settings, micro_batches)    # strategies/build.py: checked, homes placed
    schedule = step.strategy.build(step)                        # for all ranks, as data

A schedule is plain data. The runtime runs it, the clock simulates it, pictures draw it, and the proof checks it. All
differences between strategies are in their classes: no other code asks for a strategy's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

from tawpipe.dealing.balance import LayerTime, Packs, deal
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Buffer, Kind, Pool, home_gradient, home_weight
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.placement import Home
from tawpipe.schedule.settings import RECOMPUTE, ScheduleSettings, parse_homes, recompute_of_blocks
from tawpipe.schedule.sharing import share_in_cp_groups, speeds_of
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
"""Values of settings left open (None), for strategies that define no default of their own."""
SPECIAL = ("stages", "block_times", "groups", "pipeline_order")
"""Settings that only some strategies use, see ``Strategy.uses``."""


@dataclass(frozen=True)
class StepSpec:
    """One step to be scheduled.

    Args:
        strategy: the strategy that builds the schedule.
        model: sizes of the model.
        topology: the nodes as the strategy sees them, see ``Strategy.view``.
        settings: settings in which no choice is left open, see ``Strategy.settle``.
        micro_batches: for every rank the global indices of its micro-batches. A micro-batch of a context-parallel group
            or a pipeline is in the lists of all its ranks.
        shared: micro-batches below this number are computed by context-parallel groups, the others by single ranks.
            None if context-parallel groups compute all.
        losses: for every rank the micro-batches whose loss it computes. None if these are all its micro-batches.
        slices: for every document that is cut, the micro-batches that are its slices, in order. They have consecutive
            numbers, and are the first micro-batches of a pipeline.
        orders: order of every pipeline as text, see ``Packs.orders``.
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
        """Home of every unit."""
        return self.strategy.place(self.model, self.topology, parse_homes(self.settings.homes))

    @cached_property
    def _recompute(self) -> tuple[str, ...]:
        return recompute_of_blocks(self.settings.recompute, self.model)

    def recomputes(self, block: int, micro_batch: int = -1) -> str:
        """Return how much the backward pass of ``block`` recomputes: one of ``RECOMPUTE``.

        Always ``full`` for a micro-batch that is a slice of a document.
        """
        return "full" if micro_batch in self.neighbours else self._recompute[block]

    @property
    def divided_over(self) -> int:
        """Number of ranks among which the blocks of a micro-batch are divided; 1 if each rank computes all blocks."""
        return self.strategy.divided_over(self.topology)

    @property
    def keeps_alike(self) -> bool:
        """True if every full micro-batch keeps equal activations at equal places, so that one can represent all.

        False with pipelines, with ``keep_mib`` and with context-parallel groups."""
        return not (self.strategy.orders_host or self.settings.keep_mib or self.sequence_ranks > 1)

    @property
    def kept(self) -> frozenset[Kind]:
        """Kinds of activations that layers keep for their backward passes, in addition to their inputs."""
        saved = {kind for block in range(1, self.model.num_layers + 1) if (kind := self.saves(block)) is not None}
        return frozenset(saved | {Kind.LINEAR} if self.strategy.splits else saved)

    def saves(self, block: int, micro_batch: int = -1) -> Kind | None:
        """Return the kind of activation that ``block`` keeps for its backward pass; None if it keeps only its input."""
        return RECOMPUTE[self.recomputes(block, micro_batch)]

    def keeps(self, block: int, micro_batch: int = -1) -> Kind:
        """Return the kind of activation from which the backward pass of ``block`` starts on whole rows."""
        return self.saves(block, micro_batch) or Kind.INPUT

    @cached_property
    def neighbours(self) -> Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Micro-batch -> (slices before it, slices after it) of its document. Contains only document slices."""
        return {m: (group[:place], group[place + 1 :]) for group in self.slices for place, m in enumerate(group)}

    def cut_in(self, share: Sequence[int]) -> tuple[int, ...]:
        """Return the number of slices of every cut document whose first slice is in ``share``."""
        return tuple(len(document) for document in self.slices if document[0] in share)

    def with_shares(self, shares: tuple[tuple[int, ...], ...]) -> StepSpec:
        """Return a copy in which every rank has the micro-batches in ``shares``, for steps of other lengths.

        Slices are renumbered so that each rank's list begins with the slices that it had before. Orders are dropped."""
        begins = {new[0]: old for old, new in zip(self.micro_batches, shares, strict=True) if new}
        slices = tuple(
            tuple(first + m - old[0] for m in document)
            for first, old in begins.items()
            for document in self.slices
            if document[0] in old
        )
        return replace(self, micro_batches=shares, slices=slices, orders=())

    def losses_of(self, rank: int) -> tuple[int, ...]:
        """Return the micro-batches whose loss ``rank`` computes."""
        return (self.losses or self.micro_batches)[rank]

    def ranks_of(self, micro_batch: int) -> int:
        """Return the number of ranks that compute ``micro_batch`` together."""
        return self.sequence_ranks if self.shared is None or micro_batch < self.shared else 1

    def offloads(self, block: int) -> bool:
        """Return True if what ``block`` keeps is offloaded to CPU memory: layers 1 to ``offloaded_layers`` are."""
        return 1 <= block <= self.settings.offloaded_layers

    def moves(self, block: int) -> bool:
        """Return True if OFFLOAD and RELOAD actions move what ``block`` keeps: offloading of whole rows."""
        return self.offloads(block) and not self.settings.sequence_chunk

    def streams(self, block: int) -> bool:
        """Return True if FORWARD and BACKWARD move the input of ``block`` to and from CPU memory chunk by chunk."""
        return bool(self.settings.sequence_chunk) and self.offloads(block) and block >= self.model.first_backward

    @property
    def refreshes(self) -> bool:
        """True if a node keeps gathered weights from step to step, and owners send only how they have changed.

        Always False on one node, so that a run which continues on one machine needs no other setting.
        """
        return self.settings.weights_compression == "exact" and self.topology.num_nodes > 1

    @property
    def codes_sums(self) -> bool:
        """True if gradients travel between nodes coded without loss."""
        return self.settings.gradients_compression == "exact" and self.topology.num_nodes > 1

    @property
    def summands(self) -> int:
        """Number of single micro-batch gradients that are added up in the last message between nodes."""
        most = max(map(len, self.micro_batches))
        if self.settings.gradients_scope != "step":
            most = min(most, self.settings.micro_batches_per_visit)
        return max(1, most * self.topology.local_size * (self.topology.num_nodes - 1))

    @property
    def homes_in_host(self) -> bool:
        """True if master weights, gradients and optimizer state are in CPU memory."""
        return self.settings.host_homes not in (None, "none")

    @property
    def copies_in_host(self) -> bool:
        """True if the weights that travel are in CPU memory, too."""
        return self.settings.host_homes == "all"

    @property
    def passes_gradients(self) -> bool:
        """True if a gradient that one backward pass completes is used without being stored at home.

        The update then reads it from the device. Only with homes in CPU memory, early updates and one process."""
        return self.homes_in_host and self.settings.early_updates and self.topology.world_size == 1

    @cached_property
    def step_cache(self) -> int:
        """Number of units whose copies are kept for the step, beyond what prefetching needs."""
        cached = self.settings.step_cache
        return len(self.model.units) if cached == "all" else cached or 0

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that compute a micro-batch together (size of a context-parallel group)."""
        return self.settings.sequence_ranks or 1

    @cached_property
    def rounds(self) -> int:
        """Number of passes through the model, each with up to ``micro_batches_per_visit`` micro-batches per rank."""
        most = max(len(share) for share in self.micro_batches)
        return max(1, -(-most // self.settings.micro_batches_per_visit))

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Relative speed per rank (fastest = 1); empty if equal."""
        return speeds_of(self.settings, self.topology)

    def in_round(self, rank: int, number: int) -> tuple[int, ...]:
        """Return the micro-batches that ``rank`` computes in round ``number``, in order; may be empty.

        With devices of different speeds, a slower device has fewer micro-batches in every round. If it had all of them
        in fewer rounds, the other devices would wait for it in these rounds."""
        share = self.micro_batches[rank]
        if self.speeds and self.shared is None:
            first, end = (-(-len(share) * past // self.rounds) for past in (number, number + 1))
            return share[first:end]
        k = self.settings.micro_batches_per_visit
        return share[number * k : (number + 1) * k]


@dataclass(frozen=True)
class Planner:
    """Information and functions that a plan passes to a strategy.

    Args:
        model: sizes of the model.
        topology: the nodes and ranks.
        settings: settings that the plan does not change.
        memory_bytes: memory that a device may use; 0 for no limit.
        boundary_bytes: bytes of the output of one layer for a full micro-batch.
        chunks: chunk sizes (tokens) in which rows may be computed, ascending.
        micro_batches_of: function that returns the number of micro-batches of a step under a strategy.
        keeps_attention: function that returns True if the attention output can be kept in a step.
        keeps_products: True if all results but those of norms and gates can be kept.
        least_s: function that returns a lower bound of the seconds of a step under a strategy; infinite if impossible.
        costs_of: function that makes the costs for a pipeline over some positions (``pipelines.work.PipelineCosts``).
        lacking_bytes: function that returns the bytes that a device lacks under a strategy with some settings; 0 or
            less if it has enough.
    """

    model: ModelSpec
    topology: Topology
    settings: ScheduleSettings
    memory_bytes: int
    boundary_bytes: float
    chunks: tuple[int, ...]
    micro_batches_of: Callable[[Strategy], int]
    keeps_attention: Callable[[StepSpec], bool]
    keeps_products: bool
    least_s: Callable[[Strategy], float]
    costs_of: Callable[..., Any]
    lacking_bytes: Callable[..., int]


@dataclass(frozen=True)
class Trial:
    """One layout of a strategy that a plan may evaluate, before anything is made for its costs.

    Args:
        strategy: the strategy with this layout.
        least_s: lower bound of the seconds of a step, as far as known at this point.
        spare: True to evaluate it only while nothing else fits.
        must_gain: True to evaluate it only if its lower bound is below the best step.
        may_overtake: True if it may be among the best even if similar strategies are far behind.
    """

    strategy: Strategy
    least_s: float = 0.0
    spare: bool = False
    must_gain: bool = False
    may_overtake: bool = False


class Strategy(ABC):
    """A layout of weights and a pattern of communication: where units live, and which actions a step needs.

    A strategy has no state that changes; two of equal class and fields are equal. ``WeightStrategy``
    (weight_strategy.py) implements all but homes and routes for strategies in which every rank visits the blocks in one
    order.
    """

    name: str
    summary: str
    """One sentence for ``--help`` and the docs."""
    layout: str = ""
    """Description of this layout, if the strategy has several, see ``layouts``."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values that the strategy uses for settings that the user left open (None)."""
    refusals: ClassVar[Mapping[str, str]] = {}
    """Setting that the strategy cannot use -> reason. ``check`` refuses any value but the neutral one."""
    one_order: ClassVar[bool] = False
    """True if all ranks run their transfers in one common order. Then a thread that blocks in one transfer never waits
    for a thread that waits for it. The programs of other strategies are sorted before they run
    (``transform.for_one_thread``)."""
    sums_on_rings: ClassVar[bool] = False
    """True if gradients between nodes are summed only on rings, message by message."""
    candidate: ClassVar[bool] = True
    """False to exclude the strategy from plans."""
    usual: ClassVar[bool] = True
    """False to hide the strategy in a plan's table, unless it is among the best or the user asks for all."""
    axis: str = ""
    """Ranks over which the blocks of a micro-batch are divided, see ``divided_over``. Empty if a rank computes all
    blocks."""
    host_levels: ClassVar[tuple[str, ...]] = ("none", "state", "all")
    """Values of ``ScheduleSettings.host_homes`` that the strategy supports."""
    cuts_documents: ClassVar[bool] = False
    """True if a document that is too long for one packed micro-batch may be cut into slices, see ``dealing``."""
    rounds_held: ClassVar[int] = 2
    """Number of full rounds that need as much memory as any larger number of rounds."""
    uses: ClassVar[tuple[str, ...]] = ()
    """Settings of ``SPECIAL`` that the strategy uses."""
    splits: ClassVar[bool] = False
    """True if backward passes of layers may be split into two parts (BACKWARD_INPUT and BACKWARD_WEIGHT)."""
    orders_host: ClassVar[bool] = False
    """True if the strategy's order, not ``offloaded_layers``, says which activations are offloaded, and into which
    slots."""

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @abstractmethod
    def place(self, model: ModelSpec, topology: Topology, homes: tuple[int, ...] = ()) -> tuple[Home, ...]:
        """Return the home of every unit.

        The result depends on the arguments alone, so that all schedules of a strategy share one storage.

        Args:
            homes: for every unit the number of the place that the user chose, see ``places``; empty for the default
                places.

        Raises:
            UserError: the units of this model cannot be placed on these nodes like this.
        """

    @abstractmethod
    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        """Return the schedule of a step.

        Args:
            training: False for one forward pass with its loss.
            ranks: ranks whose programs are made; None for all. Programs of other ranks are empty (used by the clock).

        Raises:
            UserError: a setting cannot work.
        """

    def configured(self, settings: ScheduleSettings) -> Strategy:
        """Return the strategy with the layout that ``settings`` choose, or itself if they do not affect it."""
        return self

    def share(self, count: int, topology: Topology, settings: ScheduleSettings) -> tuple[tuple[int, ...], ...]:
        """Return for every rank its micro-batches, out of 0..count-1.

        Raises:
            UserError: the settings are impossible on these nodes.
        """
        return share_in_cp_groups(count, topology, settings)

    def dealt_to(self, topology: Topology) -> Sequence[int]:
        """Return for every rank the number of the receiver whose packed micro-batches it computes.

        Receivers are the ranks themselves, or the pipelines."""
        return range(topology.world_size)

    def dealing(
        self, step: StepSpec, *, cap: int, work: LayerTime, cuts: float | None = None
    ) -> Callable[[Sequence[int]], Packs]:
        """Return a function that assigns documents of given lengths (tokens) to ranks, see ``balance.deal``.

        The function can be pickled for another process.

        Args:
            step: any step of the strategy.
            cap: most tokens of a packed micro-batch.
            work: time of the model's layers for a document.
            cuts: a document that takes more than ``cuts`` times the mean time of a packed micro-batch may be cut into
                slices, though one packed micro-batch can hold it. None if the model needs whole documents.
        """
        world, ranks, speeds = step.topology.world_size, step.sequence_ranks, step.speeds
        return partial(deal, world_size=world, cap=cap, work=work, ranks=ranks, speeds=speeds)

    def divided_over(self, topology: Topology) -> int:
        """Return the number of ranks that divide the blocks of a micro-batch; 1 if each computes all blocks."""
        return 1

    def computes(self, step: StepSpec) -> Sequence[Sequence[int]]:
        """Return for every rank the indices of the blocks that it computes."""
        return [range(len(step.model.blocks))] * step.topology.world_size

    def share_of_a_row(self, step: StepSpec, rank: int) -> float:
        """Return the time that ``rank`` needs for its part of a row, relative to other ranks of the step.

        Only ratios have a meaning; the unit depends on the strategy."""
        return 1 / step.speeds[rank] if step.speeds else 1.0

    def build_in_order(self, step: StepSpec, order: Any) -> Schedule:
        """Return the schedule of a training step in which the positions of a pipeline work in ``order``.

        Raises:
            UserError: the strategy is not a pipeline, and has no order.
        """
        raise UserError("schedule.strategy", self.name, "one whose activations travel, to have an order")

    def in_words(self, step: StepSpec) -> str:
        """Return a phrase that describes how the micro-batches of a step are computed."""
        passes = f"{step.rounds} pass{'es' * (step.rounds != 1)} over the layers"
        together = step.settings.micro_batches_per_visit
        return f"in {passes}" + (f", {together} on a process in each" if together > 1 else "")

    def view(self, topology: Topology) -> Topology:
        """Return the nodes as the strategy sees them: the real ones, unless the strategy ignores them on purpose."""
        return topology

    def places(self, topology: Topology) -> int:
        """Return the number of places, numbered from 0, that can be chosen as a unit's home; 0 if no choice exists."""
        return 0

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        """Return ranks that represent all ranks, so that only their programs need to be simulated.

        Empty if there are none. Every other rank does the same as one of them at the same time, with other peers. This
        holds if nodes are equally large.

        Args:
            topology: the nodes and ranks.
            inside_is_even: True if links inside a node are equally fast for all its ranks.
        """
        return ()

    def fullest(self, step: StepSpec) -> tuple[int, ...] | None:
        """Return ranks of which one needs at least as much memory as any other rank; None if all must be checked."""
        return None

    def traffic(self, step: StepSpec, *, training: bool) -> tuple[LinkTraffic, ...] | None:
        """Return the traffic of every node's link in a step, from a closed formula; None if there is no formula.

        The proof compares the result with the traffic of the schedule's actions.
        """
        return None

    def layouts(self, topology: Topology) -> Sequence[Strategy]:
        """Return the strategy in every layout that it can have on ``topology``. A plan takes the best."""
        return (self,)

    def trials(self, planner: Planner, like: Strategy | None) -> Sequence[Trial]:
        """Return the layouts of the strategy that a plan may evaluate.

        If there are several, each is only evaluated if its lower bound is below the best step so far.

        Args:
            planner: information about the plan.
            like: the best pipeline so far, or None.
        """
        ways = self.layouts(planner.topology)
        return [Trial(way, must_gain=len(ways) > 1) for way in ways]

    def effort(self, model: ModelSpec, topology: Topology, count: int) -> int:
        """Return the approximate work of making and simulating orders: micro-batches times blocks.

        0 if no order is made, as in this class.

        Args:
            model: sizes of the model.
            topology: the nodes and ranks.
            count: number of micro-batches of a step.
        """
        return 0

    def fit_to(self, planner: Planner, *, hopeful: bool, stop: Callable[[], None] = lambda: None) -> Strategy:
        """Return the strategy with stages or orders made for the costs of the plan; here the strategy itself.

        Args:
            planner: information about the plan.
            hopeful: True if the strategy may be among the best, so that a search for stages is worth its time.
            stop: function called before something is made once more, with less memory. It raises an error to end the
                attempts.

        Raises:
            UserError: no order fits into the memory.
        """
        return self

    def instead(self, planner: Planner) -> Iterator[Strategy]:
        """Yield other strategies to evaluate if the one of ``fit_to`` does not fit or is slow; here none."""
        return iter(())

    def visits(self, count: int, topology: Topology, settings: ScheduleSettings) -> Sequence[int]:
        """Return the values of ``micro_batches_per_visit`` that a plan tries.

        These are 1, 2, 4, ... below the largest number of micro-batches of a device, and that number."""
        most = max(1, *map(len, share_in_cp_groups(count, topology, settings)))
        return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]

    def changes(
        self, planner: Planner, step: StepSpec, worth: Callable[[str], bool], *, budget: int
    ) -> Iterator[dict[str, Any]]:
        """Yield dicts of settings that a plan tries next, each starting from the settings of ``step``.

        The strategy may refuse a change; the plan then skips it.

        Args:
            planner: information about the plan.
            step: a step of this strategy.
            worth: function that takes a value of the setting ``recompute``, and returns False if it cannot make the
                step faster.
            budget: number of work items that a search for stages may try.
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
        if offloaded and not settings.sequence_chunk:  # CPU memory holds what layers keep, instead of inputs
            yield from ({"recompute": recompute} for recompute in ("selective", "none"))
        if planner.keeps_attention(step):
            yield {"recompute": "selective"} | ({} if settings.sequence_chunk else {"offloaded_layers": 0})
        for share in (4, 2, 1) if layers else ():
            last = max(1, layers // share)
            for how in ("elementwise", "none") if planner.keeps_products else ("none",):
                yield {"recompute": f"{how}:{last},full", "offloaded_layers": min(offloaded, layers - last)}

    def remark(self, step: StepSpec) -> str:
        """Return a remark on a step for a plan's table, or ``""``."""
        return ""

    def missing(self) -> str:
        """Return a note about a package that is not installed and would make steps shorter, or ``""``."""
        return ""

    def why_not_exact(self, step: StepSpec) -> str:
        """Return the reason why weights cannot be sent as changes, or ``""`` if they can.

        Sending changes (``weights_compression: exact``) needs copies of the weights that stay in every node from step
        to step."""
        return "it keeps no copy of weights that the owners could change"

    def extended(self, step: StepSpec, rounds: int) -> tuple[StepSpec, StepSpec, float]:
        """Return a short step, a longer step and a factor, from which the time of ``step`` can be extrapolated.

        The second step has one more period of rounds than the first. The full step costs as much as the first step,
        plus factor times the difference of the two. The factor is 0 if ``step`` is short; then both steps are ``step``
        itself.

        Args:
            step: the whole step.
            rounds: number of rounds that the first step should have.
        """
        return step, step, 0.0

    def settle(self, settings: ScheduleSettings) -> ScheduleSettings:
        """Return ``settings`` with every open choice (None) replaced by the strategy's or the neutral value."""
        defaults = {**NEUTRAL, **self.defaults}
        return replace(settings, **{name: value for name, value in defaults.items() if getattr(settings, name) is None})

    def check(self, step: StepSpec) -> None:
        """Check that the settings of ``step`` work under this strategy.

        Raises:
            UserError: the setting that does not work, with the reason.
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
            if value not in (neutral, "exact"):  # whether exact works is checked above
                expected = "nothing" if neutral == "" else neutral
                raise UserError(f"schedule.{name}", value, f"{expected} under {self.name}: {reason}", need=reason)
        if step.copies_in_host and "all" not in self.host_levels:
            reason = "its devices compute with weights that stay there"
            raise UserError("schedule.host_homes", "all", f"state or none under {self.name}: {reason}", need=reason)


@dataclass(frozen=True)
class Schedule:
    """One step of every rank, as data.

    Args:
        name: name of the strategy, or ``evaluation``.
        step: the step that was scheduled.
        programs: for every rank its actions in the order in which they are issued, which is also their order on each
            lane. Empty for ranks that another rank represents, see ``plan.predict``.
        pools: for every rank the buffers that its program uses, without homes and activations.
        training: False for a forward-only schedule.
        looped: True if the schedule is repeated without end, as decode steps are: its end leaves the buffers that its
            beginning needs, see decode_steps.py.
        placed: for every rank the units that are whole there after the schedule, see placing.py; empty for others.
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
        """Ranks that have a program."""
        return tuple(rank for rank, program in enumerate(self.programs) if program)

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        """Indices of all micro-batches, ascending."""
        return tuple(sorted({m for share in self.step.micro_batches for m in share}))

    def text(self, rank: int) -> str:
        """Return the program of ``rank`` as text, one action per line."""
        return "\n".join(map(str, self.programs[rank]))

    def pool_elements(self, rank: int, kind: Kind) -> int:
        """Return the number of elements of all pool buffers of one kind on ``rank``."""
        return sum(pool.count * pool.elements for pool in self.pools[rank] if pool.kind is kind)

    def home_elements(self, rank: int, *, trainable: bool, packed: bool = True) -> int:
        """Return the number of elements of the shards that ``rank`` owns, of trained or of frozen units.

        Args:
            rank: the rank.
            trainable: True to count trainable units, False to count frozen ones.
            packed: False to leave out packed (quantised) units.
        """
        units = zip(self.homes, self.model.units, strict=True)
        wanted = (home for home, unit in units if unit.trainable == trainable and (packed or not unit.packed))
        return sum(home.shard_size for home in wanted if home.index(rank) is not None)

    def buffer_elements(self, rank: int) -> dict[Buffer, int]:
        """Return the number of elements of every pool buffer and home buffer of ``rank``."""
        sizes = {buffer: pool.elements for pool in self.pools[rank] for buffer in pool.buffers}
        for unit, home in enumerate(self.homes):
            if home.index(rank) is not None:
                sizes[home_weight(unit)] = sizes[home_gradient(unit)] = home.shard_size
        return sizes
