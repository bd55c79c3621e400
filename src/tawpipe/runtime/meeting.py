"""A corner of torchrun's store that no earlier start has used.

An agent of torchrun keeps one store for all starts of its processes, and torch puts the addresses of a group's members
under the same names each time. After a restart a member can therefore read the address of a process that is dead and
fail to connect, or wait for it (pytorch issues 135712, 167288). Counting starts does not help: agents that join later
count otherwise. So the processes agree on a name of their own first, in the store itself, although whatever they read
there may be left from earlier:

* every rank writes a number drawn for this start under its name (``hello``);
* rank 0 reads those of all ranks, as often as one changes, and offers them with a number drawn for the offer;
* a rank that finds its own number in an offer agrees to it (``yes``, under the number of the offer);
* when all have agreed to its offer, rank 0 says so (``go``, likewise).

An offer of an earlier start holds other numbers, and agreement to it is under another name. What NCCL's groups tell
each other through the store besides, past any name, rank 0 takes back: an error of an earlier start would end this one.
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
"""Seconds between two looks of a rank, for 64 of them; more wait longer, as one store answers all."""
SIGNALS = ("exception_dump", "remote_error")
"""Keys of torch's ProcessGroupNCCL, outside of any group's prefix: somebody has failed, so all end."""


def agree_on_name(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that the ranks of this start, and no others, have got; call on all of them.

    Args:
        store: a ``torch.distributed.Store`` that all of them share, used before or not.

    Raises:
        RunError: not all of them came in time.
    """
    mine = secrets.token_hex(8)
    store.set(f"{PREFIX}/hello/{rank}", mine)
    end = time.monotonic() + timeout.total_seconds()
    offered: list[str] = []
    name = ""
    while time.monotonic() < end:
        if rank == 0:
            numbers = _numbers(store, world_size)
            if len(numbers) == world_size and numbers[0] == mine and numbers != offered:
                offered, name = numbers, secrets.token_hex(8)
                store.set(f"{PREFIX}/offer", json.dumps([name, numbers]))
            if name and store.check([f"{PREFIX}/yes/{name}/{r}" for r in range(1, world_size)]):
                for signal in SIGNALS:
                    store.delete_key(signal)
                store.set(f"{PREFIX}/go/{name}", "go")
                return name
        elif store.check([f"{PREFIX}/offer"]):
            offered_name, numbers = json.loads(store.get(f"{PREFIX}/offer"))
            if numbers[rank : rank + 1] == [mine]:
                if offered_name != name:
                    name = offered_name
                    store.set(f"{PREFIX}/yes/{name}/{rank}", "yes")
                if store.check([f"{PREFIX}/go/{name}"]):
                    return name
        time.sleep(LOOK_S * max(1, world_size / 64))
    raise RunError(f"rank {rank}: fewer than {world_size} processes connected within {timeout.total_seconds():.0f} s")


def _numbers(store: Any, world_size: int) -> list[str]:
    """The numbers that all ranks have written last; none if some have not."""
    names = [f"{PREFIX}/hello/{rank}" for rank in range(world_size)]
    return [value.decode() for value in store.multi_get(names)] if store.check(names) else []
