"""The training run: from settings to a trained model in a folder.

``run`` reads as a recipe; every process of the run calls it. What happens step by step stands in ``loop``.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import chain
from pathlib import Path

import torch

from tawpipe.checkpoint.format import step_name
from tawpipe.checkpoint.resume import Start, choose, examine, refuse_other_trained
from tawpipe.checkpoint.store import Disk, Memory, memory_root
from tawpipe.console import Console, duration
from tawpipe.data.lengths import Dealing
from tawpipe.data.prepare import prepare_data
from tawpipe.data.prepared import PreparedData, changed_parts
from tawpipe.data.rows import take
from tawpipe.data.tokenizer import check_vocabulary, vocabulary_size
from tawpipe.environment import restart_count, started_by_local_launcher
from tawpipe.errors import RunError, UserError
from tawpipe.files import replace_text
from tawpipe.model.adapters import adapter_facts
from tawpipe.model.attention_kernel import activate_flash, kernel_of_model
from tawpipe.model.build import BuiltModel, build_model, config_of, resolve_model
from tawpipe.model.chain import Chain
from tawpipe.model.flops import work_of
from tawpipe.model.merged import refuse_unmergeable
from tawpipe.model.pretrained import has_weights
from tawpipe.model.rope import refuse_other_rope, rope_of, rope_words
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.plan.predict import Needs
from tawpipe.runtime.dtype import AUTO, DTYPES, chosen_dtype
from tawpipe.runtime.faults import Injector, parse_faults
from tawpipe.runtime.world import World, connect
from tawpipe.schedule.balance import Bins, Work
from tawpipe.schedule.sets import share_in_sets
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.train.checks import check_longest_fits, check_steps, naming_documents
from tawpipe.train.config import TrainConfig, config_text, in_bins
from tawpipe.train.evaluation import Best, check_best, loss_words
from tawpipe.train.loop import Training
from tawpipe.train.memory import check_memory, with_room_to_keep
from tawpipe.train.metrics import last_step, peak_memory_bytes
from tawpipe.train.optimizers import factory_of
from tawpipe.train.planned import PLAN, Followed, check_model, follow_plan, work_of_plan
from tawpipe.train.recipe import settle, with_settled
from tawpipe.train.retrieval import retrieval_check

ROWS_LOOKED_AT = 15


def run(config: TrainConfig) -> int:
    """Train as ``config`` says; the exit code of the process. Every process of the run calls it."""
    started = time.perf_counter()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    world = connect(
        nodes=config.nodes if config.virtual_nodes and not started_by_local_launcher() else None,
        device=config.device,
        timeout=timedelta(seconds=config.timeouts.first_step_s),
    )
    console = Console(world.rank)
    console.topology(f"{world.nodes} on {_device_name(world)}")
    _ = share_in_sets(0, world.topology, config.schedule)  # before documents are dealt for the report
    given, data = config, _prepare_data(config, world, console)
    if data.report.packing == "balanced":
        config = in_bins(config, world.size)
        check_longest_fits(config, data.longest, data.report.longest[1])
    else:
        config = replace(config, packing=data.report.packing)
    # Agents of torchrun count by themselves: a node that joins later has seen no restart.
    restarts = int(max(world.gather_numbers(float(restart_count()))))
    faults = parse_faults(config.inject)
    if beyond := [fault for fault in faults if fault.rank >= world.size]:
        raise UserError("--inject", f"rank={beyond[0].rank}", f"one of the {world.size} ranks, from 0")
    injector = Injector(faults, world.rank, restart=restarts) if faults else None
    disk, memory = open_stores(config, world, injector)
    start = _choose_start(config, console, disk, memory, injector, restarts)
    earlier = start.state
    config, chosen = settle(
        config,
        _start_from(config),
        lambda epochs: data.steps_in(epochs, rows=config.global_batch, tokens=config.step_tokens),
        earlier.settled if earlier is not None else None,
    )
    check_steps(config)
    given = with_settled(given, config)
    if chosen:
        console.line(chosen)
    vocab_size = vocabulary_size(data.tokenizer)
    dtype, why = chosen_dtype(config.dtype, world, earlier.dtype if earlier is not None else "")
    config = replace(config, dtype=dtype)
    activate_flash(world.device)
    followed = follow_plan(
        config,
        world,
        earlier,
        vocab_size=vocab_size,
        dtype=DTYPES[config.dtype],
        lengths=lambda: _typical_lengths(data, config),
        tell=console.line,
    )
    config, plan = followed.config, followed.text
    if followed.line:
        console.line(followed.line)
    needs = check_memory(
        config,
        world,
        vocab_size=vocab_size,
        dtype=DTYPES[config.dtype],
        lengths=_typical_lengths(data, config),
        request=followed.request,
        tell=console.notice,
    )
    config, needs = with_room_to_keep(config, world, needs)
    with naming_documents(config):
        built = _build(config, vocab_size=vocab_size, longest=data.longest)
    if config.export.enabled and config.export.merge:
        refuse_unmergeable(built.model)
    retrieval = retrieval_check(config, data, built.model.config)
    check_best(config, validation=data.validation is not None)
    if not config.steps and data.validation is None and retrieval is None:
        raise UserError("--steps", 0, "at least 1 without validation data: there is nothing to evaluate on")
    pipeline = _make_pipeline(config, world, data, built, injector, followed)
    if pipeline.checked:
        console.line(pipeline.checked)
    check_model(plan, pipeline.spec)
    if earlier is not None:
        _resume(config, console, pipeline, start, data)
    else:
        if config.resume == "auto" or restarts:
            console.notice(f"no sound checkpoint in {disk.folder}; starting anew")
        console.line(f"weights: {built.origin(seed=config.seed)}")
    if built.adapter_words:
        console.line(f"adapter: {built.adapter_words}")
    if world.rank == 0:
        start.mark.write(config.output_path)
        _save_settings(given, plan, console)
    for name in _without_effect(config, world):
        console.notice(f"--schedule.{name.replace('_', '-')} has no effect on one node: nothing crosses a slow link")
    text, names = pipeline.chain.config.get_text_config(), pipeline.parameter_names
    kernel = kernel_of_model(text, names, world.device, pipeline.dtype)
    computing = [("dtype", f"{dtype} ({why})"), ("attention", kernel)]
    if config.rope.changes:
        computing.append(("rotary positions", rope_words(text)))
    before = _plan_rows(config, pipeline, data, earlier.samples if earlier else 0, needs, computing)
    console.plan(before)

    training = Training(
        config, world, console, pipeline, data, disk, earlier, plan=plan, memory=memory, check=retrieval
    )
    seconds = training.run()

    done, evaluation, saves = training.last - training.first, training.evaluation, training.saves
    results = [("steps", f"{done} in {duration(seconds)}" + (f", up to {training.last}" if training.first else ""))]
    if evaluation.exhausted:
        results.append(("ended early", f"{evaluation.best.since} evaluations in a row have not lowered the loss"))
    if saves.stall_s is not None:
        results.append(("stood still for a checkpoint", f"at most {saves.stall_s * 1e3:.0f} ms"))
    if evaluation.loss is not None:
        results.append(("validation loss", loss_words(evaluation.loss)))
    if known := {edge: loss for edge, loss in evaluation.by_position.items() if loss is not None}:
        results.append(("by tokens before", ", ".join(f"to {edge}: {loss:.4f}" for edge, loss in known.items())))
    if evaluation.retrieval is not None:
        results.append(("retrieval", str(evaluation.retrieval)))
    passes = ", ".join(f"{times:.2f} of {name}" for name, times in data.passes(training.samples))
    results.append(("passes of the data", passes))
    peaks = world.gather_numbers(peak_memory_bytes(world.device.type))
    results.append(("peak memory per process", ", ".join(f"{gib(peak)}" for peak in peaks)))
    stopped = training.stopped is not None and training.last < config.steps
    of_step = training.last
    if config.checkpoint.best and evaluation.best.step and not stopped:
        of_step, words = _go_back_to_best(pipeline, disk, evaluation.best, training.last)
        results.append(("best", words))
    if config.sample.tokens and not stopped:
        results += [("sample", str(one)) for one in training.texts.write(of_step)]
    if config.export.enabled and training.last and not stopped:
        named, merge = config.export.dtype, config.export.merge
        folder = pipeline.export(
            config.output_path / "model",
            dtype=built.dtype_on_disk(merge=merge) if named == AUTO else DTYPES[named],
            merge=merge,
            max_shard_bytes=config.export.max_shard_mib * 2**20,
            tokenizer=data.tokenizer,
        )
        results.append(("model", str(folder)))
    results.append(("whole run", duration(time.perf_counter() - started)))
    if config.report and world.rank == 0:
        from tawpipe.train.page import write_run_page

        write_run_page(Path(config.report), config, before, results, evaluation.retrieval, data.report)
        results.append(("page", config.report))
    console.summary(results)
    if stopped:
        assert training.stopped is not None
        then = "" if saves.unsaved else "; --resume auto goes on from there"
        console.notice(f"stopped by {training.stopped.name} after step {training.last}{then}")
    pipeline.close()
    if memory is not None and not saves.unsaved:
        memory.remove()
    world.leave()
    if saves.unsaved:
        raise RunError(f"the last checkpoint could not be written: {saves.unsaved}")
    return 0


def _save_settings(config: TrainConfig, plan: str, console: Console) -> None:
    """Write the settings and the plan beside the metrics; a run can do without these files."""
    try:
        config.output_path.mkdir(parents=True, exist_ok=True)
        replace_text(config.output_path / "config.yaml", config_text(config))
        if plan:
            replace_text(config.output_path / PLAN, plan)
        else:
            (config.output_path / PLAN).unlink(missing_ok=True)  # of the run that is gone on with
    except OSError as error:
        console.notice(f"{error.filename} could not be written: {error.strerror}")


def open_stores(config: TrainConfig, world: World, injector: Injector | None = None) -> tuple[Disk, Memory | None]:
    """The stores of this run's states. Without one in memory, what earlier runs in this folder left there goes."""
    settings = config.checkpoint
    folder = config.output_path / "checkpoints"
    disk = Disk(folder, world, keep=settings.keep, keep_every=settings.keep_every, injector=injector)
    root = memory_root(Path(settings.memory_dir), config.output_path)
    if settings.memory_every:
        return disk, Memory(root, world, world.with_group("copies", timedelta(days=7)))
    shutil.rmtree(root, ignore_errors=True)
    return disk, None


