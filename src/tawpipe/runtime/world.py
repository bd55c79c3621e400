"""The processes of a run: joins them, finds the topology, picks the device.

Everything comes from torchrun's variables; a process that nobody launched is a world of one.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tawpipe.environment import (
    LOOPBACK,
    LaunchEnvironment,
    missing_cuda_variables,
    set_cuda_variables,
    started_by_local_launcher,
)
from tawpipe.errors import RunError, UserError
from tawpipe.runtime.meeting import agree_on_name
from tawpipe.runtime.watch.watchdog import keep_record
from tawpipe.topology import Topology

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
_joined: list[Any] = []
"""The group of all processes, if it was made here."""
set_group_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
"""Changes how long operations of a group may take; public from torch 2.15 on."""
LEAST_CONNECTIONS = 12
"""Streams of lanes and of NCCL that run beside each other."""
DEVICE_KIND = "tawpipe/device"
"""Key under which rank 0 says what its device is."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun: its agent has opened the store at MASTER_ADDR and MASTER_PORT, and keeps it over restarts."""


@dataclass(frozen=True)
class World:
    """This process among the others.

    Args:
        nodes: the nodes of the run; where they are virtual, as the user wants them.
        group: all ranks, for CPU tensors (and for CUDA tensors where the device is one); None in a single process.
        patient: all ranks, for waits that may take as long as tokenising a corpus; None in a single process.
        launched: the nodes as the launcher numbers them, where ``nodes`` may group their processes otherwise.
        far_bytes_per_s: of a device's share of its node's link to the others, as it was measured; 0 where it was not.
    """

    nodes: Topology
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    patient: dist.ProcessGroup | None = None
    launched: Topology | None = None
    far_bytes_per_s: float = 0.0

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.nodes}, {self.device})"

    @property
    def machines(self) -> Topology:
        """The processes by the machine whose loss they do not survive."""
        return self.launched or self.nodes

    @cached_property
    def topology(self) -> Topology:
        """What schedules take for nodes, all of them equally large."""
        return self.nodes.evened()

    @property
    def size(self) -> int:
        return self.nodes.world_size

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``values`` (a CPU tensor) on all ranks, in place."""
        if self.group is not None:
            dist.broadcast(values, 0, group=self.group)
        return values

    def gather_numbers(self, value: float) -> list[float]:
        """One number of every rank, in their order, on all ranks."""
        if self.group is None:
            return [value] * self.size
        mine = torch.tensor([value], dtype=torch.float64, device="cpu")
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.group)
        return [float(number) for number in everyone]

    def broadcast_text(self, text: str) -> str:
        """Rank 0's ``text`` on all ranks."""
        if self.group is None:
            return text
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        length = self.broadcast(torch.tensor([data.numel()], device="cpu"))
        if self.rank != 0:
            data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        if int(length):
            self.broadcast(data)
        return bytes(data.tolist()).decode()

    def text_of_rank_0(self, make: Callable[[], str]) -> str:
        """The text that ``make`` gives on rank 0, where it may take its time, on all ranks; call on all ranks.

        Raises:
            UserError: that of rank 0; on all ranks.
        """
        return self.broadcast_text(self.of_rank_0(make, ""))

    def of_rank_0(self, make: Callable[[], Value], elsewhere: Value) -> Value:
        """The value that ``make`` gives on rank 0, which may take its time, and ``elsewhere`` on other ranks; call on
        all ranks.

        Raises:
            UserError: that of rank 0; on all ranks.
        """
        value, refusal = elsewhere, None
        if self.rank == 0:
            try:
                value = make()
            except UserError as error:
                refusal = [error.setting, str(error.value), error.expected]
        self.wait_patiently()
        if refusal := json.loads(self.broadcast_text(json.dumps(refusal))):
            raise UserError(*refusal)
        return value

    def gather_texts(self, text: str) -> list[str]:
        """A text of every rank, in their order, on all ranks."""
        if self.group is None:
            return [text]
        data = text.encode()
        longest = int(max(self.gather_numbers(float(len(data)))))
        if not longest:
            return [""] * self.size
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.group)
        return [padded.numpy().tobytes().rstrip(b"\0").decode() for padded in everyone]

    def together(self, act: Callable[[], Any], *, acts: bool = True, otherwise: str = "{}") -> list[Any]:
        """The results of ``act`` on every rank (JSON values), in their order, on all ranks; call on all ranks.

        Args:
            acts: whether this rank does; if not, it returns None.
            otherwise: how the words of an error that is no UserError are put.

        Raises:
            RunError: it has failed on some rank; on all ranks, with the words of the first.
        """
        value, problem, cause = None, "", None
        try:
            value = act() if acts else None
        except UserError as error:
            problem, cause = error.expected, error
        except Exception as error:  # whatever it is, this rank goes on to tell the others
            problem, cause = otherwise.format(in_words(error)), error
        everyone = [json.loads(text) for text in self.gather_texts(json.dumps([problem, value]))]
        failed = [rank for rank, (problem, _) in enumerate(everyone) if problem]
        if failed:
            where = f"rank {failed[0]}: " if len(failed) < self.size else ""
            raise RunError(where + everyone[failed[0]][0]) from cause
        return [value for _, value in everyone]

    def with_group(self, name: str, timeout: timedelta) -> World:
        """The same processes with a group of their own, for a thread of its own; call on all ranks."""
        if self.group is None:
            return self
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc=name)
        assert isinstance(group, dist.ProcessGroup)
        return replace(self, group=group)

    def drop_group(self, other: World) -> None:
        """Leave the group that ``other.with_group`` made; with nothing under way, on all ranks."""
        if self.group is not None and self.group is not other.group:
            dist.destroy_process_group(self.group)

    def set_timeout(self, limit: timedelta) -> None:
        """Limit the time that the others may take for a control message from now on."""
        if self.group is not None:
            set_group_timeout(limit, self.group)

    def store(self) -> Any:
        """A connection of its own to the store in which the processes met, with keys of this world's group."""
        assert self.group is not None
        store: Any = distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore(f"tawpipe {self.group.group_name}", store.clone())

    def require(self, ok: bool, setting: str, value: object, expected: str) -> None:
        """Raise the same UserError on all ranks if ``ok`` is False on any; call on all ranks."""
        bad = [rank for rank, good in enumerate(self.gather_numbers(float(ok))) if not good]
        if bad:
            where = f"; not so on rank {', '.join(map(str, bad))} of {self.size}" if self.size > 1 else ""
            raise UserError(setting, value, expected + where)

    def wait_patiently(self) -> None:
        """A barrier without a time limit that anybody would meet."""
        if self.patient is not None:
            dist.all_reduce(torch.zeros(1, device="cpu"), group=self.patient)

    def leave(self) -> None:
        """Say goodbye, after everything has ended well. On the error path nobody should: it waits."""
        if self.group is not None:
            self.barrier()
            _joined.clear()
            dist.destroy_process_group()

    def meet(self, limit: timedelta) -> bool:
        """True if all ranks come here within the time; a rank that waits for the others elsewhere does not."""
        group, count = self.patient or self.group, torch.ones(1, device="cpu")
        if group is not None:
            try:
                group.allreduce([count]).wait(limit)  # the script may have destroyed what ``dist`` knows of the group
            except RuntimeError:
                return False
        return group is None or int(count) == self.size  # who waits patiently adds nothing

    def barrier(self) -> None:
        """Wait for all ranks, on the CPU."""
        if self.group is not None:
            dist.all_reduce(torch.zeros(1, device="cpu"), group=self.group)


