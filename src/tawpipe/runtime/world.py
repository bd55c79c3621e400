"""Processes of a run: joins them, finds the topology, and picks the device.

All input is read from torchrun's variables. A process that no launcher has started is a world of one rank.
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
"""Process group of all ranks, if this module made it."""
set_group_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
"""Function that changes the timeout of a group's operations; public from torch 2.15."""
LEAST_CONNECTIONS = 12
"""Number of streams, of lanes and of NCCL, that run concurrently."""
DEVICE_KIND = "tawpipe/device"
"""Store key under which rank 0 writes the type of its device."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun: its agent has opened the store at MASTER_ADDR and MASTER_PORT, and keeps it over restarts."""


@dataclass(frozen=True)
class World:
    """The processes of a run, as seen by this rank.

    Args:
        nodes: Nodes of the run, with virtual nodes if the user asked for them.
        rank: This rank.
        device: Device of this rank.
        group: Group of all ranks for CPU tensors (also for CUDA tensors if the device is a GPU); None in a single
            process.
        patient: Group of all ranks for waits as long as tokenising a corpus; None in a single process.
        launched: Nodes as the launcher numbers them; ``nodes`` may group the processes differently.
        far_bytes_per_s: Measured rate of one device's share of the link between nodes, in bytes per second; 0 if not
            measured.
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
        """Processes grouped by physical machine: all processes of one fail together."""
        return self.launched or self.nodes

    @cached_property
    def topology(self) -> Topology:
        """Nodes as schedules use them: ``nodes`` cut into groups of equal size."""
        return self.nodes.evened()

    @property
    def size(self) -> int:
        return self.nodes.world_size

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's ``values`` (a CPU tensor) into ``values`` on all ranks, and return it. Call on all ranks."""
        if self.group is not None:
            dist.broadcast(values, 0, group=self.group)
        return values

    def gather_numbers(self, value: float) -> list[float]:
        """Return the ``value`` of every rank, in rank order, on all ranks. Call on all ranks."""
        if self.group is None:
            return [value] * self.size
        local = torch.tensor([value], dtype=torch.float64, device="cpu")
        everyone = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(everyone, local, group=self.group)
        return [float(number) for number in everyone]

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's ``text`` on all ranks. Call on all ranks."""
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
        """Call ``make`` on rank 0 only, and return its text on all ranks, which wait without a time limit.

        Call on all ranks.

        Raises:
            UserError: On all ranks, if ``make`` raised one on rank 0.
        """
        return self.broadcast_text(self.of_rank_0(make, ""))

    def of_rank_0(self, make: Callable[[], Value], elsewhere: Value) -> Value:
        """Call ``make`` on rank 0 and return its value there; return ``elsewhere`` on other ranks.

        Call on all ranks. They wait for rank 0 without a time limit.

        Raises:
            UserError: On all ranks, if ``make`` raised one on rank 0.
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
        """Return the ``text`` of every rank, in rank order, on all ranks. Call on all ranks."""
        if self.group is None:
            return [text]
        data = text.encode()
        longest = int(max(self.gather_numbers(float(len(data)))))
        if not longest:
            return [""] * self.size
        local = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(everyone, local, group=self.group)
        return [padded.numpy().tobytes().rstrip(b"\0").decode() for padded in everyone]

    def together(self, act: Callable[[], Any], *, acts: bool = True, otherwise: str = "{}") -> list[Any]:
        """Call ``act`` on every rank, and return the results (JSON values) of all ranks, in rank order, on all ranks.

        Call on all ranks.

        Args:
            act: Function to call.
            acts: If False, this rank does not call ``act``, and its result is None.
            otherwise: Format string for the message of an error that is not a UserError.

        Raises:
            RunError: On all ranks, if ``act`` failed on some rank, with the message of the first such rank.
        """
        value, problem, cause = None, "", None
        try:
            value = act() if acts else None
        except UserError as error:
            problem, cause = error.expected, error
        except Exception as error:  # any error: this rank must still report it to the other ranks
            problem, cause = otherwise.format(in_words(error)), error
        everyone = [json.loads(text) for text in self.gather_texts(json.dumps([problem, value]))]
        failed = [rank for rank, (problem, _) in enumerate(everyone) if problem]
        if failed:
            where = f"rank {failed[0]}: " if len(failed) < self.size else ""
            raise RunError(where + everyone[failed[0]][0]) from cause
        return [value for _, value in everyone]

    def with_group(self, name: str, timeout: timedelta) -> World:
        """Return a copy of this world with a new gloo group of all ranks, for use in another thread. Call on all ranks.

        Returns this world itself in a single process.

        Args:
            name: Description of the group.
            timeout: Time limit of the group's operations.
        """
        if self.group is None:
            return self
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc=name)
        assert isinstance(group, dist.ProcessGroup)
        return replace(self, group=group)

    def drop_group(self, other: World) -> None:
        """Destroy this world's group if ``other.with_group`` made it.

        Call on all ranks, with no operation under way.
        """
        if self.group is not None and self.group is not other.group:
            dist.destroy_process_group(self.group)

    def set_timeout(self, limit: timedelta) -> None:
        """Set the time limit of this world's group for later operations, such as ``barrier`` and the gathers."""
        if self.group is not None:
            set_group_timeout(limit, self.group)

    def store(self) -> Any:
        """Return a new connection to the store of the processes, with a key prefix for this world's group."""
        assert self.group is not None
        store: Any = distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore(f"tawpipe {self.group.group_name}", store.clone())

    def require(self, ok: bool, setting: str, value: object, expected: str) -> None:
        """Raise an equal UserError on all ranks if ``ok`` is False on any rank. Call on all ranks."""
        bad = [rank for rank, good in enumerate(self.gather_numbers(float(ok))) if not good]
        if bad:
            where = f"; not so on rank {', '.join(map(str, bad))} of {self.size}" if self.size > 1 else ""
            raise UserError(setting, value, expected + where)

    def wait_patiently(self) -> None:
        """Wait up to seven days until all ranks have called this. Returns at once in a single process."""
        if self.patient is not None:
            dist.all_reduce(torch.zeros(1, device="cpu"), group=self.patient)

    def leave(self) -> None:
        """Wait until all ranks have called this, then destroy all process groups. Does nothing in a single process.

        Do not call it after an error: it would wait for failed ranks."""
        if self.group is not None:
            self.barrier()
            _joined.clear()
            dist.destroy_process_group()

    def meet(self, limit: timedelta) -> bool:
        """Wait until all ranks have called this, at most ``limit``; return True if they have.

        A rank that is inside ``wait_patiently`` instead does not count.
        """
        group, count = self.patient or self.group, torch.ones(1, device="cpu")
        if group is not None:
            try:
                # called on the group itself: the script may have destroyed the entry in ``dist``
                group.allreduce([count]).wait(limit)
            except RuntimeError:
                return False
        return group is None or int(count) == self.size  # a rank in ``wait_patiently`` adds 0

    def barrier(self) -> None:
        """Wait until all ranks have called this, with an all-reduce on the CPU. Returns at once in a single process."""
        if self.group is not None:
            dist.all_reduce(torch.zeros(1, device="cpu"), group=self.group)


