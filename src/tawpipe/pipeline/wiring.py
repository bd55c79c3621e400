"""The objects of one rank that the parts of its pipeline share, from the homes of the weights to the executor."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import torch

from tawpipe.model.chain import Chain
from tawpipe.model.facts import Facts, config_facts
from tawpipe.model.files.pretrained import SafetensorsSource
from tawpipe.model.loss import loss_chunk
from tawpipe.model.weights import InitSource, ModuleSource, WeightSource
from tawpipe.pipeline.refuse import refuse_host
from tawpipe.pipeline.schedules import Schedules
from tawpipe.pipeline.sizes import widths_of
from tawpipe.runtime.alike import read_alike
from tawpipe.runtime.compute.compute import Compute
from tawpipe.runtime.dtype import master_dtype, reduce_dtype
from tawpipe.runtime.executor import Executor
from tawpipe.runtime.homes.host_memory import free_memory, is_the_hosts, lock_limit
from tawpipe.runtime.homes.optimizer import OptimizerFactory
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers, try_factory
from tawpipe.runtime.transport.transport import Transport
from tawpipe.runtime.watch.faults import Injector
from tawpipe.runtime.world import World
from tawpipe.schedule.sizes.footprint import home_bytes


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
    """What is made once and stays for the life of a pipeline, around homes that are filled.

    Args:
        optimizer: makes an optimizer for a list of parameters.
        strict, timeout: of the transport.
        delay, injector: of the executor.
    """

    def __init__(
        self,
        chain: Chain,
        storage: Storage,
        schedules: Schedules,
        world: World,
        optimizer: OptimizerFactory,
        *,
        compile_layers: bool,
        strict: bool,
        timeout: timedelta,
        delay: Callable[[str], Callable[[], float]] | None,
        injector: Injector | None,
    ) -> None:
        self.chain, self.storage, self.schedules, self.world = chain, storage, schedules, world
        self.settings, self.dtype = settings, dtype = schedules.settings, storage.compute_dtype
        self.sequence_ranks = settings.sequence_ranks or 1
        # Before anything is compiled: what runs under a probe first is never compiled afterwards.
        self.kept_per_token = schedules.kept_per_token(chain, dtype)
        """Bytes that a layer keeps for every token, by kind."""
        if compile_layers:
            chain.compile_layers()
        self.optimizers = UnitOptimizers(storage, optimizer)
        world.wait_patiently()  # for ranks whose homes are filled later: groups are made within ``timeout``
        self.transport = Transport(
            schedules.smallest.topology,
            world.rank,
            schedules.samples(),
            device=world.device,
            strict=strict,
            timeout=timeout,
            far_bytes_per_s=world.far_bytes_per_s,
        )
        vocabulary = chain.config.get_text_config().vocab_size
        self.compute = Compute(
            chain,
            chain.spec,
            chunk_tokens=loss_chunk(settings.loss_chunk_tokens, vocabulary, dtype, world.device.type),
            sequence_chunk=settings.sequence_chunk or 0,
            sequence_ranks=self.sequence_ranks,
            compiled=compile_layers,
            split_backward=schedules.smallest.strategy.splits,
            offload_dir=settings.offload_dir,
        )
        self.executor = Executor(
            world.rank,
            compute=self.compute,
            storage=storage,
            transport=self.transport,
            optimizers=self.optimizers,
            reduce_dtype=reduce_dtype(dtype, settings),
            delay=delay,
            injector=injector,
            where=f"rank {world.rank} (node {world.nodes.node_of(world.rank)})",
        )
        self.compute.stream = self.executor.compute_stream
