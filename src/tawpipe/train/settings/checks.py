"""Checks of settings before anything large is loaded, so that a run is refused at once.

Every check raises UserError with the name of the setting as the user writes it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import takewhile
from pathlib import Path

from tawpipe.environment import LaunchEnvironment, restart_count, started_by_local_launcher
from tawpipe.errors import UserError
from tawpipe.launch.gpus import Gpu
from tawpipe.options import Open
from tawpipe.runtime.watch.faults import Fault, parse_faults
from tawpipe.schedule.pipelines.strategy import parse_order
from tawpipe.schedule.pipelines.times import parse_times
from tawpipe.schedule.settings import ScheduleSettings, parse_homes
from tawpipe.schedule.strategies.table import strategies
from tawpipe.streams import check_text
from tawpipe.train.settings.config import SHAPES, TAKES, OptimizerConfig, TrainConfig, train_options
from tawpipe.train.settings.trackers import check_trackers

RUN_FILES = ("config.yaml", "metrics.jsonl", "checkpoints")
"""Names that a run writes into its output folder. A folder with one of them belongs to a run."""


def validate(config: TrainConfig, *, gpus: Sequence[Gpu] = (), environ: Mapping[str, str] = os.environ) -> None:
    """Check all settings, and raise UserError for the first one that cannot work.

    Files and folders are checked on rank 0 only.

    Args:
        gpus: GPUs that this process may use.
        environ: environment variables, including a launcher's if one started this process.
    """
    check_plannable(config)
    if config.lora.adapter and _reads_files(environ) and not Path(config.lora.adapter).expanduser().is_dir():
        raise UserError("--lora.adapter", config.lora.adapter, "a folder with an adapter of peft")
    if config.export.merge and not config.lora.active:
        raise UserError(
            "--export.merge", True, ("false without --lora.rank or --lora.adapter: there is no adapter to merge")
        )
    check_format(config, "--export.format")
    if config.plan not in ("none", "auto") and _reads_files(environ) and not Path(config.plan).is_file():
        raise UserError("--plan", config.plan, "none, auto, or a file that `tawpipe plan --save` wrote")
    if config.report and _reads_files(environ):
        from tawpipe.report.page import check_page

        inside = Path(config.report).absolute().is_relative_to(config.output_path.absolute())
        check_page(config.report, makes_folder=inside)
    for prompt in config.sample.prompt:
        check_text("--sample.prompt", prompt)
    check_steps(config)
    check_trackers(config.log.trackers, here=_reads_files(environ))
    if config.checkpoint.memory_every and not Path(config.checkpoint.memory_dir).is_dir():
        raise UserError("--checkpoint.memory-dir", config.checkpoint.memory_dir, "a folder, on every machine")
    if (folder := config.schedule.offload_dir) and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        raise UserError("--schedule.offload-dir", folder, "a folder that every process can write to, on every machine")
    if config.optimizer.nonfinite == "skip" and config.schedule.early_updates:
        expected = "stop under --schedule.early-updates, whose updates do not wait for the check"
        raise UserError("--optimizer.nonfinite", "skip", expected)
    if (buckets := config.evaluation.by_position) and not config.evaluation.every:
        raise UserError("--evaluation.by-position", buckets, "0 while --evaluation.every is 0: nothing is evaluated")
    if (lengths := config.evaluation.retrieval_lengths) and not config.evaluation.every:
        expected = "none while --evaluation.every is 0: nothing is evaluated"
        raise UserError("--evaluation.retrieval-lengths", lengths, expected)
    if not config.steps and not config.evaluation.every:
        raise UserError("--steps", 0, "at least 1 while --evaluation.every is 0: nothing is evaluated")
    is_preset = "/" not in config.model and not Path(config.model).is_dir()
    if is_preset and config.resume == "none":  # random weights: open lengths get their default values
        check_lengths(replace(config, sequence_length=int(config.sequence_length)))
    else:
        check_lengths(config)
    _check_device(config, gpus)
    _check_processes(config, environ)
    _check_resume(config)


def check_plannable(config: TrainConfig) -> None:
    """Check the settings that a plan and a run need alike, independent of the machine.

    Raises:
        UserError: for the first setting that cannot work.
    """
    check_bounds(config)
    config.check_data()
    config.rope.check()
    config.lora.check()
    if config.quantize not in ("auto", "none") and not (config.lora.active or config.freeze):
        expected = (
            "none unless something is frozen (--lora.rank trains an adapter alone, --freeze names frozen parameters)"
        )
        raise UserError("--quantize", config.quantize, expected)
    if config.schedule.strategy not in (known := strategies()):
        raise UserError("--schedule.strategy", config.schedule.strategy, f"one of {', '.join(known)}")
    parse_homes(config.schedule.homes)
    known[config.schedule.strategy].configured(config.schedule)
    if config.schedule.block_times:
        parse_times(config.schedule.block_times)
    if config.schedule.pipeline_order:
        parse_order(config.schedule.pipeline_order)
    _check_optimizer(config)
    if config.micro_batch > config.global_batch:
        raise UserError("--micro-batch", config.micro_batch, f"at most --global-batch, which is {config.global_batch}")


def check_lengths(config: TrainConfig) -> None:
    """Check that lengths, packing and micro-batch go together.

    Open lengths are not checked: the check is called again when they are settled.

    Raises:
        UserError: a retrieval check or a document is too long, or a setting belongs to another packing.
    """
    known = not isinstance(config.sequence_length, Open)
    lengths = config.evaluation.retrieval_lengths
    if known and lengths and max(lengths) > config.document_tokens:
        setting = "max-document" if config.max_document else "sequence-length"
        expected = f"at most --{setting}, which is {config.document_tokens}"
        raise UserError("--evaluation.retrieval-lengths", max(lengths), expected)
    if not (asked := config.asks_for_balance) and config.packing != "balanced":
        return
    if config.packing not in ("auto", "balanced"):
        expected = f"balanced, which {asked} needs; without it rows have --sequence-length tokens"
        raise UserError("--packing", config.packing, expected)
    if config.micro_batch > 1:
        expected = "1 under --packing balanced, where one row holds as many documents as --bin-tokens allows"
        raise UserError("--micro-batch", config.micro_batch, expected)
    if known and (tokens := config.step_tokens) < (longest := config.document_tokens):
        if config.max_document is not None and config.tokens_per_step is None:
            expected = f"at most {tokens}, the tokens of a step; or --tokens-per-step {longest} or more"
            raise UserError("--max-document", longest, expected)
        setting = "--sequence-length" if config.max_document is None else "--max-document"
        expected = f"at least {longest}, the tokens of a document ({setting}); or --max-document {tokens}"
        raise UserError("--tokens-per-step", tokens, expected)


def check_steps(config: TrainConfig) -> None:
    """Check that decay, trace and faults lie within the run's steps.

    An open number of steps is not checked: the check is called again when the number is settled.

    Raises:
        UserError: one of them lies outside.
    """
    if isinstance(config.steps, Open):
        parse_faults(config.inject)
        return
    optimizer = config.optimizer
    if optimizer.decay_steps is not None and optimizer.decay_steps + optimizer.warmup_steps > config.steps > 0:
        expected = f"at most --steps without the warm-up, which is {config.steps - optimizer.warmup_steps}"
        raise UserError("--optimizer.decay-steps", optimizer.decay_steps, expected)
    if config.log.trace_step > config.steps:
        raise UserError("--log.trace-step", config.log.trace_step, f"at most --steps, which is {config.steps}")
    _check_faults(config)


def _check_optimizer(config: TrainConfig) -> None:
    """Raise UserError for options that the optimizer does not use, and for options that contradict each other."""
    settings, usual = config.optimizer, OptimizerConfig()
    if config.epochs is not None and not isinstance(config.steps, Open):
        raise UserError(
            "--epochs", config.epochs, ("unset with --steps, or --steps unset: both set the length of the run")
        )
    if config.epochs is not None and config.streaming:
        raise UserError("--epochs", config.epochs, "--steps with --streaming: the length of a stream is unknown")
    if settings.warmup_ratio is not None and not isinstance(settings.warmup_steps, Open):
        expected = "unset with --optimizer.warmup-steps: both set the length of the warm-up"
        raise UserError("--optimizer.warmup-ratio", settings.warmup_ratio, expected)
    takes = TAKES[settings.name]
    for name in sorted({option for options in TAKES.values() for option in options} - set(takes)):
        if (value := getattr(settings, name)) != getattr(usual, name):
            has = ", ".join(other for other, options in TAKES.items() if name in options)
            expected = f"unset under --optimizer.name {settings.name}; only {has} have it"
            raise UserError(f"--optimizer.{name.replace('_', '-')}", value, expected)
    for name, schedules in SHAPES.items():
        if (value := getattr(settings, name)) is not None and settings.schedule not in schedules:
            expected = f"unset under --optimizer.schedule {settings.schedule}; only {', '.join(schedules)} has it"
            raise UserError(f"--optimizer.{name.replace('_', '-')}", value, expected)
    if settings.name == "sgd" and isinstance(config.learning_rate, Open):
        raise UserError("--learning-rate", "null", "a number under --optimizer.name sgd, for which none is usual")


def _check_faults(config: TrainConfig) -> None:
    """Raise UserError for faults that could never happen, as a test would count them as survived."""
    every = config.checkpoint.every
    for fault in parse_faults(config.inject):
        if fault.place != "load" and fault.step > config.steps:
            raise UserError("--inject", f"step={fault.step}", f"a step up to --steps, which is {config.steps}")
        if fault.place == "save" and (not every or (fault.step != config.steps and fault.step % every)):
            saved = f"a step that is saved, every {every}th or the last" if every else "--checkpoint.every above 0"
            raise UserError("--inject", f"step={fault.step},at=save", saved)
        if started_by_local_launcher() and fault.restart > config.max_restarts:
            expected = f"at most --max-restarts, which is {config.max_restarts}"
            raise UserError("--inject", f"restart={fault.restart}", expected)


def faults_of(config: TrainConfig, world_size: int) -> tuple[Fault, ...]:
    """Return the faults that ``--inject`` asks for in a run of ``world_size`` processes; empty if there are none.

    Raises:
        UserError: a fault names a rank that does not exist.
    """
    faults = parse_faults(config.inject)
    for fault in faults:
        if fault.rank >= world_size:
            raise UserError("--inject", f"rank={fault.rank}", f"one of the {world_size} ranks, from 0")
    return faults


def _reads_files(environ: Mapping[str, str]) -> bool:
    """Return True if this process is rank 0 or the only one. Other processes may not see the files."""
    return environ.get("RANK", "0") == "0"


def check_bounds(config: TrainConfig) -> None:
    """Check that every number is within the bounds of its setting.

    Raises:
        UserError: for the first one that is not.
    """
    for path, leaf in train_options().leaves.items():
        leaf.check(reduce(getattr, path, config))


def check_schedule(settings: ScheduleSettings) -> None:
    """Check that the numbers of ``settings``, which a plan gives, are within their bounds; raise UserError if not."""
    for (group, *names), leaf in train_options().leaves.items():
        if group == "schedule":
            leaf.check(reduce(getattr, names, settings))


def _check_device(config: TrainConfig, gpus: Sequence[Gpu]) -> None:
    """Raise UserError if there is no GPU for ``--device cuda``, or if a GPU does not compute in bfloat16."""
    if config.device == "cuda" and not gpus:
        raise UserError("--device", config.device, "cpu or auto, because no GPU can be used here")
    if config.device != "cpu" and config.dtype == "bfloat16":
        for gpu in gpus:
            if gpu.capability is not None and gpu.capability < 8.0:
                raise UserError("--dtype", config.dtype, f"float32 on {gpu.name}, which does not compute in bfloat16")


def _check_processes(config: TrainConfig, environ: Mapping[str, str]) -> None:
    """Raise UserError if ``nodes``, ``nproc`` or ``virtual_nodes`` does not suit the launcher in ``environ``."""
    launched = LaunchEnvironment.read(environ)
    by_torchrun = launched is not None and not started_by_local_launcher(environ)
    if config.virtual_nodes and not by_torchrun:
        raise UserError("--virtual-nodes", True, "used under torchrun only; here --nodes alone groups the processes")
    if launched is None or not by_torchrun:
        return
    if not config.virtual_nodes:
        for option, value in (("--nodes", config.nodes), ("--nproc", config.nproc)):
            if value is not None:
                raise UserError(option, value, "unset under torchrun, which starts processes; or add --virtual-nodes")
    if config.nproc is not None and config.nproc != launched.world_size:
        raise UserError("--nproc", config.nproc, f"{launched.world_size}, as many as torchrun started")
    if config.nodes is not None and launched.world_size % config.nodes:
        raise UserError("--nodes", config.nodes, f"a divisor of the {launched.world_size} processes")


def _check_resume(config: TrainConfig) -> None:
    """Raise UserError if ``resume`` is no checkpoint folder, or is ``auto`` with an output folder not yet named."""
    if restart_count():  # a restart resumes from any checkpoint; the run may have deleted its first one
        return
    if config.resume == "auto" and "{time}" in config.output:
        raise UserError("--resume", config.resume, "used with --output, which names the folder of the run to resume")
    if config.resume not in ("none", "auto") and not Path(config.resume).is_dir():
        raise UserError("--resume", config.resume, "none, auto, or the folder of a checkpoint")


def check_output_name(config: TrainConfig) -> None:
    """Check that the name of the output folder does not contain ``{time}``. Every process may call this.

    Raises:
        UserError: it does.
    """
    if "{time}" in config.output:
        raise UserError("--output", config.output, "a folder named in full under torchrun, the same for all processes")


def check_output(config: TrainConfig, *, make: bool = True) -> list[Path]:
    """Check that the output folder can be written to and belongs to no other run, and make the folder.

    Only one process may call this.

    Args:
        make: False makes no folder: it is enough that the folder could be made.

    Returns:
        the folders that were made, the innermost first.

    Raises:
        UserError: the folder cannot be used, or its name still contains ``{time}``.
    """
    folder = config.output_path
    check_output_name(config)
    held = [name for name in RUN_FILES if (folder / name).exists()]
    if held and not _goes_on_in(config, folder):
        expected = f"a folder without a run (this one holds {held[0]}); or --resume auto to continue that run"
        raise UserError("--output", config.output, expected)
    if config.export.enabled:
        refuse_replacing(config, folder / "model", "--output")
        if not held and (folder / "model").exists() and not _is_empty(folder / "model"):
            expected = "a folder without model/, which the run writes; or --export.enabled false"
            raise UserError("--output", config.output, expected)
    if not make:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            raise UserError("--output", config.output, f"a folder that can be written to ({existing} cannot)")
        return []
    new_folders = list(takewhile(lambda path: not path.exists(), (folder.absolute(), *folder.absolute().parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError("--output", config.output, f"a folder that can be written to ({error.strerror})") from error
    return new_folders


def check_format(config: TrainConfig, setting: str) -> None:
    """Raise UserError if an adapter alone is to be exported in few bits.

    Args:
        setting: name of the setting for the message.
    """
    if config.export.format != "hf" and config.lora.active and not config.export.merge:
        raise UserError(
            setting, config.export.format, ("hf, or a merged adapter: quantised forms are for a whole model")
        )


def refuse_replacing(config: TrainConfig, exported: Path, setting: str) -> None:
    """Raise UserError if the export to ``exported`` would replace the model or adapter folder that the run reads.

    Args:
        setting: name of the setting for the message.
    """
    for option, name in (("--model", config.model), ("--lora.adapter", config.lora.adapter)):
        if name and Path(name).expanduser().is_dir() and Path(name).expanduser().resolve() == exported.resolve():
            raise UserError(setting, str(exported), f"another folder: {option} is read from this one")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _goes_on_in(config: TrainConfig, folder: Path) -> bool:
    """Return True if the run resumes in ``folder``: by ``--resume``, or after a restart of its processes."""
    if restart_count():
        return True  # the processes before the restart have made the folder
    if config.resume in ("none", "auto"):
        return config.resume == "auto"
    return Path(config.resume).resolve().is_relative_to(folder.resolve())
