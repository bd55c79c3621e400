"""Build the request for a plan from what a user names: model, machines, data."""

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
from tawpipe.model.attention.attention_kernel import cudnn_takes, recurs
from tawpipe.model.bits.quantized import NONE
from tawpipe.model.chain import Chain
from tawpipe.model.files.adapters import adapter_facts
from tawpipe.model.files.build import longest_allowed
from tawpipe.model.flops import KNOWN_DEVICES, chain_flops, peak_flops, work_of
from tawpipe.model.fused.operations import EAGER, KEEPING_INPUTS
from tawpipe.model.kernels import flash_in_use
from tawpipe.model.loss import loss_chunk
from tawpipe.model.shapes import head_size
from tawpipe.pipeline.sizes import widths_of
from tawpipe.plan.cost.bench import Bench
from tawpipe.plan.cost.feasible import whole_rows_fit
from tawpipe.plan.cost.filling import Filling
from tawpipe.plan.cost.profile import FLASH_FACTOR, USUAL, Profile, estimate, measure, size_of
from tawpipe.plan.cost.request import BY_TOKENS, MOST_TOKENS, PlanRequest
from tawpipe.plan.cost.updates import states_of
from tawpipe.plan.machine.devices import Device
from tawpipe.plan.machine.machine import SETTING, Machine, load_machine, uniform
from tawpipe.plan.machine.probe import resident_memory
from tawpipe.runtime.dtype import master_dtype, reduce_dtype
from tawpipe.runtime.homes.optimizer import OptimizerFactory, WholeMatrices, name_of
from tawpipe.runtime.memory import give_back, taken_outside_torch
from tawpipe.schedule.settings import DEFAULT, ELEMENTWISE, ScheduleSettings
from tawpipe.schedule.sharing import share_in_cp_groups
from tawpipe.schedule.spec import change_width
from tawpipe.schedule.strategies.table import find
from tawpipe.simulate import LinkModel, mean_size
from tawpipe.topology import Topology

USABLE = 0.95
"""Share of a device's or a host's memory that a plan may fill. The rest is lost between blocks of the allocator. Memory
of the driver and the libraries is counted separately (``system``)."""
DRIVER_BYTES = 700 << 20
"""Assumed GPU memory of a CUDA context, its loaded kernels and cuBLAS workspaces, where it cannot be measured."""
COMMUNICATOR_BYTES = 512 << 20
"""Assumed GPU memory of one NCCL communicator, where it was not measured (``probe``). It depends on the NCCL release,
the number of ranks and the network. Reported are 484 MiB to 1.6 GB for one (NVIDIA/nccl issues 864, 964, 2363)."""
CUDNN_DEVICES = "H100", "H200", "B200"
"""Parts of the names of devices whose whole rows have cuDNN's attention, see ``model.attention.attention_kernel``."""
THREADS_BYTES = 24 << 20, 44 << 20
"""Memory that threads of lanes and groups take in a CPU process while it runs: alone, and among several processes. It
contains stacks, scratch memory of kernels and pieces of the allocator (benchmarks/said_memory.py)."""
INSIDE = {"CPU": LinkModel(2e9), "GPU": LinkModel(200e9, 1e-5, shared=False)}
"""Assumed links inside a node for a topology in short form, without a file: loopback on CPUs, NVLink on GPUs."""
LATENCY_S = 3e-5
MEASURED_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens of the longest row that is run for a profile; longer rows are extrapolated."""
SHARE = 0.1
"""Share of a run's time that planning it may take."""
MEASURED_TIMES = 20
"""Work of all measurements of a layer, as a multiple of one forward and backward pass of the longest measured row."""
SHORTEST_MEASURED = 256
"""Least tokens of the longest measured row; times of shorter rows are not meaningful."""
_SHORT = re.compile(r"(\d+)x(\d+)(?:@(\d+(?:\.\d+)?)\s*(k|m|g)bit)?")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def machine_of(text: str, *, device: Device, name: str | None = None) -> Machine:
    """Return the machine for a topology file, or for a short form.

    ``3x8@10gbit`` means three nodes of eight devices with links of 10 Gbit/s.

    Args:
        text: path of the file, or the short form.
        device: device for a short form.
        name: name of the devices that replaces the one in the file; None to keep it.

    Raises:
        UserError: ``text`` is neither a valid file nor a valid short form, or ``name`` is given for a file that names
            different devices.
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
    """Requirements for a plan: the batch, and how it will be computed.

    Args:
        sequence_length: tokens of a row; None for all positions of the model, at most ``MOST_TOKENS``.
        global_batch: rows in a step.
        micro_batch: rows computed at one time.
        dtype: dtype of the run.
        lengths: lengths of the documents in a row, or in the longest row if rows differ; by default one that fills the
            row.
        micro_batches: lengths of the documents of some micro-batches, if rows differ. Steps are planned for their mean.
        profile: ``measure`` on this machine's device, ``estimate`` from the peak of the plan's device, or ``auto`` to
            measure if the two devices are the same.
        timed: False if only memory is of interest; it is measured, and all seconds are 0.
        memory_bytes: memory of a device; replaces that of the machine.
        settings: settings that a plan takes as given, see ``PlanRequest``.
        quantize: form of frozen matrices, as in ``Pipeline``.
        compiled: True if layers are compiled, on whole rows.
        dealt: lengths of the documents of a step, see ``PlanRequest``; rows are then full packed micro-batches.
        optimizer: optimizer whose states and updates are counted.
        steps: steps of the run, whose time limits measuring to about ``SHARE``; 0 if unknown.
        learning_rate: determines the bits in which changes of weights are sent.
        filling: numbers of rows that may replace ``micro_batch``, the largest of them; None if it is given.

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
    filling: Filling | None = None

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
        """Tokens of a row; ``MOST_TOKENS`` if not given, because the model then sets the limit."""
        return MOST_TOKENS if self.sequence_length is None else self.sequence_length

    @property
    def documents(self) -> tuple[int, ...]:
        """Lengths of the documents in a row, in tokens."""
        return tuple(self.lengths or (self.row,))

    @property
    def longest(self) -> int:
        """Tokens of the longest document, for which the model must have positions.

        1 if no length is given, because the row is then as long as the model allows."""
        return 1 if self.sequence_length is None else max(self.documents)


