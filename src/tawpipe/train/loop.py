"""The training run: from settings to a trained model in a folder. Imports data, model, pipeline and the rest of train.

``run`` reads as a recipe; every process of the run calls it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version

import torch

from tawpipe.data.collate import collate
from tawpipe.data.prefetch import prefetch
from tawpipe.data.prepare import PreparedData, changed_parts, prepare_data
from tawpipe.data.rows import RowSource
from tawpipe.data.tokenizer import check_vocabulary, vocabulary_size
from tawpipe.errors import RunError, UserError
from tawpipe.launch import started_by_local_launcher
from tawpipe.model.build import build_model, resolve_model
from tawpipe.pipeline import LocalBatch, Pipeline
from tawpipe.runtime.executor import StepResult
from tawpipe.runtime.optimizer import adamw
from tawpipe.runtime.world import World, connect
from tawpipe.train.checkpoint import Checkpoints, RunState, read_run
from tawpipe.train.config import TrainConfig, save_config
from tawpipe.train.console import Console, duration
from tawpipe.train.generate import generate
from tawpipe.train.metrics import MetricsWriter, mfu, peak_flops, peak_memory_bytes, training_flops

BUILDERS = {"flat": "flat", "hsdp": "hybrid", "weipipe": "ring"}
"""Builders that fix the placement."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def run(config: TrainConfig) -> int:
    """Train as ``config`` says; the exit code of the process. Every process of the run calls it."""
    started = time.perf_counter()
    world = connect(
        nodes=config.nodes if config.virtual_nodes and not started_by_local_launcher() else None,
        device=config.device,
        timeout=timedelta(seconds=config.timeouts.first_step_s),
    )
    console = Console(world.rank)
    console.topology(f"{world.topology} on {_device_name(world)}")
    data = _prepare_data(config, world, console)
    pipeline = _make_pipeline(config, world, data)
    checkpoints = Checkpoints(config.output_path / "checkpoints", world, keep=config.checkpoint.keep)
    state = _resume(config, world, console, pipeline, checkpoints, data)
    if world.rank == 0:
        save_config(config, config.output_path / "config.yaml")
    console.plan(_plan_rows(config, pipeline))

    training = _Training(config, world, console, pipeline, data, checkpoints, state)
    seconds = training.run()

    done = max(0, config.steps - training.first)
    results = [("steps", f"{done} in {duration(seconds)}" + (f", up to {config.steps}" if training.first else ""))]
    if training.validation_loss is not None:
        results.append(("validation loss", f"{training.validation_loss:.4f}"))
    memory = world.gather_numbers(peak_memory_bytes(world.device.type))
    results.append(("peak memory per process", ", ".join(f"{gib(m)}" for m in memory)))
    if config.sample.tokens:
        results.append(("sample", _sample(config, pipeline, data)))
    if config.export.enabled:
        folder = pipeline.export(
            config.output_path / "model",
            dtype=DTYPES[config.export.dtype],
            max_shard_bytes=config.export.max_shard_mib * 2**20,
            tokenizer=data.tokenizer,
        )
        results.append(("model", str(folder)))
    results.append(("whole run", duration(time.perf_counter() - started)))
    console.summary(results)
    pipeline.close()
    world.leave()
    return 0