def _choose_start(
    config: TrainConfig, console: Console, disk: Disk, memory: Memory | None, injector: Injector | None, restarts: int
) -> Start:
    if injector is not None:
        injector.before_load()
    start = choose(config.output_path, config.resume, disk, memory, restarts=restarts)
    for words in start.passed_over:
        console.notice(f"passed over {words}")
    if restarts and disk.leads:
        reached, first = last_step(config.output_path), start.state.step if start.state else 0
        console.notice(f"restart {restarts}: {max(0, reached - first)} steps, from {first + 1} on, are repeated")
    return start


def gib(number: float) -> str:
    """Bytes in the unit that people read.

    >>> gib(3 * 2**30), gib(5 * 2**20)
    ('3.00 GiB', '5.0 MiB')
    """
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"


def _prepare_data(config: TrainConfig, world: World, console: Console) -> PreparedData:
    world.require_same(repr(config), "settings", "the same on every machine")
    folder = resolve_model(config.model)
    if config.rope.changes:  # refused before documents are tokenised, whose lengths are not known yet
        config_of(config.model, folder, None, config.document_tokens, 1, config.rope, config.trust_remote_code)
    if config.lora.active and (folder is None or not has_weights(folder)):
        raise UserError("--model", config.model, "a model with weights: an adapter on random ones is of no use later")
    if config.lora.active or config.freeze:  # refused before documents are tokenised, too
        _build(config, longest=1)
    data = prepare_data(
        config,
        sequence_length=config.sequence_length,
        seed=config.seed,
        max_document=config.max_document,
        dealing=_dealing(config, world, folder),
        model=None if folder is None else str(folder),
        leader=world.nodes.local_of(world.rank) == 0 and (world.rank == 0 or not started_by_local_launcher()),
        barrier=world.wait_patiently,
    )
    world.require_same(data.fingerprint, "--data", "the same files and tokenizer on every machine")
    for line in data.report.lines():
        console.line(line)
    return data


