"""Setup of a pipeline before its first step: settings, refusals, initial values, homes, and the objects around them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta

import torch

from tawpipe.dealing.balance import LayerTime
from tawpipe.errors import UserError
from tawpipe.model.bits.quantized import NONE
from tawpipe.model.chain import Chain
from tawpipe.model.facts import Facts, config_facts
from tawpipe.model.files.pretrained import SafetensorsSource
from tawpipe.model.loss import loss_chunk
from tawpipe.model.weights import InitSource, ModuleSource, WeightSource
from tawpipe.pipeline.schedules import Schedules
from tawpipe.pipeline.sizes import widths_of
from tawpipe.runtime.alike import read_alike
from tawpipe.runtime.compute.compute import Compute
from tawpipe.runtime.dtype import AUTO, DTYPES, master_dtype, reduce_dtype
from tawpipe.runtime.executor import Executor
from tawpipe.runtime.homes.host_memory import free_memory, is_the_hosts, lock_limit
from tawpipe.runtime.homes.optimizer import OptimizerFactory
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers, refuse_cut_matrices, try_factory
from tawpipe.runtime.transport.transport import Transport
from tawpipe.runtime.watch.faults import Injector
from tawpipe.runtime.world import World
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.footprint import home_bytes
from tawpipe.schedule.step import StepSpec
from tawpipe.topology import Topology

CHOICES = ("auto", "always", "never")
"""Values of ``CheckSettings.check``."""

# settings


@dataclass(frozen=True)
class TrainingSettings:
    """How a ``Pipeline`` trains its model.

    Args:
        clip_norm: largest global gradient norm; None switches clipping off, but not the check for finite numbers, which
            ``ScheduleSettings.early_updates`` does: what is not finite has then reached the weights when ``step``,
            ``drain`` or ``save`` says so.
        skip_limit: most steps in a row whose loss or gradient norm is not finite and whose update is left out. One more
            is an error; with 0 the first is.
        seed: of initial weights and of dropout and the like, whose numbers depend on (seed, step, micro-batch, block)
            alone. torch's default generators are left to the caller.
        bin_tokens: of documents of uneven lengths, the most that a process computes at once (``part_of_documents``).
            Longer documents pass a pipeline in slices; elsewhere they need ``sequence_ranks``.
        work: time of documents, by which they are dealt; by default their FLOPs.
        compile_layers: compile layers by ``torch.compile``, those of one kind once.
        quantize: form in which frozen matrices of layers live and travel, ``nf4`` or ``int8``; they are dequantised
            where a block computes. ``none`` keeps the form of all other matrices.
        without_mtp: train and export a model without its multi-token-prediction heads, which are not trained here.
    """

    clip_norm: float | None = 1.0
    skip_limit: int = 0
    seed: int = 0
    bin_tokens: int = 0
    work: LayerTime | None = None
    compile_layers: bool = False
    quantize: str = NONE
    without_mtp: bool = False


@dataclass(frozen=True)
class CheckSettings:
    """How a ``Pipeline`` checks its model and watches its steps.

    Args:
        check: compare a few layers of the model with its own forward pass first: ``always``, ``never``, or ``auto``,
            for models that the tests do not cover (docs/models.md), and where rows run in chunks.
        timeout: of a step, or ten times what steps take if that is more (``Pipeline.limit``). Communication fails after
            twice that and 30 s. Before, every rank prints what it waits for and goes on waiting: after the limit in the
            first two steps, from then on after ten times what steps take, a minute at least.
        strict: check the sequence number and action of every message.
        delay: makes, for a lane's name, a function that returns seconds to wait before each of its actions; for tests.
        injector: makes faults happen; for tests.
    """

    check: str = "auto"
    timeout: timedelta = timedelta(minutes=10)
    strict: bool = False
    delay: Callable[[str], Callable[[], float]] | None = None
    injector: Injector | None = None


# refusals


def refuse_old_arguments(old: Mapping[str, object]) -> None:
    """Refuse arguments of ``Pipeline`` that are fields of its settings now, and unknown ones.

    Raises:
        UserError: an argument has moved; the message says where.
        TypeError: no such argument.
    """
    for argument, group in (("training", TrainingSettings), ("checks", CheckSettings)):
        for name in (field.name for field in fields(group) if field.name in old):
            moved = f"Pipeline({argument}=tawpipe.{group.__name__}({name}={old[name]!r}))"
            raise UserError(name, old[name], moved)
    if old:
        raise TypeError(f"Pipeline.__init__() got an unexpected keyword argument {next(iter(old))!r}")


def refuse_values(
    micro_batch: int, dtype: torch.dtype | str, training: TrainingSettings, checks: CheckSettings
) -> None:
    """Raise UserError for a value that a pipeline cannot have."""
    if checks.check not in CHOICES:
        raise UserError("check", checks.check, ", ".join(CHOICES))
    if micro_batch < 1:
        raise UserError("micro_batch", micro_batch, "at least 1")
    # fp16 would need loss scaling: gradients of single tokens are below its range.
    if dtype not in (AUTO, *DTYPES.values()):
        raise UserError("dtype", dtype, "torch.float32, torch.bfloat16, torch.float64 or 'auto'")
    if training.clip_norm is not None and not training.clip_norm > 0:
        raise UserError("clip_norm", training.clip_norm, "above 0, or None for no clipping")
    if training.seed < 0:
        raise UserError("seed", training.seed, "0 or more")


def refuse_settings(
    settings: ScheduleSettings,
    *,
    clip_norm: float | None,
    compile_layers: bool,
    quantize: str,
    dtype: torch.dtype | None = None,
    on_gpus: bool = False,
) -> None:
    """Raise UserError for settings that contradict each other, whatever the model.

    Args:
        dtype: in which weights travel; None where that is not known yet.
        on_gpus: devices are GPUs.
    """
    if clip_norm is not None and settings.early_updates:
        raise UserError("schedule.early_updates", True, "false while clip_norm is set: clipping waits for the norm")
    if compile_layers and settings.sequence_chunk:
        expected = "false with schedule.sequence_chunk: every chunk would be compiled anew"
        raise UserError("compile_layers", True, expected)
    if compile_layers and (settings.sequence_ranks or 1) > 1:
        expected = "false with schedule.sequence_ranks: keys and values are made by a layer that is left half-way"
        raise UserError("compile_layers", True, expected)
    compression = settings.weights_compression
    if quantize != NONE and compression not in ("none", "exact"):
        expected = f"none or exact with quantize={quantize}: what is frozen travels in fewer bits already"
        raise UserError("schedule.weights_compression", compression, expected)
    if compression == "exact" and dtype not in (None, torch.bfloat16):
        expected = f"none with {str(dtype).removeprefix('torch.')}: changes of its numbers are not small; or bfloat16"
        raise UserError("schedule.weights_compression", compression, expected)
    if (compression := settings.gradients_compression) == "exact" and (on_gpus or dtype is torch.float64):
        expected = "none with float64: only fp32 and bf16 are coded"
        if on_gpus:
            expected = (
                "none, int8 or fp8 on GPUs: how long a message is shows when its gradient is there, and the thread "
                "that issues everything would wait for each"
            )
        raise UserError("schedule.gradients_compression", compression, expected)


def refuse_cut_rows(chain: Chain, settings: ScheduleSettings) -> None:
    """Raise UserError if rows are to be cut that this model needs whole."""
    for name, value, most, why in (
        ("sequence_chunk", settings.sequence_chunk or 0, 0, chain.why_not_chunks),
        ("sequence_ranks", settings.sequence_ranks or 1, 1, chain.why_not_sets),
    ):
        if why and value > most:
            expected = f"unset: rows of {chain.name} cannot be cut, because {why}"
            raise UserError(f"schedule.{name}", value, expected)
    if chain.mixing and settings.sequence_chunk == 1:
        expected = "0, or at least 2: a state goes from chunk to chunk, and code for one token changes it in place"
        raise UserError("schedule.sequence_chunk", 1, expected)


def refuse_host(
    step: StepSpec,
    wanted: Sequence[float],
    free: Sequence[float],
    lockable: Sequence[float],
    machines: Topology,
    *,
    one_memory: bool,
) -> None:
    """Raise UserError where homes in the host's memory do not fit there, or are where they gain nothing.

    Args:
        step: any of the strategy.
        wanted: of every rank, the bytes that its homes take in the host's memory.
        free: of every rank, the bytes that its machine could give, 0 where that is not known.
        lockable: of every rank, the bytes that it may lock, 0 where that is enough.
        one_memory: some device's memory is its host's.
    """
    setting, level = "schedule.host_homes", step.settings.host_homes
    if one_memory:
        raise UserError(setting, level, "none: the device and its host have one memory, and nothing is gained")
    less = "none, or state" if level == "all" else "none"
    for number, ranks in enumerate(machines.nodes):
        needed, there = sum(wanted[rank] for rank in ranks), min(free[rank] for rank in ranks)
        if there and needed > there:
            more = math.ceil(len(machines.nodes) * needed / there)
            spread = f"; spread over {more} such machines homes would fit"
            if any(len(home.copies) > 1 for home in step.homes):
                spread = f"; {step.strategy.name} keeps all of them on every machine, which the other strategies do not"
            expected = (
                f"{less}, or {needed / 2**30:.1f} GiB of free memory on machine {number}, which has "
                f"{there / 2**30:.1f} GiB besides what other processes hold{spread}"
            )
            raise UserError(setting, level, expected)
    for rank, most in enumerate(lockable):
        if most and wanted[rank] > most:
            expected = (
                f"{less}, or processes that may lock {wanted[rank] / 2**30:.1f} GiB of memory for copies to and from "
                f"the GPU: rank {rank} may lock {most / 2**30:.3g} GiB (ulimit -l; docker run --ulimit memlock=-1)"
            )
            raise UserError(setting, level, expected)


def refuse_strategy(chain: Chain, step: StepSpec, *, optimizer: OptimizerFactory, compile_layers: bool) -> None:
    """Raise UserError for a strategy under which this model, or this optimizer, cannot run.

    Args:
        step: any of the strategy.
    """
    strategy = step.strategy
    if compile_layers and Kind.LINEAR in step.kept:
        expected = f"false under {strategy.name}, whose backward passes are taken apart"
        raise UserError("compile_layers", True, expected)
    if step.divided_over > 1 and (why := chain.why_not_staged):
        expected = f"a strategy whose weights travel for {chain.name}: {why}"
        raise UserError("schedule.strategy", strategy.name, expected)
    refuse_cut_matrices(optimizer, chain.units, step.homes, step.settings.strategy)


# initial values, homes, and what runs on them


def first_values(chain: Chain, weights: Callable[[Chain], WeightSource] | None, seed: int) -> WeightSource:
    """What gives the initial values: the user's, or the model's own, or for a model on meta a fresh initialisation."""
    if weights is not None:
        return weights(chain)
    on_meta = all(parameter.is_meta for parameter in chain.model.parameters())
    return InitSource(chain, seed) if on_meta else ModuleSource(chain)


def values_alike(
    chain: Chain, weights: Callable[[Chain], WeightSource] | None, seed: int, world: World
) -> WeightSource:
    """Make the source of the initial values and compare its facts, if it gives any; call on all ranks.

    Raises:
        UserError: the model's config, its adapter or the values are not those of rank 0; on all ranks.
    """

    def facts(source: WeightSource) -> Facts:
        known = config_facts("its config", chain.config.to_dict())
        for name, adapter in getattr(chain.given, "peft_config", {}).items():
            known |= config_facts(f"the config of adapter {name}", adapter.to_dict())
        return known | getattr(source, "facts", dict)()

    expected = "the same config and values on every process; torch.manual_seed makes random values equal"
    return read_alike(world, "model", chain.name, expected, lambda: first_values(chain, weights, seed), facts)


def look_at_host(
    chain: Chain, schedules: Schedules, world: World, dtype: torch.dtype, optimizer: OptimizerFactory
) -> None:
    """Raise UserError where homes are to be in a host's memory that does not hold them; call on all ranks."""
    step = schedules.smallest
    if not step.homes_in_host or world.device.type != "cuda":  # on a CPU a device's memory is the host's
        return
    tried = try_factory(optimizer, chain.units)
    states = tuple(tried[unit.index].states if unit.trainable else 0 for unit in chain.units)
    widths = widths_of(chain, dtype, schedules.settings, states)
    _, wanted = home_bytes(schedules.samples()[0], world.rank, widths)
    refuse_host(
        step,
        world.gather_numbers(wanted),
        world.gather_numbers(free_memory()),
        world.gather_numbers(lock_limit(wanted)),
        world.machines,
        one_memory=any(world.gather_numbers(is_the_hosts(world.device))),
    )


