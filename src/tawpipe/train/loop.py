"""The steps of a training run: batches, learning rate, numbers, evaluation, checkpoints.

Every process of the run makes a :class:`Training`; only rank 0 writes and prints.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version

import torch

from tawpipe.checkpoint.resume import RunState
from tawpipe.checkpoint.save import Saving
from tawpipe.checkpoint.store import Disk, Memory
from tawpipe.console import Console, duration
from tawpipe.data.prefetch import Prefetcher
from tawpipe.data.prepare import PreparedData
from tawpipe.data.rows import PackedDataset
from tawpipe.errors import RunError
from tawpipe.model.adapters import adapter_facts
from tawpipe.model.flops import chain_flops, mfu, peak_flops
from tawpipe.model.rope import rope_of
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.report.bars import TRACES
from tawpipe.runtime.executor import StepResult
from tawpipe.runtime.limits import FACTOR
from tawpipe.runtime.measures import LossByPosition, position_edges
from tawpipe.runtime.recording import Recording
from tawpipe.runtime.world import World
from tawpipe.train.alarms import Spikes, Stragglers, paces
from tawpipe.train.batches import Batches, Given
from tawpipe.train.config import TrainConfig
from tawpipe.train.metrics import REQUIRED, MetricsWriter, Value, peak_memory_bytes
from tawpipe.train.retrieval import Retrieval, RetrievalCheck
from tawpipe.train.stopping import StopRequest

LOOK_AT_SAVES = 10
"""Steps after which the run asks whether the save under way has ended."""


@dataclass
class _Pending:
    """A step whose numbers have not been read."""

    step: int
    result: StepResult
    rate: float
    given: Given


class Training:
    """The loop over steps.

    Args:
        state: what the checkpoint says that the run goes on from; None for a new run.
        plan: that the run follows, for its checkpoints.
        disk: for checkpoints.
        memory: for copies in the memory of the nodes, if there are to be any.
        check: part of every evaluation, if there is to be one.

    ``first`` is the number of steps that were done before, ``last`` of those that are done now, ``validation_loss`` the
    last one that was measured, ``validation_by_position`` the same by position, if asked for, ``retrieval`` what the
    last check found, ``stopped`` the signal that ended the run early, ``unsaved`` why the last checkpoint is not there.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        console: Console,
        pipeline: Pipeline,
        data: PreparedData,
        disk: Disk,
        state: RunState | None,
        *,
        plan: str = "",
        memory: Memory | None = None,
        check: RetrievalCheck | None = None,
    ) -> None:
        self.plan, self.disk, self.memory = plan, disk, memory
        self.config, self.world, self.console = config, world, console
        self.pipeline, self.data, self._check = pipeline, data, check
        self.first = self.last = state.step if state else 0
        self.stopped: signal.Signals | None = None
        self.unsaved = ""
        self._stalls: list[float] = []
        self._saving: Saving | None = None
        self._copying: Saving | None = None
        self._spikes = Spikes(config.log.spike)
        self._stragglers = Stragglers(config.log.straggler)
        self.samples = state.samples if state else 0
        self.validation_loss: float | None = None
        self.validation_by_position: dict[str, float | None] = {}
        self.retrieval: Retrieval | None = None
        self._evaluates = config.evaluation.every > 0 and (data.validation is not None or check is not None)
        self._pending: deque[_Pending] = deque()
        self._saved_step = self._left_out = 0
        self._batches = Batches(config, pipeline, data)
        self._computed_s = self._own_work = 0.0
        self._last = time.perf_counter()
        self._limit_s, self._limit_said, self._evaluated = 0.0, False, False
        self._writer: MetricsWriter | None = None
        dtype = str(pipeline.dtype).removeprefix("torch.")
        on_gpu = world.device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(world.device), dtype) if on_gpu else None

    def run(self) -> float:
        """All steps that are left; seconds they took."""
        config, pipeline = self.config, self.pipeline
        begin = self._last = time.perf_counter()
        if self.world.rank == 0:
            self._writer = MetricsWriter(
                config.output_path, tensorboard=config.log.tensorboard, resumed_step=self.first
            )
        self._follow_limit()
        try:
            with StopRequest(self.world) as stop:
                with Prefetcher(self._batches.train(self.samples, config.steps - self.first)) as batches:
                    for step, batch in zip(range(self.first, config.steps), batches, strict=True):
                        self._step(step, batch)
                        self.last = step + 1
                        self.stopped = stop.agreed()
                        if self.stopped is not None and self.last < config.steps:
                            break
                stop.finish()
                if self.stopped is not None and self.last < config.steps:
                    self._report(keep=0, evaluate=False)
                    if self._saved_step != self.last:
                        self._save(self.last)
                self._end_save()
                if self._copying is not None:
                    self._copying.wait(config.timeouts.save_s)
            # What follows, an export above all, is no step.
            self._limit(config.timeouts.first_step_s)
            if self.last > self.first:
                pipeline.drain()
            elif self._evaluates:
                values = self._evaluate()
                if self._writer is not None and not self.last:
                    self._writer.write(0, {**dict.fromkeys(REQUIRED), **values})
        finally:
            self._batches.close()
            if self._writer is not None:
                self._writer.close()
        return time.perf_counter() - begin

    def _step(self, step: int, given: Given) -> None:
        config, pipeline = self.config, self.pipeline
        settings = config.optimizer
        factor = learning_rate_factor(
            step, steps=config.steps, warmup=settings.warmup_steps, least=settings.min_learning_rate_ratio
        )
        recording = Recording(self.world.device, step + 1) if step + 1 == config.log.trace_step else None
        if recording is not None:
            pipeline.drain()  # so that the picture shows one step and nothing else
            self._report(keep=0, evaluate=False)  # whose time ends here
        result = pipeline.step(given.batch, rate=factor, recording=recording)
        if recording is not None:
            pipeline.drain()
            folder = config.output_path / TRACES / f"step-{step + 1:08}"
            recording.write(folder, rank=self.world.rank, node=self.world.nodes.node_of(self.world.rank))
        self.samples += given.samples
        self._pending.append(_Pending(step + 1, result, factor * config.learning_rate, given))
        last = step + 1 == config.steps
        evaluate = self._evaluates and _due(config.evaluation.every, step + 1, last=last)
        save = _due(config.checkpoint.every, step + 1, last=last)
        # One step stays unread, so that the next one is issued before this one has ended.
        self._report(keep=0 if evaluate or save or last or step == self.first else 1, evaluate=evaluate)
        self._follow_limit()
        if step == self.first:
            pipeline.drain()
            self._limit(config.timeouts.step_s)
        if config.check_copies_every and (step + 1) % config.check_copies_every == 0:
            pipeline.check_copies()
        if save:
            self._save(step + 1)
        if self.memory is not None and (step + 1) % config.checkpoint.memory_every == 0:
            self._copy(self.memory, step + 1)
        if not save and self._saving is not None and (step + 1) % LOOK_AT_SAVES == 0:
            self._end_save(only_if_ended=True)

    def _limit(self, least_s: float) -> None:
        """Give everything up to a step this time from now on, or more if steps are known to take longer."""
        self.pipeline.set_timeout(timedelta(seconds=least_s))
        self._follow_limit()

    def _follow_limit(self) -> None:
        """Let control messages wait as long as steps may take. Say once if that is longer than the setting."""
        limit, setting = self.pipeline.limit, self.config.timeouts.step_s
        if limit.seconds != self._limit_s:
            self._limit_s = limit.seconds
            self.world.set_timeout(timedelta(seconds=self._limit_s))
        if not self._limit_said and FACTOR * limit.lasting_s > setting:
            self._limit_said = True
            may = duration(FACTOR * limit.lasting_s)
            self.console.notice(
                f"a step may take {may} before the run is given up, {FACTOR:.0f} times what steps take, as far as is "
                f"known; --timeouts.step-s, which is {setting:g} s, is the least"
            )

    def _save(self, step: int) -> None:
        """Begin to save, when the save before has ended."""
        begin = time.perf_counter()
        self._end_save(now=step)
        self._saved_step = step
        self._saving = self.pipeline.start_saving(self.disk, run=asdict(self._state(step)))
        if not self.config.checkpoint.background:
            self._end_save()
        self._last += time.perf_counter() - begin  # no part of the next step

    def _copy(self, memory: Memory, step: int) -> None:
        """Begin to copy the state into the memory of the nodes, when the copy before has ended."""
        begin = time.perf_counter()
        if self._copying is not None and (problem := self._copying.wait(self.config.timeouts.save_s).problem):
            self.console.notice(f"no copy in memory before step {step}, training goes on without: {problem}")
        self._copying = self.pipeline.start_saving(memory, run=asdict(self._state(step)))
        self._last += time.perf_counter() - begin

    def _end_save(self, *, only_if_ended: bool = False, now: int = 0) -> None:
        """Look at what came of the save under way; on all ranks.

        Args:
            only_if_ended: on all ranks, and go on otherwise.
            now: the step whose save waits for it.
        """
        if self._saving is None:
            return
        if only_if_ended and not all(self.world.gather_numbers(float(self._saving.done))):
            return
        begin = time.perf_counter()
        saved, self._saving = self._saving.wait(self.config.timeouts.save_s), None
        waited = time.perf_counter() - begin
        if now and waited > 1:
            self.console.notice(
                f"the checkpoint after step {self._saved_step} took {saved.written_s:.1f} s to write: the next one, "
                f"after step {now}, waited {waited:.1f} s for it"
            )
        self.unsaved = saved.problem
        if saved.problem:
            self.console.notice(f"{saved.folder} could not be written, training goes on without it: {saved.problem}")
            return
        if saved.left:
            self.console.notice(f"an old checkpoint stays: {saved.left}")
        self._stalls.append(saved.staged_s)

    @property
    def stall_s(self) -> float | None:
        """The longest time for which training stood still for a checkpoint; None if there was none."""
        return max(self._stalls, default=None)

    def _report(self, *, keep: int, evaluate: bool) -> None:
        """Read the numbers of finished steps; the newest gets the validation loss if it is to be measured."""
        while len(self._pending) > keep:
            done = self._pending.popleft()
            result = done.result
            skipped = not result.finite and self.pipeline.skip_limit > 0
            if skipped:
                self._left_out += 1
                self.console.notice(
                    f"step {done.step}: loss {result.loss}, gradient norm {result.grad_norm}; the update was left out, "
                    f"{self._left_out} of at most {self.pipeline.skip_limit} in a row"
                )
            elif not result.finite:
                checked = not self.config.schedule.early_updates
                outcome = "the update was left out" if checked else "it is in the weights, but in no checkpoint"
                raise RunError(
                    f"step {done.step}: loss {result.loss}, gradient norm {result.grad_norm}; {outcome}. "
                    "Lower --learning-rate, or look at the data of this step"
                )
            self._left_out *= skipped
            now = time.perf_counter()
            seconds, self._last = now - self._last, now
            # Counts all tokens of the batch: masked ones are computed too.
            per_second = done.given.tokens / seconds
            values: dict[str, Value] = {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": done.rate,
                "tokens_per_second": per_second,
                "tokens": result.tokens,
                "seconds": seconds,
                "peak_memory_bytes": peak_memory_bytes(self.world.device.type),
            }
            if self._peak is not None:
                values["mfu"] = self._mfu(done, seconds)
            bins, own = done.given.batch.bins, len(done.given.batch.micro_batches)
            if bins is not None:
                values |= {"documents": done.given.samples, "rounds": sum(bins.shape)}
                values["imbalance"] = bins.seconds / bins.mean_seconds
            self._own_work += own if bins is None else sum(map(bins.time, bins.of(self.world.rank)))
            if done.step % self.config.log.every == 0 and (self.config.log.straggler or bins is not None):
                imbalance = self._look_for_stragglers(done.step)
                if bins is not None:
                    values["compute_imbalance"] = imbalance
            extra = ""
            if evaluate and not self._pending:
                values |= self._evaluate()
                self._last = time.perf_counter()
                measured = [] if self.validation_loss is None else [f"validation loss {self.validation_loss:.4f}"]
                extra = ", ".join([*measured, *([str(self.retrieval)] if self.retrieval else [])])
            if self._writer is not None and (problem := self._writer.write(done.step, values)):
                self.console.notice(f"step {done.step}: no row was written, training goes on without: {problem}")
            if said := self._spikes.look(result.loss):
                self.console.notice(f"step {done.step}: {said}")
            if extra or done.step % self.config.log.every == 0 or done.step in (self.first + 1, self.config.steps):
                self.console.progress(
                    done.step,
                    self.config.steps,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    tokens_per_second=per_second,
                    extra=extra,
                )

    def _look_for_stragglers(self, step: int) -> float | None:
        """Compare how long the ranks have computed since the last look, beside what they had to; on all ranks.

        Returns:
            the longest time of a rank over their mean; None if none has computed.
        """
        now = self.pipeline.executor.compute_s
        seconds, work = (self.world.gather_numbers(one) for one in (now - self._computed_s, self._own_work))
        self._computed_s, self._own_work = now, 0.0
        for rank, times in self._stragglers.look(paces(seconds, work))[:3]:
            where = f"rank {rank} (node {self.world.nodes.node_of(rank)})"
            self.console.notice(f"step {step}: {where} computes {times:.1f} times as long as most: all wait for it")
        return max(seconds) * len(seconds) / sum(seconds) if sum(seconds) else None

    def _evaluate(self) -> dict[str, Value]:
        """Measure the model on what is held out, and say it as metrics.jsonl does."""
        usual_s, values = self.pipeline.limit.least_s, dict[str, Value]()
        if not self._evaluated:  # layers are compiled once more, and every block runs twice
            self._limit(self.config.timeouts.first_step_s)
        if self.data.validation is not None:
            self.validation_loss = values["validation_loss"] = self._validate(self.data.validation)
            if self.validation_by_position:
                values["validation_by_position"] = self.validation_by_position
        if self._check is not None:
            self.retrieval = self._check.measure(self.pipeline, self.config.global_batch)
            values |= self.retrieval.values()
        if not self._evaluated:
            self._evaluated = True
            self._limit(usual_s)
        return values

    def _validate(self, source: PackedDataset) -> float:
        """Mean loss per token over the first batches of the held-out documents, always the same ones."""
        by_position = None
        if buckets := self.config.evaluation.by_position:
            edges = position_edges(buckets, self.config.document_tokens)
            by_position = LossByPosition(edges, self.world.device)
        total, tokens = 0.0, 0
        for batch in self._batches.validation(source):
            result = self.pipeline.evaluate(batch, measure=by_position)
            total, tokens = total + result.loss * result.tokens, tokens + result.tokens
        if by_position is not None:
            self.validation_by_position = by_position.means(self.world)
        return total / max(1, tokens)

    def _state(self, step: int) -> RunState:
        return RunState(
            step=step,
            samples=self.samples,
            seed=self.config.seed,
            fingerprint=self.data.fingerprint,
            data_state=self.data.train.state_dict(self.samples),
            topology=str(self.world.nodes),
            plan=self.plan,
            dtype=str(self.pipeline.dtype).removeprefix("torch."),
            rope=rope_of(self.pipeline.chain.config),
            lora=adapter_facts(self.pipeline.chain.given),
            freeze=sorted(self.config.freeze),
            versions={name: version(name) for name in ("tawpipe", "torch", "transformers")},
        )

    def _mfu(self, done: _Pending, seconds: float) -> float | None:
        """The MFU of all ranks where every one knows all documents; else of this rank, or of those that compute its
        rows together, whose documents stand for those of all. None for models whose FLOPs are not known.
        """
        batch = done.given.batch
        if batch.bins is not None:
            lengths, ranks = list(batch.bins.lengths), self.world.size
        else:
            lengths = [length for one in batch.micro_batches for length in one.lengths]
            ranks = self.pipeline.sequence_ranks
        flops = chain_flops(self.pipeline.chain, lengths) if lengths else None
        return None if flops is None else mfu(flops, seconds, peak=self._peak, num_devices=ranks)


def learning_rate_factor(step: int, *, steps: int, warmup: int, least: float) -> float:
    """The factor of the highest learning rate in step 0, 1, ...: linear warm-up, then a cosine down to
    ``least``.

    >>> [round(learning_rate_factor(s, steps=10, warmup=2, least=0.1), 2) for s in (0, 1, 2, 9)]
    [0.5, 1.0, 1.0, 0.13]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))


def _due(every: int, step: int, *, last: bool) -> bool:
    return every > 0 and (last or step % every == 0)