def in_words(error: Exception) -> str:
    """An error in one line that says where it happened, if the error knows."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` to this process's device.

    Raises:
        UserError: ``cuda`` where there is none, or more local processes than devices; or one that others have filled.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError("device", wanted, "auto, cpu or cuda")
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if count == 0:
        if wanted == "cuda":
            raise UserError("device", wanted, "this machine has no CUDA device that torch can use; cpu or auto works")
        return torch.device("cpu")
    # A launcher that shows every process one device numbers it 0.
    index = 0 if count == 1 else local_rank
    if index >= count or (count == 1 and local_rank > 0 and "CUDA_VISIBLE_DEVICES" not in os.environ):
        raise UserError(
            "local_rank", f"local rank {local_rank}", f"at most one process for each of the {count} devices"
        )
    try:
        torch.cuda.set_device(index)
        # Where the first work of autograd's thread is a matrix product; torch takes the only context that there is.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    except (RuntimeError, AssertionError) as error:  # above all a driver that is too old for this torch
        problem = f"torch {torch.__version__} cannot start CUDA here: {str(error).splitlines()[0]}"
        if "out of memory" in problem:
            expected = f"a device with room beside its other processes, which nvidia-smi shows, or cpu ({problem})"
            raise UserError("device", wanted, expected) from error
        if wanted == "cuda":
            raise UserError("device", wanted, f"a driver and a torch that go together, or cpu ({problem})") from error
        logger.warning("%s. The CPU is used instead", problem)
        return torch.device("cpu")
    return torch.device("cuda", index)


def warn_of_few_connections(environ: Mapping[str, str] = os.environ) -> None:
    """Say so if streams will wait for each other, because a user has set fewer connections than there are lanes."""
    text = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if text.isdecimal() and int(text) < LEAST_CONNECTIONS:
        logger.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=%s: streams share connections, so that transfers wait for computing; at least "
            "%s, or unset for 32",
            text,
            LEAST_CONNECTIONS,
        )


def connect(*, nodes: int | None = None, device: str = "auto", timeout: timedelta = timedelta(minutes=10)) -> World:
    """Join the other processes that the launcher started.

    Args:
        nodes: regroup the processes into that many virtual nodes instead of the launcher's.
        device: ``auto``, ``cpu`` or ``cuda``.
        timeout: for joining and for control messages.

    Raises:
        UserError: the launcher's variables contradict themselves, or ``nodes`` does not divide the processes.
    """
    launch = LaunchEnvironment.read(os.environ)
    if torch.cuda.is_initialized() and (late := list(missing_cuda_variables())):
        logger.warning("CUDA has started without %s: call tawpipe.connect() before anything is on a GPU", late)
    set_cuda_variables()
    if device != "cpu" and torch.cuda.device_count():
        warn_of_few_connections()
    if launch is None:
        picked = pick_device(device, 0)
        if nodes not in (None, 1):
            raise UserError("nodes", nodes, "1, because this is a single process")
        return World(Topology.grid(1, 1), 0, picked, None)
    picked = pick_device(device, launch.local_rank)
    if launch.world_size == 1:
        return World(Topology.grid(1, 1), 0, picked, None)
    if not dist.is_initialized():
        _join(launch, picked, timeout)
        _joined.append(dist.group.WORLD)
    mine = torch.tensor([launch.group_rank, launch.local_rank], device="cpu")
    everyone = [torch.empty_like(mine) for _ in range(launch.world_size)]
    dist.all_gather(everyone, mine)
    machines = Topology.from_group_ranks([(int(a), int(b)) for a, b in everyone])
    if nodes is None:
        topology = machines
    elif nodes < 1 or launch.world_size % nodes:
        raise UserError("nodes", nodes, f"a divisor of the {launch.world_size} processes")
    else:
        topology = Topology.grid(nodes, launch.world_size // nodes)
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7), group_desc="patient")
    assert isinstance(patient, dist.ProcessGroup)
    return World(topology, launch.rank, picked, dist.group.WORLD, patient, machines)


def require_same_kind(store: Any, rank: int, device: torch.device) -> None:
    """Compare the kind of this process's device with rank 0's, before a group waits for one that never joins it.

    Args:
        store: a ``torch.distributed.Store`` of all ranks.

    Raises:
        UserError: it is another one, as where one machine's driver is too old.
    """
    if rank == 0:
        store.set(DEVICE_KIND, device.type)
    elif (kind := store.get(DEVICE_KIND).decode()) != device.type:
        expected = f"a {kind}, as on rank 0: a driver and a torch that go together on every machine, or --device cpu"
        raise UserError("device", f"a {device.type} on rank {rank}", expected)


def joined_by_us() -> bool:
    """True if the processes' present group was made here and not by the script."""
    return dist.is_initialized() and dist.group.WORLD in _joined


