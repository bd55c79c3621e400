"""A request for a plan, from what a user names: model, machines, data."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tawpipe.console import progress
from tawpipe.dealing.speeds import spell_speeds
from tawpipe.errors import UserError
from tawpipe.model.bits.quantized import NONE
from tawpipe.model.chain import Chain
from tawpipe.model.files.adapters import adapter_facts
from tawpipe.model.files.build import longest_allowed
from tawpipe.model.flops import KNOWN_DEVICES, chain_flops, peak_flops, work_of
from tawpipe.model.loss import loss_chunk
from tawpipe.pipeline.sizes import widths_of
from tawpipe.plan.cost.bench import Bench
from tawpipe.plan.cost.feasible import whole_rows_fit
from tawpipe.plan.cost.profile import USUAL, Profile, estimate, measure, size_of
from tawpipe.plan.cost.request import BY_TOKENS, MOST_TOKENS, PlanRequest
from tawpipe.plan.cost.updates import states_of
from tawpipe.plan.machine.devices import Device
from tawpipe.plan.machine.machine import SETTING, Machine, load_machine, uniform
from tawpipe.plan.machine.probe import resident_memory
from tawpipe.runtime.dtype import master_dtype, reduce_dtype
from tawpipe.runtime.homes.optimizer import OptimizerFactory, WholeMatrices, name_of
from tawpipe.runtime.memory import give_back, taken_outside_torch
from tawpipe.schedule.settings import DEFAULT, ScheduleSettings
from tawpipe.schedule.sharing import share_in_sets
from tawpipe.schedule.spec import change_width
from tawpipe.simulate import LinkModel, mean_size

USABLE = 0.95
"""Share of a device's memory, or of its host's, that a plan may fill: the rest falls between blocks in the allocator.
What the driver and the libraries take is counted (``system``).
"""
DRIVER_BYTES = 700 << 20
"""Of a GPU that a CUDA context, its loaded kernels and the workspaces of cuBLAS take, where that cannot be measured."""
COMMUNICATOR_BYTES = 512 << 20
"""Of a GPU that NCCL takes for one communicator, where that was not measured (``probe``): it depends on the release,
the number of ranks and the network. 484 MiB to 1.6 GB for one were reported (NVIDIA/nccl issues 864, 964, 2363)."""
THREADS_BYTES = 24 << 20, 44 << 20
"""Of a process on a CPU, alone and among others, that threads of lanes and groups take as it runs: stacks, scratch of
kernels, pieces of the allocator (benchmarks/said_memory.py)."""
INSIDE = {"CPU": LinkModel(2e9), "GPU": LinkModel(200e9, 1e-5, shared=False)}
"""Inside a node where a topology was given in short, without a file: a loopback, NVLink."""
LATENCY_S = 3e-5
MEASURED_TOKENS = {"cpu": 2048, "cuda": 16384}
"""The longest rows that a profile runs; longer ones follow from the fit."""
SHARE = 0.1
"""Of a run's time that planning it may take."""
MEASURED_TIMES = 20
"""So many passes of the longest row that is measured, forward and backward, do all runs of a layer's take together."""
SHORTEST_MEASURED = 256
"""Tokens of the same at least, below which times say little."""
_SHORT = re.compile(r"(\d+)x(\d+)(?:@(\d+(?:\.\d+)?)\s*(k|m|g)bit)?")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def machine_of(text: str, *, device: Device, name: str | None = None) -> Machine:
    """A file, or in short ``3x8@10gbit``: three nodes of eight devices, links of 10 Gbit/s.

    Args:
        device: of a topology in short.
        name: of the devices, instead of what the file says.

    Raises:
        UserError: neither.
    """
    short = _SHORT.fullmatch(text.strip().lower())
    if short is None:
        machine = load_machine(Path(text))
        if name and machine.device_of:
            raise UserError("--device-name", name, f"nothing: device_of in {text} says what the devices are")
        return replace(machine, device=replace(machine.device, name=name)) if name else machine
    nodes, local = int(short[1]), int(short[2])
    if nodes < 1 or local < 1 or (nodes > 1 and short[3] is None):
        raise UserError(SETTING, text, "for example 3x8@10gbit: nodes, devices of each, rate of their links")
    rate = float(short[3]) * _UNITS[short[4]] / 8 if short[3] else float("inf")
    if not rate > 0:
        raise UserError(SETTING, text, "a rate above 0")
    inside = INSIDE["CPU" if device.name == "CPU" else "GPU"]
    return uniform(nodes, local, between=LinkModel(rate, LATENCY_S), inside=inside, device=device)


