"""Steps of a pipeline: issued to the executor, limited in time, and checked when their results are known."""

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

from tawpipe.dealing.balance import PacksForm, layers_that_keep
from tawpipe.errors import RunError, UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.experts.balance import StepBalance
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
    """Tokens that the model generated for one prompt.

    Attributes:
        ids: ids of the new tokens.
        logprobs: natural logarithm of each token's probability, by the unmodified logits of the model.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Steps:
    """Steps of a pipeline: issues them, checks their results and limits their time.

    Before ``watch`` is called, a step beyond its time limit is reported, and only communication is aborted.

    Args:
        wiring: objects of this rank.
        deal: assignment of rows to ranks.
    """

    def __init__(self, wiring: Wiring, deal: Deal) -> None:
        self._wiring, self._deal = wiring, deal
        self._adopted: set[int] = set()
        """``id`` of every kept schedule whose buffers are allocated."""
        self._training: bool | None = None
        self._agreed: set[int] = set()
        """Numbers of micro-batches that are known to be equal on all ranks."""
        self._recent: deque[StepResult] = deque()
        self.skipped = 0
        """Number of consecutive steps, up to now, whose update was skipped because a number was not finite."""
        self.without_labels = 0
        """Number of steps whose labels were all -100 and whose update was therefore skipped."""
        self.limit = StepLimit(wiring.timeout.total_seconds())
        self._watched = False
        self._apply_limit()

    # issuing

    def schedule(self, count: int | PacksForm, *, training: bool = True) -> Schedule:
        """Return the schedule for ``count`` micro-batches, or for a ``Bins.form``, and allocate its buffers.

        Args:
            count: number of micro-batches, or the form of packed micro-batches.
            training: False for a schedule of forward passes only.
        """
        schedule = self._wiring.schedules.of(count, training=training)
        if id(schedule) not in self._adopted or schedule.step.slices:  # not all of these are kept
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
        """Issue one step and return a handle of its result; the step still runs then.

        Waits for all ranks at the first step with a number of micro-batches. Switches the model to training or
        evaluation mode.

        Args:
            local: this rank's part of the global batch.
            number: number of the step.
            rule: update rule for all parameter groups.
            seed: seed of dropout and the like; None for an evaluation, which runs forward only.
            recording: records when actions run.
            measure: computes additional results from the model's head.

        Raises:
            UserError: autocast is enabled, or ranks have global batches of different sizes.
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
        chosen = wiring.optimizers.groups.chosen()  # copied now: the step runs later
        micro_batches = self._deal.numbered(local, schedule.step.micro_batches[rank])
        slices = self._deal.slices(local, schedule.step.micro_batches[rank])
        counted = schedule.step.losses_of(rank) if schedule.step.losses else None
        if counted is not None:  # count the labels of a cut document once, at its first slice
            counted = [m for m in counted if m not in slices or not slices[m].begin]
        step_input = StepInput(
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
        if training and (balance := wiring.chain.balance) is not None:
            step_input.balance = StepBalance(balance, step_input.scale)
        if schedule.step.settings.offloaded_layers:
            tokens = wiring.training.bin_tokens if local.packs else 0
            make_places(wiring.compute, schedule.programs[rank], step_input, wiring.storage.compute_dtype, tokens)
        result = wiring.executor.play(schedule, step_input, replace(rule, chosen=chosen), recording=recording)
        if training:
            self._recent.append(result)
        return result

    def layers_kept(self, schedule: Schedule, batches: Mapping[int, MicroBatch]) -> dict[int, frozenset[int]]:
        """Return the layers of each micro-batch of this rank that keep their activations instead of recomputing them.

        ``keep_mib`` is shared by all micro-batches that are between their forward and their backward pass at one time.
        Slices of documents and micro-batches of several ranks keep none.

        Args:
            schedule: schedule of the step.
            batches: micro-batches of this rank by index.
        """
        step, chain, kept_per_token = schedule.step, self._wiring.chain, self._wiring.kept_per_token
        settings, rank = step.settings, self._wiring.world.rank
        waits = not settings.offloaded_layers and any(action.op is Op.OFFLOAD for action in schedule.programs[rank])
        if not settings.keep_mib or "graph" not in kept_per_token or waits:  # `Op.OFFLOAD` moves inputs only
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
        """Check once for each ``count`` that all ranks have this number of micro-batches.

        Waits for all ranks. Without the check, a rank with more micro-batches would wait for messages that are never
        sent.

        Raises:
            UserError: the numbers differ.
        """
        if count in self._agreed:
            return
        self._wiring.executor.watchdog.watch(BEGINNING, come := LastEvents({}))
        try:
            self._wiring.world.wait_patiently()  # for late ranks; the watchdog limits the wait
            everyone = self._wiring.world.gather_numbers(float(count))
        finally:
            come.issued = True
        if len({*everyone}) > 1:
            numbers = ", ".join(f"{each:.0f}" for each in everyone)
            value = f"global batches of different sizes on different ranks: {numbers} micro-batches"
            raise UserError("batch", value, "the same global batch on all ranks, each of which computes its own part")
        self._agreed.add(count)

    def _set_training(self, mode: bool) -> None:
        """Switch the model between training and evaluation mode if its mode differs from ``mode``."""
        # Switching visits all modules, so it is done only on a change. The caller may have called model.eval().
        if mode != self._training or mode != self._wiring.chain.model.training:
            self._wiring.chain.set_training(mode)
            self._training = mode

    # results

    def judge_recent(self) -> None:
        """Wait for issued training steps and check their results, the oldest first, until at most one is left."""
        while len(self._recent) > 1:
            try:
                self.judge(self._recent.popleft())
            except Exception:
                self._recent.clear()  # as in ``drain``: the error is reported once
                raise

    def drain(self) -> None:
        """Wait for all issued steps and check their results.

        Raises:
            RunError: the loss or gradient norm of a step was not finite.
            UserError: ranks were given different batches.
        """
        for result in self._recent:  # records the time of each step
            result.wait()
        self._wiring.executor.drain()
        results = list(self._recent)
        self._recent.clear()
        for result in results:
            self.judge(result)

    def end(self) -> None:
        """Wait for all issued steps at the end of the process; check those whose failure was not reported yet.

        Raises:
            RunError, UserError: as in ``drain``.
        """
        self._recent = deque(result for result in self._recent if not result.told)
        self.drain()

    def forget(self) -> None:
        """Drop the results of issued steps, because a load has replaced the weights."""
        self._recent.clear()
        self.skipped = 0

    def judge(self, result: StepResult) -> None:
        """Wait for the result of a step, record its time and check it; count it if its update was skipped.

        Raises:
            RunError: loss or gradient norm is not finite, for more than ``skip_limit`` consecutive steps.
            UserError: ranks were given different batches.
        """
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
        """Return memory and network bytes of one step whose micro-batches have up to ``tokens`` tokens.

        Weights that travel as changes are counted with the size of their last change.
        """
        wiring = self._wiring
        estimate = step_costs(
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
        return replace(estimate, host_bytes=estimate.host_bytes + wiring.storage.exact_bytes)

    def watch(self, least: timedelta) -> None:
        """Let the watchdog end the process if a step exceeds its time limit.

        Args:
            least: smallest limit; a multiple of the usual time of steps replaces it if that is longer.
        """
        self.limit.least_s, self._watched = least.total_seconds(), True
        self._apply_limit()

    def took(self, seconds: float) -> None:
        """Record that a step took ``seconds``, and adapt the time limits."""
        before = self.limit.seconds, self.limit.report_s
        self.limit.took(seconds)
        if (self.limit.seconds, self.limit.report_s) != before:
            self._apply_limit()

    def _estimate(self, local: LocalBatch, estimate: Costs) -> None:
        """Estimate the time of the first step from its FLOPs and its network bytes, and adapt the time limits.

        Args:
            local: this rank's part of the global batch.
            estimate: predicted costs of the step.
        """
        device, (lengths, share) = self._wiring.world.device, self._deal.busiest(local)
        self.limit.estimated_s = estimate_s(
            (chain_flops(self._wiring.chain, lengths, at_most=True) or 0.0) * share,
            max(*estimate.link_sent_bytes, *estimate.link_received_bytes, 0),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            dtype=str(self._wiring.storage.compute_dtype).removeprefix("torch."),
        )
        self._apply_limit()

    def _apply_limit(self) -> None:
        """Pass the current time limits to the watchdog and to the transport."""
        watchdog = self._wiring.executor.watchdog
        watchdog.limit_s, watchdog.ends = self.limit.seconds if self._watched else self.limit.report_s, self._watched
        # The transport aborts without a report, so its limit is longer. Two steps may be issued at one time.
        self._wiring.transport.set_timeout(timedelta(seconds=2 * self.limit.seconds + 30))


def _at_once(program: Iterable[Action], layers: Collection[int]) -> int:
    """Return the most micro-batches that are between their forward and backward pass in ``layers`` at one time."""
    held, flying, most = Counter[int](), 0, 1
    for action in program:
        if action.block in layers and action.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            before = held[action.micro_batch]
            held[action.micro_batch] = after = before + (1 if action.op is Op.FORWARD else -1)
            flying += (after > 0) - (before > 0)
            most = max(most, flying)
    return most