def request_of(
    chain: Chain,
    machine: Machine,
    asked: Asked,
    *,
    here: torch.device | None = None,
) -> PlanRequest:
    """Measure or estimate the model's profile, and return the request for a plan.

    Args:
        chain: chain of the model on the meta device; it is left unchanged, but for what ``recompute`` asks for.
        machine: nodes, links and devices.
        asked: batch and settings.
        here: device of this process, on which blocks may run; the CPU by default.

    Raises:
        UserError: a machine or a setting cannot work for this model.
    """
    _ = share_in_cp_groups(0, machine.topology.evened(), asked.settings)
    here = here or torch.device("cpu")
    if ELEMENTWISE in asked.settings.recompute and chain.operations is EAGER:
        chain.compute_by(KEEPING_INPUTS)
    try:
        with chain.borrowed():
            request = _request_of(chain, machine, asked, here)
    finally:
        give_back(here)  # also frees the tensors of the borrowed chain
    # Measure again: running blocks has loaded more libraries into this process.
    return replace(request, system_bytes=system_of(machine, here)[0]) if not request.has_host else request


def _request_of(chain: Chain, machine: Machine, asked: Asked, here: torch.device) -> PlanRequest:
    """Measure or estimate the profile and return the request; afterwards the chain cannot be used for anything else."""
    # Rows of the request, and the reason if they must stay whole.
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

    # Values that depend neither on the profile nor on chunks.
    peak = machine.device.flops or peak_flops(machine.device.name, str(dtype).removeprefix("torch."))
    master, reduce = master_dtype(dtype), reduce_dtype(dtype, settings)
    limit = machine.most_memory * USABLE if asked.memory_bytes is None else asked.memory_bytes
    kind, longest = "cpu" if machine.device.name == "CPU" else "cuda", sum(documents)
    tokens = longest * asked.micro_batch
    chunk = loss_chunk(settings.loss_chunk_tokens, chain.config.get_text_config().vocab_size, dtype, kind)
    system_bytes, communicator_bytes = system_of(machine, here)
    ranks, states = settings.sequence_ranks or 1, states_of(optimizer, chain.units)

    def by(profile: Profile) -> PlanRequest:
        """Return the request with this profile."""
        if reduce != master and tokens > chunk:  # the head sums its chunks in a separate buffer
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
            flops_by=_flops_by(chain),
            peak_flops=peak,
            settings=settings,
            system_bytes=system_bytes,
            communicator_bytes=communicator_bytes,
            drops=draws_dropout(chain),
            needs_whole=name_of(optimizer) if isinstance(optimizer, WholeMatrices) else "",
            why_not_staged=chain.why_not_staged,
            dealt=tuple(asked.dealt),
            cuts=not (why_whole or chain.positions.first),
            work=work_of(chain) if asked.dealt else BY_TOKENS,
            compiled=asked.compiled,
            filling=asked.filling,
        )

    def chunks(whole: Profile) -> Sequence[int] | None:
        """Return the chunk sizes to measure, or None if rows stay whole; see ``measure``."""
        if why_whole:
            return None
        request = by(replace(whole, in_chunks=whole.blocks, cuts=not whole.why_not_shares))
        small = not whole_rows_fit(request)
        sizes = request.chunks if settings.sequence_chunk or small else ()
        shared = ranks > 1 or bool(request.cp_group_sizes and (small or request.leaves_idle))
        return sizes if sizes or shared else None

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

    # Reasons for whole rows are known only now, with the profile.
    if why := why_whole or profile.why_whole:
        if settings.sequence_chunk:
            raise UserError("schedule.sequence_chunk", settings.sequence_chunk, f"0, for whole rows: {why}")
        if ranks > 1:
            raise UserError("schedule.sequence_ranks", ranks, f"1, for whole rows: {why}")
        profile = replace(profile, in_chunks=(), cuts=False, why_whole=why)
        if asked.timed:  # measuring memory alone is quick
            progress.warning(f"rows stay whole: {why}")
    return by(profile)