@dataclass(frozen=True)
class Asked:
    """What a plan is asked for: the batch, and how it will be computed.

    Args:
        sequence_length: None for as many tokens as the model has positions for, at most ``MOST_TOKENS``.
        lengths: of the documents in a row, of the longest one where rows differ; one as long as the row by default.
        micro_batches: lengths of the documents of some micro-batches, where rows differ: steps take the mean of them.
        profile: ``measure`` on this machine's device, ``estimate`` from the peak of the plan's device, or ``auto``:
            measure where the two are the same.
        timed: False where only memory is asked for, which is measured; all seconds are 0.
        memory_bytes: of a device, instead of what the machine says.
        settings: what a plan takes as given, see ``PlanRequest``.
        quantize: form of frozen matrices, as of ``Pipeline``.
        compiled: layers are compiled, on whole rows.
        dealt: lengths of the documents of a step, see ``PlanRequest``; rows are then full bins.
        optimizer: whose states and updates are planned for.
        steps: of the run, of whose time measuring takes about ``SHARE`` at most; 0 if that is not known.
        learning_rate: on which depends in how many bits changes of weights travel.

    Raises:
        UserError: numbers that cannot work, or documents that do not fill a row.
    """

    sequence_length: int | None
    global_batch: int
    micro_batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    lengths: Sequence[int] = ()
    micro_batches: Sequence[Sequence[int]] = ()
    profile: str = "auto"
    timed: bool = True
    memory_bytes: int | None = None
    settings: ScheduleSettings = DEFAULT
    quantize: str = NONE
    compiled: bool = False
    dealt: Sequence[int] = ()
    optimizer: OptimizerFactory = USUAL
    steps: int = 0
    learning_rate: float = 3e-4

    def __post_init__(self) -> None:
        for name, value in (
            ("--sequence-length", self.row),
            ("--global-batch", self.global_batch),
            ("--micro-batch", self.micro_batch),
        ):
            if value < (2 if name == "--sequence-length" else 1):
                raise UserError(name, value, "a larger number")
        if self.micro_batch > self.global_batch:
            raise UserError("--micro-batch", self.micro_batch, f"at most --global-batch, which is {self.global_batch}")
        fills = sum(self.documents) <= self.row if self.micro_batches else sum(self.documents) == self.row
        if not fills or min(self.documents) < 1:
            expected = f"documents of at least one token that together fill a row of {self.row}"
            raise UserError("--lengths", ",".join(map(str, self.documents)), expected)

    @property
    def row(self) -> int:
        """Tokens of a row, at most."""
        return MOST_TOKENS if self.sequence_length is None else self.sequence_length

    @property
    def documents(self) -> tuple[int, ...]:
        """Tokens of the documents in a row."""
        return tuple(self.lengths or (self.row,))

    @property
    def longest(self) -> int:
        """Tokens of a document for which the model must have positions."""
        return 1 if self.sequence_length is None else max(self.documents)


def request_of(
    chain: Chain,
    machine: Machine,
    asked: Asked,
    *,
    here: torch.device | None = None,
) -> PlanRequest:
    """The request for a plan.

    Args:
        chain: of the model, on the meta device, which it is left as it is.
        here: this process's device.

    Raises:
        UserError: a machine or a setting that cannot work for this model.
    """
    _ = share_in_sets(0, machine.topology.evened(), asked.settings)
    here = here or torch.device("cpu")
    try:
        with chain.borrowed():
            request = _request_of(chain, machine, asked, here)
    finally:
        give_back(here)  # with what the chain held while it was borrowed
    # Libraries are there when blocks have run with them.
    return replace(request, system_bytes=system_of(machine, here)[0]) if not request.has_host else request


