"""Loop over the steps of a training run: batches, learning rate, metrics, evaluation and checkpoints.

Every process of the run makes a :class:`Training`; only rank 0 writes and prints.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version

import torch

from tawpipe.checkpoint.names import is_complete, step_name
from tawpipe.checkpoint.resume import RunState
from tawpipe.checkpoint.store import Disk, Memory
from tawpipe.console import Console
from tawpipe.data.prefetch import Prefetcher
from tawpipe.errors import RunError
from tawpipe.extras import VERSION
from tawpipe.model.files.adapters import adapter_facts
from tawpipe.model.flops import chain_flops, mfu, peak_flops
from tawpipe.model.rope import rope_of
from tawpipe.orders.improving import Improving
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.report.bars import TRACES
from tawpipe.runtime.homes.step_result import StepResult
from tawpipe.runtime.threads import use_device
from tawpipe.runtime.watch.recording import Recording
from tawpipe.train.batches import Batches, StepBatch
from tawpipe.train.judging.evaluation import Best, Evaluation, resumed_best
from tawpipe.train.judging.sample import Sample, Samples
from tawpipe.train.lengths import settled_lengths
from tawpipe.train.memory import predicted_bytes
from tawpipe.train.prepare import Prepared
from tawpipe.train.saves import Saves
from tawpipe.train.saying.alarms import Spikes, Stragglers, paces
from tawpipe.train.saying.metrics import REQUIRED, MetricsWriter, Value, peak_memory_bytes
from tawpipe.train.saying.tracking import Tracking
from tawpipe.train.settings.config import TimeoutConfig
from tawpipe.train.settings.learning_rate import factor, span_of
from tawpipe.train.settings.recipe import settled
from tawpipe.train.step_limit import FollowedLimit
from tawpipe.train.stopping import StopRequest

SHARES = {"mfu": "MFU", "link_use": "link", "weights_sent": "weights sent", "gradients_sent": "gradients sent"}
"""Metrics that are shares, and their names on the console."""
SETTLED = 20
"""Steps after which link use is estimated anew, because the compression of weights is then known."""


@dataclass
class _Pending:
    """Step that was issued and whose numbers have not been read yet."""

    step: int
    result: StepResult
    rate: float
    step_batch: StepBatch


class Training:
    """Loop over the steps of a run.

    Args:
        disk: store for checkpoints.
        memory: store for copies in the memory of the nodes; None without.
        tracking: receives the numbers that metrics.jsonl gets.

    ``first`` is the number of steps done before this start, ``last`` the number of steps done by now. ``stopped`` is
    the signal that ended the run early, else None. Other results are in ``evaluation``, ``saves`` and ``texts``.
    """

    def __init__(
        self,
        prepared: Prepared,
        console: Console,
        pipeline: Pipeline,
        disk: Disk,
        *,
        memory: Memory | None = None,
        tracking: Tracking,
    ) -> None:
        config, state, batch, data = prepared.config, prepared.state, prepared.batch, prepared.data
        self.plan, self.tracking, self.commit = prepared.plan_text, tracking, prepared.built.commit
        self.recompute = prepared.schedule.recompute
        self.config, self.world, self.console = config, pipeline.world, console
        self.pipeline, self.data, self.disk = pipeline, data, disk
        self._predicted_bytes = predicted_bytes(prepared.needs, self.world.device)
        self.first = self.last = state.step if state else 0
        self.stopped: signal.Signals | None = None
        self._spikes = Spikes(config.log.spike)
        self._stragglers = Stragglers(config.log.straggler)
        self.samples = state.samples if state else 0
        self._validation = state.validation if state else ""
        self._pending: deque[_Pending] = deque()
        self._left_out = 0
        evaluated = config.evaluation.batches
        self._batches = Batches(batch, pipeline, data, model=config.model, evaluated=evaluated)
        check = prepared.retrieval
        self.evaluation = Evaluation(config.evaluation, pipeline, data, self._batches, check=check)
        self.evaluation.best = self._resumed_best(state, disk)
        disk.best = [self.evaluation.best.step] if self.evaluation.best.step and config.checkpoint.best else []
        self.saves = Saves(config, console, pipeline, disk, memory, self._state)
        left = config.steps - self.first if config.plan_improve == "on" else 0
        world = self.world
        self._improving = Improving(pipeline, world, console, rows=batch.rows, steps=left)
        self.texts = Samples(
            config.sample,
            console,
            pipeline,
            data,
            folder=config.output_path,
            window=batch.document_tokens,
            seed=config.seed,
            first=self.first,
        )
        self._computed_s = self._own_work = 0.0
        self._share = pipeline.share_of_a_row
        self._last = time.perf_counter()
        self._evaluated = False
        changed = config.timeouts.step_s != TimeoutConfig().step_s
        setting_s = config.timeouts.step_s if changed else math.inf
        self._limit = FollowedLimit(pipeline.limit, setting_s, set_timeout=world.set_timeout)
        self._writer: MetricsWriter | None = None
        self._machine = prepared.followed.machine if world.rank == 0 else None
        self._link_s = dict[tuple[int, ...], float]()
        dtype = str(pipeline.dtype).removeprefix("torch.")
        on_gpu = world.device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(world.device), dtype) if on_gpu else None

    @property
    def ended_early(self) -> bool:
        """True if a signal ended the run before its last step."""
        return self.stopped is not None and self.last < self.config.steps

    def run(self, stop: StopRequest) -> float:
        """Run the remaining steps, until the last one or until the ranks agree to stop.

        Evaluates, saves and reports as the settings ask. Call on all ranks.

        Args:
            stop: request to stop, asked after every step.

        Returns:
            the seconds that this took.
        """
        config, pipeline = self.config, self.pipeline
        begin = self._last = time.perf_counter()
        if self.world.rank == 0:
            self._writer = MetricsWriter(config.output_path, resumed_step=self.first)
        self.console.notice(self._limit.follow())
        try:
            if config.evaluation.at_start and self.evaluation.due and not self.first:
                self._evaluate_before()
            upcoming = self._batches.train(self.samples, config.steps - self.first)
            with Prefetcher(
                upcoming, begin=partial(use_device, self.world.device)
            ) as batches:  # its thread pins memory
                for step, batch in zip(range(self.first, config.steps), batches, strict=True):
                    if self.evaluation.exhausted:
                        break
                    self._step(step, batch)
                    self.last = step + 1
                    self.stopped = stop.agreed()
                    if self.ended_early:
                        break
            stop.finish()
            if self.first < self.last < config.steps:
                self._report(keep=0, evaluate=False)
                if self.saves.step != self.last and (self.stopped is not None or config.checkpoint.every):
                    self.saves.save(self.last)
            self.saves.finish()
            # An export and other work after the steps may take longer than a step.
            self._allow(config.timeouts.first_step_s)
            if self.last > self.first:
                pipeline.drain()
            elif self.evaluation.due and not self.evaluation.measured:
                self._evaluate_before()
        finally:
            self.console.end_progress()
            self._improving.close()
            self._batches.close()
            if self._writer is not None:
                self._writer.close()
        return time.perf_counter() - begin

    def _step(self, step: int, step_batch: StepBatch) -> None:
        """Issue one training step, and do what is due after it: report, evaluate, save and write samples.

        Args:
            step: number of steps done before this one.
            step_batch: batch of the step.
        """
        config, pipeline = self.config, self.pipeline
        rate = factor(config.optimizer.schedule, step, span_of(config.optimizer, config.steps))
        recording = Recording(self.world.device, step + 1) if step + 1 == config.log.trace_step else None
        if recording is not None:
            pipeline.drain()  # the recording shall show this step only
            self._report(keep=0, evaluate=False)  # the earlier steps end here
        timed = recording or self._improving.recording(step + 1)
        result = pipeline.step(step_batch.batch, rate=rate, recording=timed)
        if recording is not None:
            pipeline.drain()
            self._write_recording(recording)
        self._improving.after(step + 1)
        self.samples += step_batch.samples
        self._pending.append(_Pending(step + 1, result, rate * config.learning_rate, step_batch))
        last = step + 1 == config.steps
        evaluate = self.evaluation.due and _due(config.evaluation.every, step + 1, last=last)
        save = _due(config.checkpoint.every, step + 1, last=last)
        write = self.texts.due(step + 1) and not last  # at the end of the run the caller writes them
        copy = self.saves.memory is not None and _due(config.checkpoint.memory_every, step + 1, last=False)
        # The numbers of one step stay unread, so that the next step is issued before this one has ended.
        soon = evaluate or save or copy or write or last or step == self.first
        self._report(keep=0 if soon else 1, evaluate=evaluate)
        self.console.notice(self._limit.follow())
        if step == self.first:
            pipeline.drain()
            self._allow(config.timeouts.step_s)
        if config.check_copies_every and (step + 1) % config.check_copies_every == 0:
            pipeline.check_copies()
        if write:
            with self._between_steps():
                for sample in self.write_samples(step + 1):
                    self.console.line(f"step {step + 1}: {sample}")
        best = config.checkpoint.best and self.evaluation.best.step == step + 1
        spent_s = self.saves.after(step + 1, save=save or best)
        if not self._pending:  # else the save overlapped with a step that is still running
            self._last += spent_s

    def _write_recording(self, recording: Recording) -> None:
        """Write this rank's part of a step's recording under traces/ in the output folder; call on all ranks.

        If a rank cannot write, a notice is printed and the run continues."""
        world, problem = self.world, ""
        try:
            folder = self.config.output_path / TRACES / f"step-{recording.step:08}"
            recording.write(folder, rank=world.rank, node=world.nodes.node_of(world.rank))
        except Exception as error:  # a recording that cannot be written must not end the run
            problem = f": {error}"
        failed = [rank for rank, number in enumerate(world.gather_numbers(bool(problem))) if number]
        if failed:
            ranks = ", ".join(map(str, failed))
            words = f"step {recording.step} was not recorded by rank {ranks}; training continues{problem}"
            self.console.missed("recording", words)

    def _allow(self, least_s: float) -> None:
        """Set the time limit of a step, and of work before it, to ``least_s`` seconds, or more if steps take longer."""
        self.pipeline.set_timeout(timedelta(seconds=least_s))
        self.console.notice(self._limit.follow())

    def _report(self, *, keep: int, evaluate: bool) -> None:
        """Read the numbers of finished steps, and write them to metrics.jsonl, the trackers and the console.

        Args:
            keep: number of newest steps that stay unread.
            evaluate: True to measure the validation loss with the newest step.

        Raises:
            RunError: a loss or gradient norm is not finite, and steps without an update are not allowed.
        """
        while len(self._pending) > keep:
            done = self._pending.popleft()
            result = done.result
            skipped = not result.finite and self.pipeline.training.skip_limit > 0
            if skipped:
                self._left_out += 1
                self.console.notice(
                    f"step {done.step}: loss {result.loss}, gradient norm {result.grad_norm}; the update was "
                    f"skipped, {self._left_out} of at most {self.pipeline.training.skip_limit} in a row"
                )
            elif not result.finite:
                checked = not self.pipeline.settings.early_updates
                outcome = "the update was skipped" if checked else "it is in the weights, but in no checkpoint"
                raise RunError(
                    f"step {done.step}: loss {result.loss}, gradient norm {result.grad_norm}; {outcome}. Lower "
                    "--learning-rate, or check the data of this step"
                )
            if result.tokens:
                self._left_out *= skipped

            # Use the time at which the step ended on the device, as its numbers may be read later.
            seconds, self._last = result.ended_s - self._last, result.ended_s
            # All tokens of the batch count, because masked ones are computed, too.
            per_second = done.step_batch.tokens / seconds
            values: dict[str, Value] = {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": done.rate,
                "tokens_per_second": per_second,
                "tokens": result.tokens,
                "seconds": seconds,
                "peak_memory_bytes": peak_memory_bytes(self.world.device.type),
            }
            if self.pipeline.chain.balance is not None:
                values |= {"balance_loss": result.balance_loss, "busiest_expert": result.busiest_expert}
            if self._predicted_bytes:
                values["predicted_memory_bytes"] = self._predicted_bytes
            if self._peak is not None:
                values["mfu"] = self._mfu(done, seconds)
            if done.step == self.first + SETTLED:
                self._link_s.clear()
            if (link_s := self._link_seconds(done.step_batch)) is not None:
                values["link_use"] = link_s / seconds
            coded = {"weights_sent": self.pipeline.executor.refresh.sent}
            coded["gradients_sent"] = self.pipeline.transport.gradients_sent
            values |= {name: share for name, sent in coded.items() if (share := sent.share()) is not None}

            # Balance of the documents between ranks.
            packs, count = done.step_batch.batch.packs, len(done.step_batch.batch.micro_batches)
            if packs is not None:
                values |= {"documents": done.step_batch.samples, "rounds": sum(packs.shape)}
                values["imbalance"] = packs.seconds / packs.mean_seconds
            work = count if packs is None else sum(map(packs.time, self.pipeline.own_packs(packs)))
            self._own_work += work * self._share
            if done.step % self.config.log.every == 0 and (self.config.log.straggler or packs is not None):
                imbalance = self._look_for_stragglers(done.step)
                if packs is not None:
                    values["compute_imbalance"] = imbalance

            # Evaluate, then write and print.
            extra = [] if result.tokens else ["no token to learn: skipped"]
            if evaluate and not self._pending:
                values |= self._evaluate(done.step)
                extra.append(str(self.evaluation))
            if self._writer is not None and (problem := self._writer.write(done.step, values)):
                self.console.notice(
                    f"step {done.step}: no row was written to the metrics; training continues: {problem}"
                )
            self.tracking.log(done.step, values)
            if warning := self._spikes.look(result.loss):
                self.console.notice(f"step {done.step}: {warning}")
            self.console.progress(
                done.step,
                self.config.steps,
                loss=result.loss,
                grad_norm=result.grad_norm,
                tokens_per_second=per_second,
                at=result.ended_s,
                shares={name: values.get(key) for key, name in SHARES.items()},
                extra=", ".join(extra),
                line=done.step % self.config.log.every == 0 or done.step in (self.first + 1, self.config.steps),
            )

    def _look_for_stragglers(self, step: int) -> float | None:
        """Compare the computing time of the ranks since the last call, relative to their work, and report slow ranks.

        Call on all ranks.

        Returns:
            the longest computing time of a rank over the mean of all ranks; None if none has computed.
        """
        now = self.pipeline.executor.compute_s
        seconds, work = (self.world.gather_numbers(value) for value in (now - self._computed_s, self._own_work))
        self._computed_s, self._own_work = now, 0.0
        for rank, times in self._stragglers.look(paces(seconds, work))[:3]:
            where = f"rank {rank} (node {self.world.nodes.node_of(rank)})"
            self.console.notice(
                f"step {step}: {where} computes {times:.1f} times as long as most; all ranks wait for it"
            )
        return max(seconds) * len(seconds) / sum(seconds) if sum(seconds) else None

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Return a context for work between two steps, such as an evaluation.

        The first such work may take as long as a first step. The time inside does not count for the next step.
        """
        usual_s = self.pipeline.limit.least_s
        if not self._evaluated:  # the first time, layers are compiled for evaluation, and every block runs twice
            self._allow(self.config.timeouts.first_step_s)
        yield
        if not self._evaluated:
            self._evaluated = True
            self._allow(usual_s)
        self._last = time.perf_counter()

    def _evaluate(self, step: int) -> dict[str, Value]:
        """Evaluate the model after ``step``, and return the values under their names in metrics.jsonl.

        With ``checkpoint.best``, a step with the lowest loss so far is recorded in the store, so that its checkpoint is
        kept."""
        with self._between_steps():
            values = self.evaluation.measure(step)
        if step and self.config.checkpoint.best and self.evaluation.best.step == step:
            self.saves.disk.best.append(step)
        return values

    def _evaluate_before(self) -> None:
        """Evaluate without a training step; in a new run, write the values as row 0 of metrics.jsonl."""
        values = self._evaluate(self.last)
        if self._writer is not None and not self.last:
            self._writer.write(0, {**dict.fromkeys(REQUIRED), **values})
            self.tracking.log(0, values)
            self.console.line(f"before the first step: {self.evaluation}")

    def write_samples(self, step: int) -> list[Sample]:
        """Write texts of the model after ``step`` to samples.jsonl and the trackers; call on all ranks.

        Returns:
            the texts on rank 0; an empty list on other ranks, and if the texts cannot be shown.
        """
        samples = self.texts.write(step)
        self.tracking.samples(step, [(sample.prompt, sample.text) for sample in samples])
        return samples

    def _state(self, step: int) -> RunState:
        """Return the run's part of the state after ``step``, for a checkpoint."""
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
            best=asdict(self.evaluation.best) if self.evaluation.best.step else {},
            validation=self.evaluation.record or self._validation,
            lora=adapter_facts(self.pipeline.chain.outer_model),
            freeze=sorted(self.config.freeze),
            settled={
                **settled(self.config),
                **settled_lengths(self.config),
                "date": self.data.date,
                "ends": list(self.data.ends),
                "commit": self.commit,
                "recompute": self.recompute,
                **{name: getattr(self._batches.shape, name) for name in ("micro_batch", "bin_tokens")},
            },
            versions={"tawpipe": VERSION, **{name: version(name) for name in ("torch", "transformers")}},
        )

    def _resumed_best(self, state: RunState | None, disk: Disk) -> Best:
        """Return the best step of ``state``, or none if its validation data or its checkpoint is not usable now.

        Prints a line if the best step begins anew. Call on all ranks.
        """
        best, line = resumed_best(state, self.evaluation.record)
        folder = disk.folder / step_name(best.step)
        needed = self.config.checkpoint.best and best.step
        if needed and not all(self.world.gather_numbers(float(is_complete(folder)))):
            line = f"best step: starts again; {folder}, its checkpoint, is missing"
            best = replace(best, step=0, loss=math.inf)
        self.console.notice(line)
        return best

    def _link_seconds(self, step_batch: StepBatch) -> float | None:
        """Return the seconds that the busiest link of a node needs for the bytes of a step at the measured rate.

        The bytes are predicted. The result is computed once for each form of batches and then kept.

        Returns:
            the seconds; None if no plan has measured a rate, on one node, and on ranks other than 0.
        """
        if self._machine is None or self.world.nodes.num_nodes == 1:
            return None
        packs = step_batch.batch.packs
        shape = () if packs is None else packs.shape
        if shape not in self._link_s:
            pipeline, batch = self.pipeline, self._batches.shape
            costs = pipeline.costs(batch.rows, batch.row_tokens) if packs is None else pipeline.costs_of_packs(packs)
            self._link_s[shape] = self._machine.link_s(costs.link_sent_bytes, costs.link_received_bytes)
        return self._link_s[shape]

    def _mfu(self, done: _Pending, seconds: float) -> float | None:
        """Return the model FLOPs utilisation (MFU) of a step that took ``seconds``.

        It covers all ranks if every rank knows all documents. Otherwise it covers the ranks that compute this rank's
        rows.

        Returns:
            the MFU; None if the FLOPs of the model are not known.
        """
        batch = done.step_batch.batch
        if batch.packs is not None:
            lengths, ranks = list(batch.packs.lengths), self.world.size
        else:
            lengths = [length for micro_batch in batch.micro_batches for length in micro_batch.lengths]
            ranks = self.pipeline.ranks_of_a_row
        flops = chain_flops(self.pipeline.chain, lengths) if lengths else None
        return None if flops is None else mfu(flops, seconds, peak=self._peak, num_devices=ranks)


def _due(every: int, step: int, *, last: bool) -> bool:
    """Return True if work that is done after every ``every`` steps is due after ``step``.

    Args:
        every: 0 means never.
        last: True if this is the last step, after which the work is always due.
    """
    return every > 0 and (last or step % every == 0)
