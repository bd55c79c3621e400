"""Worker processes that are started once and run one test case after another, as a cluster of any shape."""

from __future__ import annotations

import gc
import importlib
import multiprocessing as mp
import os
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

SIZE = 6
PRELOADED = ["torch", "transformers.models.llama.modeling_llama", "tawpipe.train.run"]


def forking() -> ForkServerContext:
    """Processes are forked from one that has imported what takes seconds: they are started now and then."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or each would start others, only to compile a few layers
    return context


class WorkerPool:
    """Runs ``module:function(world, **arguments)`` on nodes x local processes and returns every rank's result."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._count = 0
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(
        self, function: str, nodes: int, local: int, *, timeout_s: float = 240, leave: bool = False, **arguments: Any
    ) -> list[Any]:
        if not self._workers:
            self._start()
        self._count += 1
        size = nodes * local
        for rank in range(size):
            self._workers[rank][1].send((function, rank, nodes, local, f"case {self._count}", leave, arguments))
        results: list[Any] = [None] * size
        failures: list[str] = []
        for rank in range(size):
            connection = self._workers[rank][1]
            if not connection.poll(timeout_s if not failures else 5):
                failures.append(f"rank {rank}: no answer")
                continue
            try:
                ok, results[rank] = connection.recv()
            except EOFError:
                ok, results[rank] = False, "died"
            if not ok:
                failures.append(f"rank {rank}: {results[rank]}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def run_once(self, function: str, nodes: int, local: int, **arguments: Any) -> list[Any]:
        """Like ``run``, for a case that leaves its process groups broken: the workers end afterwards."""
        try:
            return self.run(function, nodes, local, leave=True, **arguments)
        finally:
            self.close()

    def _start(self) -> None:
        importlib.import_module("cases")  # see ``_work``
        # Processes find each other by a server, whose answer comes at once: a file they would look at every 10 ms.
        self._store = self._store or TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = forking()
        for _ in range(SIZE):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self._store.port), daemon=True)
            process.start()
            self._workers.append((process, mine))

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()


def _work(connection: Connection, port: int) -> None:
    import torch
    import torch.distributed as dist

    from tawpipe.pipeline import schedules
    from tawpipe.runtime.world import World
    from tawpipe.topology import Topology

    torch.set_num_threads(1)
    verify = schedules.verify
    server = TCPStore("127.0.0.1", port, is_master=False)
    importlib.import_module("cases")  # which has norms compute in their own dtype: alike here, whatever ran before
    gc.freeze()  # or the first collection would copy all that the processes share
    while True:
        try:
            function, rank, nodes, local, case, leave, arguments = connection.recv()
        except (EOFError, OSError):
            return
        size = nodes * local
        # All ranks have the same schedule, and prove it each for itself; here the first does so for all.
        schedules.verify = (lambda *_, **__: None) if rank else verify
        try:
            if size > 1:
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(case, server),  # pyright: ignore[reportPrivateImportUsage]
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=60),
                )
            group = dist.group.WORLD if size > 1 else None
            world = World(Topology.grid(nodes, local), rank, torch.device("cpu"), group)
            module, name = function.split(":")
            result = getattr(importlib.import_module(module), name)(world, **arguments)
            if size > 1 and not leave:
                dist.barrier()
                dist.destroy_process_group()
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
            os._exit(1)  # lanes may wait for peers for ever