def _request_of(chain: Chain, machine: Machine, asked: Asked, here: torch.device) -> PlanRequest:
    """``request_of`` with a chain that is of no other use afterwards."""
    # What is asked: rows, and why they may have to stay whole.
    dtype, settings, optimizer = asked.dtype, asked.settings, asked.optimizer
    if machine.speeds and not settings.device_speeds:
        settings = replace(settings, device_speeds=spell_speeds(machine.speeds))
    row, documents = asked.row, asked.documents
    why_whole = "--compile compiles layers on whole rows" if asked.compiled else ""
    chain.quantise(asked.quantize, dtype)
    if chain.why_not_chunks:
        why_whole = why_whole or chain.why_not_chunks
    if asked.sequence_length is None:
        row = min(row, longest_allowed(chain.config))
        documents = (row,)

    # What depends neither on the profile nor on chunks.
    peak = machine.device.flops or peak_flops(machine.device.name, str(dtype).removeprefix("torch."))
    master, reduce = master_dtype(dtype), reduce_dtype(dtype, settings)
    limit = machine.most_memory * USABLE if asked.memory_bytes is None else asked.memory_bytes
    kind, longest = "cpu" if machine.device.name == "CPU" else "cuda", sum(documents)
    tokens = longest * asked.micro_batch
    chunk = loss_chunk(settings.loss_chunk_tokens, chain.config.get_text_config().vocab_size, dtype, kind)
    system_bytes, communicator_bytes = system_of(machine, here)
    ranks, states = settings.sequence_ranks or 1, states_of(optimizer, chain.units)

    def by(profile: Profile) -> PlanRequest:
        if reduce != master and tokens > chunk:  # the head's chunks are added up in a buffer of their own
            head = sum(chain.units[unit].numel for unit in chain.spec.trainable_units(len(chain.blocks) - 1))
            profile = replace(profile, memory=profile.memory.with_more("head", head * master.itemsize))
        return PlanRequest(
            model=chain.spec,
            profile=profile,
            machine=replace(
                machine, host_bytes=int(machine.host_bytes * USABLE), files_bytes=int(machine.files_bytes * USABLE)
            ),
            global_batch=asked.global_batch,
            micro_batch=asked.micro_batch,
            sequence_length=row,
            size=size_of(documents * asked.micro_batch, profile.windows),
            mean=mean_size(asked.micro_batches, profile.windows) if asked.micro_batches else None,
            widths=widths_of(
                chain,
                dtype,
                settings,
                states,
                exact=_exact(chain, dtype, master),
                whole=isinstance(optimizer, WholeMatrices),
                change=change_width(asked.learning_rate),
            ),
            memory_bytes=int(limit),
            flops=_flops_of_a_step(chain, asked, documents),
            peak_flops=peak,
            settings=settings,
            system_bytes=system_bytes,
            communicator_bytes=communicator_bytes,
            drops=_drops(chain.config) or bool(adapter_facts(chain.given).get("dropout")),
            needs_whole=name_of(optimizer) if isinstance(optimizer, WholeMatrices) else "",
            why_not_staged=chain.why_not_staged,
            dealt=tuple(asked.dealt),
            cuts=not (why_whole or chain.positions.first),
            work=work_of(chain) if asked.dealt else BY_TOKENS,
            compiled=asked.compiled,
        )

    def chunks(whole: Profile) -> Sequence[int] | None:
        if why_whole:
            return None
        request = by(replace(whole, in_chunks=whole.blocks, cuts=not whole.why_not_shares))
        small = not whole_rows_fit(request)
        sizes = request.chunks if settings.sequence_chunk or small else ()
        shared = ranks > 1 or bool(request.sets and (small or request.leaves_idle))
        return sizes if sizes or shared else None

    # The profile, measured or estimated.
    measuring = {
        "dtype": dtype,
        "device": here,
        "chunk_tokens": chunk,
        "packed": len(documents) > 1,
        "row": longest,
        "optimizer": optimizer,
        "chunks": chunks,
    }
    if asked.timed:
        run = _layer_tokens(chain, asked, machine.world_size)
        measuring["layer_tokens"] = run or math.inf
        most = max(SHORTEST_MEASURED, round(SHARE * run / MEASURED_TIMES)) if run else asked.row
        profile = _profile(chain, machine, asked.profile, min(longest, most), tokens, peak, measuring)
    else:
        profile = measure(chain, tokens=tokens, timed=False, **measuring)

    # What only a profile shows.
    if why := why_whole or profile.why_whole:
        if settings.sequence_chunk:
            raise UserError("schedule.sequence_chunk", settings.sequence_chunk, f"0, for whole rows: {why}")
        if ranks > 1:
            raise UserError("schedule.sequence_ranks", ranks, f"1, for whole rows: {why}")
        profile = replace(profile, in_chunks=(), cuts=False, why_whole=why)
        if asked.timed:  # else memory alone is asked about, which takes no while
            progress.warning(f"rows stay whole: {why}")
    return by(profile)