def _join(launch: LaunchEnvironment, device: torch.device, timeout: timedelta) -> None:
    """The process group of all. On one machine its store listens to this machine alone, which torch's own does not."""
    keep_record()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    port, listening = os.environ.get("MASTER_PORT", ""), None
    if not started_by_local_launcher():
        if os.environ.get(AGENT_STORE) != "True" or not port.isdecimal():
            meetings = dist.rendezvous("env://", timeout=timeout)  # pyright: ignore[reportPrivateImportUsage]
            meeting, rank, world_size = next(meetings)
            meeting.set_timeout(timeout)
            require_same_kind(meeting, rank, device)
            store = dist.PrefixStore("default_pg", meeting)  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(
                backend, timeout=timeout, device_id=device_id, store=store, rank=rank, world_size=world_size
            )
            return
        agents = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            os.environ["MASTER_ADDR"], int(port), launch.world_size, False, timeout
        )
        name = agree_on_name(agents, launch.rank, launch.world_size, timeout)
        store = dist.PrefixStore(name, agents)  # pyright: ignore[reportPrivateImportUsage]
        require_same_kind(store, launch.rank, device)
        dist.init_process_group(
            backend, timeout=timeout, device_id=device_id, store=store, rank=launch.rank, world_size=launch.world_size
        )
        return
    if launch.rank == 0:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, int(port)))
        listening.listen(launch.world_size + 16)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        LOOPBACK,
        int(port),
        launch.world_size,
        launch.rank == 0,
        timeout,
        master_listen_fd=None if listening is None else listening.detach(),
    )
    dist.init_process_group(
        backend, timeout=timeout, device_id=device_id, store=store, rank=launch.rank, world_size=launch.world_size
    )