def _start_from(config: TrainConfig) -> str:
    """What the run starts from: one of ``recipe.RECIPES``."""
    if config.lora.active:
        return "adapter"
    folder = resolve_model(config.model)
    return "weights" if folder is not None and has_weights(folder) else "random"


def _build(config: TrainConfig, *, longest: int | None, vocab_size: int | None = None) -> BuiltModel:
    """The model as the settings ask for it.

    Args:
        longest: tokens of the longest document; 1 where it is not known yet.
    """
    return build_model(
        config.model,
        vocab_size=vocab_size,
        max_positions=config.document_tokens,
        longest=longest,
        rope=config.rope,
        lora=config.lora,
        frozen=config.freeze,
        trust_remote_code=config.trust_remote_code,
    )


def _dealing(config: TrainConfig, world: World, folder: Path | None) -> Dealing:
    """The steps of the run, should its documents be dealt."""

    @cache
    def work() -> Work:
        return work_of(Chain(_build(config, longest=1).model))

    against = ""
    if config.micro_batch > 1:
        against = "--micro-batch is above 1, and documents that are dealt come in rows of their own"
    elif config.compile:
        against = "--compile would compile rows of every length"
    elif config.plan not in ("none", "auto"):
        against = "--plan names a plan, which is for rows of one length"
    bins = in_bins(config, world.size)
    assert bins.bin_tokens is not None
    return Dealing(
        config.step_tokens,
        world.size,
        bins.bin_tokens,
        work,
        ranks=config.schedule.sequence_ranks or 1,
        pretrained=folder is not None and has_weights(folder),
        asked=config.asks_for_balance,
        against="" if config.asks_for_balance else against,
    )


