"""Steps of a pipeline: issued to the executor, limited in time, and judged when their numbers are there."""

from __future__ import annotations

import logging
import struct
import zlib
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from math import ceil, isfinite, log2
from typing import NamedTuple

import torch

from tawpipe.dealing.balance import BinsForm, layers_that_keep
from tawpipe.errors import RunError, UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.flops import chain_flops, windows
from tawpipe.pipeline.batch import Deal, LocalBatch
from tawpipe.pipeline.setup import Wiring
from tawpipe.pipeline.sizes import step_costs
from tawpipe.runtime.compute.measures import Measure
from tawpipe.runtime.compute.moves import make_places
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.runtime.frame import UpdateRule
from tawpipe.runtime.homes.step_result import StepResult
from tawpipe.runtime.watch.limits import StepLimit, estimate_s
from tawpipe.runtime.watch.recording import Recording
from tawpipe.runtime.watch.stalls import BEGINNING
from tawpipe.runtime.watch.watchdog import LastEvents
from tawpipe.schedule.actions import Action, Op
from tawpipe.schedule.sizes.footprint import Costs
from tawpipe.schedule.spec import EXACT_WIDTH
from tawpipe.schedule.step import Schedule

logger = logging.getLogger(__name__)


class Continuation(NamedTuple):
    """Text that the model has written behind a prompt.

    Attributes:
        ids: ids of the new tokens.
        logprobs: natural logarithm of each token's chance, by the model's logits as they are.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Steps:
    """The steps of a pipeline.

    Until ``watch`` a step beyond its limit of time is reported, and only communication is ended.
    """

    def __init__(self, wiring: Wiring, deal: Deal) -> None:
        self._wiring, self._deal = wiring, deal
        self._adopted: set[int] = set()
        """Schedules, which are all kept, whose buffers are there."""
        self._training: bool | None = None
        self._agreed: set[int] = set()
        """Numbers of micro-batches of which all ranks know that the others have them, too."""
        self._recent: deque[StepResult] = deque()
        self.skipped = 0
        """Steps that were left out in a row, up to now."""
        self.without_labels = 0
        """Steps whose labels were all -100 and which were left out."""
        self.limit = StepLimit(wiring.timeout.total_seconds())
        self._watched = False
        self._apply_limit()

    # issuing

    def schedule(self, count: int | BinsForm, *, training: bool = True) -> Schedule:
        """Return the schedule for ``count`` micro-batches, or for the form of bins, with its buffers allocated."""
        schedule = self._wiring.schedules.of(count, training=training)
        if id(schedule) not in self._adopted or schedule.step.slices:  # those are not all kept
            self._adopted.add(id(schedule))
            executor = self._wiring.executor
            if executor.injector is not None and training:
                executor.injector.check(schedule, self._wiring.world.rank)
            executor.adopt(schedule)
        return schedule

    def play(
        self,
        local: LocalBatch,
        number: int,
        rule: UpdateRule,
        *,
        seed: int | None,
        recording: Recording | None = None,
        measure: Measure | None = None,
    ) -> StepResult:
        """Issue one step; it still runs when this returns.

        Args:
            number: of the step.
            rule: what all parameter groups have in common.
            seed: of random numbers; None for an evaluation.
        """
        training = seed is not None
        wiring, rank, topology = self._wiring, self._wiring.world.rank, self._wiring.world.topology
        self._set_training(training)
        wiring.chain.check_frozen()
        if torch.is_autocast_enabled(device := wiring.world.device.type):
            raise UserError("torch.autocast", f"enabled for {device}", "Pipeline(dtype=...): blocks compute in that")
        form = self._deal.form(local)
        if isinstance(form, int):
            self._agree(form)
        schedule = self.schedule(form, training=training)
        if training and not self.limit.known_s:
            self._estimate(local, self.costs(schedule, self._deal.tokens(local)))
        chosen = wiring.optimizers.groups.chosen()  # as they are now: the step itself runs later
        micro_batches = self._deal.numbered(local, schedule.step.micro_batches[rank])
        slices = self._deal.slices(local, schedule.step.micro_batches[rank])
        counted = schedule.step.losses_of(rank) if schedule.step.losses else None
        if counted is not None:  # of a document that is cut, what its first slice is given
            counted = [m for m in counted if m not in slices or not slices[m].begin]
        given = StepInput(
            micro_batches,
            scale=2.0 ** -ceil(log2(local.rows * local.sequence_length)),
            seed=seed,
            step=number,
            digest=zlib.crc32(struct.pack("d", rule.rate) + repr(chosen).encode(), local.digest or 0) % 2**20,
            measure=measure,
            place=topology.local_of(rank) % (wiring.schedules.settings.sequence_ranks or 1),
            shared=schedule.step.shared,
            counted=counted,
            slices=slices,
            kept=self.layers_kept(schedule, micro_batches) if training else {},
        )
        if schedule.step.settings.offloaded_layers:
            tokens = wiring.training.bin_tokens if local.bins else 0
            make_places(wiring.compute, schedule.programs[rank], given, wiring.storage.compute_dtype, tokens)
        result = wiring.executor.play(schedule, given, replace(rule, chosen=chosen), recording=recording)
        if training:
            self._recent.append(result)
        return result

    def layers_kept(self, schedule: Schedule, batches: Mapping[int, MicroBatch]) -> dict[int, frozenset[int]]:
        """Layers of each micro-batch of this rank that keep in ``keep_mib`` what they would recompute. The memory is
        shared by all micro-batches that are between their forward and their backward pass at one time.
        """
        step, chain, kept_per_token = schedule.step, self._wiring.chain, self._wiring.kept_per_token
        settings, rank = step.settings, self._wiring.world.rank
        waits = not settings.offloaded_layers and any(action.op is Op.OFFLOAD for action in schedule.programs[rank])
        if not settings.keep_mib or "graph" not in kept_per_token or waits:  # what waits elsewhere are inputs
            return {}
        first = max(settings.offloaded_layers + 1, chain.spec.first_backward)
        layers = [b for b in step.strategy.computes(step)[rank] if first <= b <= chain.spec.num_layers]
        several = settings.micro_batches_per_visit
        if step.divided_over > 1:
            several = _at_once(schedule.programs[rank], frozenset(layers))
        each = max(1, kept_per_token["graph"] - chain.width * self._wiring.storage.compute_dtype.itemsize) * several
        most, of_layers = settings.keep_mib * 2**20, windows(chain.config.get_text_config())
        return {
            m: layers_that_keep(batch.lengths, of_layers, int(most // (each * batch.input_ids.numel())), layers)
            for m, batch in batches.items()
            if step.ranks_of(m) == 1 and m not in step.neighbours
        }

    def _agree(self, count: int) -> None:
        """Ask whether all ranks have so many micro-batches, the first time: others would wait for what never comes.

        Raises:
            UserError: they have not.
        """
        if count in self._agreed:
            return
        self._wiring.executor.watchdog.watch(BEGINNING, come := LastEvents({}))
        try:
            self._wiring.world.wait_patiently()  # for ranks that come later: how long they may take, the watchdog knows
            everyone = self._wiring.world.gather_numbers(float(count))
        finally:
            come.issued = True
        if len({*everyone}) > 1:
            numbers = ", ".join(f"{each:.0f}" for each in everyone)
            given = f"global batches of different sizes on different ranks: {numbers} micro-batches"
            raise UserError("batch", given, "the same global batch on all ranks, each of which computes its own part")
        self._agreed.add(count)

    def _set_training(self, mode: bool) -> None:
        # It walks over all modules; but the model may have been switched by the caller's model.eval().
        if mode != self._training or mode != self._wiring.chain.model.training:
            self._wiring.chain.set_training(mode)
            self._training = mode

    # results

    def make_room(self) -> None:
        """Judge steps until at most one is ahead of its numbers."""
        while len(self._recent) > 1:
            try:
                self.judge(self._recent.popleft())
            except Exception:
                self._recent.clear()  # as in ``drain``: the caller knows now that steps have failed
                raise

    def drain(self) -> None:
        """Wait for everything under way, and judge all steps.

        Raises:
            RunError: one of them had a loss or gradient norm that was not finite.
            UserError: ranks were given different batches.
        """
        for result in self._recent:  # so that it is seen how long they take
            result.wait()
        self._wiring.executor.drain()
        results = list(self._recent)
        self._recent.clear()
        for result in results:
            self.judge(result)

    def end(self) -> None:
        """Judge, at the end of the process, the steps whose faults the caller does not know."""
        self._recent = deque(result for result in self._recent if not result.told)
        self.drain()

    def forget(self) -> None:
        """Drop results whose weights have been replaced by a load."""
        self._recent.clear()
        self.skipped = 0

    def judge(self, result: StepResult) -> None:
        """Count a step that was left out; raise for one more than ``skip_limit``."""
        result.require_alike()
        self.took(result.took_s)
        if result.finite and result.tokens:
            self.skipped = 0
            return
        if result.finite:
            self.without_labels += 1
            if self.without_labels == 1 and self._wiring.world.rank == 0:
                logger.warning("a global batch has no label to learn: this step and others like it are skipped")
            return
        if self.skipped < self._wiring.training.skip_limit:
            self.skipped += 1
            return
        if isfinite(result.loss) and isfinite(result.grad_norm):
            raise RunError("an earlier step was not finite; updates stay off until a good state is loaded")
        early = self._wiring.schedules.settings.early_updates
        outcome = "they have reached the weights: updates are early" if early else "the update was skipped"
        raise RunError(f"loss {result.loss} and gradient norm {result.grad_norm} are not finite; {outcome}")

    # time and bytes

    def costs(self, schedule: Schedule, tokens: int) -> Costs:
        """Bytes over the links and memory of one step, whose micro-batches have ``tokens`` tokens at most. Weights that
        travel as they change count by their last change.
        """
        wiring = self._wiring
        said = step_costs(
            wiring.chain,
            schedule,
            wiring.storage.compute_dtype,
            wiring.optimizers.states_per_element,
            tokens=tokens,
            kept_per_token=wiring.kept_per_token,
            nodes=wiring.world.nodes,
            whole=wiring.optimizers.whole,
            change=wiring.executor.refresh.change_bytes or EXACT_WIDTH,
        )
        return replace(said, host_bytes=said.host_bytes + wiring.storage.exact_bytes)

    def watch(self, least: timedelta) -> None:
        """Let the watchdog end steps, too, that take longer than ``least`` and than a multiple of the time of steps."""
        self.limit.least_s, self._watched = least.total_seconds(), True
        self._apply_limit()

    def took(self, seconds: float) -> None:
        """Record that a step took ``seconds``."""
        before = self.limit.seconds, self.limit.report_s
        self.limit.took(seconds)
        if (self.limit.seconds, self.limit.report_s) != before:
            self._apply_limit()

    def _estimate(self, local: LocalBatch, said: Costs) -> None:
        """Estimate the first step's time from its FLOPs and bytes, where no plan has predicted it."""
        device, (lengths, share) = self._wiring.world.device, self._deal.busiest(local)
        self.limit.estimated_s = estimate_s(
            (chain_flops(self._wiring.chain, lengths, at_most=True) or 0.0) * share,
            max(*said.link_sent_bytes, *said.link_received_bytes, 0),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            dtype=str(self._wiring.storage.compute_dtype).removeprefix("torch."),
        )
        self._apply_limit()

    def _apply_limit(self) -> None:
        watchdog = self._wiring.executor.watchdog
        watchdog.limit_s, watchdog.ends = self.limit.seconds if self._watched else self.limit.report_s, self._watched
        # The transport would end it without a word; it is there for what no watchdog sees. Two steps may be issued.
        self._wiring.transport.set_timeout(timedelta(seconds=2 * self.limit.seconds + 30))


def _at_once(program: Iterable[Action], layers: Collection[int]) -> int:
    """Most micro-batches that are between their forward and their backward pass in some of ``layers``."""
    held, flying, most = Counter[int](), 0, 1
    for action in program:
        if action.block in layers and action.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            before = held[action.micro_batch]
            held[action.micro_batch] = after = before + (1 if action.op is Op.FORWARD else -1)
            flying += (after > 0) - (before > 0)
            most = max(most, flying)
    return most
