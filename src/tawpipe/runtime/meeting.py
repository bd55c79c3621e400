"""Agreement of all ranks on a prefix in torchrun's store that no earlier start of the processes has used.

An agent of torchrun keeps one store for all starts of its processes, and torch stores the addresses of a group's
members
under equal names each time. After a restart a member can therefore read the address of a dead process and fail to
connect, or wait for it (pytorch issues 135712, 167288). Counting the starts does not help: agents that join later have
other counts. So the ranks first agree on a new name, through the store itself, although the store may hold values from
earlier starts:

* every rank writes a random number, drawn for this start, under its own key (``hello``);
* rank 0 reads the numbers of all ranks, again after each change, and publishes them with a random name (``offer``);
* a rank that finds its own number in an offer agrees to it (``yes``, under the offered name);
* when all ranks have agreed to its offer, rank 0 confirms it (``go``, under the offered name).

An offer of an earlier start holds other numbers, and agreement to it is stored under another name. NCCL also writes
failure signals into the store, outside any prefix. Rank 0 deletes them, as a signal of an earlier start would end this
one.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from typing import Any

from tawpipe.errors import RunError

PREFIX = "tawpipe/start"
LOOK_S = 0.02
"""Seconds between two polls of a rank, for up to 64 ranks. More ranks poll less often, as one store answers all."""
SIGNALS = ("exception_dump", "remote_error")
"""Keys by which torch's ProcessGroupNCCL reports a failed rank, outside any group's prefix. All ranks then end."""


def agree_on_name(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a random name that all ranks of this start, and no earlier start, agree on. Call on all ranks.

    Args:
        store: A ``torch.distributed.Store`` shared by all ranks, new or used before.
        rank: This rank.
        world_size: Number of ranks.
        timeout: Largest waiting time.

    Raises:
        RunError: If not all ranks agreed in time.
    """
    number = secrets.token_hex(8)
    store.set(f"{PREFIX}/hello/{rank}", number)
    end = time.monotonic() + timeout.total_seconds()
    offered: list[str] = []
    name = ""
    while time.monotonic() < end:
        if rank == 0:
            numbers = _numbers(store, world_size)
            if len(numbers) == world_size and numbers[0] == number and numbers != offered:
                offered, name = numbers, secrets.token_hex(8)
                store.set(f"{PREFIX}/offer", json.dumps([name, numbers]))
            if name and store.check([f"{PREFIX}/yes/{name}/{r}" for r in range(1, world_size)]):
                for signal in SIGNALS:
                    store.delete_key(signal)
                store.set(f"{PREFIX}/go/{name}", "go")
                return name
        elif store.check([f"{PREFIX}/offer"]):
            offered_name, numbers = json.loads(store.get(f"{PREFIX}/offer"))
            if numbers[rank : rank + 1] == [number]:
                if offered_name != name:
                    name = offered_name
                    store.set(f"{PREFIX}/yes/{name}/{rank}", "yes")
                if store.check([f"{PREFIX}/go/{name}"]):
                    return name
        time.sleep(LOOK_S * max(1, world_size / 64))
    raise RunError(f"rank {rank}: fewer than {world_size} processes connected within {timeout.total_seconds():.0f} s")


def _numbers(store: Any, world_size: int) -> list[str]:
    """Return the numbers that the ranks have written last, by rank; an empty list if a rank has not written yet."""
    names = [f"{PREFIX}/hello/{rank}" for rank in range(world_size)]
    return [value.decode() for value in store.multi_get(names)] if store.check(names) else []