def _typical_lengths(data: PreparedData, config: TrainConfig) -> list[int]:
    """Lengths of the documents in one of the first rows, whose attention is neither the least nor the most work."""
    sequence_length = config.sequence_length
    if config.packing == "balanced":
        lengths = iter(data.train.step(0, max(config.step_tokens, sequence_length)).lengths)
        rows = [take(chain([first], lengths), sequence_length) for first in lengths][:ROWS_LOOKED_AT]
    else:
        rows = [list(data.train.sample(number).lengths) for number in range(ROWS_LOOKED_AT)]
    rows = [[*row, sequence_length - sum(row)] if sum(row) < sequence_length else row for row in rows]
    return sorted(rows, key=lambda row: sum(length * length for length in row))[len(rows) // 2]


def _make_pipeline(
    config: TrainConfig,
    world: World,
    data: PreparedData,
    built: BuiltModel,
    injector: Injector | None,
    followed: Followed,
) -> Pipeline:
    check_vocabulary(data.tokenizer, built.model.config.get_text_config().vocab_size)
    settings = config.optimizer
    pipeline = Pipeline(
        built.model,
        weights=lambda chain: built.source(chain, seed=config.seed),
        optimizer=factory_of(config),
        micro_batch=config.micro_batch,
        bin_tokens=config.bin_tokens or 0,
        work=work_of_plan(followed.text),
        schedule=config.schedule,
        dtype=DTYPES[config.dtype],
        clip_norm=settings.clip_norm or None,
        compile_layers=config.compile,
        seed=config.seed,
        check=config.check,
        world=world,
        strict=config.strict,
        timeout=timedelta(seconds=config.timeouts.first_step_s),
        skip_limit=settings.skip_limit if settings.nonfinite == "skip" else 0,
        injector=injector,
    )
    pipeline.limit.predicted_s = followed.step_s
    pipeline.set_timeout(timedelta(seconds=config.timeouts.first_step_s))
    pipeline.record_hangs(config.output_path / "flight")
    if config.packing != "balanced":
        pipeline.schedule(config.global_batch)
    return pipeline


def _resume(config: TrainConfig, console: Console, pipeline: Pipeline, start: Start, data: PreparedData) -> None:
    state, place = start.state, start.place
    assert state is not None and start.source is not None
    if state.seed != config.seed:
        raise UserError("--seed", config.seed, f"{state.seed}, as in the checkpoint {place}")
    refuse_other_rope(state.rope, rope_of(pipeline.chain.config), f"the checkpoint {place}")
    refuse_other_trained(state, adapter_facts(pipeline.chain.given), config.freeze, f"the checkpoint {place}")
    pipeline.load(start.source)
    console.notice(f"weights: resumed from {place}: step {state.step}, {state.samples} samples consumed")
    if changed := changed_parts(state.fingerprint, data.fingerprint):
        console.notice(f"the data has changed since then ({', '.join(changed)}): sample numbers now mean other samples")
    if state.data_state and not changed:
        data.train.load_state_dict(state.data_state)
    if state.step >= config.steps:
        console.notice(f"--steps {config.steps} are done already")


def _go_back_to_best(pipeline: Pipeline, disk: Disk, best: Best, last: int) -> tuple[int, str]:
    """Load the state with the lowest validation loss, which is what is to be exported; the step of the model that there
    is now, and what was done, in words.
    """
    words = f"step {best.step}, validation loss {loss_words(best.loss)}"
    if best.step != last:
        try:
            pipeline.load(examine(disk, [disk.folder / step_name(best.step)]))
        except RunError as problem:
            return last, f"{words}, but its checkpoint cannot be loaded ({problem}): what follows is of step {last}"
        words += ": what follows is of its checkpoint"
    return best.step, words


def _without_effect(config: TrainConfig, world: World) -> list[str]:
    """Settings that were changed and do nothing here."""
    names = ("step_cache", "gradients_scope", "weights_compression", "gradients_compression")
    usual = ScheduleSettings()
    return [
        name for name in names if world.nodes.num_nodes == 1 and getattr(config.schedule, name) != getattr(usual, name)
    ]


def _batch_words(config: TrainConfig, data: PreparedData, bins: Bins | None) -> str:
    if bins is None:
        return (
            f"{config.global_batch} sequences x {config.sequence_length} tokens, micro-batches of {config.micro_batch}"
        )
    shared = f", {bins.shape[0]} of them of bins that {bins.ranks} processes share" if bins.shape[0] else ""
    modelled = f"; modelled imbalance of the first steps {found.after:.2f}" if (found := data.report.balance) else ""
    rounds = f"{sum(bins.shape)} round{'s' if sum(bins.shape) > 1 else ''}"
    return (
        f"documents of up to {config.document_tokens:,} tokens, {config.step_tokens:,} tokens a step; the next has "
        f"{len(bins.lengths):,} documents in {rounds}{shared}, bins of at most {config.bin_tokens:,} "
        f"tokens for each process{modelled}"
    )


def _plan_rows(
    config: TrainConfig,
    pipeline: Pipeline,
    data: PreparedData,
    samples: int,
    needs: Needs | None,
    computing: list[tuple[str, str]],
) -> list[tuple[str, str]]:
    """Rows that say what is about to happen and what it costs, before the first step.

    Args:
        samples: consumed so far.
        computing: rows that say what it computes in and with.
    """
    bins = None
    if config.packing == "balanced":
        bins = pipeline.deal(data.train.step(samples, config.step_tokens).lengths)
        said = pipeline.costs_of_bins(bins)
    else:
        said = pipeline.costs(config.global_batch, config.sequence_length)
    rows = [
        ("model", f"{config.model}: {said.parameters / 1e6:.1f} M parameters, {said.trainable / 1e6:.1f} M trained"),
        ("batch", _batch_words(config, data, bins)),
        *computing,
        ("strategy", said.strategy),
        ("schedule", said.schedule),
    ]
    if pipeline.world.nodes.num_nodes > 1:
        most = max(said.link_sent_bytes)
        rows.append(("link of a node", f"{gib(most)} sent and {gib(max(said.link_received_bytes))} received per step"))
    rows += [
        ("homes", f"{gib(said.home_bytes)} per process: weights, gradients, optimizer state"),
        ("buffers", f"{gib(said.buffer_bytes)} per process: units on their way"),
    ]
    if needs is None:
        words = "per process, what one block needs while it computes not counted"
        rows.append(("activations", f"{gib(said.activation_bytes)} {words}"))
    else:
        parts = needs.parts
        rows += [
            ("activations", f"{gib(parts['activations'])} per process: what layers keep for their backward passes"),
            ("working", f"{gib(parts['working'])} per process: what one block needs while it computes"),
            ("system", f"{gib(parts['system'])} per process: what libraries and the driver take"),
        ]
        if "kept" in parts:
            rows.append(("kept", f"up to {gib(parts['kept'])} per process: what need not be computed again then"))
        rows.append(("memory", f"{gib(needs.device)} per process at the highest, all of this together"))
    if said.host_bytes:
        rows.append(("host memory", f"{gib(said.host_bytes)} per process: inputs of layers that wait there"))
    return rows