def _flops_of_a_step(chain: Chain, asked: Asked, documents: Sequence[int]) -> float:
    """Return the floating-point operations of all documents of a step; 0 if they are not known for this model."""
    if asked.dealt:
        return chain_flops(chain, asked.dealt) or 0.0
    if not asked.micro_batches:
        return (chain_flops(chain, documents) or 0.0) * asked.global_batch
    some = [length for lengths in asked.micro_batches for length in lengths]
    return (chain_flops(chain, some) or 0.0) * asked.global_batch / (asked.micro_batch * len(asked.micro_batches))


def _flops_by(chain: Chain) -> tuple[float, float]:
    """Return the operations of a step for a token, and for a pair of tokens; 0 if they are not known for this model."""
    first, second = (chain_flops(chain, [length]) or 0.0 for length in (1, 2))  # of one token, of two tokens
    return 2 * first - second / 2, second / 2 - first


def _flash_factor(chain: Chain, machine: Machine, row: int) -> float:
    """Return how many times as long flash attention takes as the kernel of whole rows of ``row`` tokens.

    It is 1 where that kernel is flash attention, too: on devices before Hopper, for rows without cuDNN's kernel, and if
    this process has activated another implementation than flash attention 2."""
    name, head = machine.device.name.upper(), head_size(chain.config.get_text_config())
    faster = any(word in name for word in CUDNN_DEVICES) and cudnn_takes(head) and recurs(row)
    return FLASH_FACTOR if faster and flash_in_use() == "FA2" else 1.0


def draws_dropout(chain: Chain) -> bool:
    """Return True if the model's config or its adapter sets any dropout above 0."""
    values = [*chain.config.get_text_config().to_dict().items(), *adapter_facts(chain.outer_model).items()]
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in values)


