"""Setup of a pipeline before its first step: settings, checks, initial values, homes, and the objects around them."""

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
from tawpipe.pipeline.kernels import KERNELS
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
from tawpipe.schedule.settings import ELEMENTWISE, ScheduleSettings
from tawpipe.schedule.sizes.footprint import home_bytes
from tawpipe.schedule.step import StepSpec
from tawpipe.topology import Topology

CHOICES = ("auto", "always", "never")
"""Values of ``CheckSettings.check``."""

# settings


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of how a ``Pipeline`` trains its model.

    Args:
        clip_norm: largest global gradient norm. None switches clipping off. The check for finite numbers stays, unless
            ``ScheduleSettings.early_updates`` is set: numbers that are not finite have then reached the weights when
            ``step``, ``drain`` or ``save`` reports them.
        skip_limit: most consecutive steps whose update is skipped because loss or gradient norm is not finite. One more
            such step raises an error; with 0 the first one does.
        seed: seed of initial weights, dropout and other random numbers. These depend only on (seed, step, micro-batch,
            block). torch's default generators are not used.
        bin_tokens: most tokens that a process computes at one time when it trains on documents of uneven lengths
            (``Pipeline.part_of_documents``). Longer documents pass a pipeline in slices; other strategies need
            ``sequence_ranks`` for them. 0 for training on rows.
        work: model of the compute time of a document, by which documents are assigned to ranks; by default their FLOPs.
        compile_layers: compile layers with ``torch.compile``; layers of one kind are compiled once.
        quantize: form in which frozen matrices of layers are stored and sent: ``nf4`` or ``int8``; ``published`` for
            the codes and scales of the folder; ``auto`` for ``published`` if there are such codes. Blocks dequantise
            them when they compute. ``none`` leaves frozen matrices in the dtype of all other weights.
        without_mtp: train and export the model without its multi-token-prediction heads, which cannot be trained here.
        balance: loss that balances experts: ``none``, ``auto`` for the coefficient in the model's config, or a
            coefficient. None means ``auto`` if ``output_router_logits`` is true in the config, else ``none``.
        kernels: functions that compute norms, rotary embeddings and gates of layers: ``eager``, ``fused`` or ``auto``;
            see ``choose_kernels``.
    """

    clip_norm: float | None = 1.0
    skip_limit: int = 0
    seed: int = 0
    bin_tokens: int = 0
    work: LayerTime | None = None
    compile_layers: bool = False
    quantize: str = NONE
    without_mtp: bool = False
    balance: str | float | None = None
    kernels: str = AUTO


@dataclass(frozen=True)
class CheckSettings:
    """Settings of how a ``Pipeline`` checks its model and watches its steps.

    Args:
        check: compare a few layers of the model with its own forward pass before training: ``always``, ``never``, or
            ``auto``, which checks models that the tests do not cover (docs/models.md) and runs with chunks of rows.
        timeout: time limit of a step, or ten times the usual time of steps if that is more (``Pipeline.limit``).
            Communication fails after twice this limit and 30 s. A rank that waits longer first reports what it waits
            for and continues to wait: after the limit in the first two steps, later after ten times the usual time of
            steps, but at least a minute.
        strict: check the sequence number and the action of every message.
        delay: for tests: called with the name of a lane, returns a function that gives the seconds to wait before each
            action of that lane.
        injector: for tests: causes faults.
    """

    check: str = "auto"
    timeout: timedelta = timedelta(minutes=10)
    strict: bool = False
    delay: Callable[[str], Callable[[], float]] | None = None
    injector: Injector | None = None


# refusals


def refuse_old_arguments(old: Mapping[str, object]) -> None:
    """Raise an error for unknown arguments of ``Pipeline`` and for arguments that moved to its settings.

    Args:
        old: unexpected keyword arguments.

    Raises:
        UserError: an argument has moved; the message names its new place.
        TypeError: an argument is unknown.
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
    """Raise UserError if a value of ``Pipeline``'s arguments is outside of its range."""
    if checks.check not in CHOICES:
        raise UserError("check", checks.check, ", ".join(CHOICES))
    if micro_batch < 1:
        raise UserError("micro_batch", micro_batch, "at least 1")
    # fp16 would need loss scaling: gradients of single tokens are below its range.
    if dtype not in (AUTO, *DTYPES.values()):
        raise UserError("dtype", dtype, "torch.float32, torch.bfloat16, torch.float64 or 'auto'")
    if training.clip_norm is not None and not training.clip_norm > 0:
        raise UserError("clip_norm", training.clip_norm, "above 0, or None for no clipping")
    if training.kernels not in KERNELS:
        raise UserError("kernels", training.kernels, ", ".join(KERNELS))
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
    """Raise UserError if settings contradict each other, whatever the model.

    Args:
        settings: schedule settings.
        clip_norm: largest gradient norm, or None.
        compile_layers: True if layers are compiled.
        quantize: form of frozen matrices.
        dtype: dtype in which weights travel; None if it is not known yet.
        on_gpus: True if devices are GPUs.
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
    if quantize not in (AUTO, NONE) and compression not in ("none", "exact"):
        why = "what is frozen travels in fewer bits already"
        expected = f"none or exact with quantize={quantize}, or quantize=none: {why}"
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
    """Raise UserError if settings cut rows (``sequence_chunk``, ``sequence_ranks``) that this model needs whole."""
    for name, value, most, why in (
        ("sequence_chunk", settings.sequence_chunk or 0, 0, chain.why_not_chunks),
        ("sequence_ranks", settings.sequence_ranks or 1, 1, chain.why_not_cp_groups),
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
    """Raise UserError if homes in host memory do not fit there, or would gain nothing.

    Args:
        step: any step of the strategy.
        wanted: bytes of host memory that homes need, per rank.
        free: free bytes of the machine, per rank; 0 if unknown.
        lockable: bytes that a rank may page-lock, per rank; 0 if there are enough.
        machines: ranks of every machine.
        one_memory: True if some device shares its memory with its host.
    """
    setting, level = "schedule.host_homes", step.settings.host_homes
    if one_memory:
        raise UserError(setting, level, "none: the device and its host have one memory, and nothing is gained")
    less = "none, or state" if level == "all" else "none"
    for number, ranks in enumerate(machines.nodes):
        needed, available = sum(wanted[rank] for rank in ranks), min(free[rank] for rank in ranks)
        if available and needed > available:
            more = math.ceil(len(machines.nodes) * needed / available)
            spread = f"; spread over {more} such machines homes would fit"
            if any(len(home.copies) > 1 for home in step.homes):
                spread = f"; {step.strategy.name} keeps all of them on every machine, which the other strategies do not"
            expected = (
                f"{less}, or {needed / 2**30:.1f} GiB of free memory on machine {number}, which has "
                f"{available / 2**30:.1f} GiB besides what other processes hold{spread}"
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
    """Raise UserError if this model, this optimizer or ``compile_layers`` cannot run under the strategy of ``step``.

    Refused are: compiled layers if the strategy splits backward passes, or if results are computed again; a model that
    cannot be cut into pipeline stages if the strategy has stages; and an optimizer that needs whole matrices if the
    strategy cuts them.

    Args:
        chain: the model.
        step: a step of the strategy, with any number of micro-batches.
        optimizer: makes an optimizer for a list of parameters.
        compile_layers: True if layers are compiled.
    """
    strategy = step.strategy
    if compile_layers and Kind.PRODUCTS in step.kept:
        expected = f"false with schedule.recompute {ELEMENTWISE}: a compiler decides by itself what layers keep"
        raise UserError("compile_layers", True, expected)
    if compile_layers and Kind.LINEAR in step.kept:
        expected = f"false under {strategy.name}, whose backward passes are taken apart"
        raise UserError("compile_layers", True, expected)
    if step.divided_over > 1 and (why := chain.why_not_staged):
        expected = f"a strategy whose weights travel for {chain.name}: {why}"
        raise UserError("schedule.strategy", strategy.name, expected)
    refuse_cut_matrices(optimizer, chain.units, step.homes, step.settings.strategy)


# initial values, homes, and what runs on them


def first_values(chain: Chain, weights: Callable[[Chain], WeightSource] | None, seed: int) -> WeightSource:
    """Return the source of initial values: ``weights(chain)`` if given, else the model's own values.

    A model whose parameters are all on the meta device gets a fresh initialisation from ``seed``."""
    if weights is not None:
        return weights(chain)
    on_meta = all(parameter.is_meta for parameter in chain.model.parameters())
    return InitSource(chain, seed) if on_meta else ModuleSource(chain)


def values_alike(
    chain: Chain, weights: Callable[[Chain], WeightSource] | None, seed: int, world: World
) -> WeightSource:
    """Make the source of initial values and check that it is equal on all ranks; call on all ranks.

    Compared are the model's config, the configs of its adapters, and facts about the values if the source has any.

    Raises:
        UserError: something differs from rank 0; on all ranks.
    """

    def facts(source: WeightSource) -> Facts:
        """Return the facts of the model and of its initial values that ranks compare."""
        known = config_facts("its config", chain.config.to_dict())
        for name, adapter in getattr(chain.outer_model, "peft_config", {}).items():
            known |= config_facts(f"the config of adapter {name}", adapter.to_dict())
        return known | getattr(source, "facts", dict)()

    expected = "the same config and values on every process; torch.manual_seed makes random values equal"
    return read_alike(world, "model", chain.name, expected, lambda: first_values(chain, weights, seed), facts)


def look_at_host(
    chain: Chain, schedules: Schedules, world: World, dtype: torch.dtype, optimizer: OptimizerFactory
) -> None:
    """Raise UserError if homes are to be in host memory and it cannot hold them; call on all ranks.

    Checks only GPU runs: on a CPU, device memory is host memory.
    """
    step = schedules.smallest
    if not step.homes_in_host or world.device.type != "cuda":  # on a CPU, device memory is host memory
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
    """Create the homes of this rank and fill them with initial values; call on all ranks.

    The parameters of the model are empty afterwards. Digests of frozen weights that a ``SafetensorsSource`` read are
    recorded in ``Storage.digests``.

    Args:
        chain: the model.
        source: initial values.
        schedules: schedules of the pipeline.
        world: all processes.
        dtype: dtype in which weights travel and blocks compute.
        optimizer: makes an optimizer for a list of parameters; used to predict memory.
    """
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
    if type(source) is SafetensorsSource:  # a subclass may return other values
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
    """Objects of one rank that run steps on its filled homes; made once for the life of a pipeline.

    Args:
        chain: the model.
        storage: homes of this rank, filled.
        schedules: schedules of the pipeline.
        world: all processes.
        optimizer: makes an optimizer for a list of parameters.
        training: how the model is trained.
        checks: how steps are watched.
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
        # Probe before `compile_layers`: code that first runs under the probe is never compiled later.
        self.kept_per_token = schedules.kept_per_token(chain, dtype)
        """Bytes per token that a layer keeps for its backward pass, by kind."""
        if training.compile_layers:
            chain.compile_layers()
        self.optimizers = UnitOptimizers(storage, optimizer)
        world.wait_patiently()  # wait for slow ranks: groups must be made within ``timeout``
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