def in_words(error: Exception) -> str:
    """Return an error as text for a message.

    An OSError gives its reason and file name, a RunError its message, any other error its type and message."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of this process, and make it the current CUDA device if it is a GPU.

    With ``auto`` the result is the CPU if there is no GPU or CUDA cannot start, with a warning in the second case.

    Args:
        wanted: ``auto``, ``cpu`` or ``cuda``.
        local_rank: Rank of this process on its node.

    Raises:
        UserError: If ``wanted`` is another text, ``cuda`` is not usable, there are more local processes than GPUs, or
            other processes have filled the GPU.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError("device", wanted, "auto, cpu or cuda")
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if count == 0:
        if wanted == "cuda":
            raise UserError("device", wanted, "this machine has no CUDA device that torch can use; cpu or auto works")
        return torch.device("cpu")
    # If the launcher shows each process only one device, its index is 0.
    index = 0 if count == 1 else local_rank
    if index >= count or (count == 1 and local_rank > 0 and "CUDA_VISIBLE_DEVICES" not in os.environ):
        raise UserError(
            "local_rank", f"local rank {local_rank}", f"at most one process for each of the {count} devices"
        )
    try:
        torch.cuda.set_device(index)
        # The warning appears if the first work of autograd's thread is a matrix product. It is harmless: torch uses the
        # only context.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    except (RuntimeError, AssertionError) as error:  # mostly a driver that is too old for this torch
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
    """Log a warning if CUDA_DEVICE_MAX_CONNECTIONS is below ``LEAST_CONNECTIONS``.

    Streams would then share connections and wait for each other.
    """
    text = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if text.isdecimal() and int(text) < LEAST_CONNECTIONS:
        logger.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=%s: streams share connections, so that transfers wait for computing; at least "
            "%s, or unset for 32",
            text,
            LEAST_CONNECTIONS,
        )


def warn_of_late_settings(added: Mapping[str, str]) -> None:
    """Log a warning if torch's allocator lacks the settings that this process has ``added`` to the environment.

    The allocator reads its variable once. Its settings are read back where torch can do so."""
    wanted, read = added.get("PYTORCH_ALLOC_CONF", ""), getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    settings = read() if read is not None else "" if torch.cuda.is_initialized() else wanted
    if wanted not in settings:
        logger.warning(
            "PYTORCH_ALLOC_CONF=%s is too late, as torch's allocator has read its settings: memory may fragment. Set "
            "it before the start, or call tawpipe.connect() before anything is on a GPU",
            wanted,
        )


def connect(*, nodes: int | None = None, device: str = "auto", timeout: timedelta = timedelta(minutes=10)) -> World:
    """Join the processes that the launcher started, pick this process's device, and return the world.

    Call on all ranks. Sets the environment variables for CUDA that this library needs, and the current CUDA device.
    Makes torch's process group, unless it exists, and a second group for long waits. All ranks exchange their node and
    local rank. In a process that no launcher has started, or alone, no group is made.

    Args:
        nodes: Number of virtual nodes to group the processes into; None for the launcher's nodes.
        device: ``auto``, ``cpu`` or ``cuda``.
        timeout: Time limit for joining and for control messages.

    Raises:
        UserError: If the launcher's variables contradict each other, ``nodes`` does not divide the number of processes,
            or ``device`` cannot be used.
    """
    launch = LaunchEnvironment.read(os.environ)
    added = missing_cuda_variables()
    if torch.cuda.is_initialized() and (late := [name for name in added if name != "PYTORCH_ALLOC_CONF"]):
        logger.warning("CUDA has started without %s: call tawpipe.connect() before anything is on a GPU", late)
    set_cuda_variables()
    if device != "cpu" and torch.cuda.device_count():
        warn_of_few_connections()
        warn_of_late_settings(added)
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
    place = torch.tensor([launch.group_rank, launch.local_rank], device="cpu")
    everyone = [torch.empty_like(place) for _ in range(launch.world_size)]
    dist.all_gather(everyone, place)
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
    """Raise UserError if the device type differs from rank 0's, before a group would wait for a rank that never joins.

    Args:
        store: A ``torch.distributed.Store`` of all ranks.
        rank: This rank. Rank 0 writes its device type into the store. Other ranks wait for this entry and compare.
        device: Device of this process.

    Raises:
        UserError: If the types differ, for example because the driver of one machine is too old.
    """
    if rank == 0:
        store.set(DEVICE_KIND, device.type)
    elif (kind := store.get(DEVICE_KIND).decode()) != device.type:
        expected = f"a {kind}, as on rank 0: a driver and a torch that go together on every machine, or --device cpu"
        raise UserError("device", f"a {device.type} on rank {rank}", expected)


def joined_by_us() -> bool:
    """Return True if the current process group was made by this module and not by the script."""
    return dist.is_initialized() and dist.group.WORLD in _joined


def _join(launch: LaunchEnvironment, device: torch.device, timeout: timedelta) -> None:
    """Make torch's process group of all ranks, and enable NCCL's flight recorder for it. Waits for all ranks.

    After the local launcher, the store listens on the loopback address only, which torch's own store does not. After
    torchrun with an agent's store, the ranks first agree on a prefix (``agree_on_name``). Except after the local
    launcher, UserError is raised if a rank's device type differs from rank 0's."""
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