def filling_of(chain: Chain, topology: Topology, kind: str, settings: ScheduleSettings, rows: int, row: int) -> Filling:
    """Return the numbers of rows that ``--micro-batch auto`` may choose.

    There is only one number where another one would change results: dropout is drawn, experts are balanced and longrope
    scales positions for each micro-batch.

    Args:
        chain: model of the run, with its loss that balances experts.
        topology: devices of the run, equally many on every node.
        kind: kind of the devices, ``cuda`` or ``cpu``.
        settings: settings of the schedule.
        rows: rows of a step.
        row: tokens of a row.
    """
    ranks, positions = settings.sequence_ranks or 1, find(settings.strategy).configured(settings).divided_over(topology)
    reasons = {
        "dropout is drawn for each micro-batch": draws_dropout(chain),
        "experts are balanced over a micro-batch": chain.balance is not None,
        "longrope scales documents by the longest": not chain.in_turn and row > (chain.positions.scaled_from or row),
        "rows are assigned to devices by their speeds": bool(settings.device_speeds),
    }
    why_one = next((reason for reason, applies in reasons.items() if applies), "")
    return Filling.of(kind, rows, row, topology.world_size // ranks, positions=positions, why_one=why_one)


def _exact(chain: Chain, dtype: torch.dtype, master: torch.dtype) -> int:
    """Return the bytes of a frozen weight's exact value in host memory.

    0 if the dtype of the run represents the weight exactly, so that no such copy is kept."""
    stored = getattr(chain.config, "dtype", None) or master
    return master.itemsize if torch.promote_types(stored, dtype) != dtype else 0


def system_of(machine: Machine, here: torch.device) -> tuple[int, int]:
    """Return (bytes of driver and libraries on a device, bytes of each communicator).

    On a CPU the first is the memory of this process, which has loaded the libraries, plus what its threads will take.
    On a GPU it is a usual value, or the memory in use outside torch's allocator if this is more and this process has
    such a GPU. It contains the communicator of all processes, which every run needs besides the communicators of its
    groups. The second is 0 on CPUs."""
    if machine.device.name == "CPU":
        return resident_memory() + THREADS_BYTES[machine.world_size > 1], 0
    each = machine.device.communicator_bytes or COMMUNICATOR_BYTES
    used, usual = 0, DRIVER_BYTES + (each if machine.world_size > 1 else 0)
    if here.type == "cuda" and device_name(here) == machine.device.name:
        used = taken_outside_torch(here)
    return max(usual, used), each


def device_name(here: torch.device) -> str:
    """Return the device's name as topology files spell it."""
    return torch.cuda.get_device_name(here) if here.type == "cuda" else "CPU"


def _layer_tokens(chain: Chain, asked: Asked, devices: int) -> float:
    """Return the tokens that one device computes in the run, times layers; 0 if the steps are not known.

    Measuring may take a small share of the run, and its work grows with layers and tokens on any device."""
    row = mean_size(asked.micro_batches).tokens / asked.micro_batch if asked.micro_batches else asked.row
    return asked.steps * asked.global_batch * row * chain.spec.num_layers / devices


def _profile(
    chain: Chain, machine: Machine, how: str, row: int, tokens: int, peak: float | None, measuring: dict[str, Any]
) -> Profile:
    """Measure the profile on this process's device, or estimate it, and return it.

    ``auto`` measures if this device has the name of the machine's devices and no ``flops`` are given.

    Args:
        chain: chain of the model.
        machine: nodes, links and devices.
        how: ``auto``, ``measure`` or ``estimate``.
        row: tokens of the longest row to measure.
        tokens: tokens of a micro-batch.
        peak: peak operations per second of the device, or None.
        measuring: further arguments of ``measure``.

    Raises:
        UserError: ``how`` is unknown, or an estimate is needed and the peak is not known.
    """
    if how not in ("auto", "measure", "estimate"):
        raise UserError("--profile", how, "auto, measure or estimate")
    here = measuring["device"]
    same = device_name(here) == machine.device.name
    factor = 1.0 if measuring["packed"] else _flash_factor(chain, machine, measuring["row"])
    if how == "measure" or (how == "auto" and same and not machine.device.flops):
        most = min(MEASURED_TOKENS["cpu" if here.type == "cpu" else "cuda"], longest_allowed(chain.config))
        return measure(chain, tokens=min(row, most), **measuring).with_flash(factor, estimated=False)
    if peak is None:
        known = f"a device whose peak is known: {', '.join(KNOWN_DEVICES)}, in bfloat16 (--dtype)"
        expected = f"{known}; or a file with `device: {{flops: ...}}`, or --profile measure"
        raise UserError("--device-name", machine.device.name, expected)
    dtype, chunk = measuring["dtype"], min(measuring["chunk_tokens"], tokens)
    profile = estimate(chain, dtype=dtype, flops=peak, chunk_tokens=chunk, optimizer=measuring["optimizer"])
    profile = profile.with_flash(factor, estimated=True)
    if (sizes := measuring["chunks"](profile)) is None:
        return replace(profile, in_chunks=())
    why = Bench(chain, torch.device("meta"), dtype, chunk).why_whole()
    return replace(
        profile, in_chunks=profile.in_chunks if sizes else (), cuts=not (why or profile.why_not_shares), why_whole=why
    )