def gib(number: float) -> str:
    """Bytes in the unit that people read.

    >>> gib(3 * 2**30), gib(5 * 2**20)
    ('3.00 GiB', '5.0 MiB')
    """
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def learning_rate_factor(step: int, *, steps: int, warmup: int, least: float) -> float:
    """What the highest learning rate is multiplied with in step 0, 1, ...: linear warm-up, then a cosine down to
    ``least``.

    >>> [round(learning_rate_factor(s, steps=10, warmup=2, least=0.1), 2) for s in (0, 1, 2, 9)]
    [0.5, 1.0, 1.0, 0.13]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"


def _prepare_data(config: TrainConfig, world: World, console: Console) -> PreparedData:
    world.require_same(repr(config), "settings", "the same on every machine")
    folder = resolve_model(config.model)
    data = prepare_data(
        config,
        sequence_length=config.sequence_length,
        seed=config.seed,
        model=None if folder is None else str(folder),
        leader=world.topology.local_of(world.rank) == 0 and (world.rank == 0 or not started_by_local_launcher()),
        barrier=world.wait_patiently,
    )
    world.require_same(data.fingerprint, "--data", "the same files and tokenizer on every machine")
    for line in data.report.lines():
        console.line(line)
    return data


def _make_pipeline(config: TrainConfig, world: World, data: PreparedData) -> Pipeline:
    built = build_model(
        config.model,
        vocab_size=vocabulary_size(data.tokenizer),
        max_positions=config.sequence_length,
        trust_remote_code=config.trust_remote_code,
    )
    check_vocabulary(data.tokenizer, built.model.config.get_text_config().vocab_size)
    chosen, dtype = config.schedule, DTYPES[config.dtype]
    settings = config.optimizer
    pipeline = Pipeline(
        built.model,
        weights=lambda chain: built.source(chain, seed=config.seed),
        optimizer=adamw(
            config.learning_rate,
            weight_decay=settings.weight_decay,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
        ),
        micro_batch=config.micro_batch,
        micro_batches_per_visit=chosen.micro_batches_per_visit,
        placement=BUILDERS.get(chosen.builder, chosen.placement),
        look_ahead=chosen.look_ahead,
        gradient_buffers=chosen.gradient_buffers,
        weights_scope=chosen.weights_scope,
        gradients_scope=chosen.gradients_scope,
        dtype=dtype,
        reduce_dtype=dtype if chosen.reduce_dtype == "same" else None,
        clip_norm=settings.clip_norm or None,
        chunk_tokens=chosen.loss_chunk_tokens,
        seed=config.seed,
        world=world,
        strict=config.strict,
        timeout=timedelta(seconds=config.timeouts.first_step_s),
    )
    pipeline.schedule(config.global_batch)
    return pipeline


def _resume(
    config: TrainConfig,
    world: World,
    console: Console,
    pipeline: Pipeline,
    checkpoints: Checkpoints,
    data: PreparedData,
) -> RunState | None:
    path = checkpoints.find(config.resume)
    if path is None:
        if config.resume == "auto":
            console.notice(f"no complete checkpoint in {checkpoints.folder}; starting anew")
        return None
    state = read_run(path)
    if state.seed != config.seed:
        raise UserError("--seed", config.seed, f"{state.seed}, as in the checkpoint {path}")
    pipeline.load(path)
    console.notice(f"resumed from {path}: step {state.step}, {state.samples} samples consumed")
    if changed := changed_parts(state.fingerprint, data.fingerprint):
        console.notice(f"the data has changed since then ({', '.join(changed)}): sample numbers now mean other samples")
    if state.data_state and not changed:
        data.train.load_state_dict(state.data_state)
    if state.step >= config.steps:
        console.notice(f"--steps {config.steps} are done already")
    return state


def _plan_rows(config: TrainConfig, pipeline: Pipeline) -> list[tuple[str, str]]:
    """What is about to happen and what it costs, before the first step."""
    said = pipeline.costs(config.global_batch, config.sequence_length)
    rows = [
        ("model", f"{config.model}: {said.parameters / 1e6:.1f} M parameters, {said.trainable / 1e6:.1f} M trained"),
        (
            "batch",
            f"{config.global_batch} sequences x {config.sequence_length} tokens, micro-batches of {config.micro_batch}",
        ),
        ("strategy", said.strategy),
        ("schedule", said.schedule),
    ]
    if pipeline.world.topology.num_nodes > 1:
        most = max(said.link_sent_bytes)
        rows.append(("link of a node", f"{gib(most)} sent and {gib(max(said.link_received_bytes))} received per step"))
    rows += [
        ("homes", f"{gib(said.home_bytes)} per process: weights, gradients, optimizer state"),
        ("buffers", f"{gib(said.buffer_bytes)} per process: units on their way"),
        (
            "activations",
            f"{gib(said.activation_bytes)} per process, what one block needs while it computes not counted",
        ),
    ]
    return rows


def _sample(config: TrainConfig, pipeline: Pipeline, data: PreparedData) -> str:
    tokenizer = data.tokenizer
    prompt = tokenizer.encode(config.sample.prompt, add_special_tokens=False) or [0]
    stop = tokenizer.eos_token_id
    ids = generate(
        pipeline,
        prompt,
        tokens=config.sample.tokens,
        window=config.sequence_length,
        seed=config.seed,
        stop=stop if isinstance(stop, int) else None,
    )
    return repr(tokenizer.decode(ids, skip_special_tokens=True))


@dataclass
class _Pending:
    """A step whose numbers have not been read."""

    step: int
    result: StepResult
    rate: float
    lengths: list[int]


class _Training:
    """The loop over steps: batches, numbers, evaluation, checkpoints."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        console: Console,
        pipeline: Pipeline,
        data: PreparedData,
        checkpoints: Checkpoints,
        state: RunState | None,
    ) -> None:
        self.config, self.world, self.console = config, world, console
        self.pipeline, self.data, self.checkpoints = pipeline, data, checkpoints
        self.first = state.step if state else 0
        self.samples = state.samples if state else 0
        self.validation_loss: float | None = None
        self._pending: deque[_Pending] = deque()
        self._last = time.perf_counter()
        self._writer: MetricsWriter | None = None
        dtype = str(pipeline.dtype).removeprefix("torch.")
        self._peak = peak_flops(_device_name(world), dtype) if world.device.type == "cuda" else None

    def run(self) -> float:
        """All steps that are left; seconds they took."""
        config, pipeline = self.config, self.pipeline
        begin = self._last = time.perf_counter()
        if self.world.rank == 0:
            self._writer = MetricsWriter(
                config.output_path, tensorboard=config.log.tensorboard, resumed_step=self.first
            )
        try:
            with prefetch(self._batches(self.first, config.steps)) as batches:
                for step, batch in zip(range(self.first, config.steps), batches, strict=True):
                    self._step(step, batch)
            if config.steps > self.first:
                pipeline.drain()
            elif self.data.validation is not None and config.evaluation.every:
                self.validation_loss = self._evaluate()
        finally:
            if self._writer is not None:
                self._writer.close()
        return time.perf_counter() - begin

    def _step(self, step: int, batch: LocalBatch) -> None:
        config, pipeline = self.config, self.pipeline
        settings = config.optimizer
        factor = learning_rate_factor(
            step, steps=config.steps, warmup=settings.warmup_steps, least=settings.min_learning_rate_ratio
        )
        result = pipeline.step(batch, rate=factor)
        self.samples += config.global_batch
        lengths = [length for one in batch.micro_batches for length in one.lengths]
        self._pending.append(_Pending(step + 1, result, factor * config.learning_rate, lengths))
        last = step + 1 == config.steps
        evaluate = self.data.validation is not None and _due(config.evaluation.every, step + 1, last=last)
        save = _due(config.checkpoint.every, step + 1, last=last)
        # One step stays unread, so that the next one is issued before this one has ended.
        self._report(keep=0 if evaluate or save or last or step == self.first else 1, evaluate=evaluate)
        if step == self.first:
            pipeline.drain()
            pipeline.transport.set_timeout(timedelta(seconds=config.timeouts.step_s))
        if save:
            self.checkpoints.save(pipeline, self._state(step + 1))
            self._last = time.perf_counter()

    def _report(self, *, keep: int, evaluate: bool) -> None:
        """Read the numbers of finished steps; the newest gets the validation loss if it is to be measured."""
        while len(self._pending) > keep:
            done = self._pending.popleft()
            result = done.result
            if not result.finite:
                raise RunError(
                    f"step {done.step}: loss {result.loss}, gradient norm {result.grad_norm}; the update was left out. "
                    "Lower --learning-rate, or look at the data of this step"
                )
            now = time.perf_counter()
            seconds, self._last = now - self._last, now
            # Counts all tokens of the batch: masked ones are computed too.
            per_second = self.config.global_batch * self.config.sequence_length / seconds
            values: dict[str, float | int | None] = {
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
            extra = ""
            if evaluate and not self._pending:
                self.validation_loss = values["validation_loss"] = self._evaluate()
                self._last = time.perf_counter()
                extra = f"validation loss {self.validation_loss:.4f}"
            if self._writer is not None:
                self._writer.write(done.step, values)
            if extra or done.step % self.config.log.every == 0 or done.step in (self.first + 1, self.config.steps):
                self.console.progress(
                    done.step,
                    self.config.steps,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    tokens_per_second=per_second,
                    extra=extra,
                )

    def _evaluate(self) -> float:
        """Mean loss per token over the first batches of the held-out rows, always the same ones."""
        assert self.data.validation is not None
        rows = min(self.config.global_batch, len(self.data.validation))
        total, tokens = 0.0, 0
        batches = max(1, min(self.config.evaluation.batches, len(self.data.validation) // rows))
        for number in range(batches):
            result = self.pipeline.evaluate(self._batch(self.data.validation, number * rows, rows))
            total, tokens = total + result.loss * result.tokens, tokens + result.tokens
        return total / max(1, tokens)

    def _batches(self, first: int, last: int) -> Iterator[LocalBatch]:
        samples = self.samples
        for _ in range(first, last):
            yield self._batch(self.data.train, samples, self.config.global_batch)
            samples += self.config.global_batch

    def _batch(self, source: RowSource, begin: int, rows: int) -> LocalBatch:
        """This rank's part of the ``rows`` samples from ``begin`` on."""
        shares = self.pipeline.shares(rows)
        parts = [collate([source.sample(begin + row) for row in share.rows], share.index) for share in shares]
        if self.world.device.type == "cuda":
            parts = [part.pin_memory() for part in parts]
        return LocalBatch(rows, self.config.sequence_length, parts)

    def _state(self, step: int) -> RunState:
        return RunState(
            step=step,
            samples=self.samples,
            seed=self.config.seed,
            fingerprint=self.data.fingerprint,
            data_state=self.data.train.state_dict(self.samples),
            topology=str(self.world.topology),
            versions={name: version(name) for name in ("tawpipe", "torch", "transformers")},
        )

    def _mfu(self, done: _Pending, seconds: float) -> float | None:
        """Of this rank, whose documents stand for those of all; None for models whose FLOPs are not known here."""
        chain = self.pipeline.chain
        text = chain.config.get_text_config()
        uneven = ("num_experts", "num_local_experts", "n_routed_experts", "sliding_window")
        if not done.lengths or any(getattr(text, name, None) for name in uneven):
            return None
        width = text.num_attention_heads * (
            getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        )
        embedding = sum(chain.units[u].numel for u in chain.blocks[0].units if chain.units[u].blocks == (0,))
        flops = training_flops(
            matmul_parameters=sum(unit.numel for unit in chain.units) - embedding,
            num_layers=len(chain.blocks) - 2,
            attention_width=width,
            lengths=done.lengths,
        )
        return mfu(flops, seconds, peak=self._peak, num_devices=1)


def _due(every: int, step: int, *, last: bool) -> bool:
    return every > 0 and (last or step % every == 0)