def _flops_of_a_step(chain: Chain, asked: Asked, documents: Sequence[int]) -> float:
    """FLOPs of a step's documents; 0 for a model of which they are not known."""
    if asked.dealt:
        return chain_flops(chain, asked.dealt) or 0.0
    if not asked.micro_batches:
        return (chain_flops(chain, documents) or 0.0) * asked.global_batch
    some = [length for lengths in asked.micro_batches for length in lengths]
    return (chain_flops(chain, some) or 0.0) * asked.global_batch / (asked.micro_batch * len(asked.micro_batches))


def _drops(config: Any) -> bool:
    """True if a model's config asks for dropout anywhere."""
    values = config.get_text_config().to_dict().items()
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in values)


def _exact(chain: Chain, dtype: torch.dtype, master: torch.dtype) -> int:
    """Bytes of a frozen weight's exact value, which a host keeps where the type of the run would round it."""
    stored = getattr(chain.config, "dtype", None) or master
    return master.itemsize if torch.promote_types(stored, dtype) != dtype else 0


def system_of(machine: Machine, here: torch.device) -> tuple[int, int]:
    """Bytes of a device that the driver and libraries take, and those of each communicator.

    On a CPU they are this process's, which has loaded the libraries, and what its threads will take. On a GPU like the
    plan's they are what is in use and not by torch's allocator, if that is more than what is usual. The communicator of
    all processes, which every run has besides its groups', is among it.
    """
    if machine.device.name == "CPU":
        return resident_memory() + THREADS_BYTES[machine.world_size > 1], 0
    each = machine.device.communicator_bytes or COMMUNICATOR_BYTES
    used, usual = 0, DRIVER_BYTES + (each if machine.world_size > 1 else 0)
    if here.type == "cuda" and device_name(here) == machine.device.name:
        used = taken_outside_torch(here)
    return max(usual, used), each


def device_name(here: torch.device) -> str:
    """The device's name as topology files spell it."""
    return torch.cuda.get_device_name(here) if here.type == "cuda" else "CPU"


def _layer_tokens(chain: Chain, asked: Asked, devices: int) -> float:
    """Tokens times layers that a device computes in the run; 0 if that is not known. Measuring is to take a small share
    of the run: its work grows with layers and tokens on any device.
    """
    row = mean_size(asked.micro_batches).tokens / asked.micro_batch if asked.micro_batches else asked.row
    return asked.steps * asked.global_batch * row * chain.spec.num_layers / devices


def _profile(
    chain: Chain, machine: Machine, how: str, row: int, tokens: int, peak: float | None, measuring: dict[str, Any]
) -> Profile:
    if how not in ("auto", "measure", "estimate"):
        raise UserError("--profile", how, "auto, measure or estimate")
    here = measuring["device"]
    same = device_name(here) == machine.device.name
    if how == "measure" or (how == "auto" and same and not machine.device.flops):
        most = min(MEASURED_TOKENS["cpu" if here.type == "cpu" else "cuda"], longest_allowed(chain.config))
        return measure(chain, tokens=min(row, most), **measuring)
    if peak is None:
        known = f"a device whose peak is known: {', '.join(KNOWN_DEVICES)}, in bfloat16 (--dtype)"
        expected = f"{known}; or a file with `device: {{flops: ...}}`, or --profile measure"
        raise UserError("--device-name", machine.device.name, expected)
    dtype, chunk = measuring["dtype"], min(measuring["chunk_tokens"], tokens)
    profile = estimate(chain, dtype=dtype, flops=peak, chunk_tokens=chunk, optimizer=measuring["optimizer"])
    if (sizes := measuring["chunks"](profile)) is None:
        return replace(profile, in_chunks=())
    why = Bench(chain, torch.device("meta"), dtype, chunk).why_whole()
    return replace(
        profile, in_chunks=profile.in_chunks if sizes else (), cuts=not (why or profile.why_not_shares), why_whole=why
    )