def filled_homes(
    chain: Chain,
    source: WeightSource,
    schedules: Schedules,
    world: World,
    dtype: torch.dtype,
    optimizer: OptimizerFactory,
) -> Storage:
    """The homes of this rank with their initial values; the model's parameters are empty from here on."""
    look_at_host(chain, schedules, world, dtype, optimizer)
    storage = Storage(
        chain.units,
        schedules.smallest.homes,
        world.rank,
        device=world.device,
        compute_dtype=dtype,
        master_dtype=master_dtype(dtype),
        host_homes=schedules.smallest.settings.host_homes or "none",
        keeps_gradients=not schedules.smallest.passes_gradients,
    )
    if type(source) is SafetensorsSource:  # what is derived from it may give other values
        source.digests = {}
    storage.fill(source, world.group, world.size)
    if type(source) is SafetensorsSource:
        everyone = map(json.loads, world.gather_texts(json.dumps(source.digests)))
        storage.digests = {name: digest for digests in everyone for name, digest in digests.items()}
        storage.folder = world.broadcast_text(str(source.folder))
    chain.prepare(world.device, dtype)
    chain.load_buffers(source.buffers())
    return storage


class Wiring:
    """Objects of one rank around homes that are filled, made once for the life of a pipeline.

    Args:
        optimizer: makes an optimizer for a list of parameters.
    """

    def __init__(
        self,
        chain: Chain,
        storage: Storage,
        schedules: Schedules,
        world: World,
        optimizer: OptimizerFactory,
        training: TrainingSettings,
        checks: CheckSettings,
    ) -> None:
        self.chain, self.storage, self.schedules, self.world = chain, storage, schedules, world
        self.training, self.timeout = training, checks.timeout
        settings, dtype = schedules.settings, storage.compute_dtype
        # Before anything is compiled: what runs under a probe first is never compiled afterwards.
        self.kept_per_token = schedules.kept_per_token(chain, dtype)
        """Bytes that a layer keeps for every token, by kind."""
        if training.compile_layers:
            chain.compile_layers()
        self.optimizers = UnitOptimizers(storage, optimizer)
        world.wait_patiently()  # for ranks whose homes are filled later: groups are made within ``timeout``
        self.transport = Transport(
            schedules.smallest.topology,
            world.rank,
            schedules.samples(),
            device=world.device,
            strict=checks.strict,
            timeout=checks.timeout,
            far_bytes_per_s=world.far_bytes_per_s,
        )
        vocabulary = chain.config.get_text_config().vocab_size
        self.compute = Compute(
            chain,
            chain.spec,
            chunk_tokens=loss_chunk(settings.loss_chunk_tokens, vocabulary, dtype, world.device.type),
            sequence_chunk=settings.sequence_chunk or 0,
            sequence_ranks=settings.sequence_ranks or 1,
            compiled=training.compile_layers,
            split_backward=Kind.LINEAR in schedules.smallest.kept,
            offload_dir=settings.offload_dir,
        )
        self.executor = Executor(
            world.rank,
            compute=self.compute,
            storage=storage,
            transport=self.transport,
            optimizers=self.optimizers,
            reduce_dtype=reduce_dtype(dtype, settings),
            delay=checks.delay,
            injector=checks.injector,
            where=f"rank {world.rank} (node {world.nodes.node_of(world.rank)})",
        )
        self.compute.stream = self.executor.compute_stream
